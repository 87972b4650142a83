//! Calls and what they did.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use drillyard_sandbox_init::frame::{Span, put};
use drillyard_sandbox_init::init::{Called, Change, End, Kind, What};

use crate::{Limits, NetworkRequest, SandboxError};

/// So much memory a call must find free, where the limit is not small: less, and the sandbox counts as unusable.
const LEAST_MEMORY: u64 = 64 << 20;

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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    /// It ran and exited with 0.
    #[default]
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

/// How a call that had to be stopped ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// All its processes ended when they were asked to (SIGTERM).
    Soft,
    /// Some had to be killed (SIGKILL).
    Hard,
}

/// Why a call ended, its processes' exit codes and signals apart. The text of each is the lake's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// By itself.
    Finished,
    /// The clock ran out, and all its processes ended when they were asked to.
    SoftTimeout,
    /// The clock ran out, and some had to be killed.
    HardTimeout,
    /// The memory limit.
    Memory,
    /// The limit of processes and threads.
    Pids,
    /// The disk was full.
    Disk,
    /// It printed too much.
    Output,
    /// A signal that no limit explains.
    Killed,
}

impl Reason {
    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::SoftTimeout => "soft_timeout",
            Self::HardTimeout => "hard_timeout",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Disk => "disk",
            Self::Output => "output",
            Self::Killed => "killed",
        }
    }
}

/// A limit that a call came near to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitWarning {
    /// The limit, by its name in [`crate::LimitsReport`]: `memory`, `disk`, `files` or `processes`.
    pub limit: String,
    /// How much was used: of memory and processes at the peak, of disk and files at the end.
    pub used: u64,
    /// How much is allowed.
    pub of: u64,
}

impl fmt::Display for LimitWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, used, of } = self;
        if matches!(limit.as_str(), "memory" | "disk") {
            write!(f, "{limit}: {} of {} MiB used", used >> 20, of >> 20)
        } else {
            write!(f, "{limit}: {used} of {of} used")
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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallResult {
    /// How it ended.
    pub outcome: CallOutcome,
    /// Whether it was stopped (by its clock, or for its output), and how.
    pub stopped: Option<Stop>,
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
    /// Peak resident memory of the largest process, in bytes.
    pub peak_process_memory: Option<u64>,
    /// Bytes read from block devices.
    pub read_bytes: Option<u64>,
    /// Bytes written to block devices (files in the sandbox live in memory and do not count).
    pub written_bytes: Option<u64>,
    /// Bytes read from files, pipes and sockets of any kind, programs' own start included.
    pub read_chars: Option<u64>,
    /// Bytes written to files, pipes and sockets of any kind.
    pub written_chars: Option<u64>,
    /// Processes and threads that were started.
    pub processes: Option<u64>,
    /// Most processes and threads at once, since the sandbox was made; where a control group counts them.
    pub peak_processes: Option<u64>,
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
    /// True where more may have changed than `files_changed` tells.
    pub changes_incomplete: bool,
    /// Limits that the call came near to; see [`Limits::warn_at`].
    pub warnings: Vec<LimitWarning>,
    /// Why no other call can be run in this sandbox, if so. The next call gets a fresh one with the same files, where
    /// they could be saved.
    pub unusable: Option<String>,
}

impl CallResult {
    /// Why it ended.
    pub const fn reason(&self) -> Reason {
        match (self.outcome, self.stopped) {
            (CallOutcome::Ok | CallOutcome::Error, _) => Reason::Finished,
            (CallOutcome::Timeout, Some(Stop::Soft)) => Reason::SoftTimeout,
            (CallOutcome::Timeout, _) => Reason::HardTimeout,
            (CallOutcome::Memory, _) => Reason::Memory,
            (CallOutcome::Processes, _) => Reason::Pids,
            (CallOutcome::Disk, _) => Reason::Disk,
            (CallOutcome::OutputLimit, _) => Reason::Output,
            (CallOutcome::Killed, _) => Reason::Killed,
        }
    }

    /// How it ended and why, for people.
    pub fn why(&self) -> String {
        let exit = match (self.exit_code, self.signal) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("signal {signal}"),
            (None, None) => "no exit".to_owned(),
        };
        let how = match self.stopped {
            Some(Stop::Soft) => "ended when asked to",
            Some(Stop::Hard) => "killed",
            None => "",
        };
        match self.outcome {
            CallOutcome::Ok | CallOutcome::Error | CallOutcome::Killed => exit,
            CallOutcome::Timeout => {
                format!("clock ran out after {} ms: {how}", self.wall.as_millis())
            }
            CallOutcome::OutputLimit => format!("output limit: {how}"),
            CallOutcome::Memory => {
                format!("memory limit: {} processes killed, {exit}", self.oom_kills)
            }
            CallOutcome::Processes => format!("process limit: {exit}"),
            CallOutcome::Disk => format!("disk full: {exit}"),
        }
    }

    pub(crate) fn of(called: Called, body: &[u8], limits: &Limits) -> Result<Self, SandboxError> {
        let warnings = warnings(&called, limits);
        let unusable = unusable(&called, limits);
        let outcome = outcome(&called);
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
        Ok(Self {
            outcome,
            stopped: match called.end {
                End::Finished => None,
                _ if called.hard => Some(Stop::Hard),
                _ => Some(Stop::Soft),
            },
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
            peak_process_memory: Some(called.peak_process_bytes),
            read_bytes: Some(called.read_bytes),
            written_bytes: Some(called.written_bytes),
            read_chars: called.read_chars,
            written_chars: called.written_chars,
            processes: called.started,
            peak_processes: called.peak_processes,
            oom_kills: called.oom_kills,
            survivors: called.survivors,
            files_changed,
            network: Vec::new(),
            state_lost: called.contents_missing || called.changes_incomplete,
            changes_incomplete: called.changes_incomplete,
            warnings,
            unusable,
        })
    }

    /// The result of a call whose sandbox the memory limit took down with it.
    pub fn out_of_memory(oom_kills: u64, wall: Duration) -> Self {
        Self {
            outcome: CallOutcome::Memory,
            signal: Some(9),
            wall,
            oom_kills,
            state_lost: true,
            unusable: Some("the memory limit took the sandbox's supervisor".to_owned()),
            ..Self::default()
        }
    }

    /// The result of a call that was not run: no other one can be in its sandbox, and what lies there can't be moved to another one.
    pub(crate) fn stranded(why: &str) -> Self {
        let words = format!(
            "not run: the last call left the sandbox unusable, and its files can't be moved to a fresh one: {why}"
        );
        Self {
            unusable: Some(words.clone()),
            ..Self::refused(CallOutcome::Memory, 1, &(words + "\n"))
        }
    }
}

/// Our own kill comes first, then what the kernel counted, then the signals of limits, then whatever else is known.
fn outcome(called: &Called) -> CallOutcome {
    // A shell tells its child's signal by an exit code.
    let by = |signal: i32| called.signal == Some(signal) || called.exit_code == Some(128 + signal);
    match called.end {
        End::Timeout => CallOutcome::Timeout,
        End::Output => CallOutcome::OutputLimit,
        End::Finished if called.exit_code == Some(0) => CallOutcome::Ok,
        End::Finished if called.oom_kills > 0 => CallOutcome::Memory,
        End::Finished if by(libc::SIGXFSZ) || called.disk_full => CallOutcome::Disk,
        End::Finished if called.refused_forks > 0 => CallOutcome::Processes,
        End::Finished if called.signal.is_some() => CallOutcome::Killed,
        End::Finished => CallOutcome::Error,
    }
}

/// The most memory a call used, caches not counted.
pub(crate) fn most_memory(called: &Called) -> u64 {
    match called.peak_cgroup_bytes {
        None => called.peak_process_bytes,
        Some(peak) if called.peak_bytes_now => peak.saturating_sub(called.cache_bytes),
        Some(_) => called.left_bytes.unwrap_or(0),
    }
}

fn warnings(called: &Called, limits: &Limits) -> Vec<LimitWarning> {
    let disk = called.disk;
    let memory = most_memory(called);
    let processes = called.peak_processes.filter(|_| called.peak_now);
    let refused = (called.refused_forks > 0).then_some(limits.pids);
    [
        ("memory", memory, limits.memory_bytes),
        (
            "disk",
            disk.bytes.saturating_sub(disk.free_bytes),
            disk.bytes,
        ),
        (
            "files",
            disk.files.saturating_sub(disk.free_files),
            disk.files,
        ),
        ("processes", refused.or(processes).unwrap_or(0), limits.pids),
    ]
    .into_iter()
    .filter(|(_, used, of)| *of > 0 && *used as f64 >= *of as f64 * limits.warn_at)
    .map(|(limit, used, of)| LimitWarning {
        limit: limit.to_owned(),
        used,
        of,
    })
    .collect()
}

/// Why the next call would pay for this one.
fn unusable(called: &Called, limits: &Limits) -> Option<String> {
    if called.unkillable {
        return Some("processes of the last call could not be killed".to_owned());
    }
    let left = called.left_bytes?;
    let needed = (limits.memory_bytes / 8).min(LEAST_MEMORY);
    (left > limits.memory_bytes.saturating_sub(needed)).then(|| {
        format!(
            "with every process dead, files and shared memory still hold {} of {} MiB of memory",
            left >> 20,
            limits.memory_bytes >> 20
        )
    })
}
