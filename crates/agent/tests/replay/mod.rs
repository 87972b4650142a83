//! Replay and branch: recorded calls again, days later, and new episodes from the middle of an old one.

use std::time::Duration;

use drillyard_agent::{
    AgentError, Branch, Clocks, Policy, Recorded, Replay, Sameness, branch, can_be_left, restore,
};
use drillyard_schema::table::{EpisodeRow, MessageRow, StepRow, Timestamp, TokenRow, ToolCallRow};
use drillyard_schema::{EndReason, EpisodeId, RunId, Task};
use drillyard_testkit::FakeEndpoint;
use serde_json::Value;

use super::{Yard, faults, policy, shell, submit, tasks};

pub const CLOCKS: Clocks = Clocks {
    call: Duration::from_secs(30),
    episode: Duration::from_mins(10),
};

fn of<R: Clone>(rows: &[R], id: &EpisodeId, of: fn(&R) -> &EpisodeId) -> Vec<R> {
    rows.iter().filter(|row| of(row) == id).cloned().collect()
}

/// The episodes of the yard, each with all that the lake holds of it.
pub async fn recorded(yard: &Yard, tasks: &[Task]) -> Vec<Recorded> {
    let steps = yard.rows::<StepRow>().await;
    let messages = yard.rows::<MessageRow>().await;
    let calls = yard.rows::<ToolCallRow>().await;
    let tokens = yard.rows::<TokenRow>().await;
    let episodes = yard.rows::<EpisodeRow>().await;
    episodes
        .into_iter()
        .map(|episode| Recorded {
            task: tasks
                .iter()
                .find(|task| task.task_id == episode.task_id)
                .unwrap()
                .clone(),
            steps: of(&steps, &episode.episode_id, |row| &row.episode_id),
            messages: of(&messages, &episode.episode_id, |row| &row.episode_id),
            tool_calls: of(&calls, &episode.episode_id, |row| &row.episode_id),
            tokens: of(&tokens, &episode.episode_id, |row| &row.episode_id),
            episode,
        })
        .collect()
}

async fn again(yard: &Yard, recorded: &Recorded) -> Replay {
    drillyard_agent::replay(recorded, CLOCKS, &yard.pool, None)
        .await
        .unwrap()
}

fn sameness(replay: &Replay) -> Vec<Sameness> {
    replay.calls.iter().map(|call| call.sameness).collect()
}

/// One episode of shell commands and `submit`.
pub async fn shell_episode(yard: &Yard, commands: &[&str]) -> Recorded {
    let commands: Vec<String> = commands.iter().map(|&text| text.to_owned()).collect();
    let endpoint = FakeEndpoint::start(move |request| match commands.get(request.turn) {
        Some(command) => shell(command),
        None => submit(),
    })
    .await
    .unwrap();
    let tasks = tasks(1);
    let mut options = yard.options(tasks.clone(), policy(&endpoint));
    options.max_steps = 12;
    yard.run(options).await.unwrap();
    recorded(yard, &tasks).await.pop().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_experts_episodes_replay_to_the_same() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let tasks = tasks(5);
    yard.run(yard.options(tasks.clone(), Policy::expert(0.5)))
        .await
        .unwrap();
    for recorded in recorded(&yard, &tasks).await {
        let replay = again(&yard, &recorded).await;
        assert!(replay.is_same(), "{replay:?}");
        let same = [Sameness::Same, Sameness::Same, Sameness::NotRun];
        assert_eq!(sameness(&replay), same, "{replay:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_come_again_as_recorded() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        turn @ 0..=7 => shell(&format!("echo {turn} >> log; seq 1 40; cat log notes.txt")),
        _ => submit(),
    })
    .await
    .unwrap();
    let tasks = tasks(1);
    let mut options = yard.options(tasks.clone(), policy(&endpoint));
    options.max_steps = 12;
    options.faults = faults::mixed();
    yard.run(options).await.unwrap();
    let recorded = recorded(&yard, &tasks).await.pop().unwrap();
    assert!(recorded.episode.n_injected_faults >= 3);
    let replay = again(&yard, &recorded).await;
    assert!(replay.is_same(), "{replay:?}");
    assert_eq!(replay.count(Sameness::Same), 8);
    // Without the record of how one was carried out the call is not run, least of all without its fault.
    let mut forgotten = recorded.clone();
    let refused = forgotten
        .tool_calls
        .iter_mut()
        .find(|row| row.outcome == "error" && row.fault_injected.is_some());
    let refused = refused.unwrap();
    let (place, told) = (refused.step_index, refused.extras.take());
    let another = match refused.fault_injected.as_deref() {
        Some("slow") => "disk_full",
        _ => "slow",
    };
    let another = Some(format!("{{\"fault\":{{\"kind\":\"{another}\"}}}}"));
    for extras in [
        None,
        Some("{}".to_owned()),
        Some("half".to_owned()),
        another,
    ] {
        assert_ne!(extras, told);
        forgotten.tool_calls[place as usize].extras = extras;
        let replay = again(&yard, &forgotten).await;
        let call = &replay.calls[place as usize];
        assert_eq!(call.sameness, Sameness::NotRun, "{call:?}");
        assert!(call.why.as_deref().unwrap().contains("fault"), "{call:?}");
        let (_, way_out) = refused_branch(&yard, &forgotten, place as u32 + 1).await;
        assert!(way_out.contains(&format!("step {place}")), "{way_out}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_the_same_is_told() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let recorded = shell_episode(
        &yard,
        &[
            "date; ls -l --time-style=full-iso /work",
            "head -c 8 /dev/urandom | od -An -tx1 > r; cat r",
            "test -e /tmp/first; echo $?; echo fixed",
            "exit 3",
        ],
    )
    .await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let replay = again(&yard, &recorded).await;
    assert_eq!(
        sameness(&replay),
        [
            Sameness::SameButTimes,
            Sameness::Differs,
            Sameness::Same,
            Sameness::Same,
            Sameness::NotRun
        ],
        "{replay:?}"
    );
    let whats: Vec<&str> = replay.calls[1]
        .differences
        .iter()
        .map(|difference| difference.what.as_str())
        .collect();
    assert_eq!(whats, ["stdout", "file r"]);
    assert!(!replay.is_same());

    // Up to a step, and with results that were never so.
    let first = drillyard_agent::replay(&recorded, CLOCKS, &yard.pool, Some(0))
        .await
        .unwrap();
    assert_eq!((first.calls.len(), first.is_same()), (1, true));
    let mut altered = recorded.clone();
    altered.tool_calls[2].stdout = "0\nfixed\n".to_owned();
    altered.tool_calls[3].exit_code = Some(4);
    altered.tool_calls[0].outcome = "outcome_unknown".to_owned();
    let replay = again(&yard, &altered).await;
    assert_eq!(replay.calls[0].sameness, Sameness::NotRun);
    let told = |call: usize| {
        let difference = &replay.calls[call].differences[0];
        (difference.what.as_str(), difference.lines.clone())
    };
    assert_eq!(told(2), ("stdout", Some(("0".to_owned(), "1".to_owned()))));
    assert_eq!(told(3), ("exit_code", None));
}

#[tokio::test(flavor = "multi_thread")]
async fn other_ground_is_told_and_no_difference() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let mut recorded = shell_episode(&yard, &["echo fixed"]).await;
    assert_eq!(again(&yard, &recorded).await.ground, []);
    let episode = &mut recorded.episode;
    episode.sandbox_image = "host@0000".to_owned();
    episode.toolset_hash = "1111".to_owned();
    episode.drillyard_version = "0.0.0".to_owned();
    let replay = again(&yard, &recorded).await;
    let told: Vec<(&str, &str)> = replay
        .ground
        .iter()
        .map(|one| (one.what.as_str(), one.recorded.as_str()))
        .collect();
    assert_eq!(
        told,
        [
            ("image", "host@0000"),
            ("toolset", "1111"),
            ("drillyard", "0.0.0")
        ]
    );
    assert!(replay.is_same(), "{replay:?}");
}

/// What a branch took over ran before the branch began, hours before in the end.
#[tokio::test(flavor = "multi_thread")]
async fn the_times_of_what_a_branch_took_over_are_its_own() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let mut recorded = shell_episode(&yard, &["date +%s", "echo fixed"]).await;
    let three_hours = 3 * 3_600_000_000;
    recorded.steps[0].started_at.0 -= three_hours;
    let first = &mut recorded.tool_calls[0];
    first.started_at.0 -= three_hours;
    first.stdout = format!("{}\n", first.started_at.0 / 1_000_000);
    let replay = again(&yard, &recorded).await;
    assert_eq!(
        replay.calls[0].sameness,
        Sameness::SameButTimes,
        "{replay:?}"
    );
    // A time before the first turn is data.
    recorded.steps[0].started_at = Timestamp(recorded.episode.started_at.0);
    let replay = again(&yard, &recorded).await;
    assert_eq!(replay.calls[0].sameness, Sameness::Differs, "{replay:?}");
}

/// Cause and way out of a branch that is refused.
async fn refused_branch(yard: &Yard, recorded: &Recorded, at: u32) -> (String, String) {
    let refusal = match branch(recorded, CLOCKS, &yard.pool, at).await {
        Err(AgentError::CannotLeave {
            step, why, way_out, ..
        }) => Some((step, why, way_out)),
        _ => None,
    };
    let (step, why, way_out) = refusal.unwrap();
    assert_eq!(step, at);
    (why, way_out)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_over_can_not_go_on() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let mut recorded = shell_episode(&yard, &["echo a > x", "cat x"]).await;
    let ends = [
        (EndReason::Submitted, true),
        (EndReason::GaveUp, true),
        (EndReason::ParseLimit, true),
        (EndReason::EpisodeTimeout, true),
        (EndReason::ContextLimit, true),
        (EndReason::Other, true),
        (EndReason::VerifierFault, true),
        (EndReason::StepLimit, false),
        (EndReason::EndpointFault, false),
        (EndReason::SandboxFault, false),
        (EndReason::HostFault, false),
        (EndReason::Interrupted, false),
    ];
    for (end, over) in ends {
        recorded.episode.end_reason = end.to_string();
        let left = |at| can_be_left(&recorded, at, Duration::MAX);
        assert_eq!(left(3).is_err(), over, "{end}");
        assert!(left(2).is_ok(), "{end}");
        if over {
            let (why, way_out) = refused_branch(&yard, &recorded, 3).await;
            assert!(why.contains(end.as_str()), "{why}");
            assert!(way_out.contains("step 2"), "{way_out}");
        }
        let (why, _) = refused_branch(&yard, &recorded, 4).await;
        assert!(why.contains("3 steps"), "{why}");
    }
    // The steps before it took all the time that a new episode has.
    recorded.steps[0].generation_us += 5_000_000;
    assert!(can_be_left(&recorded, 1, Duration::from_secs(9)).is_ok());
    let error = can_be_left(&recorded, 1, Duration::from_secs(5)).unwrap_err();
    assert!(error.to_string().contains("took 5."), "{error}");
    // What a failed sandbox did is not known; the steps before it are.
    recorded.tool_calls[1].outcome = "sandbox_fault".to_owned();
    let (why, way_out) = refused_branch(&yard, &recorded, 2).await;
    assert!(why.contains("call 0 of step 1"), "{why}");
    assert!(way_out.contains("step 1 or before"), "{way_out}");
    let (_, point) = branch(&recorded, CLOCKS, &yard.pool, 1).await.unwrap();
    assert!(point.is_some());
}

async fn restored(yard: &Yard, recorded: &Recorded, at: u32) -> Branch {
    restore(recorded, &yard.pool, at, &yard.path("artifacts"))
        .await
        .unwrap()
        .unwrap()
}

/// Files that no second run would bring back: a branch takes them from what was kept, and runs nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_takes_the_files_that_were_kept() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let drawn = "head -c 8 /dev/urandom | od -An -tx1 > drawn; date +%N > log; mkdir d; ln -s ../drawn d/l; chmod 700 d";
    let parent = shell_episode(
        &yard,
        &[drawn, "cat drawn log; rm log; gzip -k drawn", "rm drawn"],
    )
    .await;
    let (_, point) = branch(&parent, CLOCKS, &yard.pool, 2).await.unwrap();
    assert!(point.is_none(), "running it again brings something else");
    let point = restored(&yard, &parent, 2).await;
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        2 => shell("cat d/l; ls log; zcat drawn.gz; stat -c %a d"),
        _ => submit(),
    })
    .await
    .unwrap();
    let mut options = yard.options(vec![parent.task.clone()], policy(&endpoint));
    options.run_id = RunId::from("branch");
    options.branch = Some(point);
    options.samples = 2;
    let summary = yard.run(options).await.unwrap();
    assert_eq!(
        (summary.done, summary.infrastructure),
        (2, 0),
        "{summary:?}"
    );
    let all = recorded(&yard, std::slice::from_ref(&parent.task)).await;
    let branched: Vec<&Recorded> = all
        .iter()
        .filter(|one| one.episode.parent_episode_id.is_some())
        .collect();
    assert_eq!(branched.len(), 2);
    let drawn = parent.tool_calls[1].stdout.lines().next().unwrap();
    for one in &branched {
        assert_eq!(one.tool_calls[2].stdout, format!("{drawn}\n{drawn}\n700\n"));
        assert!(one.tool_calls[2].stderr.contains("log"), "it was removed");
        assert_eq!(one.tool_calls[..2].len(), 2);
        assert_eq!(one.steps[2].history_hash, parent.steps[2].history_hash);
        // A branch of a branch has what both kept.
        restored(&yard, one, 3).await;
    }
    // What was not kept is missing, and said to be.
    let nowhere = yard.path("nowhere");
    let mut bare = parent.clone();
    bare.episode.artifacts.clear();
    let missing = restore(&bare, &yard.pool, 2, &nowhere).await.unwrap();
    assert!(!missing.unwrap_err().to_string().is_empty());
    // What was kept is looked at: other hashes are another episode's.
    let mut altered = parent.clone();
    altered.tool_calls[0].files_changed[0].after_hash = Some("0".repeat(64));
    let store = yard.path("artifacts");
    let missing = restore(&altered, &yard.pool, 2, &store).await.unwrap();
    assert!(missing.is_err());
}

/// Where today's tools take a call for something else, the steps that a branch takes over can't be followed.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_the_tools_no_longer_take_can_not_be_taken_over() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let mut recorded = shell_episode(&yard, &["echo a", "echo b"]).await;
    let mut rejected = recorded.clone();
    recorded.tool_calls[1].tool = "gone_tool".to_owned();
    let (why, way_out) = refused_branch(&yard, &recorded, 2).await;
    assert!(
        why.contains("gone_tool") && why.contains("call 0 of step 1"),
        "{why}"
    );
    assert!(way_out.contains("step 1 or before"), "{way_out}");
    let store = yard.path("artifacts");
    let error = restore(&recorded, &yard.pool, 2, &store).await.unwrap_err();
    assert!(error.to_string().contains("gone_tool"), "{error}");
    assert!(branch(&recorded, CLOCKS, &yard.pool, 1).await.is_ok());
    // One that was rejected then and would be run now.
    rejected.tool_calls[0].outcome = "rejected".to_owned();
    rejected.episode.toolset_hash = "other".to_owned();
    let (why, _) = refused_branch(&yard, &rejected, 1).await;
    assert!(why.contains("would be run now"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_go_on_from_the_state_at_their_step() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    // The third file is too large for the journal: its state comes back because the call is run again.
    let parent = shell_episode(
        &yard,
        &[
            "echo a > x; mkdir d; chmod 700 d; head -c 2000000 /dev/zero > big",
            "echo b >> x; no-such-program",
            "rm x big",
        ],
    )
    .await;
    let (replayed, point) = branch(&parent, CLOCKS, &yard.pool, 2).await.unwrap();
    assert!(
        replayed.is_same() && replayed.calls.len() == 2,
        "{replayed:?}"
    );
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        2 => shell("cat x; wc -c < big; stat -c %a d"),
        3 => shell("echo c >> x; cat x"),
        _ => submit(),
    })
    .await
    .unwrap();
    let mut options = yard.options(vec![parent.task.clone()], policy(&endpoint));
    options.branch = point;
    options.samples = 3;
    let summary = yard.run(options.clone()).await.unwrap();
    assert_eq!(
        (summary.done, summary.infrastructure),
        (3, 0),
        "{summary:?}"
    );
    let own = options.run_id.clone();
    assert_eq!(parent.episode.run_id, own, "also within the parent's run");

    let all = recorded(&yard, std::slice::from_ref(&parent.task)).await;
    let branched: Vec<&Recorded> = all
        .iter()
        .filter(|one| one.episode.parent_episode_id.is_some())
        .collect();
    assert_eq!((all.len(), branched.len()), (4, 3));
    for one in &branched {
        let episode = &one.episode;
        assert_eq!(
            episode.parent_episode_id.as_ref(),
            Some(&parent.episode.episode_id)
        );
        // A group of their own: the parent's baseline has nothing of them.
        assert_ne!(episode.group_id, parent.episode.group_id);
        assert_eq!(episode.group_id, branched[0].episode.group_id);
        let said: Vec<&str> = one
            .tool_calls
            .iter()
            .map(|row| row.stdout.as_str())
            .collect();
        assert_eq!(said[2..4], ["a\nb\n2000000\n700\n", "a\nb\nc\n"]);
        assert_eq!(
            (episode.n_steps, episode.end_reason.as_str()),
            (5, "submitted")
        );
        // The model saw what it had seen.
        assert_eq!(one.steps[2].history_hash, parent.steps[2].history_hash);
        assert!(again(&yard, one).await.is_same());
    }
    let first = |request: &Value| {
        let messages = request["messages"].as_array().unwrap();
        messages.iter().filter(|m| m["role"] == "assistant").count()
    };
    assert_eq!(endpoint.requests().iter().map(first).min(), Some(2));
    // Made once.
    let more = yard.run(options).await.unwrap();
    assert_eq!((more.earlier, more.done), (3, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_does_not_come_back_is_no_branch() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let parent = shell_episode(&yard, &["head -c 8 /dev/urandom | od -An -tx1 > r", "ls"]).await;
    let (replayed, point) = branch(&parent, CLOCKS, &yard.pool, 1).await.unwrap();
    assert!(point.is_none() && !replayed.is_same());
    let (_, point) = branch(&parent, CLOCKS, &yard.pool, 0).await.unwrap();
    assert!(point.is_some(), "nothing ran before step 0");
    let (why, _) = refused_branch(&yard, &parent, 4).await;
    assert!(why.contains("3 steps"), "{why}");
}
