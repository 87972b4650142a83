//! What can go wrong with a sandbox. None of these is the agent's doing, with the exceptions that say so.

use camino::Utf8PathBuf;

/// A fault of the sandbox or its host. A tool that fails is no error: see [`crate::CallResult`].
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The static helper program was not found.
    #[error(
        "the helper program drillyard-sandbox-init was not found (looked in {looked}); build it with `make helpers`, or set \
         DRILLYARD_HELPERS to the directory it lies in"
    )]
    NoHelper {
        /// The places that were tried.
        looked: String,
    },
    /// The helper program could not be started.
    #[error("the helper program {path} could not be started: {source}")]
    HelperStart {
        /// Its path.
        path: Utf8PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// This host does not let sandboxes be made.
    #[error("this host does not allow isolated sandboxes: {step}: {message}\n{remedy}")]
    Unable {
        /// The step that failed.
        step: String,
        /// The system's error.
        message: String,
        /// What to do about it.
        remedy: String,
    },
    /// The helper ended unexpectedly; every sandbox of the pool is gone.
    #[error("the helper that makes sandboxes has ended; start a new pool")]
    HelperGone,
    /// No container engine answered.
    #[error(
        "no container engine answers ({tried}); start one (`dockerd`, or `podman system service`), or set DOCKER_HOST to the \
         address of one"
    )]
    NoEngine {
        /// The addresses that were tried, and why each was of no use.
        tried: String,
    },
    /// The container engine refused a request.
    #[error("the container engine refused: {step}: {message}")]
    Engine {
        /// What it was asked for.
        step: String,
        /// Its answer.
        message: String,
    },
    /// The container engine answers no more; what it ran may live or not.
    #[error(
        "the container engine at {engine} answers no more ({message}); once it does, start a new pool"
    )]
    EngineGone {
        /// Its address.
        engine: String,
        /// What happened.
        message: String,
    },
    /// A sandbox could not be set up.
    #[error("a sandbox could not be made: {step}: {message}")]
    Create {
        /// The step that failed.
        step: String,
        /// The system's error.
        message: String,
    },
    /// The sandbox ended while it was in use.
    #[error("the sandbox has ended ({cause}); lease another one")]
    Lost {
        /// What is known of why.
        cause: String,
    },
    /// The sandbox did not answer in time and was killed.
    #[error("the sandbox did not answer within {seconds} s and was killed; lease another one")]
    Stuck {
        /// How long was waited.
        seconds: u64,
    },
    /// A request could not be fulfilled; the sandbox goes on.
    #[error("the sandbox refused: {message}")]
    Refused {
        /// Why.
        message: String,
    },
    /// A call was dropped before its answer came; the sandbox is in an unknown state.
    #[error("an earlier call was abandoned half-way; reset or close this sandbox")]
    Abandoned,
    /// A message from inside made no sense.
    #[error("a message from the sandbox could not be understood: {0}")]
    Protocol(std::io::Error),
    /// A configured value cannot be used.
    #[error("sandbox.{field}: {message}")]
    Config {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// A file of the host could not be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Stored bytes are no snapshot.
    #[error("these bytes are no snapshot: {0}")]
    NoSnapshot(String),
}
