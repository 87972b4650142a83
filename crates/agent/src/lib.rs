//! Runs episodes: asks a policy for turns, runs the calls in a sandbox, shows the model what came of them, lets the task's verifier
//! judge what is left, and hands every row to the lake.
//!
//! [`rollout`] is the way in: it runs `tasks × samples` episodes, dozens at a time. Each episode passes the same recording points:
//!
//! 1. the system prompt and the task open the conversation;
//! 2. the policy takes a turn: raw text, finish reason, token ids and log-probabilities where the server gives them;
//! 3. the turn is parsed; what can't be read goes back to the model as an error, and a reply that `max_tokens` cut is told so;
//! 4. each call is checked against its schema and run in the sandbox; output, exit code, resources and changed files are kept;
//! 5. the observation goes into the conversation, and from 2 on again until `submit` or a limit;
//! 6. the task's verifier looks at the files themselves, never at what the agent claims.
//!
//! Between these points the journal is written: the turn, the intent of a call, its result with the files it changed. A process that
//! is killed at any moment therefore loses nothing that ended, repeats no call that has a result, and guesses no result that is not
//! there. Ids are derived, so an episode is in the lake once, however often the rollout is started.
//!
//! A [`Policy`] is an OpenAI-compatible endpoint ([`OpenAiClient`]), the task set's own script ([`ExpertClient`]) or a recording
//! ([`ReplayClient`]). What infrastructure breaks is never held against it: such episodes carry their cause, get no verdict, and are
//! tried again.

mod artifacts;
mod calls;
mod episode;
mod error;
mod files;
mod options;
mod pack;
mod past;
mod policy;
mod progress;
mod prompt;
mod replay;
mod rollout;
mod rows;
mod shared;
mod spans;
mod stop;
mod times;
mod tokens;

pub use error::AgentError;
pub use options::{HoldAt, Point, RolloutOptions, RolloutSummary, Shard};
pub use pack::{CallChanges, Missing, changes_before};
pub use policy::{
    ExpertClient, OpenAiClient, OpenAiConfig, Policy, PolicyClient, PolicyError, Prior, Recording,
    ReplayClient, ReplayTurn, Retries, Sampling, ToolProtocol, TurnReply, TurnRequest,
};
pub use progress::{Progress, ProgressState, Silent};
pub use replay::{
    Branch, Clocks, Difference, Recorded, Replay, ReplayedCall, Sameness, branch, can_be_left,
    ground, replay, restore,
};
pub use rollout::rollout;
pub use stop::{CtrlC, Stop};
