//! Ends that are nobody's doing or the agent's own: faults of the sandbox, lost calls, files that can't be brought back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use drillyard_agent::{AgentError, Point, RolloutOptions};
use drillyard_sandbox::{Limits, SandboxConfig};
use drillyard_schema::table::{EpisodeRow, MessageRow, RewardRow, ToolCallRow};
use drillyard_testkit::{Answer, FakeEndpoint};
use serde_json::{Value, json};

use super::{
    Arc, CHILD, Policy, Yard, component, crash_at, crash_options, each_sample_scored_once, policy,
    shell, submit, tasks,
};

/// Sandboxes that can't be had use attempts up too, until the rollout ends.
const ATTEMPTS: u32 = 20;

/// This process' children that run sandboxes.
fn helpers() -> Vec<rustix::process::Pid> {
    let mut found = Vec::new();
    for thread in std::fs::read_dir("/proc/self/task").unwrap() {
        let children = thread.unwrap().path().join("children");
        for pid in std::fs::read_to_string(children)
            .unwrap()
            .split_whitespace()
        {
            found.extend(rustix::process::Pid::from_raw(pid.parse().unwrap()));
        }
    }
    found
}

/// Runs a rollout whose sandboxes all die when the intent of call number `calls` is logged. In a process of its own.
pub async fn die_in_their_hands(yard: &Yard, mut options: RolloutOptions, calls: u64) {
    options.concurrency = 8;
    options.samples = calls as u32;
    options.attempts = ATTEMPTS;
    let begun = AtomicU64::new(0);
    options.hold_at = Some(Arc::new(move |point, _| {
        if point == Point::IntentLogged && begun.fetch_add(1, Ordering::SeqCst) + 1 == calls {
            for helper in helpers() {
                rustix::process::kill_process(helper, rustix::process::Signal::KILL).unwrap();
            }
        }
        // A crash right after the first fault is on record.
        if point == Point::ResultLogged && calls == 1 {
            std::process::abort();
        }
        false
    }));
    let error = yard.run(options).await.unwrap_err();
    assert!(matches!(error, AgentError::SandboxGone { .. }), "{error:?}");
}

/// Runs [`die_in_their_hands`] with the options of [`crash_options`], or as many tasks as calls.
async fn sandboxes_die(yard: &Yard, endpoint: &str, calls: u64) {
    let told = json!({ "dir": yard.path(""), "endpoint": endpoint, "point": "", "nth": 0, "kill_at_call": calls });
    let output = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process", "--nocapture"])
        .env(CHILD, told.to_string())
        .output()
        .await
        .unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    let said = String::from_utf8_lossy(&output.stderr);
    let expected = if calls == 1 { Some(6) } else { None };
    assert_eq!(signal, expected, "{said}");
    assert!(calls == 1 || output.status.success(), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_the_sandbox_failed_is_on_record_and_ends_its_episode() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let deadly = Arc::new(AtomicBool::new(true));
    let still = deadly.clone();
    let endpoint = FakeEndpoint::start(move |request| match request.turn {
        0 if still.load(Ordering::SeqCst) => shell("sleep 25"),
        0 => shell("ls"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    // Eight at once, so that the last of them ends the rollout; or one, and a crash before the episode's end is on record.
    for (calls, samples) in [(8, 8), (1, 1)] {
        let yard = Yard {
            dir: super::Folder::Ours(tempfile::tempdir().unwrap()),
            pool: yard.pool.clone(),
        };
        deadly.store(true, Ordering::SeqCst);
        sandboxes_die(&yard, &url, calls).await;
        deadly.store(false, Ordering::SeqCst);
        let mut options = crash_options(&yard, Some(&url));
        options.samples = samples;
        options.attempts = ATTEMPTS;
        let summary = yard.run(options).await.unwrap();
        assert_eq!(
            (summary.left, summary.scored),
            (0, samples as usize),
            "{summary:?}"
        );
        let rows = yard.rows::<ToolCallRow>().await;
        let with = |outcome: &str| rows.iter().filter(|row| row.outcome == outcome).count();
        assert_eq!(
            (with("sandbox_fault"), with("outcome_unknown")),
            (calls as usize, 0),
            "{rows:?}"
        );
        let episodes = yard.rows::<EpisodeRow>().await;
        let failed = episodes.iter().filter(|row| row.status == "infrastructure");
        for episode in failed.clone() {
            assert_eq!(episode.end_reason, "sandbox_fault");
            assert!(
                episode
                    .infrastructure_cause
                    .as_deref()
                    .unwrap()
                    .contains("sandbox")
            );
        }
        assert!(failed.count() >= calls as usize);
        each_sample_scored_once(&yard, 1, samples as usize).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn checking_and_repeating_a_lost_call_costs_nothing() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 | 2 => shell("ls"),
        1 | 3 => shell("echo once >> log"),
        // Now it is a repetition.
        4 | 5 => shell("cat log"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    let longer = |mut options: RolloutOptions| {
        options.max_steps = 10;
        options
    };
    crash_at(&yard, Some(&url), Point::CallDone, 2).await;
    yard.run(longer(crash_options(&yard, Some(&url))))
        .await
        .unwrap();
    let rows = yard.rows::<ToolCallRow>().await;
    assert_eq!(rows[1].outcome, "outcome_unknown");
    let rewards = yard.rows::<RewardRow>().await;
    let repeats: Vec<_> = rewards
        .iter()
        .filter(|row| row.component == "repeat")
        .map(|row| row.step_index)
        .collect();
    assert_eq!(repeats, [Some(5)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_that_is_gone_is_no_lost_state() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("head -c 3000000 /dev/zero > big"),
        1 => shell("rm big"),
        2 => shell("ls"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    crash_at(&yard, Some(&url), Point::ResultLogged, 2).await;
    let summary = yard.run(crash_options(&yard, Some(&url))).await.unwrap();
    assert_eq!(
        (summary.scored, summary.infrastructure),
        (1, 0),
        "{summary:?}"
    );
    assert_eq!(yard.rows::<EpisodeRow>().await[0].n_state_lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_hides_no_other_loss() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("head -c 3000000 /dev/zero > big; touch $'\\xff'"),
        1 => shell("rm big"),
        2 => shell("ls"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    crash_at(&yard, Some(&url), Point::ResultLogged, 2).await;
    let summary = yard.run(crash_options(&yard, Some(&url))).await.unwrap();
    assert_eq!(
        (summary.scored, summary.infrastructure),
        (1, 1),
        "{summary:?}"
    );
    let episodes = yard.rows::<EpisodeRow>().await;
    let lost = episodes
        .iter()
        .find(|row| row.end_reason == "interrupted")
        .unwrap();
    assert_eq!(lost.n_state_lost, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_fit_no_fresh_sandbox_are_the_agents_own_doing() {
    let Some(large) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        turn @ 0..=3 => shell(&format!("head -c 900000 /dev/urandom > f{turn}")),
        4 => shell("ls"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    crash_at(&large, Some(&url), Point::ResultLogged, 4).await;
    let config = SandboxConfig {
        limits: Limits {
            disk_bytes: 2 << 20,
            memory_bytes: 256 << 20,
            ..Limits::default()
        },
        ..SandboxConfig::default()
    };
    let small = Yard {
        dir: super::Folder::Theirs(large.path("")),
        pool: Yard::open_with(config).await.unwrap().pool,
    };
    let summary = small.run(crash_options(&small, Some(&url))).await.unwrap();
    assert_eq!(
        (summary.scored, summary.infrastructure),
        (1, 0),
        "{summary:?}"
    );
    let rows = small.rows::<ToolCallRow>().await;
    assert_eq!(rows[4].outcome, "disk", "{:?}", rows[4]);
    let messages = small.rows::<MessageRow>().await;
    let told = messages
        .iter()
        .rfind(|row| row.step_index == Some(4))
        .unwrap();
    assert!(
        told.content.as_deref().unwrap().contains("don't fit"),
        "{told:?}"
    );
    assert_eq!(
        component(&small.rows::<RewardRow>().await, "violation"),
        [1.0]
    );
}

fn shell_for(command: &str, timeout_s: u32) -> Answer {
    let arguments = json!({ "command": command, "timeout_s": timeout_s });
    Answer::call("execute_shell", &arguments)
}

/// The notes of a call's row.
fn extras(row: &ToolCallRow) -> Value {
    serde_json::from_str(row.extras.as_deref().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_accounts_for_its_call() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("head -c 5000000 /dev/zero | cat > out; for i in {1..50000}; do :; done"),
        1 => shell("sleep 30 &"),
        2 => shell_for("trap '' TERM; sleep 30", 1),
        3 => shell_for("sleep 31", 1),
        4 => shell("kill -KILL $$"),
        5 => shell("yes"),
        _ => submit(),
    })
    .await
    .unwrap();
    let mut options = yard.options(tasks(1), policy(&endpoint));
    options.max_steps = 10;
    yard.run(options).await.unwrap();
    let rows = yard.rows::<ToolCallRow>().await;
    let why: Vec<String> = rows[..6]
        .iter()
        .map(|row| extras(row)["why"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(
        why,
        [
            "finished",
            "finished",
            "hard_timeout",
            "soft_timeout",
            "killed",
            "output"
        ]
    );
    let used = extras(&rows[0]);
    let number = |key: &str| used[key].as_u64();
    assert!(number("user_us").unwrap() > 1000, "{used}");
    assert!(
        number("system_us").is_some() && number("oom_kills") == Some(0),
        "{used}"
    );
    assert!(
        number("peak_process_memory_bytes").unwrap() > 1 << 20,
        "{used}"
    );
    assert_eq!(used["survivors"], false);
    assert_eq!(extras(&rows[1])["survivors"], true);
    // Counted where the kernel tells.
    if let Some(written) = number("io_written_bytes") {
        assert!(
            written >= 10_000_000 && number("io_read_bytes").unwrap() >= 5_000_000,
            "{used}"
        );
    }
    if let Some(processes) = number("processes") {
        assert!((3..10).contains(&processes), "{used}");
    }
    // A submission runs nothing.
    assert_eq!(rows[6].extras, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_tokenizers_ids_are_not_continued() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let drillyard = |endpoint: &FakeEndpoint, model: &str| {
        let config =
            drillyard_agent::OpenAiConfig::drillyard(&endpoint.address(), model, "fake-weights");
        Policy::openai(model, config).unwrap()
    };
    let script = |request: &drillyard_testkit::FakeRequest| match request.turn {
        0..=2 => shell("ls"),
        _ => submit(),
    };
    let endpoint = FakeEndpoint::start(script).await.unwrap();
    let parent_tasks = tasks(1);
    yard.run(yard.options(parent_tasks.clone(), drillyard(&endpoint, "fake")))
        .await
        .unwrap();
    let parent = super::replay::recorded(&yard, &parent_tasks)
        .await
        .pop()
        .unwrap();
    let (_, point) = drillyard_agent::branch(&parent, super::replay::CLOCKS, &yard.pool, 1)
        .await
        .unwrap();
    for (model, asked_in_vain) in [("fake", 0), ("other", 1)] {
        let endpoint = FakeEndpoint::start(script).await.unwrap();
        let mut options = yard.options(parent_tasks.clone(), drillyard(&endpoint, model));
        options.run_id = drillyard_schema::RunId::from(model);
        options.branch = point.clone();
        options.samples = 2;
        options.concurrency = 1;
        let summary = yard.run(options).await.unwrap();
        assert_eq!(summary.scored, 2, "{summary:?}");
        // Asked for three turns each; the first reply tells whose ids it would have continued.
        let requests = endpoint.requests();
        assert_eq!(requests.len(), 6 + asked_in_vain, "{model}");
        let tokens = yard.rows::<drillyard_schema::table::TokenRow>().await;
        let own = |step: i32| {
            tokens
                .iter()
                .filter(move |row| row.run_id.as_str() == model && row.step_index == step)
        };
        assert!(own(0).all(|row| row.tokenizer_hash == "fake-tokenizer"));
        for row in own(1) {
            assert_eq!(row.tokenizer_hash, format!("{model}-tokenizer"));
            assert_eq!(row.kept_prefix == 0, model == "other", "{model}");
        }
        assert!(own(2).all(|row| row.kept_prefix > 0), "{model}");
    }
}
