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
    /// The memory limit took the sandbox down: what runs and lies in it is too much.
    #[error(
        "the memory limit took the sandbox down ({oom_kills} processes killed); lease another one"
    )]
    OutOfMemory {
        /// Processes the kernel killed for want of memory.
        oom_kills: u64,
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
    /// A call could not be started, for want of something the sandbox should have had.
    #[error("the call could not be started: {message}")]
    NotStarted {
        /// The system's error.
        message: String,
    },
    /// Limits were required that do not hold on this host.
    #[error("these limits do not hold here:\n{limits}")]
    LimitsDoNotHold {
        /// A paragraph for each: by what it falls short, and the way out.
        limits: String,
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
    /// A program of this host that images are made with is missing, or failed.
    #[error("{message}")]
    Tool {
        /// Which, and the way out or what it said.
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

impl SandboxError {
    /// Whether the host or the sandbox is at fault: such a call or episode says nothing of the agent. The other errors
    /// are what the files and processes of the sandbox stand in the way of, or a wrong configuration, request or use of this crate.
    pub const fn is_infrastructure(&self) -> bool {
        !matches!(
            self,
            Self::Config { .. }
                | Self::Refused { .. }
                | Self::OutOfMemory { .. }
                | Self::Abandoned
                | Self::LimitsDoNotHold { .. }
                | Self::NoSnapshot(_)
        )
    }

    /// Whether a disk is full, or its files are not this user's to write or read.
    pub fn is_full_or_forbidden(&self) -> bool {
        matches!(self, Self::Io(error) if Self::is_of_the_disk(error.kind()))
    }

    /// Whether such an error of the system tells of a disk that cannot be written, whatever was to be written.
    pub(crate) const fn is_of_the_disk(kind: std::io::ErrorKind) -> bool {
        use std::io::ErrorKind::{
            PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull,
        };
        matches!(
            kind,
            PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_the_host_are_told_apart() {
        let io = || std::io::Error::other("x");
        let text = String::new;
        for fault in [
            SandboxError::NoHelper { looked: text() },
            SandboxError::HelperStart {
                path: "/x".into(),
                source: io(),
            },
            SandboxError::Unable {
                step: text(),
                message: text(),
                remedy: text(),
            },
            SandboxError::HelperGone,
            SandboxError::Create {
                step: text(),
                message: text(),
            },
            SandboxError::Lost { cause: text() },
            SandboxError::Stuck { seconds: 1 },
            SandboxError::NotStarted { message: text() },
            SandboxError::Protocol(io()),
            SandboxError::Io(io()),
            SandboxError::Tool { message: text() },
        ] {
            assert!(fault.is_infrastructure(), "{fault}");
        }
        for misuse in [
            SandboxError::Refused { message: text() },
            SandboxError::OutOfMemory { oom_kills: 1 },
            SandboxError::Abandoned,
            SandboxError::Config {
                field: "cpus",
                message: text(),
            },
            SandboxError::LimitsDoNotHold { limits: text() },
            SandboxError::NoSnapshot(text()),
        ] {
            assert!(!misuse.is_infrastructure(), "{misuse}");
        }
    }
}
