//! Results of a query, and the four ways to write them.

use std::io::Write;
use std::str::FromStr;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, StringArray};
use arrow_cast::display::{ArrayFormatter, FormatOptions};
use arrow_json::writer::LineDelimited;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table as TextTable};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde::de::DeserializeOwned;

use crate::error::{ErrorKind, QueryError};

/// How to write a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Table,
    /// Comma-separated, with a header line; nested values as JSON text.
    Csv,
    /// One JSON object a line, nulls included.
    JsonLines,
    /// A Parquet file.
    Parquet,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "table" => Ok(Self::Table),
            "csv" => Ok(Self::Csv),
            "jsonl" | "json" | "ndjson" => Ok(Self::JsonLines),
            "parquet" => Ok(Self::Parquet),
            other => Err(format!(
                "unknown format '{other}'; one of: table, csv, jsonl, parquet"
            )),
        }
    }
}

/// How a table for people looks.
#[derive(Debug, Clone, Copy)]
pub struct TableStyle {
    /// Rows shown; what is left out is counted in a last line.
    pub max_rows: usize,
    /// Characters of one cell; what is longer ends in `…`.
    pub max_cell: usize,
}

impl Default for TableStyle {
    fn default() -> Self {
        Self {
            max_rows: 100,
            max_cell: 80,
        }
    }
}

/// What a query returned.
#[derive(Debug, Clone)]
pub struct QueryResult {
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
    truncated: bool,
}

impl QueryResult {
    pub(crate) fn new(schema: SchemaRef, batches: Vec<RecordBatch>, limit: Option<usize>) -> Self {
        let mut result = Self {
            schema,
            batches,
            truncated: false,
        };
        if let Some(limit) = limit {
            result.cut(limit);
        }
        result
    }

    fn cut(&mut self, limit: usize) {
        let mut left = limit;
        for batch in &mut self.batches {
            if batch.num_rows() > left {
                *batch = batch.slice(0, left);
                self.truncated = true;
            }
            left -= batch.num_rows();
        }
        self.batches.retain(|b| b.num_rows() > 0);
    }

    /// Names and types of the columns.
    pub fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    /// The rows.
    pub fn batches(&self) -> &[RecordBatch] {
        &self.batches
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.batches.iter().map(RecordBatch::num_rows).sum()
    }

    /// Whether a row limit cut it.
    pub fn truncated(&self) -> bool {
        self.truncated
    }

    /// The names of the columns.
    pub fn columns(&self) -> Vec<&str> {
        let fields = self.schema.fields().iter();
        fields.map(|f| f.name().as_str()).collect()
    }

    /// Every row as text, null as `None`. Times are ISO 8601, nested values as the engine shows them.
    pub fn text_rows(&self) -> Result<Vec<Vec<Option<String>>>, QueryError> {
        let options = FormatOptions::default();
        let mut rows = Vec::with_capacity(self.num_rows());
        for batch in &self.batches {
            let columns = batch
                .columns()
                .iter()
                .map(|c| ArrayFormatter::try_new(c.as_ref(), &options).map(|f| (c, f)))
                .collect::<Result<Vec<_>, _>>()
                .map_err(|e| failed(&e))?;
            for row in 0..batch.num_rows() {
                let cell = |(column, formatter): &(&ArrayRef, ArrayFormatter<'_>)| {
                    column
                        .is_valid(row)
                        .then(|| formatter.value(row).to_string())
                };
                rows.push(columns.iter().map(cell).collect());
            }
        }
        Ok(rows)
    }

    /// Rows as values of a type with the columns' names as fields. Numbers and text are converted where nothing is lost.
    pub fn rows<T: DeserializeOwned>(&self) -> Result<Vec<T>, QueryError> {
        let mut rows = Vec::with_capacity(self.num_rows());
        for batch in &self.batches {
            let part: Vec<T> = serde_arrow::from_record_batch(&plain_text(batch)?)
                .map_err(|e| QueryError::new(ErrorKind::Query, "", first_line(&e.to_string())))?;
            rows.extend(part);
        }
        Ok(rows)
    }

    /// Writes in a format.
    pub fn write<W: Write + Send>(
        &self,
        format: Format,
        style: &TableStyle,
        out: W,
    ) -> Result<(), QueryError> {
        match format {
            Format::Table => self.write_table(style, out),
            Format::Csv => self.write_csv(out),
            Format::JsonLines => self.write_json_lines(out),
            Format::Parquet => self.write_parquet(out),
        }
    }

    /// Writes a table for people, with a last line that counts the rows.
    pub fn write_table<W: Write>(&self, style: &TableStyle, mut out: W) -> Result<(), QueryError> {
        let mut table = TextTable::new();
        table.load_preset(comfy_table::presets::UTF8_HORIZONTAL_ONLY);
        table.set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(self.columns());
        let rows = self.text_rows()?;
        let numeric: Vec<bool> = self
            .schema
            .fields()
            .iter()
            .map(|f| f.data_type().is_numeric())
            .collect();
        for row in rows.iter().take(style.max_rows) {
            table.add_row(row.iter().zip(&numeric).map(|(cell, numeric)| {
                let text = cell
                    .as_deref()
                    .map_or_else(|| "·".to_owned(), |text| shorten(text, style.max_cell));
                Cell::new(text).set_alignment(if *numeric {
                    CellAlignment::Right
                } else {
                    CellAlignment::Left
                })
            }));
        }
        let shown = rows.len().min(style.max_rows);
        let count = if self.truncated {
            format!("first {shown} rows; more exist")
        } else if shown < rows.len() {
            format!("first {shown} of {} rows", rows.len())
        } else if shown == 1 {
            "1 row".to_owned()
        } else {
            format!("{shown} rows")
        };
        writeln!(out, "{table}\n{count}").map_err(|e| unwritable(&e))
    }

    /// Writes comma-separated values with a header line.
    pub fn write_csv<W: Write>(&self, out: W) -> Result<(), QueryError> {
        let mut writer = arrow_csv::WriterBuilder::new().with_header(true).build(out);
        let flat = self.batches.iter().map(flat);
        let mut any = false;
        for batch in flat {
            writer.write(&batch?).map_err(|e| failed(&e))?;
            any = true;
        }
        if !any {
            let empty = flat_schema(&self.schema);
            writer
                .write(&RecordBatch::new_empty(empty))
                .map_err(|e| failed(&e))?;
        }
        Ok(())
    }

    /// Writes one JSON object a line.
    pub fn write_json_lines<W: Write>(&self, out: W) -> Result<(), QueryError> {
        let mut writer = arrow_json::WriterBuilder::new()
            .with_explicit_nulls(true)
            .build::<_, LineDelimited>(out);
        for batch in &self.batches {
            writer.write(batch).map_err(|e| failed(&e))?;
        }
        writer.finish().map_err(|e| failed(&e))
    }

    /// Writes a Parquet file.
    pub fn write_parquet<W: Write + Send>(&self, out: W) -> Result<(), QueryError> {
        let error = |e: parquet::errors::ParquetError| {
            QueryError::new(ErrorKind::Output, "", format!("could not write: {e}"))
        };
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .build();
        let mut writer =
            ArrowWriter::try_new(out, self.schema(), Some(properties)).map_err(error)?;
        for batch in &self.batches {
            writer.write(batch).map_err(error)?;
        }
        writer.close().map_err(error)?;
        Ok(())
    }
}

fn shorten(text: &str, max: usize) -> String {
    let line = text
        .replace('\n', "\\n")
        .replace('\r', "\\r")
        .replace('\t', "\\t");
    if line.chars().count() <= max {
        return line;
    }
    let kept: String = line.chars().take(max.saturating_sub(1)).collect();
    format!("{kept}…")
}

/// Text of any width as plain text, so that row types need not know which kind an expression made.
fn plain_text(batch: &RecordBatch) -> Result<RecordBatch, QueryError> {
    let mut fields = Vec::new();
    let mut columns = Vec::new();
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        let target = plain_type(field.data_type());
        columns.push(arrow_cast::cast(column, &target).map_err(|e| failed(&e))?);
        fields.push(field.as_ref().clone().with_data_type(target));
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).map_err(|e| failed(&e))
}

fn plain_type(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Utf8View | DataType::LargeUtf8 => DataType::Utf8,
        DataType::List(item) => {
            let plain = plain_type(item.data_type());
            DataType::List(Arc::new(item.as_ref().clone().with_data_type(plain)))
        }
        other => other.clone(),
    }
}

fn flat_schema(schema: &Schema) -> SchemaRef {
    let fields: Vec<Field> = schema
        .fields()
        .iter()
        .map(|field| {
            if field.data_type().is_nested() {
                field.as_ref().clone().with_data_type(DataType::Utf8)
            } else {
                field.as_ref().clone()
            }
        })
        .collect();
    Arc::new(Schema::new(fields))
}

/// Nested columns as JSON text.
fn flat(batch: &RecordBatch) -> Result<RecordBatch, QueryError> {
    let schema = flat_schema(&batch.schema());
    let columns = batch
        .columns()
        .iter()
        .map(|column| {
            if column.data_type().is_nested() {
                json_text(column)
            } else {
                Ok(Arc::clone(column))
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    RecordBatch::try_new(schema, columns).map_err(|e| failed(&e))
}

fn json_text(column: &ArrayRef) -> Result<ArrayRef, QueryError> {
    let field = Field::new("v", column.data_type().clone(), true);
    let batch = RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![Arc::clone(column)])
        .map_err(|e| failed(&e))?;
    let mut text = Vec::new();
    let mut writer = arrow_json::WriterBuilder::new()
        .with_explicit_nulls(true)
        .build::<_, LineDelimited>(&mut text);
    writer.write(&batch).map_err(|e| failed(&e))?;
    writer.finish().map_err(|e| failed(&e))?;
    drop(writer);
    let mut values: Vec<Option<String>> = Vec::with_capacity(column.len());
    for line in text.split(|byte| *byte == b'\n').filter(|l| !l.is_empty()) {
        let object: serde_json::Value = serde_json::from_slice(line)
            .map_err(|e| QueryError::new(ErrorKind::Output, "", e.to_string()))?;
        values.push(match &object["v"] {
            serde_json::Value::Null => None,
            value => Some(value.to_string()),
        });
    }
    Ok(Arc::new(StringArray::from(values)))
}

fn failed(error: &ArrowError) -> QueryError {
    let kind = match error {
        ArrowError::IoError(..) => ErrorKind::Output,
        _ => ErrorKind::Query,
    };
    QueryError::new(kind, "", first_line(&error.to_string()))
}

fn unwritable(error: &std::io::Error) -> QueryError {
    QueryError::new(ErrorKind::Output, "", format!("could not write: {error}"))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use arrow_array::types::Int32Type;
    use arrow_array::{Float64Array, ListArray};
    use serde::Deserialize;

    use super::*;

    fn result(limit: Option<usize>) -> QueryResult {
        let name: ArrayRef = Arc::new(StringArray::from(vec![Some("a,\nb"), None]));
        let share: ArrayRef = Arc::new(Float64Array::from(vec![0.5, 1.0]));
        let ids: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(vec![
            Some(vec![Some(1), Some(2)]),
            None,
        ]));
        let batch =
            RecordBatch::try_from_iter([("name", name), ("share", share), ("ids", ids)]).unwrap();
        QueryResult::new(batch.schema(), vec![batch], limit)
    }

    fn written(format: Format, limit: Option<usize>) -> String {
        let mut out = Vec::new();
        let style = TableStyle {
            max_rows: 10,
            max_cell: 4,
        };
        result(limit).write(format, &style, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn csv_quotes_and_writes_nested_values_as_json() {
        assert_eq!(
            written(Format::Csv, None),
            "name,share,ids\n\"a,\nb\",0.5,\"[1,2]\"\n,1.0,\n"
        );
    }

    #[test]
    fn json_lines_keep_nulls() {
        assert_eq!(
            written(Format::JsonLines, None),
            "{\"name\":\"a,\\nb\",\"share\":0.5,\"ids\":[1,2]}\n{\"name\":null,\"share\":1.0,\"ids\":null}\n"
        );
    }

    #[test]
    fn tables_shorten_cells_and_count_rows() {
        let text = written(Format::Table, None);
        assert!(text.contains(" a,\\… "), "{text}");
        assert!(text.contains(" · "), "{text}");
        assert!(text.ends_with("2 rows\n"), "{text}");
        assert!(written(Format::Table, Some(1)).ends_with("first 1 rows; more exist\n"));
    }

    #[test]
    fn parquet_reads_back() {
        let mut out = Vec::new();
        result(None).write_parquet(&mut out).unwrap();
        let reader =
            parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(in_a_file(&out))
                .unwrap()
                .build()
                .unwrap();
        let batches: Vec<_> = reader.map(Result::unwrap).collect();
        assert_eq!(batches, result(None).batches);
    }

    fn in_a_file(data: &[u8]) -> std::fs::File {
        use std::io::{Seek, Write};
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(data).unwrap();
        file.rewind().unwrap();
        file
    }

    #[test]
    fn an_empty_result_still_names_its_columns() {
        let schema = result(None).schema();
        let mut out = Vec::new();
        QueryResult::new(schema, vec![], None)
            .write_csv(&mut out)
            .unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "name,share,ids\n");
    }

    #[test]
    fn rows_become_values() {
        #[derive(Debug, PartialEq, Deserialize)]
        struct Row {
            name: Option<String>,
            share: f64,
        }
        let rows: Vec<Row> = result(None).rows().unwrap();
        assert_eq!(
            rows[1],
            Row {
                name: None,
                share: 1.0
            }
        );
        assert_eq!(rows.len(), 2);
    }
}
