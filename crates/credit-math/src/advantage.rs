//! Advantages relative to the other episodes of the same task.
//!
//! A group may hold members that are not scored (the sandbox or the endpoint failed). They get no advantage and do not enter the
//! baseline: leaving them in as zeros would lower the baseline and reward everyone else for someone's broken disk.

use crate::stats::{deviation, mean};

/// Rewards closer than this are equal: sums of the same parts in another order differ in their last bits.
pub const EQUAL_REWARDS: f64 = 1e-9;

/// What is taken off a reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// The mean over the scored members, the episode itself included (GRPO).
    GroupMean,
    /// The mean over the other scored members (RLOO): `n / (n - 1)` times the distance to the group mean.
    LeaveOneOut,
}

/// What the difference is divided by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// Nothing (Dr.GRPO).
    None,
    /// The group's deviation (ddof 1) plus `eps`: 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF.
    Deviation {
        /// Added to the deviation.
        eps: f64,
    },
    /// The group's mean plus `eps` (MaxRL; 1e-6 there).
    Mean {
        /// Added to the mean.
        eps: f64,
    },
}

/// How advantages are made from rewards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupOptions {
    /// What is taken off.
    pub baseline: Baseline,
    /// What it is divided by.
    pub scale: Scale,
}

impl GroupOptions {
    /// GRPO as in verl: group mean, deviation with ddof 1 plus 1e-6.
    pub const GRPO: Self = Self {
        baseline: Baseline::GroupMean,
        scale: Scale::Deviation { eps: 1e-6 },
    };
    /// Dr.GRPO: group mean, no division.
    pub const DR_GRPO: Self = Self {
        baseline: Baseline::GroupMean,
        scale: Scale::None,
    };
    /// RLOO: mean of the others, no division.
    pub const RLOO: Self = Self {
        baseline: Baseline::LeaveOneOut,
        scale: Scale::None,
    };
    /// MaxRL: group mean, divided by it.
    pub const MAX_RL: Self = Self {
        baseline: Baseline::GroupMean,
        scale: Scale::Mean { eps: 1e-6 },
    };
}

/// Counts and moments of one group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupStats {
    /// Members.
    pub total: usize,
    /// Members that are scored.
    pub scored: usize,
    /// Mean reward of the scored; `None` if there are none.
    pub mean: Option<f64>,
    /// Deviation (ddof 1) of the scored; `None` below two.
    pub deviation: Option<f64>,
    /// All scored rewards are equal (also with none or one): the comparison teaches nothing.
    pub zero_variance: bool,
}

fn scored_rewards(rewards: &[Option<f64>]) -> Vec<f64> {
    rewards.iter().flatten().copied().collect()
}

/// Counts and moments of a group; `None` marks a member that is not scored.
pub fn group_stats(rewards: &[Option<f64>]) -> GroupStats {
    let scored = scored_rewards(rewards);
    let least = scored.iter().copied().fold(f64::INFINITY, f64::min);
    let most = scored.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    GroupStats {
        total: rewards.len(),
        scored: scored.len(),
        mean: mean(&scored),
        deviation: deviation(&scored),
        zero_variance: scored.len() < 2 || most - least <= EQUAL_REWARDS,
    }
}

/// The advantage of each member, in order; `None` for members that are not scored (`None` in `rewards`).
///
/// In a group of zero variance, and for a single scored member, every advantage is exactly 0. (verl gives a single member its
/// raw reward, TRL 0; here a comparison with nobody is worth nothing.)
pub fn group_advantages(rewards: &[Option<f64>], options: GroupOptions) -> Vec<Option<f64>> {
    let stats = group_stats(rewards);
    let group_mean = stats.mean.unwrap_or(0.0);
    let n = stats.scored as f64;
    let divisor = match options.scale {
        Scale::None => 1.0,
        Scale::Deviation { eps } => stats.deviation.unwrap_or(1.0) + eps,
        Scale::Mean { eps } => group_mean + eps,
    };
    let advantage = |reward: f64| {
        if stats.zero_variance {
            return 0.0;
        }
        let baseline = match options.baseline {
            Baseline::GroupMean => group_mean,
            Baseline::LeaveOneOut => (group_mean * n - reward) / (n - 1.0),
        };
        (reward - baseline) / divisor
    };
    rewards.iter().map(|r| r.map(advantage)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::assert_close;
    use proptest::prelude::*;

    fn all(rewards: &[f64], options: GroupOptions) -> Vec<f64> {
        let rewards: Vec<_> = rewards.iter().copied().map(Some).collect();
        group_advantages(&rewards, options)
            .into_iter()
            .flatten()
            .collect()
    }

    /// NeMo-RL's regression: rewards 1, 1, 0, 0 of which the second is masked.
    const MASKED: [Option<f64>; 4] = [Some(1.0), None, Some(0.0), Some(0.0)];

    fn masked(options: GroupOptions) -> Vec<f64> {
        let advantages = group_advantages(&MASKED, options);
        assert_eq!(advantages[1], None);
        advantages.into_iter().flatten().collect()
    }

    #[test]
    fn a_masked_member_leaves_the_baseline() {
        assert_close(
            &masked(GroupOptions::DR_GRPO),
            &[0.667, -0.333, -0.333],
            5e-4,
        );
        assert_close(&masked(GroupOptions::GRPO), &[1.155, -0.577, -0.577], 5e-4);
        assert_close(&masked(GroupOptions::RLOO), &[1.0, -0.5, -0.5], 1e-9);
        let stats = group_stats(&MASKED);
        assert_eq!(
            (stats.total, stats.scored, stats.zero_variance),
            (4, 3, false)
        );
    }

    #[test]
    fn rloo_and_dr_grpo_have_skyrls_published_values() {
        let rloo: Vec<f64> = [&[6.0, 3.0][..], &[9.0, 12.0], &[1.0]]
            .into_iter()
            .flat_map(|group| all(group, GroupOptions::RLOO))
            .collect();
        assert_close(&rloo, &[3.0, -3.0, -3.0, 3.0, 0.0], 1e-9);
        let dr: Vec<f64> = [&[6.0, 3.0][..], &[9.0, 12.0]]
            .into_iter()
            .flat_map(|group| all(group, GroupOptions::DR_GRPO))
            .collect();
        assert_close(&dr, &[1.5, -1.5, -1.5, 1.5], 1e-9);
    }

    #[test]
    fn max_rl_divides_by_the_mean() {
        assert_close(
            &all(&[1.0, 0.0, 0.0, 0.0], GroupOptions::MAX_RL),
            &[3.0, -1.0, -1.0, -1.0],
            1e-4,
        );
    }

    #[test]
    fn equal_rewards_and_singletons_teach_nothing() {
        for options in [
            GroupOptions::GRPO,
            GroupOptions::DR_GRPO,
            GroupOptions::RLOO,
        ] {
            assert_eq!(all(&[1.0; 5], options), [0.0; 5]);
            assert_eq!(all(&[0.1 + 0.2, 0.3], options), [0.0; 2]);
            assert_eq!(all(&[0.7], options), [0.0]);
            assert_eq!(group_advantages(&[None, None], options), [None, None]);
        }
        let empty = group_stats(&[None]);
        assert!(empty.zero_variance && empty.mean.is_none() && empty.deviation.is_none());
    }

    proptest! {
        #[test]
        fn advantages_sum_to_zero_and_ignore_unscored_members(
            rewards in prop::collection::vec(prop::option::of(-1.0..1.0f64), 0..20),
        ) {
            for options in [GroupOptions::GRPO, GroupOptions::DR_GRPO, GroupOptions::RLOO] {
                let advantages = group_advantages(&rewards, options);
                prop_assert_eq!(advantages.len(), rewards.len());
                let scored: Vec<f64> = advantages.iter().flatten().copied().collect();
                prop_assert!(scored.iter().sum::<f64>().abs() < 1e-6);
                let without: Vec<f64> = rewards.iter().flatten().copied().collect();
                assert_close(&scored, &all(&without, options), 1e-12);
            }
        }

        #[test]
        fn leave_one_out_is_the_mean_of_the_others(rewards in prop::collection::vec(-1.0..1.0f64, 2..12)) {
            prop_assume!(!group_stats(&rewards.iter().copied().map(Some).collect::<Vec<_>>()).zero_variance);
            let expected: Vec<f64> = (0..rewards.len()).map(|i| {
                let others: Vec<f64> = rewards.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, r)| *r).collect();
                rewards[i] - others.iter().sum::<f64>() / others.len() as f64
            }).collect();
            assert_close(&all(&rewards, GroupOptions::RLOO), &expected, 1e-9);
        }
    }
}
