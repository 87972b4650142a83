//! The trajectory lake: Delta tables for everything an agent does, a journal that survives a kill at any moment, and the writer that
//! carries episodes from one to the other.
//!
//! - [`Lake`] opens the tables and appends rows, each append one Delta commit, idempotent by transaction numbers.
//! - [`Snapshot`] is one version of every table: file lists for other engines, rows for ours.
//! - [`Journal`] is an append-only log per shard; a record that was written is read back after a crash, a torn tail is dropped.
//! - [`Writer`] takes finished episodes from a bounded queue, journals them, and commits them in batches, `episodes` last: a row there
//!   is what makes an episode visible.
//! - [`crash_point`] is how tests kill a process where it hurts.
//!
//! ```text
//!  agent ──turns, calls──▶ Journal (per shard)
//!    └──finished episode─▶ Journal ─▶ queue ─▶ batch: boundaries to the Journal, then
//!                                              tokens, tool_calls, steps, messages, rewards, verdicts, tasks, episodes
//!                                              then the batch's end to the Journal, then the oldest segments go
//! ```
//!
//! No type of the table format's library appears in its API. SQL over the tables is the business of `query`.

mod bundle;
mod delta;
mod error;
mod event;
mod faults;
mod files;
mod journal;
mod lake;
mod lock;
mod record;
mod recovery;
mod snapshot;
mod writer;

pub use bundle::{EpisodeBundle, bundle_bytes};
pub use error::LakeError;
pub use event::{JournalEvent, LoggedFile};
pub use faults::{CRASH_VARIABLE, crash_point};
pub use journal::{Journal, JournalOptions, SyncPolicy};
pub use lake::{Lake, Txn};
pub use recovery::Recovered;
pub use snapshot::{DataFile, Filter, Snapshot};
pub use writer::{Writer, WriterOptions, WriterReport};

#[cfg(test)]
mod tests;
