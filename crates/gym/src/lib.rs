//! Where agents drill: the tools they are offered, the tasks they are set, and the verifiers that check what they did.
mod draw;
mod error;
mod milestones;
pub mod names;
mod prompt;
pub mod task_set;
pub mod wrangle;

pub use error::GymError;
pub use milestones::call_milestone;
pub use names::{NameGrammar, grammar};
pub use prompt::system_prompt;
pub use task_set::{ExpertTurn, Family, TASK_SETS, TaskSet, Verification, call_text, task_set};
pub use wrangle::structure_texts;
