//! What a policy is trained on: token sequences in which the model's own tokens are marked.
//!
//! A sequence is the text of an episode as the model saw it, tokens of others (system, user, tools) and its own. Only its own
//! tokens carry a loss. They lie in [`Turn`]s; everything known of single tokens (log-probabilities, format marks) is kept for the
//! own tokens only, in the order of the turns, so that long observations cost four bytes a token.

use drillyard_schema::{EpisodeId, GroupId};

/// A stretch of the model's own tokens: one generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// The first own token, as a position in [`Sequence::ids`]; at least 1, since position 0 has nothing to be predicted from.
    pub start: u32,
    /// One past the last own token.
    pub end: u32,
    /// The episode's step.
    pub step: i32,
    /// The sampling temperature the behaviour log-probabilities belong to.
    pub temperature: f32,
}

impl Turn {
    /// Number of own tokens.
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// True for a turn without tokens.
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }
}

/// One training sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// The episode it comes from.
    pub episode: EpisodeId,
    /// The group of the episode, where advantages are relative to one; sequences of a group stay in one batch.
    pub group: Option<GroupId>,
    /// All token ids.
    pub ids: Vec<i32>,
    /// The model's own stretches, ascending, without overlap.
    pub turns: Vec<Turn>,
    /// Log-probabilities (nats) of the own tokens under the policy that sampled them; empty where unknown.
    pub behaviour: Vec<f32>,
    /// Log-probabilities of the own tokens under the reference policy; empty until they are computed.
    pub reference: Vec<f32>,
    /// For each own token whether it is call syntax rather than content; empty where unknown.
    pub format: Vec<bool>,
    /// The episode's advantage; 0 where the method has none.
    pub advantage: f32,
    /// Sampling weight, above 0.
    pub weight: f32,
    /// Whether the episode succeeded, where that is known.
    pub success: Option<bool>,
    /// Which combination of toolset, prompt, template and parser versions made it; see [`VersionKeys`].
    pub version: u32,
}

impl Sequence {
    /// Number of the model's own tokens.
    pub fn own_len(&self) -> usize {
        self.turns.iter().map(Turn::len).sum()
    }

    /// The positions of the own tokens, ascending.
    pub fn own_positions(&self) -> impl Iterator<Item = u32> + '_ {
        self.turns.iter().flat_map(|turn| turn.start..turn.end)
    }

    /// What is wrong with the sequence, if anything: turns out of order or range, or per-token lists of the wrong length.
    pub fn check(&self) -> Result<(), String> {
        let mut previous_end = 1;
        for turn in &self.turns {
            if turn.start < previous_end || turn.is_empty() || turn.end as usize > self.ids.len() {
                return Err(format!(
                    "turn {}..{} does not fit into {} ids after position {previous_end}",
                    turn.start,
                    turn.end,
                    self.ids.len()
                ));
            }
            previous_end = turn.end;
        }
        let own = self.own_len();
        for (name, len) in [
            ("behaviour log-probabilities", self.behaviour.len()),
            ("reference log-probabilities", self.reference.len()),
            ("format marks", self.format.len()),
        ] {
            if len != 0 && len != own {
                return Err(format!("{len} {name} for {own} own tokens"));
            }
        }
        if !self.weight.is_finite() || self.weight <= 0.0 || !self.advantage.is_finite() {
            return Err(format!(
                "weight {} and advantage {} must be finite, the weight above 0",
                self.weight, self.advantage
            ));
        }
        Ok(())
    }
}

/// Numbers the combinations of versions that occur, so that batches can be kept from mixing them.
#[derive(Debug, Default, Clone)]
pub struct VersionKeys {
    keys: std::collections::BTreeMap<Vec<String>, u32>,
}

impl VersionKeys {
    /// The number of a combination, in order of first appearance.
    pub fn number(&mut self, parts: &[&str]) -> u32 {
        let next = self.keys.len() as u32;
        *self
            .keys
            .entry(parts.iter().map(|&part| part.to_owned()).collect())
            .or_insert(next)
    }

    /// How many combinations there are.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// True when none was numbered.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A sequence of `len` ids (1, 2, 3, …) whose last `own` ones are the model's.
    pub fn sequence(name: &str, len: usize, own: usize) -> Sequence {
        Sequence {
            episode: name.into(),
            group: None,
            ids: (1..=len as i32).collect(),
            turns: vec![Turn {
                start: (len - own) as u32,
                end: len as u32,
                step: 0,
                temperature: 1.0,
            }],
            behaviour: vec![],
            reference: vec![],
            format: vec![],
            advantage: 0.0,
            weight: 1.0,
            success: None,
            version: 0,
        }
    }

    #[test]
    fn damaged_sequences_are_told() {
        assert!(sequence("a", 5, 2).check().is_ok());
        let mut first = sequence("a", 5, 5);
        assert!(first.check().is_err(), "nothing predicts the first token");
        first = sequence("a", 5, 2);
        first.behaviour = vec![-1.0];
        assert!(first.check().is_err());
        first.behaviour = vec![-1.0, -2.0];
        assert!(first.check().is_ok());
        first.turns.push(Turn {
            start: 4,
            end: 5,
            step: 1,
            temperature: 1.0,
        });
        assert!(first.check().is_err(), "overlapping turns");
        first = sequence("a", 5, 2);
        first.weight = 0.0;
        assert!(first.check().is_err());
    }

    #[test]
    fn version_keys_count_combinations() {
        let mut keys = VersionKeys::default();
        assert_eq!(keys.number(&["a", "b"]), 0);
        assert_eq!(keys.number(&["a", "c"]), 1);
        assert_eq!(keys.number(&["a", "b"]), 0);
        assert_eq!(keys.len(), 2);
    }
}
