//! What a pool of sandboxes is asked to be.

use std::time::Duration;

use camino::Utf8PathBuf;

use crate::Network;

/// The root file system of sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Image {
    /// The host's own programs and libraries, read-only, from an allow-list of paths (`/usr` and what belongs to it).
    #[default]
    Host,
    /// A root file system of its own, which tools may change as they like: each sandbox has its own copy on write.
    RootFs {
        /// The directory it is unpacked in; nothing must change it while it is in use.
        dir: Utf8PathBuf,
        /// What identifies its content.
        digest: String,
    },
}

/// Limits of each sandbox. [`crate::LimitsReport`] tells which of them hold on a host.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// A call that takes longer is killed; a call's own shorter clock is honoured.
    pub call_timeout: Duration,
    /// How long an episode may take. Kept here for whoever runs episodes; the sandbox itself does not act on it.
    pub episode_timeout: Duration,
    /// Memory of all processes and files together, in bytes.
    pub memory_bytes: u64,
    /// Bytes of all files in /work, /tmp and /dev/shm together. They live in memory: at most three quarters of
    /// `memory_bytes` are given, less 2 KiB for each of `files`; the limits report says how much.
    pub disk_bytes: u64,
    /// How many files /work, /tmp and /dev/shm hold together; at most one for each 8 KiB of `memory_bytes`.
    pub files: u64,
    /// Processes and threads.
    pub pids: u64,
    /// Open files of each process.
    pub open_files: u64,
    /// Bytes of standard output and of standard error that a call may print, each; all of it is kept, and a call that
    /// prints more is killed.
    pub output_bytes: u64,
    /// Processors' worth of time.
    pub cpus: f64,
    /// Bytes a second that may be read from, and as many written to, each block device of the host.
    pub io_bytes_per_s: Option<u64>,
    /// From this share of memory, disk, files or processes on, a call's result warns.
    pub warn_at: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            call_timeout: Duration::from_secs(30),
            episode_timeout: Duration::from_mins(10),
            memory_bytes: 4 << 30,
            disk_bytes: 10 << 30,
            files: 100_000,
            pids: 256,
            open_files: 1024,
            output_bytes: 4 << 20,
            cpus: 2.0,
            io_bytes_per_s: None,
            warn_at: 0.8,
        }
    }
}

/// A pool's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxConfig {
    /// The kind of sandbox: `local` or `docker`.
    pub backend: String,
    /// The root file system.
    pub image: Image,
    /// More host paths to show inside, read-only, at the same place (an allow-list: nothing else of the host is seen).
    pub host_paths: Vec<Utf8PathBuf>,
    /// The limits of each sandbox.
    pub limits: Limits,
    /// Where layers and saved states are kept; without it every set-up is written anew at each lease, and no state can
    /// be saved. Must lie on a disk, and belong to this user alone.
    pub cache_dir: Option<Utf8PathBuf>,
    /// Bytes that layers of set-ups may take there; the least recently used go.
    pub cache_bytes: u64,
    /// How many sandboxes are kept ready.
    pub pool_size: usize,
    /// Where the static helper programs lie; by default DRILLYARD_HELPERS, or `helpers/` near the running program.
    pub helpers_dir: Option<Utf8PathBuf>,
    /// False to do without control groups even where the host grants them: then memory is limited for each process
    /// alone and processor time not at all, as for an ordinary user without delegated groups.
    pub control_groups: bool,
    /// How many times over memory may be promised to leased sandboxes, from 1 to 2. Promised is what they are expected
    /// to use: their memory limit, until measurements show what they do use. See [`crate::Policy`].
    pub oversubscription: f64,
    /// What sandboxes may reach.
    pub network: Network,
    /// Of `docker`: the container engine's address, as DOCKER_HOST would give it; by default DOCKER_HOST, or one of the
    /// usual sockets of Docker and Podman. TLS is set up by DOCKER_TLS_VERIFY and DOCKER_CERT_PATH.
    pub engine: Option<String>,
}

impl Default for SandboxConfig {
    fn default() -> Self {
        Self {
            backend: "local".to_owned(),
            image: Image::Host,
            host_paths: Vec::new(),
            cache_dir: None,
            cache_bytes: 20 << 30,
            limits: Limits::default(),
            pool_size: 8,
            helpers_dir: None,
            control_groups: true,
            oversubscription: 2.0,
            network: Network::None,
            engine: None,
        }
    }
}
