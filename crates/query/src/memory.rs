//! A lake in memory that takes `INSERT`s, for trying out and testing SQL files.
//!
//! Its tables have the lake's schemas. A column that an `INSERT` leaves out gets null where it may be null, and otherwise the value of
//! an ordinary row (run `r`, task `t`, a finished episode, a call that went well), so that rows stay short.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow_schema::{DataType, Field, Fields, Schema, SchemaRef};
use datafusion::catalog::TableProvider;
use datafusion::common::{Result, ScalarValue};
use datafusion::datasource::MemTable;
use datafusion::logical_expr::Expr;
use drillyard_schema::Table;

pub(crate) fn tables() -> Result<BTreeMap<Table, Arc<dyn TableProvider>>> {
    Table::ALL
        .iter()
        .map(|table| {
            let provider = insertable(table.name(), &table.schema())?;
            Ok((*table, provider))
        })
        .collect()
}

pub(crate) fn insertable(name: &str, schema: &SchemaRef) -> Result<Arc<dyn TableProvider>> {
    let mut defaults = HashMap::new();
    for field in schema.fields().iter().filter(|f| !f.is_nullable()) {
        let value = ordinary(name, field)?;
        defaults.insert(field.name().clone(), Expr::Literal(value, None));
    }
    // A struct written in SQL has fields that may be null; the engine does not cast those to fields that may not.
    let fields: Vec<Field> = schema
        .fields()
        .iter()
        .map(|f| f.as_ref().clone().with_data_type(loosened(f.data_type())))
        .collect();
    let table = MemTable::try_new(Arc::new(Schema::new(fields)), vec![vec![]])?;
    Ok(Arc::new(table.with_column_defaults(defaults)))
}

/// What a column holds in an ordinary row.
fn ordinary(table: &str, field: &Field) -> Result<ScalarValue> {
    let text = match (table, field.name().as_str()) {
        (_, "run_date") => "2026-01-01",
        (_, "purpose") => "train",
        (_, "run_id") => "r",
        (_, "group_id") => "g",
        (_, "task_id") => "t",
        (_, "task_set") => "wrangle",
        (_, "family") => "f",
        (_, "policy") => "p",
        ("runs", "stage") => "qa",
        ("runs", "status") => "succeeded",
        ("episodes", "status") => "finished",
        ("episodes", "end_reason") => "submitted",
        ("steps", "role") => "agent",
        ("steps", "parse_status") | ("tool_calls", "outcome") => "ok",
        ("messages", "role") => "tool",
        ("tool_calls", "tool") => "execute_shell",
        ("tool_calls", "arguments") => "{}",
        ("tool_calls", "schema_ok") => return Ok(ScalarValue::Boolean(Some(true))),
        ("verdicts", "kind") => "verified",
        (_, "stage_run") => "s",
        (_, "category") => "logic",
        (_, "severity") => "warn",
        _ => return zero(field.data_type()),
    };
    Ok(ScalarValue::Utf8(Some(text.to_owned())))
}

/// The same type with nested fields that may be null.
fn loosened(data_type: &DataType) -> DataType {
    let loose = |field: &Field| {
        let data_type = loosened(field.data_type());
        field.clone().with_data_type(data_type).with_nullable(true)
    };
    match data_type {
        DataType::List(item) => DataType::List(Arc::new(loose(item))),
        DataType::Struct(fields) => {
            DataType::Struct(fields.iter().map(|f| loose(f)).collect::<Fields>())
        }
        other => other.clone(),
    }
}

fn zero(data_type: &DataType) -> Result<ScalarValue> {
    match data_type {
        DataType::List(item) => Ok(ScalarValue::List(ScalarValue::new_list(
            &[],
            item.data_type(),
            item.is_nullable(),
        ))),
        other => ScalarValue::new_default(other),
    }
}
