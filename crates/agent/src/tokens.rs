//! Token bookkeeping: what exactly the model saw and said, step by step, without storing any id twice.
//!
//! The sequence after step k is its context and its generation. The next context keeps a prefix of that (all of it where the server
//! takes prior token ids) and adds ids; only the added ones are stored. So the sequence is rebuilt by: cut to `kept_prefix`, append
//! `context_ids`, append `generated_ids`.

use crate::policy::TurnReply;

/// What token ids mean: the same ids under others are another text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TokenHashes {
    /// Of the tokenizer.
    pub tokenizer: String,
    /// Of the chat template.
    pub template: String,
}

impl TokenHashes {
    /// What a reply says of its ids; none where the server says nothing.
    pub fn of(reply: &TurnReply) -> Option<Self> {
        Some(Self {
            tokenizer: reply.tokenizer_hash.clone()?,
            template: reply.template_hash.clone()?,
        })
    }
}

/// What one step adds to the sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Added {
    /// How many ids of the sequence before remain.
    pub kept_prefix: i32,
    /// The ids that follow them.
    pub context_ids: Vec<i32>,
}

/// The token sequence of an episode so far.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    /// Under which tokenizer and template the ids are those, where the server says.
    pub hashes: Option<TokenHashes>,
    ids: Vec<i32>,
    messages: usize,
    known: bool,
}

impl Sequence {
    /// Takes in a step's context and generation. `messages` counts the conversation with the reply. A step without ids breaks the
    /// chain: what follows is not a continuation of known ids.
    pub fn advance(
        &mut self,
        context: &[i32],
        generated: &[i32],
        messages: usize,
    ) -> Option<Added> {
        if context.is_empty() || generated.is_empty() {
            self.known = false;
            return None;
        }
        let kept = self
            .ids
            .iter()
            .zip(context)
            .take_while(|(a, b)| a == b)
            .count();
        let added = Added {
            kept_prefix: kept as i32,
            context_ids: context[kept..].to_vec(),
        };
        self.ids.truncate(kept);
        self.ids.extend_from_slice(&context[kept..]);
        self.ids.extend_from_slice(generated);
        self.messages = messages;
        self.known = true;
        Some(added)
    }

    /// Whether the ids mean something else to whoever gave this reply.
    pub fn is_foreign_to(&self, reply: &TurnReply) -> bool {
        let theirs = TokenHashes::of(reply);
        self.hashes.is_some() && theirs.is_some() && self.hashes != theirs
    }

    /// Nothing is known any more: the ids were another tokenizer's.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// The ids of the first messages of the conversation, and how many messages they are; none where unknown.
    pub fn prior(&self) -> Option<(&[i32], usize)> {
        self.known.then_some((self.ids.as_slice(), self.messages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_new_is_stored() {
        let mut sequence = Sequence::default();
        assert_eq!(sequence.prior(), None);
        let first = sequence.advance(&[1, 2, 3], &[4, 5], 3).unwrap();
        assert_eq!((first.kept_prefix, first.context_ids), (0, vec![1, 2, 3]));
        assert_eq!(sequence.prior(), Some(([1, 2, 3, 4, 5].as_slice(), 3)));
        let second = sequence.advance(&[1, 2, 3, 4, 5, 6], &[7], 5).unwrap();
        assert_eq!((second.kept_prefix, second.context_ids), (5, vec![6]));
    }

    #[test]
    fn a_context_that_was_tokenised_anew_keeps_the_common_prefix_only() {
        let mut sequence = Sequence::default();
        sequence.advance(&[1, 2], &[3, 4], 3);
        let added = sequence.advance(&[1, 2, 3, 9, 9], &[5], 5).unwrap();
        assert_eq!((added.kept_prefix, added.context_ids), (3, vec![9, 9]));
        assert_eq!(sequence.prior().unwrap().0, [1, 2, 3, 9, 9, 5]);
    }

    #[test]
    fn a_step_without_ids_breaks_the_chain() {
        let mut sequence = Sequence::default();
        sequence.advance(&[1], &[2], 3);
        assert_eq!(sequence.advance(&[], &[], 5), None);
        assert_eq!(sequence.prior(), None);
    }
}
