//! One version of every table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_schema::Schema;
use camino::{Utf8Path, Utf8PathBuf};
use deltalake::DeltaTable;
use drillyard_schema::table::from_batch;
use drillyard_schema::{Purpose, Row, RunId, StageRunId, Table};
use fs_err::File;
use futures::TryStreamExt;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::error::LakeError;

/// A Parquet file of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// From the root.
    pub path: Utf8PathBuf,
    /// Partition columns and their values; the file itself lacks these columns.
    pub partition: Vec<(String, String)>,
    /// Number of rows; -1 where the file's statistics don't tell.
    pub rows: i64,
    /// Size.
    pub bytes: i64,
}

/// Which rows to read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only this run's.
    pub run_id: Option<RunId>,
    /// Only these purposes'; all when empty.
    pub purposes: Vec<Purpose>,
    /// Only this stage execution's.
    pub stage_run: Option<StageRunId>,
}

/// One version of every table. Cheap to clone, never changes.
#[derive(Debug, Clone)]
pub struct Snapshot {
    root: Utf8PathBuf,
    versions: BTreeMap<String, i64>,
    files: Arc<BTreeMap<Table, Vec<DataFile>>>,
}

impl Snapshot {
    pub(crate) async fn of(
        root: &Utf8Path,
        tables: Vec<(Table, DeltaTable)>,
    ) -> Result<Self, LakeError> {
        let mut versions = BTreeMap::new();
        let mut files = BTreeMap::new();
        for (table, delta) in tables {
            let failed = |e: deltalake::DeltaTableError| LakeError::Table {
                table: table.name(),
                path: root.to_owned(),
                message: e.to_string(),
            };
            let state = delta.snapshot().map_err(failed)?;
            versions.insert(
                table.name().to_owned(),
                i64::try_from(state.version()).unwrap_or(i64::MAX),
            );
            let dir = root.join(table.name());
            let views: Vec<_> = state
                .snapshot()
                .file_views(delta.log_store().as_ref(), None)
                .try_collect()
                .await
                .map_err(failed)?;
            let mut list: Vec<DataFile> = views
                .iter()
                .map(|view| {
                    let mut values = view.partition_values_map();
                    DataFile {
                        path: dir.join(view.object_store_path().as_ref()),
                        partition: table
                            .partition_columns()
                            .iter()
                            .map(|column| {
                                (
                                    (*column).to_owned(),
                                    values.remove(*column).flatten().unwrap_or_default(),
                                )
                            })
                            .collect(),
                        rows: view
                            .num_records()
                            .and_then(|n| i64::try_from(n).ok())
                            .unwrap_or(-1),
                        bytes: view.size(),
                    }
                })
                .collect();
            list.sort_by(|a, b| a.path.cmp(&b.path));
            files.insert(table, list);
        }
        Ok(Self {
            root: root.to_owned(),
            versions,
            files: Arc::new(files),
        })
    }

    /// The lake's folder.
    pub fn root(&self) -> &Utf8Path {
        &self.root
    }

    /// Version of each table that exists.
    pub fn versions(&self) -> &BTreeMap<String, i64> {
        &self.versions
    }

    /// The files of a table; none where it does not exist.
    pub fn files(&self, table: Table) -> &[DataFile] {
        self.files.get(&table).map_or(&[], Vec::as_slice)
    }

    /// The rows of a table that pass the filter, in the table's sort order within each file, files in order of their paths. Rows of
    /// episodes that are not visible yet are included; who needs only visible ones joins with `episodes`.
    ///
    /// # Errors
    /// A missing or corrupt file, named.
    pub async fn read<R: Row>(&self, filter: &Filter) -> Result<Vec<R>, LakeError> {
        let files: Vec<DataFile> = self
            .files(R::TABLE)
            .iter()
            .filter(|file| filter.admits(file))
            .cloned()
            .collect();
        let filter = filter.clone();
        let root = self.root.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut rows = Vec::new();
            for file in &files {
                for batch in read_file(file)? {
                    let batch =
                        complete(R::TABLE, &batch, file).map_err(|e| LakeError::Corrupt {
                            path: file.path.clone(),
                            message: e,
                        })?;
                    let batch = filter.apply(&batch).map_err(|e| LakeError::Corrupt {
                        path: file.path.clone(),
                        message: e,
                    })?;
                    if batch.num_rows() > 0 {
                        rows.extend(from_batch::<R>(&batch)?);
                    }
                }
            }
            Ok(rows)
        });
        read.await.map_err(|e| LakeError::Table {
            table: R::TABLE.name(),
            path: root,
            message: e.to_string(),
        })?
    }
}

impl Filter {
    /// Everything of one run.
    pub fn run(run_id: &RunId) -> Self {
        Self {
            run_id: Some(run_id.clone()),
            ..Self::default()
        }
    }

    fn admits(&self, file: &DataFile) -> bool {
        let purpose = file
            .partition
            .iter()
            .find(|(column, _)| column == "purpose");
        self.purposes.is_empty()
            || purpose.is_none_or(|(_, value)| self.purposes.iter().any(|p| p.as_str() == value))
    }

    /// Keeps the rows whose run and stage execution match.
    fn apply(&self, batch: &RecordBatch) -> Result<RecordBatch, String> {
        let mut batch = batch.clone();
        let wanted = [
            ("run_id", self.run_id.as_ref().map(RunId::as_str)),
            ("stage_run", self.stage_run.as_ref().map(StageRunId::as_str)),
        ];
        for (column, value) in wanted {
            let (Some(value), Some(values)) = (value, batch.column_by_name(column)) else {
                continue;
            };
            let values = values
                .as_any()
                .downcast_ref::<StringArray>()
                .ok_or_else(|| format!("column {column} is not text"))?;
            let keep: arrow_array::BooleanArray =
                values.iter().map(|v| Some(v == Some(value))).collect();
            batch = arrow_select::filter::filter_record_batch(&batch, &keep)
                .map_err(|e| e.to_string())?;
        }
        Ok(batch)
    }
}

fn read_file(file: &DataFile) -> Result<Vec<RecordBatch>, LakeError> {
    let corrupt = |message: String| LakeError::Corrupt {
        path: file.path.clone(),
        message,
    };
    let opened = File::open(&file.path).map_err(|e| LakeError::io(&file.path, e))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(opened.into_parts().0)
        .map_err(|e| corrupt(e.to_string()))?;
    let reader = reader
        .with_batch_size(8192)
        .build()
        .map_err(|e| corrupt(e.to_string()))?;
    reader
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| corrupt(e.to_string()))
}

/// The batch with the table's schema: partition columns put back, columns that an older file lacks filled with nulls.
fn complete(table: Table, batch: &RecordBatch, file: &DataFile) -> Result<RecordBatch, String> {
    let schema = table.schema();
    let mut columns: Vec<ArrayRef> = Vec::with_capacity(schema.fields().len());
    let partition: BTreeSet<&str> = table.partition_columns().iter().copied().collect();
    for field in schema.fields() {
        let column = if partition.contains(field.name().as_str()) {
            let value = file
                .partition
                .iter()
                .find(|(name, _)| name == field.name())
                .map_or("", |(_, value)| value.as_str());
            Arc::new(StringArray::from(vec![value; batch.num_rows()])) as ArrayRef
        } else if let Some(column) = batch.column_by_name(field.name()) {
            if column.data_type() == field.data_type() {
                column.clone()
            } else {
                arrow_cast::cast(column, field.data_type()).map_err(|e| e.to_string())?
            }
        } else if field.is_nullable() {
            arrow_array::new_null_array(field.data_type(), batch.num_rows())
        } else {
            return Err(format!("column {} is missing", field.name()));
        };
        columns.push(column);
    }
    RecordBatch::try_new(Arc::new(Schema::new(schema.fields().clone())), columns)
        .map_err(|e| e.to_string())
}
