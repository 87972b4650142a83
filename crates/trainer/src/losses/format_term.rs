//! A supervised term on call syntax: the likelihood of those own tokens that are neither arguments nor prose (tags, braces,
//! quotes, key and tool names), as the loss spans of the lake mark them.
//!
//! Policy gradients under sparse rewards let the format decay before the outcome improves; this term holds it. It looks at turns
//! whose call could be parsed only, since only they have such spans: it repeats what worked and says nothing on what to do.

use tch::{Kind, Tensor};

use super::{LossOutput, scalar};

/// What the term reads.
#[derive(Debug)]
pub struct Input<'a> {
    /// Log-probabilities of the own tokens under the current policy, `[N]`, with gradient.
    pub logp: &'a Tensor,
    /// 1 where the token is call syntax, else 0, `[N]`.
    pub format: &'a Tensor,
    /// Number of call-syntax tokens over all passes of the optimiser step.
    pub total: f64,
}

/// `-Σ format·logp / total`, or 0 where no token is call syntax.
pub fn loss(input: &Input<'_>) -> LossOutput {
    let loss = -(input.logp * input.format).sum(Kind::Float) / input.total.max(1.0);
    let metrics = vec![("loss_format", scalar(&loss))];
    LossOutput { loss, metrics }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_call_syntax_counts() {
        let logp = Tensor::from_slice(&[-1.0f32, -3.0, -5.0]);
        let format = Tensor::from_slice(&[1.0f32, 0.0, 1.0]);
        let output = loss(&Input {
            logp: &logp,
            format: &format,
            total: 2.0,
        });
        assert!((scalar(&output.loss) - 3.0).abs() < 1e-6);
        let none = loss(&Input {
            logp: &logp,
            format: &Tensor::from_slice(&[0.0f32; 3]),
            total: 0.0,
        });
        assert!(scalar(&none.loss).abs() < 1e-9);
    }
}
