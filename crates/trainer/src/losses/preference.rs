//! A preference term on pairs, for lakes without behaviour log-probabilities: direct preference optimisation (Rafailov et al. 2023,
//! eq. 7; TRL's `sigmoid` loss) over the model's own tokens of two attempts at one task.
//!
//! `delta = (logp_chosen - ref_chosen) - (logp_rejected - ref_rejected)`, each a sum over own tokens; `loss = -log sigmoid(beta·delta)`.
//! Observations are masked in both arms. Left out: length normalisation, label smoothing, the other members of the family.

use tch::{Kind, Tensor};

use super::{LossOutput, scalar};

/// What the term reads.
#[derive(Debug)]
pub struct Input<'a> {
    /// Log-probabilities of the own tokens, `[N]`, with gradient.
    pub logp: &'a Tensor,
    /// The same under the reference policy, `[N]`.
    pub reference: &'a Tensor,
    /// Which arm each token belongs to, `[N]`: pair `i`'s chosen arm is `2i`, its rejected arm `2i + 1`.
    pub arm: &'a Tensor,
    /// Weight of each pair, `[P]`, adding up to 1 over all passes of the optimiser step.
    pub weight: &'a Tensor,
}

/// The weighted sum over pairs; metrics `loss_preference` and `preference_accuracy_share` (pairs with `delta > 0`).
pub fn loss(input: &Input<'_>, beta: f64) -> LossOutput {
    let pairs = input.weight.size()[0];
    let sums = Tensor::zeros([2 * pairs], (input.logp.kind(), input.logp.device()))
        .index_add(0, input.arm, &(input.logp - input.reference))
        .view([pairs, 2]);
    let delta = sums.select(1, 0) - sums.select(1, 1);
    let loss = -((&delta * beta).log_sigmoid() * input.weight).sum(input.logp.kind());
    let right = delta.gt(0.0).to_kind(Kind::Float).mean(Kind::Float);
    let metrics = vec![
        ("loss_preference", scalar(&loss)),
        ("preference_accuracy_share", scalar(&right)),
    ];
    LossOutput { loss, metrics }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_arms_give_log_two() {
        let logp = Tensor::from_slice(&[-1.0f32, -2.0, -3.0]);
        let output = loss(
            &Input {
                logp: &logp,
                reference: &logp,
                arm: &Tensor::from_slice(&[0i64, 0, 1]),
                weight: &Tensor::from_slice(&[1.0f32]),
            },
            0.1,
        );
        assert!((scalar(&output.loss) - std::f64::consts::LN_2).abs() < 1e-6);
    }

    #[test]
    fn a_preferred_arm_lowers_the_loss() {
        let reference = Tensor::from_slice(&[-1.0f64, -2.0, -3.0]);
        let logp = Tensor::from_slice(&[-0.5f64, -2.0, -4.0]).set_requires_grad(true);
        let output = loss(
            &Input {
                logp: &logp,
                reference: &reference,
                arm: &Tensor::from_slice(&[0i64, 0, 1]),
                weight: &Tensor::from_slice(&[1.0f64]),
            },
            2.0,
        );
        // delta = 0.5 + 1 = 1.5; -log sigmoid(3).
        assert!((scalar(&output.loss) - (1.0 + (-3.0f64).exp()).ln()).abs() < 1e-9);
        output.loss.backward();
        let gradient = Vec::<f64>::try_from(logp.grad()).unwrap();
        assert!(gradient[0] < 0.0 && gradient[1] < 0.0 && gradient[2] > 0.0);
    }
}
