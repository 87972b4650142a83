//! What a task set is: a generator of tasks, the verifier that checks them, and the scripted expert that can do them.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use drillyard_schema::task::SetupContent;
use drillyard_schema::{Split, Task};
use serde_json::{Value, json};

use crate::error::GymError;
use crate::text2sql::Text2Sql;
use crate::wrangle::Wrangle;

/// A file to lay into a work directory: its path there and its content. An asset's bytes are shared among tasks.
pub type ResolvedFile = (String, Arc<[u8]>);

/// A kind of task within a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family {
    /// Its name, as in [`Task::family`].
    pub name: &'static str,
    /// 1 (easy) to 3 (hard).
    pub difficulty: u8,
    /// True for a family that only the held-out split contains.
    pub unseen: bool,
}

/// What a verifier found.
#[derive(Debug, Clone, PartialEq)]
pub struct Verification {
    /// The task is done, wholly and rightly.
    pub success: bool,
    /// Partial credit from 0 to 1; 1 exactly when `success`.
    pub score: f64,
    /// For people: what was right, or the first thing that was not.
    pub detail: String,
    /// The names of the milestones that the files show as reached. Milestones reached by calls are told by [`call_milestone`](crate::call_milestone).
    pub milestones: Vec<String>,
    /// Set when the verifier itself failed. Such an episode must not be scored: end it as `verifier_fault`.
    pub fault: Option<String>,
}

impl Verification {
    pub(crate) fn fault(reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self {
            success: false,
            score: 0.0,
            detail: format!("not verified: {reason}"),
            milestones: Vec::new(),
            fault: Some(reason),
        }
    }
}

/// One turn of a scripted expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertTurn {
    /// The turn's raw text, call included, in the form the embedded model writes it.
    pub text: String,
}

impl ExpertTurn {
    pub(crate) fn call(name: &str, arguments: &Value) -> Self {
        Self {
            text: call_text(name, arguments),
        }
    }
}

/// A call as text: `<tool_call>{"name":…,"arguments":…}</tool_call>`, compact.
pub fn call_text(name: &str, arguments: &Value) -> String {
    format!(
        "<tool_call>{}</tool_call>",
        json!({ "name": name, "arguments": arguments })
    )
}

/// A set of tasks with its verifier and its expert.
///
/// Everything is a pure function of its arguments: nothing is drawn at run time, and no verifier runs what an agent wrote other
/// than as a read-only query on a private copy of a database.
pub trait TaskSet: Send + Sync {
    /// The set's name, as in [`Task::task_set`].
    fn name(&self) -> &'static str;

    /// The set's version. A change of generator, wording or verifier raises it.
    fn version(&self) -> &'static str;

    /// The kinds of task in the set.
    fn families(&self) -> &[Family];

    /// The first `n` tasks of a split for a seed, families taking turns. Fewer than `n` where the set is finite and exhausted.
    ///
    /// The first tasks of a longer list are those of a shorter one. Splits share no instance, whatever the seeds.
    fn generate(&self, split: Split, n: usize, seed: u64) -> Vec<Task>;

    /// A file that the set builds once and shares among tasks.
    fn asset(&self, name: &str) -> Result<Arc<[u8]>, GymError>;

    /// The work-directory paths whose content [`verify`](Self::verify) needs.
    fn outputs(&self, task: &Task) -> Vec<String>;

    /// Checks what an episode left behind: `files` maps those of [`outputs`](Self::outputs) that exist to their content,
    /// `submitted` is the answer given with `submit`.
    fn verify(
        &self,
        task: &Task,
        files: &BTreeMap<String, Vec<u8>>,
        submitted: Option<&str>,
    ) -> Verification;

    /// The turns of a scripted expert that is right with probability `1 - mistake_rate` and otherwise makes the family's one
    /// systematic mistake, which runs cleanly and gives a wrong result. `seed` decides which, together with the task.
    fn expert(&self, task: &Task, seed: u64, mistake_rate: f64) -> Vec<ExpertTurn>;

    /// The files to lay into the work directory, assets resolved.
    fn setup_files(&self, task: &Task) -> Result<Vec<ResolvedFile>, GymError> {
        task.setup
            .iter()
            .map(|file| {
                let content = match &file.content {
                    SetupContent::Text(text) => Arc::from(text.as_bytes()),
                    SetupContent::Asset(name) => self.asset(name)?,
                };
                Ok((file.path.clone(), content))
            })
            .collect()
    }
}

static WRANGLE: LazyLock<Arc<Wrangle>> = LazyLock::new(|| Arc::new(Wrangle));
static TEXT2SQL: LazyLock<Arc<Text2Sql>> = LazyLock::new(|| Arc::new(Text2Sql));

/// The names of the task sets, for messages.
pub const TASK_SETS: &[&str] = &["wrangle", "text2sql"];

/// The task set of that name.
pub fn task_set(name: &str) -> Option<Arc<dyn TaskSet>> {
    match name {
        "wrangle" => Some(WRANGLE.clone()),
        "text2sql" => Some(TEXT2SQL.clone()),
        _ => None,
    }
}
