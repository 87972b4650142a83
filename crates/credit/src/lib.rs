//! Credit: from raw reward components to returns, advantages, pairs and weights, as lazy plans over the lake's Parquet files.
//!
//! [`assign`] reads a snapshot's files of `episodes`, `steps`, `tool_calls`, `rewards`, `verdicts` and `scores` and answers with
//! rows for `returns`, `advantages` and `pairs`, and a [`Summary`]. In order:
//! 1. **Episodes** ([`Request`] says of which runs). Only files of the purposes `train` and `import` are opened, and an
//!    evaluation episode among them is an error: evaluation must not leak into training.
//! 2. **Rewards.** A named [`Scheme`] turns components into one reward for each step; the steps of an episode add up to its
//!    reward. An episode without an `outcome` component takes its verdict's score; one without either is not scored.
//! 3. **Returns** discounted backwards over the steps.
//! 4. **Advantages** relative to the group. What infrastructure ended is neither scored nor part of the baseline. Groups without
//!    variance are named and get advantage 0; the policy loss leaves them out.
//! 5. **Pairs** of a success and a failure of one task, with the first step at which their calls differ.
//!
//! **Negative control** ([`CreditConfig::control`]): whole outcomes (verdict, rewards, milestones, tier, weight) change places
//! within each task before step 2; everything after it is the same. What a policy gains from such credit, it does not gain from
//! knowing right from wrong.
//!
//! polars stays inside: no type of it is public. The plans are collected on the calling thread; async callers use a blocking one.
//! The numbers are tested against `credit-math`, which computes the same with plain loops.

mod advantage;
mod assign;
mod config;
mod episodes;
mod error;
mod frame;
mod pairs;
mod reward;
mod scan;
mod summary;

pub use assign::{Credit, Request, assign};
pub use config::{
    AdvantageConfig, Baseline, CreditConfig, Outcome, PairConfig, Scale, Scheme, Term,
};
pub use error::CreditError;
pub use scan::TableFiles;
pub use summary::{Summary, ZeroVariance, ZeroVarianceGroup};
