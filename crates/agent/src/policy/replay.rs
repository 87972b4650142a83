//! Replay: the turns of recorded episodes, said again.

use std::collections::BTreeMap;

use drillyard_schema::TaskId;
use drillyard_schema::table::{EpisodeRow, StepRow, TokenRow};
use futures::future::BoxFuture;

use super::{PolicyClient, PolicyError, ToolProtocol, TurnReply, TurnRequest};

/// One recorded turn.
pub type ReplayTurn = TurnReply;

/// Recorded turns by task and sample.
#[derive(Debug, Clone, Default)]
pub struct Recording {
    turns: BTreeMap<(TaskId, u32), Vec<ReplayTurn>>,
}

impl Recording {
    /// Nothing recorded yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an episode's turns, in order.
    pub fn insert(&mut self, task: TaskId, sample_index: u32, turns: Vec<ReplayTurn>) {
        self.turns.insert((task, sample_index), turns);
    }

    /// The turns of one sample, in order.
    pub(crate) fn turns(&self, task: &TaskId, sample_index: u32) -> &[ReplayTurn] {
        let key = (task.clone(), sample_index);
        self.turns.get(&key).map_or(&[], Vec::as_slice)
    }

    /// The recording that rows of the lake hold. Rows of episodes that are not among `episodes` are left out; of several attempts at
    /// a sample the last one counts.
    pub fn from_rows(episodes: &[EpisodeRow], steps: &[StepRow], tokens: &[TokenRow]) -> Self {
        let mut by_episode: BTreeMap<&str, Vec<(i32, ReplayTurn)>> = BTreeMap::new();
        for step in steps {
            let turn = TurnReply {
                reasoning: step.reasoning.clone(),
                finish_reason: step.finish_reason.clone(),
                prompt_tokens: step.prompt_tokens,
                generated_tokens: step.generated_tokens,
                ..TurnReply::text(step.raw_text.clone())
            };
            by_episode
                .entry(step.episode_id.as_str())
                .or_default()
                .push((step.step_index, turn));
        }
        for turns in by_episode.values_mut() {
            turns.sort_by_key(|(index, _)| *index);
        }
        let mut by_token: BTreeMap<&str, Vec<&TokenRow>> = BTreeMap::new();
        for row in tokens {
            by_token
                .entry(row.episode_id.as_str())
                .or_default()
                .push(row);
        }
        for (episode, rows) in &mut by_token {
            rows.sort_by_key(|row| row.step_index);
            let Some(turns) = by_episode.get_mut(episode) else {
                continue;
            };
            let mut sequence: Vec<i32> = Vec::new();
            for row in rows.iter() {
                sequence.truncate(row.kept_prefix.max(0) as usize);
                sequence.extend(&row.context_ids);
                let Some((_, turn)) = turns.iter_mut().find(|(index, _)| *index == row.step_index)
                else {
                    break;
                };
                turn.prompt_token_ids.clone_from(&sequence);
                turn.token_ids.clone_from(&row.generated_ids);
                turn.logprobs.clone_from(&row.logprobs);
                turn.tokenizer_hash = Some(row.tokenizer_hash.clone());
                turn.template_hash = Some(row.template_hash.clone());
                sequence.extend(&row.generated_ids);
            }
        }
        let mut order: Vec<&EpisodeRow> = episodes.iter().collect();
        order.sort_by_key(|row| row.attempt);
        let mut recording = Self::new();
        for row in order {
            let turns = by_episode.get(row.episode_id.as_str()).map(Vec::as_slice);
            let turns = turns
                .unwrap_or_default()
                .iter()
                .map(|(_, turn)| turn.clone())
                .collect();
            recording.insert(row.task_id.clone(), row.sample_index.max(0) as u32, turns);
        }
        recording
    }
}

/// Says a recording's turns again, whatever the tools answer.
#[derive(Debug, Clone)]
pub struct ReplayClient {
    recording: Recording,
}

impl ReplayClient {
    /// A client that says this recording again.
    pub const fn new(recording: Recording) -> Self {
        Self { recording }
    }
}

impl PolicyClient for ReplayClient {
    fn protocol(&self) -> ToolProtocol {
        ToolProtocol::Template
    }

    fn turn<'a>(
        &'a self,
        request: TurnRequest<'a>,
    ) -> BoxFuture<'a, Result<TurnReply, PolicyError>> {
        let key = (request.task.task_id.clone(), request.sample_index);
        let reply = match self.recording.turns.get(&key) {
            Some(turns) => Ok(turns
                .get(request.step as usize)
                .cloned()
                .unwrap_or_else(|| TurnReply::text(""))),
            None => Err(PolicyError::NotRecorded {
                task: request.task.task_id.to_string(),
                sample_index: request.sample_index,
            }),
        };
        Box::pin(std::future::ready(reply))
    }
}
