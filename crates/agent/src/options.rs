//! What a rollout is told, and what it tells when it is over.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use camino::Utf8PathBuf;
use drillyard_render::Tokenizer;
use drillyard_sandbox::FaultPlan;
use drillyard_schema::{EpisodeId, Purpose, RunId, Task};
use serde::{Deserialize, Serialize};

use crate::policy::{Policy, Sampling};
use crate::replay::Branch;
use crate::stop::Stop;

/// Which part of the work list this process does: tasks number `index`, `index + count`, `index + 2·count`, …
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// From 0.
    pub index: u32,
    /// How many shards there are.
    pub count: u32,
}

impl Default for Shard {
    fn default() -> Self {
        Self { index: 0, count: 1 }
    }
}

/// A place in the life of an episode where a test can hold it: everything before the point is done, nothing after it is begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Point {
    /// The start is in the journal.
    Started,
    /// A model turn came back and is not in the journal.
    TurnDone,
    /// The turn is in the journal.
    TurnLogged,
    /// The intent of a call is in the journal.
    IntentLogged,
    /// The call ran and its result is not in the journal.
    CallDone,
    /// The result is in the journal.
    ResultLogged,
    /// The episode is verified and its rows are made; they are not in the journal.
    Verified,
    /// The rows were handed to the writer.
    Submitted,
}

impl Point {
    /// Every point, in the order of an episode.
    pub const ALL: [Self; 8] = [
        Self::Started,
        Self::TurnDone,
        Self::TurnLogged,
        Self::IntentLogged,
        Self::CallDone,
        Self::ResultLogged,
        Self::Verified,
        Self::Submitted,
    ];
}

/// Asked at every [`Point`] of every episode; true holds that episode there for ever. Tests use it to end a rollout at a known place.
pub type HoldAt = Arc<dyn Fn(Point, &EpisodeId) -> bool + Send + Sync>;

/// Everything a rollout needs to know.
#[derive(Clone)]
pub struct RolloutOptions {
    /// The run the episodes belong to; ids of episodes derive from it.
    pub run_id: RunId,
    /// Its day, `YYYY-MM-DD`.
    pub run_date: String,
    /// What the episodes are for.
    pub purpose: Purpose,
    /// What is asked; their order is the order of work.
    pub tasks: Vec<Task>,
    /// Episodes per task.
    pub samples: u32,
    /// Who answers.
    pub policy: Policy,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Seed of every episode's seed.
    pub seed: u64,
    /// Episodes in flight.
    pub concurrency: usize,
    /// Model turns per episode at most.
    pub max_steps: u32,
    /// Bytes of a tool's output shown to the model at most.
    pub observation_bytes: usize,
    /// How long a tool call may take where the call says nothing.
    pub call_timeout: Duration,
    /// How long an episode may take: time of model turns and tool calls.
    pub episode_timeout: Duration,
    /// Turns in a row that could not be parsed before the episode ends.
    pub parse_limit: u32,
    /// Turns in a row without a call before the episode ends as given up.
    pub idle_limit: u32,
    /// Attempts at a sample while infrastructure ends them.
    pub attempts: u32,
    /// Context tokens at which an episode ends, where the model's window is known.
    pub max_context_tokens: Option<u32>,
    /// System prompt instead of the task set's own; `{tools}` stands for the tools' description in the text protocol.
    pub system_prompt: Option<String>,
    /// The policy's tokenizer, where its ids are to be told apart into loss spans.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The part of the work list that is done here.
    pub shard: Shard,
    /// Folder of the journals; each run has a folder of its own in it.
    pub journal_dir: Utf8PathBuf,
    /// Folder for outputs too large for a row; without it they are cut.
    pub artifacts_dir: Option<Utf8PathBuf>,
    /// Faults injected on purpose; none by default.
    pub faults: FaultPlan,
    /// The place where every episode leaves a recorded one, whose task is then the only one.
    pub branch: Option<Branch>,
    /// The request to stop.
    pub stop: Stop,
    /// For tests: where to hold episodes.
    pub hold_at: Option<HoldAt>,
}

impl RolloutOptions {
    /// Options with the defaults of a small model; change what differs.
    pub fn new(
        run_id: RunId,
        run_date: impl Into<String>,
        purpose: Purpose,
        tasks: Vec<Task>,
        policy: Policy,
        journal_dir: impl Into<Utf8PathBuf>,
    ) -> Self {
        Self {
            run_id,
            run_date: run_date.into(),
            purpose,
            tasks,
            samples: 1,
            policy,
            sampling: Sampling::default(),
            seed: 0,
            concurrency: 64,
            max_steps: 6,
            observation_bytes: 4096,
            call_timeout: Duration::from_secs(30),
            episode_timeout: Duration::from_mins(10),
            parse_limit: 3,
            idle_limit: 2,
            attempts: 3,
            max_context_tokens: None,
            system_prompt: None,
            tokenizer: None,
            shard: Shard::default(),
            journal_dir: journal_dir.into(),
            artifacts_dir: None,
            faults: FaultPlan::default(),
            branch: None,
            stop: Stop::new(),
            hold_at: None,
        }
    }
}

impl fmt::Debug for RolloutOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RolloutOptions")
            .field("run_id", &self.run_id)
            .field("purpose", &self.purpose)
            .field("tasks", &self.tasks.len())
            .field("samples", &self.samples)
            .field("policy", &self.policy)
            .field("sampling", &self.sampling)
            .field("seed", &self.seed)
            .field("concurrency", &self.concurrency)
            .field("max_steps", &self.max_steps)
            .field("shard", &self.shard)
            .finish_non_exhaustive()
    }
}

/// What a rollout did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutSummary {
    /// Samples asked for: tasks of this shard × samples.
    pub total: usize,
    /// Of these, complete in the lake from an earlier execution.
    pub earlier: usize,
    /// Of these, ended now (the last attempt counts).
    pub done: usize,
    /// Of these, left for another execution: a stop was requested.
    pub left: usize,
    /// Episodes that went on from the journal of an execution that was cut off.
    pub resumed: usize,
    /// Episodes ended now and scored.
    pub scored: usize,
    /// Of the scored, successful.
    pub successes: usize,
    /// Episodes that infrastructure ended, all attempts.
    pub infrastructure: usize,
    /// Model turns taken now.
    pub steps: u64,
    /// Tool calls made now.
    pub tool_calls: u64,
    /// Tokens generated now.
    pub generated_tokens: u64,
    /// Episodes ended now by end reason, infrastructure included.
    pub end_reasons: BTreeMap<String, usize>,
    /// Scored and successful episodes by family.
    pub families: BTreeMap<String, (usize, usize)>,
    /// A cause, for each infrastructure end reason the first one.
    pub causes: BTreeMap<String, String>,
    /// Wall time in seconds.
    pub wall_s: f64,
    /// What the writer says of its work.
    pub commits: u64,
}

impl RolloutSummary {
    /// Successes among the scored.
    pub fn success_rate(&self) -> Option<f64> {
        (self.scored > 0).then(|| self.successes as f64 / self.scored as f64)
    }

    /// Whether every sample asked for is in the lake.
    pub const fn is_complete(&self) -> bool {
        self.left == 0
    }
}
