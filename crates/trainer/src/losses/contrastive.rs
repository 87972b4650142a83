//! A contrastive term between success and failure: attempts at one task that end well and those that don't are to look different
//! inside the model from the step on where they part.
//!
//! The representation of an attempt is the mean of the final hidden states at its own tokens from the divergence step on, scaled to
//! length 1; there is no projection head, so nothing but the policy's own weights learns. For a batch of pairs (chosen `c_i`,
//! rejected `r_i`, task `t_i`), two forms:
//!
//! - InfoNCE with several positives (van den Oord et al. 2018, eq. 4; supervised form of Khosla et al. 2020, eq. 2): for anchor `c_i`,
//!   positives `P_i` = chosen attempts of the same task other than its own, negatives = rejected attempts of the same task,
//!   `L_i = -1/|P_i| Σ_{p∈P_i} [ c_i·p/τ - log( Σ_{q∈P_i} exp(c_i·q/τ) + Σ_{n} exp(c_i·n/τ) ) ]`.
//!   Anchors without a positive are left out.
//! - margin (Hadsell et al. 2006 on cosine distance): `L_i = max(0, margin - (1 - c_i·r_i))`.
//!
//! Pairs count only where both attempts lie in one pass; batches are built so that the attempts of a group do.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{LossOutput, scalar};

/// Which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContrastiveKind {
    /// InfoNCE over the attempts of a task.
    #[default]
    InfoNce,
    /// A margin for each pair.
    Margin,
}

/// Which tokens make up the pairs of a batch, as flat lists.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PairIndex {
    /// Positions in the flat own-token order, for all arms one after the other.
    pub tokens: Vec<i64>,
    /// Which arm each position belongs to: pair `i`'s chosen arm is `2i`, its rejected arm `2i + 1`.
    pub arm: Vec<i64>,
    /// A number for each pair's task.
    pub task: Vec<u32>,
    /// A number for each pair's chosen attempt.
    pub chosen: Vec<u32>,
}

impl PairIndex {
    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.task.len()
    }

    /// True without pairs.
    pub fn is_empty(&self) -> bool {
        self.task.is_empty()
    }
}

/// The knobs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Params {
    /// Which form.
    pub kind: ContrastiveKind,
    /// `τ` of InfoNCE.
    pub temperature: f64,
    /// Margin in cosine distance.
    pub margin: f64,
}

/// Unit representations of the arms, `[2P, D]`, from the hidden states at own tokens `[N, D]`.
pub fn representations(hidden: &Tensor, pairs: &PairIndex) -> Tensor {
    let arms = 2 * pairs.len() as i64;
    let device = hidden.device();
    let arm = Tensor::from_slice(&pairs.arm).to_device(device);
    let gathered = hidden.index_select(0, &Tensor::from_slice(&pairs.tokens).to_device(device));
    let sums = Tensor::zeros([arms, hidden.size()[1]], (hidden.kind(), device))
        .index_add(0, &arm, &gathered);
    // The mean differs from the sum by a positive factor only, which scaling to length 1 removes.
    let norm = sums
        .square()
        .sum_dim_intlist(-1, true, hidden.kind())
        .sqrt()
        .clamp_min(1e-6);
    sums / norm
}

/// The term over unit representations `[2P, D]`; metrics `loss_contrastive` and `pair_cosine` (mean of chosen·rejected).
///
/// Scaled by `P / total`, `total` being the pairs over all passes of the optimiser step.
pub fn loss(unit: &Tensor, pairs: &PairIndex, params: &Params, total: f64) -> LossOutput {
    let count = pairs.len() as i64;
    let arms = unit.view([count, 2, -1]);
    let (chosen, rejected) = (arms.select(1, 0), arms.select(1, 1));
    let cosine = (&chosen * &rejected).sum_dim_intlist(-1, false, unit.kind());
    let share = count as f64 / total.max(1.0);
    let loss = match params.kind {
        ContrastiveKind::Margin => {
            (&cosine - (1.0 - params.margin)).relu().mean(unit.kind()) * share
        }
        ContrastiveKind::InfoNce => {
            let mask = |f: &dyn Fn(usize, usize) -> bool| {
                let flat: Vec<f32> = (0..pairs.len() * pairs.len())
                    .map(|k| f32::from(u8::from(f(k / pairs.len(), k % pairs.len()))))
                    .collect();
                Tensor::from_slice(&flat)
                    .view([count, count])
                    .to_kind(unit.kind())
                    .to_device(unit.device())
            };
            let positive =
                mask(&|i, j| pairs.task[i] == pairs.task[j] && pairs.chosen[i] != pairs.chosen[j]);
            let negative = mask(&|i, j| pairs.task[i] == pairs.task[j]);
            let to_chosen = chosen.matmul(&chosen.tr()) / params.temperature;
            let to_rejected = chosen.matmul(&rejected.tr()) / params.temperature;
            // Cosines are at most 1, so the exponents are at most 1/τ: no overflow for τ above 0.02, and a shift keeps smaller ones safe.
            let shift = 1.0 / params.temperature;
            let denominator = ((&to_chosen - shift).exp() * &positive
                + (&to_rejected - shift).exp() * &negative)
                .sum_dim_intlist(-1, true, unit.kind())
                .clamp_min(1e-30)
                .log()
                + shift;
            let positives = positive.sum_dim_intlist(-1, false, unit.kind());
            let per_anchor =
                -((to_chosen - denominator) * &positive).sum_dim_intlist(-1, false, unit.kind())
                    / positives.clamp_min(1.0);
            let anchors = positives.gt(0.0).to_kind(unit.kind());
            let n = anchors.sum(unit.kind()).clamp_min(1.0);
            (per_anchor * &anchors).sum(unit.kind()) / n * share
        }
    };
    let metrics = vec![
        ("loss_contrastive", scalar(&loss)),
        ("pair_cosine", scalar(&cosine.mean(unit.kind()))),
    ];
    LossOutput { loss, metrics }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs() -> PairIndex {
        // Two pairs of task 0 (attempts 0 and 1 chosen), one of task 1.
        PairIndex {
            tokens: vec![0, 1, 2, 3, 4, 5, 6],
            arm: vec![0, 0, 1, 2, 3, 4, 5],
            task: vec![0, 0, 1],
            chosen: vec![0, 1, 2],
        }
    }

    fn params(kind: ContrastiveKind) -> Params {
        Params {
            kind,
            temperature: 0.5,
            margin: 0.4,
        }
    }

    fn hidden() -> Tensor {
        Tensor::from_slice(&[
            1.0f64, 0.0, //
            1.0, 2.0, //
            0.5, 0.2, //
            0.0, 1.0, //
            1.0, -1.0, //
            2.0, 1.0, //
            -1.0, 0.5, //
        ])
        .view([7, 2])
    }

    #[test]
    fn representations_are_unit_means() {
        let unit = representations(&hidden(), &pairs());
        let first = Vec::<f64>::try_from(unit.get(0)).unwrap();
        let half = 0.5f64.sqrt();
        assert!((first[0] - half).abs() < 1e-9 && (first[1] - half).abs() < 1e-9);
    }

    #[test]
    fn info_nce_is_that_of_a_plain_loop() {
        let (pairs, params) = (pairs(), params(ContrastiveKind::InfoNce));
        let unit = representations(&hidden(), &pairs);
        let rows: Vec<Vec<f64>> = (0..6)
            .map(|i| Vec::<f64>::try_from(unit.get(i)).unwrap())
            .collect();
        let dot = |a: usize, b: usize| {
            rows[a]
                .iter()
                .zip(&rows[b])
                .map(|(x, y)| x * y)
                .sum::<f64>()
                / params.temperature
        };
        let mut sum = 0.0;
        let mut anchors = 0.0;
        for i in 0..3 {
            let positives: Vec<usize> = (0..3)
                .filter(|&j| pairs.task[i] == pairs.task[j] && pairs.chosen[i] != pairs.chosen[j])
                .collect();
            if positives.is_empty() {
                continue;
            }
            anchors += 1.0;
            let denominator: f64 = positives
                .iter()
                .map(|&j| dot(2 * i, 2 * j).exp())
                .sum::<f64>()
                + (0..3)
                    .filter(|&k| pairs.task[i] == pairs.task[k])
                    .map(|k| dot(2 * i, 2 * k + 1).exp())
                    .sum::<f64>();
            sum -= positives
                .iter()
                .map(|&j| dot(2 * i, 2 * j) - denominator.ln())
                .sum::<f64>()
                / positives.len() as f64;
        }
        let output = loss(&unit, &pairs, &params, 3.0);
        assert!((scalar(&output.loss) - sum / anchors).abs() < 1e-9);
    }

    #[test]
    fn descending_parts_success_from_failure() {
        for kind in [ContrastiveKind::InfoNce, ContrastiveKind::Margin] {
            let (pairs, params) = (pairs(), params(kind));
            let mut leaf = hidden().set_requires_grad(true);
            let cosine = |leaf: &Tensor| {
                loss(&representations(leaf, &pairs), &pairs, &params, 3.0).metrics[1].1
            };
            let before = cosine(&leaf);
            for _ in 0..50 {
                let output = loss(&representations(&leaf, &pairs), &pairs, &params, 3.0);
                output.loss.backward();
                tch::no_grad(|| {
                    let _ = leaf.g_sub_(&(leaf.grad() * 0.1));
                });
                leaf.zero_grad();
            }
            assert!(cosine(&leaf) < before - 0.1, "{kind:?} moved nothing");
        }
    }
}
