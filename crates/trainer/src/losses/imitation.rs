//! Imitation: the negative log-likelihood of the model's own tokens.
//!
//! With all episodes it is behaviour cloning, with successes only rejection sampling (filtered behaviour cloning); which it is was
//! decided when the data was selected. Left out: label smoothing and auxiliary losses on observations, which would teach the model
//! to imitate tools.

use tch::{Kind, Tensor};

use super::{LossOutput, scalar};

/// What the loss reads.
#[derive(Debug)]
pub struct Input<'a> {
    /// Log-probabilities of the own tokens under the current policy, `[N]`, with gradient.
    pub logp: &'a Tensor,
    /// Coefficient of each token, `[N]`.
    pub coefficient: &'a Tensor,
}

/// `-Σ c·logp`.
pub fn loss(input: &Input<'_>) -> LossOutput {
    let loss = -(input.logp * input.coefficient).sum(Kind::Float);
    let metrics = vec![("loss_imitation", scalar(&loss))];
    LossOutput { loss, metrics }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_weighted_mean() {
        let logp = Tensor::from_slice(&[-1.0f32, -3.0]);
        let coefficient = Tensor::from_slice(&[0.75f32, 0.25]);
        let output = loss(&Input {
            logp: &logp,
            coefficient: &coefficient,
        });
        assert!((scalar(&output.loss) - 1.5).abs() < 1e-6);
    }
}
