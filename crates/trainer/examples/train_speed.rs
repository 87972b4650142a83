//! Training speed on a fresh model of the embedded base's size: `cargo run --example train_speed [micro_tokens] [threads]`.

use std::io::Write;

use drillyard_model::{Llama, LlamaConfig};
use drillyard_trainer::{Dataset, Hyper, Method, NoHooks, Sequence, TrainConfig, Turn, fit};
use tch::Device;

const VOCABULARY: i64 = 600;

fn argument(position: usize, default: usize) -> usize {
    std::env::args()
        .nth(position)
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (micro_tokens, threads) = (argument(1, 8192), argument(2, 2));
    let json = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true, "initializer_range": 0.02,
    });
    tch::set_num_threads(threads as i32);
    let network = Llama::init(LlamaConfig::from_json(&json)?, 1, Device::Cpu)?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} parameters, {micro_tokens} tokens a pass, {threads} threads",
        network.config().parameter_count()
    )?;

    // Lengths of 200 to 300 tokens, three turns of the model's own, 40 % of all tokens.
    let sequences: Vec<Sequence> = (0..1200u32)
        .map(|i| {
            let len = 200 + (i * 37) % 100;
            let turns = (0..3)
                .map(|k| Turn {
                    start: len * (3 * k + 2) / 10,
                    end: len * (3 * k + 3) / 10 + len / 30,
                    step: k as i32,
                    temperature: 1.0,
                })
                .collect();
            Sequence {
                episode: format!("e{i}").into(),
                group: Some(format!("g{}", i / 8).into()),
                ids: (0..len)
                    .map(|k| ((i * 31 + k * 17) % VOCABULARY as u32) as i32)
                    .collect(),
                turns,
                behaviour: vec![],
                reference: vec![],
                format: vec![],
                advantage: if i % 2 == 0 { 1.0 } else { -1.0 },
                weight: 1.0,
                success: None,
                version: 0,
            }
        })
        .map(|mut sequence| {
            sequence.behaviour = vec![-6.4; sequence.own_len()];
            sequence.reference = sequence.behaviour.clone();
            sequence
        })
        .collect();
    let data = Dataset {
        train: (0..sequences.len()).collect(),
        sequences,
        ..Dataset::default()
    };
    for method in [Method::Imitation, Method::Grpo] {
        let mut config: TrainConfig = serde_json::from_value(serde_json::json!({
            "method": method, "init": "-", "output": "-",
        }))?;
        config.hyper = Hyper {
            epochs: 1,
            max_steps: Some(20),
            micro_tokens,
            checkpoint_every: 0,
            ..Hyper::default()
        };
        let outcome = fit(&config, &network, &data, None, &mut NoHooks)?;
        writeln!(
            out,
            "{method:?}: {} steps, {} tokens, {:.1} s, {:.0} tokens/s",
            outcome.steps, outcome.tokens, outcome.seconds, outcome.tokens_per_second
        )?;
    }
    Ok(())
}
