//! The writer in quiet times.

use std::time::Duration;

use drillyard_schema::Table;
use drillyard_schema::table::EpisodeRow;

use super::{content, dir, once, open, options, read, sample};
use crate::{Journal, JournalEvent, LakeError, Txn, Writer, WriterOptions};

#[tokio::test]
async fn batches_reach_the_lake_and_the_journal_is_emptied() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let bundles: Vec<_> = (0..10).map(sample::bundle).collect();
    let (writer, recovered) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    assert!(recovered.finished.is_empty() && recovered.unfinished.is_empty());
    for bundle in &bundles {
        writer.submit(bundle.clone()).await.unwrap();
    }
    let report = writer.finish().await.unwrap();
    assert_eq!((report.episodes, report.steps, report.batches), (10, 19, 3));
    assert_eq!(content(&lake).await, once(&bundles));

    let (writer, recovered) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    assert_eq!(writer.journal().bytes(), 0);
    assert!(recovered.finished.is_empty());
    // The second attempt at a task does not write the task again.
    writer.submit(sample::bundle(10)).await.unwrap();
    writer.finish().await.unwrap();
    let (writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    writer.submit(sample::bundle(11)).await.unwrap();
    writer.finish().await.unwrap();
    assert_eq!(
        content(&lake).await,
        once(&(0..12).map(sample::bundle).collect::<Vec<_>>())
    );
}

#[tokio::test]
async fn a_batch_is_committed_when_it_is_old_or_large() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let young = WriterOptions {
        batch_age: Duration::from_millis(20),
        ..WriterOptions::new(dir.join("journal"), "run", "age")
    };
    let large = WriterOptions {
        batch_bytes: 1,
        ..WriterOptions::new(dir.join("journal"), "run", "bytes")
    };
    for (n, options) in [young, large].into_iter().enumerate() {
        let (writer, _) = Writer::start(lake.clone(), options).await.unwrap();
        writer.submit(sample::bundle(n)).await.unwrap();
        // Visible while the writer goes on.
        let deadline = std::time::Instant::now() + Duration::from_mins(1);
        while read::<EpisodeRow>(&lake.snapshot().await.unwrap())
            .await
            .len()
            <= n
        {
            assert!(
                std::time::Instant::now() < deadline,
                "the batch was never committed"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        writer.finish().await.unwrap();
    }
}

#[tokio::test]
async fn an_episode_handed_over_twice_is_written_once() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let (writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    for n in [0, 1, 0, 1] {
        writer.submit(sample::bundle(n)).await.unwrap();
    }
    assert_eq!(writer.finish().await.unwrap().episodes, 2);
    assert_eq!(
        content(&lake).await,
        once(&[sample::bundle(0), sample::bundle(1)])
    );
}

#[tokio::test]
async fn journalled_episodes_reach_the_lake_at_the_next_start() {
    let (_keep, dir) = dir();
    let bundles: Vec<_> = (0..6).map(sample::bundle).collect();
    let begun = JournalEvent::EpisodeStarted {
        episode_id: sample::id(99),
        data: serde_json::json!({ "attempt": 1 }),
    };
    let (journal, _) = Journal::open(&dir.join("journal"), "0").unwrap();
    journal.append(&begun, false).unwrap();
    for bundle in &bundles {
        journal
            .append(
                &JournalEvent::EpisodeFinished(Box::new(bundle.clone())),
                true,
            )
            .unwrap();
    }
    drop(journal);
    let lake = open(&dir).await;
    let (writer, recovered) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    assert_eq!(recovered.finished.len(), 6);
    assert_eq!(
        content(&lake).await,
        once(&bundles),
        "in the lake once the writer has started"
    );
    // Whoever still hands one over again does no harm.
    writer.submit(bundles[0].clone()).await.unwrap();
    writer.finish().await.unwrap();
    assert_eq!(content(&lake).await, once(&bundles));

    let (_, recovered) = Journal::open(&dir.join("journal"), "0").unwrap();
    assert!(recovered.finished.is_empty());
    assert_eq!(
        recovered.unfinished[&sample::id(99)],
        [begun],
        "an episode that has begun is kept"
    );
}

#[tokio::test]
async fn a_submit_that_nobody_waits_for_is_not_lost() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let (writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    {
        let mut submit = Box::pin(writer.submit(sample::bundle(0)));
        assert!(futures::poll!(&mut submit).is_pending());
    }
    writer.finish().await.unwrap();
    assert_eq!(content(&lake).await, once(&[sample::bundle(0)]));
}

#[tokio::test]
async fn a_second_writer_is_told_who_is_at_it() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let (_writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    let error = Writer::start(lake.clone(), options(&dir))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, LakeError::Locked { holder, .. } if holder.contains(&std::process::id().to_string())),
        "{error:?}"
    );
    assert!(error.is_output());
    let other = WriterOptions {
        shard: "1".into(),
        ..options(&dir)
    };
    Writer::start(lake, other).await.unwrap();
}

#[tokio::test]
async fn a_lost_journal_does_not_swallow_later_batches() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    // A writer died after it committed steps and before it committed episodes, and its journal was given up.
    let txn = Txn {
        app: format!("{}/0", sample::RUN),
        version: 5,
    };
    lake.append(&sample::bundle(0).steps, Some(txn))
        .await
        .unwrap();
    let (writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    writer.submit(sample::bundle(2)).await.unwrap();
    writer.finish().await.unwrap();
    let snapshot = lake.snapshot().await.unwrap();
    let steps: Vec<drillyard_schema::table::StepRow> = read(&snapshot).await;
    assert_eq!(
        steps
            .iter()
            .filter(|s| s.episode_id == sample::id(2))
            .count(),
        3
    );
}

#[tokio::test]
async fn a_shard_that_someone_else_writes_is_an_error() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let (writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    // Someone on another machine, with another journal.
    let txn = Txn {
        app: format!("{}/0", sample::RUN),
        version: 1,
    };
    lake.append(&sample::bundle(0).tokens, Some(txn))
        .await
        .unwrap();
    writer.submit(sample::bundle(1)).await.unwrap();
    let error = writer.finish().await.unwrap_err();
    assert!(
        matches!(&error, LakeError::WriterEnded(cause) if matches!(**cause, LakeError::ShardTaken { table: "tokens", .. })),
        "{error:?}"
    );
}

#[tokio::test]
async fn shards_share_tables() {
    let (_keep, dir) = dir();
    let mut work = tokio::task::JoinSet::new();
    for shard in 0..3 {
        let options = WriterOptions {
            shard: format!("{shard}-of-3"),
            ..options(&dir)
        };
        let lake = open(&dir).await;
        work.spawn(async move {
            let (writer, _) = Writer::start(lake, options).await.unwrap();
            for n in 0..6 {
                writer.submit(sample::bundle(6 * shard + n)).await.unwrap();
            }
            writer.finish().await.unwrap();
        });
    }
    work.join_all().await;
    let lake = open(&dir).await;
    assert_eq!(
        content(&lake).await,
        once(&(0..18).map(sample::bundle).collect::<Vec<_>>())
    );
    assert_eq!(
        lake.last_txn(Table::Episodes, &format!("{}/1-of-3", sample::RUN))
            .await
            .unwrap(),
        Some(2)
    );
}
