//! Every `.slt` file under `sql/` as a test of its own, and the rules that the folder itself keeps.
//!
//! A `.slt` file tests the `.sql` file of the same stem: its query is the view `rule`. `INSERT INTO <table>` goes to that table of a lake
//! in memory, with the lake's own schemas; columns left out get the value of an ordinary row. Run with `UPDATE_SLT=1` to write what the
//! queries return into the files (then read the difference).

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

use async_trait::async_trait;
use camino::{Utf8Path, Utf8PathBuf};
use drillyard_query::{Library, QueryError, QueryResult, Session, SessionOptions, SqlFile};
use drillyard_schema::{EndReason, FailReason};
use libtest_mimic::{Arguments, Failed, Trial};
use sqllogictest::{
    AsyncDB, ColumnType, DBOutput, Runner, default_normalizer, default_validator,
    strict_column_validator,
};

/// A check of the library as a whole.
type Check = fn(&Utf8Path, &Library) -> Result<(), Failed>;

fn main() {
    let arguments = Arguments::from_args();
    let sql = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../sql");
    let sql = sql.canonicalize_utf8().unwrap();
    let library = Arc::new(Library::load(&sql).unwrap());
    let mut trials: Vec<Trial> = files(&sql, "slt")
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&sql).unwrap().to_string();
            let library = Arc::clone(&library);
            Trial::test(name, move || run(&path, &library))
        })
        .collect();
    let checks: [(&str, Check); 4] = [
        ("every file loads", every_file_loads),
        ("files come in pairs", files_come_in_pairs),
        ("labels are all there", labels_are_all_there),
        ("rules cover the four kinds", rules_cover_the_four_kinds),
    ];
    for (name, check) in checks {
        let (sql, library) = (sql.clone(), Arc::clone(&library));
        trials.push(Trial::test(name, move || check(&sql, &library)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn files(root: &Utf8Path, extension: &str) -> Vec<Utf8PathBuf> {
    let mut found = Vec::new();
    for entry in root.read_dir_utf8().unwrap() {
        let path = entry.unwrap().into_path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension() == Some(extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn run(path: &Utf8Path, library: &Arc<Library>) -> Result<(), Failed> {
    let rule = library
        .files()
        .iter()
        .find(|file| file.path == path.with_extension("sql"))
        .ok_or("the .sql file beside it does not load")?
        .clone();
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let mut runner = Runner::new(|| {
        let (library, rule) = (Arc::clone(library), rule.clone());
        async move {
            let session = Session::in_memory(library, SessionOptions::default()).await?;
            session.bind("rule", &rule).await?;
            Ok(Database { session, rule })
        }
    });
    runner.with_column_validator(strict_column_validator);
    runtime.block_on(async {
        if std::env::var_os("UPDATE_SLT").is_some() {
            runner
                .update_test_file(
                    path,
                    " ",
                    default_validator,
                    default_normalizer,
                    strict_column_validator,
                )
                .await
                .map_err(|e| Failed::from(e.to_string()))?;
        }
        runner
            .run_file_async(path)
            .await
            .map_err(|e| Failed::from(e.display(false).to_string()))
    })
}

struct Database {
    session: Session,
    rule: SqlFile,
}

#[async_trait]
impl AsyncDB for Database {
    type Error = QueryError;
    type ColumnType = Letter;

    async fn run(&mut self, sql: &str) -> Result<DBOutput<Letter>, QueryError> {
        if let Some(rest) = sql.strip_prefix("INSERT INTO ") {
            // What is inserted goes to the tables as files hold them; `<table>` itself shows committed episodes only.
            self.session.sql(&format!("INSERT INTO raw.{rest}")).await?;
            return Ok(DBOutput::StatementComplete(0));
        }
        let result = if sql == "SELECT * FROM rule" {
            // As it is run, its own order included.
            self.session.run(&self.rule, None).await?
        } else {
            self.session.sql(sql).await?
        };
        Ok(DBOutput::Rows {
            types: types(&result),
            rows: result
                .text_rows()?
                .into_iter()
                .map(|row| row.into_iter().map(cell).collect())
                .collect(),
        })
    }

    async fn shutdown(&mut self) {}

    fn engine_name(&self) -> &'static str {
        "drillyard"
    }
}

fn cell(value: Option<String>) -> String {
    match value {
        None => "NULL".to_owned(),
        Some(text) if text.is_empty() => "(empty)".to_owned(),
        Some(text) => text,
    }
}

/// T text, I whole number, R number, B truth value, ? anything else.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Letter(char);

impl ColumnType for Letter {
    fn from_char(value: char) -> Option<Self> {
        "TIRB?".contains(value).then_some(Self(value))
    }

    fn to_char(&self) -> char {
        self.0
    }
}

fn types(result: &QueryResult) -> Vec<Letter> {
    let schema = result.schema();
    schema
        .fields()
        .iter()
        .map(|field| {
            let name = field.data_type().to_string();
            Letter(match name.as_str() {
                "Utf8" | "Utf8View" | "LargeUtf8" => 'T',
                "Boolean" => 'B',
                name if name.starts_with("Int") || name.starts_with("UInt") => 'I',
                name if name.starts_with("Float") || name.starts_with("Decimal") => 'R',
                _ => '?',
            })
        })
        .collect()
}

fn every_file_loads(_sql: &Utf8Path, library: &Library) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let library = Arc::new(library.clone());
    let session = runtime.block_on(Session::in_memory(library, SessionOptions::default()))?;
    let mut message = String::new();
    for problem in session.problems() {
        writeln!(message, "{problem}")?;
    }
    if message.is_empty() {
        Ok(())
    } else {
        Err(message.into())
    }
}

fn files_come_in_pairs(sql: &Utf8Path, _library: &Library) -> Result<(), Failed> {
    let stems = |extension| -> BTreeSet<Utf8PathBuf> {
        let files = files(sql, extension).into_iter();
        files.map(|path| path.with_extension("")).collect()
    };
    let (queries, tests) = (stems("sql"), stems("slt"));
    if let Some(lonely) = queries.symmetric_difference(&tests).next() {
        return Err(format!("{lonely} has only one of .sql and .slt").into());
    }
    Ok(())
}

fn labels_are_all_there(_sql: &Utf8Path, library: &Library) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let library = Arc::new(library.clone());
    runtime.block_on(async {
        let session = Session::in_memory(library, SessionOptions::default()).await?;
        let known = session.sql("SELECT fail_reason FROM fail_reasons ORDER BY 1").await?;
        let mut labels: Vec<_> = FailReason::ALL.iter().map(|r| vec![Some(r.to_string())]).collect();
        labels.sort();
        assert_eq!(known.text_rows()?, labels);

        let known = session
            .sql("SELECT end_reason, infrastructure FROM end_reasons ORDER BY 1")
            .await?;
        let mut ends: Vec<_> = EndReason::ALL
            .iter()
            .map(|r| vec![Some(r.to_string()), Some(r.is_infrastructure().to_string())])
            .collect();
        ends.sort();
        assert_eq!(known.text_rows()?, ends);

        let strangers = session
            .sql("SELECT end_reason FROM end_reasons WHERE fail_reason NOT IN (SELECT fail_reason FROM fail_reasons)")
            .await?;
        assert_eq!(strangers.num_rows(), 0);
        Ok(())
    })
}

fn rules_cover_the_four_kinds(_sql: &Utf8Path, library: &Library) -> Result<(), Failed> {
    let rules = library.rules();
    let kinds: BTreeSet<_> = rules
        .iter()
        .filter_map(|r| r.qa().map(|qa| qa.category))
        .collect();
    if rules.len() >= 16 && kinds.len() == 4 {
        Ok(())
    } else {
        Err(format!("{} rules over {} kinds", rules.len(), kinds.len()).into())
    }
}
