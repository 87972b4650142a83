//! Running the rules over one run: findings, scores, and what each rule hit out of how many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arrow_array::{ArrayRef, Float64Array, Int32Array, RecordBatch, StringArray};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use drillyard_schema::table::{FindingRow, ScoreRow, to_batch};
use drillyard_schema::{EpisodeId, FailReason, RunId, StageRunId};
use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, Problem, QueryError};
use crate::library::SqlFile;
use crate::session::Session;

/// A rule that takes longer is set aside.
const RULE_TIMEOUT: Duration = Duration::from_mins(5);

/// What one rule hit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RuleCount {
    /// The rule's id.
    pub rule: String,
    /// Its version.
    pub rule_version: i32,
    /// One line about it.
    pub title: String,
    /// See [`crate::Category`].
    pub category: String,
    /// See [`crate::Severity`].
    pub severity: String,
    /// Number of findings.
    pub findings: i64,
    /// Number of episodes with a finding.
    pub episodes: i64,
    /// Of these, how many infrastructure ended.
    pub infrastructure: i64,
    /// What it counts: `episode`, `step` or `call`.
    pub grain: String,
    /// How many of these the run has: the denominator.
    pub out_of: i64,
    /// Up to five episodes to look at.
    pub samples: Vec<String>,
}

/// What QA makes of a run. The caller writes it.
#[derive(Debug, Clone, Default)]
pub struct QaOutcome {
    /// Hits, by rule, then episode and step.
    pub findings: Vec<FindingRow>,
    /// One row per episode.
    pub scores: Vec<ScoreRow>,
    /// What each rule that ran hit, in the order of the rules.
    pub rules: Vec<RuleCount>,
    /// Rules that were set aside, and findings that could not be used.
    pub problems: Vec<Problem>,
    /// Episodes in the run.
    pub episodes: usize,
    /// Of these, ended by infrastructure: never scored.
    pub infrastructure: usize,
    /// Scored episodes with a finding of a blocking rule.
    pub blocked: usize,
}

impl QaOutcome {
    /// Episodes that count.
    pub fn scored(&self) -> usize {
        self.episodes - self.infrastructure
    }

    /// The share of scored episodes with a finding of a blocking rule; 0 where none is scored.
    pub fn blocked_share(&self) -> f64 {
        if self.scored() == 0 {
            return 0.0;
        }
        self.blocked as f64 / self.scored() as f64
    }
}

#[derive(Deserialize)]
struct EpisodeLine {
    run_date: String,
    purpose: String,
    episode_id: String,
    infrastructure: bool,
}

#[derive(Deserialize)]
struct Hit {
    episode_id: Option<String>,
    step_index: Option<i32>,
    detail: Option<String>,
}

#[derive(Deserialize)]
struct ScoreLine {
    episode_id: String,
    quality: f64,
    tier: Option<String>,
    weight: f64,
    fail_reason: Option<String>,
    n_findings: i32,
}

/// Runs `rules` over the episodes of `run` and scores them. A rule that fails is set aside and named in `problems`; it never sinks the
/// others. An error means that nothing could be judged: the lake could not be read, or the scores' own SQL is broken.
pub async fn run_qa(
    session: &Session,
    rules: &[SqlFile],
    run: &RunId,
    stage_run: &StageRunId,
) -> Result<QaOutcome, QueryError> {
    let session = session.scoped_to(run).await?;
    let episodes: Vec<EpisodeLine> = session
        .sql("SELECT run_date, purpose, episode_id, infrastructure FROM episode_outcomes ORDER BY episode_id")
        .await?
        .rows()?;
    let by_id: BTreeMap<&str, &EpisodeLine> = episodes
        .iter()
        .map(|e| (e.episode_id.as_str(), e))
        .collect();

    let mut outcome = QaOutcome {
        episodes: episodes.len(),
        infrastructure: episodes.iter().filter(|e| e.infrastructure).count(),
        problems: session.problems().to_vec(),
        ..QaOutcome::default()
    };
    let mut ran = Vec::new();
    for rule in rules {
        let Some(qa) = rule.qa() else {
            let message = format!("{}: is no rule (kind: qa)", rule.path);
            outcome
                .problems
                .push(Problem::new(rule.path.as_str(), message));
            continue;
        };
        let hits = match hits(&session, rule).await {
            Ok(hits) => hits,
            // A file of the lake that cannot be read is not the rule's fault: every other rule would judge half a run.
            Err(error) if error.kind() == ErrorKind::Input => return Err(error),
            Err(error) => {
                outcome.problems.push(error.into());
                continue;
            }
        };
        ran.push(rule.clone());
        let mut strangers = 0_usize;
        for hit in hits {
            let Some(episode) = hit.episode_id.as_deref().and_then(|id| by_id.get(id)) else {
                strangers += 1;
                continue;
            };
            outcome.findings.push(FindingRow {
                run_date: episode.run_date.clone(),
                purpose: episode.purpose.clone(),
                run_id: run.clone(),
                stage_run: stage_run.clone(),
                episode_id: EpisodeId(episode.episode_id.clone()),
                step_index: hit.step_index,
                rule: rule.header.id.clone(),
                rule_version: rule.header.version,
                category: qa.category.as_str().to_owned(),
                severity: qa.severity.as_str().to_owned(),
                detail: hit.detail.unwrap_or_default(),
            });
        }
        if strangers > 0 {
            let message = format!(
                "{}: {strangers} rows name no episode of run {run}",
                rule.path
            );
            outcome
                .problems
                .push(Problem::new(rule.path.as_str(), message));
        }
    }

    session.replace_rows("rules", &rules_batch(&ran)?)?;
    let findings = to_batch(&outcome.findings)
        .map_err(|e| QueryError::new(ErrorKind::Query, "findings", e.to_string()))?;
    session.replace_rows("current_findings", &findings)?;
    outcome.rules = session.ask("rule_counts").await?.rows()?;
    let scores: Vec<ScoreLine> = session.ask("scores").await?.rows()?;
    outcome.scores = scores
        .into_iter()
        .filter_map(|line| {
            let episode = by_id.get(line.episode_id.as_str())?;
            Some(ScoreRow {
                run_date: episode.run_date.clone(),
                purpose: episode.purpose.clone(),
                run_id: run.clone(),
                stage_run: stage_run.clone(),
                episode_id: EpisodeId(line.episode_id),
                quality: line.quality,
                tier: line.tier,
                weight: line.weight,
                fail_reason: line.fail_reason,
                n_findings: line.n_findings,
            })
        })
        .collect();
    outcome.blocked = outcome
        .findings
        .iter()
        .filter(|f| f.severity == "block")
        .filter(|f| {
            by_id
                .get(f.episode_id.as_str())
                .is_some_and(|e| !e.infrastructure)
        })
        .map(|f| &f.episode_id)
        .collect::<BTreeSet<_>>()
        .len();
    Ok(outcome)
}

async fn hits(session: &Session, rule: &SqlFile) -> Result<Vec<Hit>, QueryError> {
    let wrong = |message: String| QueryError::new(ErrorKind::Query, rule.path.as_str(), message);
    let result = tokio::time::timeout(RULE_TIMEOUT, session.run(rule, None))
        .await
        .map_err(|_| wrong(format!("took longer than {} s", RULE_TIMEOUT.as_secs())))??;
    for column in ["episode_id", "step_index", "detail"] {
        if !result.columns().contains(&column) {
            return Err(wrong(format!(
                "a rule must return the columns episode_id, step_index and detail; '{column}' is missing"
            )));
        }
    }
    let shape = Schema::new(vec![
        Field::new("episode_id", DataType::Utf8, true),
        Field::new("step_index", DataType::Int32, true),
        Field::new("detail", DataType::Utf8, true),
    ]);
    let mut hits = Vec::new();
    for batch in result.batches() {
        let columns = shape
            .fields()
            .iter()
            .map(|field| {
                let column = batch
                    .column_by_name(field.name())
                    .ok_or_else(|| ArrowError::SchemaError(field.name().clone()))?;
                arrow_cast::cast(column, field.data_type())
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| wrong(e.to_string()))?;
        let batch = RecordBatch::try_new(Arc::new(shape.clone()), columns)
            .map_err(|e| wrong(e.to_string()))?;
        let part: Vec<Hit> =
            serde_arrow::from_record_batch(&batch).map_err(|e| wrong(e.to_string()))?;
        hits.extend(part);
    }
    hits.sort_by(|a, b| (&a.episode_id, a.step_index).cmp(&(&b.episode_id, b.step_index)));
    Ok(hits)
}

/// The rules as a table that SQL can join: `id`, `title`, `category`, `severity`, `version`, `penalty`, `fail_reason`, `grain`,
/// `position` (the order they run in).
pub(crate) fn rules_batch(rules: &[SqlFile]) -> Result<RecordBatch, QueryError> {
    let rules: Vec<_> = rules
        .iter()
        .filter_map(|file| file.qa().map(|qa| (file, qa)))
        .collect();
    let text = |value: &dyn Fn(usize) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values((0..rules.len()).map(value)))
    };
    let fail_reasons: StringArray = rules
        .iter()
        .map(|(_, qa)| qa.fail_reason.map(FailReason::as_str))
        .collect();
    let columns: Vec<(Field, ArrayRef)> = vec![
        (
            required("id", DataType::Utf8),
            text(&|i| rules[i].0.header.id.clone()),
        ),
        (
            required("title", DataType::Utf8),
            text(&|i| rules[i].0.header.title.clone()),
        ),
        (
            required("category", DataType::Utf8),
            text(&|i| rules[i].1.category.as_str().into()),
        ),
        (
            required("severity", DataType::Utf8),
            text(&|i| rules[i].1.severity.as_str().into()),
        ),
        (
            required("version", DataType::Int32),
            Arc::new(Int32Array::from_iter_values(
                rules.iter().map(|(f, _)| f.header.version),
            )),
        ),
        (
            required("penalty", DataType::Float64),
            Arc::new(Float64Array::from_iter_values(
                rules.iter().map(|(_, qa)| qa.penalty),
            )),
        ),
        (
            Field::new("fail_reason", DataType::Utf8, true),
            Arc::new(fail_reasons),
        ),
        (
            required("grain", DataType::Utf8),
            text(&|i| rules[i].1.grain.as_str().into()),
        ),
        (
            required("position", DataType::Int32),
            Arc::new(Int32Array::from_iter_values(0..rules.len() as i32)),
        ),
    ];
    let (fields, columns): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
        .map_err(|e| QueryError::new(ErrorKind::Query, "rules", e.to_string()))
}

fn required(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, false)
}
