//! What the journal keeps, and what it makes of damage.

use std::collections::BTreeMap;
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use proptest::prelude::*;
use serde_json::json;

use super::{child, child_dir, dir, sample};
use crate::record::encode;
use crate::recovery::Replay;
use crate::{Journal, JournalEvent, JournalOptions, LakeError, LoggedFile, Recovered, SyncPolicy};

/// Segments so small that most records have one of their own.
const SMALL: JournalOptions = JournalOptions {
    sync: SyncPolicy::Grouped(Duration::from_millis(1)),
    segment_bytes: 300,
};

fn started(n: usize) -> JournalEvent {
    JournalEvent::EpisodeStarted {
        episode_id: sample::id(n),
        data: json!({ "attempt": 0, "at": 1.5 }),
    }
}

fn turn(n: usize, step: i32) -> JournalEvent {
    JournalEvent::Turn {
        episode_id: sample::id(n),
        step_index: step,
        data: json!({ "text": "x".repeat(step as usize), "ids": [1, -2, null] }),
    }
}

fn intent(n: usize, step: i32) -> JournalEvent {
    JournalEvent::CallIntent {
        episode_id: sample::id(n),
        step_index: step,
        call_index: 0,
    }
}

fn result(n: usize, step: i32) -> JournalEvent {
    let files = vec![
        LoggedFile {
            path: "a b/ü".into(),
            content: Some("aGk=".into()),
        },
        LoggedFile {
            path: "gone".into(),
            content: None,
        },
    ];
    JournalEvent::CallResult {
        episode_id: sample::id(n),
        step_index: step,
        call_index: 0,
        data: json!({ "exit": 0 }),
        files,
        state_lost: false,
    }
}

fn finished(n: usize) -> JournalEvent {
    JournalEvent::EpisodeFinished(Box::new(sample::bundle(n)))
}

fn replay(events: &[JournalEvent]) -> Recovered {
    let mut replay = Replay::default();
    events.iter().cloned().for_each(|event| replay.event(event));
    replay.finish(0)
}

fn segments(dir: &Utf8Path) -> Vec<Utf8PathBuf> {
    let mut paths: Vec<Utf8PathBuf> = dir
        .read_dir_utf8()
        .unwrap()
        .map(|e| e.unwrap().into_path())
        .collect();
    paths.retain(|path| path.extension() == Some("journal"));
    paths.sort();
    paths
}

#[test]
fn events_come_back_in_order() {
    let (_keep, dir) = dir();
    let (journal, empty) = Journal::open(&dir, "0").unwrap();
    assert_eq!(empty, Recovered::default());
    for event in [
        started(0),
        turn(0, 0),
        started(1),
        intent(0, 0),
        result(0, 0),
        finished(2),
    ] {
        journal.append(&event, false).unwrap();
    }
    drop(journal);
    let (_journal, recovered) = Journal::open(&dir, "0").unwrap();
    assert_eq!(
        recovered.unfinished[&sample::id(0)],
        [started(0), turn(0, 0), intent(0, 0), result(0, 0)]
    );
    assert_eq!(recovered.unfinished[&sample::id(1)], [started(1)]);
    assert_eq!(recovered.finished, [sample::bundle(2)]);
}

#[test]
fn a_fresh_start_forgets_the_attempt_before() {
    let recovered = replay(&[started(0), turn(0, 0), started(0), turn(0, 1)]);
    assert_eq!(
        recovered.unfinished[&sample::id(0)],
        [started(0), turn(0, 1)]
    );
}

#[test]
fn what_follows_an_episodes_end_changes_nothing() {
    let end = JournalEvent::BatchCommitted { number: 1 };
    let batch = JournalEvent::BatchStarted {
        number: 1,
        episodes: vec![sample::id(0)],
    };
    for late in [started(0), turn(0, 0), finished(0)] {
        let recovered = replay(&[finished(0), late.clone()]);
        assert_eq!(
            (recovered.finished.len(), recovered.unfinished.len()),
            (1, 0),
            "{late:?}"
        );
        let recovered = replay(&[finished(0), batch.clone(), end.clone(), late.clone()]);
        assert_eq!(
            (recovered.finished.len(), recovered.unfinished.len()),
            (0, 0),
            "{late:?}"
        );
    }
}

#[test]
fn batches_are_open_until_they_are_committed() {
    let open = |number, ns: &[usize]| JournalEvent::BatchStarted {
        number,
        episodes: ns.iter().map(|n| sample::id(*n)).collect(),
    };
    let recovered = replay(&[
        finished(0),
        finished(1),
        open(4, &[0]),
        JournalEvent::BatchCommitted { number: 4 },
        finished(2),
        open(5, &[2, 1]),
    ]);
    assert_eq!(recovered.finished, [sample::bundle(1), sample::bundle(2)]);
    assert_eq!(
        recovered.open_batches.into_iter().collect::<Vec<_>>(),
        [(5, vec![sample::id(2), sample::id(1)])]
    );
    assert_eq!(recovered.last_batch, 5);
}

#[test]
fn segments_go_from_the_oldest_once_their_episodes_are_in_the_lake() {
    let (_keep, dir) = dir();
    let (journal, _) = Journal::open_with(&dir, "0", SMALL).unwrap();
    journal.append(&started(0), false).unwrap();
    for n in 1..4 {
        journal.append(&finished(n), true).unwrap();
    }
    let all = segments(&dir).len();
    assert!(all >= 3, "{all}");
    // Episode 0 still runs, and the oldest segment holds its beginning.
    journal
        .batch_committed(1, &[sample::id(1), sample::id(2), sample::id(3)])
        .unwrap();
    assert!(segments(&dir).len() >= all);
    journal.append(&finished(0), true).unwrap();
    journal.batch_committed(2, &[sample::id(0)]).unwrap();
    assert_eq!(segments(&dir).len(), 1);
    assert_eq!(journal.bytes(), 0);
    // It goes on after that.
    journal.append(&started(7), true).unwrap();
    drop(journal);
    let (journal, recovered) = Journal::open_with(&dir, "0", SMALL).unwrap();
    assert_eq!(
        recovered.unfinished.keys().collect::<Vec<_>>(),
        [&sample::id(7)]
    );
    assert!(recovered.finished.is_empty());
    drop(journal);
}

#[test]
fn compacting_keeps_what_is_unfinished() {
    let (_keep, dir) = dir();
    let (journal, _) = Journal::open_with(&dir, "0", SMALL).unwrap();
    for event in [
        started(0),
        finished(1),
        turn(0, 3),
        finished(2),
        result(0, 3),
    ] {
        journal.append(&event, false).unwrap();
    }
    drop(journal);
    let (journal, before) = Journal::open_with(&dir, "0", SMALL).unwrap();
    journal.compact(&before.unfinished, 9).unwrap();
    assert_eq!(segments(&dir).len(), 1);
    journal.append(&turn(0, 4), false).unwrap();
    drop(journal);
    let (journal, after) = Journal::open_with(&dir, "0", SMALL).unwrap();
    assert_eq!(
        after.unfinished[&sample::id(0)],
        [started(0), turn(0, 3), result(0, 3), turn(0, 4)]
    );
    assert!(after.finished.is_empty());
    assert_eq!(after.last_batch, 9);
    journal.compact(&BTreeMap::new(), 9).unwrap();
    assert_eq!(journal.bytes(), 0, "nothing unfinished, nothing kept");
}

#[test]
fn a_whole_record_of_another_version_is_an_error() {
    let (_keep, dir) = dir();
    let payload = b"\x81\xafFromTheFuture!!\x01";
    let mut record = (payload.len() as u32).to_le_bytes().to_vec();
    record.extend(crc32fast::hash(payload).to_le_bytes());
    record.extend(payload);
    let path = dir.join("0.000001.journal");
    std::fs::write(&path, &record).unwrap();
    let error = Journal::open(&dir, "0").unwrap_err();
    assert!(
        matches!(&error, LakeError::Journal { path: p, .. } if *p == path),
        "{error:?}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), record, "it is left alone");
}

#[test]
fn damage_before_the_last_segment_is_an_error() {
    let (_keep, dir) = dir();
    let (journal, _) = Journal::open_with(&dir, "0", SMALL).unwrap();
    for n in 0..4 {
        journal.append(&finished(n), false).unwrap();
    }
    drop(journal);
    let path = segments(&dir)[0].clone();
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = Journal::open_with(&dir, "0", SMALL).unwrap_err();
    assert!(error.to_string().contains(path.as_str()), "{error}");
}

#[test]
fn shards_do_not_see_each_other() {
    let (_keep, dir) = dir();
    let (one, _) = Journal::open(&dir, "0").unwrap();
    let (other, _) = Journal::open(&dir, "0.1").unwrap();
    one.append(&started(0), false).unwrap();
    other.append(&started(1), false).unwrap();
    drop((one, other));
    assert_eq!(Journal::open(&dir, "0").unwrap().1, replay(&[started(0)]));
    assert_eq!(Journal::open(&dir, "0.1").unwrap().1, replay(&[started(1)]));
    assert!(Journal::open(&dir, "a/b").is_err());
}

#[test]
fn syncing_each_record_or_in_groups_makes_no_difference_to_what_is_read() {
    for sync in [
        SyncPolicy::EveryRecord,
        SyncPolicy::Grouped(Duration::from_millis(1)),
    ] {
        let (_keep, dir) = dir();
        let (journal, _) = Journal::open_with(
            &dir,
            "0",
            JournalOptions {
                sync,
                segment_bytes: 1000,
            },
        )
        .unwrap();
        std::thread::scope(|scope| {
            for n in 0..4 {
                let journal = journal.clone();
                scope.spawn(move || {
                    for step in 0..10 {
                        journal.append(&turn(n, step), step % 3 == 0).unwrap();
                    }
                });
            }
        });
        drop(journal);
        let (_journal, recovered) = Journal::open(&dir, "0").unwrap();
        for n in 0..4 {
            assert_eq!(
                recovered.unfinished[&sample::id(n)],
                (0..10).map(|step| turn(n, step)).collect::<Vec<_>>()
            );
        }
    }
}

#[test]
fn a_second_process_is_told_who_holds_the_journal() {
    if let Some(dir) = child_dir() {
        let Err(error) = Journal::open(&dir, "0") else {
            return;
        };
        print!("{error}");
        return;
    }
    let (_keep, dir) = dir();
    let (journal, _) = Journal::open(&dir, "0").unwrap();
    let ask = || {
        child(
            "tests::journal::a_second_process_is_told_who_holds_the_journal",
            &dir,
        )
        .output()
        .unwrap()
    };
    let said = String::from_utf8(ask().stdout).unwrap();
    assert!(
        said.contains(&format!("held by process {}", std::process::id())),
        "{said}"
    );
    drop(journal);
    let said = String::from_utf8(ask().stdout).unwrap();
    assert!(!said.contains("held by"), "{said}");
}

fn any_event() -> impl Strategy<Value = JournalEvent> {
    (0..6_usize, 0..5_i32, 0..6_u8).prop_map(|(n, step, kind)| match kind {
        0 => started(n),
        1 => turn(n, step),
        2 => intent(n, step),
        3 => result(n, step),
        4 => finished(n),
        _ => JournalEvent::BatchStarted {
            number: i64::from(step),
            episodes: vec![sample::id(n)],
        },
    })
}

proptest! {
    #[test]
    fn any_damage_to_the_tail_leaves_a_prefix(
        events in prop::collection::vec(any_event(), 1..14),
        segment_bytes in prop_oneof![Just(200_u64), Just(1500), Just(1 << 20)],
        place in any::<prop::sample::Index>(),
        flip in prop::option::of(0..8_u32),
    ) {
        let (_keep, dir) = dir();
        let options = JournalOptions { segment_bytes, ..SMALL };
        let (journal, _) = Journal::open_with(&dir, "0", options).unwrap();
        for event in &events {
            journal.append(event, false).unwrap();
        }
        drop(journal);

        // Damage one byte of the last segment, or cut it there.
        let paths = segments(&dir);
        let last = paths.last().unwrap();
        let mut bytes = std::fs::read(last).unwrap();
        let at = place.index(bytes.len());
        match flip {
            Some(bit) => bytes[at] ^= 1 << bit,
            None => bytes.truncate(at),
        }
        std::fs::write(last, &bytes).unwrap();

        // Whole are the records that end before it.
        let before: usize = paths[..paths.len() - 1].iter().map(|p| std::fs::metadata(p).unwrap().len() as usize).sum();
        let mut end = 0;
        let whole = events.iter().take_while(|event| { end += encode(event).unwrap().len(); end <= before + at }).count();
        let opened = Journal::open_with(&dir, "0", options);
        // A payload that is wrong in front of a whole record was not torn by a kill: nothing is cut off.
        let start: usize = events[..whole].iter().map(|event| encode(event).unwrap().len()).sum::<usize>() - before;
        let in_payload = flip.is_some() && at >= start + 8 && whole + 1 < events.len();
        if let (Err(error), true) = (&opened, flip.is_some()) {
            prop_assert!(error.to_string().contains("damaged"), "{error}");
            prop_assert_eq!(std::fs::read(last).unwrap(), bytes);
            return Ok(());
        }
        prop_assert!(!in_payload, "damage before a whole record went unnoticed");
        let (journal, recovered) = opened.unwrap();
        let expected = replay(&events[..whole]);
        prop_assert_eq!(&recovered.unfinished, &expected.unfinished);
        prop_assert_eq!(&recovered.finished, &expected.finished);
        prop_assert_eq!(&recovered.open_batches, &expected.open_batches);

        // What is appended after the damage is readable.
        let mut after = events[..whole].to_vec();
        after.push(turn(0, 4));
        journal.append(&turn(0, 4), false).unwrap();
        drop(journal);
        let (_journal, again) = Journal::open_with(&dir, "0", options).unwrap();
        prop_assert_eq!(again, replay(&after));
    }
}
