//! Losses as pure functions: tensors in, one number to minimise and its metrics out.
//!
//! All of them work on the model's own tokens only, laid out flat: one entry for each own token of a batch, `[N]`, the masks
//! having been applied once, when the batch was built. How tokens add up is decided there too: every token carries a
//! *coefficient*, and a loss is the sum of coefficient times per-token loss. [`coefficients`] computes them, over all the passes
//! of an optimiser step together, so that gradients of the passes simply add up.
//!
//! One algorithm, one file, same skeleton: [`imitation`], [`grpo`], [`format_term`], [`contrastive`], [`preference`].

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

pub mod contrastive;
pub mod format_term;
pub mod grpo;
pub mod imitation;
pub mod preference;

pub use contrastive::ContrastiveKind;

/// A number to minimise, and what is worth knowing about it.
#[derive(Debug)]
pub struct LossOutput {
    /// Scalar tensor with a gradient.
    pub loss: Tensor,
    /// Sums and means by name; those ending in `_share` are shares, the rest are in nats or without unit.
    pub metrics: Vec<(&'static str, f64)>,
}

/// How per-token losses become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// Mean over all own tokens of the batch: long sequences count more (DAPO; verl's default).
    #[default]
    TokenMean,
    /// Mean over the own tokens of each sequence, then mean over sequences (GRPO as published). Sequences without own tokens are
    /// not counted, as in verl.
    SeqMeanTokenMean,
}

/// The coefficient of each sequence's tokens, for sequences of `lengths` own tokens and sampling `weights`:
/// token-mean `w / Σ w·len`, seq-mean-token-mean `w / (len · Σ w)`, the sums running over sequences that have own tokens.
pub fn coefficients(lengths: &[usize], weights: &[f32], aggregation: Aggregation) -> Vec<f32> {
    let pairs = || lengths.iter().zip(weights).filter(|(len, _)| **len > 0);
    match aggregation {
        Aggregation::TokenMean => {
            let total: f64 = pairs().map(|(&len, &w)| len as f64 * f64::from(w)).sum();
            weights
                .iter()
                .map(|&w| (f64::from(w) / total) as f32)
                .collect()
        }
        Aggregation::SeqMeanTokenMean => {
            let total: f64 = pairs().map(|(_, &w)| f64::from(w)).sum();
            lengths
                .iter()
                .zip(weights)
                .map(|(&len, &w)| (f64::from(w) / (len.max(1) as f64 * total)) as f32)
                .collect()
        }
    }
}

/// Log-probabilities (nats) of `targets` `[N]` under `logits` `[N, V]`.
pub fn token_logprobs(logits: &Tensor, targets: &Tensor) -> Tensor {
    -logits.cross_entropy_loss::<Tensor>(targets, None, tch::Reduction::None, -100, 0.0)
}

/// Mean entropy (nats) of the distributions `logits` `[N, V]`; without gradient.
pub fn mean_entropy(logits: &Tensor) -> f64 {
    tch::no_grad(|| {
        let logp = logits.log_softmax(-1, Kind::Float);
        let entropy = -(logp.exp() * &logp).sum_dim_intlist(-1, false, Kind::Float);
        scalar(&entropy.mean(Kind::Float))
    })
}

/// The value of a scalar tensor.
pub(crate) fn scalar(tensor: &Tensor) -> f64 {
    tensor.double_value(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_mean_counts_tokens_and_sequence_mean_sequences() {
        let losses = [vec![1.0, 2.0, 3.0], vec![10.0], vec![]];
        let lengths: Vec<usize> = losses.iter().map(Vec::len).collect();
        let total = |aggregation| -> f32 {
            let c = coefficients(&lengths, &[1.0; 3], aggregation);
            losses
                .iter()
                .zip(c)
                .map(|(l, c)| l.iter().sum::<f32>() * c)
                .sum()
        };
        assert!((total(Aggregation::TokenMean) - 4.0).abs() < 1e-6);
        // (2 + 10) / 2: the sequence without own tokens leaves the denominator.
        assert!((total(Aggregation::SeqMeanTokenMean) - 6.0).abs() < 1e-6);
    }

    #[test]
    fn weights_weigh() {
        let c = coefficients(&[1, 1], &[3.0, 1.0], Aggregation::TokenMean);
        assert_eq!(c, vec![0.75, 0.25]);
        let c = coefficients(&[2, 1], &[3.0, 1.0], Aggregation::SeqMeanTokenMean);
        assert_eq!(c, vec![0.375, 0.25]);
    }

    #[test]
    fn logprobs_and_entropy_of_a_known_distribution() {
        let logits = Tensor::from_slice(&[0.25f32, 0.75]).log().view([1, 2]);
        let logp = token_logprobs(&logits, &Tensor::from_slice(&[1i64]));
        assert!((scalar(&logp.get(0)) - 0.75f64.ln()).abs() < 1e-6);
        let expected = -(0.25 * 0.25f64.ln() + 0.75 * 0.75f64.ln());
        assert!((mean_entropy(&logits) - expected).abs() < 1e-6);
    }
}
