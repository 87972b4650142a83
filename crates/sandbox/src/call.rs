//! Calls and what they did.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use drillyard_sandbox_init::frame::{Span, put};
use drillyard_sandbox_init::init::{Called, Change, End, Kind, What};

use crate::{NetworkRequest, SandboxError};

/// Something to do in a sandbox. Paths are relative to `/work`, or absolute inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A command line for bash (sh where there is none).
    Shell {
        /// The command line.
        command: String,
        /// A shorter clock than the configured one.
        timeout: Option<Duration>,
    },
    /// A program with arguments.
    Exec {
        /// The program, looked for in PATH, and its arguments.
        argv: Vec<String>,
        /// Its standard input.
        stdin: Vec<u8>,
        /// A shorter clock than the configured one.
        timeout: Option<Duration>,
    },
    /// Print a regular file; `stdout_bytes` of the result is its size.
    ReadFile {
        /// Its path.
        path: String,
        /// Print at most so many bytes, and never more than the output limit.
        max_bytes: u64,
    },
    /// Create or replace a file; missing parent directories are made.
    WriteFile {
        /// Its path.
        path: String,
        /// Its content.
        content: Vec<u8>,
    },
    /// List a directory: a line each, sorted; `name/` for directories, `name -> target` for links, `name<TAB>bytes`
    /// for files.
    ListDir {
        /// Its path; empty for `/work`.
        path: String,
    },
}

impl Call {
    /// A shell command with the configured clock.
    pub fn shell(command: impl Into<String>) -> Self {
        Self::Shell {
            command: command.into(),
            timeout: None,
        }
    }

    /// The call's own clock, if it has one.
    pub fn timeout(&self) -> Option<Duration> {
        match self {
            Self::Shell { timeout, .. } | Self::Exec { timeout, .. } => *timeout,
            _ => None,
        }
    }

    pub(crate) fn into_what(self, body: &mut Vec<u8>) -> What {
        match self {
            Self::Shell { command, .. } => What::Shell { command },
            Self::Exec { argv, stdin, .. } => What::Exec {
                argv,
                stdin: put(body, &stdin),
            },
            Self::ReadFile { path, max_bytes } => What::ReadFile { path, max_bytes },
            Self::WriteFile { path, content } => What::WriteFile {
                path,
                content: put(body, &content),
            },
            Self::ListDir { path } => What::ListDir {
                path: if path.is_empty() { ".".into() } else { path },
            },
        }
    }
}

/// How a call ended. The text of each is the lake's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    /// It ran and exited with 0.
    Ok,
    /// It ran and exited with another code.
    Error,
    /// The clock ran out; the process tree was killed.
    Timeout,
    /// The memory limit was hit: the kernel killed a process for it.
    Memory,
    /// It failed and the process limit had refused forks.
    Processes,
    /// It failed and the file system is full.
    Disk,
    /// It printed more than allowed; the process tree was killed.
    OutputLimit,
    /// A signal ended it for another reason.
    Killed,
}

impl CallOutcome {
    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::Timeout => "timeout",
            Self::Memory => "memory",
            Self::Processes => "processes",
            Self::Disk => "disk",
            Self::OutputLimit => "output_limit",
            Self::Killed => "killed",
        }
    }
}

/// A file that a call created, changed or deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedFile {
    /// Relative to `/work`, or absolute for files in `/tmp` and `/dev/shm`.
    pub path: String,
    /// What happened.
    pub change: Change,
    /// What it is (was, if deleted).
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// BLAKE3 of the content before, in hexadecimal; none where there was no content, or it was too large to hash.
    pub before_hash: Option<String>,
    /// BLAKE3 of the content after.
    pub after_hash: Option<String>,
    /// Size after, in bytes.
    pub size: u64,
    /// The content after (a link's target), while those of the call stay under 1 MiB together.
    pub content: Option<Vec<u8>>,
}

/// What a call did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallResult {
    /// How it ended.
    pub outcome: CallOutcome,
    /// Exit code of the tool's first process, if it exited.
    pub exit_code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Standard output, up to the output limit.
    pub stdout: Vec<u8>,
    /// Standard error, up to the output limit.
    pub stderr: Vec<u8>,
    /// Bytes of standard output, also of what was not kept; of a file read, the file's size.
    pub stdout_bytes: u64,
    /// Bytes of standard error, also of what was not kept.
    pub stderr_bytes: u64,
    /// From start to the death of the last process.
    pub wall: Duration,
    /// Processor time of all processes.
    pub cpu: Option<Duration>,
    /// Of it, in user code.
    pub user: Duration,
    /// Of it, in the kernel.
    pub system: Duration,
    /// Peak memory in bytes: of the whole sandbox with its files where a control group counts it, else of the largest
    /// process.
    pub peak_memory: Option<u64>,
    /// Bytes read from block devices.
    pub read_bytes: Option<u64>,
    /// Bytes written to block devices (files in the sandbox live in memory and do not count).
    pub written_bytes: Option<u64>,
    /// Processes the kernel killed for want of memory, also where the call went on.
    pub oom_kills: u64,
    /// Processes were still alive when the first one ended; they were killed.
    pub survivors: bool,
    /// What changed among the files, sorted by path.
    pub files_changed: Vec<ChangedFile>,
    /// What the call asked of the network, in order.
    pub network: Vec<NetworkRequest>,
    /// True where `files_changed` is not enough to bring the files to this state again.
    pub state_lost: bool,
}

impl CallResult {
    pub(crate) fn of(called: Called, body: &[u8]) -> Result<Self, SandboxError> {
        let bytes = |span: Span| {
            span.of(body).map(<[u8]>::to_vec).ok_or_else(|| {
                SandboxError::Protocol(std::io::Error::other("bytes lie outside the message"))
            })
        };
        let cpu_us = called
            .cgroup_cpu_us
            .unwrap_or(0)
            .max(called.user_us + called.system_us);
        let files_changed = called
            .changes
            .into_iter()
            .map(|c| {
                Ok(ChangedFile {
                    path: c.path,
                    change: c.change,
                    kind: c.kind,
                    mode: c.mode,
                    before_hash: c.before,
                    after_hash: c.after,
                    size: c.size,
                    content: c.content.map(bytes).transpose()?,
                })
            })
            .collect::<Result<_, SandboxError>>()?;
        let failed = called.exit_code != Some(0);
        let outcome = match called.end {
            End::Timeout => CallOutcome::Timeout,
            End::Output => CallOutcome::OutputLimit,
            End::Finished if !failed => CallOutcome::Ok,
            End::Finished if called.oom_kills > 0 => CallOutcome::Memory,
            End::Finished if called.disk_full => CallOutcome::Disk,
            End::Finished if called.refused_forks > 0 => CallOutcome::Processes,
            End::Finished if called.signal.is_some() => CallOutcome::Killed,
            End::Finished => CallOutcome::Error,
        };
        Ok(Self {
            outcome,
            exit_code: called.exit_code,
            signal: called.signal,
            stdout: bytes(called.stdout)?,
            stderr: bytes(called.stderr)?,
            stdout_bytes: called.stdout_bytes,
            stderr_bytes: called.stderr_bytes,
            wall: Duration::from_micros(called.wall_us),
            cpu: Some(Duration::from_micros(cpu_us)),
            user: Duration::from_micros(called.user_us),
            system: Duration::from_micros(called.system_us),
            peak_memory: Some(
                called
                    .peak_cgroup_bytes
                    .unwrap_or(called.peak_process_bytes),
            ),
            read_bytes: Some(called.read_bytes),
            written_bytes: Some(called.written_bytes),
            oom_kills: called.oom_kills,
            survivors: called.survivors,
            files_changed,
            network: Vec::new(),
            state_lost: called.state_lost,
        })
    }

    /// The result of a call whose sandbox the memory limit took down with it.
    pub(crate) fn out_of_memory(oom_kills: u64, wall: Duration) -> Self {
        Self {
            outcome: CallOutcome::Memory,
            exit_code: None,
            signal: Some(9),
            stdout: Vec::new(),
            stderr: Vec::new(),
            stdout_bytes: 0,
            stderr_bytes: 0,
            wall,
            cpu: None,
            user: Duration::ZERO,
            system: Duration::ZERO,
            peak_memory: None,
            read_bytes: None,
            written_bytes: None,
            oom_kills,
            survivors: false,
            files_changed: Vec::new(),
            network: Vec::new(),
            state_lost: true,
        }
    }
}
