//! The writer: finished episodes, from a bounded queue to the lake in the background.
//!
//! An episode is in the journal before [`Writer::submit`] returns. A batch goes to the tables in a fixed order with `episodes` last,
//! each append with the batch's transaction number. Which episodes a batch holds, and in which order, is in the journal before its
//! first commit, so that after a kill between two commits the same batch is made again and the tables that have it skip it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::table::{EpisodeRow, TaskRow};
use drillyard_schema::{EpisodeId, Row, RunId, Table, TaskId};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::bundle::{EpisodeBundle, bundle_bytes};
use crate::error::LakeError;
use crate::event::JournalEvent;
use crate::faults::crash_point;
use crate::journal::{Journal, JournalOptions};
use crate::lake::{Lake, Txn};
use crate::recovery::Recovered;
use crate::snapshot::Filter;

/// What a batch goes to, in order. A row in the last makes the others visible.
const COMMIT_ORDER: [Table; 8] = [
    Table::Tokens,
    Table::ToolCalls,
    Table::Steps,
    Table::Messages,
    Table::Rewards,
    Table::Verdicts,
    Table::Tasks,
    Table::Episodes,
];

/// How a writer batches.
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// The journal's folder, one per run.
    pub journal_dir: Utf8PathBuf,
    /// The shard; part of the transactions' application id, together with `app`.
    pub shard: String,
    /// What sets this run apart from others: its id.
    pub app: String,
    /// Episodes of a batch at most.
    pub batch_episodes: usize,
    /// Bytes of a batch at most, give or take an episode.
    pub batch_bytes: usize,
    /// Age of a batch at most.
    pub batch_age: Duration,
    /// Episodes that may wait; `submit` waits beyond that.
    pub queue: usize,
    /// How the journal is kept.
    pub journal: JournalOptions,
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
            batch_bytes: 64_000_000,
            batch_age: Duration::from_secs(30),
            queue: 256,
            journal: JournalOptions::new(),
        }
    }
}

/// What a writer did since it was started, recovery included.
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
    /// Episodes handed over, so that one that comes again is not written again.
    taken: Mutex<HashSet<EpisodeId>>,
    failed: Arc<OnceLock<Arc<LakeError>>>,
    done: oneshot::Receiver<WriterReport>,
}

impl Writer {
    /// Opens the journal, commits what an earlier process left in it, and starts the background task on a thread of its own. What was
    /// found comes back: `finished` is in the lake by now, `unfinished` is for whoever resumes these episodes.
    ///
    /// # Errors
    /// A journal that can't be opened, or a lake that can't be written.
    pub async fn start(lake: Lake, options: WriterOptions) -> Result<(Self, Recovered), LakeError> {
        let (dir, shard, how) = (
            options.journal_dir.clone(),
            options.shard.clone(),
            options.journal,
        );
        let (journal, recovered) = blocking(&options.journal_dir, move || {
            Journal::open_with(&dir, &shard, how)
        })
        .await?;
        let mut batcher = Batcher {
            lake,
            journal: journal.clone(),
            app: format!("{}/{}", options.app, options.shard),
            number: 0,
            tasks: HashMap::new(),
            report: WriterReport::default(),
        };
        batcher.recover(&recovered, options.batch_episodes).await?;

        let (queue, mut waiting) = mpsc::channel(options.queue.max(1));
        let (tell, done) = oneshot::channel();
        let failed = Arc::new(OnceLock::new());
        let shared = failed.clone();
        let io = |e: std::io::Error| LakeError::reading(&options.journal_dir, e);
        // Encoding a batch takes a processor for a while: not one that episodes wait for.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .map_err(io)?;
        let limits = options.clone();
        let task = move || {
            let ended = runtime.block_on(batcher.run(&mut waiting, &limits));
            let report = batcher.report;
            if let Err(error) = ended {
                let _ = shared.set(Arc::new(error));
            }
            // Whoever waits for room in the queue finds the reason set.
            drop(waiting);
            // The journal is free for another writer before anyone hears of the end.
            drop(batcher);
            let _ = tell.send(report);
        };
        std::thread::Builder::new()
            .name("lake-writer".to_owned())
            .spawn(task)
            .map_err(io)?;
        let taken = Mutex::new(
            recovered
                .finished
                .iter()
                .map(|bundle| bundle.episode.episode_id.clone())
                .collect(),
        );
        Ok((
            Self {
                queue,
                journal,
                taken,
                failed,
                done,
            },
            recovered,
        ))
    }

    /// The journal, for the events of running episodes.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Journals a finished episode and queues it; waits while the queue is full. An episode that was handed over before is dropped.
    /// Once begun it goes on even where the caller stops waiting.
    ///
    /// # Errors
    /// A journal that can't be written, or the error that ended the background task; the episode is then in the journal.
    pub async fn submit(&self, bundle: EpisodeBundle) -> Result<(), LakeError> {
        let id = bundle.episode.episode_id.clone();
        if !self.taken().insert(id.clone()) {
            return Ok(());
        }
        let (journal, queue, failed) = (
            self.journal.clone(),
            self.queue.clone(),
            self.failed.clone(),
        );
        let submitted = tokio::spawn(async move {
            let append = move || {
                let event = JournalEvent::EpisodeFinished(Box::new(bundle));
                let appended = journal.append(&event, true);
                drop(journal);
                appended.map(|()| event)
            };
            let JournalEvent::EpisodeFinished(bundle) = tokio::task::spawn_blocking(append)
                .await
                .map_err(|_| ended(&failed))??
            else {
                return Ok(());
            };
            crash_point("after_finished");
            queue.send(bundle).await.map_err(|_| ended(&failed))
        });
        let result = submitted.await.unwrap_or_else(|_| Err(ended(&self.failed)));
        if result.is_err() && self.failed.get().is_none() {
            // It is not in the journal: another try is welcome.
            self.taken().remove(&id);
        }
        result
    }

    /// Commits what waits and ends. The journal then holds nothing but episodes that have begun and not ended.
    ///
    /// # Errors
    /// What stopped the background task.
    pub async fn finish(self) -> Result<WriterReport, LakeError> {
        let Self {
            queue,
            journal,
            failed,
            done,
            ..
        } = self;
        drop((queue, journal));
        let report = done.await.map_err(|_| ended(&failed))?;
        match failed.get() {
            Some(error) => Err(LakeError::WriterEnded(error.clone())),
            None => Ok(report),
        }
    }

    fn taken(&self) -> std::sync::MutexGuard<'_, HashSet<EpisodeId>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the background task is gone.
fn ended(failed: &OnceLock<Arc<LakeError>>) -> LakeError {
    let error = failed.get().cloned().unwrap_or_else(|| {
        let gone = std::io::Error::other("the lake's writer is gone, since the process is ending");
        Arc::new(LakeError::reading("journal", gone))
    });
    LakeError::WriterEnded(error)
}

async fn blocking<T: Send + 'static>(
    dir: &Utf8Path,
    work: impl FnOnce() -> Result<T, LakeError> + Send + 'static,
) -> Result<T, LakeError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|e| Err(LakeError::reading(dir, std::io::Error::other(e))))
}

struct Batcher {
    lake: Lake,
    journal: Journal,
    /// The transactions' application id.
    app: String,
    /// The last batch's number.
    number: i64,
    /// Tasks whose row is in the lake.
    tasks: HashMap<RunId, HashSet<TaskId>>,
    report: WriterReport,
}

impl Batcher {
    /// Commits what an earlier process left.
    async fn recover(
        &mut self,
        recovered: &Recovered,
        batch_episodes: usize,
    ) -> Result<(), LakeError> {
        self.number = recovered.last_batch;
        for table in COMMIT_ORDER {
            // A journal that was given up may have been further than what is left of it.
            self.number = self
                .number
                .max(self.lake.last_txn(table, &self.app).await?.unwrap_or(0));
        }
        let mut waiting: HashMap<&EpisodeId, &EpisodeBundle> = recovered
            .finished
            .iter()
            .map(|b| (&b.episode.episode_id, b))
            .collect();
        for (number, episodes) in &recovered.open_batches {
            let batch = episodes
                .iter()
                .filter_map(|id| waiting.remove(id))
                .cloned()
                .collect();
            self.commit(*number, batch, Known::Maybe).await?;
        }
        // Part of the rest may be in: from a journal that was given up, under another shard's name, or because someone else committed
        // a batch under this number. And of a batch that was skipped as known something may not.
        let present = self.present(&recovered.finished).await?;
        let rest: Vec<&EpisodeBundle> = recovered
            .finished
            .iter()
            .filter(|b| !present.contains(&b.episode.episode_id))
            .collect();
        for batch in rest.chunks(batch_episodes.max(1)) {
            self.batch(batch.iter().copied().cloned().collect()).await?;
        }
        if self.journal.bytes() > 0 {
            self.journal.compact(&recovered.unfinished, self.number)?;
        }
        Ok(())
    }

    /// Which of these episodes the lake has.
    async fn present(&self, bundles: &[EpisodeBundle]) -> Result<HashSet<EpisodeId>, LakeError> {
        let runs: BTreeSet<&RunId> = bundles.iter().map(|b| &b.episode.run_id).collect();
        let mut present = HashSet::new();
        if runs.is_empty() {
            return Ok(present);
        }
        let snapshot = self.lake.snapshot().await?;
        for run in runs {
            let rows: Vec<EpisodeRow> = snapshot.read(&Filter::run(run)).await?;
            present.extend(rows.into_iter().map(|row| row.episode_id));
        }
        Ok(present)
    }

    /// Until the queue is closed and empty.
    async fn run(
        &mut self,
        waiting: &mut mpsc::Receiver<Box<EpisodeBundle>>,
        options: &WriterOptions,
    ) -> Result<(), LakeError> {
        let mut open = true;
        while open {
            let Some(first) = waiting.recv().await else {
                break;
            };
            let deadline = Instant::now() + options.batch_age;
            let mut bytes = bundle_bytes(&first);
            let mut batch = vec![*first];
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
        }
        Ok(())
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
        crash_point("before_batch");
        self.commit(self.number, batch, Known::No).await
    }

    async fn commit(
        &mut self,
        number: i64,
        batch: Vec<EpisodeBundle>,
        known: Known,
    ) -> Result<(), LakeError> {
        let ids: Vec<EpisodeId> = batch.iter().map(|b| b.episode.episode_id.clone()).collect();
        let mut tasks: Vec<TaskRow> = Vec::new();
        let (mut tokens, mut calls, mut steps, mut messages) = (vec![], vec![], vec![], vec![]);
        let (mut rewards, mut verdicts, mut episodes) = (vec![], vec![], vec![]);
        for bundle in batch {
            if self.is_new_task(&bundle.task).await? {
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
        self.table(number, &tokens, known, "after_tokens").await?;
        self.table(number, &calls, known, "after_tool_calls")
            .await?;
        self.table(number, &steps, known, "after_steps").await?;
        self.table(number, &messages, known, "after_messages")
            .await?;
        self.table(number, &rewards, known, "after_rewards").await?;
        self.table(number, &verdicts, known, "after_verdicts")
            .await?;
        self.table(number, &tasks, known, "after_tasks").await?;
        crash_point("before_episodes");
        self.table(number, &episodes, known, "after_episodes")
            .await?;
        self.journal.batch_committed(number, &ids)?;
        self.report.episodes += episodes.len() as u64;
        self.report.steps += steps.len() as u64;
        self.report.batches += 1;
        Ok(())
    }

    async fn table<R: Row>(
        &self,
        number: i64,
        rows: &[R],
        known: Known,
        point: &str,
    ) -> Result<(), LakeError> {
        let txn = Txn {
            app: self.app.clone(),
            version: number,
        };
        let version = self.lake.append(rows, Some(txn)).await?;
        if version.is_none() && !rows.is_empty() && known == Known::No {
            let path = self.lake.root().join(R::TABLE.name());
            return Err(LakeError::ShardTaken {
                table: R::TABLE.name(),
                path,
                app: self.app.clone(),
                number,
            });
        }
        crash_point(point);
        if R::TABLE != Table::Episodes {
            crash_point("between_tables");
        }
        Ok(())
    }

    /// True for the first episode of a run's task.
    async fn is_new_task(&mut self, task: &TaskRow) -> Result<bool, LakeError> {
        if !self.tasks.contains_key(&task.run_id) {
            let snapshot = self.lake.snapshot().await?;
            let rows = snapshot.read::<TaskRow>(&Filter::run(&task.run_id)).await?;
            self.tasks.insert(
                task.run_id.clone(),
                rows.into_iter().map(|row| row.task_id).collect(),
            );
        }
        Ok(self
            .tasks
            .entry(task.run_id.clone())
            .or_default()
            .insert(task.task_id.clone()))
    }
}

/// Whether tables may have a batch already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// It is a new one.
    No,
    /// An earlier process began to commit it.
    Maybe,
}
