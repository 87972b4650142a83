//! Kills at every point: each episode is in the lake once in the end, whole.

use std::collections::BTreeSet;
use std::process::ExitStatus;
use std::time::Duration;

use camino::Utf8Path;
use drillyard_schema::EpisodeId;
use drillyard_schema::table::EpisodeRow;
use serde_json::json;

use super::{child, child_dir, content, dir, once, open, options, read, sample};
use crate::{CRASH_VARIABLE, Journal, JournalEvent, JournalOptions, Writer, WriterOptions};

const EPISODES: usize = 9;

/// What a rollout does: takes up where the one before was cut off, and ends with every episode in the lake.
async fn rollout(dir: &Utf8Path) {
    let lake = open(dir).await;
    let journal = JournalOptions {
        segment_bytes: 2000,
        ..JournalOptions::new()
    };
    let (writer, recovered) = Writer::start(
        lake.clone(),
        WriterOptions {
            journal,
            ..options(dir)
        },
    )
    .await
    .unwrap();
    let done: BTreeSet<EpisodeId> = read::<EpisodeRow>(&lake.snapshot().await.unwrap())
        .await
        .into_iter()
        .map(|r| r.episode_id)
        .collect();
    for bundle in &recovered.finished {
        assert!(
            done.contains(&bundle.episode.episode_id),
            "what was recovered is in the lake once the writer has started"
        );
    }
    for id in recovered.unfinished.keys() {
        assert!(!done.contains(id), "{id} is in the lake and unfinished");
    }
    for n in (0..EPISODES).filter(|n| !done.contains(&sample::id(*n))) {
        let episode_id = sample::id(n);
        let past = recovered.unfinished.get(&episode_id).map_or(0, Vec::len);
        let events = [
            JournalEvent::EpisodeStarted {
                episode_id: episode_id.clone(),
                data: json!({}),
            },
            JournalEvent::Turn {
                episode_id: episode_id.clone(),
                step_index: 0,
                data: json!({ "text": "look" }),
            },
            JournalEvent::CallIntent {
                episode_id,
                step_index: 0,
                call_index: 0,
            },
        ];
        // Only what is not in the journal happens.
        for event in &events[past..] {
            writer.journal().append(event, false).unwrap();
        }
        writer.submit(sample::bundle(n)).await.unwrap();
    }
    writer.finish().await.unwrap();
}

fn run_child(test: &str, dir: &Utf8Path, point: Option<&str>) -> ExitStatus {
    let mut command = child(test, dir);
    if let Some(point) = point {
        command.env(CRASH_VARIABLE, point);
    }
    command.output().unwrap().status
}

async fn everything_is_in_once(dir: &Utf8Path, what: &str) {
    let expected: Vec<_> = (0..EPISODES).map(sample::bundle).collect();
    assert_eq!(content(&open(dir).await).await, once(&expected), "{what}");
    let (journal, recovered) = Journal::open(&dir.join("journal"), "0").unwrap();
    assert_eq!(
        (
            journal.bytes(),
            recovered.finished.len(),
            recovered.unfinished.len()
        ),
        (0, 0, 0),
        "{what}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_at_any_named_point_loses_and_doubles_nothing() {
    const SELF: &str = "tests::crash::a_kill_at_any_named_point_loses_and_doubles_nothing";
    if let Some(dir) = child_dir() {
        rollout(&dir).await;
        return;
    }
    // Two kills each: the second hits the start that recovers from the first, or the run after it.
    let points: &[&[&str]] = &[
        &["journal_write", "journal_write:9"],
        &["journal_write:3", "mid_compact"],
        &["after_finished:2", "before_batch"],
        &["before_batch", "before_batch"],
        &["mid_append:3", "mid_append:5"],
        &["after_tokens", "after_tokens"],
        &["after_tool_calls", "after_steps"],
        &["after_steps:2", "between_tables"],
        &["after_messages", "after_rewards:2"],
        &["after_rewards", "after_verdicts"],
        &["after_verdicts", "after_tasks:2"],
        &["after_tasks", "before_episodes"],
        &["journal_write:7", "mid_compact"],
        &["after_episodes:3", "after_batch"],
        &["between_tables:10", "between_tables:4"],
        &["after_batch:2", "after_episodes"],
    ];
    for kills in points {
        let (_keep, dir) = dir();
        for point in *kills {
            assert!(
                !run_child(SELF, &dir, Some(point)).success(),
                "{kills:?}: the child passed {point} alive, so the kill was not tested"
            );
        }
        assert!(
            run_child(SELF, &dir, None).success(),
            "{kills:?}: the run after the kills"
        );
        everything_is_in_once(&dir, &format!("{kills:?}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_at_random_moments_lose_and_double_nothing() {
    const SELF: &str = "tests::crash::kills_at_random_moments_lose_and_double_nothing";
    if let Some(dir) = child_dir() {
        rollout(&dir).await;
        return;
    }
    let seed = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .subsec_nanos();
    println!("seed {seed}");
    let (_keep, dir) = dir();
    let mut random = u64::from(seed);
    let mut killed = 0;
    for _ in 0..8 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let mut process = child(SELF, &dir)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        tokio::time::sleep(Duration::from_millis(20 + (random >> 33) % 600)).await;
        process.kill().unwrap();
        killed += usize::from(!process.wait().unwrap().success());
    }
    println!("{killed} of 8 were killed before their end");
    assert!(run_child(SELF, &dir, None).success());
    everything_is_in_once(&dir, &format!("seed {seed}")).await;
}
