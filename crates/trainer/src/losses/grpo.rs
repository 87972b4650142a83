//! GRPO on stored episodes: the clipped policy-gradient loss of PPO with group-relative advantages, and a KL term to a reference.
//!
//! Follows verl's `compute_policy_loss_vanilla` and `kl_penalty(low_var_kl)` (core_algos.py): per own token, with
//! `r = exp(clamp(logp - behaviour, ±20))` and advantage `A` of the episode,
//!
//! - policy: `max(-r·A, -clip(r, 1-low, 1+high)·A)`;
//! - dual clip (Ye et al. 2020, verl's `clip_ratio_c`), for `A < 0` only: no more than `-c·A`;
//! - KL, estimator k3 (Schulman 2020): `exp(d) - d - 1` with `d = clamp(reference - logp, ±20)`, clamped to ±10.
//!
//! The behaviour log-probabilities are those the sampler returned and the lake stored: there is no third, recomputed policy in
//! between (verl's "bypass" mode), so the clip also bounds what an inference engine's rounding can do; the provenance gate has
//! looked at how far apart the two are before the first step. Left out: sequence-level ratios (GSPO), soft clips (CISPO, SAPO),
//! and length-dependent normalisers (Dr. GRPO).

use tch::{Kind, Tensor};

use super::{LossOutput, scalar};

/// What the loss reads; all tensors are `[N]` over own tokens.
#[derive(Debug)]
pub struct Input<'a> {
    /// Log-probabilities under the current policy, with gradient.
    pub logp: &'a Tensor,
    /// Log-probabilities under the policy that sampled the tokens.
    pub behaviour: &'a Tensor,
    /// Log-probabilities under the reference policy; the KL term is 0 without.
    pub reference: Option<&'a Tensor>,
    /// Advantage of the token's episode.
    pub advantage: &'a Tensor,
    /// Coefficient of each token.
    pub coefficient: &'a Tensor,
}

/// The knobs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Params {
    /// Lower clip.
    pub clip_low: f64,
    /// Upper clip.
    pub clip_high: f64,
    /// Cap for negative advantages; off when absent.
    pub dual_clip: Option<f64>,
    /// Weight of the KL term.
    pub kl: f64,
}

/// The policy loss of each token, `[N]`, and whether the clip decided it, `[N]` bool.
pub fn policy_loss(
    logp: &Tensor,
    behaviour: &Tensor,
    advantage: &Tensor,
    params: &Params,
) -> (Tensor, Tensor) {
    let ratio = (logp - behaviour).clamp(-20.0, 20.0).exp();
    let negative_advantage = -advantage;
    let plain = &ratio * &negative_advantage;
    let clipped = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high) * &negative_advantage;
    let is_clipped = clipped.gt_tensor(&plain);
    let mut loss = plain.maximum(&clipped);
    if let Some(c) = params.dual_clip {
        let capped = loss.minimum(&(&negative_advantage * c));
        loss = capped.where_self(&advantage.lt(0.0), &loss);
    }
    (loss, is_clipped)
}

/// The k3 estimate of KL(current ‖ reference) at each token, `[N]`.
pub fn k3(logp: &Tensor, reference: &Tensor) -> Tensor {
    let d = (reference - logp).clamp(-20.0, 20.0);
    (d.exp() - d - 1.0).clamp(-10.0, 10.0)
}

/// Policy loss plus `kl` times the KL estimate.
///
/// Metrics: `loss_policy`, `kl` (token mean of k3), `clip_share` (tokens where the clip decided), `ratio_mean`, `kl_behaviour`
/// (token mean of `behaviour - logp`, the drift from the sampling policy).
pub fn loss(input: &Input<'_>, params: &Params) -> LossOutput {
    let (per_token, is_clipped) = policy_loss(input.logp, input.behaviour, input.advantage, params);
    let policy = (per_token * input.coefficient).sum(Kind::Float);
    let mut metrics = vec![("loss_policy", scalar(&policy))];
    let mut loss = policy;
    if let Some(reference) = input.reference {
        let kl = k3(input.logp, reference);
        metrics.push(("kl", scalar(&kl.mean(Kind::Float))));
        if params.kl > 0.0 {
            loss += (kl * input.coefficient).sum(Kind::Float) * params.kl;
        }
    }
    tch::no_grad(|| {
        let drift = input.logp.detach() - input.behaviour;
        metrics.push((
            "clip_share",
            scalar(&is_clipped.to_kind(Kind::Float).mean(Kind::Float)),
        ));
        metrics.push((
            "ratio_mean",
            scalar(&drift.clamp(-20.0, 20.0).exp().mean(Kind::Float)),
        ));
        metrics.push(("kl_behaviour", -scalar(&drift.mean(Kind::Float))));
    });
    LossOutput { loss, metrics }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: Params = Params {
        clip_low: 0.2,
        clip_high: 0.2,
        dual_clip: None,
        kl: 0.0,
    };

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::from_slice(values)
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        Vec::<f32>::try_from(tensor.contiguous()).unwrap()
    }

    #[test]
    fn the_clip_matches_nemo_rl() {
        // NeMo-RL, test_loss_functions.py: ratios 0.5, 1, 1.5.
        let (loss, clipped) = policy_loss(
            &tensor(&[-1.693_15, -1.0, -0.594_53]),
            &tensor(&[-1.0; 3]),
            &tensor(&[1.0, -1.0, 2.0]),
            &PARAMS,
        );
        assert!((scalar(&loss.mean(Kind::Float)) + 0.6333).abs() < 1e-4);
        assert_eq!(
            Vec::<bool>::try_from(clipped).unwrap(),
            vec![false, false, true]
        );
    }

    #[test]
    fn the_dual_clip_matches_nemo_rl() {
        let (loss, _) = policy_loss(
            &tensor(&[-1.693_15, -1.0, -0.697_41]),
            &tensor(&[-1.0, -1.0, -3.0]),
            &tensor(&[1.0, -1.0, -4.0]),
            &Params {
                dual_clip: Some(3.0),
                ..PARAMS
            },
        );
        for (value, expected) in values(&loss).iter().zip([-0.5, 1.0, 12.0]) {
            assert!((value - expected).abs() < 1e-4, "{value} is not {expected}");
        }
        assert!((scalar(&loss.mean(Kind::Float)) - 4.1667).abs() < 1e-4);
    }

    #[test]
    fn k3_matches_verl() {
        let kl = values(&k3(&tensor(&[-1.0; 3]), &tensor(&[0.0, -15.0, -30.0])));
        // exp(1) - 1 - 1; exp(-14) + 14 - 1; exp(-20) + 20 - 1: the last two above the clamp.
        for (value, expected) in kl.iter().zip([0.7183, 10.0, 10.0]) {
            assert!((value - expected).abs() < 1e-4, "{value} is not {expected}");
        }
        // Without the clamps: 13 and 28.
        let plain = |lp: f64, lr: f64| (lr - lp).exp() - (lr - lp) - 1.0;
        assert!((plain(-1.0, -15.0) - 13.0).abs() < 1e-4);
        assert!((plain(-1.0, -30.0) - 28.0).abs() < 1e-4);
    }

    /// The gradient with respect to logp, written as plain case distinctions.
    fn oracle_gradient(
        logp: &[f64],
        behaviour: &[f64],
        reference: &[f64],
        advantage: &[f64],
        coefficient: &[f64],
        params: &Params,
    ) -> Vec<f64> {
        (0..logp.len())
            .map(|i| {
                let (a, r) = (advantage[i], (logp[i] - behaviour[i]).exp());
                // d(-r·A)/dlogp = -r·A, unless the ratio has left the band on the side the advantage pushes to.
                let outside = if a >= 0.0 {
                    r > 1.0 + params.clip_high
                } else {
                    r < 1.0 - params.clip_low || params.dual_clip.is_some_and(|c| r > c)
                };
                let policy = if outside { 0.0 } else { -r * a };
                let d = reference[i] - logp[i];
                let inside = (d.exp() - d - 1.0).abs() < 10.0 && d.abs() < 20.0;
                let kl = if inside { 1.0 - d.exp() } else { 0.0 };
                coefficient[i] * (policy + params.kl * kl)
            })
            .collect()
    }

    #[test]
    fn the_gradient_is_that_of_a_plain_loop() {
        // A deterministic spread of cases around the clip edges.
        let n = 240;
        let spread = |i: usize, k: usize| ((i * k) % 97) as f64 / 97.0;
        let logp: Vec<f64> = (0..n).map(|i| -3.0 * spread(i, 31) - 0.01).collect();
        let behaviour: Vec<f64> = (0..n)
            .map(|i| logp[i] + 2.4 * (spread(i, 53) - 0.5))
            .collect();
        let reference: Vec<f64> = (0..n)
            .map(|i| logp[i] + 6.0 * (spread(i, 71) - 0.5))
            .collect();
        let advantage: Vec<f64> = (0..n).map(|i| 3.0 * (spread(i, 17) - 0.5)).collect();
        let coefficient: Vec<f64> = (0..n).map(|i| 0.001 + spread(i, 7)).collect();
        for dual_clip in [None, Some(2.0)] {
            let params = Params {
                clip_low: 0.2,
                clip_high: 0.28,
                dual_clip,
                kl: 0.05,
            };
            let leaf = Tensor::from_slice(&logp).set_requires_grad(true);
            let output = loss(
                &Input {
                    logp: &leaf,
                    behaviour: &Tensor::from_slice(&behaviour),
                    reference: Some(&Tensor::from_slice(&reference)),
                    advantage: &Tensor::from_slice(&advantage),
                    coefficient: &Tensor::from_slice(&coefficient),
                },
                &params,
            );
            output.loss.backward();
            let gradient = Vec::<f64>::try_from(leaf.grad()).unwrap();
            let expected = oracle_gradient(
                &logp,
                &behaviour,
                &reference,
                &advantage,
                &coefficient,
                &params,
            );
            for i in 0..n {
                assert!(
                    (gradient[i] - expected[i]).abs() < 1e-6,
                    "token {i}: {} is not {}",
                    gradient[i],
                    expected[i]
                );
            }
        }
    }
}
