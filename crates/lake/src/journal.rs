//! The journal: append-only files per shard of a run, in segments.
//!
//! `<shard>.000001.journal`, `<shard>.000002.journal`, … hold records (`record.rs` has the layout); an exclusive lock on `<shard>.lock`
//! keeps a second process away. A record survives a kill of the process once [`Journal::append`] returns; it survives a crash of the
//! machine once it is synced, which [`SyncPolicy`] governs and which finished episodes and batch boundaries always are.
//!
//! A kill can tear the last record of the last segment: opening cuts it off. A damaged record that whole records lie behind is an
//! error.
//!
//! The oldest segments go as soon as every episode in them is in the lake; only ever the oldest, so that an episode's end never goes
//! before its beginning.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io::Write;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::EpisodeId;
use fs_err::{File, OpenOptions};

use crate::error::LakeError;
use crate::event::JournalEvent;
use crate::faults::{armed, crash_point};
use crate::lock::Lock;
use crate::record::{decode, encode, is_damaged};
use crate::recovery::{Recovered, Replay};

/// When records reach the disk itself rather than the system's cache. Finished episodes and batch boundaries do at once, always.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncPolicy {
    /// Before `append` returns.
    EveryRecord,
    /// In the background, at most this long after `append`.
    Grouped(Duration),
}

/// How a journal is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalOptions {
    /// When records are synced.
    pub sync: SyncPolicy,
    /// A segment larger than this is followed by another.
    pub segment_bytes: u64,
}

impl JournalOptions {
    /// Synced in groups every 200 ms, segments of 16 MiB.
    pub const fn new() -> Self {
        Self {
            sync: SyncPolicy::Grouped(Duration::from_millis(200)),
            segment_bytes: 16 << 20,
        }
    }
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// An append-only log of events. Clones share it.
#[derive(Debug, Clone)]
pub struct Journal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    log: Arc<Log>,
    /// Wakes the background sync.
    dirty: Option<SyncSender<()>>,
    /// Free when the last clone is dropped, even if a background sync still runs.
    _lock: Lock,
}

#[derive(Debug)]
struct Log {
    dir: Utf8PathBuf,
    shard: String,
    options: JournalOptions,
    state: Mutex<State>,
    /// Number of the last record that is on disk. Whoever syncs holds it, so that those who wait find their record synced too.
    synced: Mutex<u64>,
}

#[derive(Debug)]
struct State {
    /// The last segment's file.
    file: Arc<File>,
    /// From the oldest to the one that is written.
    segments: VecDeque<Segment>,
    /// Records appended since opening.
    appended: u64,
    /// Why a sync failed, or what is left of half a record: nothing is appended any more.
    failed: Option<std::io::Error>,
}

#[derive(Debug)]
struct Segment {
    number: u64,
    path: Utf8PathBuf,
    bytes: u64,
    /// Episodes with a record here that are not in the lake yet.
    episodes: HashSet<EpisodeId>,
}

impl Journal {
    /// Opens the journal of `shard` in `dir`, reads what an earlier process left, and cuts off a torn tail.
    ///
    /// # Errors
    /// A folder that can't be written, a journal another process holds, or one with records this version can't read.
    pub fn open(dir: &Utf8Path, shard: &str) -> Result<(Self, Recovered), LakeError> {
        Self::open_with(dir, shard, JournalOptions::new())
    }

    /// [`Journal::open`] with options.
    ///
    /// # Errors
    /// As for `open`.
    pub fn open_with(
        dir: &Utf8Path,
        shard: &str,
        options: JournalOptions,
    ) -> Result<(Self, Recovered), LakeError> {
        if shard.is_empty() || shard.contains(['/', '\0']) {
            let message =
                format!("'{shard}' can't be a shard's name, since files are named after it");
            return Err(LakeError::Journal {
                path: dir.to_owned(),
                message,
            });
        }
        fs_err::create_dir_all(dir).map_err(|e| LakeError::writing(dir, e))?;
        let lock = Lock::take(&dir.join(format!("{shard}.lock")))?;

        let mut replay = Replay::default();
        let mut segments = list_segments(dir, shard)?;
        let mut torn_bytes = 0;
        let last = segments.len().saturating_sub(1);
        for index in 0..segments.len() {
            torn_bytes += read_segment(&mut segments, index, index == last, &mut replay)?;
        }
        for segment in &mut segments {
            segment.episodes.retain(|id| !replay.is_committed(id));
        }
        let file = if let Some(segment) = segments.back() {
            append_to(&segment.path)?
        } else {
            let (segment, file) = Segment::create(dir, shard, 1)?;
            segments.push_back(segment);
            file
        };

        let log = Arc::new(Log {
            dir: dir.to_owned(),
            shard: shard.to_owned(),
            options,
            state: Mutex::new(State {
                file: Arc::new(file),
                segments,
                appended: 0,
                failed: None,
            }),
            synced: Mutex::new(0),
        });
        let dirty = match options.sync {
            SyncPolicy::EveryRecord => None,
            SyncPolicy::Grouped(interval) => {
                let (dirty, wake) = std::sync::mpsc::sync_channel(1);
                let log = Arc::downgrade(&log);
                std::thread::Builder::new()
                    .name("journal-sync".to_owned())
                    .spawn(move || sync_in_background(&log, &wake, interval))
                    .map_err(|e| LakeError::reading(dir, e))?;
                Some(dirty)
            }
        };
        let inner = Arc::new(Inner {
            log,
            dirty,
            _lock: lock,
        });
        Ok((Self { inner }, replay.finish(torn_bytes)))
    }

    /// Appends an event; it survives a kill of the process once this returns, and with `sync` a crash of the machine, too. Waits for
    /// the disk when it syncs.
    ///
    /// # Errors
    /// A full or failing disk. The record is then cut off again, so that the next one starts whole.
    pub fn append(&self, event: &JournalEvent, sync: bool) -> Result<(), LakeError> {
        let record = encode(event).map_err(|message| LakeError::Journal {
            path: self.inner.log.dir.clone(),
            message,
        })?;
        let number = self.inner.log.write(&record, event.episode_id())?;
        if sync || self.inner.log.options.sync == SyncPolicy::EveryRecord {
            self.inner
                .log
                .sync_up_to(number)
                .map_err(|e| LakeError::writing(&self.inner.log.dir, e))
        } else {
            if let Some(dirty) = &self.inner.dirty {
                // Full where a wake-up is on its way already.
                let _ = dirty.try_send(());
            }
            Ok(())
        }
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.inner
            .log
            .state()
            .segments
            .iter()
            .map(|segment| segment.bytes)
            .sum()
    }

    /// Says that a batch is in the lake, and removes what is no longer needed.
    pub(crate) fn batch_committed(
        &self,
        number: i64,
        episodes: &[EpisodeId],
    ) -> Result<(), LakeError> {
        self.append(&JournalEvent::BatchCommitted { number }, true)?;
        crash_point("after_batch");
        let mut state = self.inner.log.state();
        for segment in &mut state.segments {
            for id in episodes {
                segment.episodes.remove(id);
            }
        }
        state.trim()
    }

    /// Writes the journal anew with nothing but what is unfinished. Everything else in it is in the lake.
    pub(crate) fn compact(
        &self,
        unfinished: &BTreeMap<EpisodeId, Vec<JournalEvent>>,
        last_batch: i64,
    ) -> Result<(), LakeError> {
        if unfinished.is_empty() {
            let mut state = self.inner.log.state();
            state
                .segments
                .iter_mut()
                .for_each(|segment| segment.episodes.clear());
            return state.trim();
        }
        let wrong = |message| LakeError::Journal {
            path: self.inner.log.dir.clone(),
            message,
        };
        let mut content = encode(&JournalEvent::Compacted { last_batch }).map_err(wrong)?;
        for event in unfinished.values().flatten() {
            content.extend(encode(event).map_err(wrong)?);
        }
        let mut state = self.inner.log.state();
        let number = state.segments.back().map_or(0, |segment| segment.number) + 1;
        let path = segment_path(&self.inner.log.dir, &self.inner.log.shard, number);
        let fresh = path.with_extension("new");
        let writing = |e: std::io::Error| LakeError::writing(&path, e);
        let mut file = File::create(&fresh).map_err(writing)?;
        let written = file
            .write_all(&content)
            .and_then(|()| file.sync_data())
            .and_then(|()| fs_err::rename(&fresh, &path));
        if let Err(error) = written {
            let _ = fs_err::remove_file(&fresh);
            return Err(writing(error));
        }
        sync_dir(&self.inner.log.dir)?;
        crash_point("mid_compact");
        let segment = Segment {
            number,
            path: path.clone(),
            bytes: content.len() as u64,
            episodes: unfinished.keys().cloned().collect(),
        };
        state.file = Arc::new(append_to(&path)?);
        for old in std::mem::replace(&mut state.segments, VecDeque::from([segment])) {
            fs_err::remove_file(&old.path).map_err(|e| LakeError::writing(&old.path, e))?;
        }
        Ok(())
    }
}

impl Log {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a record and returns its number.
    fn write(&self, record: &[u8], episode: Option<&EpisodeId>) -> Result<u64, LakeError> {
        let mut state = self.state();
        if let Some(error) = &state.failed {
            return Err(LakeError::writing(self.dir.clone(), copy(error)));
        }
        let State {
            file,
            segments,
            appended,
            ..
        } = &mut *state;
        if segments
            .back()
            .is_some_and(|segment| segment.bytes >= self.options.segment_bytes)
        {
            // Whole on disk before the next one exists, so that only a last segment can have a torn tail.
            file.sync_data()
                .map_err(|e| LakeError::writing(&self.dir, e))?;
            let next = segments.back().map_or(0, |segment| segment.number) + 1;
            let (segment, opened) = Segment::create(&self.dir, &self.shard, next)?;
            segments.push_back(segment);
            *file = Arc::new(opened);
        }
        let Some(segment) = segments.back_mut() else {
            return Err(LakeError::Journal {
                path: self.dir.clone(),
                message: "there is no segment".to_owned(),
            });
        };
        let mut out = &**file;
        if armed() {
            // A kill in the middle of the write leaves half a record.
            let half = out.write_all(&record[..record.len() / 2]);
            crash_point("journal_write");
            half.and_then(|()| out.set_len(segment.bytes))
                .map_err(|e| LakeError::writing(&segment.path, e))?;
        }
        if let Err(error) = out.write_all(record) {
            let path = segment.path.clone();
            if out.set_len(segment.bytes).is_err() {
                // What follows half a record would not be read back.
                state.failed = Some(copy(&error));
            }
            return Err(LakeError::writing(path, error));
        }
        segment.bytes += record.len() as u64;
        if let Some(id) = episode
            && !segment.episodes.contains(id)
        {
            segment.episodes.insert(id.clone());
        }
        *appended += 1;
        Ok(*appended)
    }

    /// Returns once the record with this number is on disk. One sync serves all who wait.
    fn sync_up_to(&self, number: u64) -> std::io::Result<()> {
        let mut synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        if *synced >= number {
            return Ok(());
        }
        let (file, appended) = {
            let state = self.state();
            (state.file.clone(), state.appended)
        };
        if let Err(error) = file.sync_data() {
            // The system may say that the next sync went well, and the records are lost all the same.
            self.state().failed = Some(copy(&error));
            return Err(error);
        }
        *synced = appended;
        Ok(())
    }
}

impl State {
    /// Removes the oldest segments up to the first that is still needed.
    fn trim(&mut self) -> Result<(), LakeError> {
        while self.segments.len() > 1 && self.segments[0].episodes.is_empty() {
            let path = &self.segments[0].path;
            fs_err::remove_file(path).map_err(|e| LakeError::writing(path, e))?;
            self.segments.pop_front();
        }
        if let [segment] = self.segments.make_contiguous()
            && segment.episodes.is_empty()
        {
            self.file
                .set_len(0)
                .map_err(|e| LakeError::writing(&segment.path, e))?;
            segment.bytes = 0;
        }
        Ok(())
    }
}

/// Runs until the journal is closed.
fn sync_in_background(log: &Weak<Log>, wake: &Receiver<()>, interval: Duration) {
    while wake.recv().is_ok() {
        std::thread::sleep(interval);
        let Some(log) = log.upgrade() else {
            return;
        };
        let appended = log.state().appended;
        // Whoever appends next hears of an error.
        let _ = log.sync_up_to(appended);
    }
}

impl Segment {
    /// Makes the next segment, whose name is on disk when this returns.
    fn create(dir: &Utf8Path, shard: &str, number: u64) -> Result<(Self, File), LakeError> {
        let path = segment_path(dir, shard, number);
        let file = append_to(&path)?;
        sync_dir(dir)?;
        Ok((
            Self {
                number,
                path,
                bytes: 0,
                episodes: HashSet::new(),
            },
            file,
        ))
    }
}

fn copy(error: &std::io::Error) -> std::io::Error {
    std::io::Error::new(error.kind(), error.to_string())
}

fn segment_path(dir: &Utf8Path, shard: &str, number: u64) -> Utf8PathBuf {
    dir.join(format!("{shard}.{number:06}.journal"))
}

fn append_to(path: &Utf8Path) -> Result<File, LakeError> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|e| LakeError::writing(path, e))
}

fn sync_dir(dir: &Utf8Path) -> Result<(), LakeError> {
    File::open(dir)
        .and_then(|opened| opened.sync_all())
        .map_err(|e| LakeError::writing(dir, e))
}

/// The shard's segments, from the oldest.
fn list_segments(dir: &Utf8Path, shard: &str) -> Result<VecDeque<Segment>, LakeError> {
    let reading = |e: std::io::Error| LakeError::reading(dir, e);
    let mut numbers = Vec::new();
    for entry in fs_err::read_dir(dir).map_err(reading)? {
        let entry = entry.map_err(reading)?;
        let name = entry.file_name();
        // A compaction that was killed half-way left this; the segments it was made of are all there.
        let ours = name
            .to_str()
            .is_some_and(|name| name.starts_with(&format!("{shard}.")));
        if ours && entry.path().extension().is_some_and(|e| e == "new") {
            let _ = fs_err::remove_file(entry.path());
            continue;
        }
        let middle = name
            .to_str()
            .and_then(|name| {
                name.strip_prefix(shard)?
                    .strip_prefix('.')?
                    .strip_suffix(".journal")
            })
            .filter(|middle| middle.bytes().all(|byte| byte.is_ascii_digit()));
        numbers.extend(middle.and_then(|middle| middle.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    let segment = |number| Segment {
        number,
        path: segment_path(dir, shard, number),
        bytes: 0,
        episodes: HashSet::new(),
    };
    Ok(numbers.into_iter().map(segment).collect())
}

/// Replays a segment and returns the bytes that were torn off its end, which only the last one may have.
fn read_segment(
    segments: &mut VecDeque<Segment>,
    index: usize,
    last: bool,
    replay: &mut Replay,
) -> Result<u64, LakeError> {
    let path = segments[index].path.clone();
    let bytes = fs_err::read(&path).map_err(|e| LakeError::reading(&path, e))?;
    let (events, whole) = decode(&bytes).map_err(|message| LakeError::Journal {
        path: path.clone(),
        message,
    })?;
    for event in events {
        if let Some(id) = event.episode_id() {
            segments[index].episodes.insert(id.clone());
        } else if matches!(event, JournalEvent::Compacted { .. }) {
            for segment in segments.iter_mut() {
                segment.episodes.clear();
            }
        }
        replay.event(event);
    }
    segments[index].bytes = whole as u64;
    let torn = (bytes.len() - whole) as u64;
    if torn > 0 {
        if !last || is_damaged(&bytes, whole) {
            let message = format!("the record at byte {whole} is damaged, and later records exist");
            return Err(LakeError::Journal { path, message });
        }
        let cut = OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(whole as u64));
        cut.map_err(|e| LakeError::writing(&path, e))?;
    }
    Ok(torn)
}
