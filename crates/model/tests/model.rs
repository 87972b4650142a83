//! Golden logits of `transformers`, the cache against the full pass, and checkpoints on disk.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::BTreeMap;

use camino::Utf8Path;
use drillyard_model::{DecodeRow, Decoder, Llama, LlamaConfig, PrefillRow};
use serde_json::json;
use tch::{Device, Kind, Tensor};

fn config(tied: bool, kv_heads: i64) -> LlamaConfig {
    LlamaConfig::from_json(&json!({
        "model_type": "llama", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 6, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": tied, "eos_token_id": 3,
    }))
    .unwrap()
}

/// Weights of a closed formula, so that both libraries can be given the same ones without a file:
/// the j-th parameter by name has at place i the value `sin(0.7·i + 1.3·j)`, times 0.3 (matrices) or times 0.1 plus 1 (norms).
fn formula_model(tied: bool, kv_heads: i64) -> Llama {
    let config = config(tied, kv_heads);
    let parameters: BTreeMap<_, _> = config
        .parameter_shapes()
        .into_iter()
        .enumerate()
        .map(|(j, (name, shape))| {
            let wave = |i: i64| (0.7 * i as f64 + 1.3 * j as f64).sin();
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|i| {
                    if shape.len() == 1 {
                        (wave(i) * 0.1 + 1.0) as f32
                    } else {
                        (wave(i) * 0.3) as f32
                    }
                })
                .collect();
            (name, Tensor::from_slice(&values).view(&shape[..]))
        })
        .collect();
    Llama::from_parameters(config, parameters).unwrap()
}

fn token_ids(n: i64) -> Vec<i64> {
    (0..n).map(|i| (7 * i * i + 3 * i + 5) % 40).collect()
}

/// Logits `[T, V]` of one sequence by the training pass.
fn full_logits(model: &Llama, ids: &[i64]) -> Tensor {
    let hidden = model.hidden(&Tensor::from_slice(ids).unsqueeze(0)).unwrap();
    model.logits(&hidden.squeeze_dim(0)).unwrap()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a - b).abs().max().double_value(&[])
}

#[test]
#[expect(clippy::unreadable_literal, reason = "as recorded")]
fn logits_are_those_of_transformers() {
    // Recorded with transformers 5.24.0 and torch 2.13.0: LlamaForCausalLM with the configuration, weights and ids above.
    let golden = [
        (
            false,
            2,
            [
                (
                    0,
                    [
                        -0.768074, 0.545059, 0.26588, -0.79003, 0.46202, 0.364344, -0.797711,
                        0.370632,
                    ],
                ),
                (
                    5,
                    [
                        0.194591, 1.013487, -1.128374, 0.026148, 1.104282, -1.043586, -0.142766,
                        1.175125,
                    ],
                ),
                (
                    11,
                    [
                        -1.153706, 1.065172, 0.172303, -1.223924, 0.955369, 0.343688, -1.272029,
                        0.828304,
                    ],
                ),
            ],
        ),
        (
            true,
            4,
            [
                (
                    0,
                    [
                        -0.609763, -0.324406, 0.908657, -0.512792, -0.436193, 0.914681, -0.406555,
                        -0.540099,
                    ],
                ),
                (
                    5,
                    [
                        -0.672073, 0.597284, 0.121762, -0.70947, 0.531913, 0.219388, -0.734047,
                        0.456932,
                    ],
                ),
                (
                    11,
                    [
                        -0.883932, -0.49784, 1.34262, -0.739193, -0.661559, 1.348726, -0.581099,
                        -0.813326,
                    ],
                ),
            ],
        ),
    ];
    for (tied, kv_heads, rows) in golden {
        let logits = full_logits(&formula_model(tied, kv_heads), &token_ids(12));
        for (position, expected) in rows {
            for (i, value) in expected.into_iter().enumerate() {
                let ours = logits.double_value(&[position, i as i64]);
                assert!(
                    (ours - value).abs() < 2e-5,
                    "tied {tied}, position {position}, logit {i}: {ours}, transformers says {value}"
                );
            }
        }
    }
}

#[test]
fn cached_logits_equal_the_full_pass() {
    for (tied, kv_heads) in [(false, 2), (true, 4), (false, 1)] {
        let model = formula_model(tied, kv_heads);
        let ids: Vec<i32> = token_ids(30).into_iter().map(|id| id as i32).collect();
        let rows: Vec<Vec<i32>> = (0..4).map(|r| ids[r..].to_vec()).collect();
        let expected: Vec<Tensor> = rows
            .iter()
            .map(|row| {
                full_logits(
                    &model,
                    &row.iter().map(|id| i64::from(*id)).collect::<Vec<_>>(),
                )
            })
            .collect();
        let mut decoder = Decoder::new(&model, 6, 40).unwrap();
        // Rows of different length, in scattered slots; then two more for two of them; then single tokens, a gap between the slots.
        let slots = [4, 0, 1, 2];
        let mut lengths = [9, 1, 5, 12];
        let prefill =
            |start: [usize; 4], end: [usize; 4], which: &[usize], decoder: &mut Decoder| {
                let batch: Vec<_> = which
                    .iter()
                    .map(|r| PrefillRow {
                        slot: slots[*r],
                        start: start[*r],
                        ids: &rows[*r][start[*r]..end[*r]],
                    })
                    .collect();
                let logits = decoder.prefill(&batch).unwrap();
                for (i, r) in which.iter().enumerate() {
                    let difference = largest_difference(
                        &logits.get(i as i64),
                        &expected[*r].get(end[*r] as i64 - 1),
                    );
                    assert!(difference < 1e-4, "prefill of row {r}: {difference}");
                }
            };
        prefill([0; 4], lengths, &[0, 1, 2, 3], &mut decoder);
        let before = lengths;
        lengths = [9, 4, 5, 13];
        prefill(before, lengths, &[1, 3], &mut decoder);
        for step in 0..6 {
            let mut which = vec![1, 2, 3, 0];
            which.retain(|r| step != 3 || *r != 2);
            let batch: Vec<_> = which
                .iter()
                .map(|r| DecodeRow {
                    slot: slots[*r],
                    position: lengths[*r],
                    id: rows[*r][lengths[*r]],
                })
                .collect();
            let logits = decoder.decode(&batch).unwrap();
            for (i, r) in which.iter().enumerate() {
                let difference = largest_difference(
                    &logits.get(i as i64),
                    &expected[*r].get(lengths[*r] as i64),
                );
                assert!(difference < 1e-4, "step {step}, row {r}: {difference}");
                lengths[*r] += 1;
            }
        }
        // A copied beginning serves as if it had been computed; what the other slot holds stays.
        decoder.copy_prefix(slots[0], 5, 7).unwrap();
        let tail = [PrefillRow {
            slot: 5,
            start: 7,
            ids: &rows[0][7..9],
        }];
        let difference =
            largest_difference(&decoder.prefill(&tail).unwrap().get(0), &expected[0].get(8));
        assert!(difference < 1e-4, "after a copy: {difference}");
        assert!(decoder.copy_prefix(0, 6, 1).is_err());
        // Going back in a slot overwrites what was there.
        prefill([3; 4], [8; 4], &[0, 1, 2, 3], &mut decoder);
    }
}

#[test]
fn what_follows_a_row_does_not_reach_it() {
    let model = formula_model(false, 2);
    let ids = token_ids(10);
    let short = full_logits(&model, &ids[..6]);
    let padded = Tensor::from_slice(&[&ids[..6], &[0; 4]].concat()).unsqueeze(0);
    let hidden = model
        .hidden(&padded)
        .unwrap()
        .squeeze_dim(0)
        .narrow(0, 0, 6);
    assert!(largest_difference(&model.logits(&hidden).unwrap(), &short) < 1e-5);
}

#[test]
fn every_parameter_gets_a_gradient() {
    let model = Llama::init(config(false, 2), 7, Device::Cpu).unwrap();
    model.set_trainable(true);
    let logits = full_logits(&model, &token_ids(8));
    let targets = Tensor::from_slice(&token_ids(9)[1..]);
    logits.cross_entropy_for_logits(&targets).backward();
    for (name, tensor) in model.named_parameters() {
        let gradient = tensor.grad();
        assert!(gradient.defined(), "{name} has no gradient");
        assert!(
            gradient.abs().sum(Kind::Float).double_value(&[]) > 0.0,
            "{name}: gradient is zero"
        );
    }
}

#[test]
fn checkpoints_survive_the_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let dir = Utf8Path::from_path(folder.path()).unwrap();
    for tied in [false, true] {
        let model = Llama::init(config(tied, 2), 7, Device::Cpu).unwrap();
        model.save(dir).unwrap();
        let read = Llama::load(dir, Device::Cpu).unwrap();
        assert_eq!(read.config(), model.config());
        assert_eq!(read.weights_hash().unwrap(), model.weights_hash().unwrap());
        assert_eq!(
            model.duplicate().unwrap().weights_hash().unwrap(),
            model.weights_hash().unwrap()
        );
        let other = Llama::init(config(tied, 2), 8, Device::Cpu).unwrap();
        assert_ne!(other.weights_hash().unwrap(), model.weights_hash().unwrap());
    }
    let names: Vec<_> = fs_err::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 2, "only config and weights remain: {names:?}");
}

#[test]
fn a_wrong_checkpoint_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let dir = Utf8Path::from_path(folder.path()).unwrap();
    let model = Llama::init(config(false, 2), 7, Device::Cpu).unwrap();
    model.save(dir).unwrap();
    let weights = dir.join("model.safetensors");
    let whole = fs_err::read(&weights).unwrap();
    fs_err::write(&weights, &whole[..whole.len() / 2]).unwrap();
    let message = Llama::load(dir, Device::Cpu).unwrap_err().to_string();
    assert!(message.contains("model.safetensors"), "{message}");
    fs_err::write(&weights, &whole).unwrap();

    let wider = LlamaConfig {
        intermediate_size: 41,
        ..config(false, 2)
    };
    fs_err::write(dir.join("config.json"), wider.to_json().to_string()).unwrap();
    let message = Llama::load(dir, Device::Cpu).unwrap_err().to_string();
    assert!(
        message.contains("mlp") && message.contains("41"),
        "{message}"
    );

    let mut parameters: BTreeMap<_, _> = model.named_parameters().into_iter().collect();
    parameters.remove("model.layers.1.self_attn.k_proj.weight");
    let message = Llama::from_parameters(config(false, 2), parameters)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("model.layers.1.self_attn.k_proj.weight"),
        "{message}"
    );
}

#[test]
fn the_decoder_refuses_rows_that_do_not_fit() {
    let model = formula_model(false, 2);
    let mut decoder = Decoder::new(&model, 2, 8).unwrap();
    let row = |slot, start, ids| PrefillRow { slot, start, ids };
    assert!(decoder.prefill(&[row(2, 0, &[1])]).is_err());
    assert!(decoder.prefill(&[row(0, 7, &[1, 2])]).is_err());
    assert!(decoder.prefill(&[row(0, 0, &[])]).is_err());
    assert!(decoder.prefill(&[row(0, 0, &[40])]).is_err());
    assert!(decoder.prefill(&[row(0, 6, &[1, 2])]).is_ok());
    assert!(Decoder::new(&model, 1, 65).is_err());
}
