//! The writer: finished episodes, from a bounded queue to the lake in the background.
//!
//! An episode is in the journal before `submit` returns. A batch is written in a fixed order with `episodes` last, each table with the
//! batch's transaction number; which episodes a batch holds is in the journal before its first commit, so that after a kill between
//! two commits the same batch is made again and the tables that have it already skip it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use camino::Utf8PathBuf;
use drillyard_schema::table::TaskRow;
use drillyard_schema::{EpisodeId, Row, RunId, Table, TaskId};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::bundle::{EpisodeBundle, bundle_bytes};
use crate::error::LakeError;
use crate::faults::crash_point;
use crate::journal::{Journal, JournalEvent, Recovered};
use crate::lake::{Lake, Txn};
use crate::snapshot::Filter;

/// How a writer batches.
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// The journal's folder, one per run.
    pub journal_dir: Utf8PathBuf,
    /// The shard; part of the transactions' application id, together with `app`.
    pub shard: String,
    /// The run's id.
    pub app: String,
    /// Episodes of a batch at most.
    pub batch_episodes: usize,
    /// Bytes of a batch at most.
    pub batch_bytes: usize,
    /// Age of a batch at most.
    pub batch_age: Duration,
    /// Episodes that may wait; `submit` waits beyond that.
    pub queue: usize,
}

impl WriterOptions {
    /// Batches of 1,024 episodes, 64 MB or 30 s, and 256 waiting.
    pub fn new(
        journal_dir: impl Into<Utf8PathBuf>,
        app: impl Into<String>,
        shard: impl Into<String>,
    ) -> Self {
        Self {
            journal_dir: journal_dir.into(),
            shard: shard.into(),
            app: app.into(),
            batch_episodes: 1024,
            batch_bytes: 64 << 20,
            batch_age: Duration::from_secs(30),
            queue: 256,
        }
    }
}

/// What a writer did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriterReport {
    /// Episodes committed.
    pub episodes: u64,
    /// Steps committed.
    pub steps: u64,
    /// Batches committed.
    pub batches: u64,
}

/// Takes finished episodes.
#[derive(Debug)]
pub struct Writer {
    queue: mpsc::Sender<Box<EpisodeBundle>>,
    journal: Journal,
    failed: std::sync::Arc<std::sync::Mutex<Option<String>>>,
    done: oneshot::Receiver<Result<WriterReport, LakeError>>,
    task: JoinHandle<()>,
}

impl Writer {
    /// Opens the journal, commits what an earlier process left in it, and starts the background task. Events of episodes that had begun
    /// come back for whoever resumes them.
    ///
    /// # Errors
    /// A journal that can't be opened, or a lake that can't be written.
    pub async fn start(lake: Lake, options: WriterOptions) -> Result<(Self, Recovered), LakeError> {
        let (journal, recovered) = Journal::open(&options.journal_dir, &options.shard)?;
        let mut batcher = Batcher {
            lake,
            journal: journal.clone(),
            app: format!("{}/{}", options.app, options.shard),
            run: options.app.clone(),
            number: 0,
            tasks: BTreeSet::new(),
            report: WriterReport::default(),
        };
        batcher.recover(&recovered).await?;
        let (queue, waiting) = mpsc::channel(options.queue.max(1));
        let (tell, done) = oneshot::channel();
        let failed = std::sync::Arc::new(std::sync::Mutex::new(None));
        let shared = failed.clone();
        let task = tokio::spawn(async move {
            let result = batcher.run(waiting, &options).await;
            if let Err(error) = &result {
                *shared
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error.to_string());
            }
            let _ = tell.send(result);
        });
        Ok((
            Self {
                queue,
                journal,
                failed,
                done,
                task,
            },
            recovered,
        ))
    }

    /// The journal, for the events of running episodes.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Journals a finished episode and queues it; waits while the queue is full.
    ///
    /// # Errors
    /// A journal that can't be written, or a writer that has ended with an error.
    pub async fn submit(&self, bundle: EpisodeBundle) -> Result<(), LakeError> {
        let bundle = Box::new(bundle);
        self.journal
            .append(&JournalEvent::EpisodeFinished(bundle.clone()), true)?;
        self.queue.send(bundle).await.map_err(|_| {
            let reason = self
                .failed
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .clone();
            LakeError::WriterEnded(
                reason.unwrap_or_else(|| "the background task is gone".to_owned()),
            )
        })
    }

    /// Commits what waits and ends. The journal is emptied, unless episodes in it have begun and not ended.
    ///
    /// # Errors
    /// What stopped the background task.
    pub async fn finish(self) -> Result<WriterReport, LakeError> {
        drop(self.queue);
        let result = self.done.await.unwrap_or_else(|_| {
            Err(LakeError::WriterEnded(
                "the background task panicked".to_owned(),
            ))
        });
        let _ = self.task.await;
        result
    }
}

struct Batcher {
    lake: Lake,
    journal: Journal,
    app: String,
    run: String,
    number: i64,
    /// Tasks that are in the lake already.
    tasks: BTreeSet<(RunId, TaskId)>,
    report: WriterReport,
}

impl Batcher {
    async fn recover(&mut self, recovered: &Recovered) -> Result<(), LakeError> {
        let in_lake = self
            .lake
            .last_txn(Table::Episodes, &self.app)
            .await?
            .unwrap_or(0);
        self.number = recovered.last_batch.max(in_lake);
        let known: Vec<TaskRow> = self
            .lake
            .snapshot()
            .await?
            .read(&Filter::run(&RunId(self.run.clone())))
            .await?;
        self.tasks = known.into_iter().map(|t| (t.run_id, t.task_id)).collect();
        let mut waiting: BTreeMap<&EpisodeId, &EpisodeBundle> = recovered
            .finished
            .iter()
            .map(|b| (&b.episode.episode_id, b))
            .collect();
        for (number, episodes) in &recovered.open_batches {
            let batch: Vec<EpisodeBundle> = episodes
                .iter()
                .filter_map(|id| waiting.remove(id))
                .cloned()
                .collect();
            self.commit(*number, batch).await?;
        }
        let rest: Vec<EpisodeBundle> = recovered
            .finished
            .iter()
            .filter(|b| waiting.contains_key(&b.episode.episode_id))
            .cloned()
            .collect();
        if !rest.is_empty() {
            self.batch(rest).await?;
        }
        if recovered.unfinished.is_empty() {
            self.journal.clear()?;
        }
        Ok(())
    }

    async fn run(
        &mut self,
        mut waiting: mpsc::Receiver<Box<EpisodeBundle>>,
        options: &WriterOptions,
    ) -> Result<WriterReport, LakeError> {
        loop {
            let Some(first) = waiting.recv().await else {
                break;
            };
            let deadline = Instant::now() + options.batch_age;
            let mut bytes = bundle_bytes(&first);
            let mut batch = vec![*first];
            let mut open = true;
            while batch.len() < options.batch_episodes && bytes < options.batch_bytes {
                match tokio::time::timeout_at(deadline, waiting.recv()).await {
                    Ok(Some(bundle)) => {
                        bytes += bundle_bytes(&bundle);
                        batch.push(*bundle);
                    }
                    Ok(None) => {
                        open = false;
                        break;
                    }
                    Err(_) => break,
                }
            }
            self.batch(batch).await?;
            if !open {
                break;
            }
        }
        Ok(self.report)
    }

    async fn batch(&mut self, batch: Vec<EpisodeBundle>) -> Result<(), LakeError> {
        self.number += 1;
        let episodes = batch.iter().map(|b| b.episode.episode_id.clone()).collect();
        self.journal.append(
            &JournalEvent::BatchStarted {
                number: self.number,
                episodes,
            },
            true,
        )?;
        self.commit(self.number, batch).await
    }

    async fn commit(&mut self, number: i64, batch: Vec<EpisodeBundle>) -> Result<(), LakeError> {
        let mut tasks = Vec::new();
        let mut fresh = BTreeSet::new();
        let (
            mut tokens,
            mut calls,
            mut steps,
            mut messages,
            mut rewards,
            mut verdicts,
            mut episodes,
        ) = (vec![], vec![], vec![], vec![], vec![], vec![], vec![]);
        for bundle in batch {
            let key = (bundle.task.run_id.clone(), bundle.task.task_id.clone());
            if !self.tasks.contains(&key) && fresh.insert(key) {
                tasks.push(bundle.task);
            }
            tokens.extend(bundle.tokens);
            calls.extend(bundle.tool_calls);
            steps.extend(bundle.steps);
            messages.extend(bundle.messages);
            rewards.extend(bundle.rewards);
            verdicts.extend(bundle.verdicts);
            episodes.push(bundle.episode);
        }
        let (n_episodes, n_steps) = (episodes.len() as u64, steps.len() as u64);
        self.table(number, &tokens).await?;
        self.table(number, &calls).await?;
        self.table(number, &steps).await?;
        crash_point("between_tables");
        self.table(number, &messages).await?;
        self.table(number, &rewards).await?;
        self.table(number, &verdicts).await?;
        self.table(number, &tasks).await?;
        self.tasks.extend(fresh);
        crash_point("before_episodes");
        self.table(number, &episodes).await?;
        crash_point("after_episodes");
        self.journal
            .append(&JournalEvent::BatchCommitted { number }, true)?;
        self.report.episodes += n_episodes;
        self.report.steps += n_steps;
        self.report.batches += 1;
        Ok(())
    }

    async fn table<R: Row>(&self, number: i64, rows: &[R]) -> Result<(), LakeError> {
        self.lake
            .append(
                rows,
                Some(Txn {
                    app: self.app.clone(),
                    version: number,
                }),
            )
            .await?;
        Ok(())
    }
}
