//! Rows of every table, there and back.

use std::collections::BTreeSet;

use drillyard_schema::table::{
    AdvantageRow, EpisodeRow, EvalRow, FindingRow, MessageRow, PairRow, ReleaseRow, ReturnRow,
    RewardRow, RunRow, ScoreRow, StepRow, TaskRow, Timestamp, TokenRow, ToolCallRow,
    TrainMetricRow, VerdictRow,
};
use drillyard_schema::{Purpose, Row, Table};
use parquet::basic::Compression;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{dir, open, read, sample};
use crate::{Filter, Lake, LakeError};

/// Appends rows in the wrong order and reads them back; the rows given are in the table's order.
async fn there_and_back<R: Row + std::fmt::Debug + PartialEq>(
    lake: &Lake,
    seen: &mut BTreeSet<Table>,
    rows: &[R],
) {
    assert!(!rows.is_empty());
    let mut reversed = rows.to_vec();
    reversed.reverse();
    assert_eq!(
        lake.append(&reversed, None).await.unwrap(),
        Some(1),
        "{}",
        R::TABLE.name()
    );
    let back: Vec<R> = read(&lake.snapshot().await.unwrap()).await;
    assert_eq!(back, rows);
    seen.insert(R::TABLE);
}

#[tokio::test]
async fn rows_of_every_table_come_back_sorted() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let mut seen = BTreeSet::new();
    let bundles: Vec<_> = (0..7).map(sample::bundle).collect();
    let tasks: Vec<TaskRow> = bundles.iter().step_by(2).map(|b| b.task.clone()).collect();
    there_and_back(&lake, &mut seen, &tasks).await;
    there_and_back::<EpisodeRow>(
        &lake,
        &mut seen,
        &bundles
            .iter()
            .map(|b| b.episode.clone())
            .collect::<Vec<_>>(),
    )
    .await;
    there_and_back::<MessageRow>(
        &lake,
        &mut seen,
        &bundles
            .iter()
            .flat_map(|b| b.messages.clone())
            .collect::<Vec<_>>(),
    )
    .await;
    there_and_back::<StepRow>(
        &lake,
        &mut seen,
        &bundles
            .iter()
            .flat_map(|b| b.steps.clone())
            .collect::<Vec<_>>(),
    )
    .await;
    there_and_back::<ToolCallRow>(
        &lake,
        &mut seen,
        &bundles
            .iter()
            .flat_map(|b| b.tool_calls.clone())
            .collect::<Vec<_>>(),
    )
    .await;
    there_and_back::<TokenRow>(
        &lake,
        &mut seen,
        &bundles
            .iter()
            .flat_map(|b| b.tokens.clone())
            .collect::<Vec<_>>(),
    )
    .await;
    there_and_back::<VerdictRow>(
        &lake,
        &mut seen,
        &bundles
            .iter()
            .flat_map(|b| b.verdicts.clone())
            .collect::<Vec<_>>(),
    )
    .await;
    there_and_back::<RewardRow>(
        &lake,
        &mut seen,
        &bundles
            .iter()
            .flat_map(|b| b.rewards.clone())
            .collect::<Vec<_>>(),
    )
    .await;

    let (day, train) = ("2026-01-02".to_owned(), "train".to_owned());
    let finding = |n: usize| FindingRow {
        run_date: day.clone(),
        purpose: train.clone(),
        run_id: "r".into(),
        stage_run: "s".into(),
        episode_id: sample::id(n),
        step_index: (n == 0).then_some(3),
        rule: "loop".into(),
        rule_version: 2,
        category: "logic".into(),
        severity: "warn".into(),
        detail: "the same call three times".into(),
    };
    there_and_back(&lake, &mut seen, &[finding(0), finding(1)]).await;
    let score = |n: usize| ScoreRow {
        run_date: day.clone(),
        purpose: train.clone(),
        run_id: "r".into(),
        stage_run: "s".into(),
        episode_id: sample::id(n),
        quality: 0.1,
        tier: (n == 0).then(|| "positive".into()),
        weight: 1.0,
        fail_reason: None,
        n_findings: 0,
    };
    there_and_back(&lake, &mut seen, &[score(0), score(1)]).await;
    let step_return = |step_index| ReturnRow {
        run_date: day.clone(),
        purpose: train.clone(),
        run_id: "r".into(),
        stage_run: "s".into(),
        episode_id: sample::id(0),
        step_index,
        reward: -0.5,
        discounted_return: 0.3,
    };
    there_and_back(&lake, &mut seen, &[step_return(0), step_return(1)]).await;
    let advantage = |n: usize| AdvantageRow {
        run_date: day.clone(),
        purpose: train.clone(),
        run_id: "r".into(),
        stage_run: "s".into(),
        group_id: "g".into(),
        episode_id: sample::id(n),
        task_id: "t".into(),
        reward: 1.0,
        baseline: (n == 0).then_some(0.5),
        deviation: None,
        advantage: None,
        weight: 1.0,
        scored: true,
        zero_variance: false,
        n_total: 8,
        n_scored: 7,
        n_infrastructure: 1,
    };
    there_and_back(&lake, &mut seen, &[advantage(0), advantage(1)]).await;
    let pair = |n: usize| PairRow {
        run_date: day.clone(),
        purpose: train.clone(),
        run_id: "r".into(),
        stage_run: "s".into(),
        task_id: format!("t{n}").into(),
        chosen_episode_id: sample::id(0),
        rejected_episode_id: sample::id(1),
        divergence_step: 1,
        margin: 1.5,
        weight: 0.9,
    };
    there_and_back(&lake, &mut seen, &[pair(0), pair(1)]).await;
    let metric = |step| TrainMetricRow {
        stage_run: "s".into(),
        step,
        epoch: 0,
        name: "kl".into(),
        value: 0.01,
        at: Timestamp(9),
    };
    there_and_back(&lake, &mut seen, &[metric(0), metric(1)]).await;
    let eval = |metric: &str| EvalRow {
        stage_run: "s".into(),
        policy: "candidate".into(),
        policy_revision: "w".into(),
        task_set: "wrangle".into(),
        split: "held_out".into(),
        family: None,
        metric: metric.into(),
        value: 0.5,
        lo: Some(0.4),
        hi: None,
        n: 400,
        at: Timestamp(9),
    };
    there_and_back(&lake, &mut seen, &[eval("mean_steps"), eval("success")]).await;
    let release = |at| ReleaseRow {
        release_id: "r".into(),
        stage_run: None,
        status: "champion".into(),
        path: "checkpoints/1".into(),
        previous: None,
        reason: "first".into(),
        at: Timestamp(at),
    };
    there_and_back(&lake, &mut seen, &[release(1), release(2)]).await;
    let run = |at| RunRow {
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
        started_at: Timestamp(at),
        ended_at: Timestamp(6),
    };
    there_and_back(&lake, &mut seen, &[run(1), run(2)]).await;
    assert_eq!(
        seen.into_iter().collect::<Vec<_>>(),
        Table::ALL,
        "a table has no sample here"
    );
}

#[tokio::test]
async fn rows_of_many_files_come_back_in_one_order() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let rows: Vec<StepRow> = (0..9).flat_map(|n| sample::bundle(n).steps).collect();
    for part in [&rows[6..], &rows[..3], &rows[3..6]] {
        lake.append(part, None).await.unwrap();
    }
    let snapshot = lake.snapshot().await.unwrap();
    assert_eq!(snapshot.files(Table::Steps).len(), 3);
    assert_eq!(read::<StepRow>(&snapshot).await, rows);
}

#[tokio::test]
async fn filters_choose_partitions_runs_and_stage_executions() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let of_run = |n, purpose, run: &str| EpisodeRow {
        run_id: run.into(),
        ..sample::bundle_for(n, purpose).episode
    };
    let rows = [
        of_run(0, "train", "a"),
        of_run(1, "held_out", "a"),
        of_run(2, "train", "b"),
        of_run(3, "import", "b"),
    ];
    lake.append(&rows, None).await.unwrap();
    let snapshot = lake.snapshot().await.unwrap();
    let partitions: Vec<_> = snapshot
        .files(Table::Episodes)
        .iter()
        .map(|f| f.partition.clone())
        .collect();
    let partition = |purpose: &str| {
        vec![
            ("run_date".to_owned(), "2026-01-02".to_owned()),
            ("purpose".to_owned(), purpose.to_owned()),
        ]
    };
    assert_eq!(
        partitions,
        [
            partition("held_out"),
            partition("import"),
            partition("train")
        ]
    );

    let ask = async |filter: Filter| -> Vec<EpisodeRow> { snapshot.read(&filter).await.unwrap() };
    assert_eq!(ask(Filter::run(&"a".into())).await, rows[..2]);
    let purposes = Filter {
        purposes: vec![Purpose::Train, Purpose::Import],
        ..Filter::default()
    };
    assert_eq!(
        ask(purposes.clone()).await,
        [rows[0].clone(), rows[2].clone(), rows[3].clone()]
    );
    assert_eq!(
        ask(Filter {
            run_id: Some("a".into()),
            ..purposes
        })
        .await,
        rows[..1]
    );
    assert!(ask(Filter::run(&"ab".into())).await.is_empty());

    let metric = |stage: &str| TrainMetricRow {
        stage_run: stage.into(),
        step: 1,
        epoch: 0,
        name: "kl".into(),
        value: 0.0,
        at: Timestamp(0),
    };
    lake.append(&[metric("s1"), metric("s2")], None)
        .await
        .unwrap();
    let filter = Filter {
        stage_run: Some("s2".into()),
        ..Filter::default()
    };
    assert_eq!(
        lake.snapshot()
            .await
            .unwrap()
            .read::<TrainMetricRow>(&filter)
            .await
            .unwrap(),
        [metric("s2")]
    );
}

#[tokio::test]
async fn partition_values_may_be_any_text() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let odd = EpisodeRow {
        run_date: "2026/01 ü%20=".into(),
        ..sample::bundle(0).episode
    };
    lake.append(std::slice::from_ref(&odd), None).await.unwrap();
    let snapshot = lake.snapshot().await.unwrap();
    let file = &snapshot.files(Table::Episodes)[0];
    assert_eq!(file.partition[0].1, odd.run_date);
    assert!(file.path.is_file(), "{}", file.path);
    assert_eq!(read::<EpisodeRow>(&snapshot).await, [odd]);
}

#[tokio::test]
async fn files_are_sorted_compressed_and_have_statistics() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let rows: Vec<StepRow> = (0..5).rev().flat_map(|n| sample::bundle(n).steps).collect();
    lake.append(&rows, None).await.unwrap();
    let snapshot = lake.snapshot().await.unwrap();
    let file = &snapshot.files(Table::Steps)[0];
    assert_eq!(file.rows, rows.len() as i64);
    assert_eq!(
        file.bytes,
        std::fs::metadata(&file.path).unwrap().len() as i64
    );

    let reader = SerializedFileReader::new(std::fs::File::open(&file.path).unwrap()).unwrap();
    let group = reader.metadata().row_group(0);
    let sorting: Vec<String> = group
        .sorting_columns()
        .unwrap()
        .iter()
        .map(|s| group.column(s.column_idx as usize).column_path().string())
        .collect();
    assert_eq!(sorting, Table::Steps.sort_columns());
    for column in group.columns() {
        assert!(matches!(column.compression(), Compression::ZSTD(_)));
    }
    assert!(
        group
            .column(1)
            .statistics()
            .is_some_and(|s| s.min_bytes_opt() == Some(sample::id(0).as_str().as_bytes()))
    );
    let log = std::fs::read_to_string(dir.join("lake/steps/_delta_log/00000000000000000001.json"))
        .unwrap();
    assert!(
        log.contains(r#"\"minValues\":{"#) && log.contains(sample::id(4).as_str()),
        "{log}"
    );
}

#[test]
fn sort_columns_stand_before_nested_ones() {
    // The writer tells Parquet the position of a sort column as if every column before it were one leaf.
    for table in Table::ALL {
        let schema = table.schema();
        let last = table
            .sort_columns()
            .iter()
            .map(|name| schema.index_of(name).unwrap())
            .max()
            .unwrap();
        assert!(
            schema.fields()[..last]
                .iter()
                .all(|field| !field.data_type().is_nested()),
            "{}",
            table.name()
        );
    }
}

#[tokio::test]
async fn every_tenth_commit_writes_a_checkpoint() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let rows: Vec<EpisodeRow> = (0..12).map(|n| sample::bundle(n).episode).collect();
    for row in &rows {
        lake.append(std::slice::from_ref(row), None).await.unwrap();
    }
    let log = dir.join("lake/episodes/_delta_log");
    assert!(log.join("_last_checkpoint").is_file());
    // A lake that starts from the checkpoint sees the same.
    assert_eq!(
        read::<EpisodeRow>(&open(&dir).await.snapshot().await.unwrap()).await,
        rows
    );
}

#[tokio::test]
async fn a_corrupt_file_is_named() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    lake.append(&[sample::bundle(0).episode], None)
        .await
        .unwrap();
    lake.append(&[sample::bundle(1).episode], None)
        .await
        .unwrap();
    let snapshot = lake.snapshot().await.unwrap();
    let path = snapshot.files(Table::Episodes)[0].path.clone();
    let whole = std::fs::read(&path).unwrap();
    let mut overwritten = whole.clone();
    overwritten[8..200].fill(0xAA);
    for damaged in [
        b"this is no parquet".to_vec(),
        whole[..whole.len() / 2].to_vec(),
        overwritten,
        Vec::new(),
    ] {
        std::fs::write(&path, damaged).unwrap();
        let error = snapshot
            .read::<EpisodeRow>(&Filter::default())
            .await
            .unwrap_err();
        assert!(matches!(error, LakeError::Corrupt { .. }), "{error:?}");
        assert!(error.to_string().contains(path.as_str()), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    let error = snapshot
        .read::<EpisodeRow>(&Filter::default())
        .await
        .unwrap_err();
    assert!(error.to_string().contains(path.as_str()), "{error}");
}
