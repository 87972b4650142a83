//! All dealings with the table format's library: loading, making and widening tables, committing files.

use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::Schema;
use camino::{Utf8Path, Utf8PathBuf};
use deltalake::kernel::engine::arrow_conversion::{TryIntoArrow, TryIntoKernel};
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties, TransactionError};
use deltalake::kernel::{Action, Add, MetadataExt, StructType, Transaction};
use deltalake::operations::create::CreateBuilder;
use deltalake::protocol::{DeltaOperation, SaveMode};
use deltalake::{DeltaTable, DeltaTableBuilder, DeltaTableError};
use drillyard_schema::Table;

use crate::error::LakeError;
use crate::files::{self, NewFile};
use crate::lake::Txn;

/// The table property that holds the row schema's version.
const VERSION_PROPERTY: &str = "drillyard.table_version";
/// How often a commit is tried again when another process was faster.
const COMMIT_RETRIES: usize = 50;

/// The place of one table.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub table: Table,
    pub dir: Utf8PathBuf,
}

impl Place {
    pub(crate) fn new(root: &Utf8Path, table: Table) -> Self {
        Self {
            table,
            dir: root.join(table.name()),
        }
    }

    /// The table as it is now, or at a version. None where it does not exist.
    pub(crate) async fn load(&self, version: Option<i64>) -> Result<Option<DeltaTable>, LakeError> {
        if !self.has_commits()? {
            return Ok(None);
        }
        let mut builder = DeltaTableBuilder::from_url(self.url()?).map_err(|e| self.error(&e))?;
        if let Some(version) = version {
            let gone = |message: String| LakeError::NoVersion {
                table: self.table.name().to_owned(),
                version,
                path: self.dir.clone(),
                message,
            };
            builder = builder.with_version(
                version
                    .try_into()
                    .map_err(|_| gone("versions count from 0".to_owned()))?,
            );
            let delta = builder.load().await.map_err(|e| gone(e.to_string()))?;
            // The library loads what there is where a later version is asked for.
            let loaded = delta
                .version()
                .and_then(|loaded| i64::try_from(loaded).ok());
            if loaded != Some(version) {
                return Err(gone(format!("the latest is {}", loaded.unwrap_or(-1))));
            }
            self.check_version(&delta)?;
            return Ok(Some(delta));
        }
        let delta = builder.load().await.map_err(|e| self.error(&e))?;
        self.check_version(&delta)?;
        Ok(Some(delta))
    }

    /// True where the table's log is there.
    pub(crate) fn exists(&self) -> bool {
        self.dir.join("_delta_log").is_dir()
    }

    /// Refuses a table of a newer Drillyard.
    pub(crate) fn check_version(&self, delta: &DeltaTable) -> Result<(), LakeError> {
        let configuration = delta
            .snapshot()
            .map_err(|e| self.error(&e))?
            .metadata()
            .configuration();
        let found = configuration
            .get(VERSION_PROPERTY)
            .and_then(|v| v.parse().ok())
            .unwrap_or(1);
        let known = self.table.version();
        if found > known {
            return Err(LakeError::TooNew {
                table: self.table.name(),
                path: self.dir.clone(),
                found,
                known,
            });
        }
        Ok(())
    }

    /// Makes the table; where another process was faster, takes its.
    pub(crate) async fn create(&self) -> Result<DeltaTable, LakeError> {
        let schema: StructType = self
            .table
            .schema()
            .as_ref()
            .try_into_kernel()
            .map_err(|e| self.failure(format!("its schema: {e}")))?;
        let configuration = [
            (VERSION_PROPERTY, self.table.version().to_string()),
            ("delta.checkpointInterval", "10".to_owned()),
            // A run that names the version it read can be asked for it again years later.
            ("delta.enableExpiredLogCleanup", "false".to_owned()),
        ];
        let log = self.dir.join("_delta_log");
        fs_err::tokio::create_dir_all(&log)
            .await
            .map_err(|e| LakeError::writing(&log, e))?;
        let made = CreateBuilder::new()
            .with_location(self.url()?.to_string())
            .with_table_name(self.table.name())
            .with_columns(schema.fields().cloned())
            .with_partition_columns(self.table.partition_columns().iter().copied())
            .with_save_mode(SaveMode::Ignore)
            // With retries the slower of two makers would commit a second beginning.
            .with_commit_properties(CommitProperties::default().with_max_retries(0))
            // Ours is not one of the library's properties.
            .with_raise_if_key_not_exists(false)
            .with_configuration(
                configuration
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), Some(value))),
            )
            .await;
        let error = match made {
            Ok(delta) => {
                self.check_version(&delta)?;
                self.sync_log(0).await?;
                return Ok(delta);
            }
            Err(error) => error,
        };
        match self.load(None).await {
            Ok(Some(delta)) => Ok(delta),
            _ => Err(self.error(&error)),
        }
    }

    /// Adds the nullable columns that this Drillyard knows and the table lacks. True where there were any.
    pub(crate) async fn widen(&self, delta: &DeltaTable) -> Result<bool, DeltaTableError> {
        let metadata = delta.snapshot()?.metadata().clone();
        let before = metadata.parse_schema()?;
        let known: StructType = self.table.schema().as_ref().try_into_kernel()?;
        let new: Vec<_> = known
            .fields()
            .filter(|field| before.field(field.name()).is_none())
            .cloned()
            .collect();
        if new.is_empty() {
            return Ok(false);
        }
        if let Some(field) = new.iter().find(|field| !field.nullable) {
            let message = format!(
                "column {} is new and not nullable, so older rows can't have it",
                field.name()
            );
            return Err(DeltaTableError::generic(message));
        }
        let after = StructType::try_new(before.fields().cloned().chain(new.iter().cloned()))?;
        let metadata = metadata.with_schema(&after)?;
        commit(
            delta,
            vec![Action::Metadata(metadata)],
            None,
            DeltaOperation::AddColumn { fields: new },
        )
        .await?;
        Ok(true)
    }

    /// Writes the rows, which are in order, to files that no version lists yet. They are on disk when this returns.
    pub(crate) async fn write_files(
        &self,
        delta: &DeltaTable,
        batch: &RecordBatch,
    ) -> Result<Vec<NewFile>, LakeError> {
        let schema = delta
            .snapshot()
            .and_then(|state| Ok(state.metadata().parse_schema()?))
            .map_err(|e| self.error(&e))?;
        let schema: Result<Schema, _> = (&schema).try_into_arrow();
        let batch = schema
            .and_then(|schema| files::fit(batch, Arc::new(schema)))
            .map_err(|e| self.failure(e.to_string()))?;
        let place = self.clone();
        let written =
            tokio::task::spawn_blocking(move || files::write(place.table, &place.dir, &batch));
        written
            .await
            .unwrap_or_else(|e| Err(self.failure(e.to_string())))
    }

    /// Lists the files in a new version and returns its number.
    pub(crate) async fn commit_files(
        &self,
        delta: &DeltaTable,
        files: &[NewFile],
        txn: Option<&Txn>,
    ) -> Result<i64, DeltaTableError> {
        let partition_by = self.table.partition_columns();
        let operation = DeltaOperation::Write {
            mode: SaveMode::Append,
            partition_by: (!partition_by.is_empty())
                .then(|| partition_by.iter().map(|c| (*c).to_owned()).collect()),
            predicate: None,
        };
        let adds = files.iter().map(|file| Action::Add(add(file))).collect();
        commit(delta, adds, txn, operation).await
    }

    /// Removes files that no version lists.
    pub(crate) fn discard(&self, files: &[NewFile]) {
        files::remove(&self.dir, files);
    }

    /// The commit is on disk itself when this returns.
    pub(crate) async fn sync_log(&self, version: i64) -> Result<(), LakeError> {
        let log = self.dir.join("_delta_log");
        let synced = tokio::task::spawn_blocking(move || {
            files::sync(&log.join(format!("{version:020}.json")))?;
            files::sync(&log)
        });
        // Where the runtime ends, whoever waits is gone.
        synced.await.unwrap_or(Ok(()))
    }

    /// As [`Place::sync_log`], for every version whose file is there.
    pub(crate) async fn sync_whole_log(&self) -> Result<(), LakeError> {
        let log = self.dir.join("_delta_log");
        let synced = tokio::task::spawn_blocking(move || {
            let entries = log
                .read_dir_utf8()
                .map_err(|e| LakeError::reading(&log, e))?;
            for entry in entries {
                let path = entry.map_err(|e| LakeError::reading(&log, e))?.into_path();
                if path.extension() == Some("json") {
                    files::sync(&path)?;
                }
            }
            files::sync(&log)
        });
        synced.await.unwrap_or(Ok(()))
    }

    /// Where a file lies that the log names relative to the table.
    pub(crate) fn file_path(&self, name: &str) -> Utf8PathBuf {
        self.dir.join(name)
    }

    /// The library's error with the place and, where the system refused, the way out.
    pub(crate) fn error(&self, error: &DeltaTableError) -> LakeError {
        let mut cause: Option<&dyn std::error::Error> = Some(error);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<std::io::Error>()
                && let Some(code) = io.raw_os_error()
            {
                return LakeError::writing(&self.dir, std::io::Error::from_raw_os_error(code));
            }
            cause = error.source();
        }
        // Some of the library's errors keep only the text of their cause.
        let message = error.to_string();
        let code = message
            .rsplit_once("(os error ")
            .and_then(|(_, rest)| rest.split(')').next()?.parse().ok());
        match code {
            Some(code) => LakeError::writing(&self.dir, std::io::Error::from_raw_os_error(code)),
            None => self.failure(message),
        }
    }

    pub(crate) fn failure(&self, message: String) -> LakeError {
        LakeError::Table {
            table: self.table.name(),
            path: self.dir.clone(),
            message,
        }
    }

    fn url(&self) -> Result<url::Url, LakeError> {
        url::Url::from_directory_path(&self.dir)
            .map_err(|()| self.failure("the path has no file address".to_owned()))
    }

    /// False where another process made the folder and has not committed yet, too.
    fn has_commits(&self) -> Result<bool, LakeError> {
        let log = self.dir.join("_delta_log");
        let entries = match fs_err::read_dir(&log) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(LakeError::reading(log, error)),
        };
        for entry in entries {
            let name = entry.map_err(|e| LakeError::reading(&log, e))?.file_name();
            if Path::new(&name)
                .extension()
                .is_some_and(|extension| extension == "json" || extension == "parquet")
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The last committed transaction number of `app`.
pub(crate) async fn last_txn(
    delta: &DeltaTable,
    app: &str,
) -> Result<Option<i64>, DeltaTableError> {
    delta
        .snapshot()?
        .snapshot()
        .transaction_version(delta.log_store().as_ref(), app)
        .await
}

/// True where trying again from the latest version may succeed.
pub(crate) fn is_conflict(error: &DeltaTableError) -> bool {
    matches!(
        error,
        DeltaTableError::VersionAlreadyExists(_)
            | DeltaTableError::Transaction {
                source: TransactionError::CommitConflict(_)
                    | TransactionError::MaxCommitAttempts(_)
            }
    )
}

async fn commit(
    delta: &DeltaTable,
    actions: Vec<Action>,
    txn: Option<&Txn>,
    operation: DeltaOperation,
) -> Result<i64, DeltaTableError> {
    let mut properties = CommitProperties::default()
        .with_max_retries(COMMIT_RETRIES)
        .with_cleanup_expired_logs(Some(false));
    if let Some(txn) = txn {
        properties =
            properties.with_application_transaction(Transaction::new(&txn.app, txn.version));
    }
    let prepared = CommitBuilder::from(properties)
        .with_actions(actions)
        .build(Some(delta.snapshot()?), delta.log_store(), operation)
        .into_prepared_commit_future()
        .await?;
    let landed = prepared.await?;
    let version = i64::try_from(landed.version).unwrap_or(i64::MAX);
    // Every tenth commit a checkpoint follows. The rows are in whether or not it can be written; a later commit writes the next.
    if let Err(error) = landed.await {
        tracing::warn!(version, %error, "the commit is in, its checkpoint could not be written");
    }
    Ok(version)
}

fn add(file: &NewFile) -> Add {
    let value = |(column, value): &(String, String)| {
        (column.clone(), (!value.is_empty()).then(|| value.clone()))
    };
    Add {
        path: file.path.clone(),
        size: file.size,
        partition_values: file.partition.iter().map(value).collect(),
        modification_time: file.modified,
        data_change: true,
        stats: Some(file.statistics.clone()),
        tags: None,
        deletion_vector: None,
        base_row_id: None,
        default_row_commit_version: None,
        clustering_provider: None,
    }
}
