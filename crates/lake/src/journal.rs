//! The journal: an append-only file per shard of a run.
//!
//! A record is `length (u32 LE) · CRC-32 of the payload (u32 LE) · payload (JSON)`. Whatever was written whole is read back; the first
//! record that is short or does not match its checksum ends the reading, since a kill can only tear the tail, and the file is cut there.
//! A file is called `<shard>.journal`; an exclusive lock on `<shard>.lock` keeps a second process away.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::EpisodeId;
use fs_err::{File, OpenOptions};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bundle::EpisodeBundle;
use crate::error::LakeError;
use crate::faults::crash_point;

/// A record longer than this is taken for garbage.
const MAX_RECORD: u32 = 1 << 30;
/// Bytes before a payload.
const HEADER: usize = 8;
/// How long a lock that another process holds is waited for.
const LOCK_PATIENCE: Duration = Duration::from_millis(1500);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Content of a file after a call, so that a resumed episode finds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedFile {
    /// Relative to the work directory.
    pub path: String,
    /// Base64 of the content; absent where the file was deleted.
    pub content: Option<String>,
}

/// One thing that happened in an episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum JournalEvent {
    /// The episode began.
    EpisodeStarted {
        /// The episode.
        episode_id: EpisodeId,
        /// What the agent's loop needs to go on (attempt, start time, …).
        data: Value,
    },
    /// A model turn came back.
    Turn {
        /// The episode.
        episode_id: EpisodeId,
        /// Which turn, from 0.
        step_index: i32,
        /// The turn as the agent's loop keeps it.
        data: Value,
    },
    /// A call is about to run.
    CallIntent {
        /// The episode.
        episode_id: EpisodeId,
        /// The turn.
        step_index: i32,
        /// Position within the turn.
        call_index: i32,
    },
    /// A call ended.
    CallResult {
        /// The episode.
        episode_id: EpisodeId,
        /// The turn.
        step_index: i32,
        /// Position within the turn.
        call_index: i32,
        /// The result as the agent's loop keeps it.
        data: Value,
        /// Files it changed.
        files: Vec<LoggedFile>,
        /// The changes were too large to log.
        state_lost: bool,
    },
    /// The episode ended; everything about it.
    EpisodeFinished(Box<EpisodeBundle>),
    /// The writer is about to commit these episodes as batch `number`.
    BatchStarted {
        /// The batch's transaction number.
        number: i64,
        /// Its episodes.
        episodes: Vec<EpisodeId>,
    },
    /// Batch `number` is in the lake.
    BatchCommitted {
        /// The batch's transaction number.
        number: i64,
    },
}

/// What a journal held when it was opened.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Episodes that ended and are not known to be in the lake. The writer commits them first.
    pub finished: Vec<EpisodeBundle>,
    /// Events of episodes that had begun, in order.
    pub unfinished: BTreeMap<EpisodeId, Vec<JournalEvent>>,
    /// Batches that were begun and not known to be committed, by number.
    pub open_batches: BTreeMap<i64, Vec<EpisodeId>>,
    /// The highest batch number ever begun.
    pub last_batch: i64,
    /// Bytes of a torn tail that were cut off.
    pub torn_bytes: u64,
}

/// An append-only file of events. Clones share it.
#[derive(Debug, Clone)]
pub struct Journal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: Utf8PathBuf,
    file: Mutex<File>,
    _lock: Lock,
}

/// An exclusive lock on a file, held while the process lives.
#[derive(Debug)]
struct Lock(#[expect(dead_code, reason = "the lock is the open file")] std::fs::File);

impl Lock {
    fn take(path: &Utf8Path) -> Result<Self, LakeError> {
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path)
            .map_err(|e| LakeError::io(path, e))?;
        // A child of an ended holder has the file open until it calls exec, so one refusal is not the last word.
        let patience = Instant::now() + LOCK_PATIENCE;
        loop {
            match file.file().try_lock() {
                Ok(()) => break,
                Err(std::fs::TryLockError::WouldBlock) if Instant::now() < patience => {
                    std::thread::sleep(LOCK_PAUSE)
                }
                Err(std::fs::TryLockError::WouldBlock) => {
                    let mut holder = String::new();
                    let _ = file.read_to_string(&mut holder);
                    return Err(LakeError::Locked {
                        path: path.to_owned(),
                        holder: holder.trim().to_owned(),
                    });
                }
                Err(std::fs::TryLockError::Error(e)) => return Err(LakeError::io(path, e)),
            }
        }
        let mut held = || -> std::io::Result<()> {
            file.set_len(0)?;
            file.write_all(format!("{}\n", std::process::id()).as_bytes())
        };
        held().map_err(|e| LakeError::io(path, e))?;
        Ok(Self(file.into_parts().0))
    }
}

impl Journal {
    /// Opens the journal of `shard` in `dir`, reads what an earlier process left, and cuts off a torn tail.
    ///
    /// # Errors
    /// A folder that can't be written, a journal another process holds, or one whose whole records this version can't read.
    pub fn open(dir: &Utf8Path, shard: &str) -> Result<(Self, Recovered), LakeError> {
        fs_err::create_dir_all(dir).map_err(|e| LakeError::io(dir, e))?;
        let lock = Lock::take(&dir.join(format!("{shard}.lock")))?;
        let path = dir.join(format!("{shard}.journal"));
        let io = |e: std::io::Error| LakeError::io(&path, e);
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(io)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        let (events, whole) = parse(&bytes).map_err(|message| LakeError::Journal {
            path: path.clone(),
            message,
        })?;
        let mut recovered = replay(events);
        recovered.torn_bytes = (bytes.len() - whole) as u64;
        if recovered.torn_bytes > 0 {
            file.set_len(whole as u64).map_err(io)?;
        }
        file.seek(SeekFrom::Start(whole as u64)).map_err(io)?;
        Ok((
            Self {
                inner: Arc::new(Inner {
                    path,
                    file: Mutex::new(file),
                    _lock: lock,
                }),
            },
            recovered,
        ))
    }

    /// Appends an event; it survives a kill of the process once this returns, and with `sync` a crash of the machine.
    ///
    /// # Errors
    /// A full or failing disk. The record is then cut off again, so that the next one starts whole.
    pub fn append(&self, event: &JournalEvent, sync: bool) -> Result<(), LakeError> {
        let payload = serde_json::to_vec(event).map_err(|e| LakeError::Journal {
            path: self.inner.path.clone(),
            message: e.to_string(),
        })?;
        let mut record = Vec::with_capacity(payload.len() + HEADER);
        record.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        record.extend_from_slice(&crc32fast::hash(&payload).to_le_bytes());
        record.extend_from_slice(&payload);
        let mut file = self
            .inner
            .file
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let io = |e: std::io::Error| LakeError::io(&self.inner.path, e);
        let start = file.stream_position().map_err(io)?;
        if std::env::var_os(crate::faults::CRASH_VARIABLE).is_some() {
            // A kill in the middle of the write leaves half a record.
            let half = record.len() / 2;
            file.write_all(&record[..half]).map_err(io)?;
            crash_point("journal_write");
            file.seek(SeekFrom::Start(start)).map_err(io)?;
        }
        let written = file
            .write_all(&record)
            .and_then(|()| if sync { file.sync_data() } else { Ok(()) });
        if let Err(error) = written {
            let _ = file.set_len(start);
            let _ = file.seek(SeekFrom::Start(start));
            return Err(io(error));
        }
        Ok(())
    }

    /// Drops everything: each episode in the journal is in the lake.
    ///
    /// # Errors
    /// A failing disk.
    pub fn clear(&self) -> Result<(), LakeError> {
        let mut file = self
            .inner
            .file
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let cut = file
            .set_len(0)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| file.sync_data());
        cut.map_err(|e| LakeError::io(&self.inner.path, e))
    }
}

/// The whole records at the start of `bytes`, and how many bytes they take.
fn parse(bytes: &[u8]) -> Result<(Vec<JournalEvent>, usize), String> {
    let mut events = Vec::new();
    let mut at = 0;
    while let Some(header) = bytes.get(at..at + HEADER) {
        let (length, sum) = header.split_at(4);
        let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
        let sum = u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]);
        if length > MAX_RECORD {
            break;
        }
        let Some(payload) = bytes.get(at + HEADER..at + HEADER + length as usize) else {
            break;
        };
        if crc32fast::hash(payload) != sum {
            break;
        }
        events.push(
            serde_json::from_slice(payload).map_err(|e| format!("record at byte {at}: {e}"))?,
        );
        at += HEADER + length as usize;
    }
    Ok((events, at))
}

fn replay(events: Vec<JournalEvent>) -> Recovered {
    let mut recovered = Recovered::default();
    let mut finished: BTreeMap<EpisodeId, EpisodeBundle> = BTreeMap::new();
    let mut order = Vec::new();
    let mut committed: BTreeSet<EpisodeId> = BTreeSet::new();
    for event in events {
        match event {
            JournalEvent::EpisodeFinished(bundle) => {
                let id = bundle.episode.episode_id.clone();
                recovered.unfinished.remove(&id);
                if finished.insert(id.clone(), *bundle).is_none() {
                    order.push(id);
                }
            }
            JournalEvent::BatchStarted { number, episodes } => {
                recovered.last_batch = recovered.last_batch.max(number);
                recovered.open_batches.insert(number, episodes);
            }
            JournalEvent::BatchCommitted { number } => {
                committed.extend(recovered.open_batches.remove(&number).unwrap_or_default());
            }
            JournalEvent::EpisodeStarted { ref episode_id, .. } => {
                // A fresh start forgets what an earlier attempt at the same episode logged.
                recovered.unfinished.insert(episode_id.clone(), vec![event]);
            }
            JournalEvent::Turn { ref episode_id, .. }
            | JournalEvent::CallIntent { ref episode_id, .. }
            | JournalEvent::CallResult { ref episode_id, .. } => {
                let id = episode_id.clone();
                if !finished.contains_key(&id) {
                    recovered.unfinished.entry(id).or_default().push(event);
                }
            }
        }
    }
    order.retain(|id| !committed.contains(id));
    recovered.finished = order.iter().filter_map(|id| finished.remove(id)).collect();
    recovered
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn dir() -> (tempfile::TempDir, Utf8PathBuf) {
        let keep = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(keep.path().to_owned()).unwrap();
        (keep, path)
    }

    fn turn(episode: &str, step: i32) -> JournalEvent {
        JournalEvent::Turn {
            episode_id: episode.into(),
            step_index: step,
            data: json!({ "text": "x".repeat(step as usize) }),
        }
    }

    fn started(episode: &str) -> JournalEvent {
        JournalEvent::EpisodeStarted {
            episode_id: episode.into(),
            data: json!({}),
        }
    }

    #[test]
    fn events_come_back_in_order() {
        let (_keep, dir) = dir();
        let (journal, empty) = Journal::open(&dir, "0").unwrap();
        assert!(empty.unfinished.is_empty());
        for event in [started("a"), turn("a", 0), started("b"), turn("a", 1)] {
            journal.append(&event, true).unwrap();
        }
        drop(journal);
        let (_journal, recovered) = Journal::open(&dir, "0").unwrap();
        assert_eq!(
            recovered.unfinished[&"a".into()],
            vec![started("a"), turn("a", 0), turn("a", 1)]
        );
        assert_eq!(recovered.unfinished[&"b".into()], vec![started("b")]);
    }

    #[test]
    fn a_second_process_is_told_who_holds_the_journal() {
        let (_keep, dir) = dir();
        let (_journal, _) = Journal::open(&dir, "0").unwrap();
        let error = Journal::open(&dir, "0").unwrap_err();
        assert!(
            error.to_string().contains(&std::process::id().to_string()),
            "{error}"
        );
        assert!(Journal::open(&dir, "1").is_ok(), "another shard is free");
    }

    #[test]
    fn a_whole_record_of_another_version_is_an_error() {
        let (_keep, dir) = dir();
        let payload = br#"{"event":"from_the_future"}"#;
        let mut record = (payload.len() as u32).to_le_bytes().to_vec();
        record.extend(crc32fast::hash(payload).to_le_bytes());
        record.extend(payload);
        std::fs::write(dir.join("0.journal"), record).unwrap();
        assert!(matches!(
            Journal::open(&dir, "0"),
            Err(LakeError::Journal { .. })
        ));
    }

    proptest! {
        #[test]
        fn any_damage_to_the_tail_leaves_a_prefix(n in 1_i32..12, cut in any::<prop::sample::Index>(), flip in any::<bool>()) {
            let (_keep, dir) = dir();
            let (journal, _) = Journal::open(&dir, "0").unwrap();
            let events: Vec<JournalEvent> = (0..n).map(|i| turn("a", i)).collect();
            for event in &events {
                journal.append(event, false).unwrap();
            }
            drop(journal);
            let path = dir.join("0.journal");
            let mut bytes = std::fs::read(&path).unwrap();
            let at = cut.index(bytes.len());
            if flip { bytes[at] ^= 0x40 } else { bytes.truncate(at) }
            std::fs::write(&path, &bytes).unwrap();

            let (journal, recovered) = Journal::open(&dir, "0").unwrap();
            let back = recovered.unfinished.get(&"a".into()).cloned().unwrap_or_default();
            prop_assert!(back.len() < events.len());
            prop_assert_eq!(&events[..back.len()], back.as_slice());

            // What is appended after the damage is readable.
            journal.append(&turn("a", 99), false).unwrap();
            drop(journal);
            let (_journal, again) = Journal::open(&dir, "0").unwrap();
            prop_assert_eq!(again.unfinished[&"a".into()].last(), Some(&turn("a", 99)));
        }
    }
}
