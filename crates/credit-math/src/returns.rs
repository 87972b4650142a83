//! Discounted returns and generalised advantage estimation over one sequence.

/// Sum over later steps `k >= t` of `gamma^(k-t) * rewards[k]`, for each step `t`.
pub fn discounted_returns(rewards: &[f64], gamma: f64) -> Vec<f64> {
    let mut returns = vec![0.0; rewards.len()];
    let mut later = 0.0;
    for (slot, reward) in returns.iter_mut().zip(rewards).rev() {
        later = reward + gamma * later;
        *slot = later;
    }
    returns
}

/// What a masked token (an observation, say) does to the recursion. The two published readings differ in value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskedToken {
    /// verl: the next value and the running sum are carried over a masked token as if it were not there.
    Skip,
    /// SkyRL: the recursion runs through masked tokens; the mask matters only when advantages are whitened.
    Recurse,
}

/// Generalised advantage estimation: `(advantages, returns)`, each as long as `rewards`, with returns = advantages + values.
///
/// The value after the last token is 0. `mask[t]` is true for tokens the policy wrote. Slots of masked tokens hold a number too;
/// whoever uses the result applies the mask.
///
/// # Panics
/// If the slices differ in length.
pub fn gae(
    rewards: &[f64],
    values: &[f64],
    mask: &[bool],
    gamma: f64,
    lambda: f64,
    masked: MaskedToken,
) -> (Vec<f64>, Vec<f64>) {
    assert_eq!(rewards.len(), values.len(), "one value for each reward");
    assert_eq!(rewards.len(), mask.len(), "one mask bit for each reward");
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut running) = (0.0, 0.0);
    for t in (0..rewards.len()).rev() {
        if mask[t] || masked == MaskedToken::Recurse {
            let delta = rewards[t] + gamma * next_value - values[t];
            running = delta + gamma * lambda * running;
            next_value = values[t];
        }
        advantages[t] = running;
    }
    let returns = advantages.iter().zip(values).map(|(a, v)| a + v).collect();
    (advantages, returns)
}

/// Values shifted and scaled to mean 0 and deviation 1 (ddof 1) over the unmasked slots. Masked slots are shifted and scaled
/// too, not zeroed. With fewer than two unmasked slots, or no spread among them, the deviation counts as 1.
///
/// # Panics
/// If the slices differ in length.
pub fn whiten(values: &[f64], mask: &[bool]) -> Vec<f64> {
    assert_eq!(values.len(), mask.len(), "one mask bit for each value");
    let kept: Vec<f64> = values
        .iter()
        .zip(mask)
        .filter_map(|(v, m)| m.then_some(*v))
        .collect();
    let Some(mean) = crate::stats::mean(&kept) else {
        return values.to_vec();
    };
    let deviation = crate::stats::deviation(&kept)
        .filter(|d| *d > 0.0)
        .unwrap_or(1.0);
    values.iter().map(|v| (v - mean) / deviation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::assert_close;
    use proptest::prelude::*;

    const REWARDS: [f64; 3] = [1.0, 2.0, 3.0];
    const VALUES: [f64; 3] = [0.5, 1.0, 1.5];

    fn skyrl(mask: [bool; 3], gamma: f64, lambda: f64) -> (Vec<f64>, Vec<f64>) {
        gae(
            &REWARDS,
            &VALUES,
            &mask,
            gamma,
            lambda,
            MaskedToken::Recurse,
        )
    }

    #[test]
    fn gae_has_skyrls_published_values() {
        assert_close(&skyrl([true; 3], 1.0, 1.0).1, &[6.0, 5.0, 3.0], 1e-9);
        assert_close(&skyrl([true; 3], 0.5, 1.0).1, &[2.75, 3.5, 3.0], 1e-9);
        assert_close(&skyrl([true; 3], 1.0, 0.5).1, &[3.625, 4.25, 3.0], 1e-9);
    }

    #[test]
    #[expect(clippy::approx_constant, reason = "as published")]
    fn a_masked_token_splits_the_two_readings() {
        let mask = [true, false, true];
        let (advantages, returns) = skyrl(mask, 1.0, 1.0);
        assert_close(&returns, &[6.0, 5.0, 3.0], 1e-9);
        assert_close(
            &whiten(&advantages, &mask),
            &[0.7071, 0.1768, -0.7071],
            1e-4,
        );

        let (advantages, _) = gae(&REWARDS, &VALUES, &mask, 1.0, 1.0, MaskedToken::Skip);
        assert_close(&[advantages[0], advantages[2]], &[3.5, 1.5], 1e-9);
    }

    #[test]
    fn returns_of_a_last_reward_decay_backwards() {
        assert_close(
            &discounted_returns(&[0.0, 0.0, 1.0], 0.5),
            &[0.25, 0.5, 1.0],
            1e-12,
        );
        assert!(discounted_returns(&[], 0.9).is_empty());
    }

    #[test]
    fn whitening_without_spread_only_shifts() {
        assert_close(
            &whiten(&[2.0, 2.0, 5.0], &[true, true, false]),
            &[0.0, 0.0, 3.0],
            1e-12,
        );
        assert_close(&whiten(&[2.0], &[false]), &[2.0], 1e-12);
    }

    proptest! {
        #[test]
        fn returns_equal_the_double_sum(rewards in prop::collection::vec(-2.0..2.0f64, 0..40), gamma in 0.0..=1.0f64) {
            let direct: Vec<f64> = (0..rewards.len())
                .map(|t| (t..rewards.len()).map(|k| gamma.powi((k - t) as i32) * rewards[k]).sum())
                .collect();
            assert_close(&discounted_returns(&rewards, gamma), &direct, 1e-9);
        }

        #[test]
        fn gae_with_lambda_one_returns_the_discounted_rewards(
            rows in prop::collection::vec((-2.0..2.0f64, -2.0..2.0f64), 0..30), gamma in 0.5..=1.0f64,
        ) {
            let (rewards, values): (Vec<f64>, Vec<f64>) = rows.into_iter().unzip();
            let mask = vec![true; rewards.len()];
            for masked in [MaskedToken::Skip, MaskedToken::Recurse] {
                let (_, returns) = gae(&rewards, &values, &mask, gamma, 1.0, masked);
                assert_close(&returns, &discounted_returns(&rewards, gamma), 1e-9);
            }
        }

        #[test]
        fn skipping_equals_leaving_the_masked_tokens_out(
            rows in prop::collection::vec((-2.0..2.0f64, -2.0..2.0f64, any::<bool>()), 1..30),
            gamma in 0.5..=1.0f64, lambda in 0.0..=1.0f64,
        ) {
            let rewards: Vec<f64> = rows.iter().map(|r| r.0).collect();
            let values: Vec<f64> = rows.iter().map(|r| r.1).collect();
            let mask: Vec<bool> = rows.iter().map(|r| r.2).collect();
            let pick = |xs: &[f64]| -> Vec<f64> { xs.iter().zip(&mask).filter_map(|(x, m)| m.then_some(*x)).collect() };
            let (all, _) = gae(&rewards, &values, &mask, gamma, lambda, MaskedToken::Skip);
            let kept = vec![true; pick(&rewards).len()];
            let (short, _) = gae(&pick(&rewards), &pick(&values), &kept, gamma, lambda, MaskedToken::Skip);
            assert_close(&pick(&all), &short, 1e-9);
        }
    }
}
