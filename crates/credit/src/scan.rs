//! Lazy frames over a snapshot's Parquet files.
//!
//! Delta keeps partition columns out of the data files: their values come with the file list and are put back here. Files of
//! other purposes than those asked for are never opened.

use std::collections::BTreeMap;

use drillyard_lake::{DataFile, Snapshot};
use drillyard_schema::{Purpose, Table};
use polars::prelude::*;

use crate::CreditError;

/// Where the files of a table at one version are known.
pub trait TableFiles {
    /// The table's data files; none if the table does not exist.
    fn files(&self, table: Table) -> &[DataFile];
}

impl TableFiles for Snapshot {
    fn files(&self, table: Table) -> &[DataFile] {
        Self::files(self, table)
    }
}

impl TableFiles for BTreeMap<Table, Vec<DataFile>> {
    fn files(&self, table: Table) -> &[DataFile] {
        self.get(&table).map_or(&[], Vec::as_slice)
    }
}

/// The purposes credit reads.
pub const READABLE: [Purpose; 2] = [Purpose::Train, Purpose::Import];

/// The type a column is read as, whatever its width in the file.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Text,
    Int,
    Real,
    Bool,
    Time,
}

impl Kind {
    fn data_type(self) -> DataType {
        match self {
            Self::Text => DataType::String,
            Self::Int | Self::Time => DataType::Int64,
            Self::Real => DataType::Float64,
            Self::Bool => DataType::Boolean,
        }
    }
}

/// The columns of a table's files whose purpose satisfies `wanted`.
pub fn scan(
    lake: &dyn TableFiles,
    table: Table,
    columns: &[(&str, Kind)],
    wanted: impl Fn(&str) -> bool,
) -> Result<LazyFrame, CreditError> {
    let mut frames = Vec::new();
    for file in lake.files(table) {
        let purpose = file.partition.iter().find(|(name, _)| name == "purpose");
        if purpose.is_none_or(|(_, value)| wanted(value)) {
            frames.push(scan_file(table, file, columns)?);
        }
    }
    if frames.is_empty() {
        let empty: Vec<Column> = columns
            .iter()
            .map(|(name, kind)| Column::new_empty((*name).into(), &kind.data_type()))
            .collect();
        let frame = DataFrame::new(0, empty).map_err(CreditError::plan("an absent table"))?;
        return Ok(frame.lazy());
    }
    concat(frames, UnionArgs::default()).map_err(CreditError::plan("a table's files"))
}

fn scan_file(
    table: Table,
    file: &DataFile,
    columns: &[(&str, Kind)],
) -> Result<LazyFrame, CreditError> {
    let error = |message: String| CreditError::File {
        table: table.name(),
        path: file.path.clone(),
        message,
    };
    // `run_date=…` in a path is Delta's layout, not something to guess a column's type from: the file list has the values.
    let args = ScanArgsParquet {
        glob: false,
        hive_options: HiveOptions::new_disabled(),
        ..ScanArgsParquet::default()
    };
    let mut frame = LazyFrame::scan_parquet(PlRefPath::new(file.path.as_str()), args)
        .map_err(|e| error(e.to_string()))?;
    // Read now, so that a damaged file is named; the plan would only say that something failed.
    let found = frame.collect_schema().map_err(|e| error(e.to_string()))?;
    let schema = table.schema();
    let mut chosen = Vec::with_capacity(columns.len());
    for (column, kind) in columns {
        let partition = file.partition.iter().find(|(name, _)| name == column);
        let value = if let Some((_, value)) = partition {
            lit(value.clone())
        } else if found.contains(column) {
            col(*column)
        } else if schema
            .fields()
            .find(column)
            .is_some_and(|(_, field)| field.is_nullable())
        {
            // A file from before the column was added.
            lit(NULL)
        } else {
            return Err(error(format!("it lacks column {column}")));
        };
        chosen.push(value.cast(kind.data_type()).alias(*column));
    }
    Ok(frame.select(chosen))
}
