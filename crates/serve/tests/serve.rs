//! The server over HTTP, against the model's own full forward pass.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::sync::LazyLock;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_model::{Llama, LlamaConfig};
use drillyard_render::{BaseTokenizerOptions, ChatTemplate, Tokenizer, build_base_tokenizer};
use drillyard_schema::{Message, Role};
use drillyard_serve::{EngineOptions, ServeOptions, Server};
use serde_json::{Value, json};
use tch::{Device, Tensor};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// A checkpoint of random weights, wide enough for its distribution to be uneven.
static CHECKPOINT: LazyLock<(TempDir, Utf8PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let dir = Utf8Path::from_path(folder.path()).unwrap().join("tiny");
    let syllables: Vec<String> = ["ka", "fo", "mi", "re"].map(str::to_owned).to_vec();
    let text = ChatTemplate::base()
        .unwrap()
        .render(
            &[Message::text(Role::User, "list kafo and mire")],
            &[],
            true,
        )
        .unwrap();
    let files = build_base_tokenizer(&BaseTokenizerOptions {
        syllables: &syllables,
        texts: &[text.clone(), text],
        vocab_size: 280,
        min_share: 0.0,
        max_len: 256,
    })
    .unwrap();
    files.write(&dir).unwrap();
    let tokenizer = files.load().unwrap();
    model(7, tokenizer.id("<|end|>").unwrap())
        .save(&dir)
        .unwrap();
    (folder, dir)
});

fn model(seed: u64, end: i32) -> Llama {
    let config = LlamaConfig::from_json(&json!({
        "model_type": "llama", "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
        "tie_word_embeddings": true, "eos_token_id": end, "pad_token_id": 0,
    }))
    .unwrap();
    Llama::init(config, seed, Device::Cpu).unwrap()
}

struct Running {
    url: String,
    http: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<Result<(), drillyard_serve::ServeError>>,
    engine: drillyard_serve::Engine,
    weights_hash: String,
}

async fn start(engine: EngineOptions) -> Running {
    let options = ServeOptions {
        engine,
        ..ServeOptions::new(CHECKPOINT.1.clone())
    };
    let server = Server::bind(&options).await.unwrap();
    let (stop, stopped) = oneshot::channel();
    let listening = server.listening().clone();
    assert_eq!(listening.model, "tiny");
    Running {
        url: format!("http://{}", listening.listening),
        http: reqwest::Client::builder().no_proxy().build().unwrap(),
        stop: Some(stop),
        engine: server.engine(),
        weights_hash: listening.weights_hash,
        task: tokio::spawn(server.run(async move {
            let _ = stopped.await;
        })),
    }
}

impl Running {
    async fn post(&self, body: &Value) -> (u16, Value) {
        let request = self
            .http
            .post(format!("{}/v1/chat/completions", self.url))
            .json(body);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    async fn ok(&self, body: &Value) -> Value {
        let (status, answer) = self.post(body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    async fn get(&self, path: &str) -> Value {
        let response = self
            .http
            .get(format!("{}{path}", self.url))
            .send()
            .await
            .unwrap();
        response.json().await.unwrap()
    }

    async fn end(mut self) {
        let _ = self.stop.take().unwrap().send(());
        drop(self.http);
        self.task.await.unwrap().unwrap();
    }
}

fn ids(value: &Value) -> Vec<i32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn logprobs(choice: &Value) -> Vec<f64> {
    choice["logprobs"]["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["logprob"].as_f64().unwrap())
        .collect()
}

/// What the full forward pass says of tokens that follow a prompt, at a temperature.
fn reference(model: &Llama, prompt: &[i32], generated: &[i32], temperature: f64) -> Vec<f64> {
    let all: Vec<i64> = prompt
        .iter()
        .chain(generated)
        .map(|id| i64::from(*id))
        .collect();
    let hidden = model
        .hidden(&Tensor::from_slice(&all).unsqueeze(0))
        .unwrap()
        .squeeze_dim(0);
    let logp = (model.logits(&hidden).unwrap() / temperature).log_softmax(1, tch::Kind::Float);
    generated
        .iter()
        .enumerate()
        .map(|(i, id)| logp.double_value(&[(prompt.len() + i - 1) as i64, i64::from(*id)]))
        .collect()
}

fn ask(text: &str) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12})
}

#[tokio::test(flavor = "multi_thread")]
async fn logprobs_over_several_turns_are_those_of_the_full_pass() {
    let server = start(EngineOptions::default()).await;
    let model = Llama::load(&CHECKPOINT.1, Device::Cpu).unwrap();
    let tokenizer = Tokenizer::load(&CHECKPOINT.1).unwrap();
    let others = (0..6).map(|i| {
        let (http, url) = (
            server.http.clone(),
            format!("{}/v1/chat/completions", server.url),
        );
        tokio::spawn(async move {
            for turn in 0..6 {
                let body = ask(&"mire ".repeat(1 + i + turn));
                http.post(&url).json(&body).send().await.unwrap();
            }
        })
    });
    let others: Vec<_> = others.collect();
    for temperature in [1.0, 0.7] {
        let mut messages = vec![json!({"role": "user", "content": "list kafo and mire"})];
        let mut prior: Vec<i32> = Vec::new();
        for turn in 0..4 {
            let mut body = json!({
                "messages": messages, "max_tokens": 10, "temperature": temperature, "seed": turn,
                "return_token_ids": true, "logprobs": true, "parse_tool_calls": false,
            });
            if turn > 0 {
                body["prior_token_ids"] = json!(prior);
                body["prior_messages"] = json!(messages.len() - 1);
            }
            let answer = server.ok(&body).await;
            let choice = &answer["choices"][0];
            let (prompt, generated) = (ids(&answer["prompt_token_ids"]), ids(&choice["token_ids"]));
            assert!(
                prompt.starts_with(&prior),
                "what was sampled stays as it was"
            );
            let expected = reference(&model, &prompt, &generated, temperature);
            for (ours, full) in logprobs(choice).into_iter().zip(expected) {
                assert!(
                    (ours - full).abs() < 1e-3,
                    "turn {turn}: {ours}, the full pass says {full}"
                );
            }
            assert_eq!(answer["usage"]["completion_tokens"], generated.len());
            assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
            if turn > 0 {
                let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    .as_u64()
                    .unwrap();
                assert!(
                    cached as usize + 1 >= prior.len(),
                    "only {cached} of {} were kept",
                    prior.len()
                );
            }
            assert_eq!(answer["system_fingerprint"], server.weights_hash.as_str());
            assert_eq!(answer["drillyard"]["tokenizer_hash"], tokenizer.hash());
            prior = [prompt, generated].concat();
            messages.push(json!({"role": "assistant", "content": choice["message"]["content"]}));
            messages.push(json!({"role": "tool", "content": format!("{turn},kafo")}));
        }
    }
    for other in others {
        other.await.unwrap();
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_company_the_likeliest_tokens_are_those_of_a_request_alone() {
    // Fewer slots than requests, so that slots are shared, copied from and taken over.
    let server = start(EngineOptions {
        max_batch: 5,
        ..EngineOptions::default()
    })
    .await;
    let body = |i: usize| {
        let mut body = ask(&format!("list kafo and mire {}", "re".repeat(i % 7)));
        body["temperature"] = json!(0);
        body["max_tokens"] = json!(4 + i % 9);
        body["return_token_ids"] = json!(true);
        body
    };
    let alone = start(EngineOptions {
        max_batch: 1,
        ..EngineOptions::default()
    })
    .await;
    let company = futures::future::join_all((0..24).map(|i| {
        let body = body(i);
        let server = &server;
        async move { server.ok(&body).await }
    }))
    .await;
    for (i, answer) in company.iter().enumerate() {
        let expected = alone.ok(&body(i)).await;
        assert_eq!(
            answer["choices"][0]["token_ids"], expected["choices"][0]["token_ids"],
            "request {i}"
        );
        assert_eq!(
            answer["choices"][0]["message"],
            expected["choices"][0]["message"]
        );
    }
    let metrics = server.get("/metrics.json").await;
    assert!(metrics["largest_batch"].as_u64().unwrap() > 1, "{metrics}");
    assert_eq!(metrics["requests"], 24);
    assert!(metrics["cached_tokens"].as_u64().unwrap() > 0, "{metrics}");
    server.end().await;
    alone.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_repeats_a_request() {
    let server = start(EngineOptions::default()).await;
    let mut body = ask("kafo");
    body["seed"] = json!(3);
    body["top_p"] = json!(0.9);
    let first = server.ok(&body).await["choices"].clone();
    assert_eq!(server.ok(&body).await["choices"], first);
    body["seed"] = json!(4);
    assert_ne!(server.ok(&body).await["choices"], first);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn generation_ends_for_the_right_reason() {
    let server = start(EngineOptions {
        max_len: 64,
        ..EngineOptions::default()
    })
    .await;
    let end = Tokenizer::load(&CHECKPOINT.1)
        .unwrap()
        .id("<|end|>")
        .unwrap();
    let (mut stopped, mut cut) = (0, 0);
    for seed in 0..40 {
        let mut body = ask("mire");
        body["seed"] = json!(seed);
        body["max_tokens"] = json!(100);
        body["return_token_ids"] = json!(true);
        let answer = server.ok(&body).await;
        let choice = &answer["choices"][0];
        let generated = ids(&choice["token_ids"]);
        match choice["finish_reason"].as_str().unwrap() {
            "stop" => {
                stopped += 1;
                assert_eq!(generated.last(), Some(&end));
                assert!(
                    !choice["message"]["content"]
                        .as_str()
                        .unwrap()
                        .ends_with("<|end|>")
                );
            }
            "length" => {
                cut += 1;
                let prompt = ids(&answer["prompt_token_ids"]);
                assert_eq!(
                    prompt.len() + generated.len(),
                    64,
                    "the context is used to its end"
                );
            }
            other => panic!("{other}"),
        }
        assert!(!generated[..generated.len() - 1].contains(&end));
    }
    assert!(stopped > 0 && cut > 0, "{stopped} stopped, {cut} cut");
    let mut body = ask("mire");
    let whole = server
        .ok(&body_with(&mut body, "temperature", json!(0)))
        .await;
    let text = whole["choices"][0]["message"]["content"]
        .as_str()
        .unwrap()
        .to_owned();
    let stop: String = text.chars().skip(2).take(2).collect();
    let answer = server
        .ok(&body_with(&mut body, "stop", json!([stop])))
        .await;
    let shorter = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(
        text.starts_with(shorter) && !shorter.contains(&stop),
        "'{text}' was cut to '{shorter}' at '{stop}'"
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    server.end().await;
}

fn body_with(body: &mut Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body.clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_get_the_apis_errors() {
    let server = start(EngineOptions {
        max_len: 32,
        ..EngineOptions::default()
    })
    .await;
    let (status, answer) = server.post(&ask(&"kafo ".repeat(40))).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("maximum context length")
    );
    let mut body = ask("kafo");
    body["temperature"] = json!("warm");
    let (status, answer) = server.post(&body).await;
    assert_eq!(
        (status, &answer["error"]["type"]),
        (400, &json!("invalid_request_error"))
    );
    for (prior, messages, word) in [
        (json!([1, 2]), json!(5), "prior messages"),
        (json!([99_999]), json!(1), "vocabulary"),
        (json!([1]), json!(1), "assistant"),
    ] {
        let mut body = ask("kafo");
        body["prior_token_ids"] = prior;
        body["prior_messages"] = messages;
        let (status, answer) = server.post(&body).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            status == 400 && message.contains(word),
            "{status}: {message}"
        );
    }
    let missing = server
        .http
        .get(format!("{}/v2", server.url))
        .send()
        .await
        .unwrap();
    assert_eq!(missing.status().as_u16(), 404);
    assert_eq!(server.get("/health").await["status"], "ok");
    assert_eq!(server.get("/v1/models").await["data"][0]["id"], "tiny");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_says_so_and_recovers() {
    let server = start(EngineOptions {
        max_batch: 1,
        queue: 2,
        ..EngineOptions::default()
    })
    .await;
    let mut body = ask("kafo");
    body["max_tokens"] = json!(200);
    let answers = futures::future::join_all((0..30).map(|_| server.post(&body))).await;
    let refused: Vec<_> = answers
        .iter()
        .filter(|(status, _)| *status == 503)
        .collect();
    assert!(
        !refused.is_empty() && refused.len() < 30,
        "{} refused",
        refused.len()
    );
    assert_eq!(refused[0].1["error"]["code"], "queue_full");
    assert!(
        answers
            .iter()
            .all(|(status, _)| matches!(status, 200 | 503))
    );
    server.ok(&body).await;
    assert_eq!(server.get("/metrics.json").await["refused"], refused.len());
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streaming_gives_the_same_text() {
    let server = start(EngineOptions::default()).await;
    for seed in 0..8 {
        let mut body = ask("list kafo");
        body["seed"] = json!(seed);
        body["max_tokens"] = json!(30);
        body["return_token_ids"] = json!(true);
        let whole = server.ok(&body).await;
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let request = server
            .http
            .post(format!("{}/v1/chat/completions", server.url))
            .json(&body);
        let text = request.send().await.unwrap().text().await.unwrap();
        let events: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        assert_eq!(events.last(), Some(&"[DONE]"));
        let chunks: Vec<Value> = events[..events.len() - 1]
            .iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect();
        let content: String = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(
            content,
            whole["choices"][0]["message"]["content"].as_str().unwrap()
        );
        let end = &chunks[chunks.len() - 2]["choices"][0];
        assert_eq!(end["finish_reason"], whole["choices"][0]["finish_reason"]);
        assert_eq!(end["token_ids"], whole["choices"][0]["token_ids"]);
        assert_eq!(
            chunks[chunks.len() - 1]["usage"]["completion_tokens"],
            whole["usage"]["completion_tokens"]
        );
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_go_away_free_their_place() {
    let server = start(EngineOptions {
        max_batch: 1,
        ..EngineOptions::default()
    })
    .await;
    let mut body = ask("kafo");
    body["max_tokens"] = json!(200);
    body["stream"] = json!(true);
    for _ in 0..20 {
        let request = server
            .http
            .post(format!("{}/v1/chat/completions", server.url))
            .json(&body);
        drop(request.send().await.unwrap());
    }
    body["stream"] = json!(false);
    server.ok(&body).await;
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_can_be_swapped() {
    let server = start(EngineOptions::default()).await;
    let end = Tokenizer::load(&CHECKPOINT.1)
        .unwrap()
        .id("<|end|>")
        .unwrap();
    let mut body = ask("list kafo");
    body["temperature"] = json!(0);
    let before = server.ok(&body).await;
    let other = model(8, end);
    server.engine.swap(&other).await.unwrap();
    let after = server.ok(&body).await;
    assert_eq!(
        after["system_fingerprint"],
        other.weights_hash().unwrap().as_str()
    );
    assert_ne!(after["system_fingerprint"], before["system_fingerprint"]);
    assert_ne!(after["choices"], before["choices"]);
    server.end().await;
}

#[test]
fn futures_can_be_spawned() {
    fn spawnable<T: Send>(_: &T) {}
    let options = ServeOptions::new("nowhere");
    spawnable(&Server::bind(&options));
    spawnable(&drillyard_serve::run(&options, |_| {}, async {}));
    let end = Tokenizer::load(&CHECKPOINT.1)
        .unwrap()
        .id("<|end|>")
        .unwrap();
    let engine =
        drillyard_serve::Engine::start(&model(8, end), &[], EngineOptions::default()).unwrap();
    spawnable(&engine.swap(&model(9, end)));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_served_is_an_error() {
    let missing = Server::bind(&ServeOptions::new("/nowhere/at/all"))
        .await
        .unwrap_err();
    assert!(missing.to_string().contains("/nowhere/at/all"), "{missing}");
    let server = start(EngineOptions::default()).await;
    let port = server.url.rsplit(':').next().unwrap().parse().unwrap();
    let taken = Server::bind(&ServeOptions {
        port,
        ..ServeOptions::new(CHECKPOINT.1.clone())
    })
    .await
    .unwrap_err();
    assert!(
        taken.to_string().contains("cannot listen on 127.0.0.1"),
        "{taken}"
    );
    server.end().await;
}
