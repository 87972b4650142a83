//! Evaluation: two policies on the same held-out tasks, seeds and temperature.

use std::collections::{BTreeMap, BTreeSet};

use drillyard_lake::Filter;
use drillyard_report::evaluation::{
    Interval, Outcomes, PolicyFigures, outcomes, paired_difference, policy_figures,
};
use drillyard_schema::table::{EpisodeRow, EvalRow, Timestamp, ToolCallRow, VerdictRow};
use drillyard_schema::{Purpose, Split, StageRunId};
use drillyard_stage::exit::{INPUT, NOTHING_TO_DO, OUTPUT};
use drillyard_stage::{Failure, Outcome, Stage};
use serde_json::json;

use super::drill::{Drill, PolicySpec, deciding, named_task_set, tasks};
use super::faults;
use crate::context::{Context, Run};

/// Measures policies on tasks of one split.
pub(crate) struct EvalStage<'a> {
    context: &'a Context,
    split: Split,
    tasks: usize,
    unseen_tasks: usize,
    samples: u32,
    seed: u64,
    policies: Vec<(PolicySpec, Run)>,
    inputs: BTreeMap<String, String>,
}

/// What an evaluation says of one policy.
pub(crate) struct Measured {
    /// Its figures.
    pub figures: PolicyFigures,
    /// Success of each episode by task, families never trained on left out.
    pub outcomes: Outcomes,
}

impl<'a> EvalStage<'a> {
    /// The held-out evaluation of `policies`, as the pipeline sets it.
    pub(crate) fn held_out(
        context: &'a Context,
        policies: Vec<PolicySpec>,
    ) -> Result<Self, Failure> {
        let eval = &context.pipeline.eval;
        Self::new(
            context,
            Split::HeldOut,
            policies,
            eval.tasks,
            eval.unseen_tasks,
            eval.samples,
        )
    }

    /// A validation of `policies`: tasks that steer decisions, never the final figures.
    pub(crate) fn validation(
        context: &'a Context,
        policies: Vec<PolicySpec>,
        tasks: usize,
        samples: u32,
    ) -> Result<Self, Failure> {
        Self::new(context, Split::Validation, policies, tasks, 0, samples)
    }

    fn new(
        context: &'a Context,
        split: Split,
        policies: Vec<PolicySpec>,
        tasks: usize,
        unseen_tasks: usize,
        samples: u32,
    ) -> Result<Self, Failure> {
        let seed = context.pipeline.eval.seed;
        let mut inputs = BTreeMap::new();
        let mut with_runs = Vec::new();
        for (index, policy) in policies.into_iter().enumerate() {
            let mut more = BTreeMap::from([
                ("split", split.to_string()),
                ("seed", seed.to_string()),
                ("tasks", tasks.to_string()),
                ("unseen_tasks", unseen_tasks.to_string()),
                ("samples", samples.to_string()),
            ]);
            more.extend(faults::decides(&context.pipeline.faults, true));
            let parts = deciding(&context.pipeline, &policy, &more)?;
            let flat: Vec<&str> = parts
                .iter()
                .flat_map(|(k, v)| [k.as_str(), v.as_str()])
                .collect();
            let run = context.run(&format!("{}-{split}", context.pipeline.name), &flat)?;
            inputs.insert(format!("{index} {}", policy.name), run.run_id.to_string());
            with_runs.push((policy, run));
        }
        Ok(Self {
            context,
            split,
            tasks,
            unseen_tasks,
            samples,
            seed,
            policies: with_runs,
            inputs,
        })
    }

    /// Figures and outcomes of each policy, in order, from the lake.
    pub(crate) async fn measured(&self) -> Result<Vec<Measured>, Failure> {
        let unreadable = |e: drillyard_lake::LakeError| Failure::from_error(INPUT, &e);
        let snapshot = self.context.lake.snapshot().await.map_err(unreadable)?;
        let unseen: BTreeSet<String> = named_task_set(&self.context.pipeline.tasks.set)?
            .families()
            .iter()
            .filter(|f| f.unseen)
            .map(|f| f.name.to_owned())
            .collect();
        let mut measured = Vec::new();
        for (policy, run) in &self.policies {
            let filter = Filter {
                run_id: Some(run.run_id.clone()),
                ..Filter::default()
            };
            let episodes: Vec<EpisodeRow> =
                last_attempts(snapshot.read(&filter).await.map_err(unreadable)?);
            let verdicts: Vec<VerdictRow> = snapshot.read(&filter).await.map_err(unreadable)?;
            let calls: Vec<ToolCallRow> = snapshot.read(&filter).await.map_err(unreadable)?;
            let mut figures = policy_figures(&policy.name, &episodes, &verdicts, &calls, &unseen)
                .ok_or_else(|| {
                Failure::new(
                    NOTHING_TO_DO,
                    format!("no episode of {} was scored", policy.name),
                )
            })?;
            if faults::decides(&self.context.pipeline.faults, true).is_some() {
                figures.faults = faults::figures(&self.context.lake, &run.run_id).await?;
            }
            let outcomes = outcomes(&episodes, &verdicts, |e| !unseen.contains(&e.family));
            measured.push(Measured { figures, outcomes });
        }
        Ok(measured)
    }
}

/// Of each sample only its last attempt: earlier ones ended by infrastructure and were made again.
fn last_attempts(episodes: Vec<EpisodeRow>) -> Vec<EpisodeRow> {
    let mut last: BTreeMap<(String, i32), EpisodeRow> = BTreeMap::new();
    for episode in episodes {
        let key = (episode.task_id.to_string(), episode.sample_index);
        if last
            .get(&key)
            .is_none_or(|other| other.attempt < episode.attempt)
        {
            last.insert(key, episode);
        }
    }
    last.into_values().collect()
}

impl Stage for EvalStage<'_> {
    const NAME: &'static str = "eval";
    const VERSION: i32 = 1;

    fn inputs(&self) -> BTreeMap<String, String> {
        self.inputs.clone()
    }

    async fn run(&self, stage_run: &StageRunId) -> Result<Outcome, Failure> {
        let set = named_task_set(&self.context.pipeline.tasks.set)?;
        let purpose = if self.split == Split::HeldOut {
            Purpose::HeldOut
        } else {
            Purpose::Validation
        };
        let trained = set.families().iter().filter(|f| !f.unseen).count();
        let apart = set.families().len() - trained;
        // Families take turns in a generated list, so this many tasks hold the wanted number of either kind.
        let wanted = tasks(
            &self.context.pipeline,
            self.split,
            (self.tasks * (trained + apart)).div_ceil(trained.max(1)),
            self.seed,
        )?;
        let (unseen, seen): (Vec<_>, Vec<_>) =
            wanted.into_iter().partition(|task| task.unseen_family);
        let mut chosen: Vec<_> = seen.into_iter().take(self.tasks).collect();
        chosen.extend(unseen.into_iter().take(self.unseen_tasks * apart));
        for (policy, run) in &self.policies {
            let drill = Drill {
                context: self.context,
                run: run.clone(),
                purpose,
                tasks: chosen.clone(),
                samples: self.samples,
                policy: policy.clone(),
                seed: self.seed,
                shard: None,
                label: policy.name.clone(),
            };
            drill.execute().await?;
        }

        let measured = self.measured().await?;
        let at = Timestamp(chrono::Utc::now().timestamp_micros());
        let row = |policy: &PolicyFigures,
                   family: Option<&String>,
                   metric: &str,
                   interval: Interval,
                   bounded: bool| EvalRow {
            stage_run: stage_run.clone(),
            policy: policy.policy.clone(),
            policy_revision: policy.revision.clone(),
            task_set: self.context.pipeline.tasks.set.clone(),
            split: self.split.to_string(),
            family: family.cloned(),
            metric: metric.to_owned(),
            value: interval.value,
            lo: bounded.then_some(interval.lo),
            hi: bounded.then_some(interval.hi),
            n: interval.n as i64,
            at,
        };
        let mut rows = Vec::new();
        for Measured { figures, .. } in &measured {
            let plain = |value: f64| Interval {
                value,
                lo: value,
                hi: value,
                n: figures.success.n,
            };
            rows.push(row(figures, None, "success", figures.success, true));
            rows.extend(
                figures
                    .unseen
                    .map(|interval| row(figures, None, "success_unseen_families", interval, true)),
            );
            rows.extend(
                figures.families.iter().map(|(family, interval)| {
                    row(figures, Some(family), "success", *interval, true)
                }),
            );
            rows.extend(figures.pass_at.iter().map(|(k, value)| {
                row(figures, None, &format!("pass_at_{k}"), plain(*value), false)
            }));
            rows.push(row(
                figures,
                None,
                "mean_steps",
                plain(figures.mean_steps),
                false,
            ));
            rows.push(row(
                figures,
                None,
                "tool_accuracy",
                plain(figures.tool_accuracy),
                false,
            ));
            rows.push(row(
                figures,
                None,
                "success_per_1k_tokens",
                plain(figures.success_per_1k_tokens),
                false,
            ));
        }
        let difference = match measured.as_slice() {
            [base, .., candidate] => paired_difference(&base.outcomes, &candidate.outcomes),
            _ => None,
        };
        if let (Some(interval), Some(last)) = (difference, measured.last()) {
            rows.push(row(&last.figures, None, "difference", interval, true));
        }
        let version = self
            .context
            .lake
            .append(&rows, None)
            .await
            .map_err(|e| Failure::from_error(OUTPUT, &e))?;
        let policies: Vec<&PolicyFigures> = measured.iter().map(|m| &m.figures).collect();
        let figures = json!({ "policies": policies, "difference": difference });
        Ok(Outcome {
            read: BTreeMap::new(),
            written: json!({ "evals": version }),
            figures,
        })
    }
}
