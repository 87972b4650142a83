//! What every verb has at hand: the pipeline, the yard, the lake, the runner.

use std::sync::atomic::{AtomicBool, Ordering};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_lake::Lake;
use drillyard_sandbox::LimitsReport;
use drillyard_schema::RunId;
use drillyard_schema::ids::derive_id;
use drillyard_stage::exit::{INPUT, OUTPUT};
use drillyard_stage::{Failure, Pipeline, StageRunner, Ui};
use serde::{Deserialize, Serialize};

use crate::args::Args;

/// What every verb has at hand.
pub(crate) struct Context {
    /// The resolved pipeline.
    pub pipeline: Pipeline,
    /// Talks to the person.
    pub ui: Ui,
    /// The lake.
    pub lake: Lake,
    /// Runs stages and keeps records.
    pub runner: StageRunner,
    /// Whether the table of limits was shown.
    limits_shown: AtomicBool,
}

/// A rollout's identity: written before its first episode, so that a resumed run keeps its day.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Run {
    /// Derived from everything that decides what the run produces.
    pub run_id: RunId,
    /// Its day.
    pub run_date: String,
}

impl Context {
    /// Reads the pipeline and opens the yard.
    pub(crate) async fn open(args: &Args, ui: Ui) -> Result<Self, Failure> {
        let mut pipeline = Pipeline::load(&args.pipeline, &args.overrides)?;
        if args.require_limits {
            pipeline.sandbox.require_limits = vec!["all".to_owned()];
        }
        if args.dry_run {
            let text =
                toml::to_string_pretty(&pipeline).map_err(|e| Failure::from_error(INPUT, &e))?;
            ui.data(&text)
                .map_err(|e| Failure::io("standard output", &e))?;
            return Err(Failure::new(
                drillyard_stage::exit::OK,
                "dry run: nothing was done",
            ));
        }
        Self::of(pipeline, ui).await
    }

    /// The context of another pipeline.
    pub(crate) async fn of(pipeline: Pipeline, ui: Ui) -> Result<Self, Failure> {
        let root = absolute(&pipeline.dir("lake"))?;
        fs_err::create_dir_all(&root).map_err(|e| output(&root, &e))?;
        let lake = Lake::open(&root)
            .await
            .map_err(|e| Failure::from_error(OUTPUT, &e))?;
        let runner = StageRunner::new(
            lake.clone(),
            ui.clone(),
            pipeline.name.clone(),
            pipeline.to_json(),
        );
        Ok(Self {
            pipeline,
            ui,
            lake,
            runner,
            limits_shown: AtomicBool::new(false),
        })
    }

    /// Shows which limits hold here, at the first sandboxes of the process.
    pub(crate) fn limits_once(&self, limits: &LimitsReport) {
        if !self.limits_shown.swap(true, Ordering::Relaxed) {
            self.ui.note(limits.to_string().trim_end());
        }
    }

    /// A folder of the yard, made where it is missing.
    pub(crate) fn dir(&self, name: &str) -> Result<Utf8PathBuf, Failure> {
        let dir = absolute(&self.pipeline.dir(name))?;
        fs_err::create_dir_all(&dir).map_err(|e| output(&dir, &e))?;
        Ok(dir)
    }

    /// The identity of the run that `parts` decide; today's date on first sight.
    pub(crate) fn run(&self, name: &str, parts: &[&str]) -> Result<Run, Failure> {
        let run_id = RunId::derive(name, &derive_id(parts, 32));
        let path = self.dir("runs")?.join(format!("{run_id}.json"));
        if let Ok(text) = fs_err::read_to_string(&path) {
            return serde_json::from_str(&text).map_err(|e| {
                Failure::new(INPUT, format!("{path}: {e}"))
                    .hint("remove the file; the run then starts afresh")
            });
        }
        let run = Run {
            run_id,
            run_date: chrono::Utc::now().format("%Y-%m-%d").to_string(),
        };
        write_atomically(&path, &serde_json::to_vec(&run).unwrap_or_default())?;
        Ok(run)
    }

    /// What "now" the pipeline works on: the run of the latest rollout or import.
    pub(crate) fn current(&self) -> Result<Run, Failure> {
        let path = self.current_path()?;
        let text = fs_err::read_to_string(&path).map_err(|_| {
            let first = if self.pipeline.import.path.as_str().is_empty() {
                "rollout"
            } else {
                "import"
            };
            Failure::new(
                INPUT,
                format!("pipeline {} has no episodes yet", self.pipeline.name),
            )
            .hint(format!("run `make {first}` first"))
        })?;
        serde_json::from_str(&text).map_err(|e| Failure::new(INPUT, format!("{path}: {e}")))
    }

    /// Makes `run` the current one.
    pub(crate) fn set_current(&self, run: &Run) -> Result<(), Failure> {
        write_atomically(
            &self.current_path()?,
            &serde_json::to_vec(run).unwrap_or_default(),
        )
    }

    fn current_path(&self) -> Result<Utf8PathBuf, Failure> {
        Ok(self
            .dir("runs")?
            .join(format!("current-{}.json", self.pipeline.name)))
    }
}

/// Writes beside, syncs and renames: readers see the old file or the new one.
pub(crate) fn write_atomically(path: &Utf8Path, content: &[u8]) -> Result<(), Failure> {
    use std::io::Write;
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = fs_err::File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs_err::rename(&temporary, path)
    };
    write().map_err(|e| {
        let _ = fs_err::remove_file(&temporary);
        output(path, &e)
    })
}

/// An output error: whatever the cause, it is the output that failed.
pub(crate) fn output(path: &Utf8Path, error: &std::io::Error) -> Failure {
    let failure = Failure::io(path, error);
    Failure {
        code: OUTPUT,
        hint: failure.hint.or_else(|| {
            Some("name another folder with --set yard=PATH, or free this one".to_owned())
        }),
        ..failure
    }
}

/// `path` from the root.
pub(crate) fn absolute(path: &Utf8Path) -> Result<Utf8PathBuf, Failure> {
    camino::absolute_utf8(path).map_err(|e| Failure::io(path, &e))
}
