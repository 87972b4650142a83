//! Pairs of a success and a failure of the same task, and where they part.

use drillyard_schema::Table;
use polars::prelude::*;

use crate::frame::join;
use crate::scan::{Kind, TableFiles, scan};
use crate::{CreditError, PairConfig};

/// `chosen`, `rejected` (episode ids), `task_id`, `margin`, `weight`, `divergence_step`, `identical`.
///
/// `candidates` has `episode_id`, `task_id`, `success`, `reward`, `weight`, `n_steps`, one row for each scored episode. Successes and
/// failures of a task are put in order of weight and matched one to one; the shorter list starts over, until the longer one
/// or the limit is used up. So a pair never repeats, and no single episode stands in all of them unless it is the only one.
pub fn pairs(
    lake: &dyn TableFiles,
    candidates: &LazyFrame,
    steps: &LazyFrame,
    config: PairConfig,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<LazyFrame, CreditError> {
    let matched = matched(candidates, config)?;
    let signatures = signatures(lake, steps, wanted)?;
    let arm = |episode: &str, signature: &str| {
        join(
            matched.clone().select([col("chosen"), col("rejected")]),
            signatures.clone(),
            &[(episode, "episode_id")],
            JoinType::Inner,
        )
        .select([
            col("chosen"),
            col("rejected"),
            col("step_index"),
            col("signature").alias(signature),
        ])
    };
    let keys = [
        ("chosen", "chosen"),
        ("rejected", "rejected"),
        ("step_index", "step_index"),
    ];
    let first_difference = join(
        arm("chosen", "of_chosen"),
        arm("rejected", "of_rejected"),
        &keys,
        JoinType::Full,
    )
    .filter(col("of_chosen").neq_missing(col("of_rejected")))
    .group_by([col("chosen"), col("rejected")])
    .agg([col("step_index").min().alias("divergence_step")]);
    Ok(join(
        matched,
        first_difference,
        &[("chosen", "chosen"), ("rejected", "rejected")],
        JoinType::Left,
    )
    .with_columns([
        col("divergence_step").is_null().alias("identical"),
        coalesce(&[col("divergence_step"), col("steps_of_chosen")]).alias("divergence_step"),
    ])
    .sort(
        ["task_id", "chosen", "rejected"],
        SortMultipleOptions::default(),
    ))
}

/// One side of the matching: episodes with `success` as asked, in order within their task.
fn side(candidates: &LazyFrame, success: bool, name: &str) -> Result<LazyFrame, CreditError> {
    let in_task = |expr: Expr| {
        expr.over([col("task_id")])
            .map_err(CreditError::plan("pairs"))
    };
    let order = SortMultipleOptions::default().with_order_descending_multi([false, true, false]);
    let sorted = candidates
        .clone()
        .filter(
            col("success")
                .eq(lit(success))
                .and(col("weight").gt(lit(0.0))),
        )
        .sort(["task_id", "weight", "episode_id"], order);
    Ok(sorted
        .with_columns([
            (in_task(col("episode_id").cum_count(false).cast(DataType::Int64))? - lit(1i64))
                .alias("place"),
            in_task(col("episode_id").count().cast(DataType::Int64))?.alias("places"),
        ])
        .select([
            col("task_id"),
            col("episode_id").alias(name),
            col("place").alias(format!("place_of_{name}")),
            col("places").alias(format!("places_of_{name}")),
            col("reward").alias(format!("reward_of_{name}")),
            col("weight").alias(format!("weight_of_{name}")),
            col("n_steps").alias(format!("steps_of_{name}")),
        ]))
}

fn matched(candidates: &LazyFrame, config: PairConfig) -> Result<LazyFrame, CreditError> {
    let (rc, rr) = (col("place_of_chosen"), col("place_of_rejected"));
    let (nc, nr) = (col("places_of_chosen"), col("places_of_rejected"));
    let chosen_is_shorter = nc.clone().lt_eq(nr.clone());
    // In round k the longer list is at place k and the shorter one at k modulo its length.
    let round = when(chosen_is_shorter.clone())
        .then(rr.clone())
        .otherwise(rc.clone());
    let meets = when(chosen_is_shorter)
        .then((rr.clone() % nc).eq(rc.clone()))
        .otherwise((rc % nr).eq(rr));
    let (wc, wr) = (col("weight_of_chosen"), col("weight_of_rejected"));
    Ok(join(
        side(candidates, true, "chosen")?,
        side(candidates, false, "rejected")?,
        &[("task_id", "task_id")],
        JoinType::Inner,
    )
    .filter(meets.and(round.lt(lit(i64::from(config.max_per_task)))))
    .with_columns([
        (col("reward_of_chosen") - col("reward_of_rejected")).alias("margin"),
        when(wc.clone().lt(wr.clone()))
            .then(wc)
            .otherwise(wr)
            .alias("weight"),
    ])
    .filter(col("margin").gt(lit(config.min_margin)))
    .select([
        col("task_id"),
        col("chosen"),
        col("rejected"),
        col("margin"),
        col("weight"),
        col("steps_of_chosen"),
    ]))
}

/// What a step called, as one text: the hashes of its calls in order. A step without calls has an empty one.
fn signatures(
    lake: &dyn TableFiles,
    steps: &LazyFrame,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<LazyFrame, CreditError> {
    let calls = scan(
        lake,
        Table::ToolCalls,
        &[
            ("episode_id", Kind::Text),
            ("step_index", Kind::Int),
            ("call_index", Kind::Int),
            ("call_hash", Kind::Text),
        ],
        wanted,
    )?
    .group_by([col("episode_id"), col("step_index")])
    .agg([col("call_hash")
        .sort_by([col("call_index")], SortMultipleOptions::default())
        .str()
        .join(" ", false)
        .alias("signature")]);
    Ok(join(
        steps.clone(),
        calls,
        &[("episode_id", "episode_id"), ("step_index", "step_index")],
        JoinType::Left,
    )
    .with_column(col("signature").fill_null(lit(""))))
}
