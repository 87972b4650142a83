//! What can go wrong with a lake, with the place and the way out.

use std::sync::Arc;

use camino::Utf8PathBuf;
use drillyard_schema::TableError;
use thiserror::Error;

/// Why the lake or a journal could not be read or written.
#[derive(Debug, Error)]
pub enum LakeError {
    /// A file or folder could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: Utf8PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The disk is full.
    #[error(
        "{path}: the disk is full; free some space and run the same command again, what was committed stays"
    )]
    DiskFull {
        /// Where.
        path: Utf8PathBuf,
    },
    /// A file or folder may not be used.
    #[error(
        "{path}: can't be used ({source}); make it readable and writable or choose another folder, then run the same command again"
    )]
    NotWritable {
        /// Where.
        path: Utf8PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The table format's library failed.
    #[error("table {table} in {path}: {message}")]
    Table {
        /// The table.
        table: &'static str,
        /// Its folder.
        path: Utf8PathBuf,
        /// What the library said.
        message: String,
    },
    /// A Parquet file can't be read.
    #[error(
        "{path}: not a readable Parquet file ({message}); restore it from a backup, or roll out its run again into a new lake"
    )]
    Corrupt {
        /// The file.
        path: Utf8PathBuf,
        /// What the reader said.
        message: String,
    },
    /// The table was written by a newer Drillyard.
    #[error(
        "table {table} in {path} has version {found}, this Drillyard knows up to {known}; use a newer Drillyard"
    )]
    TooNew {
        /// The table.
        table: &'static str,
        /// Its folder.
        path: Utf8PathBuf,
        /// The version found.
        found: i32,
        /// The version known.
        known: i32,
    },
    /// A snapshot was asked for that can't be had.
    #[error("{path}: there is no version {version} of table '{table}' ({message})")]
    NoVersion {
        /// The table as it was asked for.
        table: String,
        /// The version as it was asked for.
        version: i64,
        /// The lake's folder.
        path: Utf8PathBuf,
        /// Why.
        message: String,
    },
    /// Rows don't fit their schema.
    #[error(transparent)]
    Rows(#[from] TableError),
    /// Another process writes the same shard.
    #[error(
        "{path} is held by {holder}; wait for it or end it, two processes must not write the same shard at once"
    )]
    Locked {
        /// The lock file.
        path: Utf8PathBuf,
        /// Who holds it.
        holder: String,
    },
    /// Someone with another journal commits under the same name.
    #[error(
        "table {table} in {path}: '{app}' committed batch {number} from elsewhere; two processes must not write the same shard at once"
    )]
    ShardTaken {
        /// The table.
        table: &'static str,
        /// Its folder.
        path: Utf8PathBuf,
        /// The transactions' application id.
        app: String,
        /// The batch.
        number: i64,
    },
    /// The journal holds something this version can't read.
    #[error(
        "{path}: {message}; move the journal folder away and roll out into another yard (--set yard=PATH) to give up the episodes in it"
    )]
    Journal {
        /// The journal file.
        path: Utf8PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The background writer ended with this error; what was submitted is in the journal.
    #[error(transparent)]
    WriterEnded(Arc<LakeError>),
}

impl LakeError {
    /// An error of reading or opening.
    pub(crate) fn reading(path: impl Into<Utf8PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }

    /// An error of writing: a full disk and missing permission are told apart.
    pub(crate) fn writing(path: impl Into<Utf8PathBuf>, source: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let path = path.into();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::DiskFull { path },
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                Self::NotWritable { path, source }
            }
            _ => Self::Io { path, source },
        }
    }

    /// True where the lake or journal can't be written now: full disk, permissions, another writer. The same command may succeed later.
    pub fn is_output(&self) -> bool {
        match self {
            Self::DiskFull { .. }
            | Self::NotWritable { .. }
            | Self::Locked { .. }
            | Self::ShardTaken { .. } => true,
            Self::WriterEnded(cause) => cause.is_output(),
            _ => false,
        }
    }
}
