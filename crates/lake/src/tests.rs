//! The lake as a whole: what is appended comes back, once, whatever happens in between.

mod crash;
mod disk;
mod journal;
mod sample;
mod tables;
mod versions;
mod writer;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::Row;
use drillyard_schema::table::{
    EpisodeRow, MessageRow, RewardRow, StepRow, TaskRow, TokenRow, ToolCallRow, VerdictRow,
};

use crate::{EpisodeBundle, Filter, Lake, Snapshot, WriterOptions};

/// A folder of the test's own, removed when the first value is dropped.
fn dir() -> (tempfile::TempDir, Utf8PathBuf) {
    let keep = tempfile::tempdir().unwrap();
    let path = Utf8PathBuf::from_path_buf(keep.path().canonicalize().unwrap()).unwrap();
    (keep, path)
}

/// A writer of small batches for the lake and journal in `dir`.
fn options(dir: &Utf8Path) -> WriterOptions {
    WriterOptions {
        batch_episodes: 4,
        ..WriterOptions::new(dir.join("journal"), sample::RUN, "0")
    }
}

async fn open(dir: &Utf8Path) -> Lake {
    Lake::open(&dir.join("lake")).await.unwrap()
}

async fn read<R: Row>(snapshot: &Snapshot) -> Vec<R> {
    snapshot.read(&Filter::default()).await.unwrap()
}

/// What eight tables hold, as text, so that a difference is easy to read.
#[derive(Debug, PartialEq)]
struct Content(Vec<Vec<String>>);

fn text<R: std::fmt::Debug>(rows: impl IntoIterator<Item = R>) -> Vec<String> {
    rows.into_iter().map(|row| format!("{row:?}")).collect()
}

async fn content(lake: &Lake) -> Content {
    let snapshot = lake.snapshot().await.unwrap();
    Content(vec![
        text(read::<TaskRow>(&snapshot).await),
        text(read::<EpisodeRow>(&snapshot).await),
        text(read::<MessageRow>(&snapshot).await),
        text(read::<StepRow>(&snapshot).await),
        text(read::<ToolCallRow>(&snapshot).await),
        text(read::<TokenRow>(&snapshot).await),
        text(read::<VerdictRow>(&snapshot).await),
        text(read::<RewardRow>(&snapshot).await),
    ])
}

/// What the tables hold when each of these episodes is in once. Bundles must be in order, two to a task.
fn once(bundles: &[EpisodeBundle]) -> Content {
    let mut tasks: Vec<TaskRow> = bundles.iter().map(|b| b.task.clone()).collect();
    tasks.dedup();
    Content(vec![
        text(tasks),
        text(bundles.iter().map(|b| &b.episode)),
        text(bundles.iter().flat_map(|b| &b.messages)),
        text(bundles.iter().flat_map(|b| &b.steps)),
        text(bundles.iter().flat_map(|b| &b.tool_calls)),
        text(bundles.iter().flat_map(|b| &b.tokens)),
        text(bundles.iter().flat_map(|b| &b.verdicts)),
        text(bundles.iter().flat_map(|b| &b.rewards)),
    ])
}

/// Runs one test of this binary as a child process, which finds `dir` in the variable that [`child_dir`] reads.
fn child(test: &str, dir: &Utf8Path) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(CHILD_VARIABLE, dir);
    command
}

const CHILD_VARIABLE: &str = "DRILLYARD_LAKE_TEST_CHILD";

/// Where this process is a child: its folder.
fn child_dir() -> Option<Utf8PathBuf> {
    std::env::var(CHILD_VARIABLE).ok().map(Utf8PathBuf::from)
}
