//! Where agents drill: the tools they are offered, the tasks they are set, and the verifiers that check what they did.
//!
//! - [`Toolset`] holds the tools with their JSON Schemas, checks arguments, and turns a call into something for the sandbox or
//!   into the end of the episode; [`observation()`] is what the model sees of the result.
//! - A [`TaskSet`] generates tasks, verifies them and knows a scripted expert. There are two, found by [`task_set()`]:
//!   [`wrangle`], generated file and data work without end, and [`text2sql`], written questions about a database.
//! - [`system_prompt`] is what a model is told before a task; [`call_milestone`] tells which milestone a call reaches.
//! - [`grammar`] and [`structure_texts`] are for whoever builds a tokenizer for small models.
//!
//! Nothing here runs a sandbox, a model or an episode, and nothing reads a file: what agents wrote comes in as bytes. The one
//! thing of theirs that is run is a submitted query, on a read-only copy in memory behind an authorizer.

mod draw;
mod error;
mod milestones;
pub mod names;
mod observation;
mod prompt;
pub mod task_set;
pub mod text2sql;
pub mod tools;
pub mod wrangle;

pub use error::GymError;
pub use milestones::call_milestone;
pub use names::{NameGrammar, grammar};
pub use observation::{Observation, observation};
pub use prompt::system_prompt;
pub use task_set::{
    ExpertTurn, Family, ResolvedFile, TASK_SETS, TaskSet, Verification, call_text, task_set,
};
pub use tools::{TOOLSET_VERSION, ToolAction, Toolset};
pub use wrangle::structure_texts;
