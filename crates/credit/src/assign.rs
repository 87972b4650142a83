//! The whole of credit: plans put together, collected, and turned into rows.

use std::collections::BTreeMap;

use drillyard_schema::table::{AdvantageRow, PairRow, ReturnRow, ScoreRow};
use drillyard_schema::{Purpose, RunId, StageRunId, Table};
use polars::prelude::*;

use crate::episodes::{self, Episode};
use crate::frame::{Columns, collect, join};
use crate::scan::{Kind, TableFiles, scan};
use crate::summary::{Besides, summarise};
use crate::{CreditConfig, CreditError, Summary, advantage, pairs, reward};

/// What credit is to be assigned to.
#[derive(Debug, Clone)]
pub struct Request {
    /// The rollouts or imports.
    pub runs: Vec<RunId>,
    /// Which of their episodes: `train`, `import`, or both.
    pub purposes: Vec<Purpose>,
    /// The QA executions whose scores count. Without any, every scored episode weighs 1.
    pub qa_stage_runs: Vec<StageRunId>,
    /// The execution that the rows are stamped with.
    pub stage_run: StageRunId,
}

impl Request {
    /// The training and imported episodes of one run, with one QA execution's scores.
    pub fn new(run: RunId, qa: Option<StageRunId>, stage_run: StageRunId) -> Self {
        Self {
            runs: vec![run],
            purposes: vec![Purpose::Train, Purpose::Import],
            qa_stage_runs: qa.into_iter().collect(),
            stage_run,
        }
    }
}

/// Rows to append to the lake, and their figures.
#[derive(Debug, Clone, PartialEq)]
pub struct Credit {
    /// One for each step of the scored episodes, by episode and step.
    pub returns: Vec<ReturnRow>,
    /// One for each episode, by group and episode.
    pub advantages: Vec<AdvantageRow>,
    /// By task, chosen and rejected.
    pub pairs: Vec<PairRow>,
    /// For the negative control only: the scores as they were exchanged, stamped with credit's own execution, by episode. What
    /// reads tiers and weights afterwards must read these instead of QA's.
    pub control_scores: Vec<ScoreRow>,
    /// Figures for the report card.
    pub summary: Summary,
}

/// Assigns credit to the episodes of a request. Reads files, writes nothing. Blocks: call it from a thread that may.
pub fn assign(
    lake: &dyn TableFiles,
    request: &Request,
    config: &CreditConfig,
) -> Result<Credit, CreditError> {
    config.check()?;
    let scheme = config.resolve()?;
    let wanted = |purpose: &str| request.purposes.iter().any(|p| p.as_str() == purpose);

    let mut episodes = episodes::load(lake, request)?;
    if let Some(seed) = config.control {
        episodes::permute_outcomes(&mut episodes, seed);
    }
    let frame = episodes::frame(&episodes)?;
    let rewards = reward::compose(lake, &frame, &scheme, &wanted)?;
    let scores = scores(lake, request, &wanted)?;
    let without_qa = episodes
        .iter()
        .filter(|e| !e.infrastructure && !scores.contains_key(&episodes[e.source].episode_id))
        .count();

    let key = [("episode_id", "episode_id")];
    let weighted = join(frame, weights(&episodes, &scores)?, &key, JoinType::Left);
    // Sorted before the groups' moments are taken, so that they agree to the last bit from run to run.
    let rewarded = join(weighted, rewards.episodes, &key, JoinType::Left)
        .sort(["group_id", "episode_id"], SortMultipleOptions::default());
    let advantages = collect(
        advantage::advantages(rewarded, config.advantage)?,
        "advantages",
    )?;

    let scored = advantages.clone().lazy().filter(col("scored"));
    let steps = scan(
        lake,
        Table::Steps,
        &[("episode_id", Kind::Text), ("step_index", Kind::Int)],
        wanted,
    )?;
    let returns = reward::returns(
        steps.clone(),
        scored
            .clone()
            .select([col("episode_id"), col("n_steps"), col("final_reward")]),
        rewards.steps,
        config.gamma,
    )?;
    let returns = collect(returns, "returns")?;
    let pairs = collect(
        pairs::pairs(lake, &scored, &steps, config.pairs, &wanted)?,
        "pairs",
    )?;

    let rows = Rows {
        by_id: episodes
            .iter()
            .map(|e| (e.episode_id.as_str(), e))
            .collect(),
        stage_run: &request.stage_run,
    };
    let advantage_rows = rows.advantages(&advantages)?;
    let (pair_rows, pairs_identical) = rows.pairs(&pairs)?;
    let summary = summarise(
        &advantage_rows,
        &pair_rows,
        &Besides {
            episodes: &episodes,
            success: &successes(&advantages)?,
            pairs_identical,
            without_qa,
            control: config.control,
        },
    );
    Ok(Credit {
        returns: rows.returns(&returns)?,
        advantages: advantage_rows,
        pairs: pair_rows,
        control_scores: match config.control {
            Some(_) => rows.exchanged(&episodes, &scores),
            None => Vec::new(),
        },
        summary,
    })
}

/// What QA made of an episode.
struct Score {
    quality: f64,
    tier: Option<String>,
    weight: f64,
    fail_reason: Option<String>,
    n_findings: i64,
}

fn scores(
    lake: &dyn TableFiles,
    request: &Request,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<BTreeMap<String, Score>, CreditError> {
    let of_stages = request.qa_stage_runs.iter().fold(lit(false), |any, s| {
        any.or(col("stage_run").eq(lit(s.as_str().to_owned())))
    });
    let frame = scan(
        lake,
        Table::Scores,
        &[
            ("episode_id", Kind::Text),
            ("stage_run", Kind::Text),
            ("quality", Kind::Real),
            ("tier", Kind::Text),
            ("weight", Kind::Real),
            ("fail_reason", Kind::Text),
            ("n_findings", Kind::Int),
        ],
        wanted,
    )?
    .filter(of_stages);
    let frame = collect(frame, "scores")?;
    let columns = Columns {
        frame: &frame,
        what: "scores",
    };
    let ids = columns.texts("episode_id")?;
    let (quality, weight) = (columns.reals("quality")?, columns.reals("weight")?);
    let (tiers, reasons) = (
        columns.texts_or_null("tier")?,
        columns.texts_or_null("fail_reason")?,
    );
    let findings = columns.ints("n_findings")?;
    let mut scores = BTreeMap::new();
    for (index, (tier, fail_reason)) in tiers.into_iter().zip(reasons).enumerate() {
        let score = Score {
            quality: quality[index],
            tier,
            weight: weight[index],
            fail_reason,
            n_findings: findings[index],
        };
        if scores.insert(ids[index].clone(), score).is_some() {
            return Err(CreditError::Twice {
                table: Table::Scores.name(),
                episode: ids[index].clone(),
                hint: "; name one QA execution for each run",
            });
        }
    }
    Ok(scores)
}

/// `episode_id` and `weight`: that of the outcome's source, 1 where QA did not score it, 0 for infrastructure.
fn weights(
    episodes: &[Episode],
    scores: &BTreeMap<String, Score>,
) -> Result<LazyFrame, CreditError> {
    let weight = |e: &Episode| {
        let score = scores.get(&episodes[e.source].episode_id);
        match score {
            _ if e.infrastructure => 0.0,
            Some(score) => score.weight,
            None => 1.0,
        }
    };
    let frame = df!(
        "episode_id" => episodes.iter().map(|e| e.episode_id.as_str()).collect::<Vec<_>>(),
        "weight" => episodes.iter().map(weight).collect::<Vec<_>>(),
    );
    Ok(frame.map_err(CreditError::plan("weights"))?.lazy())
}

fn successes(advantages: &DataFrame) -> Result<BTreeMap<String, Option<bool>>, CreditError> {
    let columns = Columns {
        frame: advantages,
        what: "successes",
    };
    Ok(columns
        .texts("episode_id")?
        .into_iter()
        .zip(columns.bools_or_null("success")?)
        .collect())
}

/// Makes rows of collected frames.
struct Rows<'a> {
    by_id: BTreeMap<&'a str, &'a Episode>,
    stage_run: &'a StageRunId,
}

impl Rows<'_> {
    fn episode(&self, id: &str) -> Result<&Episode, CreditError> {
        self.by_id
            .get(id)
            .copied()
            .ok_or_else(|| CreditError::Plan {
                what: "rows",
                message: format!("episode {id} came from nowhere"),
            })
    }

    fn advantages(&self, frame: &DataFrame) -> Result<Vec<AdvantageRow>, CreditError> {
        let columns = Columns {
            frame,
            what: "advantages",
        };
        let reward = columns.reals_or_null("reward")?;
        let baseline = columns.reals_or_null("baseline")?;
        let deviation = columns.reals_or_null("deviation")?;
        let advantage = columns.reals_or_null("advantage")?;
        let weight = columns.reals("weight")?;
        let scored = columns.bools("scored")?;
        let zero_variance = columns.bools("zero_variance")?;
        let n_total = columns.ints("n_total")?;
        let n_scored = columns.ints("n_scored")?;
        let n_infrastructure = columns.ints("n_infrastructure")?;
        let ids = columns.texts("episode_id")?;
        ids.iter()
            .enumerate()
            .map(|(i, id)| {
                let episode = self.episode(id)?;
                Ok(AdvantageRow {
                    run_date: episode.run_date.clone(),
                    purpose: episode.purpose.clone(),
                    run_id: episode.run_id.as_str().into(),
                    stage_run: self.stage_run.clone(),
                    group_id: episode.group_id.as_str().into(),
                    episode_id: id.as_str().into(),
                    task_id: episode.task_id.as_str().into(),
                    reward: reward[i].unwrap_or(0.0),
                    baseline: baseline[i],
                    deviation: deviation[i],
                    advantage: advantage[i],
                    weight: weight[i],
                    scored: scored[i],
                    zero_variance: zero_variance[i],
                    n_total: n_total[i] as i32,
                    n_scored: n_scored[i] as i32,
                    n_infrastructure: n_infrastructure[i] as i32,
                })
            })
            .collect()
    }

    fn returns(&self, frame: &DataFrame) -> Result<Vec<ReturnRow>, CreditError> {
        let columns = Columns {
            frame,
            what: "returns",
        };
        let steps = columns.ints("step_index")?;
        let reward = columns.reals("reward")?;
        let discounted = columns.reals("discounted_return")?;
        let ids = columns.texts("episode_id")?;
        ids.iter()
            .enumerate()
            .map(|(i, id)| {
                let episode = self.episode(id)?;
                Ok(ReturnRow {
                    run_date: episode.run_date.clone(),
                    purpose: episode.purpose.clone(),
                    run_id: episode.run_id.as_str().into(),
                    stage_run: self.stage_run.clone(),
                    episode_id: id.as_str().into(),
                    step_index: steps[i] as i32,
                    reward: reward[i],
                    discounted_return: discounted[i],
                })
            })
            .collect()
    }

    /// The pairs, and how many of them never differ in their calls.
    fn pairs(&self, frame: &DataFrame) -> Result<(Vec<PairRow>, usize), CreditError> {
        let columns = Columns {
            frame,
            what: "pairs",
        };
        let rejected = columns.texts("rejected")?;
        let divergence = columns.ints("divergence_step")?;
        let margin = columns.reals("margin")?;
        let weight = columns.reals("weight")?;
        let identical = columns
            .bools("identical")?
            .into_iter()
            .filter(|i| *i)
            .count();
        let chosen = columns.texts("chosen")?;
        let rows = chosen.iter().enumerate().map(|(i, id)| {
            let episode = self.episode(id)?;
            Ok(PairRow {
                run_date: episode.run_date.clone(),
                purpose: episode.purpose.clone(),
                run_id: episode.run_id.as_str().into(),
                stage_run: self.stage_run.clone(),
                task_id: episode.task_id.as_str().into(),
                chosen_episode_id: id.as_str().into(),
                rejected_episode_id: rejected[i].as_str().into(),
                divergence_step: divergence[i] as i32,
                margin: margin[i],
                weight: weight[i],
            })
        });
        Ok((rows.collect::<Result<_, CreditError>>()?, identical))
    }

    /// The scores of the outcomes' sources, under the episodes that now carry them.
    fn exchanged(&self, episodes: &[Episode], scores: &BTreeMap<String, Score>) -> Vec<ScoreRow> {
        let row = |e: &Episode| {
            let score = scores.get(&episodes[e.source].episode_id)?;
            Some(ScoreRow {
                run_date: e.run_date.clone(),
                purpose: e.purpose.clone(),
                run_id: e.run_id.as_str().into(),
                stage_run: self.stage_run.clone(),
                episode_id: e.episode_id.as_str().into(),
                quality: score.quality,
                tier: score.tier.clone(),
                weight: score.weight,
                fail_reason: score.fail_reason.clone(),
                n_findings: score.n_findings as i32,
            })
        };
        episodes.iter().filter_map(row).collect()
    }
}
