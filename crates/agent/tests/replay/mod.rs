//! Replay and branch: recorded calls again, days later, and new episodes from the middle of an old one.

use std::time::Duration;

use drillyard_agent::{Clocks, Policy, Recorded, Replay, Sameness, branch};
use drillyard_schema::table::{EpisodeRow, MessageRow, StepRow, TokenRow, ToolCallRow};
use drillyard_schema::{EpisodeId, Task};
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
    // Without the record of one that was carried out the call gives something else.
    let mut forgotten = recorded.clone();
    let refused = forgotten
        .tool_calls
        .iter_mut()
        .find(|row| row.outcome == "error" && row.fault_injected.is_some());
    let refused = refused.unwrap();
    refused.extras = None;
    let place = refused.step_index;
    let replay = again(&yard, &forgotten).await;
    assert_eq!(replay.calls[place as usize].sameness, Sameness::Differs);
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
    let error = branch(&parent, CLOCKS, &yard.pool, 3).await.unwrap_err();
    assert!(error.to_string().contains("3 steps"), "{error}");
}
