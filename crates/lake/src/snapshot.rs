//! One version of every table.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, BooleanArray, RecordBatch, StringArray};
use arrow_ord::sort::{SortColumn, lexsort_to_indices};
use arrow_select::concat::concat;
use arrow_select::filter::filter_record_batch;
use camino::{Utf8Path, Utf8PathBuf};
use deltalake::DeltaTable;
use drillyard_schema::table::from_batch;
use drillyard_schema::{Purpose, Row, RunId, StageRunId, Table};
use fs_err::File;
use futures::{StreamExt, TryStreamExt};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::statistics::Statistics;

use crate::delta::Place;
use crate::error::LakeError;

/// Rows decoded at a time.
const BATCH_ROWS: usize = 8192;

/// A Parquet file of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// From the root.
    pub path: Utf8PathBuf,
    /// Partition columns and their values; the file itself lacks these columns.
    pub partition: Vec<(String, String)>,
    /// Number of rows; -1 where the table does not tell.
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
        tables: Vec<(Place, DeltaTable)>,
    ) -> Result<Self, LakeError> {
        let mut versions = BTreeMap::new();
        let mut files = BTreeMap::new();
        for (place, delta) in tables {
            let state = delta.snapshot().map_err(|e| place.error(&e))?;
            versions.insert(
                place.table.name().to_owned(),
                i64::try_from(state.version()).unwrap_or(i64::MAX),
            );
            let views = state
                .snapshot()
                .file_views(delta.log_store().as_ref(), None)
                .try_collect::<Vec<_>>()
                .await;
            let mut list = Vec::new();
            for view in views.map_err(|e| place.error(&e))? {
                let mut values = view.partition_values_map();
                let value = |column: &&str| {
                    (
                        (*column).to_owned(),
                        values.remove(*column).flatten().unwrap_or_default(),
                    )
                };
                list.push(DataFile {
                    path: place.file_path(view.object_store_path().as_ref()),
                    partition: place.table.partition_columns().iter().map(value).collect(),
                    rows: view
                        .num_records()
                        .and_then(|n| i64::try_from(n).ok())
                        .unwrap_or(-1),
                    bytes: view.size(),
                });
            }
            list.sort_by(|a, b| a.path.cmp(&b.path));
            files.insert(place.table, list);
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

    /// The files of a table, by path; none where it does not exist.
    pub fn files(&self, table: Table) -> &[DataFile] {
        self.files.get(&table).map_or(&[], Vec::as_slice)
    }

    /// The rows of a table that pass the filter, sorted by the table's sort columns. Rows of episodes that are not visible yet are
    /// among them; who needs only visible ones joins with `episodes`.
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
        let filter = Arc::new(filter.clone());
        let at_once = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let parts: Vec<Part<R>> = futures::stream::iter(files)
            .map(|file| {
                let filter = filter.clone();
                let path = file.path.clone();
                let read = tokio::task::spawn_blocking(move || read_file::<R>(&file, &filter));
                // A decoder that panics has met a corrupt file, too.
                async move {
                    read.await.unwrap_or_else(|e| {
                        Err(LakeError::Corrupt {
                            path,
                            message: e.to_string(),
                        })
                    })
                }
            })
            .buffered(at_once)
            .try_collect()
            .await?;
        merge(parts).map_err(|message| LakeError::Table {
            table: R::TABLE.name(),
            path: self.root.join(R::TABLE.name()),
            message,
        })
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

    /// The columns that rows are chosen by, and the values wanted.
    fn wanted(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let run = self.run_id.as_ref().map(|id| ("run_id", id.as_str()));
        run.into_iter()
            .chain(self.stage_run.as_ref().map(|id| ("stage_run", id.as_str())))
    }

    /// False where the statistics rule out that a row group holds a wanted row.
    fn may_hold(&self, group: &RowGroupMetaData) -> bool {
        self.wanted().all(|(column, value)| {
            let column = group
                .columns()
                .iter()
                .find(|c| c.column_path().parts() == [column]);
            let Some(Statistics::ByteArray(statistics)) = column.and_then(|c| c.statistics())
            else {
                return true;
            };
            statistics
                .min_bytes_opt()
                .is_none_or(|min| min <= value.as_bytes())
                && statistics
                    .max_bytes_opt()
                    .is_none_or(|max| value.as_bytes() <= max)
        })
    }

    /// Keeps the rows wanted. A table without the column has none of a run's or stage execution's own.
    fn apply(&self, batch: RecordBatch) -> Result<RecordBatch, String> {
        let mut batch = batch;
        for (column, value) in self.wanted() {
            let Some(values) = batch.column_by_name(column) else {
                continue;
            };
            let values = values
                .as_any()
                .downcast_ref::<StringArray>()
                .ok_or_else(|| format!("column {column} is not text"))?;
            let keep: BooleanArray = values.iter().map(|v| Some(v == Some(value))).collect();
            batch = filter_record_batch(&batch, &keep).map_err(|e| e.to_string())?;
        }
        Ok(batch)
    }
}

/// Rows of one file, and their sort columns.
struct Part<R> {
    rows: Vec<R>,
    keys: Vec<Vec<ArrayRef>>,
}

fn read_file<R: Row>(file: &DataFile, filter: &Filter) -> Result<Part<R>, LakeError> {
    let corrupt = |message: String| LakeError::Corrupt {
        path: file.path.clone(),
        message,
    };
    let opened = File::open(&file.path).map_err(|e| LakeError::reading(&file.path, e))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(opened.into_parts().0)
        .map_err(|e| corrupt(e.to_string()))?;
    let groups = reader.metadata().row_groups().iter().enumerate();
    let groups = groups
        .filter(|(_, group)| filter.may_hold(group))
        .map(|(index, _)| index)
        .collect();
    let batches = reader
        .with_row_groups(groups)
        .with_batch_size(BATCH_ROWS)
        .build()
        .map_err(|e| corrupt(e.to_string()))?;
    let mut part = Part {
        rows: Vec::new(),
        keys: Vec::new(),
    };
    for batch in batches {
        let batch = batch.map_err(|e| corrupt(e.to_string()))?;
        let batch = filter
            .apply(complete(R::TABLE, &batch, file).map_err(corrupt)?)
            .map_err(corrupt)?;
        if batch.num_rows() == 0 {
            continue;
        }
        part.rows.extend(from_batch::<R>(&batch)?);
        let keys = R::TABLE
            .sort_columns()
            .iter()
            .filter_map(|name| batch.column_by_name(name).cloned());
        part.keys.push(keys.collect());
    }
    Ok(part)
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
    RecordBatch::try_new(schema, columns).map_err(|e| e.to_string())
}

/// All rows in the order of their sort columns.
fn merge<R: Row>(parts: Vec<Part<R>>) -> Result<Vec<R>, String> {
    let mut rows = Vec::with_capacity(parts.iter().map(|part| part.rows.len()).sum());
    let mut keys = Vec::new();
    for part in parts {
        rows.extend(part.rows.into_iter().map(Some));
        keys.extend(part.keys);
    }
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let mut columns = Vec::new();
    for index in 0..R::TABLE.sort_columns().len() {
        let pieces: Vec<&dyn Array> = keys.iter().map(|batch| batch[index].as_ref()).collect();
        columns.push(SortColumn {
            values: concat(&pieces).map_err(|e| e.to_string())?,
            options: None,
        });
    }
    let order = lexsort_to_indices(&columns, None).map_err(|e| e.to_string())?;
    Ok(order
        .values()
        .iter()
        .filter_map(|index| rows[*index as usize].take())
        .collect())
}
