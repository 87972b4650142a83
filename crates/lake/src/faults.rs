//! Named points at which a test can kill the process, to show what the next start makes of it.
//!
//! `DRILLYARD_CRASH_AT=point` aborts at the first passage of the point, `DRILLYARD_CRASH_AT=point:3` at the third. Without the
//! variable a point costs one comparison. The points of this crate, in the order in which an episode passes them:
//!
//! | point | the process dies |
//! |---|---|
//! | `journal_write` | with half a record in the journal |
//! | `after_finished` | with a finished episode in the journal and not in the queue |
//! | `before_batch` | with a batch's members in the journal and none of it in the lake |
//! | `mid_append` | with a data file written and not committed |
//! | `between_tables` | after any table of a batch but the last |
//! | `after_tokens`, `after_tool_calls`, `after_steps`, `after_messages`, `after_rewards`, `after_verdicts`, `after_tasks` | after that table of a batch |
//! | `before_episodes` | with all of a batch in the lake but what makes it visible |
//! | `after_episodes` | with a batch in the lake and the journal not knowing |
//! | `after_batch` | with the journal knowing and not trimmed |
//! | `mid_compact` | with the journal written anew and the old one not removed |
//!
//! Others pass `mid_call` (`agent`: a call is in the journal, and not run) and `mid_checkpoint` (`trainer`: the weights of a checkpoint
//! are written, its folder has not got its name).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The environment variable that names a point; unset in ordinary runs.
pub const CRASH_VARIABLE: &str = "DRILLYARD_CRASH_AT";

/// Ends the process at once, as a kill -9 would, when the variable names this `point`.
pub fn crash_point(point: &str) {
    static PASSED: AtomicU64 = AtomicU64::new(0);
    let Some((wanted, passage)) = wanted() else {
        return;
    };
    if wanted == point && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == *passage {
        std::process::abort();
    }
}

/// True when this process is meant to die somewhere.
pub(crate) fn armed() -> bool {
    wanted().is_some()
}

fn wanted() -> Option<&'static (String, u64)> {
    static WANTED: OnceLock<Option<(String, u64)>> = OnceLock::new();
    WANTED
        .get_or_init(|| {
            let text = std::env::var(CRASH_VARIABLE).ok()?;
            Some(
                match text
                    .split_once(':')
                    .and_then(|(point, nth)| Some((point, nth.parse().ok()?)))
                {
                    Some((point, nth)) => (point.to_owned(), nth),
                    None => (text, 1),
                },
            )
        })
        .as_ref()
}
