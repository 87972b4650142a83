//! Which generated tokens are call syntax, which are arguments, which are plain text.

use drillyard_render::Tokenizer;
use drillyard_schema::table::LossSpan;

use crate::policy::TurnReply;

/// The loss spans of a turn. Without a tokenizer the ids can't be told apart, and all count as action.
pub(crate) fn loss_spans(tokenizer: Option<&Tokenizer>, reply: &TurnReply) -> Vec<LossSpan> {
    match tokenizer {
        Some(tokenizer) => drillyard_render::spans(tokenizer, &reply.token_ids),
        None if reply.token_ids.is_empty() => Vec::new(),
        None => vec![LossSpan {
            start: 0,
            end: reply.token_ids.len() as i32,
            kind: "action".to_owned(),
        }],
    }
}
