//! What can go wrong with a lake, with the place and the way out.

use camino::Utf8PathBuf;
use drillyard_schema::TableError;
use thiserror::Error;

/// Why the lake could not be read or written.
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
    /// The table format's library failed.
    #[error("table {table} in {path}: {message}")]
    Table {
        /// The table.
        table: &'static str,
        /// The lake's folder.
        path: Utf8PathBuf,
        /// What the library said.
        message: String,
    },
    /// A Parquet file can't be read.
    #[error(
        "{path}: not a readable Parquet file ({message}); restore it from a backup, or remove its run and roll out again"
    )]
    Corrupt {
        /// The file.
        path: Utf8PathBuf,
        /// What the reader said.
        message: String,
    },
    /// The table was written by a newer Drillyard.
    #[error(
        "table {table} has version {found}, this Drillyard reads up to {known}; use a newer Drillyard"
    )]
    TooNew {
        /// The table.
        table: &'static str,
        /// The version found.
        found: i32,
        /// The version known.
        known: i32,
    },
    /// Rows don't fit their schema.
    #[error(transparent)]
    Rows(#[from] TableError),
    /// Another process writes the same shard.
    #[error(
        "{path} is in use by process {holder}; two processes must not write the same shard at once"
    )]
    Locked {
        /// The lock file.
        path: Utf8PathBuf,
        /// Who holds it.
        holder: String,
    },
    /// The journal holds something this version can't read.
    #[error("{path}: {message}; move the file away to give up the episodes in it")]
    Journal {
        /// The journal file.
        path: Utf8PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The background writer ended early; its own error was reported first.
    #[error("the lake's writer has ended: {0}")]
    WriterEnded(String),
}

impl LakeError {
    /// An IO error, with a full disk told apart.
    pub(crate) fn io(path: impl Into<Utf8PathBuf>, source: std::io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path }
            }
            _ => Self::Io { path, source },
        }
    }

    /// True for errors of writing: disk full, permissions.
    pub fn is_output(&self) -> bool {
        match self {
            Self::DiskFull { .. } | Self::Locked { .. } => true,
            Self::Io { source, .. } => matches!(
                source.kind(),
                std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem
            ),
            _ => false,
        }
    }
}
