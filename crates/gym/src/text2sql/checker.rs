//! Runs a submitted query on a private copy of the database, and compares its rows with the reference's.
//!
//! The query comes from a model, so the connection grants nothing but reading: an authorizer refuses every action other than
//! SELECT, reading and functions (no ATTACH, no PRAGMA, no writing), the database lives in memory and is opened read-only,
//! a budget of steps of SQLite's virtual machine ends long queries (the same on every machine, unlike a clock), and the sizes of
//! values, rows and memory are limited. One query runs at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use rusqlite::Connection;
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;

use super::database;

/// Steps of the virtual machine between two looks at the budget.
const STEPS_PER_LOOK: i32 = 10_000;
/// Looks a query may use up: 200 million steps, some seconds.
const MAX_LOOKS: u64 = 20_000;
/// The longest value, in bytes.
const MAX_VALUE_BYTES: i32 = 1_000_000;
/// The longest query, in bytes.
const MAX_QUERY_BYTES: i32 = 100_000;
/// SQLite's memory, in bytes, for the whole process.
const MAX_HEAP_BYTES: i64 = 256 * 1024 * 1024;
/// More rows than this are not read: no reference has nearly as many.
const MAX_ROWS: usize = 20_000;
/// Numbers are equal within this, or within one part in a million: amounts may be rounded to two digits.
const TOLERANCE: f64 = 0.006;

/// What the comparison found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Compared {
    /// The rows are those of the reference.
    pub(crate) success: bool,
    /// The query ran.
    pub(crate) runs: bool,
    /// The share of right rows, 0 to 1.
    pub(crate) score: f64,
    /// For people.
    pub(crate) detail: String,
}

impl Compared {
    fn failed(detail: impl Into<String>) -> Self {
        Self {
            success: false,
            runs: false,
            score: 0.0,
            detail: detail.into(),
        }
    }
}

/// A cell. Numbers are one kind, so that 5 and 5.0 are the same answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell {
    Null,
    Number(f64),
    Text(String),
}

/// The rows a query gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rows {
    pub(crate) columns: usize,
    pub(crate) rows: Vec<Vec<Cell>>,
}

struct Guarded {
    connection: Connection,
    looks: Arc<AtomicU64>,
}

static GUARDED: LazyLock<Result<Mutex<Guarded>, String>> =
    LazyLock::new(|| guarded().map(Mutex::new));

fn guarded() -> Result<Guarded, String> {
    let bytes = database::bytes()?;
    let looks = Arc::new(AtomicU64::new(0));
    let open = || -> rusqlite::Result<Connection> {
        let mut connection = Connection::open_in_memory()?;
        connection.deserialize_read_exact("main", &*bytes, bytes.len(), true)?;
        // Sorting and temporary tables stay in memory, where the limit on it holds.
        connection.pragma_update(None, "temp_store", "memory")?;
        connection.pragma_update_and_check(None, "hard_heap_limit", MAX_HEAP_BYTES, |_| Ok(()))?;
        connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)?;
        connection.set_limit(Limit::SQLITE_LIMIT_SQL_LENGTH, MAX_QUERY_BYTES)?;
        connection.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
        let counter = Arc::clone(&looks);
        connection.progress_handler(
            STEPS_PER_LOOK,
            Some(move || counter.fetch_add(1, Ordering::Relaxed) >= MAX_LOOKS),
        )?;
        connection.authorizer(Some(|context: AuthContext<'_>| match context.action {
            AuthAction::Select | AuthAction::Read { .. } | AuthAction::Recursive => {
                Authorization::Allow
            }
            AuthAction::Function { function_name } if function_name != "load_extension" => {
                Authorization::Allow
            }
            _ => Authorization::Deny,
        }))?;
        Ok(connection)
    };
    let connection = open().map_err(|error| error.to_string())?;
    Ok(Guarded { connection, looks })
}

/// The rows of a query, or why there are none, in words. The outer error is the checker's own failure.
pub(crate) fn run(sql: &str) -> Result<Result<Rows, String>, String> {
    let guarded = GUARDED.as_ref().map_err(Clone::clone)?;
    // A thread that panicked left nothing half done: statements end with their scope.
    let guarded = guarded.lock().unwrap_or_else(PoisonError::into_inner);
    guarded.looks.store(0, Ordering::Relaxed);
    Ok(
        rows(&guarded.connection, sql).map_err(|error| match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::OperationInterrupted) => "it takes too many steps".to_owned(),
            _ => error.to_string(),
        }),
    )
}

pub(super) fn rows(connection: &Connection, sql: &str) -> rusqlite::Result<Rows> {
    let mut statement = connection.prepare(sql)?;
    let columns = statement.column_count();
    let mut cursor = statement.query([])?;
    let mut rows = Vec::new();
    while let Some(row) = cursor.next()? {
        if rows.len() > MAX_ROWS {
            break;
        }
        let cells = (0..columns).map(|at| {
            Ok(match row.get_ref(at)? {
                ValueRef::Null => Cell::Null,
                ValueRef::Integer(number) => Cell::Number(number as f64),
                ValueRef::Real(number) => Cell::Number(number),
                ValueRef::Text(text) | ValueRef::Blob(text) => {
                    // Longer texts than any right one are cut, so that they cannot fill the memory.
                    let text = &text[..text.len().min(1_000)];
                    Cell::Text(String::from_utf8_lossy(text).into_owned())
                }
            })
        });
        rows.push(cells.collect::<rusqlite::Result<Vec<Cell>>>()?);
    }
    Ok(Rows { columns, rows })
}

/// Compares an answer with the reference. An error is the checker's or the reference's failure, never the answer's.
pub(crate) fn compare(reference: &str, ordered: bool, answer: &str) -> Result<Compared, String> {
    let wanted = run(reference)?.map_err(|error| format!("the reference fails: {error}"))?;
    let answer = statement(answer);
    if answer.is_empty() {
        return Ok(Compared::failed("no statement was submitted"));
    }
    let got = match run(answer)? {
        Ok(got) => got,
        Err(error) => {
            return Ok(Compared::failed(format!(
                "the statement does not run: {error}"
            )));
        }
    };
    Ok(compare_rows(&wanted, &got, ordered))
}

/// The statement in an answer: fences and a last semicolon are no mistake.
fn statement(answer: &str) -> &str {
    let answer = answer.trim();
    let inner = answer
        .strip_prefix("```")
        .and_then(|rest| rest.strip_suffix("```"))
        .map_or(answer, |fenced| {
            fenced.strip_prefix("sql").unwrap_or(fenced).trim()
        });
    inner.trim_end_matches(|c: char| c == ';' || c.is_whitespace())
}

pub(super) fn compare_rows(wanted: &Rows, got: &Rows, ordered: bool) -> Compared {
    if wanted.columns != got.columns {
        return Compared {
            runs: true,
            ..Compared::failed(format!(
                "{} columns where {} are asked for",
                got.columns, wanted.columns
            ))
        };
    }
    let matched = matching(wanted, got);
    let longest = wanted.rows.len().max(got.rows.len());
    let right = if ordered {
        wanted
            .rows
            .iter()
            .zip(&got.rows)
            .filter(|(a, b)| same_row(a, b))
            .count()
    } else {
        matched
    };
    let success = right == longest;
    let detail = if success {
        format!("all {longest} rows are right")
    } else if ordered && matched == longest {
        format!("the rows are right, {right} of {longest} in their place")
    } else {
        format!(
            "{right} of {} rows are right, there are {}",
            wanted.rows.len(),
            got.rows.len()
        )
    };
    Compared {
        success,
        runs: true,
        score: if success {
            1.0
        } else {
            right as f64 / longest as f64
        },
        detail,
    }
}

/// How many rows of the one multiset are in the other.
fn matching(wanted: &Rows, got: &Rows) -> usize {
    // Texts and nulls must be equal exactly, so only rows that agree in them are compared number by number.
    let key = |row: &[Cell]| -> Vec<Option<String>> {
        row.iter()
            .map(|cell| match cell {
                Cell::Null => Some("\0".to_owned()),
                Cell::Number(_) => None,
                Cell::Text(text) => Some(format!("t{text}")),
            })
            .collect()
    };
    let mut open = std::collections::BTreeMap::<_, Vec<&Vec<Cell>>>::new();
    for row in &wanted.rows {
        open.entry(key(row)).or_default().push(row);
    }
    let mut matched = 0;
    for row in &got.rows {
        if let Some(candidates) = open.get_mut(&key(row))
            && let Some(at) = candidates.iter().position(|wanted| same_row(wanted, row))
        {
            candidates.swap_remove(at);
            matched += 1;
        }
    }
    matched
}

fn same_row(wanted: &[Cell], got: &[Cell]) -> bool {
    wanted.iter().zip(got).all(|pair| match pair {
        (Cell::Number(a), Cell::Number(b)) => (a - b).abs() <= TOLERANCE.max(a.abs() * 1e-6),
        (a, b) => a == b,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(sql: &str) -> String {
        run(sql).unwrap().unwrap_err()
    }

    #[test]
    fn only_reading_is_granted() {
        for sql in [
            "DELETE FROM orders",
            "CREATE TABLE x (a)",
            "CREATE TEMP TABLE x AS SELECT 1",
            "ATTACH '/tmp/drillyard-attached.db' AS x",
            "PRAGMA hard_heap_limit = 0",
            "SELECT load_extension('x')",
            "VACUUM INTO '/tmp/drillyard-vacuumed.db'",
            "SELECT 1; SELECT 2",
            "DROP TABLE orders",
        ] {
            let reason = refused(sql);
            assert!(!reason.is_empty(), "{sql}");
        }
        assert!(run("SELECT COUNT(*) FROM orders").unwrap().is_ok());
        assert!(run("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9) SELECT MAX(i) FROM n").unwrap().is_ok());
    }

    #[test]
    fn endless_and_greedy_queries_end() {
        let endless =
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n";
        assert_eq!(refused(endless), "it takes too many steps");
        let greedy = "SELECT zeroblob(900000) AS b FROM orders ORDER BY random()";
        assert!(!refused(greedy).is_empty());
        let cross = "SELECT a.order_id FROM orders a, orders b";
        assert_eq!(run(cross).unwrap().unwrap().rows.len(), MAX_ROWS + 1);
        assert!(run("SELECT 1").unwrap().is_ok());
    }

    #[test]
    fn rows_are_compared_as_multisets_or_in_order() {
        let compared = |wanted: &str, got: &str, ordered| compare(wanted, ordered, got).unwrap();
        let (ab, ba) = (
            "VALUES ('a', 1), ('b', 2)",
            "VALUES ('b', 2.0), ('a', 1.001)",
        );
        assert!(compared(ab, ba, false).success);
        let ordered = compared(ab, ba, true);
        assert!(
            !ordered.success && ordered.detail.contains("in their place"),
            "{ordered:?}"
        );
        let repeated = compared(ab, "VALUES ('a', 1), ('a', 1)", false);
        assert!(!repeated.success && (repeated.score - 0.5).abs() < 1e-9);
        assert!(!compared(ab, "VALUES ('a', 1), ('b', 2), ('b', 2)", false).success);
        assert!(!compared("VALUES (NULL)", "VALUES (0)", false).success);
        assert!(!compared("VALUES (5)", "VALUES ('5')", false).success);
        assert!(compared("VALUES (NULL)", "VALUES (NULL)", true).success);
        assert!(!compared(ab, "SELECT 'a'", false).success);
    }

    #[test]
    fn fences_and_semicolons_are_no_mistake_and_words_are() {
        assert!(
            compare("SELECT 1", false, "```sql\nSELECT 1;\n```")
                .unwrap()
                .success
        );
        assert!(compare("SELECT 1", false, " SELECT 1 ; ").unwrap().success);
        let none = compare("SELECT 1", false, "").unwrap();
        assert!(!none.runs && !none.success);
        let words = compare("SELECT 1", false, "The answer is 1.").unwrap();
        assert!(
            !words.runs && words.detail.contains("does not run"),
            "{words:?}"
        );
        assert!(compare("SELECT nothing", false, "SELECT 1").is_err());
    }
}
