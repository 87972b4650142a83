//! What Drillyard's data is: ids, tasks, chat messages, the labels used in every table, and the tables themselves with their
//! versioned Arrow schemas.
//!
//! - [`ids`]: ids are derived by hashing what they name, never drawn, so a repeated run names the same things the same.
//! - [`task`]: what an agent is asked to do, and how it is checked.
//! - [`chat`]: messages, tool calls and tool descriptions in the shapes of the OpenAI chat API.
//! - [`labels`]: the closed vocabularies (purpose, split, end reason, call outcome, fail reason, …).
//! - [`table`]: one row type for each table of the lake, its Arrow schema, and the conversions to and from record batches.
//!
//! This crate does no IO and knows no engine: whoever stores or queries the tables converts at its own edge.

pub mod chat;
pub mod ids;
pub mod labels;
pub mod table;
pub mod task;

pub use chat::{Message, Role, ToolCall, ToolSpec};
pub use ids::{EpisodeId, GroupId, RunId, StageRunId, TaskId};
pub use labels::{
    CallOutcome, EndReason, FailReason, ParseStatus, Purpose, Split, Tier, VerdictKind,
};
pub use table::{Row, Table, TableError};
pub use task::{Milestone, SetupFile, Task};

/// The version of Drillyard, as it is written to the lake.
pub const DRILLYARD_VERSION: &str = env!("CARGO_PKG_VERSION");
