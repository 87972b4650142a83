//! A finished episode: its rows in every table.

use drillyard_schema::table::{
    EpisodeRow, MessageRow, RewardRow, StepRow, TaskRow, TokenRow, ToolCallRow, VerdictRow,
};
use serde::{Deserialize, Serialize};

/// A finished episode: its rows in every table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpisodeBundle {
    /// What was asked; written once per run and task.
    pub task: TaskRow,
    /// The episode.
    pub episode: EpisodeRow,
    /// The conversation.
    pub messages: Vec<MessageRow>,
    /// Model turns.
    pub steps: Vec<StepRow>,
    /// Tool calls.
    pub tool_calls: Vec<ToolCallRow>,
    /// Token ids, where they are known.
    pub tokens: Vec<TokenRow>,
    /// Verdicts.
    pub verdicts: Vec<VerdictRow>,
    /// Raw reward components.
    pub rewards: Vec<RewardRow>,
}

/// Roughly how many bytes a bundle holds in memory: texts and token ids.
pub fn bundle_bytes(bundle: &EpisodeBundle) -> usize {
    let messages: usize = bundle
        .messages
        .iter()
        .map(|m| {
            m.content.as_ref().map_or(0, String::len)
                + m.tool_calls.as_ref().map_or(0, String::len)
                + 200
        })
        .sum();
    let steps: usize = bundle.steps.iter().map(|s| s.raw_text.len() + 300).sum();
    let calls: usize = bundle
        .tool_calls
        .iter()
        .map(|c| c.arguments.len() + c.stdout.len() + c.stderr.len() + 400)
        .sum();
    let tokens: usize = bundle
        .tokens
        .iter()
        .map(|t| 4 * (t.context_ids.len() + 2 * t.generated_ids.len()) + 200)
        .sum();
    messages + steps + calls + tokens + 1000
}
