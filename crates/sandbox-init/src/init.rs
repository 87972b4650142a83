//! The conversation between the program and PID 1 of one sandbox: strictly one request, one reply. While a call runs,
//! streams may run beside it ([`crate::mux`]).
//!
//! Paths of files are relative to `/work`, or absolute for files under `/tmp` and `/dev/shm`.

use serde::{Deserialize, Serialize};

use crate::frame::Span;

/// Most bytes of file contents that one call's changes carry.
pub const CONTENT_BYTES: u64 = 1 << 20;

/// What PID 1 is asked to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Run a tool; answered by [`Reply::Called`].
    Call {
        /// What to run.
        what: What,
        /// The call's clock in microseconds; the whole process tree is killed when it runs out.
        timeout_us: u64,
    },
    /// Write files as they are given and take the result as the state that later changes are told against;
    /// answered by [`Reply::Done`].
    Unpack {
        /// Files, parents before children. Missing parent directories are made.
        entries: Vec<Entry>,
        /// Paths to remove first, with all they hold.
        remove: Vec<String>,
    },
    /// Copy every file out; answered by [`Reply::Packed`].
    Pack {
        /// Refuse when contents are larger than this, in bytes.
        max_bytes: u64,
        /// Only what differs from the layers beneath /work (of the root it is always that).
        #[serde(default)]
        delta: bool,
    },
}

/// The tools of PID 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// A command line for the shell.
    Shell {
        /// The command line.
        command: String,
    },
    /// A program with arguments.
    Exec {
        /// The program (looked for in PATH) and its arguments.
        argv: Vec<String>,
        /// Its standard input.
        stdin: Span,
    },
    /// Print a regular file.
    ReadFile {
        /// Path, relative to /work or absolute.
        path: String,
        /// Print at most so many bytes; `stdout_bytes` of the reply tells the file's size.
        max_bytes: u64,
    },
    /// Create or replace a file; missing parent directories are made.
    WriteFile {
        /// Path, relative to /work or absolute.
        path: String,
        /// The content.
        content: Span,
    },
    /// List a directory: a line each, sorted; `name/` for directories, `name -> target` for links,
    /// `name<TAB>bytes` for files.
    ListDir {
        /// Path, relative to /work or absolute.
        path: String,
    },
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link; its content is its target.
    Link,
    /// A socket or pipe; only its being there is told.
    Other,
}

/// One file with its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its path.
    pub path: String,
    /// What it is.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Modification time in nanoseconds since 1970; nothing means now.
    pub mtime_ns: Option<i64>,
    /// Content of a file, target of a link.
    pub content: Span,
}

/// How a call ended, before exit code and signal are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The tool's first process ended by itself.
    Finished,
    /// The clock ran out and the tree was killed.
    Timeout,
    /// The tool wrote more than allowed and the tree was killed.
    Output,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It was not there before.
    Created,
    /// Its content, mode or kind differs.
    Modified,
    /// It is no longer there.
    Deleted,
}

/// One changed file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    /// Its path.
    pub path: String,
    /// What happened.
    pub change: Change,
    /// What it is now (what it was, if deleted).
    pub kind: Kind,
    /// Permission bits now (before, if deleted).
    pub mode: u32,
    /// BLAKE3 of the content before, in hexadecimal; none for directories, new files, and files too large to hash.
    pub before: Option<String>,
    /// BLAKE3 of the content after.
    pub after: Option<String>,
    /// Size after in bytes, 0 if deleted.
    pub size: u64,
    /// The content after, while those of the call fit [`CONTENT_BYTES`].
    pub content: Option<Span>,
}

/// How full a file system is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// Its size in bytes.
    pub bytes: u64,
    /// Of them, free.
    pub free_bytes: u64,
    /// How many files it can hold.
    pub files: u64,
    /// Of them, not there.
    pub free_files: u64,
}

impl Space {
    /// The share that is taken, of bytes or of files, whichever is larger.
    pub fn thousandths(&self) -> u64 {
        let taken = |free: u64, all: u64| {
            all.saturating_sub(free)
                .saturating_mul(1000)
                .checked_div(all)
        };
        let bytes = taken(self.free_bytes, self.bytes);
        bytes.max(taken(self.free_files, self.files)).unwrap_or(0)
    }
}

/// What a call did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Called {
    /// How it ended.
    pub end: End,
    /// Exit code of the tool's first process, if it exited.
    pub exit_code: Option<i32>,
    /// The signal that killed it, if one did.
    pub signal: Option<i32>,
    /// Standard output, as far as it was kept.
    pub stdout: Span,
    /// Standard error, as far as it was kept.
    pub stderr: Span,
    /// Bytes of standard output (of a file read: the file's size).
    pub stdout_bytes: u64,
    /// Bytes of standard error.
    pub stderr_bytes: u64,
    /// From start to the death of the last process, in microseconds.
    pub wall_us: u64,
    /// User time of all processes, in microseconds.
    pub user_us: u64,
    /// System time of all processes, in microseconds.
    pub system_us: u64,
    /// Processor time of the sandbox by its control group, in microseconds.
    pub cgroup_cpu_us: Option<u64>,
    /// Of a call that was stopped: whether processes were still alive after they were asked to end, and killed.
    pub hard: bool,
    /// Largest resident set of one process, in bytes.
    pub peak_process_bytes: u64,
    /// Peak of the whole sandbox by its control group, in bytes, its files included.
    pub peak_cgroup_bytes: Option<u64>,
    /// Whether that was reached during the call. Where it wasn't, and the kernel can't start the peak anew, it is an
    /// earlier call's.
    pub peak_bytes_now: bool,
    /// File contents that the sandbox's memory held as a mere cache, looked up only where more than half of the limit
    /// was used; 0 otherwise.
    pub cache_bytes: u64,
    /// Memory still in use when every process was dead, such a cache not counted.
    pub left_bytes: Option<u64>,
    /// Bytes read from block devices.
    pub read_bytes: u64,
    /// Bytes written to block devices.
    pub written_bytes: u64,
    /// Bytes that came in by `read` and its kin, from files, pipes and sockets.
    pub read_chars: Option<u64>,
    /// Bytes that went out by `write` and its kin.
    pub written_chars: Option<u64>,
    /// Processes and threads that were started.
    pub started: Option<u64>,
    /// Most processes and threads at once since the sandbox was made.
    pub peak_processes: Option<u64>,
    /// Whether that was reached, or reached again, during the call.
    pub peak_now: bool,
    /// Processes the kernel killed for want of memory during the call.
    pub oom_kills: u64,
    /// Forks the process limit refused during the call (0 where no control group counts them).
    pub refused_forks: u64,
    /// Whether the file system was full at the end.
    pub disk_full: bool,
    /// How full the file system was at the end.
    pub disk: Space,
    /// Processes could not be killed: the sandbox must not be used again.
    pub unkillable: bool,
    /// Processes still alive when the first one ended; they were killed.
    pub survivors: bool,
    /// What changed among the files, sorted by path.
    pub changes: Vec<Changed>,
    /// Of some of `changes` the content, which it would take to restore them, is not there.
    pub contents_missing: bool,
    /// More may have changed than `changes` tells: names that are not UTF-8, too many files, too deep ones.
    pub changes_incomplete: bool,
}

/// What PID 1 answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Said once, unasked, when the sandbox is set up. Where a network was asked for and the stream is a unix socket, a
    /// listening TCP socket of the sandbox's loopback comes with the first byte.
    Ready,
    /// A call's result.
    Called(Box<Called>),
    /// Done.
    Done,
    /// Every file.
    Packed {
        /// Files, parents before children.
        entries: Vec<Entry>,
        /// Paths of the layers beneath that are hidden, with all below them; a directory that is among the entries
        /// too hides what the layers have in it.
        #[serde(default)]
        removed: Vec<String>,
        /// Pipes and sockets, which are not copied.
        #[serde(default)]
        left_out: u64,
    },
    /// The request could not be fulfilled; the sandbox is as it was before, unless it says so.
    Refused {
        /// Why.
        message: String,
    },
    /// A call could not be started for a reason that lies in the sandbox, not in the call.
    NotStarted {
        /// Why.
        message: String,
    },
    /// The sandbox could not be set up; PID 1 ends.
    Broken {
        /// The step that failed.
        step: String,
        /// The error in words.
        message: String,
    },
}
