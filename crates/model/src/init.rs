//! Fresh weights.

use std::collections::BTreeMap;

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tch::{Device, Tensor};

use crate::config::{EMBEDDING, layer_parameter};
use crate::{LlamaConfig, ModelError};

/// Standard deviation of the embedding's entries, and root mean square of the part all tokens share, when a model starts able to copy.
const EMBEDDING_SCALE: f64 = 0.088;
/// How far the score of the token right before lies above its neighbours', in nats.
const PREVIOUS_GAP: f64 = 5.0;
/// What a previous token adds to the residual stream, against its own embedding.
const PREVIOUS_GAIN: f64 = 0.25;
/// Scale of the product of query and key where a token looks for its earlier like.
const MATCH_GAIN: f64 = 10.0;
/// What a token found this way adds to the residual stream.
const COPY_GAIN: f64 = 2.0;

/// Parameters by name, as plain numbers.
type Values = BTreeMap<String, (Vec<i64>, Vec<f32>)>;

/// Draws normal weights with standard deviation `initializer_range`, norms at one.
pub(crate) fn plain(
    config: &LlamaConfig,
    seed: u64,
    device: Device,
) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    tensors(draw(config, &mut rng), device)
}

/// As [`plain`], with an induction circuit in the first two layers.
///
/// A head of layer 0 attends to the token before and writes a projection of it beside the present one; a head of layer 1 looks for
/// places whose token before is the present one, and writes what stands there towards the output. The embeddings get a part that
/// all tokens share, which is what such position-only attention needs in a model without biases.
pub(crate) fn copying(
    config: &LlamaConfig,
    seed: u64,
    device: Device,
) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let head_dim = config.head_dim;
    if config.num_hidden_layers < 2
        || head_dim < 8
        || head_dim % 4 != 0
        || head_dim >= config.hidden_size
        || config.initializer_range <= 0.0
    {
        return Err(ModelError::Input(format!(
            "a model that starts able to copy needs two layers, a head_dim of at least 8 that is divisible by 4 and below hidden_size, \
             and an initializer_range above 0; it has {}, {head_dim} of {}, and {}",
            config.num_hidden_layers, config.hidden_size, config.initializer_range
        )));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut values = draw(config, &mut rng);
    let (width, head) = (config.hidden_size as usize, config.head_dim as usize);
    let half = head / 2;

    let shared = orthonormal(1, width, &[], &mut rng).remove(0);
    if let Some((_, embedding)) = values.get_mut(EMBEDDING) {
        let rescale = EMBEDDING_SCALE / config.initializer_range;
        let length = EMBEDDING_SCALE * (width as f64).sqrt();
        for (at, value) in embedding.iter_mut().enumerate() {
            *value = (f64::from(*value) * rescale + shared[at % width] * length) as f32;
        }
    }
    // What the shared part measures after a norm: half of the squared length is the token's own.
    let shared_length = (width as f64 / 2.0).sqrt();
    let basis = std::slice::from_ref(&shared);
    let present = orthonormal(head, width, basis, &mut rng);
    let before = orthonormal(head, width, basis, &mut rng);
    let copied = orthonormal(head, width, basis, &mut rng);

    // Layer 0: with rotary frequencies f, a query (a, 0) and a key (a cos f, a sin f) score a² Σ cos(f (distance − 1)).
    let frequencies: Vec<f64> = (0..half / 2)
        .map(|i| config.rope_theta.powf(-2.0 * i as f64 / head as f64))
        .collect();
    let fall: f64 = frequencies.iter().map(|f| 1.0 - f.cos()).sum();
    let a = (PREVIOUS_GAP * (head as f64).sqrt() / fall).sqrt() / shared_length;
    let (mut query, mut key) = (vec![0.0; head], vec![0.0; head]);
    for (i, f) in frequencies.iter().enumerate() {
        query[i] = a;
        key[i] = a * f.cos();
        key[i + half] = a * f.sin();
    }
    let outer = |v: &[f64]| -> Vec<Vec<f64>> {
        v.iter()
            .map(|x| shared.iter().map(|s| x * s).collect())
            .collect()
    };
    let scaled = |rows: &[Vec<f64>], by: f64| -> Vec<Vec<f64>> {
        rows.iter()
            .map(|row| row.iter().map(|x| x * by).collect())
            .collect()
    };
    set_rows(&mut values, 0, "self_attn.q_proj", &outer(&query));
    set_rows(&mut values, 0, "self_attn.k_proj", &outer(&key));
    set_rows(&mut values, 0, "self_attn.v_proj", &present);
    set_columns(&mut values, 0, &scaled(&before, PREVIOUS_GAIN));

    // Layer 1: only the slow half of the frequencies takes part, so that a match counts at any distance.
    let slow = |rows: &[Vec<f64>]| -> Vec<Vec<f64>> {
        (0..head)
            .map(|i| {
                let by = f64::from(u8::from(i % half >= half / 2)) * MATCH_GAIN.sqrt();
                rows[i].iter().map(|x| x * by).collect()
            })
            .collect()
    };
    set_rows(&mut values, 1, "self_attn.q_proj", &slow(&present));
    set_rows(&mut values, 1, "self_attn.k_proj", &slow(&before));
    set_rows(&mut values, 1, "self_attn.v_proj", &copied);
    set_columns(&mut values, 1, &scaled(&copied, COPY_GAIN));
    tensors(values, device)
}

fn draw(config: &LlamaConfig, rng: &mut ChaCha8Rng) -> Values {
    config
        .parameter_shapes()
        .into_iter()
        .map(|(name, shape)| {
            let count = shape.iter().product::<i64>() as usize;
            let values = if shape.len() == 1 {
                vec![1.0; count]
            } else {
                (0..count)
                    .map(|_| (config.initializer_range * normal(rng)) as f32)
                    .collect()
            };
            (name, (shape, values))
        })
        .collect()
}

fn tensors(values: Values, device: Device) -> Result<BTreeMap<String, Tensor>, ModelError> {
    values
        .into_iter()
        .map(|(name, (shape, values))| {
            let tensor = Tensor::f_from_slice(&values)?
                .to_device(device)
                .f_view(&shape[..])?;
            Ok((name, tensor))
        })
        .collect()
}

/// Replaces the first rows of a projection: those of the first head.
fn set_rows(values: &mut Values, layer: i64, name: &str, rows: &[Vec<f64>]) {
    if let Some((_, matrix)) = values.get_mut(&layer_parameter(layer, name)) {
        for (slot, value) in matrix.iter_mut().zip(rows.iter().flatten()) {
            *slot = *value as f32;
        }
    }
}

/// Replaces the first columns of the output projection, those of the first head, by the given vectors.
fn set_columns(values: &mut Values, layer: i64, columns: &[Vec<f64>]) {
    if let Some((shape, matrix)) = values.get_mut(&layer_parameter(layer, "self_attn.o_proj")) {
        let stride = shape[1] as usize;
        for (column, vector) in columns.iter().enumerate() {
            for (row, value) in vector.iter().enumerate() {
                matrix[row * stride + column] = *value as f32;
            }
        }
    }
}

/// Random vectors of length one, at right angles to each other and to the `basis` (Gram and Schmidt).
fn orthonormal(
    count: usize,
    width: usize,
    basis: &[Vec<f64>],
    rng: &mut ChaCha8Rng,
) -> Vec<Vec<f64>> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let mut found: Vec<Vec<f64>> = basis.to_vec();
    while found.len() < basis.len() + count {
        let mut vector: Vec<f64> = (0..width).map(|_| normal(rng)).collect();
        for other in &found {
            let along = dot(&vector, other);
            vector
                .iter_mut()
                .zip(other)
                .for_each(|(x, o)| *x -= along * o);
        }
        let length = dot(&vector, &vector).sqrt();
        for x in &mut vector {
            *x /= length;
        }
        found.push(vector);
    }
    found.split_off(basis.len())
}

/// One draw of the standard normal distribution (Box and Muller).
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use rand::RngExt;
    use serde_json::json;
    use tch::{Kind, Tensor};

    use super::*;
    use crate::Llama;

    /// Share of tokens of a repeated random sequence that the model puts first, from its second occurrence on.
    fn copied(model: &Llama) -> f64 {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut shares = Vec::new();
        for _ in 0..8 {
            let mut tokens: Vec<i64> = (0..400).collect();
            for at in 0..40 {
                tokens.swap(at, rng.random_range(at..400));
            }
            tokens.truncate(40);
            tokens.extend_from_within(..);
            let ids = Tensor::from_slice(&tokens).unsqueeze(0);
            let logits = tch::no_grad(|| model.logits(&model.hidden(&ids).unwrap()).unwrap());
            let best = logits.argmax(-1, false).view(-1);
            let hits = best
                .narrow(0, 40, 39)
                .eq_tensor(&ids.view(-1).narrow(0, 41, 39));
            shares.push(
                hits.to_kind(Kind::Double)
                    .mean(Kind::Double)
                    .double_value(&[]),
            );
        }
        shares.iter().sum::<f64>() / shares.len() as f64
    }

    #[test]
    fn a_model_that_starts_able_to_copy_continues_a_sequence_it_has_seen_once() {
        let config = LlamaConfig::from_json(&json!({
            "model_type": "llama", "hidden_act": "silu", "vocab_size": 600, "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "initializer_range": 0.02,
        }))
        .unwrap();
        for seed in 0..3 {
            let able = Llama::init_copying(config.clone(), seed, Device::Cpu).unwrap();
            let plain = Llama::init(config.clone(), seed, Device::Cpu).unwrap();
            let (able, plain) = (copied(&able), copied(&plain));
            assert!(able > 0.1 && plain < 0.03, "able {able}, plain {plain}");
        }
    }

    #[test]
    fn one_layer_is_not_enough_to_copy() {
        let config = LlamaConfig::from_json(&json!({
            "model_type": "llama", "hidden_act": "silu", "vocab_size": 60, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        }))
        .unwrap();
        let error = Llama::init_copying(config, 0, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("two layers"), "{error}");
    }
}
