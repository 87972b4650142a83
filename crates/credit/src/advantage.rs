//! Advantages relative to the group.

use polars::prelude::*;

use crate::{AdvantageConfig, Baseline, CreditError, Scale};

/// Rewards closer than this are equal: sums of the same parts in another order differ in their last bits.
const EQUAL_REWARDS: f64 = 1e-9;

/// Adds to a frame with `group_id`, `reward`, `infrastructure`: `scored`, `baseline`, `deviation`, `advantage`, `zero_variance`,
/// `n_total`, `n_scored`, `n_infrastructure`.
pub fn advantages(rewarded: LazyFrame, config: AdvantageConfig) -> Result<LazyFrame, CreditError> {
    let over_group = |expr: Expr, name: &str| {
        expr.over([col("group_id")])
            .map(|e| e.alias(name))
            .map_err(CreditError::plan("groups"))
    };
    let counted = || when(col("scored")).then(col("reward")).otherwise(lit(NULL));
    let count = |flag: &str| col(flag).cast(DataType::Int64).sum();
    let with_moments = rewarded
        .with_column(
            col("infrastructure")
                .not()
                .and(col("reward").is_not_null())
                .alias("scored"),
        )
        .with_columns([
            over_group(len().cast(DataType::Int64), "n_total")?,
            over_group(count("scored"), "n_scored")?,
            over_group(count("infrastructure"), "n_infrastructure")?,
            over_group(counted().mean(), "baseline")?,
            over_group(counted().std(1), "deviation")?,
            over_group(counted().max() - counted().min(), "spread")?,
        ])
        .with_column(
            col("n_scored")
                .lt(lit(2i64))
                .or(col("spread").fill_null(lit(0.0)).lt_eq(lit(EQUAL_REWARDS)))
                .alias("zero_variance"),
        );
    let n = col("n_scored").cast(DataType::Float64);
    let difference = match config.baseline {
        Baseline::GroupMean => col("reward") - col("baseline"),
        // Against the mean of the others: n / (n - 1) times the distance to the mean of all.
        Baseline::LeaveOneOut => (col("reward") - col("baseline")) * n.clone() / (n - lit(1.0)),
    };
    let divisor = match config.scale {
        Scale::None => lit(1.0),
        Scale::Deviation => col("deviation") + lit(config.eps),
        Scale::Mean => col("baseline") + lit(config.eps),
    };
    Ok(with_moments.with_column(
        when(col("scored").not())
            .then(lit(NULL))
            .when(col("zero_variance"))
            .then(lit(0.0))
            .otherwise(difference / divisor)
            .alias("advantage"),
    ))
}
