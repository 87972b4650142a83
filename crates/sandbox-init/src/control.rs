//! The conversation between the program and the helper that makes its sandboxes.
//!
//! Carried by a `SOCK_SEQPACKET` pair, one frame a packet. The program's first message is a [`Start`]; the helper
//! answers with [`Event::Started`] or [`Event::Unable`] and from then on takes [`Order`]s. The helper ends, and with
//! it every sandbox, when the socket closes.

use serde::{Deserialize, Serialize};

use crate::frame::Span;

/// The limits every sandbox of a helper gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitSpec {
    /// Memory of all processes and of the files in the sandbox together, in bytes.
    pub memory_bytes: u64,
    /// Size of the file system that holds /work, /tmp and /dev/shm, in bytes.
    pub disk_bytes: u64,
    /// How many files that file system holds.
    pub inodes: u64,
    /// Processes and threads of the tools.
    pub pids: u64,
    /// Thousandths of a processor.
    pub milli_cpus: u64,
    /// Open files a process.
    pub open_files: u64,
    /// Bytes of standard output kept a call, and as many of standard error; the call is killed beyond it.
    pub output_bytes: u64,
    /// Size of the file system as it was asked for; `disk_bytes` is what is given.
    pub disk_asked_bytes: u64,
    /// Bytes a second from and to each block device; nothing for no limit.
    pub io_bytes_per_s: Option<u64>,
}

/// A host path that appears, read-only, inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// Where it lies on the host.
    pub host: String,
    /// Where it appears, absolute.
    pub inside: String,
}

/// A small file made for the sandboxes' root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// Where it appears, absolute.
    pub inside: String,
    /// Its text.
    pub text: String,
}

/// A symbolic link made in the sandboxes' root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Where it appears, absolute.
    pub inside: String,
    /// What it points to.
    pub target: String,
}

/// What the helper needs to know once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Names this helper's control groups: `PID-STARTTIME-N` (process id and start time of the program, number of the
    /// pool in it), so that a later program can tell what a dead one left.
    pub owner: String,
    /// Limits of every sandbox.
    pub limits: LimitSpec,
    /// Host paths that appear inside, in order.
    pub binds: Vec<Bind>,
    /// Host files copied into the root, so that nothing inside tells where they lie.
    pub copies: Vec<Bind>,
    /// Files made for the root.
    pub made: Vec<Made>,
    /// Links made in the root.
    pub links: Vec<Link>,
    /// The system call filter: an array of `struct sock_filter`, in the frame's body.
    pub filter: Span,
    /// The shell of shell calls, absolute inside.
    pub shell: String,
    /// The environment of every tool, as `NAME=value`.
    pub env: Vec<String>,
    /// False to do without control groups even where the host grants them (a probe of the weaker mode).
    pub cgroups: bool,
    /// The port of each sandbox's own loopback at which the program outside shall take its connections; none for no
    /// network at all.
    #[serde(default)]
    pub network: Option<u16>,
    /// Host directory of a root file system: then each sandbox's root is its own copy on write of it, and of `binds`
    /// only devices appear.
    #[serde(default)]
    pub rootfs: Option<String>,
    /// Host directory that [`Lower`] names layers in.
    #[serde(default)]
    pub layers: Option<String>,
}

/// Read-only layers beneath a sandbox's files: directories below [`Start::layers`], the topmost first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lower {
    /// Beneath /work.
    #[serde(default)]
    pub work: Vec<String>,
    /// Beneath the root, above the image's root file system.
    #[serde(default)]
    pub root: Vec<String>,
}

/// What PID 1 of a container needs to know: the first message it gets. It answers with a [`Greeting`], then serves as any
/// other PID 1 does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contained {
    /// The limits. The container engine was asked to set those that only it can.
    pub limits: LimitSpec,
    /// The system call filter: an array of `struct sock_filter`, in the frame's body.
    pub filter: Span,
    /// The shell of shell calls, absolute inside.
    pub shell: String,
    /// The environment of every tool, as `NAME=value`.
    pub env: Vec<String>,
    /// Files that must be the very ones the program sees.
    pub witnesses: Vec<Witness>,
    /// The way out for tools; none for no network at all.
    #[serde(default)]
    pub network: Option<Streams>,
}

/// How PID 1 of a container carries its tools' connections to the program outside: as streams of [`crate::mux`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Streams {
    /// The port of the container's own loopback at which it takes them.
    pub port: u16,
    /// Most at once; more wait to be taken.
    pub most: usize,
    /// Bytes that may be under way on each, in each direction.
    pub window: usize,
}

/// A file that tells whether the engine binds the paths of the program's host, or those of another machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Witness {
    /// Where it appears, absolute.
    pub inside: String,
    /// Its device's number.
    pub device: u64,
    /// Its inode's number.
    pub inode: u64,
}

/// What PID 1 of a container answers first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Greeting {
    /// It is set up; [`crate::init::Reply::Ready`] follows.
    Settled(Settled),
    /// A [`Witness`] is another file here.
    Elsewhere {
        /// Its path.
        inside: String,
    },
    /// It could not be set up; it ends.
    Unable {
        /// The step that failed.
        step: String,
        /// The error in words.
        message: String,
    },
}

/// What PID 1 of a container found around it: limits as the kernel has them, not as they were asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settled {
    /// The memory limit of its control group, in bytes.
    pub memory_bytes: Option<u64>,
    /// The process limit of its control group.
    pub pids: Option<u64>,
    /// The processor limit of its control group, in thousandths.
    pub milli_cpus: Option<u64>,
    /// Version of its control groups; 0 where it sees none of its own.
    pub cgroups: u8,
    /// Whether the group's counter of kills for want of memory can be read.
    pub counts_oom: bool,
    /// Bytes of the file systems at /work, /tmp and /dev/shm together.
    pub disk_bytes: u64,
    /// Files they hold together; nothing where one of them has no limit.
    pub inodes: Option<u64>,
    /// Whether the engine's own system call filter is in place.
    pub engine_filter: bool,
    /// Version of Landlock, 0 for none.
    pub landlock: i64,
    /// Whether ids inside are ids of the host.
    pub host_ids: bool,
}

/// What the program asks of a started helper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Make a sandbox.
    Create {
        /// The program's name for it, never used twice.
        id: u64,
        /// What lies beneath its files.
        #[serde(default)]
        lower: Lower,
    },
    /// Kill a sandbox and take away what it held.
    Destroy {
        /// Its name.
        id: u64,
    },
    /// Double a sandbox's memory limit.
    Relax {
        /// Its name.
        id: u64,
    },
    /// Tell how much memory all sandboxes use together; answered by [`Event::Measured`].
    Measure,
}

/// How far a limit holds on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holds {
    /// The kernel enforces it on the whole sandbox.
    Yes,
    /// It is enforced in part; the row says which.
    Partly,
    /// This host offers no way to enforce it.
    No,
    /// No such limit is configured.
    Unset,
}

/// One limit and how it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitRow {
    /// The limit's name: `memory`, `disk`, `processes`, … It stays the same over versions, so that records compare.
    pub limit: String,
    /// Its value, with unit.
    pub value: String,
    /// Whether it holds.
    pub holds: Holds,
    /// By which means, or why not.
    pub how: String,
}

/// What the helper tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The helper is ready.
    Started {
        /// The limits and how they hold.
        limits: Vec<LimitRow>,
        /// `root` or `user`.
        mode: String,
        /// Leftover control groups of dead programs that were removed.
        swept: u64,
    },
    /// The helper cannot make sandboxes here; it ends.
    Unable {
        /// The step that failed.
        step: String,
        /// The kernel's error number, 0 if the cause is another one.
        errno: i32,
        /// The error in words.
        message: String,
    },
    /// A sandbox was cloned; its socket comes with this packet. PID 1 says [`crate::init::Reply::Ready`] on it.
    Created {
        /// Its name.
        id: u64,
    },
    /// A sandbox could not be made.
    Failed {
        /// Its name.
        id: u64,
        /// The step that failed.
        step: String,
        /// The error in words.
        message: String,
    },
    /// A sandbox is gone: killed by order, or by itself.
    Gone {
        /// Its name.
        id: u64,
        /// The signal that ended PID 1, if one did.
        signal: Option<i32>,
        /// Processes the kernel killed in it for want of memory over its whole life.
        oom_kills: u64,
    },
    /// What [`Order::Measure`] asked for.
    Measured {
        /// Memory of all sandboxes with their files, in bytes; without control groups the resident memory of their
        /// processes.
        memory_bytes: Option<u64>,
    },
}
