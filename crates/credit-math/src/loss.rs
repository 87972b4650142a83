//! Reference losses over log-probabilities of sampled tokens. All are to be minimised.
//!
//! `lp` is the current policy's log-probability of a token, `lo` that of the policy that sampled it, `lr` the reference's;
//! `r = exp(lp - lo)`.

/// Log-ratios are clamped to this before they are exponentiated, as verl does.
pub const LOG_RATIO_CLAMP: f64 = 20.0;
/// verl clamps the value of k3 to this.
pub const K3_CLAMP: f64 = 10.0;

/// How a policy loss is clipped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipOptions {
    /// The ratio may fall to `1 - low`.
    pub low: f64,
    /// The ratio may rise to `1 + high`.
    pub high: f64,
    /// Dual clip: for a negative advantage the loss is at most `-c * A`. 3 in verl.
    pub dual: Option<f64>,
}

/// Losses of tokens, and what clipping did.
#[derive(Debug, Clone, PartialEq)]
pub struct Clipped {
    /// Of each token.
    pub losses: Vec<f64>,
    /// Tokens at which the clipped arm decided.
    pub clipped: usize,
    /// Tokens at which the dual clip decided.
    pub dual_clipped: usize,
}

/// The clipped policy loss of each token: `-min(r A, clip(r, 1 - low, 1 + high) A)`, and with a dual clip, where A < 0, at most
/// `-c A`. Follows verl: the log-ratio is clamped to ±20 first.
///
/// # Panics
/// If the slices differ in length.
pub fn clipped_policy_loss(
    lp: &[f64],
    lo: &[f64],
    advantages: &[f64],
    options: ClipOptions,
) -> Clipped {
    assert_eq!(lp.len(), lo.len(), "one old log-probability for each token");
    assert_eq!(lp.len(), advantages.len(), "one advantage for each token");
    let ratios: Vec<f64> = lp
        .iter()
        .zip(lo)
        .map(|(l, o)| (l - o).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp())
        .collect();
    clip(&ratios, advantages, options)
}

fn clip(ratios: &[f64], advantages: &[f64], options: ClipOptions) -> Clipped {
    let mut result = Clipped {
        losses: Vec::with_capacity(ratios.len()),
        clipped: 0,
        dual_clipped: 0,
    };
    for (ratio, advantage) in ratios.iter().zip(advantages) {
        let free = -ratio * advantage;
        let bounded = -ratio.clamp(1.0 - options.low, 1.0 + options.high) * advantage;
        let mut loss = free.max(bounded);
        result.clipped += usize::from(bounded > free);
        if let Some(c) = options.dual.filter(|_| *advantage < 0.0) {
            let ceiling = -c * advantage;
            result.dual_clipped += usize::from(ceiling < loss);
            loss = loss.min(ceiling);
        }
        result.losses.push(loss);
    }
    result
}

/// GSPO's ratio of a whole sequence: `exp(mean over unmasked tokens of lp - lo)`, the log clamped to at most 10 as verl does;
/// 1 where every token is masked.
///
/// # Panics
/// If the slices differ in length.
pub fn gspo_ratio(lp: &[f64], lo: &[f64], mask: &[bool]) -> f64 {
    assert_eq!(lp.len(), lo.len(), "one old log-probability for each token");
    assert_eq!(lp.len(), mask.len(), "one mask bit for each token");
    let logs: Vec<f64> = lp
        .iter()
        .zip(lo)
        .zip(mask)
        .filter_map(|((l, o), m)| m.then_some(l - o))
        .collect();
    crate::stats::mean(&logs).unwrap_or(0.0).min(10.0).exp()
}

/// k1 = lp - lr: unbiased, high variance, may be negative.
pub fn kl_k1(lp: f64, lr: f64) -> f64 {
    lp - lr
}

/// k2 = (lp - lr)² / 2: low variance, biased.
pub fn kl_k2(lp: f64, lr: f64) -> f64 {
    (lp - lr).powi(2) / 2.0
}

/// k3 = exp(lr - lp) - (lr - lp) - 1 with verl's clamps: the exponent to ±20, the result to ±10.
pub fn kl_k3(lp: f64, lr: f64) -> f64 {
    let d = (lr - lp).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP);
    (d.exp() - d - 1.0).clamp(-K3_CLAMP, K3_CLAMP)
}

/// k3 without clamps, as TRL computes it.
pub fn kl_k3_unclamped(lp: f64, lr: f64) -> f64 {
    (lr - lp).exp() - (lr - lp) - 1.0
}

/// The sigmoid DPO loss: `-ln sigmoid(beta * ((lp_chosen - lr_chosen) - (lp_rejected - lr_rejected)))`, over log-probabilities
/// of whole sequences (the agent's own tokens only).
pub fn dpo_loss(chosen: (f64, f64), rejected: (f64, f64), beta: f64) -> f64 {
    let margin = beta * ((chosen.0 - chosen.1) - (rejected.0 - rejected.1));
    // ln(1 + exp(-margin)) without overflow at either end.
    (-margin).max(0.0) + (-margin.abs()).exp().ln_1p()
}

/// How the losses of tokens become one number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregate {
    /// Mean over all unmasked tokens of the batch.
    TokenMean,
    /// Mean over sequences of the sum over their tokens.
    SeqMeanTokenSum,
    /// Mean over sequences of the sum over their tokens divided by a fixed length (Dr.GRPO).
    SeqMeanTokenSumNorm {
        /// The fixed length.
        horizon: f64,
    },
    /// Mean over sequences of the mean over their tokens.
    SeqMeanTokenMean,
}

/// Averages losses over sequences of `(losses, mask)`. As in verl, a sequence that is masked throughout does not count in the
/// mean over sequences. 0 for a batch without a single unmasked token.
pub fn aggregate(sequences: &[(&[f64], &[bool])], how: Aggregate) -> f64 {
    let sums: Vec<(f64, f64)> = sequences
        .iter()
        .map(|(losses, mask)| {
            let kept = || losses.iter().zip(*mask).filter(|(_, m)| **m);
            (kept().map(|(l, _)| l).sum::<f64>(), kept().count() as f64)
        })
        .filter(|(_, n)| *n > 0.0)
        .collect();
    if sums.is_empty() {
        return 0.0;
    }
    let rows = sums.len() as f64;
    match how {
        Aggregate::TokenMean => {
            sums.iter().map(|s| s.0).sum::<f64>() / sums.iter().map(|s| s.1).sum::<f64>()
        }
        Aggregate::SeqMeanTokenSum => sums.iter().map(|s| s.0).sum::<f64>() / rows,
        Aggregate::SeqMeanTokenSumNorm { horizon } => {
            sums.iter().map(|s| s.0 / horizon).sum::<f64>() / rows
        }
        Aggregate::SeqMeanTokenMean => sums.iter().map(|s| s.0 / s.1).sum::<f64>() / rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::assert_close;
    use proptest::prelude::*;

    const CLIP: ClipOptions = ClipOptions {
        low: 0.2,
        high: 0.2,
        dual: None,
    };

    fn mean(losses: &[f64]) -> f64 {
        losses.iter().sum::<f64>() / losses.len() as f64
    }

    // The published values of NeMo-RL's loss tests: ratios 0.5, 1, 1.5.
    const ADVANTAGES: [f64; 3] = [1.0, -1.0, 2.0];
    const OLD: [f64; 3] = [-1.0; 3];
    const NEW: [f64; 3] = [-1.69315, -1.0, -0.59453];

    #[test]
    fn ppo_clip_has_its_published_value() {
        let result = clipped_policy_loss(&NEW, &OLD, &ADVANTAGES, CLIP);
        assert_close(&[mean(&result.losses)], &[-0.6333], 1e-4);
        assert_eq!((result.clipped, result.dual_clipped), (1, 0));
    }

    #[test]
    fn dual_clip_has_its_published_value() {
        let result = clipped_policy_loss(
            &[-1.69315, -1.0, -0.69741],
            &[-1.0, -1.0, -3.0],
            &[1.0, -1.0, -4.0],
            ClipOptions {
                dual: Some(3.0),
                ..CLIP
            },
        );
        assert_close(&result.losses, &[-0.5, 1.0, 12.0], 1e-4);
        assert_close(&[mean(&result.losses)], &[4.1667], 1e-4);
        assert_eq!(result.dual_clipped, 1);
    }

    #[test]
    fn gspo_has_its_published_values() {
        let ratio = gspo_ratio(&NEW, &OLD, &[true; 3]);
        assert_close(&[ratio], &[0.9086], 1e-4);
        let result = clip(&[ratio; 3], &ADVANTAGES, CLIP);
        assert_close(&[mean(&result.losses)], &[-0.6057], 1e-4);
        assert_close(&[gspo_ratio(&NEW, &OLD, &[false; 3])], &[1.0], 1e-12);
    }

    #[test]
    fn kl_estimators_have_their_published_values() {
        let over = |k: fn(f64, f64) -> f64| [0.0, -15.0, -30.0].map(|lr| k(-1.0, lr));
        assert_close(&over(kl_k1), &[-1.0, 14.0, 29.0], 1e-9);
        assert_close(&over(kl_k2), &[0.5, 98.0, 420.5], 1e-9);
        assert_close(&over(kl_k3_unclamped), &[0.7183, 13.0, 28.0], 1e-4);
        assert_close(&over(kl_k3), &[0.7183, 10.0, 10.0], 1e-4);
    }

    #[test]
    fn dpo_of_equal_arms_is_the_logarithm_of_two() {
        assert_close(
            &[dpo_loss((-3.0, -3.0), (-5.0, -5.0), 0.1)],
            &[std::f64::consts::LN_2],
            1e-12,
        );
        assert_close(&[dpo_loss((0.0, -1e4), (0.0, 1e4), 1.0)], &[0.0], 1e-9);
        assert_close(&[dpo_loss((0.0, 1e4), (0.0, -1e4), 1.0)], &[2e4], 1e-6);
    }

    #[test]
    fn a_sequence_that_is_masked_throughout_leaves_the_denominator() {
        let (a, b): (&[f64], &[f64]) = (&[1.0, 3.0, 9.0], &[7.0]);
        let batch = [
            (a, &[true, true, false][..]),
            (b, &[false][..]),
            (b, &[true][..]),
        ];
        assert_close(
            &[
                aggregate(&batch, Aggregate::TokenMean),
                aggregate(&batch, Aggregate::SeqMeanTokenSum),
                aggregate(&batch, Aggregate::SeqMeanTokenMean),
                aggregate(&batch, Aggregate::SeqMeanTokenSumNorm { horizon: 10.0 }),
                aggregate(&batch[1..2], Aggregate::TokenMean),
            ],
            &[11.0 / 3.0, 5.5, 4.5, 0.55, 0.0],
            1e-12,
        );
    }

    proptest! {
        #[test]
        fn k3_is_never_negative_and_zero_at_equality(lp in -30.0..0.0f64, lr in -30.0..0.0f64) {
            prop_assert!(kl_k3(lp, lr) >= 0.0);
            prop_assert!(kl_k3(lp, lp).abs() < 1e-12);
        }

        #[test]
        fn clipping_never_lowers_the_loss(lp in -5.0..0.0f64, lo in -5.0..0.0f64, a in -3.0..3.0f64) {
            let free = -(lp - lo).exp() * a;
            let result = clipped_policy_loss(&[lp], &[lo], &[a], CLIP);
            prop_assert!(result.losses[0] >= free - 1e-12);
            let dual = clipped_policy_loss(&[lp], &[lo], &[a], ClipOptions { dual: Some(3.0), ..CLIP });
            prop_assert!(dual.losses[0] <= result.losses[0] + 1e-12);
        }

        #[test]
        fn dpo_falls_as_the_chosen_gains(lp in -50.0..0.0f64, gain in 0.01..10.0f64) {
            prop_assert!(dpo_loss((lp + gain, lp), (lp, lp), 0.1) < dpo_loss((lp, lp), (lp, lp), 0.1));
        }
    }
}
