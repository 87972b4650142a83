//! What can go wrong between text and tokens.

use camino::Utf8PathBuf;
use thiserror::Error;

/// Why a conversation could not be turned into tokens, or tokens into text.
#[derive(Debug, Error)]
pub enum RenderError {
    /// A file could not be read or written; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A file is not what it should be.
    #[error("{path}: {message}")]
    File {
        /// The file.
        path: Utf8PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template does not compile, or refused the conversation.
    #[error("chat template: {0}")]
    Template(String),
    /// The chat template renders earlier messages differently once later ones are there, so a conversation cannot be cut into the
    /// parts that were sampled and the parts that were given.
    #[error(
        "chat template: message {message} renders differently once later messages follow, so its tokens cannot be told apart"
    )]
    NotIncremental {
        /// Index of the message.
        message: usize,
    },
    /// A request for a continuation does not fit the conversation.
    #[error("prior messages: {0}")]
    Prior(String),
}
