//! One token for every row, in a handful of operations for all rows together.

use drillyard_model::ModelError;
use tch::{Kind, Tensor};

/// How a row's token is drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draw {
    /// 0 takes the likeliest token.
    pub(crate) temperature: f64,
    /// Only the likeliest tokens that together have this much probability are drawn from.
    pub(crate) top_p: f64,
    /// Uniform in (0, 1].
    pub(crate) uniform: f64,
}

/// A drawn token and its log-probability under `softmax(logits / temperature)` (temperature 1 where the likeliest is taken).
pub(crate) fn sample(logits: &Tensor, draws: &[Draw]) -> Result<Vec<(i32, f32)>, ModelError> {
    let _guard = tch::no_grad_guard();
    let device = logits.device();
    let column = |value: &dyn Fn(&Draw) -> f32| {
        let values: Vec<f32> = draws.iter().map(value).collect();
        Tensor::from_slice(&values).unsqueeze(1).to_device(device)
    };
    let greedy = |d: &Draw| d.temperature <= 0.0;
    let plain = draws
        .iter()
        .all(|d| greedy(d) || (d.temperature - 1.0).abs() < f64::EPSILON);
    let logp = if plain {
        logits.f_log_softmax(1, Kind::Float)?
    } else {
        let scale = column(&|d| {
            if greedy(d) {
                1.0
            } else {
                (1.0 / d.temperature) as f32
            }
        });
        (logits * scale).f_log_softmax(1, Kind::Float)?
    };
    if bool::try_from(logp.f_isnan()?.f_any()?)? {
        return Err(ModelError::Input(
            "the logits are no numbers: the checkpoint's weights are damaged, or training ran away"
                .into(),
        ));
    }
    let likeliest = || logp.argmax(1, true);
    let drawn = || -> Result<Tensor, ModelError> {
        let mut probabilities = logp.exp();
        if draws.iter().any(|d| d.top_p < 1.0) {
            probabilities = nucleus(&probabilities, &column(&|d| d.top_p as f32));
        }
        let cumulative = probabilities.f_cumsum(1, Kind::Float)?;
        let total = cumulative.narrow(1, cumulative.size2()?.1 - 1, 1);
        let target = total * column(&|d| d.uniform as f32);
        // The first token at which the sum reaches the target: its probability is not 0.
        let none = None::<Tensor>;
        Ok(target.f_searchsorted(&cumulative, false, false, "left", none)?)
    };
    let tokens = if draws.iter().all(greedy) {
        likeliest()
    } else if draws.iter().any(greedy) {
        let mask = column(&|d| f32::from(u8::from(greedy(d)))).to_kind(Kind::Bool);
        likeliest().where_self(&mask, &drawn()?)
    } else {
        drawn()?
    };
    let logps = logp.gather(1, &tokens, false);
    let mut ids = vec![0_i64; draws.len()];
    let mut values = vec![0_f32; draws.len()];
    tokens.f_copy_data(&mut ids, draws.len())?;
    logps.f_copy_data(&mut values, draws.len())?;
    Ok(ids.into_iter().map(|id| id as i32).zip(values).collect())
}

/// Probabilities with everything set to 0 that comes after the likeliest tokens that together have `top_p` (the likeliest stays).
fn nucleus(probabilities: &Tensor, top_p: &Tensor) -> Tensor {
    let (sorted, order) = probabilities.sort(1, true);
    let before = sorted.cumsum(1, Kind::Float) - &sorted;
    let kept = &sorted * before.less_tensor(top_p).to_kind(Kind::Float);
    probabilities.zeros_like().scatter(1, &order, &kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(temperature: f64, top_p: f64, uniform: f64) -> Draw {
        Draw {
            temperature,
            top_p,
            uniform,
        }
    }

    /// Draws many times from three tokens with probabilities 0.2, 0.5, 0.3 at temperature 1.
    fn frequencies(temperature: f64, top_p: f64) -> [f64; 3] {
        let n = 1000;
        let logits = Tensor::from_slice(&[0.2_f32, 0.5, 0.3])
            .log()
            .repeat([n, 1]);
        let draws: Vec<_> = (0..n)
            .map(|i| draw(temperature, top_p, (i as f64 + 0.5) / n as f64))
            .collect();
        let mut counts = [0.0; 3];
        for (id, _) in sample(&logits, &draws).unwrap() {
            counts[id as usize] += 1.0 / n as f64;
        }
        counts
    }

    fn close(a: [f64; 3], b: [f64; 3]) -> bool {
        a.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.005)
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        let logits = Tensor::from_slice(&[0.5_f32, f32::NAN, 0.1]).unsqueeze(0);
        let error = sample(&logits, &[draw(1.0, 1.0, 0.5)]).unwrap_err();
        assert!(error.to_string().contains("no numbers"), "{error}");
    }

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_likely() {
        assert!(close(frequencies(1.0, 1.0), [0.2, 0.5, 0.3]));
        assert!(close(frequencies(0.0, 1.0), [0.0, 1.0, 0.0]));
        // At temperature 1/2 probabilities are squared.
        assert!(close(
            frequencies(0.5, 1.0),
            [4.0 / 38.0, 25.0 / 38.0, 9.0 / 38.0]
        ));
        assert!(close(frequencies(1.0, 0.7), [0.0, 0.625, 0.375]));
        assert!(close(frequencies(1.0, 0.1), [0.0, 1.0, 0.0]));
    }

    #[test]
    fn logprobs_are_of_the_distribution_sampled_from() {
        let logits = Tensor::from_slice(&[0.2_f32, 0.5, 0.3])
            .log()
            .repeat([4, 1]);
        let rows = [
            draw(1.0, 1.0, 1.0),
            draw(0.0, 1.0, 0.5),
            draw(0.5, 1.0, 1e-9),
            draw(1.0, 0.7, 1e-9),
        ];
        let expected = [(2, 0.3_f32), (1, 0.5), (0, 4.0 / 38.0), (1, 0.5)];
        for ((id, logp), (expected_id, p)) in
            sample(&logits, &rows).unwrap().into_iter().zip(expected)
        {
            assert_eq!(id, expected_id);
            assert!(
                (logp.exp() - p).abs() < 1e-5,
                "{id}: {} for {p}",
                logp.exp()
            );
        }
    }

    #[test]
    fn impossible_tokens_are_never_drawn() {
        let logits = Tensor::from_slice(&[
            f32::NEG_INFINITY,
            0.0,
            f32::NEG_INFINITY,
            0.0,
            f32::NEG_INFINITY,
        ])
        .repeat([3, 1]);
        let rows = [
            draw(1.0, 1.0, 1.0),
            draw(1.0, 1.0, 1e-12),
            draw(1.0, 1.0, 0.500_001),
        ];
        let ids: Vec<_> = sample(&logits, &rows)
            .unwrap()
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        assert_eq!(ids, [3, 1, 3]);
    }
}
