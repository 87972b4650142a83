//! Lakes that earlier versions wrote open today: every view, rule and question runs on each of `datasets/golden`.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::BTreeMap;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_lake::{Filter, Lake, Snapshot};
use drillyard_query::{Session, SessionOptions};
use drillyard_schema::table::{EpisodeRow, StepRow, VerdictRow};

/// A copy of each golden lake, since opening one may write to it.
fn golden() -> Vec<(String, tempfile::TempDir)> {
    let folder = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../datasets/golden");
    let mut lakes = Vec::new();
    for entry in folder.read_dir_utf8().unwrap() {
        let path = entry.unwrap().into_path();
        if path.is_dir() {
            let copy = tempfile::tempdir().unwrap();
            copy_tree(&path, Utf8Path::from_path(copy.path()).unwrap());
            lakes.push((path.file_name().unwrap().to_owned(), copy));
        }
    }
    assert!(!lakes.is_empty(), "{folder} holds no lake");
    lakes
}

fn copy_tree(from: &Utf8Path, to: &Utf8Path) {
    fs_err::create_dir_all(to).unwrap();
    for entry in from.read_dir_utf8().unwrap() {
        let path: Utf8PathBuf = entry.unwrap().into_path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_tree(&path, &target);
        } else {
            fs_err::copy(&path, &target).unwrap();
        }
    }
}

async fn snapshot(lake: &tempfile::TempDir) -> Snapshot {
    let root = Utf8Path::from_path(lake.path()).unwrap();
    Lake::open(root).await.unwrap().snapshot().await.unwrap()
}

#[tokio::test]
async fn rows_of_golden_lakes_are_read_whole() {
    for (name, lake) in golden() {
        let snapshot = snapshot(&lake).await;
        let episodes: Vec<EpisodeRow> = snapshot.read(&Filter::default()).await.unwrap();
        let steps: Vec<StepRow> = snapshot.read(&Filter::default()).await.unwrap();
        let verdicts: Vec<VerdictRow> = snapshot.read(&Filter::default()).await.unwrap();
        assert_eq!(episodes.len(), 28, "{name}");
        let turns: i32 = episodes.iter().map(|e| e.n_steps).sum();
        assert_eq!(steps.len(), turns as usize, "{name}");
        let mut judged: BTreeMap<_, usize> = BTreeMap::new();
        for verdict in &verdicts {
            *judged.entry(&verdict.episode_id).or_default() += 1;
        }
        assert_eq!(judged.len(), 28, "{name}");
    }
}

#[tokio::test]
async fn every_sql_file_runs_on_golden_lakes() {
    for (name, lake) in golden() {
        let options = SessionOptions {
            sql: Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../sql"),
            ..SessionOptions::default()
        };
        let session = Session::open(&snapshot(&lake).await, options)
            .await
            .unwrap();
        assert!(
            session.problems().is_empty(),
            "{name}: {:?}",
            session.problems()
        );
        let ids: Vec<String> = session
            .library()
            .files()
            .iter()
            .filter(|file| !file.path.file_name().unwrap().starts_with('_'))
            .map(|file| file.header.id.clone())
            .collect();
        assert!(ids.len() > 50, "{name}: only {ids:?}");
        for id in ids {
            if let Err(error) = session.ask(&id).await {
                panic!("{name}: {id}: {error}");
            }
        }
        let scored = session
            .sql("SELECT count(*) AS n FROM latest_scores WHERE quality BETWEEN 0 AND 1")
            .await
            .unwrap();
        assert_eq!(
            scored.text_rows().unwrap(),
            [[Some("28".to_owned())]],
            "{name}"
        );
    }
}
