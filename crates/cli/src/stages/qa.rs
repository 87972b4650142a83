//! QA: the rules under `sql/` judge a run's episodes.

use std::collections::BTreeMap;

use drillyard_query::{Library, QueryError, Session, SessionOptions, run_qa};
use drillyard_schema::StageRunId;
use drillyard_stage::exit::{ENVIRONMENT, INPUT, OUTPUT, QA_BLOCKED, USAGE};
use drillyard_stage::{Failure, Outcome, Record, Stage};
use serde_json::json;

use crate::context::{Context, Run};

/// Judges the episodes of one run.
pub(crate) struct QaStage<'a> {
    context: &'a Context,
    run: Run,
    rules: String,
    episodes: String,
}

/// A query error with its exit code.
pub(crate) fn query_failure(error: &QueryError) -> Failure {
    use drillyard_query::ErrorKind;
    let code = match error.kind() {
        ErrorKind::Query => USAGE,
        ErrorKind::Input => INPUT,
        ErrorKind::Output => OUTPUT,
        ErrorKind::Environment => ENVIRONMENT,
    };
    let failure = Failure::from_error(code, error);
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

impl<'a> QaStage<'a> {
    /// QA of `run`, whose episodes `source` (a rollout or an import) brought.
    pub(crate) fn new(context: &'a Context, run: Run, source: &Record) -> Result<Self, Failure> {
        let mut library = Library::load("sql".into()).map_err(|e| query_failure(&e))?;
        library
            .rules_in(&context.pipeline.qa.rules)
            .map_err(|e| query_failure(&e))?;
        Ok(Self {
            context,
            run,
            rules: library.fingerprint(),
            episodes: source.row.stage_run.to_string(),
        })
    }
}

impl Stage for QaStage<'_> {
    const NAME: &'static str = "qa";
    const VERSION: i32 = 1;

    fn inputs(&self) -> BTreeMap<String, String> {
        let config = serde_json::to_string(&self.context.pipeline.qa).unwrap_or_default();
        BTreeMap::from([
            ("rules".to_owned(), self.rules.clone()),
            ("episodes".to_owned(), self.episodes.clone()),
            ("config".to_owned(), config),
        ])
    }

    async fn run(&self, stage_run: &StageRunId) -> Result<Outcome, Failure> {
        let ui = &self.context.ui;
        let started = std::time::Instant::now();
        let snapshot = self
            .context
            .lake
            .snapshot()
            .await
            .map_err(|e| Failure::from_error(INPUT, &e))?;
        let session = Session::open(&snapshot, SessionOptions::default())
            .await
            .map_err(|e| query_failure(&e))?;
        let mut library = Library::load("sql".into()).map_err(|e| query_failure(&e))?;
        let rules = library
            .rules_in(&self.context.pipeline.qa.rules)
            .map_err(|e| query_failure(&e))?;
        ui.note(format!(
            "{:>10} {} rules over {}",
            "qa",
            rules.len(),
            self.run.run_id
        ));
        let outcome = run_qa(&session, &rules, &self.run.run_id, stage_run)
            .await
            .map_err(|e| query_failure(&e))?;
        if outcome.episodes == 0 {
            return Err(Failure::new(
                drillyard_stage::exit::NOTHING_TO_DO,
                format!("run {} has no episodes", self.run.run_id),
            )
            .hint("run `make rollout` or `make import` first"));
        }
        for problem in library.problems().iter().chain(&outcome.problems) {
            ui.warn(format!("set aside: {}", problem.message));
        }
        for rule in outcome.rules.iter().filter(|r| r.findings > 0) {
            ui.note(format!(
                "           {:<28} {:>6} of {} {}s ({}, {})",
                rule.rule, rule.findings, rule.out_of, rule.grain, rule.category, rule.severity
            ));
        }
        let lake = &self.context.lake;
        let unwritten = |e: drillyard_lake::LakeError| Failure::from_error(OUTPUT, &e);
        let findings = lake
            .append(&outcome.findings, None)
            .await
            .map_err(unwritten)?;
        let scores = lake
            .append(&outcome.scores, None)
            .await
            .map_err(unwritten)?;

        let mut tiers: BTreeMap<&str, usize> = BTreeMap::new();
        let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
        for score in &outcome.scores {
            *tiers
                .entry(score.tier.as_deref().unwrap_or("infrastructure"))
                .or_default() += 1;
            if let Some(reason) = &score.fail_reason {
                *reasons.entry(reason).or_default() += 1;
            }
        }
        let quality = outcome.scores.iter().map(|s| s.quality).sum::<f64>()
            / outcome.scores.len().max(1) as f64;
        ui.note(format!(
            "{:>10} {} findings in {} episodes · mean quality {quality:.2} ({:.1} s)",
            "qa",
            outcome.findings.len(),
            outcome.episodes,
            started.elapsed().as_secs_f64()
        ));
        let blocked = outcome.blocked_share();
        if blocked > self.context.pipeline.qa.block_above {
            return Err(Failure::new(QA_BLOCKED, format!("{:.0} % of the scored episodes have findings of blocking rules; the limit is {:.0} %", blocked * 100.0, self.context.pipeline.qa.block_above * 100.0))
                .hint("look at them with: drillyard sql \"SELECT * FROM latest_findings WHERE severity = 'block'\"; raise qa.block_above to go on"));
        }
        let figures = json!({
            "rules": outcome.rules.len(),
            "rules_set_aside": outcome.problems.len(),
            "findings": outcome.findings.len(),
            "episodes": outcome.episodes,
            "scored": outcome.scored(),
            "infrastructure": outcome.infrastructure,
            "blocked_share": blocked,
            "mean_quality": quality,
            "tiers": tiers,
            "fail_reasons": reasons,
        });
        Ok(Outcome {
            read: snapshot.versions().clone(),
            written: json!({ "findings": findings, "scores": scores }),
            figures,
        })
    }
}
