//! Rows made from a number: equal for equal numbers, different for different ones, with nulls, nesting and odd values among them.

use drillyard_schema::table::{
    Artifact, EpisodeRow, FileChange, LossSpan, MessageRow, RewardRow, StepRow, TaskRow, Timestamp,
    TokenRow, ToolCallRow, VerdictRow,
};
use drillyard_schema::{EpisodeId, RunId};

use crate::EpisodeBundle;

pub const RUN: &str = "run-1";
const DAY: &str = "2026-01-02";

pub fn id(n: usize) -> EpisodeId {
    EpisodeId(format!("episode-{n:04}"))
}

/// Episode `n`, one of two of its task, for training.
pub fn bundle(n: usize) -> EpisodeBundle {
    bundle_for(n, "train")
}

pub fn bundle_for(n: usize, purpose: &str) -> EpisodeBundle {
    let steps = 1 + n % 3;
    EpisodeBundle {
        task: task(n / 2, purpose),
        episode: episode(n, purpose),
        messages: (0..2 * steps).map(|i| message(n, i, purpose)).collect(),
        steps: (0..steps).map(|i| step(n, i, purpose)).collect(),
        tool_calls: (0..steps).map(|i| tool_call(n, i, purpose)).collect(),
        tokens: (0..steps).map(|i| token(n, i, purpose)).collect(),
        verdicts: vec![verdict(n, purpose)],
        rewards: (0..=steps)
            .map(|i| reward(n, i.checked_sub(1), purpose))
            .collect(),
    }
}

fn run() -> RunId {
    RunId::from(RUN)
}

/// Every other number.
fn some<T>(n: usize, value: T) -> Option<T> {
    n.is_multiple_of(2).then_some(value)
}

fn task(n: usize, purpose: &str) -> TaskRow {
    TaskRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        task_id: format!("set/family/{n:04}").into(),
        task_set: "set".into(),
        task_set_version: "1".into(),
        family: "family".into(),
        difficulty: some(n, 2),
        split: some(n, "train".into()),
        unseen_family: n.is_multiple_of(3),
        instruction: format!("count the lines of «{n}»\nand \"submit\" ✓"),
        verifier: some(n, "{}".into()),
        milestones: some(n + 1, "[]".into()),
        evaluation_set: false,
        source: "test".into(),
        licence: "Apache-2.0".into(),
    }
}

fn episode(n: usize, purpose: &str) -> EpisodeRow {
    EpisodeRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        episode_id: id(n),
        group_id: format!("group-{}", n / 2).into(),
        task_id: format!("set/family/{:04}", n / 2).into(),
        task_set: "set".into(),
        family: "family".into(),
        split: some(n, "train".into()),
        status: "finished".into(),
        end_reason: "submitted".into(),
        infrastructure_cause: None,
        policy: "p".into(),
        policy_revision: "r".into(),
        sample_index: (n % 2) as i32,
        attempt: 0,
        temperature: 0.1 + n as f64 / 3.0,
        n_steps: (1 + n % 3) as i32,
        n_tool_calls: (1 + n % 3) as i32,
        n_parse_errors: 0,
        n_repaired: 0,
        prompt_tokens: i64::MAX,
        generated_tokens: i64::MIN,
        wall_us: 10,
        model_us: 5,
        tool_us: 5,
        cpu_us: some(n, 3),
        peak_memory_bytes: some(n + 1, 1 << 40),
        started_at: Timestamp(1_767_312_000_000_001 + n as i64),
        ended_at: Timestamp(-1),
        parent_episode_id: some(n, id(n + 1)),
        claimed_success: some(n, true),
        claim: some(n, String::new()),
        prompt_hash: "h".into(),
        sampling: "{}".into(),
        toolset_version: "1".into(),
        toolset_hash: "t".into(),
        parser_version: "1".into(),
        sandbox_image: "host".into(),
        drillyard_version: "0".into(),
        limits: None,
        artifacts: (0..n % 3)
            .map(|i| Artifact {
                path: format!("out/{i}"),
                uri: "file:///a".into(),
                blake3: "b".into(),
                size_bytes: i as i64,
            })
            .collect(),
        n_injected_faults: 0,
        n_state_lost: 0,
        imported_from: None,
        evaluation_set: false,
        extras: some(n, r#"{"a":[1,null]}"#.into()),
    }
}

fn message(n: usize, index: usize, purpose: &str) -> MessageRow {
    MessageRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        episode_id: id(n),
        message_index: index as i32,
        step_index: index.checked_sub(1).map(|i| i as i32),
        role: "assistant".into(),
        name: None,
        content: some(index, "text\0with\ttabs".into()),
        tool_calls: some(index + 1, "[]".into()),
        tool_call_id: None,
        extras: None,
    }
}

fn step(n: usize, index: usize, purpose: &str) -> StepRow {
    StepRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        episode_id: id(n),
        step_index: index as i32,
        role: "agent".into(),
        history_hash: "h".into(),
        raw_text: format!("<tool_call>{n}</tool_call>"),
        reasoning: some(n, "because".into()),
        finish_reason: Some("stop".into()),
        parse_status: "ok".into(),
        parse_error: None,
        n_calls: 1,
        milestone: None,
        temperature: 1.0,
        prompt_tokens: some(n, 7),
        generated_tokens: some(n + 1, 3),
        generation_us: 1,
        started_at: Timestamp(index as i64),
        extras: None,
    }
}

fn tool_call(n: usize, index: usize, purpose: &str) -> ToolCallRow {
    let change = |i: usize| FileChange {
        path: format!("data/{i}.csv"),
        change: "modified".into(),
        before_hash: some(i, "b".into()),
        after_hash: some(i + 1, "a".into()),
        size_bytes: i as i64,
    };
    ToolCallRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        episode_id: id(n),
        step_index: index as i32,
        call_index: 0,
        call_id: format!("call-{index}"),
        tool: "execute_shell".into(),
        arguments: r#"{"command":"wc -l kafo.csv"}"#.into(),
        call_hash: "h".into(),
        schema_ok: true,
        schema_error: None,
        outcome: "ok".into(),
        exit_code: some(n, 0),
        signal: some(n + 1, 9),
        stdout: "12 kafo.csv\n".into(),
        stderr: String::new(),
        stdout_bytes: 12,
        stderr_bytes: 0,
        truncated: false,
        wall_us: 100,
        cpu_us: None,
        peak_memory_bytes: None,
        read_bytes: None,
        written_bytes: None,
        files_changed: (0..index).map(change).collect(),
        fault_injected: None,
        state_lost: false,
        started_at: Timestamp(5),
        extras: None,
    }
}

fn token(n: usize, index: usize, purpose: &str) -> TokenRow {
    TokenRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        episode_id: id(n),
        step_index: index as i32,
        kept_prefix: 0,
        context_ids: (0..n as i32).collect(),
        generated_ids: vec![n as i32, -1, i32::MAX],
        logprobs: vec![-0.1 / (1 + n) as f32, f32::NEG_INFINITY, -f32::MIN_POSITIVE],
        loss_spans: vec![LossSpan {
            start: 0,
            end: 3,
            kind: "action".into(),
        }],
        tokenizer_hash: "t".into(),
        template_hash: "h".into(),
    }
}

fn verdict(n: usize, purpose: &str) -> VerdictRow {
    VerdictRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        episode_id: id(n),
        kind: "verified".into(),
        verifier: "v".into(),
        verifier_version: "1".into(),
        success: some(n, n.is_multiple_of(4)),
        score: some(n, 1.0 / 3.0),
        detail: None,
        decided_at: Timestamp(3),
    }
}

fn reward(n: usize, step: Option<usize>, purpose: &str) -> RewardRow {
    RewardRow {
        run_date: DAY.into(),
        purpose: purpose.into(),
        run_id: run(),
        episode_id: id(n),
        step_index: step.map(|i| i as i32),
        scheme: "s".into(),
        scheme_version: "1".into(),
        component: "outcome".into(),
        value: 0.1 * n as f64,
    }
}
