//! Run records: what a stage read, wrote and found out, and whether it has to run at all.

use std::collections::BTreeMap;
use std::future::Future;

use camino::Utf8Path;
use drillyard_lake::{Filter, Lake};
use drillyard_schema::ids::derive_id;
use drillyard_schema::table::{RunRow, Timestamp};
use drillyard_schema::{DRILLYARD_VERSION, RunId, StageRunId};
use serde_json::Value;

use crate::exit::{INPUT, OUTPUT};
use crate::{Failure, Ui};

/// One stage of a pipeline: it reads tables at a version and writes tables.
pub trait Stage {
    /// Its name, such as `rollout`.
    const NAME: &'static str;
    /// Raised when the same inputs would give another result.
    const VERSION: i32;

    /// Everything that decides the result: configuration, code versions, inputs. What is not named here must not matter.
    fn inputs(&self) -> BTreeMap<String, String>;

    /// Whether what an earlier execution wrote is still there.
    fn is_intact(&self, _record: &Record) -> bool {
        true
    }

    /// Does the work, stamping `stage_run` on what it writes.
    fn run(&self, stage_run: &StageRunId) -> impl Future<Output = Result<Outcome, Failure>>;
}

/// What a stage reports.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Version of each table read.
    pub read: BTreeMap<String, i64>,
    /// What was written: tables, files.
    pub written: Value,
    /// Figures for the report card.
    pub figures: Value,
}

/// A succeeded execution, now or earlier.
#[derive(Debug, Clone)]
pub struct Record {
    /// Its row in `runs`.
    pub row: RunRow,
    /// True where an earlier execution was found and nothing was done.
    pub skipped: bool,
    /// Its figures.
    pub figures: Value,
}

/// Runs stages unless they are up to date.
#[derive(Clone)]
pub struct StageRunner {
    lake: Lake,
    ui: Ui,
    pipeline: String,
    config: Value,
}

/// Hash of named inputs.
pub fn fingerprint(stage: &str, version: i32, inputs: &BTreeMap<String, String>) -> String {
    let version = version.to_string();
    let mut parts = vec![stage, version.as_str()];
    for (key, value) in inputs {
        parts.push(key);
        parts.push(value);
    }
    derive_id(&parts, 32)
}

/// Hash over the names and contents of the files under `dirs` that end in `extension`, in order of their paths.
///
/// # Errors
/// When a folder or file can't be read.
pub fn hash_files<'a>(
    dirs: impl IntoIterator<Item = &'a Utf8Path>,
    extension: &str,
) -> Result<String, Failure> {
    let mut files = Vec::new();
    for dir in dirs {
        let entries = dir
            .read_dir_utf8()
            .map_err(|e| Failure::new(INPUT, format!("{dir}: {e}")))?;
        for entry in entries {
            let path = entry.map_err(|e| Failure::io(dir, &e))?.into_path();
            if path.extension() == Some(extension) {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for path in files {
        let content = fs_err::read(&path).map_err(|e| Failure::io(&path, &e))?;
        hasher.update(path.file_name().unwrap_or_default().as_bytes());
        hasher.update(&(content.len() as u64).to_le_bytes());
        hasher.update(&content);
    }
    Ok(hasher.finalize().to_hex()[..32].to_owned())
}

fn now() -> Timestamp {
    Timestamp(chrono::Utc::now().timestamp_micros())
}

impl StageRunner {
    /// A runner that records in `lake`.
    pub fn new(lake: Lake, ui: Ui, pipeline: impl Into<String>, config: Value) -> Self {
        Self {
            lake,
            ui,
            pipeline: pipeline.into(),
            config,
        }
    }

    /// Every recorded execution, oldest first.
    ///
    /// # Errors
    /// When the lake can't be read.
    pub async fn history(&self) -> Result<Vec<RunRow>, Failure> {
        let snapshot = self
            .lake
            .snapshot()
            .await
            .map_err(|e| Failure::from_error(INPUT, &e))?;
        let mut rows: Vec<RunRow> = snapshot
            .read(&Filter::default())
            .await
            .map_err(|e| Failure::from_error(INPUT, &e))?;
        rows.sort_by_key(|r| r.started_at);
        Ok(rows)
    }

    /// The latest succeeded execution of `stage` for `run_id`.
    ///
    /// # Errors
    /// When the lake can't be read.
    pub async fn latest(&self, stage: &str, run_id: &RunId) -> Result<Option<Record>, Failure> {
        let rows = self.history().await?;
        Ok(rows
            .into_iter()
            .rev()
            .find(|r| r.stage == stage && r.run_id == *run_id && r.status == "succeeded")
            .map(|row| Record::of(row, true)))
    }

    /// Runs `stage` for `run_id`, or finds that an earlier execution with the same fingerprint still stands.
    ///
    /// # Errors
    /// What the stage reports, or what the lake says when the record can't be kept.
    pub async fn run<S: Stage>(&self, stage: &S, run_id: &RunId) -> Result<Record, Failure> {
        let fingerprint = fingerprint(S::NAME, S::VERSION, &stage.inputs());
        let earlier = self.history().await?.into_iter().rev().find(|r| {
            r.stage == S::NAME
                && r.run_id == *run_id
                && r.fingerprint == fingerprint
                && r.status == "succeeded"
        });
        if let Some(record) = earlier
            .map(|row| Record::of(row, true))
            .filter(|record| stage.is_intact(record))
        {
            self.ui
                .note(format!("{:>10} up to date, nothing to redo", S::NAME));
            return Ok(record);
        }

        let started_at = now();
        let stage_run = StageRunId(derive_id(
            &[
                "stage_run",
                S::NAME,
                run_id.as_str(),
                &fingerprint,
                &started_at.0.to_string(),
            ],
            16,
        ));
        let result = stage.run(&stage_run).await;
        let (status, outcome) = match &result {
            Ok(outcome) => ("succeeded", outcome.clone()),
            Err(failure) => {
                let figures =
                    serde_json::json!({ "error": failure.message, "exit_code": failure.code });
                (
                    "failed",
                    Outcome {
                        figures,
                        ..Outcome::default()
                    },
                )
            }
        };
        let row = RunRow {
            stage_run,
            run_id: run_id.clone(),
            pipeline: self.pipeline.clone(),
            stage: S::NAME.to_owned(),
            stage_version: S::VERSION,
            status: status.to_owned(),
            fingerprint,
            config: self.config.to_string(),
            inputs: serde_json::to_string(&outcome.read).unwrap_or_default(),
            outputs: outcome.written.to_string(),
            figures: outcome.figures.to_string(),
            drillyard_version: DRILLYARD_VERSION.to_owned(),
            started_at,
            ended_at: now(),
        };
        let kept = self.lake.append(std::slice::from_ref(&row), None).await;
        result?;
        kept.map_err(|e| Failure::from_error(OUTPUT, &e))?;
        Ok(Record::of(row, false))
    }
}

impl Record {
    fn of(row: RunRow, skipped: bool) -> Self {
        let figures = serde_json::from_str(&row.figures).unwrap_or_default();
        Self {
            row,
            skipped,
            figures,
        }
    }

    /// What the execution wrote.
    pub fn written(&self) -> Value {
        serde_json::from_str(&self.row.outputs).unwrap_or_default()
    }
}
