//! `drillyard sql`: a query, a file, or a shell with history.

use std::fmt::Write as _;
use std::fs::File;
use std::io::IsTerminal;

use drillyard_lake::Lake;
use drillyard_query::{Format as Output, QueryOptions, Session, SessionOptions, TableStyle, shell};
use drillyard_stage::exit::{INPUT, OK, OUTPUT, USAGE};
use drillyard_stage::{Failure, Pipeline, Ui};
use rustyline::error::ReadlineError;

use crate::args::{Args, Format, SqlArgs};
use crate::context::{absolute, output};
use crate::stages::query_failure;

/// Answers one query, a file's, or those typed.
pub(crate) async fn run(args: &Args, sql: &SqlArgs, ui: &Ui) -> Result<u8, Failure> {
    let pipeline = Pipeline::load(&args.pipeline, &args.overrides)?;
    let root = absolute(&pipeline.dir("lake"))?;
    if !root.exists() {
        return Err(Failure::new(INPUT, format!("{root}: there is no lake yet"))
            .hint("run `make rollout` first, or name another yard with --set yard=PATH"));
    }
    let lake = Lake::open(&root)
        .await
        .map_err(|e| Failure::from_error(INPUT, &e))?;
    let snapshot = lake
        .snapshot()
        .await
        .map_err(|e| Failure::from_error(INPUT, &e))?;
    let session = Session::open(&snapshot, SessionOptions::default())
        .await
        .map_err(|e| query_failure(&e))?;
    for problem in session.problems() {
        ui.warn(format!("set aside: {}", problem.message));
    }
    match (&sql.query, &sql.file) {
        (Some(_), Some(_)) => Err(Failure::new(USAGE, "give a query or --file, not both")),
        (Some(query), None) => answer(&session, query, "query", sql, ui).await,
        (None, Some(file)) => {
            let text = fs_err::read_to_string(file).map_err(|e| Failure::io(file, &e))?;
            answer(&session, &text, file.as_str(), sql, ui).await
        }
        (None, None) => read_lines(&session, sql, ui, &pipeline).await,
    }
}

async fn answer(
    session: &Session,
    text: &str,
    origin: &str,
    sql: &SqlArgs,
    ui: &Ui,
) -> Result<u8, Failure> {
    let format = match sql.format {
        Format::Table => Output::Table,
        Format::Csv => Output::Csv,
        Format::Json => Output::JsonLines,
        Format::Parquet => Output::Parquet,
    };
    if format == Output::Parquet && sql.output.is_none() {
        return Err(Failure::new(USAGE, "--format parquet writes a file")
            .hint("name it with --output FILE"));
    }
    let options = QueryOptions {
        origin: Some(origin.to_owned()),
        ..QueryOptions::default()
    };
    let result = session
        .sql_with(text, options)
        .await
        .map_err(|e| query_failure(&e))?;
    let style = TableStyle {
        max_rows: if sql.limit == 0 {
            usize::MAX
        } else {
            sql.limit
        },
        ..TableStyle::default()
    };
    if let Some(path) = &sql.output {
        let file = File::create(path).map_err(|e| output(path, &e))?;
        result
            .write(format, &style, file)
            .map_err(|e| query_failure(&e))?;
        ui.note(format!("{} rows written to {path}", result.num_rows()));
    } else {
        let mut text = Vec::new();
        result
            .write(format, &style, &mut text)
            .map_err(|e| query_failure(&e))?;
        let text = String::from_utf8_lossy(&text);
        let written = if format == Output::Table {
            ui.text(&text)
        } else {
            ui.data(&text)
        };
        written.map_err(|e| Failure::io("standard output", &e))?;
    }
    Ok(OK)
}

/// Reads statements, each ended by `;`, until the input ends. On a terminal there is a prompt with history.
async fn read_lines(
    session: &Session,
    sql: &SqlArgs,
    ui: &Ui,
    pipeline: &Pipeline,
) -> Result<u8, Failure> {
    let interactive = std::io::stdin().is_terminal();
    if interactive {
        ui.note("statements end with ';' · \\d lists tables and views · Ctrl-D ends");
    }
    let trouble = |e: ReadlineError| Failure::new(INPUT, format!("the terminal: {e}"));
    let mut editor = rustyline::DefaultEditor::new().map_err(trouble)?;
    let history = pipeline.dir("sql_history");
    let _ = editor.load_history(history.as_std_path());
    let mut statement = String::new();
    let mut code = OK;
    loop {
        let prompt = match (interactive, statement.is_empty()) {
            (false, _) => "",
            (true, true) => "drillyard> ",
            (true, false) => "       ... ",
        };
        let line = match editor.readline(prompt) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                statement.clear();
                continue;
            }
            Err(ReadlineError::Eof) => break,
            Err(error) => return Err(trouble(error)),
        };
        if statement.is_empty() && line.trim() == "\\d" {
            let mut listing = String::new();
            for table in shell::tables(session) {
                let _ = writeln!(
                    listing,
                    "{:<24} {:<6} {}",
                    table.name, table.kind, table.title
                );
            }
            ui.text(&listing).map_err(|e| Failure::new(OUTPUT, e))?;
            continue;
        }
        if statement.is_empty() && line.trim().is_empty() {
            continue;
        }
        statement.push_str(&line);
        statement.push('\n');
        if !line.trim_end().ends_with(';') {
            continue;
        }
        let text = std::mem::take(&mut statement);
        let _ = editor.add_history_entry(text.trim());
        if let Err(failure) =
            answer(session, text.trim().trim_end_matches(';'), "query", sql, ui).await
        {
            ui.error(&failure.message, failure.hint.as_deref());
            code = failure.code;
        }
    }
    if !statement.trim().is_empty() {
        code = answer(session, statement.trim(), "query", sql, ui).await?;
    }
    if interactive {
        let _ = editor.save_history(history.as_std_path());
        return Ok(OK);
    }
    Ok(code)
}
