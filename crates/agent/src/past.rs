//! What the journal holds of an episode that an earlier execution did not finish.

use std::collections::VecDeque;

use drillyard_sandbox::ChangedFile;
use drillyard_schema::EndReason;
use drillyard_schema::table::{Artifact, ToolCallRow};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::episode::Halt;
use crate::policy::TurnReply;

/// A model turn as the journal keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoggedTurn {
    pub started_at: i64,
    pub generation_us: i64,
    pub reply: TurnReply,
}

/// A tool call's result as the journal keeps it.
#[derive(Debug, Clone)]
pub(crate) struct LoggedCall {
    pub row: ToolCallRow,
    pub observation: String,
    pub artifacts: Vec<Artifact>,
    pub files: Vec<ChangedFile>,
    /// The sandbox ended with the call; the next call gets one with the files as they were before.
    pub sandbox_ended: bool,
}

impl LoggedCall {
    /// Something changed that its list of files does not tell.
    pub fn is_incomplete(&self) -> bool {
        is_noted(&self.row, CHANGES_INCOMPLETE)
    }
}

/// The note in a row's `extras` for a call whose list of changed files does not tell all.
pub(crate) const CHANGES_INCOMPLETE: &str = "changes_incomplete";

/// Whether the `extras` of a row say so.
pub(crate) fn is_noted(row: &ToolCallRow, key: &str) -> bool {
    let extras = row
        .extras
        .as_deref()
        .and_then(|text| serde_json::from_str::<Value>(text).ok());
    extras.is_some_and(|extras| extras[key] == true)
}

/// One event of the past.
#[derive(Debug, Clone)]
pub(crate) enum PastEvent {
    Turn(u32, Box<LoggedTurn>),
    Intent(u32, usize),
    Result(u32, usize, Box<LoggedCall>),
    /// Something another version of Drillyard wrote.
    Unreadable,
}

/// What the past says of a call.
pub(crate) enum PastCall {
    /// It ran; this came of it.
    Result(Box<LoggedCall>),
    /// It was begun, and what came of it is not known.
    IntentOnly,
    /// Nothing.
    Silent,
}

/// The events of an episode, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Past {
    /// When the episode started; none for one that begins now.
    pub started_at: Option<i64>,
    events: VecDeque<PastEvent>,
}

impl Past {
    pub fn new(started_at: Option<i64>, events: impl IntoIterator<Item = PastEvent>) -> Self {
        Self {
            started_at,
            events: events.into_iter().collect(),
        }
    }

    /// This past with another episode's events before it: that of a branch.
    pub fn after(self, events: &[PastEvent]) -> Self {
        Self {
            started_at: self.started_at,
            events: events.iter().cloned().chain(self.events).collect(),
        }
    }

    /// Whether an earlier execution began the episode.
    pub fn is_resumed(&self) -> bool {
        self.started_at.is_some()
    }

    /// The turn of this step, if it was taken.
    pub fn take_turn(&mut self, step: u32) -> Result<Option<LoggedTurn>, Halt> {
        match self.events.pop_front() {
            None => Ok(None),
            Some(PastEvent::Turn(at, turn)) if at == step => Ok(Some(*turn)),
            Some(other) => Err(mismatch(&format!("turn {step}"), &other)),
        }
    }

    /// What came of this call, if it was begun.
    pub fn take_call(&mut self, step: u32, index: usize) -> Result<PastCall, Halt> {
        match self.events.pop_front() {
            None => return Ok(PastCall::Silent),
            Some(PastEvent::Intent(s, i)) if (s, i) == (step, index) => {}
            Some(other) => return Err(mismatch(&format!("call {index} of step {step}"), &other)),
        }
        match self.events.pop_front() {
            None => Ok(PastCall::IntentOnly),
            Some(PastEvent::Result(s, i, result)) if (s, i) == (step, index) => {
                Ok(PastCall::Result(result))
            }
            Some(next) => {
                // A second crash after the first: the episode went on from here without a result.
                self.events.push_front(next);
                Ok(PastCall::IntentOnly)
            }
        }
    }
}

fn mismatch(wanted: &str, found: &PastEvent) -> Halt {
    let found = match found {
        PastEvent::Turn(step, _) => format!("turn {step}"),
        PastEvent::Intent(step, index) => format!("intent of call {index} of step {step}"),
        PastEvent::Result(step, index, _) => format!("result of call {index} of step {step}"),
        PastEvent::Unreadable => "something unreadable".to_owned(),
    };
    Halt::End(
        EndReason::Interrupted,
        Some(format!(
            "the journal holds {found} where {wanted} belongs; another version of Drillyard or other settings wrote it"
        )),
    )
}
