//! Versions of tables, several appenders, tables that grow columns.

use std::collections::BTreeMap;

use deltalake::kernel::engine::arrow_conversion::TryIntoKernel;
use deltalake::kernel::{DataType, PrimitiveType, StructField, StructType};
use deltalake::operations::create::CreateBuilder;
use drillyard_schema::Table;
use drillyard_schema::table::{EpisodeRow, StepRow, TrainMetricRow, VerdictRow};

use super::{dir, open, read, sample};
use crate::{LakeError, Txn};

fn txn(app: &str, version: i64) -> Txn {
    Txn {
        app: app.into(),
        version,
    }
}

#[tokio::test]
async fn a_transaction_is_in_once() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let rows = [sample::bundle(0).episode];
    assert_eq!(
        lake.append(&rows, Some(txn("a", 1))).await.unwrap(),
        Some(1)
    );
    assert_eq!(lake.append(&rows, Some(txn("a", 1))).await.unwrap(), None);
    assert_eq!(
        lake.append(&rows, Some(txn("b", 1))).await.unwrap(),
        Some(2)
    );
    assert_eq!(
        lake.append(&rows, Some(txn("a", 2))).await.unwrap(),
        Some(3)
    );
    assert_eq!(
        lake.append(&rows, Some(txn("a", 1))).await.unwrap(),
        None,
        "an older one is in as well"
    );
    assert_eq!(
        lake.append::<EpisodeRow>(&[], Some(txn("a", 9)))
            .await
            .unwrap(),
        None
    );
    // Another process knows it from the table.
    let other = open(&dir).await;
    assert_eq!(other.append(&rows, Some(txn("a", 2))).await.unwrap(), None);
    assert_eq!(other.last_txn(Table::Episodes, "a").await.unwrap(), Some(2));
    assert_eq!(other.last_txn(Table::Episodes, "c").await.unwrap(), None);
    assert_eq!(other.last_txn(Table::Steps, "a").await.unwrap(), None);
    assert_eq!(
        read::<EpisodeRow>(&other.snapshot().await.unwrap())
            .await
            .len(),
        3
    );
}

#[tokio::test]
async fn old_versions_stay_readable() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    assert!(lake.snapshot().await.unwrap().versions().is_empty());
    let rows: Vec<EpisodeRow> = (0..13).map(|n| sample::bundle(n).episode).collect();
    let mut known = Vec::new();
    for row in &rows {
        lake.append(std::slice::from_ref(row), None).await.unwrap();
        known.push(lake.snapshot().await.unwrap());
    }
    for (n, snapshot) in known.iter().enumerate() {
        let again = lake.snapshot_at(snapshot.versions()).await.unwrap();
        assert_eq!(again.versions(), snapshot.versions());
        assert_eq!(
            again.files(Table::Episodes),
            snapshot.files(Table::Episodes)
        );
        assert_eq!(read::<EpisodeRow>(&again).await, rows[..=n]);
        assert_eq!(
            read::<EpisodeRow>(snapshot).await,
            rows[..=n],
            "a snapshot does not move"
        );
    }
}

#[tokio::test]
async fn a_version_that_is_not_there_is_named() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    lake.append(&[sample::bundle(0).episode], None)
        .await
        .unwrap();
    for (table, version) in [
        ("episodes", 99),
        ("episodes", -1),
        ("steps", 0),
        ("nothing", 0),
    ] {
        let error = lake
            .snapshot_at(&BTreeMap::from([(table.to_owned(), version)]))
            .await
            .unwrap_err();
        assert!(
            matches!(&error, LakeError::NoVersion { table: t, version: v, .. } if t == table && *v == version),
            "{error:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn appenders_do_not_lose_each_others_rows() {
    let (_keep, dir) = dir();
    let mut work = tokio::task::JoinSet::new();
    for appender in 0..6 {
        // Each with a lake of its own, as separate processes have, and all begin before the tables exist.
        let dir = dir.clone();
        work.spawn(async move {
            let lake = open(&dir).await;
            for i in 0..4 {
                let n = appender * 4 + i;
                let version = lake
                    .append(
                        &[sample::bundle(n).episode],
                        Some(txn(&format!("shard-{appender}"), i as i64 + 1)),
                    )
                    .await
                    .unwrap();
                assert!(version.is_some());
            }
        });
    }
    while let Some(result) = work.join_next().await {
        result.unwrap();
    }
    let expected: Vec<EpisodeRow> = (0..24).map(|n| sample::bundle(n).episode).collect();
    let snapshot = open(&dir).await.snapshot().await.unwrap();
    assert_eq!(read::<EpisodeRow>(&snapshot).await, expected);
    assert_eq!(snapshot.versions()["episodes"], 24);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_episodes_list_other_tables_hold() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let writer = tokio::spawn({
        let lake = open(&dir).await;
        async move {
            for n in 0..12 {
                let bundle = sample::bundle(n);
                lake.append(&bundle.steps, None).await.unwrap();
                lake.append(&[bundle.episode], None).await.unwrap();
            }
        }
    });
    let mut seen = 0;
    while seen < 12 {
        let snapshot = lake.snapshot().await.unwrap();
        let steps: Vec<StepRow> = read(&snapshot).await;
        let episodes: Vec<EpisodeRow> = read(&snapshot).await;
        for episode in &episodes {
            let n = steps
                .iter()
                .filter(|step| step.episode_id == episode.episode_id)
                .count();
            assert_eq!(n, episode.n_steps as usize);
        }
        seen = episodes.len();
    }
    writer.await.unwrap();
}

#[tokio::test]
async fn a_table_of_a_newer_version_is_refused() {
    let (_keep, dir) = dir();
    let root = dir.join("lake");
    let schema: StructType = Table::Verdicts.schema().as_ref().try_into_kernel().unwrap();
    std::fs::create_dir_all(root.join("verdicts")).unwrap();
    let newer = [("drillyard.table_version".to_owned(), Some("7".to_owned()))];
    let location = url::Url::from_directory_path(root.join("verdicts")).unwrap();
    CreateBuilder::new()
        .with_location(location.to_string())
        .with_columns(schema.fields().cloned())
        .with_partition_columns(Table::Verdicts.partition_columns().iter().copied())
        .with_raise_if_key_not_exists(false)
        .with_configuration(newer)
        .await
        .unwrap();
    let lake = open(&dir).await;
    let refused = |error: LakeError| {
        assert!(
            matches!(
                error,
                LakeError::TooNew {
                    table: "verdicts",
                    found: 7,
                    known: 1,
                    ..
                }
            ),
            "{error:?}"
        );
        assert!(error.to_string().contains("use a newer Drillyard"));
    };
    refused(
        lake.append(&sample::bundle(0).verdicts, None)
            .await
            .unwrap_err(),
    );
    refused(lake.snapshot().await.unwrap_err());
    refused(
        lake.snapshot_at(&BTreeMap::from([("verdicts".to_owned(), 0)]))
            .await
            .unwrap_err(),
    );
    refused(lake.last_txn(Table::Verdicts, "a").await.unwrap_err());
}

/// A table of this version whose columns are not ours.
async fn table_with(
    dir: &camino::Utf8Path,
    table: Table,
    columns: impl IntoIterator<Item = StructField>,
) {
    let place = dir.join("lake").join(table.name());
    std::fs::create_dir_all(&place).unwrap();
    CreateBuilder::new()
        .with_location(url::Url::from_directory_path(&place).unwrap().to_string())
        .with_columns(columns)
        .with_partition_columns(table.partition_columns().iter().copied())
        .await
        .unwrap();
}

fn columns(table: Table) -> Vec<StructField> {
    let schema: StructType = table.schema().as_ref().try_into_kernel().unwrap();
    schema.fields().cloned().collect()
}

#[tokio::test]
async fn nullable_columns_that_a_table_lacks_are_added() {
    let (_keep, dir) = dir();
    // As an earlier Drillyard would have made it: without `score` and `detail`.
    let early = columns(Table::Verdicts)
        .into_iter()
        .filter(|c| c.name() != "score" && c.name() != "detail");
    table_with(&dir, Table::Verdicts, early).await;
    let lake = open(&dir).await;
    assert!(
        read::<VerdictRow>(&lake.snapshot().await.unwrap())
            .await
            .is_empty()
    );
    let rows: Vec<VerdictRow> = (0..2).flat_map(|n| sample::bundle(n).verdicts).collect();
    assert_eq!(
        lake.append(&rows[..1], None).await.unwrap(),
        Some(2),
        "one version for the columns, one for the row"
    );
    assert_eq!(
        open(&dir).await.append(&rows[1..], None).await.unwrap(),
        Some(3)
    );
    let snapshot = lake.snapshot().await.unwrap();
    assert_eq!(read::<VerdictRow>(&snapshot).await, rows);
    assert!(
        snapshot
            .files(Table::Verdicts)
            .iter()
            .all(|file| file.rows == 1),
        "statistics are there for added columns, too"
    );
}

#[tokio::test]
async fn files_from_before_a_column_read_as_null() {
    let (_keep, dir) = dir();
    let early: Vec<StructField> = columns(Table::TrainMetrics)
        .into_iter()
        .filter(|c| c.name() != "epoch")
        .collect();
    // Not nullable, so that it can't be absent: told as what it is.
    table_with(&dir, Table::TrainMetrics, early).await;
    let lake = open(&dir).await;
    let row = TrainMetricRow {
        stage_run: "s".into(),
        step: 1,
        epoch: 0,
        name: "kl".into(),
        value: 0.0,
        at: drillyard_schema::table::Timestamp(0),
    };
    let error = lake.append(&[row], None).await.unwrap_err();
    assert!(error.to_string().contains("epoch"), "{error}");

    // Nullable: an old file is read as if it had nulls there.
    let rows: Vec<VerdictRow> = (0..2).flat_map(|n| sample::bundle(n).verdicts).collect();
    lake.append(&rows, None).await.unwrap();
    let snapshot = lake.snapshot().await.unwrap();
    let path = &snapshot.files(Table::Verdicts)[0].path;
    drop_column(path, "score");
    let expected: Vec<VerdictRow> = rows
        .into_iter()
        .map(|row| VerdictRow { score: None, ..row })
        .collect();
    assert_eq!(read::<VerdictRow>(&snapshot).await, expected);
}

fn drop_column(path: &camino::Utf8Path, name: &str) {
    let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(
        std::fs::File::open(path).unwrap(),
    )
    .unwrap();
    let mut batches: Vec<arrow_array::RecordBatch> =
        reader.build().unwrap().collect::<Result<_, _>>().unwrap();
    let batch = &mut batches[0];
    batch.remove_column(batch.schema().index_of(name).unwrap());
    let mut writer = parquet::arrow::ArrowWriter::try_new(
        std::fs::File::create(path).unwrap(),
        batch.schema(),
        None,
    )
    .unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

#[tokio::test]
async fn columns_of_a_newer_drillyard_stay_null() {
    let (_keep, dir) = dir();
    let mut wider = columns(Table::Verdicts);
    wider.push(StructField::nullable(
        "confidence",
        DataType::Primitive(PrimitiveType::Double),
    ));
    table_with(&dir, Table::Verdicts, wider).await;
    let lake = open(&dir).await;
    let rows = sample::bundle(0).verdicts;
    assert_eq!(lake.append(&rows, None).await.unwrap(), Some(1));
    assert_eq!(
        read::<VerdictRow>(&lake.snapshot().await.unwrap()).await,
        rows
    );
}

#[tokio::test]
async fn a_lake_that_was_removed_is_made_again() {
    let (_keep, dir) = dir();
    let lake = open(&dir).await;
    let row = [sample::bundle(0).episode];
    lake.append(&row, None).await.unwrap();
    std::fs::remove_dir_all(dir.join("lake/episodes")).unwrap();
    assert!(lake.snapshot().await.unwrap().versions().is_empty());
    assert_eq!(lake.append(&row, None).await.unwrap(), Some(1));
}
