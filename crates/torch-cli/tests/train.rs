//! The program from outside, on a lake whose episodes a small untrained model sampled through the serving engine.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use assert_cmd::Command;
use camino::{Utf8Path, Utf8PathBuf};
use drillyard_lake::{EpisodeBundle, Lake};
use drillyard_model::Llama;
use drillyard_render::{ChatTemplate, Tokenizer, render_ids};
use drillyard_schema::table::{AdvantageRow, LossSpan, PairRow, TokenRow};
use drillyard_schema::{Message, Role};
use drillyard_serve::{Engine, EngineOptions, GenerateRequest};
use drillyard_testkit::{SyntheticOptions, synthetic_run, write_bundles};
use serde_json::{Value, json};

const TEMPERATURE: f64 = 0.8;
const SAMPLES: u32 = 8;

struct Yard {
    _guard: tempfile::TempDir,
    root: Utf8PathBuf,
}

fn program() -> Command {
    let mut command = Command::cargo_bin("drillyard-torch").unwrap();
    command.arg("--quiet");
    command
}

/// Runs the program and gives what it printed as JSON.
fn ok(args: &[&str]) -> Value {
    let output = program().args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs the program, expects an exit code, and gives what it said.
fn fails(args: &[&str], code: i32) -> String {
    let output = program().args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

fn conversation(i: usize) -> Value {
    json!({"messages": [
        {"role": "user", "content": format!("copy file {i}")},
        {"role": "assistant", "content": format!("file {i} is copied")},
    ]})
}

impl Yard {
    /// A folder with a fresh checkpoint in `base`.
    fn new() -> Self {
        let guard = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(guard.path().to_owned()).unwrap();
        let yard = Self {
            _guard: guard,
            root,
        };
        let lines: Vec<String> = (0..40).map(|i| conversation(i).to_string()).collect();
        fs_err::write(yard.path("texts.jsonl"), lines.join("\n")).unwrap();
        let (texts, base) = (yard.path("texts.jsonl"), yard.path("base"));
        let built = ok(&[
            "tokenizer",
            "--texts",
            texts.as_str(),
            "--out",
            base.as_str(),
            "--vocab-size",
            "400",
        ]);
        assert_eq!(built["conversations"], 40);
        let drawn = ok(&[
            "init",
            "--out",
            base.as_str(),
            "--hidden-size",
            "32",
            "--intermediate-size",
            "64",
            "--layers",
            "2",
            "--max-len",
            "512",
        ]);
        let info = ok(&["info", base.as_str()]);
        assert_eq!(info["weights_hash"], drawn["weights_hash"]);
        yard
    }

    fn path(&self, name: &str) -> Utf8PathBuf {
        self.root.join(name)
    }

    fn config(&self, name: &str, config: &Value) -> String {
        let path = self.path(&format!("{name}.json"));
        fs_err::write(&path, config.to_string()).unwrap();
        path.into_string()
    }

    /// A lake of episodes sampled from `base`, with advantages and pairs.
    fn drill(&self, name: &str, change: impl Fn(&mut EpisodeBundle)) -> Utf8PathBuf {
        let lake = self.path(name);
        let base = self.path("base");
        tokio::runtime::Runtime::new()
            .unwrap()
            .block_on(drill(&lake, &base, change));
        lake
    }
}

async fn drill(root: &Utf8Path, base: &Utf8Path, change: impl Fn(&mut EpisodeBundle)) {
    let model = Llama::load(base, tch::Device::Cpu).unwrap();
    let tokenizer = Tokenizer::load(base).unwrap();
    let template = ChatTemplate::load(base).unwrap();
    let engine = Engine::start(&model, &[], EngineOptions::default()).unwrap();
    let mut bundles = synthetic_run(
        1,
        &SyntheticOptions {
            tasks: 6,
            samples: SAMPLES,
            infrastructure: 0.0,
            policy_revision: engine.weights_hash().to_string(),
            ..SyntheticOptions::default()
        },
    );
    for (index, bundle) in bundles.iter_mut().enumerate() {
        bundle.episode.temperature = TEMPERATURE;
        bundle.episode.n_steps = 2;
        for step in &mut bundle.steps {
            step.temperature = TEMPERATURE;
        }
        let task = [Message::text(Role::User, bundle.task.instruction.clone())];
        let mut history = render_ids(&tokenizer, &template, &task, &[], true).unwrap();
        let row = bundle.tokens[0].clone();
        let mut context = history.clone();
        bundle.tokens.clear();
        for step in 0..2 {
            let generated = engine
                .generate(GenerateRequest {
                    prompt: history.clone(),
                    max_tokens: 6 + index % 3,
                    temperature: TEMPERATURE,
                    top_p: 1.0,
                    seed: Some((2 * index + step) as u64),
                })
                .await
                .unwrap();
            bundle.tokens.push(TokenRow {
                step_index: step as i32,
                kept_prefix: (history.len() - context.len()) as i32,
                context_ids: std::mem::take(&mut context),
                generated_ids: generated.ids.clone(),
                logprobs: generated.logprobs,
                loss_spans: vec![LossSpan {
                    start: 0,
                    end: 2,
                    kind: "action_format".into(),
                }],
                tokenizer_hash: tokenizer.hash().into(),
                template_hash: template.hash().into(),
                ..row.clone()
            });
            history.extend(generated.ids);
            context = vec![5, 4, 9, 10, 11, 5, 3];
            history.extend(&context);
        }
        change(bundle);
    }
    let lake = Lake::open(root).await.unwrap();
    write_bundles(&lake, &bundles).await.unwrap();
    let advantages: Vec<AdvantageRow> = bundles
        .iter()
        .map(|bundle| {
            let episode = &bundle.episode;
            let reward = f64::from(1 - episode.sample_index % 2);
            AdvantageRow {
                run_date: episode.run_date.clone(),
                purpose: episode.purpose.clone(),
                run_id: episode.run_id.clone(),
                stage_run: "credit-1".into(),
                group_id: episode.group_id.clone(),
                episode_id: episode.episode_id.clone(),
                task_id: episode.task_id.clone(),
                reward,
                baseline: Some(0.5),
                deviation: Some(0.53),
                advantage: Some((reward - 0.5) / 0.53),
                weight: 1.0,
                scored: true,
                zero_variance: false,
                n_total: SAMPLES as i32,
                n_scored: SAMPLES as i32,
                n_infrastructure: 0,
            }
        })
        .collect();
    lake.append(&advantages, None).await.unwrap();
    let pairs: Vec<PairRow> = bundles
        .chunks(2)
        .map(|pair| {
            let [won, lost] = [&pair[0].episode, &pair[1].episode];
            PairRow {
                run_date: won.run_date.clone(),
                purpose: won.purpose.clone(),
                run_id: won.run_id.clone(),
                stage_run: "credit-1".into(),
                task_id: won.task_id.clone(),
                chosen_episode_id: won.episode_id.clone(),
                rejected_episode_id: lost.episode_id.clone(),
                divergence_step: 0,
                margin: 1.0,
                weight: 1.0,
            }
        })
        .collect();
    lake.append(&pairs, None).await.unwrap();
}

fn grpo(lake: &Utf8Path, init: &Utf8Path, output: &Utf8Path) -> Value {
    json!({
        "method": "grpo", "init": init, "output": output, "stage_run": "train-1",
        "lake": {"root": lake, "credit": "credit-1"},
        "hyper": {
            "epochs": 2, "batch_tokens": 1024, "micro_tokens": 512, "learning_rate": 2e-4, "log_every": 1,
            "contrastive_weight": 0.02, "format_weight": 0.02,
        },
    })
}

#[test]
fn grpo_trains_on_what_the_engine_sampled_and_a_parent_is_known() {
    let yard = Yard::new();
    let lake = yard.drill("lake", |_| {});
    let (base, out, next) = (yard.path("base"), yard.path("out"), yard.path("next"));
    let figures = ok(&[
        "train",
        "--config",
        &yard.config("grpo", &grpo(&lake, &base, &out)),
    ]);
    let gate = &figures["gate"];
    assert_eq!(gate["passed"], true);
    assert_eq!(gate["staleness"], 0);
    assert_eq!(gate["provenance"]["with_logprobs"], 48);
    // Sampler and trainer agree on the same tokens, also away from temperature 1.
    let difference = gate["drift"]["max_difference"].as_f64().unwrap();
    assert!(
        difference < 1e-3,
        "log-probabilities differ by {difference}"
    );
    assert_eq!(figures["sequences"], 48);
    assert!(figures["steps"].as_u64().unwrap() >= 4);
    assert!(figures["train_metrics_version"].is_u64());
    for metric in [
        "kl",
        "clip_share",
        "entropy",
        "grad_norm",
        "loss_policy",
        "loss_format",
        "loss_contrastive",
    ] {
        assert!(figures["last"][metric].is_f64(), "{metric} is missing");
    }
    assert_ne!(figures["revision"], figures["parent_revision"]);
    let info = ok(&["info", out.as_str()]);
    assert_eq!(info["weights_hash"], figures["revision"]);
    assert_eq!(
        info["origin"]["lineage"],
        json!([figures["parent_revision"]])
    );

    // The same episodes are a checkpoint old for the trained policy, and it still passes.
    let figures = ok(&[
        "train",
        "--config",
        &yard.config("next", &grpo(&lake, &out, &next)),
    ]);
    assert_eq!(figures["gate"]["staleness"], 1);
    assert!(figures["gate"]["drift"]["kl"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_gate_refuses_strangers_and_imitation_still_works() {
    let yard = Yard::new();
    let lake = yard.drill("lake", |bundle| {
        bundle.episode.policy_revision = "another-model".into();
        for row in &mut bundle.tokens {
            row.logprobs.clear();
            row.tokenizer_hash = "another-tokenizer".into();
        }
    });
    let (base, out) = (yard.path("base"), yard.path("out"));
    let refused = yard.config("grpo", &grpo(&lake, &base, &out));
    let said = fails(&["train", "--config", &refused], 12);
    assert!(
        said.contains("log-probabilities are there for 0 of 48"),
        "{said}"
    );
    assert!(said.contains("still works: imitation"), "{said}");
    assert!(!out.exists(), "nothing is written after a refusal");

    let imitation = json!({
        "method": "imitation", "init": base, "output": out, "lake": {"root": lake, "credit": "credit-1"},
        "hyper": {"epochs": 2, "batch_tokens": 4096, "select": "all", "preference_weight": 0.5, "log_every": 1},
    });
    let figures = ok(&["train", "--config", &yard.config("imitation", &imitation)]);
    assert!(figures["gate"].is_null());
    assert!(figures["sequences"].as_u64().unwrap() > 40);
    assert!(figures["pairs"].as_u64().unwrap() > 10);
    assert!(figures["loss_last"].as_f64().unwrap() < figures["loss_first"].as_f64().unwrap());
    assert!(figures["last"]["loss_preference"].is_f64());
    let notes = figures["notes"].to_string();
    assert!(notes.contains("rendered from messages"), "{notes}");
}

#[test]
fn missing_logprobs_of_the_same_weights_are_recomputed() {
    let yard = Yard::new();
    let lake = yard.drill("lake", |bundle| {
        for row in &mut bundle.tokens {
            row.logprobs.clear();
        }
    });
    let config = grpo(&lake, &yard.path("base"), &yard.path("out"));
    let figures = ok(&["train", "--config", &yard.config("grpo", &config)]);
    assert_eq!(figures["gate"]["recompute_missing"], true);
    assert_eq!(figures["sequences"], 48);
    assert!(figures["last"]["ratio_mean"].as_f64().unwrap() > 0.5);
}

#[test]
fn imitation_of_conversations_learns_and_is_measured_by_the_caller() {
    let yard = Yard::new();
    let config = yard.config(
        "imitation",
        &json!({
            "method": "imitation", "init": yard.path("base"), "output": yard.path("out"),
            "conversations": yard.path("texts.jsonl"),
            "hyper": {
                "epochs": 90, "batch_tokens": 1024, "learning_rate": 1e-2, "log_every": 5, "holdout_share": 0.1,
                "validate_every": 30, "max_steps": 60,
            },
        }),
    );
    let metrics = yard.path("metrics.jsonl");
    let output = program()
        .args(["train", "--config", &config, "--validate", "--metrics", metrics.as_str()])
        .write_stdin(
            "{\"success\":0.1,\"mean_steps\":3,\"tool_accuracy\":1}\n{\"success\":0.2,\"mean_steps\":3,\"tool_accuracy\":1}\nnull\n",
        )
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let lines: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 4, "three measurements and the figures");
    for (line, step) in lines.iter().zip([0, 30, 60]) {
        assert_eq!(line["event"], "validate");
        assert_eq!(line["step"], step);
        assert!(
            line["listening"]
                .as_str()
                .unwrap()
                .starts_with("127.0.0.1:")
        );
    }
    assert_ne!(lines[0]["weights_hash"], lines[1]["weights_hash"]);
    let figures = &lines[3];
    assert_eq!(figures["validations"].as_array().unwrap().len(), 2);
    assert!(figures["loss_last"].as_f64().unwrap() < 0.7 * figures["loss_first"].as_f64().unwrap());
    assert!(figures["last"]["loss_holdout"].is_f64());
    let rows = fs_err::read_to_string(metrics).unwrap();
    assert!(
        rows.lines()
            .all(|line| serde_json::from_str::<Value>(line).is_ok())
    );
    assert!(rows.contains("validation_success"));
}

#[test]
fn mistakes_have_their_exit_codes() {
    let yard = Yard::new();
    let (base, out) = (yard.path("base"), yard.path("out"));
    let texts = yard.path("texts.jsonl");
    let good = json!({"method": "imitation", "init": base, "output": out, "conversations": texts});
    let good = yard.config("good", &good);
    let with = |set: &str| {
        vec![
            "train".to_owned(),
            "--config".into(),
            good.clone(),
            "--set".into(),
            set.to_owned(),
        ]
    };
    let fails_with = |set: &str, code| {
        let args = with(set);
        fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), code)
    };
    assert!(fails_with("hyper.epoch=1", 2).contains("epoch"));
    assert!(fails_with("hyper.kl=-1", 2).contains("hyper.kl"));
    assert!(fails_with("method=grpo", 2).contains("grpo needs"));
    assert!(fails_with("conversations=nowhere.jsonl", 20).contains("nowhere.jsonl"));
    assert!(fails_with("init=nowhere", 20).contains("nowhere"));
    fs_err::write(&texts, "{\"messages\": 3}\n").unwrap();
    assert!(fails_with("seed=1", 20).contains("line 1"));
    fs_err::write(&texts, "\n").unwrap();
    assert!(fails_with("seed=1", 11).contains("nothing to train on"));
    assert!(!out.exists());
}

#[test]
fn a_served_checkpoint_answers_and_ends_with_its_parent() {
    use std::io::{BufRead, BufReader, Read, Write};
    let yard = Yard::new();
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("drillyard-torch"))
        .args([
            "serve",
            "--model",
            yard.path("base").as_str(),
            "--port",
            "0",
            "--exit-with-parent",
        ])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let stdin = child.stdin.take().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(ready["model"], "base");
    let mut connection =
        std::net::TcpStream::connect(ready["listening"].as_str().unwrap()).unwrap();
    connection
        .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop(stdin);
    assert!(child.wait().unwrap().success());
}
