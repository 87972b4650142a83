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
    /// An image could not be imported, built, found or removed.
    #[error("image {subject}: {message}")]
    Image {
        /// Its name, digest, or the file it comes from.
        subject: String,
        /// What is wrong.
        message: String,
    },
    /// A set-up's command failed.
    #[error("the set-up's command failed ({outcome}): {command}\n{said}")]
    Setup {
        /// The command line.
        command: String,
        /// How it ended.
        outcome: &'static str,
        /// What it said on standard error.
        said: String,
    },
    /// A stored layer or saved state could not be used.
    #[error("layer {key}: {message}")]
    Layer {
        /// Its key.
        key: String,
        /// What is wrong.
        message: String,
    },
    /// A file of the host could not be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Stored bytes are no snapshot.
    #[error("these bytes are no snapshot: {0}")]
    NoSnapshot(String),
}
