//! A SQL session over a snapshot of the lake.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use camino::{Utf8Path, Utf8PathBuf};
use datafusion::catalog::{MemorySchemaProvider, TableProvider};
use datafusion::common::{JoinType, ParamValues, TableReference};
use datafusion::dataframe::DataFrame;
use datafusion::datasource::MemTable;
use datafusion::error::DataFusionError;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext, col, lit};
use datafusion::sql::parser::{DFParser, Statement};
use drillyard_lake::{DataFile, Snapshot};
use drillyard_schema::{Purpose, RunId, Table};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::engine::Engine;
use crate::error::{ErrorKind, Problem, QueryError};
use crate::explain::explain;
use crate::lake_table::LakeTable;
use crate::library::{Library, SqlFile};
use crate::memory;
use crate::output::QueryResult;
use crate::params::{ParamValue, to_param_values};
use crate::qa::rules_batch;
use crate::shell::Listed;

/// Tables whose rows count only if their episode is committed.
const EPISODE_TABLES: [Table; 6] = [
    Table::Messages,
    Table::Steps,
    Table::ToolCalls,
    Table::Tokens,
    Table::Verdicts,
    Table::Rewards,
];

/// What a session is opened with.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// The `sql/` folder.
    pub sql: Utf8PathBuf,
    /// Only this run's rows, where a table has runs; all by default.
    pub run: Option<RunId>,
    /// Only rows of these purposes, where a table has purposes; all when empty.
    pub purposes: Vec<Purpose>,
    /// Values over the defaults in headers, by `<id>.<name>`.
    pub params: BTreeMap<String, ParamValue>,
    /// Threads that run queries; as many as the machine has by default.
    pub threads: Option<usize>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            sql: "sql".into(),
            run: None,
            purposes: Vec::new(),
            params: BTreeMap::new(),
            threads: None,
        }
    }
}

/// How one query is run.
#[derive(Debug, Clone, Default)]
pub struct QueryOptions {
    /// What errors call the text; `query` by default.
    pub origin: Option<String>,
    /// Values of `$name` placeholders.
    pub params: BTreeMap<String, ParamValue>,
    /// At most so many rows.
    pub limit: Option<usize>,
}

/// A SQL session: cheap to clone, read-only over a lake.
#[derive(Clone)]
pub struct Session {
    ctx: SessionContext,
    engine: Arc<Engine>,
    library: Arc<Library>,
    raw: Arc<BTreeMap<Table, Arc<dyn TableProvider>>>,
    files: Arc<Vec<DataFile>>,
    options: SessionOptions,
    writable: bool,
    problems: Vec<Problem>,
}

impl Session {
    /// Opens a session over a snapshot with the views of the SQL folder. Tables that do not exist yet are empty. A view that does not
    /// load is set aside (see [`Self::problems`]).
    pub async fn open(snapshot: &Snapshot, options: SessionOptions) -> Result<Self, QueryError> {
        let library = Arc::new(Library::load(&options.sql)?);
        Self::over(snapshot, library, options).await
    }

    /// The same with a library that is already loaded.
    pub async fn over(
        snapshot: &Snapshot,
        library: Arc<Library>,
        options: SessionOptions,
    ) -> Result<Self, QueryError> {
        let mut raw: BTreeMap<Table, Arc<dyn TableProvider>> = BTreeMap::new();
        let mut files = Vec::new();
        for table in Table::ALL {
            let provider = LakeTable::new(*table, snapshot.files(*table));
            files.extend_from_slice(provider.files());
            raw.insert(*table, Arc::new(provider));
        }
        Self::build(library, raw, files, options, false).await
    }

    /// A session over a lake in memory that takes `INSERT INTO raw.<table>`, for trying out SQL files. Columns left out get an ordinary
    /// value. Beside the lake's tables there are `raw.current_findings` and `raw.rules`, which scores read.
    pub async fn in_memory(
        library: Arc<Library>,
        options: SessionOptions,
    ) -> Result<Self, QueryError> {
        let raw = memory::tables().map_err(|e| explain(&e, "", &[]))?;
        let session = Self::build(library, raw, Vec::new(), options, true).await?;
        let scratch = [
            ("current_findings", Table::Findings.schema()),
            ("rules", rules_batch(&[])?.schema()),
        ];
        for (name, schema) in scratch {
            let provider = memory::insertable(name, &schema).map_err(|e| explain(&e, "", &[]))?;
            session.replace(name, Arc::clone(&provider))?;
            session.replace(&format!("raw.{name}"), provider)?;
        }
        Ok(session)
    }

    async fn build(
        library: Arc<Library>,
        raw: BTreeMap<Table, Arc<dyn TableProvider>>,
        files: Vec<DataFile>,
        options: SessionOptions,
        writable: bool,
    ) -> Result<Self, QueryError> {
        library.check_overrides(&options.params)?;
        let threads = options.threads.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        });
        let session = Self {
            ctx: context(threads),
            engine: Arc::new(Engine::start(threads)?),
            library,
            raw: Arc::new(raw),
            files: Arc::new(files),
            options,
            writable,
            problems: Vec::new(),
        };
        session.register().await
    }

    /// The same snapshot and SQL folder, showing one run only.
    pub async fn scoped_to(&self, run: &RunId) -> Result<Self, QueryError> {
        let options = SessionOptions {
            run: Some(run.clone()),
            ..self.options.clone()
        };
        let threads = self.ctx.copied_config().target_partitions();
        let session = Self {
            ctx: context(threads),
            options,
            problems: Vec::new(),
            ..self.clone()
        };
        session.register().await
    }

    async fn register(self) -> Result<Self, QueryError> {
        let engine = Arc::clone(&self.engine);
        engine
            .run(async move {
                let mut session = self;
                session.problems = session.library.problems().to_vec();
                session
                    .register_tables()
                    .map_err(|e| session.explained(&e, ""))?;
                session.replace(
                    "rules",
                    memory_table(&rules_batch(&session.library.rules())?)?,
                )?;
                let library = Arc::clone(&session.library);
                for view in library.views_in_order() {
                    let params = view.params(&session.options.params);
                    match session.planned(&view.text, &view.path, &params).await {
                        Ok(frame) => session.replace(&view.header.id, frame.into_view())?,
                        Err(error) => session.problems.push(error.into()),
                    }
                }
                Ok(session)
            })
            .await?
    }

    fn register_tables(&self) -> Result<(), DataFusionError> {
        let catalog = self
            .ctx
            .catalog("datafusion")
            .ok_or_else(|| DataFusionError::Internal("the session has no catalog".to_owned()))?;
        catalog.register_schema("raw", Arc::new(MemorySchemaProvider::new()))?;
        for (table, provider) in self.raw.iter() {
            self.ctx.register_table(
                TableReference::partial("raw", table.name()),
                Arc::clone(provider),
            )?;
        }
        for table in self.raw.keys() {
            let mut visible = self.scoped(*table)?;
            if EPISODE_TABLES.contains(table) {
                let committed = self
                    .scoped(Table::Episodes)?
                    .select_columns(&["episode_id"])?;
                visible = visible.join(
                    committed,
                    JoinType::LeftSemi,
                    &["episode_id"],
                    &["episode_id"],
                    None,
                )?;
            }
            self.ctx.register_table(table.name(), visible.into_view())?;
        }
        Ok(())
    }

    fn scoped(&self, table: Table) -> Result<DataFrame, DataFusionError> {
        let Some(provider) = self.raw.get(&table) else {
            return Err(DataFusionError::Internal(format!(
                "no table {}",
                table.name()
            )));
        };
        let mut frame = self.ctx.read_table(Arc::clone(provider))?;
        let schema = table.schema();
        if let Some(run) = &self.options.run
            && schema.field_with_name("run_id").is_ok()
        {
            frame = frame.filter(col("run_id").eq(lit(run.as_str())))?;
        }
        if !self.options.purposes.is_empty() && schema.field_with_name("purpose").is_ok() {
            let purposes = self.options.purposes.iter().map(|p| lit(p.as_str()));
            frame = frame.filter(col("purpose").in_list(purposes.collect(), false))?;
        }
        Ok(frame)
    }

    /// Registers a table or view under a name, in place of one that was there.
    pub(crate) fn replace(
        &self,
        name: &str,
        provider: Arc<dyn TableProvider>,
    ) -> Result<(), QueryError> {
        self.ctx
            .deregister_table(name)
            .and_then(|_| self.ctx.register_table(name, provider))
            .map(|_| ())
            .map_err(|e| self.explained(&e, ""))
    }

    /// Registers rows as a table, in place of one of that name.
    pub(crate) fn replace_rows(&self, name: &str, rows: &RecordBatch) -> Result<(), QueryError> {
        self.replace(name, memory_table(rows)?)
    }

    /// Registers a file's query as a view of another name (its own parameters filled in), in place of one of that name.
    pub async fn bind(&self, name: &str, file: &SqlFile) -> Result<(), QueryError> {
        let session = self.clone();
        let (name, file) = (name.to_owned(), file.clone());
        self.engine
            .run(async move {
                let params = file.params(&session.options.params);
                let frame = session.planned(&file.text, &file.path, &params).await?;
                session.replace(&name, frame.into_view())
            })
            .await?
    }

    /// Runs one statement.
    pub async fn sql(&self, text: &str) -> Result<QueryResult, QueryError> {
        self.sql_with(text, QueryOptions::default()).await
    }

    /// Runs one statement with parameters, a row limit or a name for its origin.
    pub async fn sql_with(
        &self,
        text: &str,
        options: QueryOptions,
    ) -> Result<QueryResult, QueryError> {
        let mut results = self.script(text, options).await?;
        match (results.pop(), results.is_empty()) {
            (Some(result), true) => Ok(result),
            (None, _) => Err(QueryError::new(ErrorKind::Query, "query", "is empty")),
            (Some(_), false) => Err(QueryError::new(
                ErrorKind::Query,
                "query",
                "holds several statements where one is expected",
            )),
        }
    }

    /// Runs statements separated by semicolons, one result each.
    pub async fn script(
        &self,
        text: &str,
        options: QueryOptions,
    ) -> Result<Vec<QueryResult>, QueryError> {
        let session = self.clone();
        let text = text.to_owned();
        self.engine
            .run(async move {
                let origin = options.origin.as_deref().unwrap_or("query");
                let statements =
                    DFParser::parse_sql(&text).map_err(|e| session.explained(&e, origin))?;
                let mut results = Vec::new();
                for statement in statements {
                    let frame = session
                        .frame(statement, to_param_values(&options.params))
                        .await
                        .map_err(|e| session.explained(&e, origin))?;
                    results.push(session.collect(frame, origin, options.limit).await?);
                }
                Ok(results)
            })
            .await?
    }

    /// Runs a question or figure of the library by its id.
    pub async fn ask(&self, id: &str) -> Result<QueryResult, QueryError> {
        let file = self.library.get(id)?.clone();
        self.run(&file, None).await
    }

    /// Runs a `.sql` file. Where it starts with a header, its parameters are filled in; without one it is a plain script.
    pub async fn sql_file(
        &self,
        path: &Utf8Path,
        limit: Option<usize>,
    ) -> Result<Vec<QueryResult>, QueryError> {
        let text = fs_err::read_to_string(path)
            .map_err(|e| QueryError::new(ErrorKind::Input, path.as_str(), e.to_string()))?;
        if text.starts_with("-- id:") {
            let file = SqlFile::parse(path, text)?;
            return Ok(vec![self.run(&file, limit).await?]);
        }
        let options = QueryOptions {
            origin: Some(path.to_string()),
            limit,
            ..QueryOptions::default()
        };
        self.script(&text, options).await
    }

    /// Runs a loaded file with its parameters filled in.
    pub async fn run(
        &self,
        file: &SqlFile,
        limit: Option<usize>,
    ) -> Result<QueryResult, QueryError> {
        let options = QueryOptions {
            origin: Some(file.path.to_string()),
            params: file.params(&self.options.params),
            limit,
        };
        self.sql_with(&file.text, options).await
    }

    /// The SQL folder.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Files of the SQL folder that were set aside, and why.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Names of tables and views, sorted.
    pub fn names(&self) -> Vec<String> {
        let schema = self
            .ctx
            .catalog("datafusion")
            .and_then(|c| c.schema("public"));
        let mut names = schema.map(|s| s.table_names()).unwrap_or_default();
        names.sort();
        names
    }

    pub(crate) fn listed(&self) -> Vec<Listed> {
        let columns = |schema: SchemaRef| -> Vec<String> {
            schema.fields().iter().map(|f| f.name().clone()).collect()
        };
        let tables = self.raw.keys().map(|table| Listed {
            name: table.name().to_owned(),
            kind: "table",
            title: String::new(),
            columns: columns(table.schema()),
        });
        let views = self.library.views_in_order();
        let schema = self
            .ctx
            .catalog("datafusion")
            .and_then(|c| c.schema("public"));
        let mut views: Vec<Listed> = views
            .into_iter()
            .filter_map(|view| {
                // Memory and view providers answer at once; a lake's tables are never looked up here.
                let lookup = schema.as_ref()?.table(&view.header.id);
                let provider = futures_now(lookup)?;
                Some(Listed {
                    name: view.header.id.clone(),
                    kind: "view",
                    title: view.header.title.clone(),
                    columns: columns(provider.schema()),
                })
            })
            .collect();
        views.sort_by(|a, b| a.name.cmp(&b.name));
        tables.chain(views).collect()
    }

    async fn planned(
        &self,
        text: &str,
        path: &Utf8Path,
        params: &BTreeMap<String, ParamValue>,
    ) -> Result<DataFrame, QueryError> {
        let origin = path.as_str();
        let mut statements = DFParser::parse_sql(text).map_err(|e| self.explained(&e, origin))?;
        let Some(statement) = statements.pop_front() else {
            return Err(QueryError::new(ErrorKind::Query, origin, "holds no query"));
        };
        self.frame(statement, to_param_values(params))
            .await
            .map_err(|e| self.explained(&e, origin))
    }

    async fn frame(
        &self,
        statement: Statement,
        params: ParamValues,
    ) -> Result<DataFrame, DataFusionError> {
        let plan = self.ctx.state().statement_to_plan(statement).await?;
        let allowed = SQLOptions::new()
            .with_allow_ddl(false)
            .with_allow_dml(self.writable)
            .with_allow_statements(false);
        allowed.verify_plan(&plan).map_err(|_| {
            DataFusionError::Plan(
                "the lake is read-only from SQL: only queries, EXPLAIN, SHOW and DESCRIBE are allowed"
                    .to_owned(),
            )
        })?;
        self.ctx
            .execute_logical_plan(plan)
            .await?
            .with_param_values(params)
    }

    async fn collect(
        &self,
        frame: DataFrame,
        origin: &str,
        limit: Option<usize>,
    ) -> Result<QueryResult, QueryError> {
        let schema = Arc::new(frame.schema().as_arrow().clone());
        let collected = async {
            // One more than asked for, to know whether there are more.
            let frame = match limit {
                Some(limit) => frame.limit(0, Some(limit + 1))?,
                None => frame,
            };
            frame.collect().await
        };
        let batches = collected.await.map_err(|e| {
            let error = self.explained(&e, origin);
            match error.kind() {
                ErrorKind::Input => self.name_unreadable_file(error),
                _ => error,
            }
        })?;
        let schema = batches.first().map_or(schema, RecordBatch::schema);
        Ok(QueryResult::new(schema, batches, limit))
    }

    fn explained(&self, error: &DataFusionError, origin: &str) -> QueryError {
        explain(error, origin, &self.names())
    }

    /// The engine does not say which file it could not read: look for it.
    fn name_unreadable_file(&self, error: QueryError) -> QueryError {
        for file in self.files.iter() {
            if let Err(why) = read_through(&file.path) {
                return QueryError::new(
                    ErrorKind::Input,
                    file.path.as_str(),
                    format!("cannot be read: {why}"),
                )
                .with_hint("the file is damaged or gone; restore it, or read an older version of the table");
            }
        }
        error
    }
}

fn context(threads: usize) -> SessionContext {
    let mut config = SessionConfig::new()
        .with_target_partitions(threads)
        .with_information_schema(true);
    let options = config.options_mut();
    options.sql_parser.collect_spans = true;
    options.sql_parser.map_string_types_to_utf8view = false;
    // Sorts and aggregations beyond their share of memory spill to disk; what cannot spill gets an error that says so, never the machine.
    let runtime = RuntimeEnvBuilder::new()
        .with_memory_pool(Arc::new(FairSpillPool::new(memory_budget())))
        .build();
    match runtime {
        Ok(runtime) => SessionContext::new_with_config_rt(config, Arc::new(runtime)),
        Err(_) => SessionContext::new_with_config(config),
    }
}

/// Bytes that queries may hold at once: half of the memory available now, at least 256 MiB.
fn memory_budget() -> usize {
    let available = fs_err::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
            line.trim()
                .strip_suffix(" kB")?
                .trim()
                .parse::<usize>()
                .ok()
        })
        .map_or(4 << 30, |kib| kib << 10);
    (available / 2).max(256 << 20)
}

pub(crate) fn memory_table(rows: &RecordBatch) -> Result<Arc<dyn TableProvider>, QueryError> {
    let table = MemTable::try_new(rows.schema(), vec![vec![rows.clone()]])
        .map_err(|e| explain(&e, "", &[]))?;
    Ok(Arc::new(table))
}

fn read_through(path: &Utf8Path) -> Result<(), String> {
    let file = fs_err::File::open(path).map_err(|e| e.to_string())?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file.into_file())
        .and_then(ParquetRecordBatchReaderBuilder::build)
        .map_err(|e| e.to_string())?;
    for batch in reader {
        batch.map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// The value of a future that is ready at once.
fn futures_now<T, E>(future: impl Future<Output = Result<Option<T>, E>>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).as_mut().poll(&mut context) {
        std::task::Poll::Ready(Ok(value)) => value,
        _ => None,
    }
}
