//! `drillyard bench`: figures as JSON lines, each beside a baseline measured in the same run.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use camino::Utf8Path;
use drillyard_agent::{Policy, RolloutOptions, Silent, rollout};
use drillyard_lake::{EpisodeBundle, Filter, Lake, Writer, WriterOptions};
use drillyard_sandbox::{Call, Setup};
use drillyard_schema::table::{
    EpisodeRow, MessageRow, RewardRow, StepRow, TaskRow, TokenRow, ToolCallRow, VerdictRow,
};
use drillyard_schema::{EpisodeId, Purpose, RunId, Split};
use drillyard_stage::Failure;
use drillyard_stage::exit::{ENVIRONMENT, OK, OUTPUT};
use serde_json::{Value, json};

use super::base::conversations;
use crate::context::{Context, absolute, output};
use crate::endpoint::torch_program;
use crate::stages::{model_dir, sandbox_config, started, tasks, toolset};

/// Repetitions of a latency measurement.
const REPEATS: usize = 200;
/// Scripted episodes of the throughput measurement.
const EPISODES: usize = 600;

fn median(mut samples: Vec<Duration>) -> f64 {
    samples.sort();
    samples
        .get(samples.len() / 2)
        .map_or(0.0, |d| d.as_secs_f64() * 1e3)
}

/// Measures and prints.
pub(crate) async fn run(context: &Context) -> Result<u8, Failure> {
    let environment = |e: drillyard_sandbox::SandboxError| Failure::from_error(ENVIRONMENT, &e);
    let line = |bench: &str, value: f64, unit: &str, baseline: &str, baseline_value: f64| {
        let ratio = if baseline_value > 0.0 {
            Some(value / baseline_value)
        } else {
            None
        };
        let text = json!({ "bench": bench, "value": value, "unit": unit, "baseline": baseline, "baseline_value": baseline_value, "ratio": ratio });
        context
            .ui
            .data(&format!("{text}\n"))
            .map_err(|e| Failure::io("standard output", &e))
    };

    let mut bare = Vec::new();
    for _ in 0..REPEATS {
        let started = Instant::now();
        Command::new("/bin/true")
            .status()
            .map_err(|e| Failure::io("/bin/true", &e))?;
        bare.push(started.elapsed());
    }
    let bare = median(bare);
    let bubblewrap = bubblewrap();

    let config = sandbox_config(&context.pipeline)?;
    let required = &context.pipeline.sandbox.require_limits;
    let cold = drillyard_sandbox::SandboxConfig {
        pool_size: 0,
        ..config.clone()
    };
    let cold = started(cold, required, |_| Ok(())).await?;
    let mut create = Vec::new();
    for _ in 0..REPEATS {
        let started = Instant::now();
        let sandbox = cold.lease(&Setup::default()).await.map_err(environment)?;
        create.push(started.elapsed());
        drop(sandbox);
    }
    drop(cold);
    let create = median(create);
    line("sandbox_create_p50_ms", create, "ms", "fork+exec", bare)?;
    if let Some(bubblewrap) = bubblewrap {
        line(
            "sandbox_create_p50_ms",
            create,
            "ms",
            "bubblewrap",
            bubblewrap,
        )?;
    } else {
        context
            .ui
            .warn("bubblewrap is not installed; its side of the comparison is left out");
    }

    let pool = started(config, required, |_| Ok(())).await?;
    let mut sandbox = pool.lease(&Setup::default()).await.map_err(environment)?;
    let (mut calls, mut resets) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        let started = Instant::now();
        sandbox
            .call(Call::Exec {
                argv: vec!["/bin/true".to_owned()],
                stdin: Vec::new(),
                timeout: None,
            })
            .await
            .map_err(environment)?;
        calls.push(started.elapsed());
    }
    for _ in 0..REPEATS / 4 {
        sandbox
            .call(Call::shell("for i in $(seq 100); do echo $i > f$i; done"))
            .await
            .map_err(environment)?;
        let started = Instant::now();
        sandbox.reset().await.map_err(environment)?;
        resets.push(started.elapsed());
    }
    line("tool_call_p50_ms", median(calls), "ms", "fork+exec", bare)?;
    line(
        "reset_100_files_p50_ms",
        median(resets),
        "ms",
        "sandbox_create",
        create,
    )?;
    drop(sandbox);

    let dir = absolute(&context.pipeline.dir("bench"))?;
    let _ = fs_err::remove_dir_all(&dir);
    fs_err::create_dir_all(&dir).map_err(|e| output(&dir, &e))?;
    let lake = Lake::open(&dir.join("lake"))
        .await
        .map_err(|e| Failure::from_error(OUTPUT, &e))?;
    let options = RolloutOptions {
        concurrency: 16,
        ..RolloutOptions::new(
            RunId::from("bench"),
            "2026-01-01",
            Purpose::Train,
            tasks(&context.pipeline, Split::Train, EPISODES, 1)?,
            Policy::expert(0.5),
            dir.join("journal"),
        )
    };
    let summary = rollout(options, &lake, &pool, &Silent)
        .await
        .map_err(|e| Failure::from_error(ENVIRONMENT, &e))?;
    // Three calls' worth of bare processes is the least an episode could cost on one core.
    line(
        "scripted_episodes_per_second",
        summary.done as f64 / summary.wall_s,
        "1/s",
        "bare processes, three an episode",
        1000.0 / (3.0 * bare),
    )?;
    let (written, plain) = writer(&lake, &dir).await?;
    line(
        "writer_steps_per_second",
        written,
        "1/s",
        "the same rows as JSON lines, synced once",
        plain,
    )?;
    let text = conversations(&lake, &RunId::from("bench"), EPISODES).await?;
    let single = train(context, &dir, &text, 1).await?;
    let double = train(context, &dir, &text, 2).await?;
    line(
        "training_tokens_per_second",
        double,
        "1/s",
        "one thread",
        single,
    )?;
    let _ = fs_err::remove_dir_all(&dir);
    Ok(OK)
}

/// Steps a second from finished episodes to committed tables, through journal, queue and batches; and the same rows into a plain file.
async fn writer(lake: &Lake, dir: &Utf8Path) -> Result<(f64, f64), Failure> {
    let failed = |e: drillyard_lake::LakeError| Failure::from_error(OUTPUT, &e);
    let bundles = bundles(lake).await.map_err(failed)?;
    let steps: usize = bundles.iter().map(|b| b.steps.len()).sum();

    let path = dir.join("plain.jsonl");
    let started = Instant::now();
    let mut text = Vec::new();
    for bundle in &bundles {
        serde_json::to_writer(&mut text, bundle).map_err(|e| Failure::new(OUTPUT, e))?;
        text.push(b'\n');
    }
    fs_err::write(&path, &text)
        .and_then(|()| fs_err::File::open(&path)?.sync_all())
        .map_err(|e| output(&path, &e))?;
    let plain = started.elapsed();

    let copy = Lake::open(&dir.join("copy")).await.map_err(failed)?;
    let options = WriterOptions::new(dir.join("copy-journal"), "bench", "0");
    let (writer, _) = Writer::start(copy, options).await.map_err(failed)?;
    let started = Instant::now();
    for bundle in bundles {
        writer.submit(bundle).await.map_err(failed)?;
    }
    writer.finish().await.map_err(failed)?;
    let rate = |took: Duration| steps as f64 / took.as_secs_f64();
    Ok((rate(started.elapsed()), rate(plain)))
}

/// The episodes of a lake, each with its rows.
async fn bundles(lake: &Lake) -> Result<Vec<EpisodeBundle>, drillyard_lake::LakeError> {
    fn by_episode<R>(rows: Vec<R>, id: impl Fn(&R) -> &EpisodeId) -> BTreeMap<EpisodeId, Vec<R>> {
        let mut groups = BTreeMap::<_, Vec<R>>::new();
        for row in rows {
            groups.entry(id(&row).clone()).or_default().push(row);
        }
        groups
    }
    let snapshot = lake.snapshot().await?;
    let all = Filter::default();
    let tasks: Vec<TaskRow> = snapshot.read(&all).await?;
    let tasks: BTreeMap<_, _> = tasks.into_iter().map(|t| (t.task_id.clone(), t)).collect();
    let mut messages = by_episode::<MessageRow>(snapshot.read(&all).await?, |r| &r.episode_id);
    let mut steps = by_episode::<StepRow>(snapshot.read(&all).await?, |r| &r.episode_id);
    let mut calls = by_episode::<ToolCallRow>(snapshot.read(&all).await?, |r| &r.episode_id);
    let mut tokens = by_episode::<TokenRow>(snapshot.read(&all).await?, |r| &r.episode_id);
    let mut verdicts = by_episode::<VerdictRow>(snapshot.read(&all).await?, |r| &r.episode_id);
    let mut rewards = by_episode::<RewardRow>(snapshot.read(&all).await?, |r| &r.episode_id);
    let episodes: Vec<EpisodeRow> = snapshot.read(&all).await?;
    Ok(episodes
        .into_iter()
        .filter_map(|episode| {
            let id = &episode.episode_id;
            Some(EpisodeBundle {
                task: tasks.get(&episode.task_id)?.clone(),
                messages: messages.remove(id).unwrap_or_default(),
                steps: steps.remove(id).unwrap_or_default(),
                tool_calls: calls.remove(id).unwrap_or_default(),
                tokens: tokens.remove(id).unwrap_or_default(),
                verdicts: verdicts.remove(id).unwrap_or_default(),
                rewards: rewards.remove(id).unwrap_or_default(),
                episode,
            })
        })
        .collect())
}

/// Tokens a second of one epoch of imitation on the scripted episodes, from the pipeline's checkpoint.
async fn train(
    context: &Context,
    dir: &Utf8Path,
    text: &str,
    threads: usize,
) -> Result<f64, Failure> {
    let out = |name: &str| dir.join(format!("{name}-{threads}"));
    let (conversations, config) = (out("conversations"), out("config"));
    fs_err::write(&conversations, text).map_err(|e| output(&conversations, &e))?;
    let toolset = toolset(&tasks(&context.pipeline, Split::Train, 1, 0)?)?;
    let settings = json!({
        "method": "imitation",
        "init": model_dir(&context.pipeline.policy.model)?,
        "output": out("checkpoint"),
        "conversations": conversations,
        "toolsets": { "*": toolset.specs },
        "threads": threads,
        "hyper": { "epochs": 1, "batch_tokens": 8192, "micro_tokens": 8192, "select": "all", "learning_rate": 1e-4 },
    });
    fs_err::write(&config, settings.to_string()).map_err(|e| output(&config, &e))?;
    let program = torch_program()?;
    let ended = tokio::process::Command::new(&program)
        .args(["train", "--quiet", "--config", config.as_str()])
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|e| Failure::io(&program, &e))?;
    let figures: Value = serde_json::from_slice(&ended.stdout).map_err(|e| {
        Failure::new(
            ENVIRONMENT,
            format!(
                "{program} gave no figures ({e}): {}",
                String::from_utf8_lossy(&ended.stderr)
            ),
        )
    })?;
    Ok(figures["tokens_per_second"].as_f64().unwrap_or_default())
}

/// Median time of a bubblewrap sandbox around /bin/true, where it is installed.
fn bubblewrap() -> Option<f64> {
    let mut samples = Vec::new();
    for _ in 0..REPEATS / 4 {
        let started = Instant::now();
        let status = Command::new("bwrap")
            .args([
                "--unshare-all",
                "--ro-bind",
                "/",
                "/",
                "--proc",
                "/proc",
                "--dev",
                "/dev",
                "/bin/true",
            ])
            .status()
            .ok()?;
        if !status.success() {
            return None;
        }
        samples.push(started.elapsed());
    }
    Some(median(samples))
}
