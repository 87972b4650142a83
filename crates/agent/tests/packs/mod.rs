//! What calls changed, brought back from what was recorded, without running any of them again.

use std::collections::BTreeMap;

use drillyard_agent::{CallChanges, Missing, Recorded, changes_before};
use drillyard_sandbox::{Call, CallOutcome, FaultKind, Sandbox, Setup};
use drillyard_testkit::FakeEndpoint;

use super::{Yard, faults, policy, replay, shell, submit, tasks};

/// One episode of shell commands and `submit`.
async fn episode(yard: &Yard, commands: &[&str]) -> Recorded {
    replay::shell_episode(yard, commands).await
}

fn changes(yard: &Yard, recorded: &Recorded, at: u32) -> Result<Vec<CallChanges>, Missing> {
    let store = yard.path("artifacts");
    changes_before(&recorded.episode, &recorded.tool_calls, at, &store)
}

async fn shell_in(sandbox: &mut Sandbox, command: &str) -> String {
    let result = sandbox.call(Call::shell(command)).await.unwrap();
    assert_eq!(result.outcome, CallOutcome::Ok, "{result:?}");
    String::from_utf8(result.stdout).unwrap()
}

/// A fresh sandbox with what had changed before step `at`.
async fn restored(yard: &Yard, recorded: &Recorded, at: u32) -> Sandbox {
    let mut sandbox = yard.pool.lease(&Setup::default()).await.unwrap();
    for call in changes(yard, recorded, at).unwrap() {
        assert!(!call.incomplete);
        if !call.sandbox_ended {
            sandbox.apply(&call.files).await.unwrap();
        }
    }
    sandbox
}

const LOOK: &str = "ls -AR /work /tmp | sort; cat log; stat -c '%a %n' d; readlink l || true";

#[tokio::test(flavor = "multi_thread")]
async fn files_come_back_as_they_were_at_any_step() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    // Nothing here gives the same twice.
    let recorded = episode(
        &yard,
        &[
            "date +%N > log; mkdir d; chmod 700 d",
            "head -c 300 /dev/urandom | tee d/random | gzip > d/packed; mktemp -p /tmp; ln -s d/random l",
            "date +%N >> log; rm d/packed; head -c 3M /dev/zero > large",
            "rm -r large d; mkdir d; echo new > d/file",
        ],
    )
    .await;
    let last = changes(&yard, &recorded, 4).unwrap();
    assert_eq!(last.len(), 4);
    let log: Vec<_> = last
        .iter()
        .flat_map(|call| &call.files)
        .filter(|file| file.path == "log")
        .map(|file| file.content.clone().unwrap())
        .collect();
    assert_eq!(log.len(), 2);
    assert!(log[1].starts_with(&log[0]) && log[1].len() > log[0].len());

    let mut sandbox = restored(&yard, &recorded, 2).await;
    let seen = shell_in(&mut sandbox, LOOK).await;
    for part in ["700 d", "d/random\n", "packed", "tmp."] {
        assert!(seen.contains(part), "{part}: {seen}");
    }
    let same = "gzip -dc d/packed | cmp - d/random && echo same";
    assert_eq!(shell_in(&mut sandbox, same).await, "same\n");
    let mut sandbox = restored(&yard, &recorded, 1).await;
    let seen = shell_in(&mut sandbox, LOOK).await;
    assert!(!seen.contains("random"), "{seen}");
    // A large file is in the way at the step that has it, and at no other.
    let missing = changes(&yard, &recorded, 3).unwrap_err();
    let names_it = matches!(&missing, Missing::Lost { what } if what.contains("'large'"));
    assert!(names_it, "{missing}");
    assert!(changes(&yard, &recorded, 0).unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_ended_sandbox_took_along_is_not_missing() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let mut recorded = episode(&yard, &["head -c 3M /dev/zero > large; echo a > x", "ls"]).await;
    let lost =
        |recorded: &Recorded| matches!(changes(&yard, recorded, 2), Err(Missing::Lost { .. }));
    assert!(lost(&recorded));
    recorded.tool_calls[1].extras = Some(r#"{"sandbox_ended":true}"#.to_owned());
    assert!(!lost(&recorded));
    // An injected fault ended it: the agent has not lost the file.
    recorded.tool_calls[1].fault_injected = Some("disk_full".to_owned());
    assert!(lost(&recorded));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_changed_comes_back_too() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let endpoint = FakeEndpoint::start(|request| match request.turn {
        0 => shell("echo a > out.txt"),
        1 => shell("cat out.txt notes.txt"),
        _ => submit(),
    })
    .await
    .unwrap();
    let tasks = tasks(1);
    let mut options = yard.options(tasks.clone(), policy(&endpoint));
    options.faults = faults::plan(&[(FaultKind::ConcurrentChange, 1.0)], &["execute_shell"]);
    yard.run(options).await.unwrap();
    let recorded = replay::recorded(&yard, &tasks).await.pop().unwrap();
    let mut files = BTreeMap::new();
    for call in changes(&yard, &recorded, 2).unwrap() {
        for file in call.files {
            files.insert(file.path, file.content.unwrap());
        }
    }
    assert_eq!(files["out.txt"], b"a\na\n");
    assert_eq!(files["notes.txt"], b"written by another process\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_or_damaged_is_said() {
    let Some(yard) = Yard::open().await else {
        return;
    };
    let recorded = episode(&yard, &["ls", "echo a > x", "echo b > y"]).await;
    let pack = recorded.episode.artifacts.last().unwrap();
    assert_eq!(pack.path, "file changes");
    let damaged =
        |recorded: &Recorded| matches!(changes(&yard, recorded, 2), Err(Missing::Damaged { .. }));
    // Nothing changed before the second step: nothing is needed.
    let mut without = recorded.clone();
    without.episode.artifacts.clear();
    assert_eq!(changes(&yard, &without, 1).unwrap().len(), 1);
    assert!(matches!(changes(&yard, &without, 2), Err(Missing::NoPack)));
    // Rows that say something else.
    let mut other = recorded.clone();
    other.tool_calls[1].files_changed[0].after_hash = Some("0".repeat(64));
    assert!(damaged(&other));
    let mut other = recorded.clone();
    other.tool_calls[1].files_changed.clear();
    other.tool_calls[1].state_lost = true;
    assert!(damaged(&other));
    // A yard that was moved: the store is asked first, and by content.
    let mut moved = recorded.clone();
    moved.episode.artifacts.last_mut().unwrap().uri = "/elsewhere".to_owned();
    assert_eq!(changes(&yard, &moved, 3).unwrap().len(), 3);
    let content = std::fs::read(&pack.uri).unwrap();
    std::fs::write(&pack.uri, &content[..content.len() - 1]).unwrap();
    assert!(damaged(&recorded));
    std::fs::remove_file(&pack.uri).unwrap();
    let gone = changes(&yard, &recorded, 2);
    assert!(matches!(gone, Err(Missing::NotFound { .. })), "{gone:?}");
}
