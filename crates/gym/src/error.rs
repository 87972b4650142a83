//! What can go wrong in the gym.

/// Why a toolset, a task set or an asset could not be had.
#[derive(Debug, thiserror::Error)]
pub enum GymError {
    /// A pipeline or task names a tool that does not exist.
    #[error("unknown tool '{name}'; the tools are: {known}")]
    UnknownTool {
        /// The name as given.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// A tool's own JSON Schema is not valid; a defect of this crate.
    #[error("the schema of tool '{name}' is not a valid JSON Schema: {reason}")]
    ToolSchema {
        /// The tool.
        name: String,
        /// What the schema compiler said.
        reason: String,
    },
    /// A task asks for an asset its set does not have.
    #[error("task set '{set}' has no asset '{name}'")]
    UnknownAsset {
        /// The task set.
        set: String,
        /// The asset asked for.
        name: String,
    },
    /// The database could not be built.
    #[error("the database of task set 'text2sql' could not be built: {reason}")]
    Database {
        /// What SQLite said.
        reason: String,
    },
    /// A file of questions does not parse.
    #[error("the questions of task set '{set}', line {line}: {reason}")]
    Questions {
        /// The task set.
        set: &'static str,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
}
