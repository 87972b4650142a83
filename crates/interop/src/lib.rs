//! Trajectories that other harnesses recorded, as Drillyard's own rows, and back.
//!
//! Two formats are read:
//! - **InterCode** result files (`experiments/eval_n_turn.py` and `eval_react.py`): one JSON object, task index → record, with
//!   four parallel arrays and a reward for each turn ([`intercode`]);
//! - **tau-bench** historical trajectories (`run.py`): one JSON list of episodes with chat messages, several trials a task, which
//!   are natural groups ([`tau_bench`]).
//!
//! [`import`] takes a file or a folder, tells the format by content, and yields one [`EpisodeBundle`](drillyard_lake::EpisodeBundle)
//! an episode, a file at a time. A record that cannot be read is set aside as a [`Problem`] that names file and record; the rest
//! of the file is kept, also when the file is cut off or a record's brackets are broken ([`records`]).
//!
//! What the sources hold is taken as recorded: rewards are never computed anew, verdicts are of kind `recorded`. What they do not
//! hold is not invented: no token rows (so training must not need behaviour log-probabilities), no times (an episode is dated
//! by its import, durations are 0), no temperatures. Both are public evaluation sets and are marked so.

pub mod export;
mod import;
pub mod intercode;
mod record;
pub mod records;
pub mod tau_bench;

pub use import::{
    Format, ImportOptions, Imported, ImportedFile, InteropError, Problem, import, write_problems,
};
