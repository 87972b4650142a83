//! What a person sees at the end of a run.
//!
//! - [`evaluation`]: success with interval, pass@k, steps, tool accuracy and success per thousand tokens of one policy over one set of
//!   tasks, by family; and the paired difference of two policies.
//! - [`Card`]: the report card of a run, as text for the terminal and as JSON for programs.
//!
//! It reads rows that others loaded and writes text; it opens no lake and runs no query.

mod card;
pub mod evaluation;

pub use card::{Card, StageSection, inline};
