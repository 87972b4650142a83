//! What can go wrong, and how a client hears of it.

use axum::http::StatusCode;
use drillyard_model::ModelError;
use drillyard_render::RenderError;
use thiserror::Error;

/// Why the server could not start, or a request could not be answered.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The checkpoint can't be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer or chat template can't be used, or refused the conversation.
    #[error(transparent)]
    Render(#[from] RenderError),
    /// Tokenizer and model do not belong together.
    #[error(
        "the tokenizer has {tokens} tokens, the model only {vocab_size}: they do not belong together"
    )]
    Vocabulary {
        /// The tokenizer's size.
        tokens: usize,
        /// The model's.
        vocab_size: i64,
    },
    /// The address can't be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// The server failed while running.
    #[error("server: {0}")]
    Io(#[from] std::io::Error),
    /// The request makes no sense.
    #[error("{message}")]
    Request {
        /// The field concerned, where it is one.
        param: Option<&'static str>,
        /// What is wrong.
        message: String,
    },
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {prompt} tokens; this model's maximum context length is {max_len}")]
    ContextLength {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens a conversation can have.
        max_len: usize,
    },
    /// As many requests wait as may wait.
    #[error("{waiting} requests are waiting already; try again")]
    QueueFull {
        /// How many wait.
        waiting: usize,
    },
    /// The engine is shutting down.
    #[error("the server is shutting down")]
    Stopped,
    /// The model failed on this batch.
    #[error("the model failed: {0}")]
    Engine(String),
}

impl ServeError {
    /// A bad value of a field.
    pub(crate) fn param(param: &'static str, message: impl Into<String>) -> Self {
        Self::Request {
            param: Some(param),
            message: message.into(),
        }
    }

    /// HTTP status, the API's error type, and its code.
    pub(crate) const fn http(&self) -> (StatusCode, &'static str, Option<&'static str>) {
        match self {
            Self::Request { .. } | Self::Render(_) => {
                (StatusCode::BAD_REQUEST, "invalid_request_error", None)
            }
            Self::ContextLength { .. } => (
                StatusCode::BAD_REQUEST,
                "invalid_request_error",
                Some("context_length_exceeded"),
            ),
            Self::QueueFull { .. } => (
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                Some("queue_full"),
            ),
            Self::Stopped => (
                StatusCode::SERVICE_UNAVAILABLE,
                "server_error",
                Some("stopped"),
            ),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "server_error", None),
        }
    }

    pub(crate) const fn field(&self) -> Option<&'static str> {
        match self {
            Self::Request { param, .. } => *param,
            Self::ContextLength { .. } => Some("messages"),
            _ => None,
        }
    }
}
