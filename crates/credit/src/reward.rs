//! From raw components to rewards and returns.

use drillyard_schema::{Table, VerdictKind};
use polars::prelude::*;

use crate::frame::join;
use crate::scan::{Kind, TableFiles, scan};
use crate::{CreditError, Outcome, Scheme};

/// Rewards are added up as whole numbers of this many to one. Sums of fractions depend on the order of the terms, and the engine
/// promises none: the last bits would differ from run to run, and with them equal rewards.
const UNITS: f64 = 1e12;

/// Rounded to whole units; what exceeds nine million makes the plan fail rather than wrap.
fn to_units(reward: Expr) -> Expr {
    (reward * lit(UNITS))
        .round(0, RoundMode::HalfToEven)
        .strict_cast(DataType::Int64)
}

fn from_units(units: Expr) -> Expr {
    units.cast(DataType::Float64) / lit(UNITS)
}

/// The lazy frames that composing rewards gives.
pub struct Rewards {
    /// `episode_id`, `reward` (null without an outcome), `final_reward` (what falls on the last step for the outcome), `success`
    /// (null where nobody can tell).
    pub episodes: LazyFrame,
    /// `episode_id`, `step_index`, `step_units`: what steps earn by themselves, in units.
    pub steps: LazyFrame,
}

/// Composes the rewards of `episodes` (as [`crate::episodes::frame`] gives them).
pub fn compose(
    lake: &dyn TableFiles,
    episodes: &LazyFrame,
    scheme: &Scheme,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<Rewards, CreditError> {
    let raw = raw_components(lake, episodes, wanted)?;
    let outcomes = raw
        .clone()
        .filter(col("component").eq(lit("outcome")))
        .group_by([col("episode_id")])
        .agg([from_units(to_units(col("value")).sum()).alias("outcome")]);
    let contributions = contributions(raw, scheme)?;
    let earned = contributions
        .clone()
        .group_by([col("episode_id")])
        .agg([from_units(col("step_units").sum()).alias("earned")]);

    let judged = join(
        episodes.clone(),
        outcomes,
        &[("episode_id", "episode_id")],
        JoinType::Left,
    );
    let judged = join(
        judged,
        verdicts(lake, wanted)?,
        &[("source", "verdict_of")],
        JoinType::Left,
    );
    let judged = join(
        judged,
        earned,
        &[("episode_id", "episode_id")],
        JoinType::Left,
    );
    let episodes = judged
        .with_column(
            coalesce(&[
                col("outcome"),
                col("score"),
                col("success").cast(DataType::Float64),
            ])
            .alias("outcome"),
        )
        .with_columns([
            (outcome_reward(scheme.outcome, col("outcome")) + efficiency(scheme))
                .alias("final_reward"),
            coalesce(&[col("success"), col("outcome").gt_eq(lit(1.0))]).alias("success"),
        ])
        .select([
            col("episode_id"),
            (col("final_reward") + col("earned").fill_null(lit(0.0))).alias("reward"),
            col("final_reward"),
            col("success"),
        ]);
    Ok(Rewards {
        episodes,
        steps: contributions,
    })
}

/// Components of each episode's outcome source: `episode_id`, `n_steps`, `source_steps`, `component`, `step_index`, `value`. Of
/// each emitter only its newest version counts.
fn raw_components(
    lake: &dyn TableFiles,
    episodes: &LazyFrame,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<LazyFrame, CreditError> {
    let newest = col("scheme_version")
        .max()
        .over([col("emitted_for"), col("scheme")])
        .map_err(CreditError::plan("reward components"))?;
    let rows = scan(
        lake,
        Table::Rewards,
        &[
            ("episode_id", Kind::Text),
            ("step_index", Kind::Int),
            ("scheme", Kind::Text),
            ("scheme_version", Kind::Text),
            ("component", Kind::Text),
            ("value", Kind::Real),
        ],
        wanted,
    )?
    .rename(["episode_id"], ["emitted_for"], true)
    .filter(col("scheme_version").eq(newest))
    .select([
        col("emitted_for"),
        col("step_index"),
        col("component"),
        col("value"),
    ]);
    let targets = episodes.clone().select([
        col("source"),
        col("episode_id"),
        col("n_steps"),
        col("source_steps"),
    ]);
    Ok(join(
        targets,
        rows,
        &[("source", "emitted_for")],
        JoinType::Inner,
    ))
}

/// What each step earns by the scheme's terms: `episode_id`, `step_index`, `step_units`. What belongs to no step, or to one past
/// the end, falls on the last.
fn contributions(raw: LazyFrame, scheme: &Scheme) -> Result<LazyFrame, CreditError> {
    let names: Vec<&str> = scheme.terms.keys().map(String::as_str).collect();
    let terms = df!(
        "component" => names,
        "weight" => scheme.terms.values().map(|t| t.weight).collect::<Vec<_>>(),
        "mean_over_steps" => scheme.terms.values().map(|t| t.mean_over_steps).collect::<Vec<_>>(),
    )
    .map_err(CreditError::plan("the scheme's terms"))?;
    let at_least_one = |steps: &str| {
        when(col(steps).gt(lit(1i64)))
            .then(col(steps))
            .otherwise(lit(1i64))
    };
    let last = at_least_one("n_steps") - lit(1i64);
    let slot = coalesce(&[col("step_index"), last.clone()]);
    Ok(join(
        raw,
        terms.lazy(),
        &[("component", "component")],
        JoinType::Inner,
    )
    .with_columns([
        when(slot.clone().gt(last.clone()))
            .then(last)
            .otherwise(slot)
            .alias("step_index"),
        to_units(
            col("value") * col("weight")
                / when(col("mean_over_steps"))
                    .then(at_least_one("source_steps").cast(DataType::Float64))
                    .otherwise(lit(1.0)),
        )
        .alias("step_units"),
    ])
    .group_by([col("episode_id"), col("step_index")])
    .agg([col("step_units").sum()]))
}

fn outcome_reward(outcome: Outcome, raw: Expr) -> Expr {
    match outcome {
        Outcome::Linear { weight } => raw * lit(weight),
        Outcome::Graded {
            success,
            partial,
            failure,
        } => when(raw.clone().gt_eq(lit(1.0)))
            .then(lit(success))
            .when(raw.clone().lt_eq(lit(0.0)))
            .then(lit(failure))
            .otherwise(raw * lit(partial)),
    }
}

fn efficiency(scheme: &Scheme) -> Expr {
    let spare = lit(1.0)
        - col("source_steps").cast(DataType::Float64) / lit(f64::from(scheme.max_steps.max(1)));
    when(
        col("outcome")
            .gt_eq(lit(1.0))
            .and(spare.clone().gt(lit(0.0))),
    )
    .then(spare * lit(scheme.efficiency))
    .otherwise(lit(0.0))
}

/// The verdict that counts of each episode: a later verification before the first, both before what was recorded, a judge last;
/// within a kind the newest. `verdict_of`, `success`, `score`.
fn verdicts(
    lake: &dyn TableFiles,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<LazyFrame, CreditError> {
    let kind = |kind: VerdictKind| col("kind").eq(lit(kind.as_str()));
    let rank = when(kind(VerdictKind::ReVerified))
        .then(lit(3))
        .when(kind(VerdictKind::Verified))
        .then(lit(2))
        .when(kind(VerdictKind::Recorded))
        .then(lit(1))
        .otherwise(lit(0));
    let newest = |column: &str| {
        col(column)
            .sort_by(
                [col("rank"), col("decided_at")],
                SortMultipleOptions::default(),
            )
            .last()
    };
    Ok(scan(
        lake,
        Table::Verdicts,
        &[
            ("episode_id", Kind::Text),
            ("kind", Kind::Text),
            ("success", Kind::Bool),
            ("score", Kind::Real),
            ("decided_at", Kind::Time),
        ],
        wanted,
    )?
    .filter(col("success").is_not_null().or(col("score").is_not_null()))
    .with_column(rank.alias("rank"))
    .group_by([col("episode_id").alias("verdict_of")])
    .agg([newest("success"), newest("score")]))
}

/// Reward and discounted return of each step of the scored episodes: `episode_id`, `step_index`, `reward`, `discounted_return`.
///
/// `steps` has `episode_id` and `step_index`; `scored` has `episode_id`, `n_steps`, `final_reward`.
pub fn returns(
    steps: LazyFrame,
    scored: LazyFrame,
    contributions: LazyFrame,
    gamma: f64,
) -> Result<LazyFrame, CreditError> {
    let key = [("episode_id", "episode_id")];
    let both = [("episode_id", "episode_id"), ("step_index", "step_index")];
    let rewarded = join(
        join(steps, scored, &key, JoinType::Inner),
        contributions,
        &both,
        JoinType::Left,
    )
    .with_column(
        (from_units(col("step_units").fill_null(lit(0i64)))
            + when(col("step_index").eq(col("n_steps") - lit(1i64)))
                .then(col("final_reward"))
                .otherwise(lit(0.0)))
        .alias("reward"),
    )
    .sort(["episode_id", "step_index"], SortMultipleOptions::default());
    // Sum over k >= t of gamma^(k-t) r_k = (sum over k >= t of gamma^k r_k) / gamma^t. The sum runs from the end, so the smallest
    // powers are added first and little is lost.
    let power = lit(gamma).pow(col("step_index").cast(DataType::Float64));
    let discounted = (col("reward") * power.clone())
        .cum_sum(true)
        .over([col("episode_id")])
        .map_err(CreditError::plan("discounted returns"))?
        / power;
    Ok(rewarded
        .with_column(discounted.alias("discounted_return"))
        .select([
            col("episode_id"),
            col("step_index"),
            col("reward"),
            col("discounted_return"),
        ]))
}
