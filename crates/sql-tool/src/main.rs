//! `drillyard-sql-tool [OPTIONS] DATABASE < query`: runs SQL on a SQLite database and prints the rows.
//!
//! A static program with SQLite inside, shown in every sandbox, so that the tool works the same on every host.
//!
//! Each statement with a result prints a header line and then a line a row, columns apart by `|`; NULL is printed as
//! `NULL`, a BLOB as `X'…'`, and a line break or backslash inside a text as `\n`, `\r` or `\\`, so that a row is always
//! one line. A statement that changes rows prints `[N rows changed]`. Output beyond the limits is cut, and a last line
//! in brackets says so. An error goes to standard error and the program exits with 1; what earlier statements did stays.
//!
//! The database must exist (`:memory:` is an empty one), unless `--create` is given.

use std::io::{self, BufWriter, Read, Write};
use std::process::ExitCode;

use rusqlite::fallible_iterator::FallibleIterator;
use rusqlite::types::ValueRef;
use rusqlite::{Batch, Connection, OpenFlags, Statement};

const USAGE: &str =
    "usage: drillyard-sql-tool [--max-rows N] [--max-bytes N] [--create] DATABASE < query";

#[derive(Debug, PartialEq, Eq)]
struct Options {
    database: String,
    /// Rows printed of each result.
    max_rows: usize,
    /// Bytes printed in all, the notes about cuts aside.
    max_bytes: usize,
    create: bool,
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            let _ = writeln!(io::stderr(), "error: {message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let mut query = String::new();
    let read = io::stdin()
        .read_to_string(&mut query)
        .map_err(|e| format!("query: {e}"));
    let mut out = BufWriter::new(io::stdout().lock());
    let result = read.and_then(|_| run(&options, &query, &mut out));
    let flushed = out.flush();
    match result {
        Ok(()) if flushed.is_ok() => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(message) => {
            let _ = writeln!(io::stderr(), "error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn parse(args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        database: String::new(),
        max_rows: 1000,
        max_bytes: 1 << 20,
        create: false,
    };
    let mut args = args;
    while let Some(arg) = args.next() {
        let mut number = || {
            let value = args.next().ok_or(format!("{arg} needs a number"))?;
            value
                .parse()
                .map_err(|_| format!("{arg}: '{value}' is no number"))
        };
        match arg.as_str() {
            "--max-rows" => options.max_rows = number()?,
            "--max-bytes" => options.max_bytes = number()?,
            "--create" => options.create = true,
            flag if flag.starts_with('-') => return Err(format!("unknown option {flag}")),
            _ if options.database.is_empty() => options.database = arg,
            _ => return Err(format!("one database only, not also '{arg}'")),
        }
    }
    if options.database.is_empty() {
        return Err("no database is named".into());
    }
    Ok(options)
}

fn run(options: &Options, query: &str, out: &mut impl Write) -> Result<(), String> {
    let mut flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    if options.create || options.database == ":memory:" {
        flags |= OpenFlags::SQLITE_OPEN_CREATE;
    } else if !std::path::Path::new(&options.database).is_file() {
        return Err(format!("no database '{}'", options.database));
    }
    let connection = Connection::open_with_flags(&options.database, flags)
        .map_err(|e| format!("{}: {e}", options.database))?;
    let mut left = options.max_bytes;
    let mut statements = 0;
    let mut batch = Batch::new(&connection, query);
    while let Some(mut statement) = batch.next().map_err(text)? {
        statements += 1;
        if statement.column_count() > 0 {
            print_rows(&mut statement, options.max_rows, &mut left, out)?;
        } else {
            let before = connection.total_changes();
            statement.raw_execute().map_err(text)?;
            let changed = connection.total_changes() - before;
            if changed > 0 {
                line(out, &format!("[{changed} rows changed]"))?;
            }
        }
    }
    if statements == 0 {
        return Err("the query is empty".into());
    }
    Ok(())
}

fn print_rows(
    statement: &mut Statement<'_>,
    max_rows: usize,
    left: &mut usize,
    out: &mut impl Write,
) -> Result<(), String> {
    let columns = statement.column_count();
    let header = statement
        .column_names()
        .map(escape)
        .collect::<Vec<_>>()
        .join("|");
    let mut rows = statement.raw_query();
    let mut printed = 0;
    let mut pending = Some(header);
    loop {
        let row = rows.next().map_err(text)?;
        if let Some(header) = pending.take() {
            if header.len() + 1 > *left {
                return line(out, "[output cut: too many bytes]");
            }
            *left -= header.len() + 1;
            line(out, &header)?;
        }
        let Some(row) = row else {
            return Ok(());
        };
        if printed == max_rows {
            return line(out, &format!("[output cut after {max_rows} rows]"));
        }
        let mut cells = Vec::with_capacity(columns);
        for i in 0..columns {
            cells.push(cell(row.get_ref(i).map_err(text)?));
        }
        let cells = cells.join("|");
        if cells.len() + 1 > *left {
            return line(
                out,
                &format!("[output cut after {printed} rows: too many bytes]"),
            );
        }
        *left -= cells.len() + 1;
        line(out, &cells)?;
        printed += 1;
    }
}

fn line(out: &mut impl Write, text: &str) -> Result<(), String> {
    writeln!(out, "{text}").map_err(|e| format!("output: {e}"))
}

fn cell(value: ValueRef<'_>) -> String {
    match value {
        ValueRef::Null => "NULL".into(),
        ValueRef::Integer(i) => i.to_string(),
        // With a point or exponent always, so that 1.0 is told from 1.
        ValueRef::Real(r) => format!("{r:?}"),
        ValueRef::Text(bytes) => escape(&String::from_utf8_lossy(bytes)),
        ValueRef::Blob(bytes) => {
            let mut hex = String::from("X'");
            for byte in bytes {
                let _ = std::fmt::Write::write_fmt(&mut hex, format_args!("{byte:02X}"));
            }
            hex + "'"
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('\n', "\\n")
        .replace('\r', "\\r")
}

/// SQLite's own words, without the wrapper's.
fn text(error: rusqlite::Error) -> String {
    match error {
        rusqlite::Error::SqliteFailure(_, Some(message)) => message,
        rusqlite::Error::SqlInputError { msg, .. } => msg,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(
        database: &str,
        max_rows: usize,
        max_bytes: usize,
        query: &str,
    ) -> (String, Result<(), String>) {
        let options = Options {
            database: database.into(),
            max_rows,
            max_bytes,
            create: false,
        };
        let mut out = Vec::new();
        let result = run(&options, query, &mut out);
        (String::from_utf8(out).unwrap(), result)
    }

    fn query(query: &str) -> (String, Result<(), String>) {
        on(":memory:", 1000, 1 << 20, query)
    }

    #[test]
    fn rows_are_lines_under_a_header() {
        let (out, result) = query(
            "create table t(a, b); insert into t values (1, 'x'), (2.0, null), (x'0aff', 'two' || char(10) || '\\lines');
             select * from t; select 1 where 0;",
        );
        assert_eq!(result, Ok(()));
        assert_eq!(
            out,
            "[3 rows changed]\na|b\n1|x\n2.0|NULL\nX'0AFF'|two\\n\\\\lines\n1\n"
        );
    }

    #[test]
    fn errors_are_sqlites_words_and_keep_what_was_printed() {
        let (out, result) = query("select 1 as one; selec 2;");
        assert_eq!(out, "one\n1\n");
        assert!(result.unwrap_err().contains("near \"selec\": syntax error"));
        assert_eq!(
            query("select * from nowhere").1,
            Err("no such table: nowhere".into())
        );
        assert_eq!(query(" -- nothing\n").1, Err("the query is empty".into()));
        // An error while stepping, after the first row.
        let (_, result) = query("select abs(-9223372036854775808)");
        assert_eq!(result, Err("integer overflow".into()));
    }

    #[test]
    fn endless_results_are_cut() {
        let endless =
            "with recursive n(i) as (select 1 union all select i + 1 from n) select i from n";
        assert_eq!(
            on(":memory:", 2, 100, endless).0,
            "i\n1\n2\n[output cut after 2 rows]\n"
        );
        let (out, result) = on(":memory:", 1000, 10, endless);
        assert_eq!(result, Ok(()));
        assert_eq!(
            out,
            "i\n1\n2\n3\n4\n[output cut after 4 rows: too many bytes]\n"
        );
    }

    #[test]
    fn a_database_is_not_made_by_misspelling_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none.db");
        let name = path.to_str().unwrap();
        assert_eq!(
            on(name, 10, 1000, "select 1").1,
            Err(format!("no database '{name}'"))
        );
        assert!(!path.exists());
        let options = Options {
            database: name.into(),
            max_rows: 10,
            max_bytes: 1000,
            create: true,
        };
        run(&options, "create table t(a)", &mut Vec::new()).unwrap();
        assert_eq!(on(name, 10, 1000, "select count(*) n from t").0, "n\n0\n");
    }

    #[test]
    fn options_are_checked() {
        let parse = |args: &[&str]| parse(args.iter().map(|a| (*a).to_owned()));
        assert_eq!(parse(&["--max-rows", "5", "a.db"]).unwrap().max_rows, 5);
        assert!(parse(&[]).is_err());
        assert!(parse(&["a", "b"]).is_err());
        assert!(parse(&["--max-rows", "x", "a"]).is_err());
        assert!(parse(&["--what", "a"]).is_err());
    }
}
