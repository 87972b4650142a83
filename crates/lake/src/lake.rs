//! Opening tables and appending rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_ord::sort::{SortColumn, lexsort_to_indices};
use arrow_select::take::take_record_batch;
use camino::{Utf8Path, Utf8PathBuf};
use deltalake::kernel::engine::arrow_conversion::TryIntoKernel;
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties};
use deltalake::kernel::{Action, StructType, Transaction};
use deltalake::operations::create::CreateBuilder;
use deltalake::parquet::basic::{Compression, ZstdLevel};
use deltalake::parquet::file::metadata::SortingColumn;
use deltalake::parquet::file::properties::WriterProperties;
use deltalake::protocol::{DeltaOperation, SaveMode};
use deltalake::writer::{DeltaWriter, RecordBatchWriter};
use deltalake::{DeltaTable, DeltaTableBuilder, DeltaTableError};
use drillyard_schema::table::to_batch;
use drillyard_schema::{Row, Table, TableError};
use tokio::sync::Mutex;

use crate::error::LakeError;
use crate::snapshot::Snapshot;

/// The table property that holds the row schema's version.
const VERSION_PROPERTY: &str = "drillyard.table_version";
/// How often a commit is tried again when another process was faster.
const COMMIT_RETRIES: usize = 50;

/// A transaction number of an application: an append whose number is not above the last committed one is skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Txn {
    /// Who appends, such as a run's shard.
    pub app: String,
    /// Rises with each append.
    pub version: i64,
}

/// The tables under one folder. Clones share their state.
#[derive(Clone)]
pub struct Lake {
    inner: Arc<Inner>,
}

struct Inner {
    root: Utf8PathBuf,
    /// Loaded tables; appends to the same table wait for each other.
    tables: BTreeMap<Table, Mutex<Option<DeltaTable>>>,
}

impl std::fmt::Debug for Lake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lake")
            .field("root", &self.inner.root)
            .finish_non_exhaustive()
    }
}

impl Lake {
    /// Opens the lake in `root`, which is made where it is missing; tables are made at their first append.
    ///
    /// # Errors
    /// A folder that can't be made or is not one.
    pub async fn open(root: &Utf8Path) -> Result<Self, LakeError> {
        fs_err::tokio::create_dir_all(root)
            .await
            .map_err(|e| LakeError::io(root, e))?;
        let root = root
            .canonicalize_utf8()
            .map_err(|e| LakeError::io(root, e))?;
        let tables = Table::ALL
            .iter()
            .map(|table| (*table, Mutex::new(None)))
            .collect();
        Ok(Self {
            inner: Arc::new(Inner { root, tables }),
        })
    }

    /// The lake's folder, from the root.
    pub fn root(&self) -> &Utf8Path {
        &self.inner.root
    }

    /// Appends rows in one commit. None where there is nothing to do: no rows, or the transaction is in already.
    ///
    /// # Errors
    /// Rows that don't fit, a full disk, a table that can't be written.
    pub async fn append<R: Row>(
        &self,
        rows: &[R],
        txn: Option<Txn>,
    ) -> Result<Option<i64>, LakeError> {
        if rows.is_empty() {
            return Ok(None);
        }
        let table = R::TABLE;
        let failed = |e: DeltaTableError| self.failure(table, &e);
        let batch = sorted(table, &to_batch(rows)?)?;
        let mut slot = self.slot(table).lock().await;
        let mut delta = match slot.take() {
            Some(delta) => delta,
            None => match self.load(table, None).await? {
                Some(delta) => delta,
                None => self.create_or_load(table).await?,
            },
        };
        delta.update_state().await.map_err(failed)?;
        if let Some(txn) = &txn {
            let last = delta
                .snapshot()
                .map_err(failed)?
                .snapshot()
                .transaction_version(delta.log_store().as_ref(), &txn.app)
                .await
                .map_err(failed)?;
            if last.is_some_and(|last| last >= txn.version) {
                *slot = Some(delta);
                return Ok(None);
            }
        }
        let mut writer = RecordBatchWriter::for_table(&delta)
            .map_err(failed)?
            .with_writer_properties(writer_properties(table));
        writer.write(batch).await.map_err(failed)?;
        let actions = writer
            .flush()
            .await
            .map_err(failed)?
            .into_iter()
            .map(Action::Add)
            .collect();
        let mut properties = CommitProperties::default().with_max_retries(COMMIT_RETRIES);
        if let Some(txn) = txn {
            properties =
                properties.with_application_transaction(Transaction::new(txn.app, txn.version));
        }
        let partition_by = table.partition_columns();
        let operation = DeltaOperation::Write {
            mode: SaveMode::Append,
            partition_by: (!partition_by.is_empty())
                .then(|| partition_by.iter().map(|c| (*c).to_owned()).collect()),
            predicate: None,
        };
        let commit = CommitBuilder::from(properties)
            .with_actions(actions)
            .build(
                Some(delta.snapshot().map_err(failed)?),
                delta.log_store(),
                operation,
            )
            .await
            .map_err(failed)?;
        let version = commit.version();
        delta.update_state().await.map_err(failed)?;
        *slot = Some(delta);
        Ok(Some(i64::try_from(version).unwrap_or(i64::MAX)))
    }

    /// The last committed transaction number of `app` in a table.
    ///
    /// # Errors
    /// A table that can't be read.
    pub async fn last_txn(&self, table: Table, app: &str) -> Result<Option<i64>, LakeError> {
        let Some(delta) = self.load(table, None).await? else {
            return Ok(None);
        };
        let failed = |e: DeltaTableError| self.failure(table, &e);
        delta
            .snapshot()
            .map_err(failed)?
            .snapshot()
            .transaction_version(delta.log_store().as_ref(), app)
            .await
            .map_err(failed)
    }

    /// The latest version of every table.
    ///
    /// # Errors
    /// A table that can't be read or is of a newer Drillyard.
    pub async fn snapshot(&self) -> Result<Snapshot, LakeError> {
        let mut tables = Vec::new();
        for table in Table::ALL {
            if let Some(delta) = self.load(*table, None).await? {
                tables.push((*table, delta));
            }
        }
        Snapshot::of(self.root(), tables).await
    }

    /// Earlier versions of the tables named; the others are absent.
    ///
    /// # Errors
    /// An unknown table, or a version that is gone.
    pub async fn snapshot_at(
        &self,
        versions: &BTreeMap<String, i64>,
    ) -> Result<Snapshot, LakeError> {
        let mut tables = Vec::new();
        for (name, version) in versions {
            let Some(table) = Table::ALL.iter().copied().find(|t| t.name() == name) else {
                return Err(LakeError::Table {
                    table: "?",
                    path: self.root().to_owned(),
                    message: format!("there is no table '{name}'"),
                });
            };
            let Some(delta) = self.load(table, Some(*version)).await? else {
                return Err(LakeError::Table {
                    table: table.name(),
                    path: self.root().to_owned(),
                    message: format!(
                        "version {version} was asked for and the table does not exist"
                    ),
                });
            };
            tables.push((table, delta));
        }
        Snapshot::of(self.root(), tables).await
    }

    fn slot(&self, table: Table) -> &Mutex<Option<DeltaTable>> {
        // Every table has a slot from the start.
        &self.inner.tables[&table]
    }

    fn url(&self, table: Table) -> Result<url::Url, LakeError> {
        let dir = self.root().join(table.name());
        url::Url::from_directory_path(&dir).map_err(|()| LakeError::Table {
            table: table.name(),
            path: dir,
            message: "the path has no file address".to_owned(),
        })
    }

    async fn load(
        &self,
        table: Table,
        version: Option<i64>,
    ) -> Result<Option<DeltaTable>, LakeError> {
        if !self.root().join(table.name()).join("_delta_log").is_dir() {
            return Ok(None);
        }
        let failed = |e: DeltaTableError| self.failure(table, &e);
        let mut builder = DeltaTableBuilder::from_url(self.url(table)?).map_err(failed)?;
        if let Some(version) = version {
            builder = builder.with_version(version.try_into().map_err(|_| LakeError::Table {
                table: table.name(),
                path: self.root().to_owned(),
                message: format!("there is no version {version}"),
            })?);
        }
        let delta = match builder.load().await {
            Ok(delta) => delta,
            // The folder was just made by another process that has not committed yet.
            Err(DeltaTableError::NotATable(_)) if version.is_none() => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let found = delta
            .snapshot()
            .map_err(failed)?
            .metadata()
            .configuration()
            .get(VERSION_PROPERTY)
            .and_then(|v| v.parse().ok())
            .unwrap_or(1);
        if found > table.version() {
            return Err(LakeError::TooNew {
                table: table.name(),
                found,
                known: table.version(),
            });
        }
        Ok(Some(delta))
    }

    /// Makes a table; where another process makes it at the same moment, theirs is taken.
    async fn create_or_load(&self, table: Table) -> Result<DeltaTable, LakeError> {
        let error = match self.create(table).await {
            Ok(delta) => return Ok(delta),
            Err(error) => error,
        };
        for _ in 0..20 {
            if let Ok(Some(delta)) = self.load(table, None).await {
                return Ok(delta);
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        Err(error)
    }

    async fn create(&self, table: Table) -> Result<DeltaTable, LakeError> {
        let failed = |e: DeltaTableError| self.failure(table, &e);
        let schema: StructType = table
            .schema()
            .as_ref()
            .try_into_kernel()
            .map_err(|e| self.failure(table, &DeltaTableError::from(e)))?;
        let configuration = [
            (VERSION_PROPERTY, table.version().to_string()),
            ("delta.checkpointInterval", "10".to_owned()),
            ("delta.appendOnly", "true".to_owned()),
        ];
        CreateBuilder::new()
            .with_location(self.url(table)?.to_string())
            .with_table_name(table.name())
            .with_columns(schema.fields().cloned())
            .with_partition_columns(table.partition_columns().iter().copied())
            .with_save_mode(SaveMode::Ignore)
            .with_raise_if_key_not_exists(false)
            .with_configuration(
                configuration
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), Some(value))),
            )
            .await
            .map_err(failed)
    }

    fn failure(&self, table: Table, error: &DeltaTableError) -> LakeError {
        let path = self.root().join(table.name());
        let mut source: Option<&dyn std::error::Error> = Some(error);
        while let Some(cause) = source {
            if let Some(io) = cause.downcast_ref::<std::io::Error>() {
                return LakeError::io(path, std::io::Error::new(io.kind(), io.to_string()));
            }
            source = cause.source();
        }
        let message = error.to_string();
        if message.contains("No space left on device") {
            return LakeError::DiskFull { path };
        }
        LakeError::Table {
            table: table.name(),
            path: self.root().to_owned(),
            message,
        }
    }
}

/// The batch in the table's sort order.
fn sorted(table: Table, batch: &RecordBatch) -> Result<RecordBatch, LakeError> {
    let wrong = |e: arrow_schema::ArrowError| {
        LakeError::Rows(TableError {
            table: table.name(),
            message: e.to_string(),
        })
    };
    let columns: Vec<SortColumn> = table
        .sort_columns()
        .iter()
        .filter_map(|name| batch.column_by_name(name))
        .map(|values| SortColumn {
            values: values.clone(),
            options: None,
        })
        .collect();
    let order = lexsort_to_indices(&columns, None).map_err(wrong)?;
    take_record_batch(batch, &order).map_err(wrong)
}

fn writer_properties(table: Table) -> WriterProperties {
    let schema = table.schema();
    let stored: Vec<&str> = schema
        .fields()
        .iter()
        .map(|f| f.name().as_str())
        .filter(|name| !table.partition_columns().contains(name))
        .collect();
    let sorting = table
        .sort_columns()
        .iter()
        .filter_map(|column| stored.iter().position(|name| name == column))
        .map(|index| SortingColumn {
            column_idx: index as i32,
            descending: false,
            nulls_first: true,
        })
        .collect();
    let level = ZstdLevel::try_new(3).unwrap_or_default();
    WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_sorting_columns(Some(sorting))
        .set_created_by(format!("drillyard {}", drillyard_schema::DRILLYARD_VERSION))
        .build()
}
