//! AdamW with decoupled weight decay, gradient clipping by global norm, and the learning rate over time.

use camino::Utf8Path;
use tch::{Kind, Tensor};

use crate::config::{Hyper, Schedule};
use crate::error::TrainError;

/// The knobs of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWParams {
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Largest global norm; 0 leaves the gradient alone.
    pub grad_clip: f64,
}

impl From<&Hyper> for AdamWParams {
    fn from(hyper: &Hyper) -> Self {
        Self {
            beta1: hyper.beta1,
            beta2: hyper.beta2,
            epsilon: hyper.epsilon,
            weight_decay: hyper.weight_decay,
            grad_clip: hyper.grad_clip,
        }
    }
}

#[derive(Debug)]
struct Parameter {
    name: String,
    value: Tensor,
    mean: Tensor,
    square: Tensor,
    /// Matrices decay; norms and biases don't.
    decays: bool,
}

/// AdamW (Loshchilov & Hutter 2019), as PyTorch computes it. Moments are kept in 32-bit floats.
#[derive(Debug)]
pub struct AdamW {
    parameters: Vec<Parameter>,
    params: AdamWParams,
    steps: u64,
}

impl AdamW {
    /// Takes shares in the parameters (tensors are references); their gradients are read at each step.
    pub fn new(parameters: Vec<(String, Tensor)>, params: AdamWParams) -> Self {
        let parameters = parameters
            .into_iter()
            .map(|(name, value)| {
                let zeros = || Tensor::zeros(value.size(), (Kind::Float, value.device()));
                Parameter {
                    mean: zeros(),
                    square: zeros(),
                    decays: value.dim() > 1,
                    name,
                    value,
                }
            })
            .collect();
        Self {
            parameters,
            params,
            steps: 0,
        }
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets all gradients to zero.
    pub fn zero_grad(&mut self) {
        for parameter in &mut self.parameters {
            parameter.value.zero_grad();
        }
    }

    /// One update with learning rate `lr`; returns the gradient's norm before clipping. With a norm that is not finite nothing
    /// is changed.
    pub fn step(&mut self, lr: f64) -> f64 {
        tch::no_grad(|| self.step_inner(lr))
    }

    fn step_inner(&mut self, lr: f64) -> f64 {
        let with_grad: Vec<(usize, Tensor)> = self
            .parameters
            .iter()
            .enumerate()
            .filter_map(|(i, p)| {
                let grad = p.value.grad();
                grad.defined().then(|| (i, grad.to_kind(Kind::Float)))
            })
            .collect();
        if with_grad.is_empty() {
            return 0.0;
        }
        let norms: Vec<Tensor> = with_grad.iter().map(|(_, g)| g.norm()).collect();
        let norm = Tensor::stack(&norms, 0).norm().double_value(&[]);
        if !norm.is_finite() {
            return norm;
        }
        self.steps += 1;
        let AdamWParams {
            beta1,
            beta2,
            epsilon,
            weight_decay,
            grad_clip,
        } = self.params;
        let clip = if grad_clip > 0.0 && norm > grad_clip {
            grad_clip / (norm + 1e-6)
        } else {
            1.0
        };
        let correction1 = 1.0 - beta1.powf(self.steps as f64);
        let correction2 = (1.0 - beta2.powf(self.steps as f64)).sqrt();
        for (i, mut grad) in with_grad {
            let p = &mut self.parameters[i];
            if clip < 1.0 {
                grad *= clip;
            }
            let _ = p.mean.lerp_(&grad, 1.0 - beta1);
            let _ = p.square.g_mul_scalar_(beta2);
            let _ = p.square.g_add_(&(grad.square() * (1.0 - beta2)));
            if p.decays && weight_decay > 0.0 {
                let _ = p.value.g_mul_scalar_(1.0 - lr * weight_decay);
            }
            let denominator = p.square.sqrt() / correction2 + epsilon;
            let update = (&p.mean / denominator) * (lr / correction1);
            let _ = p.value.g_sub_(&update.to_kind(p.value.kind()));
        }
        norm
    }

    /// Writes the moments as safetensors.
    pub fn save(&self, path: &Utf8Path) -> Result<(), TrainError> {
        let mut named = Vec::with_capacity(2 * self.parameters.len());
        for p in &self.parameters {
            named.push((format!("mean.{}", p.name), p.mean.shallow_clone()));
            named.push((format!("square.{}", p.name), p.square.shallow_clone()));
        }
        Tensor::write_safetensors(&named, path.as_std_path())?;
        Ok(())
    }

    /// Reads what [`AdamW::save`] wrote, and sets the number of steps taken.
    pub fn load(&mut self, path: &Utf8Path, steps: u64) -> Result<(), TrainError> {
        let read: std::collections::BTreeMap<String, Tensor> =
            Tensor::read_safetensors(path.as_std_path())?
                .into_iter()
                .collect();
        for p in &mut self.parameters {
            for (prefix, slot) in [("mean", &mut p.mean), ("square", &mut p.square)] {
                let key = format!("{prefix}.{}", p.name);
                let value = read.get(&key).ok_or_else(|| TrainError::Input {
                    path: path.to_owned(),
                    message: format!("lacks {key}"),
                })?;
                if value.size() != slot.size() {
                    return Err(TrainError::Input {
                        path: path.to_owned(),
                        message: format!("{key} has another shape than the model"),
                    });
                }
                slot.copy_(value);
            }
        }
        self.steps = steps;
        Ok(())
    }
}

/// The learning rate at `step` (from 0) of `total`.
pub fn learning_rate(hyper: &Hyper, step: u64, total: u64) -> f64 {
    let total = total.max(1) as f64;
    let warmup = (hyper.warmup_share * total).ceil();
    let step = step as f64;
    if step < warmup {
        return hyper.learning_rate * (step + 1.0) / warmup;
    }
    match hyper.schedule {
        Schedule::Constant => hyper.learning_rate,
        Schedule::Cosine => {
            let progress = ((step - warmup) / (total - warmup).max(1.0)).clamp(0.0, 1.0);
            let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
            hyper.learning_rate * (hyper.final_share + (1.0 - hyper.final_share) * cosine)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: AdamWParams = AdamWParams {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        grad_clip: 1.0,
    };

    /// The published update in plain numbers.
    fn oracle(values: &mut [f64], grads: &[Vec<f64>], lr: f64, decays: bool) {
        let (mut m, mut v) = (vec![0.0; values.len()], vec![0.0; values.len()]);
        for (t, grad) in grads.iter().enumerate() {
            let norm = grad.iter().map(|g| g * g).sum::<f64>().sqrt();
            let scale = if norm > 1.0 { 1.0 / norm } else { 1.0 };
            for i in 0..values.len() {
                let g = grad[i] * scale;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                let mh = m[i] / (1.0 - 0.9f64.powi(t as i32 + 1));
                let vh = v[i] / (1.0 - 0.95f64.powi(t as i32 + 1));
                if decays {
                    values[i] -= lr * 0.1 * values[i];
                }
                values[i] -= lr * mh / (vh.sqrt() + 1e-8);
            }
        }
    }

    #[test]
    fn the_update_is_the_published_one() {
        for (shape, decays) in [(vec![2i64, 2], true), (vec![4i64], false)] {
            let start = [1.0f64, -2.0, 0.5, 3.0];
            let leaf = Tensor::from_slice(&start)
                .to_kind(Kind::Float)
                .view(shape.as_slice())
                .set_requires_grad(true);
            let mut optimizer = AdamW::new(vec![("w".into(), leaf.shallow_clone())], PARAMS);
            let grads = vec![vec![0.1, 0.2, -0.3, 0.0], vec![3.0, -4.0, 0.0, 1.0]];
            for grad in &grads {
                optimizer.zero_grad();
                let weights = Tensor::from_slice(grad)
                    .to_kind(Kind::Float)
                    .view(shape.as_slice());
                (&leaf * weights).sum(Kind::Float).backward();
                optimizer.step(0.01);
            }
            let mut expected = start;
            oracle(&mut expected, &grads, 0.01, decays);
            let values = Vec::<f32>::try_from(leaf.detach().view([-1])).unwrap();
            for (value, expected) in values.iter().zip(expected) {
                assert!((f64::from(*value) - expected).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn a_norm_that_is_no_number_changes_nothing() {
        let leaf = Tensor::from_slice(&[1.0f32, 2.0]).set_requires_grad(true);
        let mut optimizer = AdamW::new(vec![("w".into(), leaf.shallow_clone())], PARAMS);
        (&leaf * f64::NAN).sum(Kind::Float).backward();
        assert!(optimizer.step(0.1).is_nan());
        assert_eq!(Vec::<f32>::try_from(leaf.detach()).unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn the_learning_rate_rises_and_falls() {
        let hyper = Hyper {
            learning_rate: 1.0,
            warmup_share: 0.1,
            final_share: 0.1,
            ..Hyper::default()
        };
        let at = |step| learning_rate(&hyper, step, 100);
        assert!((at(0) - 0.1).abs() < 1e-12);
        assert!((at(9) - 1.0).abs() < 1e-12);
        assert!((at(55) - 0.55).abs() < 0.01);
        assert!((at(100) - 0.1).abs() < 1e-12);
    }
}
