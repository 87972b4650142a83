//! What can go wrong in training, said so that the reader knows which file or field to mend.

use camino::Utf8PathBuf;
use thiserror::Error;

/// Why training could not go on.
#[derive(Debug, Error)]
pub enum TrainError {
    /// The configuration contradicts itself or the data.
    #[error("{field}: {message}")]
    Config {
        /// The field concerned.
        field: &'static str,
        /// What is wrong and what would be right.
        message: String,
    },
    /// There is nothing to learn from.
    #[error("nothing to train on: {0}")]
    NoData(String),
    /// A file could not be read or does not hold what it should.
    #[error("{path}: {message}")]
    Input {
        /// The file.
        path: Utf8PathBuf,
        /// What was found.
        message: String,
    },
    /// A row of the lake contradicts another.
    #[error("episode {episode}: {message}")]
    Row {
        /// The episode.
        episode: String,
        /// What does not fit.
        message: String,
    },
    /// A number stopped being one.
    #[error(
        "step {step}: the {what} is not a finite number; lower the learning rate or look at the batch (seed and step name it)"
    )]
    NotFinite {
        /// The optimiser step.
        step: u64,
        /// Loss or gradient norm.
        what: &'static str,
    },
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// libtorch refused.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
    /// JSON could not be read or written.
    #[error("json: {0}")]
    Json(#[from] serde_json::Error),
    /// The lake could not be read.
    #[error(transparent)]
    Lake(#[from] drillyard_lake::LakeError),
    /// The model could not be read or written.
    #[error(transparent)]
    Model(#[from] drillyard_model::ModelError),
    /// A tokenizer or template could not be read, or a conversation not be rendered.
    #[error(transparent)]
    Render(#[from] drillyard_render::RenderError),
    /// The validation hook failed.
    #[error("validation: {0}")]
    Validation(String),
}

impl TrainError {
    /// A configuration error.
    pub fn config(field: &'static str, message: impl Into<String>) -> Self {
        Self::Config {
            field,
            message: message.into(),
        }
    }
}
