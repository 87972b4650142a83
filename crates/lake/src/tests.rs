//! The lake as a whole: what is appended comes back, once, whatever happens in between.

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::table::{
    EpisodeRow, RewardRow, RunRow, StepRow, TaskRow, Timestamp, TokenRow, VerdictRow,
};
use drillyard_schema::{Purpose, RunId, Table};

use crate::{
    EpisodeBundle, Filter, Journal, JournalEvent, Lake, LakeError, Txn, Writer, WriterOptions,
};

fn dir() -> (tempfile::TempDir, Utf8PathBuf) {
    let keep = tempfile::tempdir().unwrap();
    let path = Utf8PathBuf::from_path_buf(keep.path().to_owned()).unwrap();
    (keep, path)
}

fn bundle(id: &str, purpose: &str) -> EpisodeBundle {
    let (run_date, purpose, run_id) = (
        "2026-01-02".to_owned(),
        purpose.to_owned(),
        RunId::from("run-1"),
    );
    EpisodeBundle {
        task: TaskRow {
            run_date: run_date.clone(),
            purpose: purpose.clone(),
            run_id: run_id.clone(),
            task_id: "set/family/1".into(),
            task_set: "set".into(),
            task_set_version: "1".into(),
            family: "family".into(),
            difficulty: Some(1),
            split: Some("train".into()),
            unseen_family: false,
            instruction: "do it".into(),
            verifier: None,
            milestones: None,
            evaluation_set: false,
            source: "test".into(),
            licence: "Apache-2.0".into(),
        },
        episode: EpisodeRow {
            run_date: run_date.clone(),
            purpose: purpose.clone(),
            run_id: run_id.clone(),
            episode_id: id.into(),
            group_id: "g".into(),
            task_id: "set/family/1".into(),
            task_set: "set".into(),
            family: "family".into(),
            split: Some("train".into()),
            status: "finished".into(),
            end_reason: "submitted".into(),
            infrastructure_cause: None,
            policy: "p".into(),
            policy_revision: "r".into(),
            sample_index: 0,
            attempt: 0,
            temperature: 1.0,
            n_steps: 1,
            n_tool_calls: 0,
            n_parse_errors: 0,
            n_repaired: 0,
            prompt_tokens: 3,
            generated_tokens: 2,
            wall_us: 10,
            model_us: 5,
            tool_us: 5,
            cpu_us: None,
            peak_memory_bytes: None,
            started_at: Timestamp(1),
            ended_at: Timestamp(2),
            parent_episode_id: None,
            claimed_success: None,
            claim: None,
            prompt_hash: "h".into(),
            sampling: "{}".into(),
            toolset_version: "1".into(),
            toolset_hash: "t".into(),
            parser_version: "1".into(),
            sandbox_image: "host".into(),
            drillyard_version: "0".into(),
            limits: None,
            artifacts: vec![],
            n_injected_faults: 0,
            n_state_lost: 0,
            imported_from: None,
            evaluation_set: false,
            extras: None,
        },
        messages: vec![],
        steps: vec![StepRow {
            run_date: run_date.clone(),
            purpose: purpose.clone(),
            run_id: run_id.clone(),
            episode_id: id.into(),
            step_index: 0,
            role: "agent".into(),
            history_hash: "h".into(),
            raw_text: "hello".into(),
            reasoning: None,
            finish_reason: None,
            parse_status: "ok".into(),
            parse_error: None,
            n_calls: 0,
            milestone: None,
            temperature: 1.0,
            prompt_tokens: None,
            generated_tokens: None,
            generation_us: 1,
            started_at: Timestamp(1),
            extras: None,
        }],
        tool_calls: vec![],
        tokens: vec![TokenRow {
            run_date: run_date.clone(),
            purpose: purpose.clone(),
            run_id: run_id.clone(),
            episode_id: id.into(),
            step_index: 0,
            kept_prefix: 0,
            context_ids: vec![1, 2, 3],
            generated_ids: vec![4, 5],
            logprobs: vec![-0.1, -0.2],
            loss_spans: vec![],
            tokenizer_hash: "t".into(),
            template_hash: "h".into(),
        }],
        verdicts: vec![VerdictRow {
            run_date: run_date.clone(),
            purpose: purpose.clone(),
            run_id: run_id.clone(),
            episode_id: id.into(),
            kind: "verified".into(),
            verifier: "v".into(),
            verifier_version: "1".into(),
            success: Some(true),
            score: Some(1.0),
            detail: None,
            decided_at: Timestamp(3),
        }],
        rewards: vec![RewardRow {
            run_date,
            purpose,
            run_id,
            episode_id: id.into(),
            step_index: None,
            scheme: "s".into(),
            scheme_version: "1".into(),
            component: "outcome".into(),
            value: 1.0,
        }],
    }
}

fn options(dir: &Utf8Path) -> WriterOptions {
    WriterOptions {
        batch_episodes: 4,
        ..WriterOptions::new(dir.join("journal"), "run-1", "0")
    }
}

async fn ids(lake: &Lake) -> Vec<String> {
    let rows: Vec<EpisodeRow> = lake
        .snapshot()
        .await
        .unwrap()
        .read(&Filter::default())
        .await
        .unwrap();
    let mut ids: Vec<String> = rows.into_iter().map(|r| r.episode_id.0).collect();
    ids.sort();
    ids
}

async fn counts(lake: &Lake) -> Vec<usize> {
    let snapshot = lake.snapshot().await.unwrap();
    let all = Filter::default();
    vec![
        snapshot.read::<TokenRow>(&all).await.unwrap().len(),
        snapshot.read::<StepRow>(&all).await.unwrap().len(),
        snapshot.read::<RewardRow>(&all).await.unwrap().len(),
        snapshot.read::<VerdictRow>(&all).await.unwrap().len(),
        snapshot.read::<EpisodeRow>(&all).await.unwrap().len(),
    ]
}

#[tokio::test]
async fn rows_come_back_with_their_partition_values_in_sort_order() {
    let (_keep, dir) = dir();
    let lake = Lake::open(&dir).await.unwrap();
    let rows: Vec<EpisodeRow> = [("b", "train"), ("a", "train"), ("c", "held_out")]
        .iter()
        .map(|(id, purpose)| bundle(id, purpose).episode)
        .collect();
    assert_eq!(lake.append(&rows, None).await.unwrap(), Some(1));
    let snapshot = lake.snapshot().await.unwrap();
    assert_eq!(
        snapshot.files(Table::Episodes).len(),
        2,
        "one file a partition"
    );
    assert!(snapshot.files(Table::Steps).is_empty());

    let train: Vec<EpisodeRow> = snapshot
        .read(&Filter {
            purposes: vec![Purpose::Train],
            ..Filter::default()
        })
        .await
        .unwrap();
    assert_eq!(train, vec![rows[1].clone(), rows[0].clone()]);
    let none: Vec<EpisodeRow> = snapshot.read(&Filter::run(&"other".into())).await.unwrap();
    assert!(none.is_empty());
}

#[tokio::test]
async fn a_transaction_is_in_once() {
    let (_keep, dir) = dir();
    let lake = Lake::open(&dir).await.unwrap();
    let txn = |version| {
        Some(Txn {
            app: "a".into(),
            version,
        })
    };
    let row = bundle("a", "train").episode;
    assert!(
        lake.append(std::slice::from_ref(&row), txn(1))
            .await
            .unwrap()
            .is_some()
    );
    assert!(
        lake.append(std::slice::from_ref(&row), txn(1))
            .await
            .unwrap()
            .is_none()
    );
    assert!(
        lake.append(std::slice::from_ref(&row), txn(2))
            .await
            .unwrap()
            .is_some()
    );
    assert_eq!(lake.last_txn(Table::Episodes, "a").await.unwrap(), Some(2));
    assert_eq!(lake.last_txn(Table::Episodes, "b").await.unwrap(), None);
    assert_eq!(ids(&lake).await.len(), 2);
}

#[tokio::test]
async fn old_versions_stay_readable() {
    let (_keep, dir) = dir();
    let lake = Lake::open(&dir).await.unwrap();
    lake.append(&[bundle("a", "train").episode], None)
        .await
        .unwrap();
    let before = lake.snapshot().await.unwrap().versions().clone();
    lake.append(&[bundle("b", "train").episode], None)
        .await
        .unwrap();
    let old = lake.snapshot_at(&before).await.unwrap();
    assert_eq!(
        old.read::<EpisodeRow>(&Filter::default())
            .await
            .unwrap()
            .len(),
        1
    );
    assert_eq!(ids(&lake).await, ["a", "b"]);
}

#[tokio::test]
async fn appenders_do_not_lose_each_others_rows() {
    let (_keep, dir) = dir();
    let first = Lake::open(&dir).await.unwrap();
    first
        .append(&[bundle("first", "train").episode], None)
        .await
        .unwrap();
    let mut work = tokio::task::JoinSet::new();
    for i in 0..6 {
        // Each with a lake of its own, as separate processes have.
        let dir = dir.clone();
        work.spawn(async move {
            let lake = Lake::open(&dir).await.unwrap();
            lake.append(&[bundle(&format!("e{i}"), "train").episode], None)
                .await
                .unwrap();
        });
    }
    while let Some(result) = work.join_next().await {
        result.unwrap();
    }
    let lake = Lake::open(&dir).await.unwrap();
    assert_eq!(ids(&lake).await.len(), 7);
}

#[tokio::test]
async fn a_corrupt_file_is_named() {
    let (_keep, dir) = dir();
    let lake = Lake::open(&dir).await.unwrap();
    lake.append(&[bundle("a", "train").episode], None)
        .await
        .unwrap();
    let snapshot = lake.snapshot().await.unwrap();
    let file = &snapshot.files(Table::Episodes)[0].path;
    std::fs::write(file, b"PAR1 this is no parquet PAR1").unwrap();
    let error = snapshot
        .read::<EpisodeRow>(&Filter::default())
        .await
        .unwrap_err();
    assert!(matches!(error, LakeError::Corrupt { .. }));
    assert!(
        error.to_string().contains(file.file_name().unwrap()),
        "{error}"
    );
}

#[tokio::test]
async fn the_writer_commits_in_batches_and_empties_the_journal() {
    let (_keep, dir) = dir();
    let lake = Lake::open(&dir.join("lake")).await.unwrap();
    let (writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    for i in 0..10 {
        writer
            .submit(bundle(&format!("e{i}"), "train"))
            .await
            .unwrap();
    }
    let report = writer.finish().await.unwrap();
    assert_eq!((report.episodes, report.steps, report.batches), (10, 10, 3));
    assert_eq!(counts(&lake).await, [10, 10, 10, 10, 10]);
    let tasks: Vec<TaskRow> = lake
        .snapshot()
        .await
        .unwrap()
        .read(&Filter::default())
        .await
        .unwrap();
    assert_eq!(tasks.len(), 1, "a task is written once per run");

    let (again, recovered) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    assert!(recovered.finished.is_empty());
    again.finish().await.unwrap();
    assert_eq!(counts(&lake).await, [10, 10, 10, 10, 10]);
}

#[tokio::test]
async fn journalled_episodes_reach_the_lake_at_the_next_start() {
    let (_keep, dir) = dir();
    let (journal, _) = Journal::open(&dir.join("journal"), "0").unwrap();
    for i in 0..3 {
        journal
            .append(
                &JournalEvent::EpisodeFinished(Box::new(bundle(&format!("e{i}"), "train"))),
                true,
            )
            .unwrap();
    }
    drop(journal);
    let lake = Lake::open(&dir.join("lake")).await.unwrap();
    let (writer, _) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    writer.finish().await.unwrap();
    assert_eq!(ids(&lake).await, ["e0", "e1", "e2"]);
}

/// The child of [`kills_between_commits_lose_and_double_nothing`]: writes until the crash point ends it.
#[tokio::test]
async fn child_that_is_killed() {
    let Some(dir) = std::env::var_os("DRILLYARD_TEST_DIR") else {
        return;
    };
    let dir = Utf8PathBuf::from(dir.into_string().unwrap());
    let lake = Lake::open(&dir.join("lake")).await.unwrap();
    let (writer, recovered) = Writer::start(lake.clone(), options(&dir)).await.unwrap();
    let mut have: std::collections::BTreeSet<String> = ids(&lake).await.into_iter().collect();
    have.extend(
        recovered
            .finished
            .iter()
            .map(|b| b.episode.episode_id.0.clone()),
    );
    for i in 0..10 {
        if !have.contains(&format!("e{i}")) {
            writer
                .submit(bundle(&format!("e{i}"), "train"))
                .await
                .unwrap();
        }
    }
    writer.finish().await.unwrap();
}

#[tokio::test]
async fn kills_between_commits_lose_and_double_nothing() {
    let (_keep, dir) = dir();
    let child = |point: &str| {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::child_that_is_killed"])
            .env("DRILLYARD_TEST_DIR", &dir)
            .env(crate::CRASH_VARIABLE, point)
            .output()
            .unwrap();
        output.status.success()
    };
    for point in [
        "journal_write:3",
        "between_tables",
        "before_episodes",
        "after_episodes",
        "journal_write:5",
        "before_episodes",
    ] {
        assert!(
            !child(point),
            "the child passed {point} alive, so the kill was not tested"
        );
    }
    assert!(child("nowhere"));
    let lake = Lake::open(&dir.join("lake")).await.unwrap();
    let expected: Vec<String> = (0..10).map(|i| format!("e{i}")).collect();
    assert_eq!(ids(&lake).await, expected);
    assert_eq!(counts(&lake).await, [10, 10, 10, 10, 10]);
}

#[tokio::test]
async fn run_records_round_trip() {
    let (_keep, dir) = dir();
    let lake = Lake::open(&dir).await.unwrap();
    let row = RunRow {
        stage_run: "s".into(),
        run_id: "r".into(),
        pipeline: "p".into(),
        stage: "qa".into(),
        stage_version: 1,
        status: "succeeded".into(),
        fingerprint: "f".into(),
        config: "{}".into(),
        inputs: "{}".into(),
        outputs: "{}".into(),
        figures: "{}".into(),
        drillyard_version: "0".into(),
        started_at: Timestamp(5),
        ended_at: Timestamp(6),
    };
    lake.append(std::slice::from_ref(&row), None).await.unwrap();
    let back: Vec<RunRow> = lake
        .snapshot()
        .await
        .unwrap()
        .read(&Filter::default())
        .await
        .unwrap();
    assert_eq!(back, vec![row]);
}
