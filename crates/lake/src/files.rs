//! Rows to Parquet files: one per partition, sorted, compressed, on disk itself before anyone hears of them.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arrow_array::cast::AsArray;
use arrow_array::{RecordBatch, UInt32Array};
use arrow_ord::sort::{SortColumn, lexsort_to_indices};
use arrow_schema::{ArrowError, SchemaRef};
use arrow_select::take::take_record_batch;
use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::{DRILLYARD_VERSION, Table, TableError};
use fs_err::{File, OpenOptions};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::metadata::{ParquetMetaData, SortingColumn};
use parquet::file::properties::WriterProperties;
use parquet::file::statistics::Statistics;
use serde_json::{Map, Value, json};

use crate::error::LakeError;

/// A file that was written, as the table will list it.
#[derive(Debug, Clone)]
pub(crate) struct NewFile {
    /// Relative to the table's folder.
    pub path: String,
    pub size: i64,
    /// Partition columns and their values.
    pub partition: Vec<(String, String)>,
    /// Milliseconds since 1970.
    pub modified: i64,
    /// JSON: rows, and smallest, largest and number of nulls by column.
    pub statistics: String,
}

/// The rows in the table's sort order.
pub(crate) fn sorted(table: Table, batch: &RecordBatch) -> Result<RecordBatch, TableError> {
    let column = |name: &&str| {
        let values = batch.column_by_name(name)?.clone();
        Some(SortColumn {
            values,
            options: None,
        })
    };
    let columns: Vec<SortColumn> = table.sort_columns().iter().filter_map(column).collect();
    let order = lexsort_to_indices(&columns, None);
    order
        .and_then(|order| take_record_batch(batch, &order))
        .map_err(|e| wrong(table, &e))
}

/// Writes the rows, which are in order, below `dir`. After an error no file is left.
pub(crate) fn write(
    table: Table,
    dir: &Utf8Path,
    batch: &RecordBatch,
) -> Result<Vec<NewFile>, LakeError> {
    let mut files = Vec::new();
    for (values, part) in split(table, batch)? {
        let partition: Vec<(String, String)> = table
            .partition_columns()
            .iter()
            .map(|column| (*column).to_owned())
            .zip(values)
            .collect();
        match write_one(table, dir, partition, &part) {
            Ok(file) => files.push(file),
            Err(error) => {
                remove(dir, &files);
                return Err(error);
            }
        }
    }
    Ok(files)
}

/// Removes files that no version lists. What can't be removed is in nobody's way.
pub(crate) fn remove(dir: &Utf8Path, files: &[NewFile]) {
    for file in files {
        let _ = fs_err::remove_file(dir.join(&file.path));
    }
}

/// A file or folder is on disk itself when this returns.
pub(crate) fn sync(path: &Utf8Path) -> Result<(), LakeError> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|e| LakeError::writing(path, e))
}

/// The rows of each partition, in their order, without the partition columns.
fn split(table: Table, batch: &RecordBatch) -> Result<Vec<(Vec<String>, RecordBatch)>, LakeError> {
    let wrong = |e: ArrowError| LakeError::Rows(wrong(table, &e));
    let schema = batch.schema();
    let (mut keys, mut kept) = (Vec::new(), Vec::new());
    for (index, field) in schema.fields().iter().enumerate() {
        if table.partition_columns().contains(&field.name().as_str()) {
            keys.push(batch.column(index).as_string::<i32>());
        } else {
            kept.push(index);
        }
    }
    let rows = batch.project(&kept).map_err(wrong)?;
    let mut parts: BTreeMap<Vec<String>, Vec<u32>> = BTreeMap::new();
    for row in 0..batch.num_rows() {
        let key = keys.iter().map(|key| key.value(row).to_owned()).collect();
        parts.entry(key).or_default().push(row as u32);
    }
    parts
        .into_iter()
        .map(|(key, indices)| {
            Ok((
                key,
                take_record_batch(&rows, &UInt32Array::from(indices)).map_err(wrong)?,
            ))
        })
        .collect()
}

fn write_one(
    table: Table,
    dir: &Utf8Path,
    partition: Vec<(String, String)>,
    rows: &RecordBatch,
) -> Result<NewFile, LakeError> {
    let (content, metadata) = encode(table, rows).map_err(|e| LakeError::Rows(wrong(table, &e)))?;
    let mut path = Utf8PathBuf::new();
    for (column, value) in &partition {
        path.push(format!("{column}={}", folder_name(value)));
    }
    let folder = dir.join(&path);
    path.push(format!("part-{}.zstd.parquet", uuid::Uuid::now_v7()));
    let whole = dir.join(&path);

    fs_err::create_dir_all(&folder).map_err(|e| LakeError::writing(&folder, e))?;
    let written = OpenOptions::new()
        .create_new(true)
        .write(true)
        .open(&whole)
        .and_then(|mut file| {
            file.write_all(&content)?;
            file.sync_all()
        });
    if let Err(error) = written {
        let _ = fs_err::remove_file(&whole);
        return Err(LakeError::writing(&whole, error));
    }
    // The file's name, and those of folders that may be new.
    for folder in folder.ancestors().take(partition.len() + 1) {
        if let Err(error) = sync(folder) {
            let _ = fs_err::remove_file(&whole);
            return Err(error);
        }
    }
    let modified = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as i64);
    Ok(NewFile {
        path: path.into_string(),
        size: content.len() as i64,
        partition,
        modified,
        statistics: statistics(&rows.schema(), &metadata),
    })
}

fn encode(table: Table, rows: &RecordBatch) -> Result<(Vec<u8>, ParquetMetaData), ArrowError> {
    let schema = rows.schema();
    // Parquet counts leaf columns; the sort columns stand before any nested one, so that counting columns is the same.
    let sorting = table
        .sort_columns()
        .iter()
        .filter_map(|column| schema.index_of(column).ok())
        .map(|index| SortingColumn {
            column_idx: index as i32,
            descending: false,
            nulls_first: true,
        })
        .collect();
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))
        .set_sorting_columns(Some(sorting))
        .set_created_by(format!("drillyard {DRILLYARD_VERSION}"))
        .build();
    let mut content = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut content, schema, Some(properties))?;
    writer.write(rows)?;
    let metadata = writer.close()?;
    Ok((content, metadata))
}

/// What readers skip files by: of texts and integers smallest and largest, of every column that is not nested the number of nulls.
fn statistics(schema: &SchemaRef, metadata: &ParquetMetaData) -> String {
    let (mut smallest, mut largest, mut nulls) = (Map::new(), Map::new(), Map::new());
    for field in schema.fields() {
        let groups = metadata.row_groups().iter();
        let of_groups: Option<Vec<&Statistics>> = groups
            .map(|group| {
                let mut columns = group.columns().iter();
                columns
                    .find(|c| c.column_path().parts() == [field.name().as_str()])?
                    .statistics()
            })
            .collect();
        let Some(of_groups) = of_groups.filter(|_| !field.data_type().is_nested()) else {
            continue;
        };
        let count: u64 = of_groups.iter().filter_map(|s| s.null_count_opt()).sum();
        nulls.insert(field.name().clone(), json!(count));
        if field.data_type().is_temporal() {
            continue;
        }
        let bounds: Option<Vec<(Bound, Bound)>> = of_groups.iter().map(|s| bounds(s)).collect();
        let Some(bounds) = bounds else { continue };
        let least = bounds.iter().map(|(least, _)| least).min();
        let most = bounds.iter().map(|(_, most)| most).max();
        if let (Some(least), Some(most)) = (least, most) {
            smallest.insert(field.name().clone(), least.json());
            largest.insert(field.name().clone(), most.json());
        }
    }
    let rows = metadata.file_metadata().num_rows();
    json!({ "numRecords": rows, "minValues": smallest, "maxValues": largest, "nullCount": nulls })
        .to_string()
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Bound {
    Number(i64),
    Text(String),
}

impl Bound {
    fn json(&self) -> Value {
        match self {
            Self::Number(number) => json!(number),
            Self::Text(text) => json!(text),
        }
    }
}

/// None where the column holds neither texts nor integers, or nothing but nulls.
fn bounds(statistics: &Statistics) -> Option<(Bound, Bound)> {
    let text = |bytes: &[u8]| Some(Bound::Text(std::str::from_utf8(bytes).ok()?.to_owned()));
    match statistics {
        Statistics::Int32(s) => Some((
            Bound::Number((*s.min_opt()?).into()),
            Bound::Number((*s.max_opt()?).into()),
        )),
        Statistics::Int64(s) => Some((Bound::Number(*s.min_opt()?), Bound::Number(*s.max_opt()?))),
        Statistics::ByteArray(s) => Some((text(s.min_bytes_opt()?)?, text(s.max_bytes_opt()?)?)),
        _ => None,
    }
}

/// A partition value as part of a folder's name.
fn folder_name(value: &str) -> String {
    use std::fmt::Write as _;
    if value.is_empty() {
        return "__HIVE_DEFAULT_PARTITION__".to_owned();
    }
    let mut name = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) {
            name.push(byte.into());
        } else {
            // Writing to a string can't fail.
            let _ = write!(name, "%{byte:02X}");
        }
    }
    name
}

fn wrong(table: Table, error: &ArrowError) -> TableError {
    TableError {
        table: table.name(),
        message: error.to_string(),
    }
}

/// The batch with the columns of another schema: those it lacks are null.
pub(crate) fn fit(batch: &RecordBatch, schema: SchemaRef) -> Result<RecordBatch, ArrowError> {
    let column = |field: &Arc<arrow_schema::Field>| {
        let column = batch.column_by_name(field.name()).cloned();
        column.unwrap_or_else(|| arrow_array::new_null_array(field.data_type(), batch.num_rows()))
    };
    let columns = schema.fields().iter().map(column).collect();
    RecordBatch::try_new(schema, columns)
}
