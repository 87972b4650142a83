//! How many steps a second the writer takes from finished episodes to committed tables.
//!
//! `cargo run -p drillyard-lake --example writer_throughput [EPISODES] [STEPS]`: that many made-up episodes of that many steps (4,000
//! of 3), with messages, calls and tokens as long as a small model's, go through journal, queue and batches into a lake in a temporary
//! folder. Half of a batch's tables hold one row per step. Prints one JSON line.

use std::io::Write;
use std::time::{Duration, Instant};

use camino::Utf8PathBuf;
use drillyard_lake::{EpisodeBundle, Lake, Writer, WriterOptions};
use drillyard_schema::RunId;
use drillyard_schema::table::{
    EpisodeRow, LossSpan, MessageRow, RewardRow, StepRow, TaskRow, Timestamp, TokenRow,
    ToolCallRow, VerdictRow,
};

const DAY: &str = "2026-01-02";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<usize>());
    let episodes = arguments.next().transpose()?.unwrap_or(4000);
    let steps = arguments.next().transpose()?.unwrap_or(3);
    let folder = tempfile::tempdir()?;
    let dir = Utf8PathBuf::from_path_buf(folder.path().to_owned())
        .map_err(|p| format!("{} is not UTF-8", p.display()))?;
    let lake = Lake::open(&dir.join("lake")).await?;
    let (writer, _) = Writer::start(
        lake.clone(),
        WriterOptions::new(dir.join("journal"), "run", "0"),
    )
    .await?;

    let bundles: Vec<EpisodeBundle> = (0..episodes).map(|n| bundle(n, steps)).collect();
    let begin = Instant::now();
    let mut waits: Vec<Duration> = Vec::with_capacity(episodes);
    for bundle in bundles {
        let asked = Instant::now();
        writer.submit(bundle).await?;
        waits.push(asked.elapsed());
    }
    let report = writer.finish().await?;
    let seconds = begin.elapsed().as_secs_f64();

    waits.sort_unstable();
    let snapshot = lake.snapshot().await?;
    let bytes: i64 = drillyard_schema::Table::ALL
        .iter()
        .flat_map(|t| snapshot.files(*t))
        .map(|f| f.bytes)
        .sum();
    let line = serde_json::json!({
        "episodes": report.episodes,
        "steps": report.steps,
        "batches": report.batches,
        "seconds": seconds,
        "steps_per_second": report.steps as f64 / seconds,
        "episodes_per_second": report.episodes as f64 / seconds,
        "submit_median_us": waits[waits.len() / 2].as_micros() as u64,
        "submit_p99_us": waits[waits.len() * 99 / 100].as_micros() as u64,
        "bytes_per_step": bytes as f64 / report.steps as f64,
    });
    writeln!(std::io::stdout(), "{line}")?;
    Ok(())
}

fn bundle(n: usize, steps: usize) -> EpisodeBundle {
    let (run, purpose) = (RunId::from("run"), "train".to_owned());
    let id = format!("{n:032x}");
    let task_id = format!("wrangle/filter/{:012x}", n / 8);
    let command = format!("awk -F, '$2 > {n} {{ print $1 }}' kafo.csv | sort -u > mire.txt");
    let step = |i: usize| StepRow {
        run_date: DAY.into(),
        purpose: purpose.clone(),
        run_id: run.clone(),
        episode_id: id.clone().into(),
        step_index: i as i32,
        role: "agent".into(),
        history_hash: format!("{:032x}", n * 31 + i),
        raw_text: format!(
            r#"<tool_call>{{"name":"execute_shell","arguments":{{"command":"{command}"}}}}</tool_call>"#
        ),
        reasoning: None,
        finish_reason: Some("stop".into()),
        parse_status: "ok".into(),
        parse_error: None,
        n_calls: 1,
        milestone: None,
        temperature: 1.0,
        prompt_tokens: Some(300),
        generated_tokens: Some(60),
        generation_us: 20_000 + (n % 977) as i64,
        started_at: Timestamp(1_767_312_000_000_000 + (n * 1000 + i) as i64),
        extras: None,
    };
    let call = |i: usize| ToolCallRow {
        run_date: DAY.into(),
        purpose: purpose.clone(),
        run_id: run.clone(),
        episode_id: id.clone().into(),
        step_index: i as i32,
        call_index: 0,
        call_id: format!("call_{n}_{i}"),
        tool: "execute_shell".into(),
        arguments: format!(r#"{{"command":"{command}"}}"#),
        call_hash: format!("{:032x}", n * 17 + i),
        schema_ok: true,
        schema_error: None,
        outcome: "ok".into(),
        exit_code: Some(0),
        signal: None,
        stdout: format!("name,size\nkafo,{n}\nmire,{i}\n").repeat(8),
        stderr: String::new(),
        stdout_bytes: 200,
        stderr_bytes: 0,
        truncated: false,
        wall_us: 9000 + (n % 613) as i64,
        cpu_us: Some(4000),
        peak_memory_bytes: Some(4 << 20),
        read_bytes: Some(4096),
        written_bytes: Some(100),
        files_changed: vec![],
        fault_injected: None,
        state_lost: false,
        started_at: Timestamp(1_767_312_000_000_000 + n as i64),
        extras: None,
    };
    let token = |i: usize| TokenRow {
        run_date: DAY.into(),
        purpose: purpose.clone(),
        run_id: run.clone(),
        episode_id: id.clone().into(),
        step_index: i as i32,
        kept_prefix: 300 * i as i32,
        context_ids: (0..if i == 0 { 250 } else { 60 })
            .map(|t| ((t * 7919 + n) % 600) as i32)
            .collect(),
        generated_ids: (0..60).map(|t| ((t * 104_729 + n) % 600) as i32).collect(),
        logprobs: (0..60).map(|t| -((t * n % 1000) as f32) / 997.0).collect(),
        loss_spans: vec![
            LossSpan {
                start: 0,
                end: 12,
                kind: "action_format".into(),
            },
            LossSpan {
                start: 12,
                end: 60,
                kind: "action".into(),
            },
        ],
        tokenizer_hash: "tokenizer".into(),
        template_hash: "template".into(),
    };
    let message = |i: usize| MessageRow {
        run_date: DAY.into(),
        purpose: purpose.clone(),
        run_id: run.clone(),
        episode_id: id.clone().into(),
        message_index: i as i32,
        step_index: i.checked_sub(2).map(|s| s as i32 / 2),
        role: ["system", "user", "assistant", "tool"][if i < 2 { i } else { 2 + i % 2 }].into(),
        name: None,
        content: Some(format!("{command}\n{n} {i}\n").repeat(3)),
        tool_calls: None,
        tool_call_id: None,
        extras: None,
    };
    EpisodeBundle {
        task: TaskRow {
            run_date: DAY.into(),
            purpose: purpose.clone(),
            run_id: run.clone(),
            task_id: task_id.clone().into(),
            task_set: "wrangle".into(),
            task_set_version: "1".into(),
            family: "filter".into(),
            difficulty: Some(1),
            split: Some("train".into()),
            unseen_family: false,
            instruction: "Keep the rows of kafo.csv whose size is above 7.".into(),
            verifier: Some("{}".into()),
            milestones: None,
            evaluation_set: false,
            source: "generated".into(),
            licence: "Apache-2.0".into(),
        },
        episode: EpisodeRow {
            run_date: DAY.into(),
            purpose: purpose.clone(),
            run_id: run.clone(),
            episode_id: id.clone().into(),
            group_id: format!("{:032x}", n / 8).into(),
            task_id: task_id.into(),
            task_set: "wrangle".into(),
            family: "filter".into(),
            split: Some("train".into()),
            status: "finished".into(),
            end_reason: "submitted".into(),
            infrastructure_cause: None,
            policy: "base".into(),
            policy_revision: "0".repeat(32),
            sample_index: (n % 8) as i32,
            attempt: 0,
            temperature: 1.0,
            n_steps: steps as i32,
            n_tool_calls: steps as i32,
            n_parse_errors: 0,
            n_repaired: 0,
            prompt_tokens: 900,
            generated_tokens: 180,
            wall_us: 100_000,
            model_us: 60_000,
            tool_us: 27_000,
            cpu_us: Some(12_000),
            peak_memory_bytes: Some(4 << 20),
            started_at: Timestamp(1_767_312_000_000_000 + n as i64),
            ended_at: Timestamp(1_767_312_000_100_000 + n as i64),
            parent_episode_id: None,
            claimed_success: Some(true),
            claim: Some("done".into()),
            prompt_hash: "p".into(),
            sampling: r#"{"temperature":1.0}"#.into(),
            toolset_version: "1".into(),
            toolset_hash: "t".into(),
            parser_version: "1".into(),
            sandbox_image: "host".into(),
            drillyard_version: "0".into(),
            limits: None,
            artifacts: vec![],
            n_injected_faults: 0,
            n_state_lost: 0,
            imported_from: None,
            evaluation_set: false,
            extras: None,
        },
        messages: (0..2 + 2 * steps).map(message).collect(),
        steps: (0..steps).map(step).collect(),
        tool_calls: (0..steps).map(call).collect(),
        tokens: (0..steps).map(token).collect(),
        verdicts: vec![VerdictRow {
            run_date: DAY.into(),
            purpose: purpose.clone(),
            run_id: run.clone(),
            episode_id: id.clone().into(),
            kind: "verified".into(),
            verifier: "wrangle".into(),
            verifier_version: "1".into(),
            success: Some(n.is_multiple_of(2)),
            score: None,
            detail: None,
            decided_at: Timestamp(1_767_312_000_100_000),
        }],
        rewards: vec![RewardRow {
            run_date: DAY.into(),
            purpose,
            run_id: run,
            episode_id: id.into(),
            step_index: None,
            scheme: "wrangle".into(),
            scheme_version: "1".into(),
            component: "outcome".into(),
            value: (n % 2) as f64,
        }],
    }
}
