//! Credit: rewards, returns, advantages, weights and pairs of a run.

use std::collections::BTreeMap;

use drillyard_credit::{
    AdvantageConfig, CreditConfig, CreditError, PairConfig, Request, Scale, assign,
};
use drillyard_schema::StageRunId;
use drillyard_stage::exit::{INPUT, INTERNAL, NOTHING_TO_DO, OUTPUT};
use drillyard_stage::{Failure, Outcome, Record, RewardScheme, Stage};
use serde_json::json;

use crate::context::{Context, Run};

/// Assigns credit to one run's episodes.
pub(crate) struct CreditStage<'a> {
    context: &'a Context,
    run: Run,
    qa: StageRunId,
    control: bool,
}

impl<'a> CreditStage<'a> {
    /// Credit of `run` with the scores of `qa`; `control` permutes outcomes first.
    pub(crate) fn new(context: &'a Context, run: Run, qa: &Record, control: bool) -> Self {
        Self {
            context,
            run,
            qa: qa.row.stage_run.clone(),
            control: control || context.pipeline.credit.control,
        }
    }

    fn config(&self) -> CreditConfig {
        let settings = &self.context.pipeline.credit;
        let scheme = match settings.scheme {
            RewardScheme::Weighted => "weighted",
            RewardScheme::Signed => "graded",
            RewardScheme::Outcome => "outcome_format",
        };
        CreditConfig {
            scheme: scheme.to_owned(),
            max_steps: self.context.pipeline.rollout.max_steps,
            gamma: settings.gamma,
            advantage: AdvantageConfig {
                scale: if settings.normalise {
                    Scale::Deviation
                } else {
                    Scale::None
                },
                ..AdvantageConfig::default()
            },
            pairs: PairConfig {
                max_per_task: settings.pairs_per_task as u32,
                ..PairConfig::default()
            },
            control: self.control.then_some(self.context.pipeline.seed),
            ..CreditConfig::default()
        }
    }
}

impl Stage for CreditStage<'_> {
    const NAME: &'static str = "credit";
    const VERSION: i32 = 1;

    fn inputs(&self) -> BTreeMap<String, String> {
        let config = serde_json::to_string(&self.config()).unwrap_or_default();
        BTreeMap::from([
            ("qa".to_owned(), self.qa.to_string()),
            ("config".to_owned(), config),
        ])
    }

    async fn run(&self, stage_run: &StageRunId) -> Result<Outcome, Failure> {
        let snapshot = self
            .context
            .lake
            .snapshot()
            .await
            .map_err(|e| Failure::from_error(INPUT, &e))?;
        let request = Request::new(
            self.run.run_id.clone(),
            Some(self.qa.clone()),
            stage_run.clone(),
        );
        let config = self.config();
        let files = snapshot.clone();
        let credit = tokio::task::spawn_blocking(move || assign(&files, &request, &config))
            .await
            .map_err(|e| Failure::new(INTERNAL, e))?
            .map_err(|e| credit_failure(&e))?;
        let lake = &self.context.lake;
        let unwritten = |e: drillyard_lake::LakeError| Failure::from_error(OUTPUT, &e);
        let returns = lake
            .append(&credit.returns, None)
            .await
            .map_err(unwritten)?;
        let advantages = lake
            .append(&credit.advantages, None)
            .await
            .map_err(unwritten)?;
        let pairs = lake.append(&credit.pairs, None).await.map_err(unwritten)?;
        lake.append(&credit.control_scores, None)
            .await
            .map_err(unwritten)?;
        let s = &credit.summary;
        self.context.ui.note(format!(
            "{:>10} {} groups: {} mixed, {} all right, {} all wrong · {} pairs · {} scored, {} infrastructure",
            "credit", s.groups, s.groups_mixed, s.zero_variance_right, s.zero_variance_wrong, s.pairs, s.scored, s.infrastructure
        ));
        let figures = json!({
            "control": self.control,
            "scored": s.scored,
            "infrastructure": s.infrastructure,
            "mean_reward": s.mean_reward,
            "groups": s.groups,
            "groups_mixed": s.groups_mixed,
            "groups_all_right": s.zero_variance_right,
            "groups_all_wrong": s.zero_variance_wrong,
            "pairs": s.pairs,
            "outcomes_moved": s.outcomes_moved,
        });
        Ok(Outcome {
            read: snapshot.versions().clone(),
            written: json!({ "returns": returns, "advantages": advantages, "pairs": pairs }),
            figures,
        })
    }
}

fn credit_failure(error: &CreditError) -> Failure {
    let code = if matches!(error, CreditError::Config { .. }) {
        drillyard_stage::exit::USAGE
    } else {
        NOTHING_TO_DO
    };
    Failure::from_error(code, error)
}
