//! A disk that is full or read-only. Each test runs again as a child in a mount namespace of its own, where it has a small file system
//! to itself that goes with it.

use std::collections::BTreeSet;
use std::process::Command;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::Table;
use drillyard_schema::table::{EpisodeRow, StepRow, TokenRow};

use super::{CHILD_VARIABLE, child_dir, content, dir, once, open, options, read, sample};
use crate::{EpisodeBundle, LakeError, Writer};

/// Runs the test in a namespace; skips loudly where the host has none for us.
fn in_a_namespace(test: &str) {
    let (_keep, dir) = dir();
    let ways: [&[&str]; 2] = [&["--mount"], &["--user", "--map-root-user", "--mount"]];
    let may = |way: &&[&str]| {
        let script = format!("mount -t tmpfs -o size=1m tmpfs {dir}");
        Command::new("unshare")
            .args(*way)
            .args(["sh", "-c", &script])
            .output()
            .is_ok_and(|out| out.status.success())
    };
    let Some(way) = ways.iter().find(|way| may(way)) else {
        eprintln!(
            "SKIPPED {test}: this host permits neither mounting nor user namespaces, so a full disk can't be made"
        );
        return;
    };
    let mut command = Command::new("unshare");
    command
        .args(*way)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD_VARIABLE, &dir);
    let out = command.output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
}

fn mount(dir: &Utf8Path, options: &str) {
    let status = Command::new("mount")
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(dir)
        .status()
        .unwrap();
    assert!(status.success(), "mount {options}");
}

/// Like [`sample::bundle`], with 40 kB that do not compress.
fn large(n: usize) -> EpisodeBundle {
    let mut bundle = sample::bundle(n);
    let mut random = n as u64 + 1;
    let noise = std::iter::repeat_with(|| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as i32
    });
    bundle.tokens[0].context_ids = noise.take(10_000).collect();
    bundle
}

/// Files of the lake that no table lists, log files apart.
async fn strays(dir: &Utf8Path) -> Vec<Utf8PathBuf> {
    let snapshot = open(dir).await.snapshot().await.unwrap();
    let listed: BTreeSet<Utf8PathBuf> = Table::ALL
        .iter()
        .flat_map(|t| snapshot.files(*t))
        .map(|f| f.path.clone())
        .collect();
    let mut found = Vec::new();
    let mut folders = vec![dir.join("lake")];
    while let Some(folder) = folders.pop() {
        for entry in folder.read_dir_utf8().unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() == "_delta_log" {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.into_path());
            } else if !listed.contains(entry.path()) {
                found.push(entry.into_path());
            }
        }
    }
    found
}

async fn full_disk(dir: &Utf8Path, journal_too: bool) {
    std::fs::create_dir_all(dir.join("lake")).unwrap();
    let small = if journal_too {
        dir.to_owned()
    } else {
        dir.join("lake")
    };
    mount(&small, "size=700k");
    let bundles: Vec<EpisodeBundle> = (0..24).map(large).collect();

    let lake = open(dir).await;
    let (writer, _) = Writer::start(lake.clone(), options(dir)).await.unwrap();
    let mut error = None;
    for bundle in &bundles {
        if let Err(e) = writer.submit(bundle.clone()).await {
            error.get_or_insert(e);
        }
    }
    let error = match (error, writer.finish().await) {
        (_, Err(e)) | (Some(e), Ok(_)) => e,
        (None, Ok(report)) => panic!("a disk of 700 kB took everything: {report:?}"),
    };
    let cause = match &error {
        LakeError::WriterEnded(cause) => &**cause,
        other => other,
    };
    assert!(
        matches!(cause, LakeError::DiskFull { path } if path.starts_with(&small)),
        "{error:?}"
    );
    assert!(error.is_output());
    assert!(error.to_string().contains("the disk is full"), "{error}");

    // What is visible is whole, and nothing else takes room.
    let snapshot = open(dir).await.snapshot().await.unwrap();
    let (steps, tokens): (Vec<StepRow>, Vec<TokenRow>) =
        (read(&snapshot).await, read(&snapshot).await);
    let visible: Vec<EpisodeRow> = read(&snapshot).await;
    assert!(visible.len() < bundles.len());
    for episode in &visible {
        assert_eq!(
            steps
                .iter()
                .filter(|r| r.episode_id == episode.episode_id)
                .count(),
            episode.n_steps as usize
        );
        assert_eq!(
            tokens
                .iter()
                .filter(|r| r.episode_id == episode.episode_id)
                .count(),
            episode.n_steps as usize
        );
    }
    assert_eq!(strays(dir).await, Vec::<Utf8PathBuf>::new());

    // With room again, the same command ends well.
    mount_again(&small, "remount,size=64m");
    let lake = open(dir).await;
    let (writer, _) = Writer::start(lake.clone(), options(dir)).await.unwrap();
    let done: BTreeSet<_> = read::<EpisodeRow>(&lake.snapshot().await.unwrap())
        .await
        .into_iter()
        .map(|r| r.episode_id)
        .collect();
    for bundle in bundles
        .iter()
        .filter(|b| !done.contains(&b.episode.episode_id))
    {
        writer.submit(bundle.clone()).await.unwrap();
    }
    writer.finish().await.unwrap();
    assert_eq!(content(&lake).await, once(&bundles));
}

fn mount_again(dir: &Utf8Path, options: &str) {
    let status = Command::new("mount")
        .args(["-o", options])
        .arg(dir)
        .status()
        .unwrap();
    assert!(status.success(), "mount {options}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_lake_is_named_and_nothing_is_half_visible() {
    match child_dir() {
        Some(dir) => full_disk(&dir, false).await,
        None => in_a_namespace("tests::disk::a_full_lake_is_named_and_nothing_is_half_visible"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_yard_is_named_and_nothing_is_half_visible() {
    match child_dir() {
        Some(dir) => full_disk(&dir, true).await,
        None => in_a_namespace("tests::disk::a_full_yard_is_named_and_nothing_is_half_visible"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_lake_is_named() {
    let Some(dir) = child_dir() else {
        in_a_namespace("tests::disk::a_read_only_lake_is_named");
        return;
    };
    mount(&dir, "size=8m");
    let lake = open(&dir).await;
    lake.append(&[sample::bundle(0).episode], None)
        .await
        .unwrap();
    mount_again(&dir, "remount,ro");
    let told = |error: LakeError| {
        assert!(
            matches!(&error, LakeError::NotWritable { path, .. } if path.starts_with(&dir)),
            "{error:?}"
        );
        assert!(error.is_output());
    };
    told(
        lake.append(&[sample::bundle(1).episode], None)
            .await
            .unwrap_err(),
    );
    told(
        lake.append(&sample::bundle(1).steps, None)
            .await
            .unwrap_err(),
    );
    told(
        Writer::start(lake.clone(), options(&dir))
            .await
            .unwrap_err(),
    );
    told(crate::Lake::open(&dir.join("other")).await.unwrap_err());
    // It can still be read.
    assert_eq!(
        read::<EpisodeRow>(&lake.snapshot().await.unwrap()).await,
        [sample::bundle(0).episode]
    );
    mount_again(&dir, "remount,rw");
    lake.append(&[sample::bundle(1).episode], None)
        .await
        .unwrap();
    assert_eq!(
        read::<EpisodeRow>(&lake.snapshot().await.unwrap())
            .await
            .len(),
        2
    );
}
