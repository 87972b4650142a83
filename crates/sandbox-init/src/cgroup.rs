//! Control groups, version 1, version 2 or neither: one group a sandbox, beneath one group for this program.
//!
//! Everything goes through directory descriptors opened before the helper leaves the host's file tree. Hybrid hosts
//! (controllers in version 1, an empty version 2) count as version 1.

#![warn(clippy::arithmetic_side_effects)]

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use drillyard_sandbox_init::control::LimitSpec;

use crate::sys;

const PREFIX: &str = "drillyard-";

/// Where this program's groups live.
pub enum Driver {
    /// One directory for each controller of version 1.
    V1(Vec<(Controller, OwnedFd)>),
    /// One directory of version 2, with the controllers it grants.
    V2(OwnedFd, Vec<Controller>),
    /// No group can be made here, because of this.
    None(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    Memory,
    Pids,
    Cpu,
    Cpuacct,
    Io,
}

impl Controller {
    const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            // Its name in version 2; in version 1 it is `blkio`.
            Self::Io => "io",
        }
    }

    const fn v1_name(self) -> &'static str {
        match self {
            Self::Io => "blkio",
            other => other.name(),
        }
    }
}

const V1: [Controller; 5] = [
    Controller::Memory,
    Controller::Pids,
    Controller::Cpu,
    Controller::Cpuacct,
    Controller::Io,
];

/// The counters of one sandbox, held by its PID 1 as open files.
#[derive(Default)]
pub struct Meter {
    /// Peak of memory; writing resets it where the kernel can.
    pub peak: Option<OwnedFd>,
    /// Holds a line `oom_kill N`.
    pub oom: Option<OwnedFd>,
    /// Processor time: nanoseconds, or a line `usage_usec N`.
    pub cpu: Option<OwnedFd>,
    /// Holds a line `max N`.
    pub pids: Option<OwnedFd>,
    /// Most processes at once; cannot be reset.
    pub peak_pids: Option<OwnedFd>,
    /// Memory in use.
    pub usage: Option<OwnedFd>,
    /// What that memory is made of, by keys.
    pub stat: Option<OwnedFd>,
    /// Lines `MAJOR:MINOR rbytes=N wbytes=N …`; version 2 only.
    pub io: Option<OwnedFd>,
}

/// One reading of a [`Meter`].
#[derive(Debug, Default, Clone, Copy)]
pub struct Reading {
    pub peak_bytes: Option<u64>,
    pub oom_kills: u64,
    pub cpu_us: Option<u64>,
    pub refused_forks: u64,
    pub peak_pids: Option<u64>,
    /// Read from and written to block devices.
    pub io_bytes: (u64, u64),
}

/// What memory holds while no tool is alive.
#[derive(Debug, Default, Clone, Copy)]
pub struct AtRest {
    pub used_bytes: Option<u64>,
    pub cache_bytes: u64,
}

impl Meter {
    /// Starts the peak anew; false where the kernel cannot (version 2 before Linux 6.12).
    pub fn reset_peak(&self) -> bool {
        let peak = self.peak.as_ref();
        peak.is_some_and(|fd| sys::write_all(fd.as_raw_fd(), b"0\n").is_ok())
    }

    /// What is in use once every process is dead. The cache is looked up only where it matters: where usage at rest or
    /// at its peak was above half of the limit.
    pub fn at_rest(&self, peak: Option<u64>, limit: u64) -> AtRest {
        let usage: Option<u64> = text(self.usage.as_ref()).and_then(|t| t.trim().parse().ok());
        let most = usage.unwrap_or(0).max(peak.unwrap_or(0));
        let cache_bytes = if most > limit / 2 {
            text(self.stat.as_ref()).map_or(0, |t| {
                let all = keyed(&t, "cache").or_else(|| keyed(&t, "file"));
                all.unwrap_or(0)
                    .saturating_sub(keyed(&t, "shmem").unwrap_or(0))
            })
        } else {
            0
        };
        AtRest {
            used_bytes: usage.map(|u| u.saturating_sub(cache_bytes)),
            cache_bytes,
        }
    }

    /// Keeps what the helper itself needs of a sandbox, so that its descriptors do not add up.
    pub fn keep_for_helper(&mut self) {
        *self = Self {
            oom: self.oom.take(),
            ..Self::default()
        };
    }

    /// Every open file of it, made anew by `f`.
    pub fn try_map(self, mut f: impl FnMut(OwnedFd) -> io::Result<OwnedFd>) -> io::Result<Self> {
        let mut f = |fd: Option<OwnedFd>| fd.map(&mut f).transpose();
        Ok(Self {
            peak: f(self.peak)?,
            oom: f(self.oom)?,
            cpu: f(self.cpu)?,
            pids: f(self.pids)?,
            peak_pids: f(self.peak_pids)?,
            usage: f(self.usage)?,
            stat: f(self.stat)?,
            io: f(self.io)?,
        })
    }

    pub fn read(&self) -> Reading {
        let text = |fd: &Option<OwnedFd>| text(fd.as_ref());
        Reading {
            peak_bytes: text(&self.peak).and_then(|t| t.trim().parse().ok()),
            oom_kills: text(&self.oom)
                .and_then(|t| keyed(&t, "oom_kill"))
                .unwrap_or(0),
            cpu_us: text(&self.cpu).and_then(|t| {
                keyed(&t, "usage_usec").or_else(|| t.trim().parse::<u64>().ok().map(|ns| ns / 1000))
            }),
            refused_forks: text(&self.pids).and_then(|t| keyed(&t, "max")).unwrap_or(0),
            peak_pids: text(&self.peak_pids).and_then(|t| t.trim().parse().ok()),
            io_bytes: text(&self.io).map_or((0, 0), |t| device_bytes(&t)),
        }
    }
}

fn text(fd: Option<&OwnedFd>) -> Option<String> {
    let mut buffer = [0; 1024];
    let n = sys::pread(fd?.as_raw_fd(), &mut buffer, 0).ok()?;
    Some(String::from_utf8_lossy(&buffer[..n]).into_owned())
}

/// Sums of `rbytes` and `wbytes` over all devices.
fn device_bytes(text: &str) -> (u64, u64) {
    let sum = |key: &str| {
        text.split_whitespace()
            .filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok())
            .fold(0, u64::saturating_add)
    };
    (sum("rbytes="), sum("wbytes="))
}

/// The number after a key at the start of a line.
fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        line.strip_prefix(key)?
            .strip_prefix(' ')?
            .trim()
            .parse()
            .ok()
    })
}

/// One sandbox's group.
pub struct Group {
    name: CString,
    pub meter: Meter,
}

/// How the first process of a sandbox comes into its group.
#[derive(Default)]
pub struct Entrance {
    /// The group of version 2 to be cloned into.
    pub into: Option<OwnedFd>,
    /// Lists of threads of version 1 for it to enter itself.
    lists: Vec<OwnedFd>,
}

impl Entrance {
    /// Called by that process. A thread that moves itself takes no lock that every fork on the host waits for, as moving
    /// another process does for as long as an RCU grace period.
    pub fn enter(&self) -> io::Result<()> {
        self.lists
            .iter()
            .try_for_each(|list| sys::write_all(list.as_raw_fd(), b"0"))
    }
}

impl Driver {
    /// Finds where groups can be made and removes those of dead programs. Never fails: what cannot be had is a reason.
    pub fn open(owner: &str, io: bool) -> (Self, u64) {
        let Ok(own) = fs::read_to_string("/proc/self/cgroup") else {
            return (Self::None("the host has no control groups".into()), 0);
        };
        let mounts = mounts();
        let mut swept = 0;
        let mut dirs = Vec::new();
        let mut reason = String::from("no memory controller of version 1 or 2 is mounted");
        for controller in V1 {
            if controller == Controller::Io && !io {
                continue;
            }
            let Some(base) = v1_base(controller, &own, &mounts) else {
                continue;
            };
            swept = sweep(&base).saturating_add(swept);
            match make(&base, owner) {
                Ok(dir) => dirs.push((controller, dir)),
                Err(e) => reason = format!("{base}: {e}"),
            }
        }
        if dirs
            .iter()
            .any(|(c, _)| matches!(c, Controller::Memory | Controller::Pids))
        {
            return (Self::V1(dirs), swept);
        }
        let path = own.lines().find_map(|l| l.strip_prefix("0::"));
        let mount = mounts.iter().find(|m| m.kind == "cgroup2");
        if let (Some(path), Some(mount)) = (path, mount) {
            let mut at = beneath(mount, path);
            loop {
                swept = sweep(&at).saturating_add(swept);
                match v2(&at, owner) {
                    Ok((dir, controllers)) => return (Self::V2(dir, controllers), swept),
                    Err(e) => reason = format!("{at}: {e}"),
                }
                if at.len() <= mount.point.len() {
                    break;
                }
                match at.rfind('/') {
                    Some(cut) if cut >= mount.point.len() => at.truncate(cut),
                    _ => at.clone_from(&mount.point),
                }
            }
        }
        (Self::None(reason), swept)
    }

    /// Whether a controller's limits hold.
    pub fn has(&self, wanted: Controller) -> bool {
        match self {
            Self::V1(dirs) => dirs.iter().any(|(c, _)| *c == wanted),
            Self::V2(_, controllers) => controllers.contains(&wanted),
            Self::None(_) => false,
        }
    }

    /// How a limit is enforced, or why it is not.
    pub fn how(&self, wanted: Controller) -> String {
        match self {
            _ if self.has(wanted) => match self {
                Self::V1(_) => {
                    format!("control group, version 1 {} controller", wanted.v1_name())
                }
                _ => format!("control group, version 2 {} controller", wanted.name()),
            },
            Self::None(reason) => format!("no control group: {reason}"),
            _ => format!("this host grants no {} controller", wanted.name()),
        }
    }

    /// Makes a sandbox's group with its limits set.
    pub fn create(&self, id: u64, limits: &LimitSpec) -> io::Result<Option<(Group, Entrance)>> {
        let name = sys::c(format!("sb-{id}"))?;
        let memory = limits.memory_bytes.to_string();
        // PID 1 is one process more than the tools may have.
        let pids = limits.pids.saturating_add(1).to_string();
        let quota = limits.milli_cpus.saturating_mul(100);
        let mut meter = Meter::default();
        let mut entrance = Entrance::default();
        let open = |dir: BorrowedFd<'_>, file: &str, write: bool| -> io::Result<OwnedFd> {
            let flags = if write { libc::O_RDWR } else { libc::O_RDONLY };
            sys::openat(dir.as_raw_fd(), &sys::c(file)?, flags, 0)
        };
        match self {
            Self::None(_) => return Ok(None),
            Self::V1(dirs) => {
                for (controller, base) in dirs {
                    sys::mkdir_at(base.as_raw_fd(), &name, 0o755)?;
                    let dir = directory(base.as_fd(), &name)?;
                    let dir = dir.as_fd();
                    match controller {
                        Controller::Memory => {
                            put(dir, "memory.limit_in_bytes", &memory)?;
                            // Present only where swap is accounted.
                            let _ = put(dir, "memory.memsw.limit_in_bytes", &memory);
                            // What waits in sockets is counted apart here, and not at all without a limit of its own.
                            let sockets = (limits.memory_bytes / 8).to_string();
                            let _ = put(dir, "memory.kmem.tcp.limit_in_bytes", &sockets);
                            meter.peak = open(dir, "memory.max_usage_in_bytes", true).ok();
                            meter.usage = open(dir, "memory.usage_in_bytes", false).ok();
                            meter.stat = open(dir, "memory.stat", false).ok();
                            meter.oom = open(dir, "memory.oom_control", false).ok();
                        }
                        Controller::Pids => {
                            put(dir, "pids.max", &pids)?;
                            meter.pids = open(dir, "pids.events", false).ok();
                            meter.peak_pids = open(dir, "pids.peak", false).ok();
                        }
                        Controller::Cpu => {
                            put(dir, "cpu.cfs_period_us", "100000")?;
                            put(dir, "cpu.cfs_quota_us", &quota.to_string())?;
                        }
                        Controller::Cpuacct => meter.cpu = open(dir, "cpuacct.usage", false).ok(),
                        Controller::Io => {
                            for device in io_devices(limits) {
                                for way in ["read", "write"] {
                                    let file = format!("blkio.throttle.{way}_bps_device");
                                    put(dir, &file, &device.v1)?;
                                }
                            }
                        }
                    }
                    entrance.lists.push(open(dir, "tasks", true)?);
                }
            }
            Self::V2(base, controllers) => {
                sys::mkdir_at(base.as_raw_fd(), &name, 0o755)?;
                let group = directory(base.as_fd(), &name)?;
                let dir = group.as_fd();
                for controller in controllers {
                    match controller {
                        Controller::Memory => {
                            put(dir, "memory.max", &memory)?;
                            let _ = put(dir, "memory.swap.max", "0");
                            meter.peak = open(dir, "memory.peak", true)
                                .or_else(|_| open(dir, "memory.peak", false))
                                .ok();
                            meter.oom = open(dir, "memory.events", false).ok();
                            meter.usage = open(dir, "memory.current", false).ok();
                            meter.stat = open(dir, "memory.stat", false).ok();
                        }
                        Controller::Pids => {
                            put(dir, "pids.max", &pids)?;
                            meter.pids = open(dir, "pids.events", false).ok();
                            meter.peak_pids = open(dir, "pids.peak", false).ok();
                        }
                        Controller::Io => {
                            for device in io_devices(limits) {
                                put(dir, "io.max", &device.v2)?;
                            }
                            meter.io = open(dir, "io.stat", false).ok();
                        }
                        Controller::Cpu => put(dir, "cpu.max", &format!("{quota} 100000"))?,
                        Controller::Cpuacct => {}
                    }
                }
                meter.cpu = open(dir, "cpu.stat", false).ok();
                entrance.into = Some(group);
            }
        }
        Ok(Some((Group { name, meter }, entrance)))
    }

    /// Sets another memory limit of a sandbox, as far as that can be done.
    pub fn set_memory(&self, group: &Group, bytes: u64) {
        let bytes = bytes.to_string();
        match self {
            Self::V1(dirs) => {
                let base = dirs.iter().find(|(c, _)| *c == Controller::Memory);
                if let Some(Ok(dir)) = base.map(|(_, b)| directory(b.as_fd(), &group.name)) {
                    // The limit with swap must never be the smaller one.
                    let _ = put(dir.as_fd(), "memory.memsw.limit_in_bytes", &bytes);
                    let _ = put(dir.as_fd(), "memory.limit_in_bytes", &bytes);
                }
            }
            Self::V2(base, _) => {
                if let Ok(dir) = directory(base.as_fd(), &group.name) {
                    let _ = put(dir.as_fd(), "memory.max", &bytes);
                }
            }
            Self::None(_) => {}
        }
    }

    /// Memory of all sandboxes together, where a group counts it.
    pub fn memory_bytes(&self) -> Option<u64> {
        let read = |base: &OwnedFd, file: &CStr| -> Option<u64> {
            let fd = sys::openat(base.as_raw_fd(), file, libc::O_RDONLY, 0).ok()?;
            text(Some(&fd))?.trim().parse().ok()
        };
        match self {
            Self::V1(dirs) => {
                let (_, base) = dirs.iter().find(|(c, _)| *c == Controller::Memory)?;
                read(base, c"memory.usage_in_bytes")
            }
            Self::V2(base, _) => read(base, c"memory.current"),
            Self::None(_) => None,
        }
    }

    /// Removes a sandbox's group once its last process is gone.
    pub fn remove(&self, group: &Group) -> io::Result<()> {
        let one = |base: &OwnedFd| match sys::unlink_at(
            base.as_raw_fd(),
            &group.name,
            libc::AT_REMOVEDIR,
        ) {
            Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
            _ => Ok(()),
        };
        match self {
            Self::None(_) => Ok(()),
            Self::V1(dirs) => dirs.iter().try_for_each(|(_, base)| one(base)),
            Self::V2(base, _) => one(base),
        }
    }

    /// Removes this program's own groups at the end.
    pub fn remove_own(&self, owner: &str) {
        let Ok(name) = sys::c(format!("../{PREFIX}{owner}")) else {
            return;
        };
        let one = |base: &OwnedFd| {
            let _ = sys::unlink_at(base.as_raw_fd(), &name, libc::AT_REMOVEDIR);
        };
        match self {
            Self::None(_) => {}
            Self::V1(dirs) => dirs.iter().for_each(|(_, base)| one(base)),
            Self::V2(base, _) => one(base),
        }
    }
}

fn directory(base: BorrowedFd<'_>, name: &CString) -> io::Result<OwnedFd> {
    sys::openat(
        base.as_raw_fd(),
        name,
        libc::O_RDONLY | libc::O_DIRECTORY,
        0,
    )
}

fn put(dir: BorrowedFd<'_>, file: &str, value: &str) -> io::Result<()> {
    let fd = sys::openat(dir.as_raw_fd(), &sys::c(file)?, libc::O_WRONLY, 0)?;
    sys::write_all(fd.as_raw_fd(), value.as_bytes())
        .map_err(|e| io::Error::new(e.kind(), format!("{file} = {value}: {e}")))
}

fn make(base: &str, owner: &str) -> io::Result<OwnedFd> {
    let path = format!("{base}/{PREFIX}{owner}");
    match fs::create_dir(&path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    sys::openat(
        libc::AT_FDCWD,
        &sys::c(path)?,
        libc::O_RDONLY | libc::O_DIRECTORY,
        0,
    )
}

/// Tries a place of version 2: the controllers must reach a group made there, and a process must be movable into it.
fn v2(at: &str, owner: &str) -> io::Result<(OwnedFd, Vec<Controller>)> {
    // Only where this group may hand its controllers down (root, or a delegated tree without own processes).
    for controller in ["memory", "pids", "cpu", "io"] {
        let _ = fs::write(
            format!("{at}/cgroup.subtree_control"),
            format!("+{controller}"),
        );
    }
    let dir = make(at, owner)?;
    let own = format!("{at}/{PREFIX}{owner}");
    let attempt = || {
        let granted = fs::read_to_string(format!("{own}/cgroup.controllers"))?;
        let mut controllers = Vec::new();
        for controller in [
            Controller::Memory,
            Controller::Pids,
            Controller::Cpu,
            Controller::Io,
        ] {
            if granted.split_whitespace().any(|g| g == controller.name())
                && fs::write(
                    format!("{own}/cgroup.subtree_control"),
                    format!("+{}", controller.name()),
                )
                .is_ok()
            {
                controllers.push(controller);
            }
        }
        if controllers.iter().all(|c| *c == Controller::Io) {
            return Err(io::Error::other(
                "no memory, pids or cpu controller is delegated here",
            ));
        }
        probe_move(&own)?;
        Ok(controllers)
    };
    match attempt() {
        Ok(controllers) => Ok((dir, controllers)),
        Err(e) => {
            let _ = fs::remove_dir(&own);
            Err(e)
        }
    }
}

/// Shows that a process can be moved into a group made beneath `own`.
fn probe_move(own: &str) -> io::Result<()> {
    let path = format!("{own}/probe");
    fs::create_dir(&path)?;
    let (wait, release) = sys::pipe()?;
    let result = match sys::fork()? {
        sys::Cloned::Child => {
            drop(release);
            let _ = sys::read(wait.as_raw_fd(), &mut [0]);
            sys::exit(0)
        }
        sys::Cloned::Parent(pid) => {
            let moved = fs::write(format!("{path}/cgroup.procs"), pid.to_string());
            drop(release);
            let _ = sys::reap(pid, true);
            moved
        }
    };
    let _ = fs::remove_dir(&path);
    result
}

struct Mount {
    root: String,
    point: String,
    kind: String,
    options: String,
}

fn mounts() -> Vec<Mount> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let before: Vec<&str> = before.split(' ').collect();
            let after: Vec<&str> = after.split(' ').collect();
            Some(Mount {
                root: (*before.get(3)?).to_owned(),
                point: (*before.get(4)?).to_owned(),
                kind: (*after.first()?).to_owned(),
                options: (*after.get(2)?).to_owned(),
            })
        })
        .filter(|m| m.kind.starts_with("cgroup"))
        .collect()
}

/// The directory of a control group, given its path in its hierarchy and where that is mounted.
fn beneath(mount: &Mount, path: &str) -> String {
    let inner = path
        .strip_prefix(mount.root.trim_end_matches('/'))
        .unwrap_or(path);
    format!("{}{}", mount.point, inner.trim_end_matches('/'))
}

fn v1_base(controller: Controller, own: &str, mounts: &[Mount]) -> Option<String> {
    let has = |list: &str| list.split(',').any(|c| c == controller.v1_name());
    let path = own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        has(controllers).then_some(path)
    })?;
    let mount = mounts
        .iter()
        .find(|m| m.kind == "cgroup" && has(&m.options))?;
    let base = beneath(mount, path);
    // Inside a container the host's path may not exist beneath the mount.
    Some(if fs::exists(&base).unwrap_or(false) {
        base
    } else {
        mount.point.clone()
    })
}

/// A limit of one block device, as the two versions want it written.
pub struct DeviceLimit {
    v1: String,
    v2: String,
}

/// The limit for every whole block device of this host that holds data.
fn io_devices(limits: &LimitSpec) -> &'static [DeviceLimit] {
    // The helper leaves the host's file tree before the first sandbox is made; it looks while it can.
    static DEVICES: OnceLock<Vec<DeviceLimit>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let Some(bytes) = limits.io_bytes_per_s else {
            return Vec::new();
        };
        fs::read_dir("/sys/block")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let of = |file: &str| fs::read_to_string(entry.path().join(file)).ok();
                let (device, sectors) = (of("dev")?, of("size")?);
                let device = device.trim();
                // Memory and files dressed up as devices lead to none, or to one that is here too.
                let name = entry.file_name();
                let odd = ["ram", "zram", "loop"].map(|p| name.to_string_lossy().starts_with(p));
                (sectors.trim() != "0" && !odd.contains(&true)).then(|| DeviceLimit {
                    v1: format!("{device} {bytes}"),
                    v2: format!("{device} rbps={bytes} wbps={bytes}"),
                })
            })
            .collect()
    })
}

/// How many block devices the limit covers; to be asked before the host's file tree is left.
pub fn find_io_devices(limits: &LimitSpec) -> usize {
    io_devices(limits).len()
}

/// Removes groups whose program is dead; returns how many.
fn sweep(base: &str) -> u64 {
    let mut swept = 0;
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(|n| n.strip_prefix(PREFIX)) else {
            continue;
        };
        let mut parts = owner.split('-');
        let (Some(pid), Some(started)) = (parts.next(), parts.next()) else {
            continue;
        };
        if start_time(pid).as_deref() == Some(started) {
            continue;
        }
        for sub in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
            if sub.file_type().is_ok_and(|t| t.is_dir()) {
                empty(&sub.path());
                let _ = fs::remove_dir(sub.path());
            }
        }
        empty(&entry.path());
        if fs::remove_dir(entry.path()).is_ok() {
            swept = u64::saturating_add(swept, 1);
        }
    }
    swept
}

/// Kills what is left in a group of a dead program.
fn empty(dir: &std::path::Path) {
    // Version 2 since Linux 5.14: all at once, whatever forks meanwhile.
    let _ = fs::write(dir.join("cgroup.kill"), "1");
    for _ in 0..100 {
        let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        let pids: Vec<i32> = procs
            .lines()
            .filter_map(|l| l.parse().ok())
            .filter(|p| *p > 1)
            .collect();
        if pids.is_empty() {
            return;
        }
        for pid in pids {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Start time of a process in clock ticks since boot, as text; nothing if it does not live.
fn start_time(pid: &str) -> Option<String> {
    let pid: u32 = pid.parse().ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; fields are counted after its end.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_whole_words_at_line_starts() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(keyed(text, "oom_kill"), Some(3));
        assert_eq!(keyed("low 0\nmax 12\n", "max"), Some(12));
        assert_eq!(keyed("", "max"), None);
    }

    #[test]
    fn bytes_of_devices_are_summed() {
        let text =
            "254:0 rbytes=10 wbytes=1 rios=3 wios=0 dbytes=7 dios=0\n7:0 rbytes=5 wbytes=2\n";
        assert_eq!(device_bytes(text), (15, 3));
        assert_eq!(device_bytes(""), (0, 0));
    }

    #[test]
    fn a_groups_directory_is_found_beneath_its_mount() {
        let mount = |root: &str| Mount {
            root: root.into(),
            point: "/sys/fs/cgroup/memory".into(),
            kind: "cgroup".into(),
            options: "rw,memory".into(),
        };
        assert_eq!(beneath(&mount("/"), "/a/b"), "/sys/fs/cgroup/memory/a/b");
        assert_eq!(beneath(&mount("/"), "/"), "/sys/fs/cgroup/memory");
        assert_eq!(beneath(&mount("/a"), "/a/b"), "/sys/fs/cgroup/memory/b");
    }

    #[test]
    fn this_process_has_a_start_time() {
        let own = start_time(&std::process::id().to_string());
        assert!(own.is_some_and(|t| t.parse::<u64>().is_ok()));
        assert_eq!(start_time("4294967295"), None);
    }
}
