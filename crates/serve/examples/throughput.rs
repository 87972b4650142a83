//! How many tokens a second the engine generates for conversations like an agent's.
//!
//! `cargo run -p drillyard-serve --example throughput -- [conversations at once] [threads] [seconds] [key-value heads]`
//!
//! A model of the embedded base's shape with random weights plays conversations of three turns: a prompt of about 170 tokens (shared by
//! groups of eight, as the samples of a task are), answers of 30, observations of 20 between them, up to about 300 tokens in all, with
//! no pause between turns. Sampling at temperature 1, with log-probabilities.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drillyard_model::{Llama, LlamaConfig};
use drillyard_serve::{Engine, EngineOptions, GenerateRequest, ServeError};
use serde_json::json;

const TURNS: usize = 3;
const PROMPT: usize = 170;
const ANSWER: usize = 30;
const OBSERVATION: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<u64> = std::env::args()
        .skip(1)
        .map_while(|a| a.parse().ok())
        .collect();
    let argument = |i: usize, default| arguments.get(i).copied().unwrap_or(default);
    let (at_once, threads, seconds, kv_heads) = (
        argument(0, 64),
        argument(1, 1),
        argument(2, 10),
        argument(3, 2),
    );
    let config = LlamaConfig::from_json(&json!({
        "model_type": "llama", "vocab_size": 600, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 512, "tie_word_embeddings": true,
    }))?;
    let model = Llama::init(config, 1, tch::Device::Cpu)?;
    let options = EngineOptions {
        max_batch: at_once as usize,
        threads: threads as usize,
        ..EngineOptions::default()
    };
    // Nothing stops a random model early: answers have a fixed length.
    let engine = Engine::start(&model, &[], options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .build()?;
    let started = Instant::now();
    let until = started + Duration::from_secs(seconds);
    let done = Arc::new(AtomicU64::new(0));
    let conversations = Arc::new(AtomicU64::new(0));
    runtime.block_on(async {
        let players: Vec<_> = (0..at_once)
            .map(|_| {
                let (engine, done, conversations) = (
                    engine.clone(),
                    Arc::clone(&done),
                    Arc::clone(&conversations),
                );
                tokio::spawn(async move {
                    while Instant::now() < until {
                        let n = conversations.fetch_add(1, Ordering::Relaxed);
                        play(&engine, n, &done).await?;
                    }
                    Ok::<_, ServeError>(())
                })
            })
            .collect();
        for player in players {
            player.await??;
        }
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    let took = started.elapsed().as_secs_f64();
    let generated = done.load(Ordering::Relaxed) as f64;
    let m = engine.metrics().snapshot();
    let report = json!({
        "tokens_per_second": (generated / took).round(),
        "conversations_per_second": (conversations.load(Ordering::Relaxed) as f64 / took * 10.0).round() / 10.0,
        "mean_batch": m.decode_rows as f64 / m.decode_steps.max(1) as f64,
        "ms_per_step": m.decode_us as f64 / 1e3 / m.decode_steps.max(1) as f64,
        "prompts_per_batch": m.prefill_rows as f64 / m.prefill_batches.max(1) as f64,
        "ms_per_prompt_batch": m.prefill_us as f64 / 1e3 / m.prefill_batches.max(1) as f64,
        "share_of_time_on_prompts": m.prefill_us as f64 / (m.prefill_us + m.decode_us).max(1) as f64,
        "share_of_prompt_tokens_cached": m.cached_tokens as f64 / m.prompt_tokens.max(1) as f64,
    });
    std::io::Write::write_all(&mut std::io::stdout(), format!("{report:#}\n").as_bytes())?;
    Ok(())
}

async fn play(engine: &Engine, n: u64, done: &AtomicU64) -> Result<(), ServeError> {
    let word = |i: usize, salt: u64| ((i as u64 * 31 + salt * 97 + 7) % 590 + 8) as i32;
    // A system prompt that all share, a task that eight share.
    let mut ids: Vec<i32> = (0..PROMPT)
        .map(|i| word(i, if i < 90 { 0 } else { 1 + n / 8 }))
        .collect();
    for turn in 0..TURNS {
        let answer = engine
            .generate(GenerateRequest {
                prompt: ids.clone(),
                max_tokens: ANSWER,
                temperature: 1.0,
                top_p: 1.0,
                seed: Some(n),
            })
            .await?;
        done.fetch_add(answer.ids.len() as u64, Ordering::Relaxed);
        ids.extend(answer.ids);
        ids.extend((0..OBSERVATION).map(|i| word(i, n + turn as u64)));
    }
    Ok(())
}
