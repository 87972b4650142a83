//! The trajectory lake: Delta tables for everything an agent does, a journal that survives a kill at any moment, and the writer that
//! carries episodes from one to the other.
//!
//! - [`Lake`] opens the tables and appends rows, each append one Delta commit, idempotent by transaction ids.
//! - [`Snapshot`] is one version of every table: file lists for other engines, rows for ours.
//! - [`Journal`] is an append-only file per shard; a record that was written is read back after a crash, a torn tail is dropped.
//! - [`Writer`] takes finished episodes from a bounded queue, journals them, and commits them in batches, `episodes` last: a row there
//!   is what makes an episode visible.
//!
//! No type of the table format's library appears in its API. SQL over the tables is the business of `query`.

mod bundle;
mod error;
mod faults;
mod journal;
mod lake;
mod snapshot;
mod writer;

#[cfg(test)]
mod tests;

pub use bundle::{EpisodeBundle, bundle_bytes};
pub use error::LakeError;
pub use faults::{CRASH_VARIABLE, crash_point};
pub use journal::{Journal, JournalEvent, LoggedFile, Recovered};
pub use lake::{Lake, Txn};
pub use snapshot::{DataFile, Filter, Snapshot};
pub use writer::{Writer, WriterOptions, WriterReport};
