//! What an agent is asked to do, and how the result is checked.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Split, TaskId};

/// A task instance: everything needed to set it up, ask it and check it, with nothing drawn at run time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Derived from set, version, family and seed.
    pub task_id: TaskId,
    /// The set it belongs to, such as `wrangle`.
    pub task_set: String,
    /// The set's version; a change of generator or verifier raises it.
    pub task_set_version: String,
    /// The kind of task within the set.
    pub family: String,
    /// 1 (easy) to 3 (hard), as the author graded it.
    pub difficulty: u8,
    /// Train, validation or held out.
    pub split: Split,
    /// True for a family that no training split contains.
    #[serde(default)]
    pub unseen_family: bool,
    /// What the agent is told.
    pub instruction: String,
    /// Files laid into the work directory before the episode starts.
    pub setup: Vec<SetupFile>,
    /// How the result is checked; the set's verifier reads it. Never shown to the agent.
    pub verifier: Value,
    /// Key nodes that earn process reward.
    #[serde(default)]
    pub milestones: Vec<Milestone>,
    /// Names of the tools offered.
    pub tools: Vec<String>,
    /// Where the task comes from.
    pub source: String,
    /// The licence it may be used under.
    pub licence: String,
    /// The seed it was generated from, where it was generated.
    #[serde(default)]
    pub seed: Option<u64>,
}

/// A file laid into the work directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetupFile {
    /// Relative to the work directory.
    pub path: String,
    /// Where the content comes from.
    pub content: SetupContent,
}

/// The content of a set-up file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SetupContent {
    /// The text itself.
    Text(String),
    /// The name of an asset that the task set builds once and shares among tasks (a database, say).
    Asset(String),
}

/// A key node of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Milestone {
    /// A short name, unique in the task.
    pub name: String,
    /// How to tell that it was reached; the set's verifier reads it.
    pub check: Value,
}
