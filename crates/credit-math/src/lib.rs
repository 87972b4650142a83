//! Credit assignment on plain slices: returns, advantages, reward composition, reference losses and the statistics of evaluation.
//!
//! Everything here is a pure function over slices: no IO, no dependencies, no state. It is the oracle that the lazy plans of
//! `credit` and the tensors of `trainer` are tested against, and evaluation takes its intervals from here.
//!
//! - [`returns`]: discounted returns and generalised advantage estimation, with both readings of a masked token.
//! - [`advantage`]: group-relative, leave-one-out and mean-normalised advantages over groups with unscored members.
//! - [`reward`]: how raw reward components become one reward for each step.
//! - [`loss`]: PPO clip, dual clip, GSPO, KL estimators, DPO, and the ways of averaging over tokens.
//! - [`stats`]: pass@k, Wilson interval, paired difference, paired bootstrap, effective sample size.
//!
//! Where published implementations differ (degrees of freedom, epsilon, masked tokens, clamps), the function names the one it
//! follows, and the tests hold its published values.

pub mod advantage;
pub mod loss;
pub mod returns;
pub mod reward;
pub mod stats;

pub use advantage::{Baseline, GroupOptions, GroupStats, Scale, group_advantages, group_stats};
pub use loss::{
    Aggregate, ClipOptions, Clipped, aggregate, clipped_policy_loss, dpo_loss, gspo_ratio, kl_k1,
    kl_k2, kl_k3, kl_k3_unclamped,
};
pub use returns::{MaskedToken, discounted_returns, gae, whiten};
pub use reward::{Component, Composed, Outcome, Scheme, StepTerm, compose};
pub use stats::{
    Estimate, effective_sample_size, paired_bootstrap, paired_difference, pass_at_k,
    wilson_interval,
};
