//! What the journal records.

use drillyard_schema::EpisodeId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bundle::EpisodeBundle;

/// Content of a file after a call, so that a resumed episode finds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedFile {
    /// Relative to the work directory.
    pub path: String,
    /// Base64 of the content; absent where the file was deleted.
    pub content: Option<String>,
}

/// One thing that happened in an episode, or to a batch of finished ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum JournalEvent {
    /// The episode began, or begins afresh: what was logged of it before no longer counts.
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
    /// The writer is about to commit these episodes, in this order, as batch `number`.
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
    /// The journal was written anew from here: what stands before no longer counts.
    Compacted {
        /// The highest batch number so far.
        last_batch: i64,
    },
}

impl JournalEvent {
    /// The episode it is about; none for events of batches.
    pub fn episode_id(&self) -> Option<&EpisodeId> {
        match self {
            Self::EpisodeStarted { episode_id, .. }
            | Self::Turn { episode_id, .. }
            | Self::CallIntent { episode_id, .. }
            | Self::CallResult { episode_id, .. } => Some(episode_id),
            Self::EpisodeFinished(bundle) => Some(&bundle.episode.episode_id),
            Self::BatchStarted { .. } | Self::BatchCommitted { .. } | Self::Compacted { .. } => {
                None
            }
        }
    }
}
