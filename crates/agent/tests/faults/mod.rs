//! Controlled faults: each kind really takes place, is recorded, comes again after a crash, and is never infrastructure.

use drillyard_agent::Point;
use drillyard_sandbox::{FaultKind, FaultPlan, FaultRule, Limits, SandboxConfig};
use drillyard_schema::RunId;
use drillyard_schema::table::{EpisodeRow, MessageRow, RewardRow, ToolCallRow};
use drillyard_testkit::{Answer, FakeEndpoint};
use serde_json::{Value, json};

use super::{Folder, Yard, component, crash_options, crash_with, policy, shell, submit, tasks};

/// Every call of `tools` meets this kind.
fn always(kind: FaultKind, tools: &[&str]) -> FaultPlan {
    plan(&[(kind, 1.0)], tools)
}

pub fn plan(rates: &[(FaultKind, f64)], tools: &[&str]) -> FaultPlan {
    let tools: Vec<String> = tools.iter().map(|&tool| tool.to_owned()).collect();
    let rules = rates.iter().map(|&(kind, rate)| FaultRule {
        kind,
        rate,
        tools: tools.clone(),
    });
    FaultPlan::new(rules).unwrap()
}

/// One episode of these calls and `submit`, with faults.
async fn one(
    yard: &Yard,
    name: &str,
    faults: FaultPlan,
    calls: &[(&str, Value)],
) -> Vec<ToolCallRow> {
    let script: Vec<(String, Value)> = calls
        .iter()
        .map(|(tool, arguments)| ((*tool).to_owned(), arguments.clone()))
        .collect();
    let endpoint = FakeEndpoint::start(move |request| match script.get(request.turn) {
        Some((tool, arguments)) => Answer::call(tool, arguments),
        None => submit(),
    })
    .await
    .unwrap();
    let mut options = yard.options(tasks(1), policy(&endpoint));
    options.run_id = RunId::from(name);
    options.max_steps = 10;
    options.faults = faults;
    let summary = yard.run(options).await.unwrap();
    assert_eq!(
        (summary.scored, summary.infrastructure),
        (1, 0),
        "{name}: {summary:?}"
    );
    let mut rows = yard.rows::<ToolCallRow>().await;
    rows.retain(|row| row.run_id.as_str() == name);
    let episodes = yard.rows::<EpisodeRow>().await;
    let episode = episodes
        .iter()
        .find(|row| row.run_id.as_str() == name)
        .unwrap();
    let met = rows.iter().filter(|row| row.fault_injected.is_some());
    assert_eq!(episode.n_injected_faults as usize, met.count(), "{name}");
    rows
}

async fn shown(yard: &Yard, name: &str) -> Vec<String> {
    yard.rows::<MessageRow>()
        .await
        .into_iter()
        .filter(|row| row.run_id.as_str() == name && row.role == "tool")
        .map(|row| row.content.unwrap())
        .collect()
}

fn sh(command: &str) -> (&'static str, Value) {
    ("execute_shell", json!({ "command": command }))
}

fn write(path: &str, content: &str) -> (&'static str, Value) {
    ("write_file", json!({ "path": path, "content": content }))
}

fn labels(rows: &[ToolCallRow]) -> Vec<Option<&str>> {
    rows.iter()
        .map(|row| row.fault_injected.as_deref())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_calls_do_nothing_and_may_be_tried_again() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    for (kind, code, words) in [
        (FaultKind::PermissionDenied, 126, "touch: Permission denied"),
        (FaultKind::NetworkFailure, 255, "connection reset by peer"),
    ] {
        let name = kind.as_str();
        let calls = [sh("touch made"), sh("touch made"), ("list_dir", json!({}))];
        let rows = one(&yard, name, always(kind, &["execute_shell"]), &calls).await;
        assert_eq!(labels(&rows), [Some(name), Some(name), None, None]);
        assert_eq!(
            (rows[0].outcome.as_str(), rows[0].exit_code),
            ("error", Some(code))
        );
        assert!(rows[0].stderr.contains(words), "{}", rows[0].stderr);
        assert!(!rows[2].stdout.contains("made"), "{}", rows[2].stdout);
        assert!(shown(&yard, name).await[0].contains(words));
    }
    // Trying again what a fault spoilt is no repetition, and no violation.
    let rewards = yard.rows::<RewardRow>().await;
    assert!(component(&rewards, "repeat").is_empty());
    assert!(component(&rewards, "violation").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_call_takes_longer_and_works() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let faults = always(FaultKind::Slow, &["execute_shell"]);
    let rows = one(&yard, "slow", faults, &[sh("echo done")]).await;
    assert_eq!(labels(&rows), [Some("slow"), None]);
    assert_eq!(rows[0].stdout, "done\n");
    assert!(rows[0].wall_us >= 1_000_000, "{}", rows[0].wall_us);
    let extras: Value = serde_json::from_str(rows[0].extras.as_deref().unwrap()).unwrap();
    let delay = extras["fault"]["delay_us"].as_i64().unwrap();
    assert!((1_000_000..=2_000_000).contains(&delay));
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_else_changes_what_the_agent_wrote() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let calls = [
        write("out.txt", "one\ntwo\n"),
        sh("cat out.txt; ls"),
        sh("cat out.txt"),
    ];
    let faults = always(FaultKind::ConcurrentChange, &["execute_shell"]);
    let rows = one(&yard, "concurrent", faults, &calls).await;
    let label = Some("concurrent_change");
    assert_eq!(labels(&rows), [None, label, label, None]);
    assert!(
        rows[1].stdout.starts_with("one\ntwo\ntwo\n"),
        "{}",
        rows[1].stdout
    );
    assert_eq!(rows[2].stdout, "one\ntwo\ntwo\ntwo\n");
    // It is the agent's doing in no row.
    assert!(rows[1].files_changed.is_empty() && rows[2].files_changed.is_empty());
    // Where the agent has written nothing, there is one more file; inputs stay as they are.
    let faults = always(FaultKind::ConcurrentChange, &["execute_shell"]);
    let rows = one(&yard, "stray", faults, &[sh("cat notes.txt")]).await;
    assert_eq!(rows[0].stdout, "written by another process\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_output_is_whole_in_the_lake() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let faults = always(FaultKind::TruncatedOutput, &["execute_shell"]);
    let calls = [sh("seq 1 300"), sh("true")];
    let rows = one(&yard, "truncated", faults, &calls).await;
    // Of no output nothing can be cut.
    assert_eq!(labels(&rows), [Some("truncated_output"), None, None]);
    let whole: String = (1..=300).map(|n| n.to_string() + "\n").collect();
    assert_eq!(
        (rows[0].stdout.as_str(), rows[0].truncated),
        (whole.as_str(), true)
    );
    let seen = &shown(&yard, "truncated").await[0];
    assert!(whole.starts_with(seen.as_str()), "{seen}");
    assert!((whole.len() / 5 - 2..=whole.len() * 4 / 5).contains(&seen.len()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_full_for_one_call() {
    let config = SandboxConfig {
        limits: Limits {
            disk_bytes: 8 << 20,
            memory_bytes: 256 << 20,
            ..Limits::default()
        },
        ..SandboxConfig::default()
    };
    let Some(yard) = Yard::open_with(config).await else {
        return;
    };
    let text = "x".repeat(40_000);
    let calls = [
        write("a.txt", &text),
        sh("head -c 4000000 /dev/zero > b && wc -c < b; ls -A /dev/shm"),
    ];
    let faults = always(FaultKind::DiskFull, &["write_file"]);
    let rows = one(&yard, "full", faults, &calls).await;
    assert_eq!(labels(&rows), [Some("disk_full"), None, None]);
    assert_eq!(rows[0].outcome, "disk", "{:?}", rows[0]);
    assert!(
        rows[0].stderr.contains("No space left"),
        "{}",
        rows[0].stderr
    );
    // The space is free again, and what filled it is gone.
    assert_eq!(rows[1].stdout, "4000000\n");
    assert!(!rows[0].state_lost);
    let rewards = yard.rows::<RewardRow>().await;
    assert!(component(&rewards, "violation").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_full_everywhere_and_no_violation_whatever_comes_of_it() {
    let limits = Limits {
        disk_bytes: 16 << 20,
        memory_bytes: 256 << 20,
        output_bytes: 1 << 20,
        ..Limits::default()
    };
    let local = SandboxConfig {
        limits,
        ..SandboxConfig::default()
    };
    let docker = SandboxConfig {
        backend: "docker".to_owned(),
        ..local.clone()
    };
    let has_engine = std::env::var("DOCKER_HOST").is_ok_and(|host| !host.is_empty());
    for config in std::iter::once(local).chain(has_engine.then_some(docker)) {
        let backend = config.backend.clone();
        let Some(yard) = Yard::open_with(config).await else {
            continue;
        };
        let calls = [
            sh("for d in /work /tmp /dev/shm; do head -c 20000 /dev/zero > $d/x && echo $d; done"),
            sh("grep nothing /etc/passwd"),
            sh("yes"),
            ("list_dir", json!({})),
        ];
        let faults = always(FaultKind::DiskFull, &["execute_shell"]);
        let rows = one(&yard, "full", faults, &calls).await;
        let outcomes: Vec<&str> = rows.iter().map(|row| row.outcome.as_str()).collect();
        assert_eq!(
            outcomes,
            ["disk", "error", "output_limit", "ok", "ok"],
            "{backend}"
        );
        assert_eq!(rows[0].stdout, "", "{backend}: there was room");
        assert!(
            !rows[3].stdout.contains("other-process"),
            "{}",
            rows[3].stdout
        );
        let rewards = yard.rows::<RewardRow>().await;
        assert!(component(&rewards, "violation").is_empty(), "{backend}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_finds_no_room_does_not_take_place() {
    let config = SandboxConfig {
        limits: Limits {
            disk_bytes: 8 << 20,
            memory_bytes: 256 << 20,
            ..Limits::default()
        },
        ..SandboxConfig::default()
    };
    let Some(yard) = Yard::open_with(config).await else {
        return;
    };
    let text = "line\n".repeat(8000);
    let read = ("read_file", json!({ "path": "out.txt" }));
    let calls = [
        write("out.txt", &text),
        sh("cat /dev/zero > big 2>/dev/null; true"),
        read.clone(),
        sh("rm big"),
        read,
    ];
    let faults = always(FaultKind::ConcurrentChange, &["read_file"]);
    let rows = one(&yard, "no-room", faults, &calls).await;
    let label = Some("concurrent_change");
    assert_eq!(labels(&rows), [None, None, None, None, label, None]);
    assert_eq!(rows[2].outcome, "ok", "{:?}", rows[2]);
    // What the agent wrote is as it was; where there is room the change is made.
    assert_eq!(rows[2].stdout, text);
    assert_eq!(rows[4].stdout, format!("{text}line\n"));
    let settled = |row: &ToolCallRow| -> Value {
        let extras: Value = serde_json::from_str(row.extras.as_deref().unwrap()).unwrap();
        extras["fault"]["applied"].clone()
    };
    assert_eq!(
        (settled(&rows[2]), settled(&rows[4])),
        (false.into(), Value::Null)
    );
}

/// Some of most kinds, none of them slow.
pub fn mixed() -> FaultPlan {
    plan(
        &[
            (FaultKind::PermissionDenied, 0.2),
            (FaultKind::NetworkFailure, 0.2),
            (FaultKind::ConcurrentChange, 0.25),
            (FaultKind::TruncatedOutput, 0.25),
        ],
        &["execute_shell"],
    )
}

/// Which call met which fault, and how.
fn schedule(rows: &[ToolCallRow]) -> Vec<(i32, Option<String>, Value)> {
    rows.iter()
        .map(|row| {
            let extras = row.extras.as_deref().unwrap_or("{}");
            let extras: Value = serde_json::from_str(extras).unwrap();
            let fault = row.fault_injected.clone();
            (row.step_index, fault, extras["fault"].clone())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_episode_meets_the_faults_it_would_have_met() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        turn @ 0..=4 => shell(&format!("echo {turn} >> log; seq 1 40; cat log")),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    let run = async |crashes: &[u64]| {
        let yard = Yard {
            dir: Folder::Ours(tempfile::tempdir().unwrap()),
            pool: yard.pool.clone(),
        };
        for nth in crashes {
            crash_with(&yard, Some(&url), Point::ResultLogged, *nth, true).await;
        }
        let mut options = crash_options(&yard, Some(&url));
        options.faults = mixed();
        let summary = yard.run(options).await.unwrap();
        assert_eq!(
            (summary.done, summary.infrastructure),
            (1, 0),
            "{summary:?}"
        );
        let seen: Vec<Option<String>> = yard
            .rows::<MessageRow>()
            .await
            .into_iter()
            .map(|row| row.content)
            .collect();
        (schedule(&yard.rows::<ToolCallRow>().await), seen)
    };
    let whole = run(&[]).await;
    let met = whole.0.iter().filter(|call| call.1.is_some()).count();
    assert!((2..=5).contains(&met), "{:?}", whole.0);
    // Killed twice: after the second call, and after the second one from there.
    assert_eq!(run(&[2, 2]).await, whole);
}
