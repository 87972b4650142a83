//! Rollout: episodes to learn from.

use std::collections::BTreeMap;

use drillyard_schema::{Purpose, Split, StageRunId};
use drillyard_stage::{Failure, Outcome, Stage};
use serde_json::json;

use super::drill::{Drill, PolicySpec, deciding, tasks};
use super::faults;
use crate::context::{Context, Run};

/// Runs the pipeline's training tasks.
pub(crate) struct RolloutStage<'a> {
    drill: Drill<'a>,
    inputs: BTreeMap<String, String>,
}

impl<'a> RolloutStage<'a> {
    /// The pipeline's rollout by `policy`; `round` sets apart rollouts that differ in nothing else (nights).
    pub(crate) fn new(
        context: &'a Context,
        policy: PolicySpec,
        round: u64,
        shard: Option<(u32, u32)>,
    ) -> Result<Self, Failure> {
        let pipeline = &context.pipeline;
        let seed = pipeline.seed.wrapping_add(round.wrapping_mul(0x9E37_79B9));
        let mut more = BTreeMap::from([
            ("seed", seed.to_string()),
            ("tasks", pipeline.tasks.train.to_string()),
            ("samples", pipeline.tasks.samples.to_string()),
        ]);
        more.extend(faults::decides(&pipeline.faults, false));
        let inputs = deciding(pipeline, &policy, &more)?;
        let parts: Vec<&str> = inputs
            .iter()
            .flat_map(|(k, v)| [k.as_str(), v.as_str()])
            .collect();
        let run = context.run(&pipeline.name, &parts)?;
        let drill = Drill {
            context,
            run,
            purpose: Purpose::Train,
            tasks: tasks(pipeline, Split::Train, pipeline.tasks.train, seed)?,
            samples: pipeline.tasks.samples,
            policy,
            seed,
            shard,
            label: "rollout".to_owned(),
        };
        Ok(Self { drill, inputs })
    }

    /// The run the episodes belong to.
    pub(crate) fn run_identity(&self) -> &Run {
        &self.drill.run
    }
}

impl Stage for RolloutStage<'_> {
    const NAME: &'static str = "rollout";
    const VERSION: i32 = 1;

    fn inputs(&self) -> BTreeMap<String, String> {
        let mut inputs = self.inputs.clone();
        if let Some((k, n)) = self.drill.shard {
            inputs.insert("shard".to_owned(), format!("{k}/{n}"));
        }
        inputs
    }

    async fn run(&self, _stage_run: &StageRunId) -> Result<Outcome, Failure> {
        let summary = self.drill.execute().await?;
        let snapshot = self
            .drill
            .context
            .lake
            .snapshot()
            .await
            .map_err(|e| Failure::from_error(drillyard_stage::exit::INPUT, &e))?;
        let mut figures = json!({
            "policy": self.drill.policy.name,
            "tasks": self.drill.tasks.len(),
            "episodes": summary.done + summary.earlier,
            "success": summary.success_rate(),
            "infrastructure": summary.infrastructure,
            "steps": summary.steps,
            "generated_tokens": summary.generated_tokens,
            "episodes_per_second": summary.done as f64 / summary.wall_s.max(1e-3),
            "tokens_per_second": summary.generated_tokens as f64 / summary.wall_s.max(1e-3),
            "end_reasons": summary.end_reasons,
        });
        if self.drill.context.pipeline.faults.are_on()
            && let Some(figures) = figures.as_object_mut()
        {
            let lake = &self.drill.context.lake;
            let met = faults::figures(lake, &self.drill.run.run_id).await?;
            figures.extend(met.into_iter().map(|(name, text)| (name, text.into())));
        }
        let written = json!({ "episodes": snapshot.versions().get("episodes") });
        Ok(Outcome {
            read: BTreeMap::new(),
            written,
            figures,
        })
    }
}
