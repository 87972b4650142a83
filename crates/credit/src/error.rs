//! What can go wrong.

use camino::Utf8PathBuf;
use thiserror::Error;

/// Why no credit was assigned.
#[derive(Debug, Error)]
pub enum CreditError {
    /// A setting makes no sense.
    #[error("credit setting {name}: {reason}")]
    Config {
        /// The setting.
        name: &'static str,
        /// Why not, and what would do.
        reason: String,
    },
    /// A data file could not be read.
    #[error("cannot read {path} of table {table}: {message}")]
    File {
        /// The table.
        table: &'static str,
        /// The file.
        path: Utf8PathBuf,
        /// What the reader said.
        message: String,
    },
    /// A purpose that credit does not read was asked for.
    #[error("credit reads only episodes collected to learn from (train, import), not {purpose}")]
    Purpose {
        /// The purpose asked for.
        purpose: String,
    },
    /// A run holds nothing but evaluation episodes.
    #[error(
        "run {run} holds no train or import episodes, only {found}; evaluation is never trained on"
    )]
    EvaluationRun {
        /// The run.
        run: String,
        /// The purposes it has.
        found: String,
    },
    /// An episode on an evaluation task stands among those to learn from.
    #[error(
        "episode {episode} is marked for training but its task belongs to split {split}; evaluation is never trained on"
    )]
    EvaluationEpisode {
        /// The episode.
        episode: String,
        /// The split.
        split: String,
    },
    /// No episodes at all.
    #[error("no episodes of run {runs} to learn from; run the rollout or an import first")]
    NoEpisodes {
        /// The runs asked for.
        runs: String,
    },
    /// A key that must be unique is not.
    #[error("table {table} holds episode {episode} twice{hint}")]
    Twice {
        /// The table.
        table: &'static str,
        /// The episode.
        episode: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// A plan failed: a bug, or files whose columns are of another type than the table's.
    #[error("computing {what}: {message}")]
    Plan {
        /// What was computed.
        what: &'static str,
        /// What the engine said.
        message: String,
    },
}

impl CreditError {
    /// For use in `map_err`: names what was being computed.
    pub(crate) fn plan(what: &'static str) -> impl Fn(polars::error::PolarsError) -> Self {
        move |error| Self::Plan {
            what,
            message: error.to_string(),
        }
    }
}
