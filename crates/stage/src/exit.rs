//! Exit codes and the error that carries one.

use std::error::Error;
use std::fmt;

/// Everything asked for was done, or was already done.
pub const OK: u8 = 0;
/// Something else went wrong (a bug, most likely).
pub const INTERNAL: u8 = 1;
/// The command line or a pipeline file is wrong.
pub const USAGE: u8 = 2;
/// A blocking QA rule has findings above its threshold.
pub const QA_BLOCKED: u8 = 10;
/// There is nothing to do: no episodes, no groups to learn from.
pub const NOTHING_TO_DO: u8 = 11;
/// A gate refused (provenance before training, release).
pub const REFUSED: u8 = 12;
/// A replay differs from what was recorded.
pub const DIFFERS: u8 = 13;
/// Input is missing or unreadable.
pub const INPUT: u8 = 20;
/// Output can't be written: disk full, permissions.
pub const OUTPUT: u8 = 21;
/// The environment lacks something: sandbox support, libtorch, a reachable endpoint.
pub const ENVIRONMENT: u8 = 30;
/// Interrupted by a signal; run the same command again to go on.
pub const INTERRUPTED: u8 = 130;

/// An error with its exit code and a way out.
#[derive(Debug)]
pub struct Failure {
    /// One of this module's codes.
    pub code: u8,
    /// What went wrong, as a lower-case fragment.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Failure {
    /// A failure without a hint.
    pub fn new(code: u8, message: impl fmt::Display) -> Self {
        Self {
            code,
            message: message.to_string(),
            hint: None,
        }
    }

    /// Adds the way out.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// A failure from an error and all its sources.
    pub fn from_error(code: u8, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            source = cause.source();
        }
        Self::new(code, message)
    }

    /// A failure of reading or writing: the disk's state decides between the input and the output code.
    pub fn io(path: impl fmt::Display, error: &std::io::Error) -> Self {
        use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, StorageFull};
        match error.kind() {
            StorageFull => Self::new(OUTPUT, format!("{path}: the disk is full"))
                .hint("free some space and run the same command again"),
            PermissionDenied | ReadOnlyFilesystem => Self::new(OUTPUT, format!("{path}: {error}")),
            _ => Self::new(INPUT, format!("{path}: {error}")),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Failure {}
