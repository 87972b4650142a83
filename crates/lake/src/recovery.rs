//! What a journal says once all of it is read.

use std::collections::{BTreeMap, BTreeSet};

use drillyard_schema::EpisodeId;

use crate::bundle::EpisodeBundle;
use crate::event::JournalEvent;

/// What a journal held when it was opened.
#[derive(Debug, Default, PartialEq)]
pub struct Recovered {
    /// Episodes that ended and are not known to be in the lake. The writer commits them first.
    pub finished: Vec<EpisodeBundle>,
    /// Events of episodes that had begun, in order.
    pub unfinished: BTreeMap<EpisodeId, Vec<JournalEvent>>,
    /// Batches that were begun and not known to be committed, by number: their episodes, in order.
    pub open_batches: BTreeMap<i64, Vec<EpisodeId>>,
    /// The highest batch number ever begun.
    pub last_batch: i64,
    /// Bytes of a torn tail that were cut off.
    pub torn_bytes: u64,
}

/// Takes events in order.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    finished: BTreeMap<EpisodeId, EpisodeBundle>,
    /// Finished episodes in the order in which they ended.
    order: Vec<EpisodeId>,
    committed: BTreeSet<EpisodeId>,
    unfinished: BTreeMap<EpisodeId, Vec<JournalEvent>>,
    open_batches: BTreeMap<i64, Vec<EpisodeId>>,
    last_batch: i64,
}

impl Replay {
    pub(crate) fn event(&mut self, event: JournalEvent) {
        match event {
            JournalEvent::EpisodeFinished(bundle) => {
                let id = bundle.episode.episode_id.clone();
                self.unfinished.remove(&id);
                // The first end counts: it may be in a batch already.
                if !self.committed.contains(&id) && !self.finished.contains_key(&id) {
                    self.finished.insert(id.clone(), *bundle);
                    self.order.push(id);
                }
            }
            JournalEvent::BatchStarted { number, episodes } => {
                self.last_batch = self.last_batch.max(number);
                self.open_batches.insert(number, episodes);
            }
            JournalEvent::BatchCommitted { number } => {
                for id in self.open_batches.remove(&number).unwrap_or_default() {
                    self.finished.remove(&id);
                    self.committed.insert(id);
                }
            }
            JournalEvent::Compacted { last_batch } => {
                *self = Self {
                    last_batch,
                    ..Self::default()
                }
            }
            JournalEvent::EpisodeStarted { ref episode_id, .. } => {
                if !self.has_ended(episode_id) {
                    self.unfinished.insert(episode_id.clone(), vec![event]);
                }
            }
            JournalEvent::Turn { ref episode_id, .. }
            | JournalEvent::CallIntent { ref episode_id, .. }
            | JournalEvent::CallResult { ref episode_id, .. } => {
                if !self.has_ended(episode_id) {
                    self.unfinished
                        .entry(episode_id.clone())
                        .or_default()
                        .push(event);
                }
            }
        }
    }

    /// True for episodes known to be in the lake.
    pub(crate) fn is_committed(&self, id: &EpisodeId) -> bool {
        self.committed.contains(id)
    }

    fn has_ended(&self, id: &EpisodeId) -> bool {
        self.finished.contains_key(id) || self.committed.contains(id)
    }

    pub(crate) fn finish(mut self, torn_bytes: u64) -> Recovered {
        Recovered {
            finished: self
                .order
                .iter()
                .filter_map(|id| self.finished.remove(id))
                .collect(),
            unfinished: self.unfinished,
            open_batches: self.open_batches,
            last_batch: self.last_batch,
            torn_bytes,
        }
    }
}
