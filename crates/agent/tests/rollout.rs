//! Whole rollouts: real sandboxes, a real lake, and policies that are scripts or a fake endpoint.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod ends;
mod faults;
mod packs;
mod replay;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_agent::{
    AgentError, OpenAiConfig, Point, Policy, PolicyError, Recording, ReplayClient, Retries,
    RolloutOptions, RolloutSummary, Shard, Silent, ToolProtocol, rollout,
};
use drillyard_gym::{TaskSet, task_set};
use drillyard_lake::{Filter, Lake};
use drillyard_sandbox::{Pool, SandboxConfig};
use drillyard_schema::table::{
    EpisodeRow, MessageRow, RewardRow, Row, StepRow, TaskRow, TokenRow, ToolCallRow, VerdictRow,
};
use drillyard_schema::{Purpose, RunId, Split, Task};
use drillyard_testkit::{Answer, FakeEndpoint, FakeRequest, Hostile};
use serde_json::{Value, json};

/// A yard of its own for a test, and sandboxes where the host allows them.
struct Yard {
    dir: Folder,
    pool: Pool,
}

enum Folder {
    Ours(tempfile::TempDir),
    Theirs(Utf8PathBuf),
}

impl Yard {
    /// None, said loudly, where the host forbids sandboxes.
    async fn open() -> Option<Self> {
        Self::open_with(SandboxConfig::default()).await
    }

    async fn open_with(config: SandboxConfig) -> Option<Self> {
        match Pool::start(config).await {
            Ok(pool) => Some(Self {
                dir: Folder::Ours(tempfile::tempdir().unwrap()),
                pool,
            }),
            Err(error) => {
                eprintln!("SKIPPED: this host gives no sandbox: {error}");
                None
            }
        }
    }

    fn path(&self, name: &str) -> Utf8PathBuf {
        match &self.dir {
            Folder::Ours(dir) => Utf8Path::from_path(dir.path()).unwrap().join(name),
            Folder::Theirs(dir) => dir.join(name),
        }
    }

    fn options(&self, tasks: Vec<Task>, policy: Policy) -> RolloutOptions {
        let mut options = RolloutOptions::new(
            RunId::from("test"),
            "2026-01-02",
            Purpose::Train,
            tasks,
            policy,
            self.path("journal"),
        );
        options.concurrency = 8;
        options.artifacts_dir = Some(self.path("artifacts"));
        options
    }

    async fn lake(&self) -> Lake {
        Lake::open(&self.path("lake")).await.unwrap()
    }

    async fn run(&self, options: RolloutOptions) -> Result<RolloutSummary, AgentError> {
        rollout(options, &self.lake().await, &self.pool, &Silent).await
    }

    async fn rows<R: Row>(&self) -> Vec<R> {
        let snapshot = self.lake().await.snapshot().await.unwrap();
        let filter = Filter {
            run_id: None,
            purposes: Vec::new(),
            stage_run: None,
        };
        snapshot.read::<R>(&filter).await.unwrap()
    }
}

fn wrangle() -> Arc<dyn TaskSet> {
    task_set("wrangle").unwrap()
}

fn tasks(n: usize) -> Vec<Task> {
    wrangle().generate(Split::Train, n, 11)
}

/// The expert's turns, right, for the task whose instruction a request carries.
fn right_turns(tasks: &[Task]) -> impl Fn(&FakeRequest, usize) -> Answer + Send + Sync + 'static {
    let scripts: BTreeMap<String, Vec<String>> = tasks
        .iter()
        .map(|task| {
            let turns = wrangle().expert(task, 1, 0.0);
            (
                task.instruction.clone(),
                turns.into_iter().map(|turn| turn.text).collect(),
            )
        })
        .collect();
    move |request, turn| {
        let script = &scripts[request.task_text()];
        Answer::Text(script.get(turn).cloned().unwrap_or_default())
    }
}

fn quick(endpoint: &str, protocol: ToolProtocol) -> OpenAiConfig {
    OpenAiConfig {
        retries: Retries {
            times: 3,
            first_wait: Duration::from_millis(5),
            longest_wait: Duration::from_millis(200),
        },
        timeout: Duration::from_secs(20),
        ..OpenAiConfig::plain(endpoint, "fake", protocol)
    }
}

fn policy(endpoint: &FakeEndpoint) -> Policy {
    Policy::openai("fake", quick(&endpoint.base_url(), ToolProtocol::Template)).unwrap()
}

fn shell(command: &str) -> Answer {
    Answer::call("execute_shell", &json!({ "command": command }))
}

fn submit() -> Answer {
    Answer::call("submit", &json!({}))
}

fn component(rewards: &[RewardRow], name: &str) -> Vec<f64> {
    rewards
        .iter()
        .filter(|row| row.component == name)
        .map(|row| row.value)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_expert_solves_every_family_and_its_mistake_fails_every_family() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let families = wrangle().families().len();
    let tasks = wrangle().generate(Split::HeldOut, families * 2, 3);
    let covered: BTreeSet<_> = tasks.iter().map(|task| task.family.clone()).collect();
    assert_eq!(covered.len(), families);

    let summary = yard
        .run(yard.options(tasks.clone(), Policy::expert(0.0)))
        .await
        .unwrap();
    assert_eq!(
        (summary.total, summary.done, summary.left),
        (families * 2, families * 2, 0)
    );
    assert_eq!(summary.successes, families * 2, "{:?}", summary.families);
    assert_eq!(
        summary.end_reasons,
        [("submitted".to_owned(), families * 2)].into()
    );

    let wrong = yard
        .run(yard.options(tasks, Policy::expert(1.0)))
        .await
        .unwrap();
    assert_eq!(
        (wrong.scored, wrong.successes),
        (families * 2, 0),
        "{:?}",
        wrong.families
    );

    let steps = yard.rows::<StepRow>().await;
    assert!(
        steps.iter().all(|row| row.parse_status == "ok"),
        "an expert's turn does not parse"
    );
    let calls = yard.rows::<ToolCallRow>().await;
    let failed: Vec<_> = calls.iter().filter(|row| row.outcome != "ok").collect();
    assert!(failed.is_empty(), "{:?}", failed.first());
    let rewards = yard.rows::<RewardRow>().await;
    assert!(
        component(&rewards, "format")
            .iter()
            .all(|share| (share - 1.0).abs() < 1e-9)
    );
    assert!(component(&rewards, "violation").is_empty());
    // Look, output exists, output parses, content right.
    let reached: f64 = component(&rewards, "milestone").iter().sum();
    assert!(reached >= (families * 2) as f64, "{reached}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_lands_in_every_table() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    yard.run(yard.options(tasks(1), Policy::expert(0.0)))
        .await
        .unwrap();
    let episode = &yard.rows::<EpisodeRow>().await[0];
    assert_eq!(
        (episode.status.as_str(), episode.end_reason.as_str()),
        ("finished", "submitted")
    );
    assert_eq!(
        (
            episode.n_steps,
            episode.n_tool_calls,
            episode.n_parse_errors
        ),
        (3, 3, 0)
    );
    assert_eq!(episode.claimed_success, Some(true));
    assert!(episode.ended_at > episode.started_at);
    assert!(episode.limits.is_some());
    let task = &yard.rows::<TaskRow>().await[0];
    assert_eq!(task.task_id, episode.task_id);
    let steps = yard.rows::<StepRow>().await;
    assert_eq!(steps[0].milestone.as_deref(), Some("looked"));
    assert!(
        steps[1]
            .milestone
            .as_deref()
            .unwrap_or_default()
            .contains("content_right"),
        "{:?}",
        steps[1]
    );
    let hashes: BTreeSet<_> = steps.iter().map(|row| &row.history_hash).collect();
    assert_eq!(hashes.len(), 3);
    let roles: Vec<String> = yard
        .rows::<MessageRow>()
        .await
        .into_iter()
        .map(|row| row.role)
        .collect();
    assert_eq!(
        roles,
        [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "assistant"
        ]
    );
    let calls = yard.rows::<ToolCallRow>().await;
    assert!(calls[0].stdout_bytes > 0 && calls[0].files_changed.is_empty());
    assert!(
        calls[1]
            .files_changed
            .iter()
            .any(|file| file.change == "created" && file.after_hash.is_some())
    );
    let verdict = &yard.rows::<VerdictRow>().await[0];
    assert_eq!((verdict.success, verdict.score), (Some(true), Some(1.0)));
    let rewards = yard.rows::<RewardRow>().await;
    assert_eq!(component(&rewards, "outcome"), [1.0]);
    assert_eq!(component(&rewards, "efficiency"), [0.5]);
    // A script has no tokens, and nothing is made up.
    assert!(yard.rows::<TokenRow>().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sql_expert_answers_questions() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let set = task_set("text2sql").unwrap();
    let tasks = set.generate(Split::Train, 8, 5);
    let mut options = yard.options(tasks, Policy::expert(0.0));
    options.max_steps = 10;
    let summary = yard.run(options).await.unwrap();
    assert_eq!((summary.scored, summary.successes), (8, 8), "{summary:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_and_cut_turns_go_back_to_the_model_and_the_episode_goes_on() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(1);
    let right = right_turns(&tasks);
    let endpoint = FakeEndpoint::start(move |request| match request.turn {
        0 => Answer::Text("<tool_call>{\"name\":\"execute_shell\",\"arg</tool_call>".to_owned()),
        1 => Answer::Cut(
            "<tool_call>{\"name\":\"write_file\",\"arguments\":{\"path\":\"x\",\"content\":\"half"
                .to_owned(),
        ),
        2 => Answer::Text("I think I should look at the file first.".to_owned()),
        3 => Answer::call("execute_shell", &json!({ "cmd": "ls" })),
        turn => right(request, turn - 4),
    })
    .await
    .unwrap();
    let mut options = yard.options(tasks, policy(&endpoint));
    options.max_steps = 10;
    let summary = yard.run(options).await.unwrap();
    assert_eq!(summary.successes, 1, "{summary:?}");
    let steps = yard.rows::<StepRow>().await;
    let statuses: Vec<&str> = steps.iter().map(|row| row.parse_status.as_str()).collect();
    assert_eq!(statuses, ["error", "error", "none", "ok", "ok", "ok", "ok"]);
    assert!(
        steps[1]
            .parse_error
            .as_deref()
            .unwrap()
            .contains("max_tokens")
    );
    let messages = yard.rows::<MessageRow>().await;
    let after = |step: i32| {
        let row = messages
            .iter()
            .rfind(|row| row.step_index == Some(step))
            .unwrap();
        (row.role.clone(), row.content.clone().unwrap())
    };
    assert!(after(0).1.contains("could not be read"));
    assert!(after(1).1.contains("was cut after"));
    assert!(after(2).1.contains("no tool was called"));
    assert_eq!(after(3).0, "tool");
    // Nothing of the cut call was run.
    let calls = yard.rows::<ToolCallRow>().await;
    assert!(calls.iter().all(|row| row.tool != "write_file"));
    assert_eq!(
        (calls[0].outcome.as_str(), calls[0].schema_ok),
        ("rejected", false)
    );
    let rewards = yard.rows::<RewardRow>().await;
    assert_eq!(component(&rewards, "format")[..2], [-1.0, -1.0]);
    assert_eq!(component(&rewards, "violation"), [1.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_replies_end_episodes_and_nothing_else() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    for hostile in Hostile::ALL {
        let endpoint = FakeEndpoint::start(move |_| Answer::Text(hostile.text()))
            .await
            .unwrap();
        let mut options = yard.options(tasks(1), policy(&endpoint));
        options.run_id = RunId::from(format!("{hostile:?}"));
        let summary = yard.run(options).await.unwrap();
        assert_eq!(
            (summary.done, summary.infrastructure),
            (1, 0),
            "{hostile:?}: {summary:?}"
        );
        assert_eq!(summary.successes, 0);
    }
    let calls = yard.rows::<ToolCallRow>().await;
    assert!(
        calls.iter().all(|row| !row.stdout.contains("root:")),
        "the host's files leaked"
    );
    assert_eq!(yard.rows::<EpisodeRow>().await.len(), Hostile::ALL.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn passing_faults_of_the_endpoint_are_retried_and_counted() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(1);
    let right = right_turns(&tasks);
    let endpoint = FakeEndpoint::start(move |request| match request.index {
        0 => Answer::Status(429, Some(0.05), "slow down".to_owned()),
        1 => Answer::Status(500, None, "oops".to_owned()),
        3 => Answer::Broken,
        4 => Answer::Garbage,
        5 => Answer::Raw(json!({ "choices": [] })),
        _ => right(request, request.turn),
    })
    .await
    .unwrap();
    let summary = yard
        .run(yard.options(tasks, policy(&endpoint)))
        .await
        .unwrap();
    assert_eq!(
        (summary.successes, summary.infrastructure),
        (1, 0),
        "{summary:?}"
    );
    let retries: Vec<Option<i64>> = yard
        .rows::<StepRow>()
        .await
        .iter()
        .map(|row| {
            let extras: Value = serde_json::from_str(row.extras.as_deref()?).unwrap();
            extras["retries"].as_i64()
        })
        .collect();
    assert_eq!(retries, [Some(2), Some(3), None]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_is_down_is_said_before_anything_is_written() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let down = Policy::openai(
        "down",
        quick(&format!("http://{address}/v1"), ToolProtocol::Native),
    )
    .unwrap();
    let error = yard.run(yard.options(tasks(2), down)).await.unwrap_err();
    let AgentError::Policy(PolicyError::Connect { url, .. }) = &error else {
        panic!("{error:?}")
    };
    assert!(url.contains(&address.to_string()));
    assert!(yard.rows::<EpisodeRow>().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_dies_stops_the_run_and_the_same_run_completes_later() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(24);
    let right = right_turns(&tasks);
    let healthy = Arc::new(AtomicUsize::new(20));
    let budget = healthy.clone();
    let endpoint = FakeEndpoint::start(move |request| {
        let left = budget.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        match left {
            Ok(_) => right(request, request.turn),
            Err(_) => Answer::Status(503, None, "overloaded".to_owned()),
        }
    })
    .await
    .unwrap();
    let options = yard.options(tasks, policy(&endpoint));
    let error = yard.run(options.clone()).await.unwrap_err();
    assert!(
        matches!(error, AgentError::EndpointGone { .. }),
        "{error:?}"
    );
    let faulted = yard
        .rows::<EpisodeRow>()
        .await
        .iter()
        .filter(|row| row.status == "infrastructure")
        .count();
    assert!(faulted <= 8, "{faulted} episodes carry the fault");
    assert!(
        yard.rows::<VerdictRow>()
            .await
            .iter()
            .all(|row| row.success == Some(true))
    );

    healthy.store(10_000, Ordering::SeqCst);
    let mut options = options;
    options.stop = drillyard_agent::Stop::new();
    let summary = yard.run(options).await.unwrap();
    assert_eq!(summary.left, 0);
    assert!(summary.resumed > 0, "{summary:?}");
    each_sample_scored_once(&yard, 24, 1).await;
}

/// Every (task, sample) has exactly one scored episode, and no episode id occurs twice.
async fn each_sample_scored_once(yard: &Yard, tasks: usize, samples: usize) {
    let episodes = yard.rows::<EpisodeRow>().await;
    let ids: BTreeSet<_> = episodes.iter().map(|row| row.episode_id.clone()).collect();
    assert_eq!(ids.len(), episodes.len(), "an episode is in the lake twice");
    let scored: Vec<_> = episodes
        .iter()
        .filter(|row| row.status == "finished")
        .collect();
    let distinct: BTreeSet<_> = scored
        .iter()
        .map(|row| (row.task_id.clone(), row.sample_index))
        .collect();
    assert_eq!(
        (scored.len(), distinct.len()),
        (tasks * samples, tasks * samples)
    );
    let verdicts = yard.rows::<VerdictRow>().await;
    assert_eq!(verdicts.len(), tasks * samples);
    for episode in scored {
        let steps = yard_steps(yard, episode).await;
        let indices: Vec<i32> = steps.iter().map(|row| row.step_index).collect();
        assert_eq!(
            indices,
            (0..episode.n_steps).collect::<Vec<_>>(),
            "{}",
            episode.episode_id
        );
    }
}

async fn yard_steps(yard: &Yard, episode: &EpisodeRow) -> Vec<StepRow> {
    let mut steps = yard.rows::<StepRow>().await;
    steps.retain(|row| row.episode_id == episode.episode_id);
    steps
}

#[tokio::test(flavor = "multi_thread")]
async fn one_episode_that_the_endpoint_refuses_gets_another_attempt() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(3);
    let right = right_turns(&tasks);
    let unlucky = tasks[1].instruction.clone();
    let refused = AtomicUsize::new(0);
    let endpoint = FakeEndpoint::start(move |request| {
        if request.task_text() == unlucky && refused.fetch_add(1, Ordering::SeqCst) == 0 {
            return Answer::Status(400, None, "no".to_owned());
        }
        right(request, request.turn)
    })
    .await
    .unwrap();
    let summary = yard
        .run(yard.options(tasks, policy(&endpoint)))
        .await
        .unwrap();
    assert_eq!(
        (
            summary.done,
            summary.scored,
            summary.successes,
            summary.infrastructure
        ),
        (3, 3, 3, 1)
    );
    let episodes = yard.rows::<EpisodeRow>().await;
    let fault = episodes
        .iter()
        .find(|row| row.status == "infrastructure")
        .unwrap();
    assert_eq!(
        (fault.end_reason.as_str(), fault.attempt),
        ("endpoint_fault", 0)
    );
    assert!(
        fault
            .infrastructure_cause
            .as_deref()
            .unwrap()
            .contains("400")
    );
    assert!(
        yard.rows::<RewardRow>()
            .await
            .iter()
            .all(|row| row.episode_id != fault.episode_id)
    );
    each_sample_scored_once(&yard, 3, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_episodes_run_into_their_clocks() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => Answer::call(
            "execute_shell",
            &json!({ "command": "sleep 30", "timeout_s": 1 }),
        ),
        1 => shell("sleep 1.3; echo done"),
        _ => shell("sleep 30"),
    })
    .await
    .unwrap();
    let mut options = yard.options(tasks(1), policy(&endpoint));
    options.episode_timeout = Duration::from_millis(2800);
    options.max_steps = 10;
    let summary = yard.run(options).await.unwrap();
    assert_eq!(
        summary.end_reasons,
        [("episode_timeout".to_owned(), 1)].into(),
        "{summary:?}"
    );
    assert_eq!(summary.scored, 1);
    let calls = yard.rows::<ToolCallRow>().await;
    let outcomes: Vec<&str> = calls.iter().map(|row| row.outcome.as_str()).collect();
    assert_eq!(outcomes, ["timeout", "ok", "timeout"]);
    assert!(calls[2].wall_us < 2_000_000, "{}", calls[2].wall_us);
    let messages = yard.rows::<MessageRow>().await;
    let told: Vec<String> = messages
        .iter()
        .filter(|row| row.role == "tool")
        .map(|row| row.content.clone().unwrap())
        .collect();
    assert!(told[0].contains("timeout"), "{told:?}");
    assert!(
        !told[0].contains("[warning:") && told[1].contains("[warning:"),
        "{told:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_endpoint_is_a_fault_and_not_the_agents_timeout() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint =
        FakeEndpoint::start(|_| Answer::Slow(Duration::from_secs(20), Box::new(submit())))
            .await
            .unwrap();
    let mut options = yard.options(tasks(1), policy(&endpoint));
    options.episode_timeout = Duration::from_secs(1);
    options.attempts = 1;
    let summary = yard.run(options).await.unwrap();
    assert_eq!(
        summary.end_reasons,
        [("endpoint_fault".to_owned(), 1)].into()
    );
    assert_eq!(summary.scored, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_end_episodes_by_name() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let script = |request: &FakeRequest| match request.body["model"].as_str() {
        Some("idle") => Answer::Text("Done, I believe.".to_owned()),
        Some("babble") => Answer::Text("<tool_call>{\"name\":</tool_call>".to_owned()),
        Some("full") => {
            Answer::Status(400, None, "maximum context length is 512 tokens".to_owned())
        }
        _ => shell("ls"),
    };
    let endpoint = FakeEndpoint::start(script).await.unwrap();
    let expected = [
        ("idle", "gave_up"),
        ("babble", "parse_limit"),
        ("full", "context_limit"),
        ("loop", "step_limit"),
    ];
    for (model, reason) in expected {
        let config = OpenAiConfig {
            model: model.to_owned(),
            ..quick(&endpoint.base_url(), ToolProtocol::Template)
        };
        let summary = yard
            .run(yard.options(tasks(1), Policy::openai(model, config).unwrap()))
            .await
            .unwrap();
        assert_eq!(summary.end_reasons, [(reason.to_owned(), 1)].into());
        assert_eq!((summary.scored, summary.successes), (1, 0));
    }
    // The same look again and again, while nothing changed.
    let repeats = component(&yard.rows::<RewardRow>().await, "repeat").len();
    assert_eq!(repeats, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn token_rows_rebuild_what_the_model_saw_and_said() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(2);
    let right = right_turns(&tasks);
    let endpoint = FakeEndpoint::start(move |request| match request.turn {
        0 => Answer::Cut("no end".to_owned()),
        turn => right(request, turn - 1),
    })
    .await
    .unwrap();
    let config = OpenAiConfig {
        retries: Retries::default(),
        ..OpenAiConfig::drillyard(&endpoint.address(), "fake", "fake-weights")
    };
    let policy = Policy::openai("fake", config).unwrap();
    assert_eq!(policy.revision, "fake-weights");
    let mut options = yard.options(tasks, policy);
    options.concurrency = 1;
    let summary = yard.run(options).await.unwrap();
    assert_eq!(summary.successes, 2, "{summary:?}");

    let mut seen: Vec<Vec<i32>> = endpoint.sequences();
    let tokens = yard.rows::<TokenRow>().await;
    let mut rebuilt = Vec::new();
    let mut sequence: Vec<i32> = Vec::new();
    for row in &tokens {
        if row.step_index == 0 {
            sequence.clear();
        } else {
            assert_eq!(
                row.kept_prefix as usize,
                sequence.len(),
                "prior token ids were not kept whole"
            );
        }
        sequence.truncate(row.kept_prefix as usize);
        sequence.extend(&row.context_ids);
        sequence.extend(&row.generated_ids);
        rebuilt.push(sequence.clone());
        assert_eq!(row.logprobs.len(), row.generated_ids.len());
        assert_eq!(
            (row.tokenizer_hash.as_str(), row.template_hash.as_str()),
            ("fake-tokenizer", "fake-template")
        );
        assert_eq!(
            row.loss_spans
                .iter()
                .map(|span| span.end - span.start)
                .sum::<i32>(),
            row.generated_ids.len() as i32
        );
    }
    rebuilt.sort();
    seen.sort();
    assert_eq!(rebuilt, seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_weights_than_the_run_is_filed_under_stop_it() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|_| submit()).await.unwrap();
    let config = OpenAiConfig::drillyard(&endpoint.address(), "fake", "expected-weights");
    let error = yard
        .run(yard.options(tasks(1), Policy::openai("fake", config).unwrap()))
        .await
        .unwrap_err();
    assert!(
        matches!(error, AgentError::Policy(PolicyError::OtherWeights { .. })),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn native_tool_calls_and_plain_text_both_work() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(1);
    let turns = wrangle().expert(&tasks[0], 1, 0.0);
    let calls: Vec<(String, String)> = turns
        .iter()
        .map(|turn| {
            let inner = turn
                .text
                .trim_start_matches("<tool_call>")
                .trim_end_matches("</tool_call>");
            let call: Value = serde_json::from_str(inner).unwrap();
            (
                call["name"].as_str().unwrap().to_owned(),
                call["arguments"].to_string(),
            )
        })
        .collect();
    let texts: Vec<String> = turns.into_iter().map(|turn| turn.text).collect();
    let endpoint = FakeEndpoint::start(move |request| {
        if request.body.get("tools").is_some() {
            Answer::Calls(Some("Next.".to_owned()), vec![calls[request.turn].clone()])
        } else {
            Answer::Text(format!("Next: {}", texts[request.turn]))
        }
    })
    .await
    .unwrap();
    for (name, protocol) in [
        ("native", ToolProtocol::Native),
        ("text", ToolProtocol::Text),
    ] {
        let policy = Policy::openai(name, quick(&endpoint.base_url(), protocol)).unwrap();
        let summary = yard.run(yard.options(tasks.clone(), policy)).await.unwrap();
        assert_eq!(summary.successes, 1, "{name}: {summary:?}");
    }
    for request in endpoint.requests() {
        let roles: Vec<&str> = request["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["role"].as_str().unwrap())
            .collect();
        let system = request["messages"][0]["content"].as_str().unwrap();
        if request.get("tools").is_some() {
            assert!(!system.contains("JSON Schema"));
            assert!(roles.len() < 4 || roles[3] == "tool");
        } else {
            assert!(system.contains("execute_shell") && !roles.contains(&"tool"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recording_replays_to_the_same_verdicts() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = wrangle().generate(Split::Train, 12, 2);
    let first = yard
        .run(yard.options(tasks.clone(), Policy::expert(0.5)))
        .await
        .unwrap();
    assert!((1..12).contains(&first.successes), "{first:?}");
    let recording = Recording::from_rows(
        &yard.rows::<EpisodeRow>().await,
        &yard.rows::<StepRow>().await,
        &yard.rows::<TokenRow>().await,
    );
    let replay = Policy::new("replay", "1", Arc::new(ReplayClient::new(recording)));
    let again = yard.run(yard.options(tasks, replay)).await.unwrap();
    assert_eq!(again.families, first.families);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_the_lake_is_not_run_again() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let mut options = yard.options(tasks(3), Policy::expert(0.0));
    options.samples = 2;
    yard.run(options.clone()).await.unwrap();
    let again = yard.run(options.clone()).await.unwrap();
    assert_eq!(
        (again.total, again.earlier, again.done, again.steps),
        (6, 6, 0, 0)
    );
    options.samples = 3;
    let more = yard.run(options).await.unwrap();
    assert_eq!((more.earlier, more.done), (6, 3));
    each_sample_scored_once(&yard, 3, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_share_the_work_and_overlap_nowhere() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let mut done = 0;
    for index in 0..3 {
        let mut options = yard.options(tasks(7), Policy::expert(0.0));
        options.shard = Shard { index, count: 3 };
        done += yard.run(options).await.unwrap().done;
    }
    assert_eq!(done, 7);
    each_sample_scored_once(&yard, 7, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_leaves_work_that_the_next_start_finishes() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(12);
    let right = right_turns(&tasks);
    let stop = drillyard_agent::Stop::new();
    let asked = stop.clone();
    let endpoint = FakeEndpoint::start(move |request| {
        if request.index == 10 {
            asked.stop();
        }
        right(request, request.turn)
    })
    .await
    .unwrap();
    let mut options = yard.options(tasks, policy(&endpoint));
    options.concurrency = 3;
    options.stop = stop;
    let first = yard.run(options.clone()).await.unwrap();
    assert!(first.left > 0 && !first.is_complete(), "{first:?}");
    options.stop = drillyard_agent::Stop::new();
    let second = yard.run(options).await.unwrap();
    assert!(second.is_complete() && second.resumed > 0, "{second:?}");
    each_sample_scored_once(&yard, 12, 1).await;
}

/// What a child process is told.
const CHILD: &str = "DRILLYARD_AGENT_TEST_CHILD";

/// The same options in parent and child: three tasks × two samples of the expert, or one episode at an endpoint.
fn crash_options(yard: &Yard, endpoint: Option<&str>) -> RolloutOptions {
    let mut options = match endpoint {
        None => yard.options(tasks(3), Policy::expert(0.0)),
        Some(url) => {
            let policy = Policy::openai("fake", quick(url, ToolProtocol::Template)).unwrap();
            yard.options(tasks(1), policy)
        }
    };
    options.samples = if endpoint.is_none() { 2 } else { 1 };
    options.concurrency = 2;
    options
}

/// Not a test of its own: what [`crash_at`] runs in a process that dies.
#[tokio::test(flavor = "multi_thread")]
async fn child_process() {
    let Ok(told) = std::env::var(CHILD) else {
        return;
    };
    let told: Value = serde_json::from_str(&told).unwrap();
    let pool = Pool::start(SandboxConfig::default()).await.unwrap();
    let dir = Utf8PathBuf::from(told["dir"].as_str().unwrap());
    let yard = Yard {
        dir: Folder::Theirs(dir),
        pool,
    };
    let mut options = crash_options(&yard, told["endpoint"].as_str());
    if told["faults"] == true {
        options.faults = faults::mixed();
    }
    if let Some(calls) = told["kill_at_call"].as_u64() {
        return ends::die_in_their_hands(&yard, options, calls).await;
    }
    let (point, nth) = (
        told["point"].as_str().unwrap().to_owned(),
        told["nth"].as_u64().unwrap(),
    );
    let arrivals = Mutex::new(0);
    options.hold_at = Some(Arc::new(move |at, _| {
        if format!("{at:?}") == point {
            let mut arrivals = arrivals.lock().unwrap();
            *arrivals += 1;
            if *arrivals == nth {
                // No destructor runs, as after kill -9.
                std::process::abort();
            }
        }
        false
    }));
    yard.run(options).await.unwrap();
}

/// Runs a rollout in a process of its own that dies at the `nth` arrival of an episode at `point`.
async fn crash_at(yard: &Yard, endpoint: Option<&str>, point: Point, nth: u64) {
    crash_with(yard, endpoint, point, nth, false).await;
}

/// The same, with or without injected faults.
async fn crash_with(yard: &Yard, endpoint: Option<&str>, point: Point, nth: u64, faults: bool) {
    let told = json!({
        "dir": yard.path(""), "endpoint": endpoint, "point": format!("{point:?}"), "nth": nth, "faults": faults,
    });
    let output = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process", "--nocapture"])
        .env(CHILD, told.to_string())
        .output()
        .await
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert_eq!(signal, Some(6), "{point:?} {nth} was not reached: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_any_point_leaves_every_episode_exactly_once() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    for point in Point::ALL {
        for nth in [1, 4] {
            let yard = Yard {
                dir: Folder::Ours(tempfile::tempdir().unwrap()),
                pool: yard.pool.clone(),
            };
            crash_at(&yard, None, point, nth).await;
            let summary = yard.run(crash_options(&yard, None)).await.unwrap();
            assert_eq!(summary.left, 0, "{point:?} {nth}");
            each_sample_scored_once(&yard, 3, 2).await;
            let calls = yard.rows::<ToolCallRow>().await;
            let unknown = calls
                .iter()
                .filter(|row| row.outcome == "outcome_unknown")
                .count();
            // The episode that died was in a call, and the other one in flight may have been.
            let in_call = matches!(point, Point::IntentLogged | Point::CallDone);
            assert!(
                (usize::from(in_call)..=2).contains(&unknown),
                "{point:?} {nth}: {unknown}"
            );
            let verdicts = yard.rows::<VerdictRow>().await;
            let successes = verdicts
                .iter()
                .filter(|row| row.success == Some(true))
                .count();
            assert!(successes + unknown >= 6, "{point:?} {nth}: {successes}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_logged_call_is_restored_and_not_run_again() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("mkdir -p d && echo line >> d/log && echo gone > x && chmod 700 d"),
        1 => shell("echo line >> d/log; rm x"),
        2 => shell("cat d/log; ls"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    crash_at(&yard, Some(&url), Point::ResultLogged, 2).await;
    let options = crash_options(&yard, Some(&url));
    let summary = yard.run(options).await.unwrap();
    assert_eq!((summary.resumed, summary.done), (1, 1));
    let calls = yard.rows::<ToolCallRow>().await;
    let outcomes: Vec<&str> = calls.iter().map(|row| row.outcome.as_str()).collect();
    assert_eq!(outcomes, ["ok"; 4], "{calls:?}");
    let listed = &calls[2].stdout;
    assert_eq!(
        listed.lines().filter(|line| *line == "line").count(),
        2,
        "{listed}"
    );
    assert!(!listed.lines().any(|line| line == "x"), "{listed}");
    assert_eq!(
        endpoint.requests().len(),
        4,
        "a logged turn was asked for again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_is_told_of_a_call_whose_outcome_is_unknown() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("echo once >> log"),
        1 => shell("cat log"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    crash_at(&yard, Some(&url), Point::CallDone, 1).await;
    let options = crash_options(&yard, Some(&url));
    yard.run(options).await.unwrap();
    let calls = yard.rows::<ToolCallRow>().await;
    assert_eq!(calls[0].outcome, "outcome_unknown");
    // A fresh sandbox: what the call may have done is not there, and nobody pretends it is.
    assert_eq!(calls[1].outcome, "error");
    let asked = endpoint.requests();
    let told = asked[1]["messages"].as_array().unwrap().last().unwrap()["content"].to_string();
    assert!(told.contains("outcome unknown"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_too_large_for_the_journal_interrupt_the_episode_and_it_is_tried_again() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("head -c 3000000 /dev/zero > big"),
        1 => shell("wc -c < big"),
        _ => submit(),
    })
    .await
    .unwrap();
    let url = endpoint.base_url();
    crash_at(&yard, Some(&url), Point::ResultLogged, 1).await;
    let options = crash_options(&yard, Some(&url));
    let summary = yard.run(options).await.unwrap();
    assert_eq!(
        (summary.infrastructure, summary.scored),
        (1, 1),
        "{summary:?}"
    );
    let episodes = yard.rows::<EpisodeRow>().await;
    let lost = episodes
        .iter()
        .find(|row| row.end_reason == "interrupted")
        .unwrap();
    assert_eq!((lost.n_state_lost, lost.attempt), (1, 0));
    each_sample_scored_once(&yard, 1, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_outputs_are_kept_whole_beside_the_lake() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("head -c 200000 /dev/zero | tr '\\0' x"),
        _ => submit(),
    })
    .await
    .unwrap();
    yard.run(yard.options(tasks(1), policy(&endpoint)))
        .await
        .unwrap();
    let call = &yard.rows::<ToolCallRow>().await[0];
    assert_eq!(call.stdout_bytes, 200_000);
    assert!(call.stdout.len() <= 65_536 && call.truncated);
    let artifact = &yard.rows::<EpisodeRow>().await[0].artifacts[0];
    assert_eq!(
        (artifact.path.as_str(), artifact.size_bytes),
        ("step 0 call 0 stdout", 200_000)
    );
    assert_eq!(std::fs::metadata(&artifact.uri).unwrap().len(), 200_000);
    let shown = yard
        .rows::<MessageRow>()
        .await
        .iter()
        .find(|row| row.role == "tool")
        .unwrap()
        .content
        .clone()
        .unwrap();
    assert!(shown.len() < 6000, "{}", shown.len());
}
