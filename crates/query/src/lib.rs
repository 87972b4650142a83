//! SQL over the lake: sessions, views, rules, scores and questions.
//!
//! A [`Session`] is a read-only SQL session over one [`Snapshot`](drillyard_lake::Snapshot) of the lake. It registers every table
//! twice: `raw.<table>` is what the files hold, `<table>` holds only the rows whose episode is committed (a row in `episodes` is what
//! makes the others visible) and, where the session is scoped, only one run's. On top come the views of `sql/views`.
//!
//! A [`Library`] is the `sql/` folder read at run time: one question or rule in one file, with a header that says what it is for. Users
//! add a file, not code. [`run_qa`] runs rules over one run and turns what they find into findings and scores; what a rule costs, which
//! tier and which failure label follow from it is SQL too (`sql/qa/_scores.sql`).
//!
//! ```text
//!  sql/views ──▶ Session ◀── Snapshot (file lists with partition values)
//!                  │
//!  sql/qa ─────▶ run_qa ──▶ findings, scores, counts per rule, problems
//!  sql/metrics, sql/failures ──▶ Session::ask ──▶ QueryResult ──▶ table, CSV, JSON lines, Parquet
//! ```
//!
//! What it does not do: it writes no table (the stage that runs it does), it composes no reward, and no type of the SQL engine appears
//! in its API.

mod engine;
mod error;
mod explain;
mod header;
mod lake_table;
mod library;
mod memory;
mod output;
mod params;
mod qa;
mod session;
pub mod shell;

pub use error::{ErrorKind, Problem, QueryError};
pub use header::{Category, Grain, Header, Kind, QaHeader, Severity};
pub use library::{Library, SqlFile};
pub use output::{Format, QueryResult, TableStyle};
pub use params::ParamValue;
pub use qa::{QaOutcome, RuleCount, run_qa};
pub use session::{QueryOptions, Session, SessionOptions};
