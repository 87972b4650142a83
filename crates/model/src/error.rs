//! What can go wrong with a checkpoint.

use camino::Utf8PathBuf;
use thiserror::Error;

/// Why a model could not be read, written or run.
#[derive(Debug, Error)]
pub enum ModelError {
    /// A file could not be read or written; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// `config.json` is not JSON.
    #[error("{path}: not valid JSON: {source}")]
    Json {
        /// The file.
        path: Utf8PathBuf,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A field of the configuration is missing, of the wrong type, or asks for something this crate does not compute.
    #[error("config field '{field}': {message}")]
    Config {
        /// The field's name in `config.json`.
        field: String,
        /// What is wrong, and what would do.
        message: String,
    },
    /// A weights file is damaged.
    #[error("{path}: {source}")]
    Safetensors {
        /// The file.
        path: Utf8PathBuf,
        /// What the parser said.
        source: safetensors::SafeTensorError,
    },
    /// A parameter is missing, superfluous, or has the wrong shape or type.
    #[error("parameter '{name}': {message}")]
    Parameter {
        /// Its Hugging Face name.
        name: String,
        /// What is wrong.
        message: String,
    },
    /// A row given to the decoder does not fit its cache or vocabulary.
    #[error("{0}")]
    Input(String),
    /// libtorch failed (out of memory, mostly).
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}
