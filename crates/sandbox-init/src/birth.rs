//! How one sandbox comes to be: cloned from the helper with namespaces of its own, it sets itself up and turns PID 1.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use drillyard_sandbox_init::control::Start;
use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::Reply;

use crate::cgroup::{Driver, Entrance, Group, Meter};
use crate::counts::Counts;
use crate::landlock;
use crate::pid1::{self, Inside};
use crate::sys::{self, At, Cloned, Failure};
use crate::world::{self, Mode};

const NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// Host ids of sandboxes made by root start here: above those of people, services and containers' usual ranges.
const FIRST_HOST_ID: u64 = 2_000_000_000;
/// So many sandboxes later an id is used again.
const HOST_IDS: u64 = 50_000_000;

/// The tools' user and group inside.
pub const TOOL_ID: u32 = 1000;

const CAP_CHOWN: u64 = 1 << 0;
const CAP_DAC_OVERRIDE: u64 = 1 << 1;
pub const CAP_DAC_READ_SEARCH: u64 = 1 << 2;
const CAP_FOWNER: u64 = 1 << 3;
const CAP_KILL: u64 = 1 << 5;
const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;
/// What PID 1 keeps to do its work, within its user namespace: start tools as another user, end them, and see to
/// their files whatever the mode.
pub const KEPT: u64 = CAP_CHOWN
    | CAP_DAC_OVERRIDE
    | CAP_DAC_READ_SEARCH
    | CAP_FOWNER
    | CAP_KILL
    | CAP_SETGID
    | CAP_SETUID;

/// Kernel files that change the machine: not to be written.
const READ_ONLY: [&str; 7] = [
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/irq",
    "/proc/bus",
    "/proc/fs",
    "/proc/mtrr",
    "/proc/pressure",
];
/// Kernel files that show memory, keys and addresses, some without end: not to be read.
const EMPTY: [&str; 8] = [
    "/proc/kcore",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/keys",
    "/proc/timer_list",
    "/proc/kallsyms",
];

/// A sandbox as the helper knows it.
pub struct Sandbox {
    pub id: u64,
    /// Its PID 1, as the helper sees it.
    pub pid: i32,
    pub group: Option<Group>,
}

/// Makes a sandbox; returns it with the program's end of its socket.
pub fn make(
    id: u64,
    start: &Start,
    filter: &[u8],
    driver: &Driver,
    mode: Mode,
) -> Result<(Sandbox, OwnedFd), Failure> {
    let (outer, inner) = sys::socketpair(libc::SOCK_STREAM).at("socket")?;
    let (gate, open_gate) = sys::pipe().at("pipe")?;
    let (group, entrance) = match driver.create(id, &start.limits).at("control group")? {
        Some((group, entrance)) => (Some(group), entrance),
        None => (None, Entrance::default()),
    };
    let into = entrance.into.as_ref().map(AsFd::as_fd);
    let cloned = sys::clone3(NAMESPACES as u64, into).at("new namespaces");
    let cloned = match cloned {
        Ok(cloned) => cloned,
        Err(failure) => {
            if let Some(group) = &group {
                let _ = driver.remove(group);
            }
            return Err(failure);
        }
    };
    match cloned {
        Cloned::Child => {
            drop(open_gate);
            let entered = entrance.enter().at("joining the control group");
            let meter = group.map_or_else(Meter::default, |g| g.meter);
            live(&gate, entered, inner, meter, start, filter, mode)
        }
        Cloned::Parent(pid) => {
            let mut sandbox = Sandbox { id, pid, group };
            if let Some(group) = &mut sandbox.group {
                group.meter.keep_for_helper();
            }
            let ready = map_ids(id, pid, mode)
                .at("id map")
                .and_then(|()| sys::write_all(open_gate.as_raw_fd(), b"g").at("pipe"));
            if let Err(failure) = ready {
                let _ = sys::kill(pid, libc::SIGKILL);
                let _ = sys::reap(pid, true);
                if let Some(group) = &sandbox.group {
                    let _ = driver.remove(group);
                }
                return Err(failure);
            }
            Ok((sandbox, outer))
        }
    }
}

fn map_ids(id: u64, pid: i32, mode: Mode) -> std::io::Result<()> {
    let map = match mode {
        Mode::Root => {
            let first = FIRST_HOST_ID + 2 * (id % HOST_IDS);
            format!("0 {first} 1\n{TOOL_ID} {} 1\n", first + 1)
        }
        Mode::User => {
            std::fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
            format!("{TOOL_ID} 0 1\n")
        }
    };
    std::fs::write(format!("/proc/{pid}/gid_map"), &map)?;
    std::fs::write(format!("/proc/{pid}/uid_map"), &map)
}

/// The child's life: set up, serve, end with the process.
fn live(
    gate: &OwnedFd,
    entered: Result<(), Failure>,
    socket: OwnedFd,
    meter: Meter,
    start: &Start,
    filter: &[u8],
    mode: Mode,
) -> ! {
    // The gate opens when ids are mapped; it closes unopened if the helper gave up.
    let mut byte = [0];
    if !matches!(sys::read(gate.as_raw_fd(), &mut byte), Ok(1)) {
        sys::exit(1);
    }
    let raw = socket.as_raw_fd();
    let settled = match entered {
        Ok(()) => settle(socket, meter, start, filter, mode),
        Err(failure) => Err((raw, failure)),
    };
    match settled {
        Ok(inside) => pid1::serve(inside),
        Err((socket, failure)) => {
            let reply = Reply::Broken {
                step: failure.step,
                message: failure.error.to_string(),
            };
            if let Ok(bytes) = frame::encode(&reply, 0) {
                let _ = sys::write_all(socket, &bytes);
            }
            sys::exit(1)
        }
    }
}

fn settle<'a>(
    socket: OwnedFd,
    meter: Meter,
    start: &'a Start,
    filter: &[u8],
    mode: Mode,
) -> Result<Inside<'a>, (RawFd, Failure)> {
    let raw = socket.as_raw_fd();
    let (socket, meter) = keep(socket, meter)
        .at("descriptors")
        .map_err(|f| (raw, f))?;
    let raw = socket.as_raw_fd();
    let own_id = match mode {
        Mode::Root => 0,
        Mode::User => TOOL_ID,
    };
    let (counts, listener) = confine(start, filter, mode, own_id).map_err(|f| (raw, f))?;
    let rules = landlock::prepare().at("landlock").map_err(|f| (raw, f))?;
    let signals = sys::sigchld_fd().at("signals").map_err(|f| (raw, f))?;
    let stack = sys::Stack::new().at("stack").map_err(|f| (raw, f))?;
    Ok(Inside {
        socket,
        replies: None,
        signals,
        meter,
        counts,
        rules,
        stack,
        start,
        own_id,
        listener,
        shares_ids: false,
    })
}

/// Shuts the process in; returns the counters, and the socket at which the program outside takes connections, if there
/// is a network.
fn confine(
    start: &Start,
    filter: &[u8],
    mode: Mode,
    own_id: u32,
) -> Result<(Counts, Option<OwnedFd>), Failure> {
    sys::become_id(own_id, own_id, mode == Mode::Root).at("user")?;
    let _ = sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as _, 0);
    mounts(start, own_id)?;
    let counts = Counts::open();
    // After the group was joined, so that it is what this namespace calls its root.
    let _ = sys::unshare(libc::CLONE_NEWCGROUP);
    sys::loopback_up().at("loopback")?;
    // Made before anything of the agent's runs, so that nothing inside can take its place.
    let listener = start
        .network
        .map(sys::listen_on_loopback)
        .transpose()
        .at("listening socket of the network")?;
    // SAFETY: no memory is involved.
    unsafe { libc::umask(0o022) };
    std::env::set_current_dir("/work").at("/work")?;
    sys::setrlimit(libc::RLIMIT_CORE, 0).at("core limit")?;
    sys::drop_bounding();
    sys::set_capabilities(KEPT).at("capabilities")?;
    sys::prctl(libc::PR_SET_DUMPABLE, 0, 0).at("dumpable")?;
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0).at("no_new_privs")?;
    sys::install_filter(filter).at("system call filter")?;
    Ok((counts, listener))
}

/// One tmpfs carries every place that can be written, so that its size bounds them together.
fn mounts(start: &Start, own_id: u32) -> Result<(), Failure> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    let options = format!(
        "mode=0755,size={},nr_inodes={}",
        start.limits.disk_bytes, start.limits.inodes
    );
    sys::mount("disk", "/mnt", Some("tmpfs"), flags, Some(&options)).at("disk")?;
    for (name, to, mode) in [
        ("/mnt/work", "/work", 0o755),
        ("/mnt/tmp", "/tmp", 0o1777),
        ("/mnt/shm", "/dev/shm", 0o1777),
    ] {
        std::fs::create_dir(name).at(name)?;
        let path = sys::c(name).at(name)?;
        if name == "/mnt/work" && own_id != TOOL_ID {
            sys::chown_at(libc::AT_FDCWD, &path, TOOL_ID, TOOL_ID).at(name)?;
        }
        // SAFETY: a C string that outlives the call.
        sys::check(unsafe { libc::chmod(path.as_ptr(), mode) }).at(name)?;
        sys::mount(name, to, None, libc::MS_BIND, None).at(to)?;
    }
    sys::umount_detach("/mnt").at("disk")?;
    let flags = flags | libc::MS_NOEXEC;
    sys::mount("proc", "/proc", Some("proc"), flags, None).at("proc")?;
    // A program that runs as the host's root without its privileges makes sandboxes whose tools own the kernel's files.
    for path in READ_ONLY {
        match world::read_only(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            done => done.at(path)?,
        }
    }
    for path in EMPTY {
        match sys::mount("/dev/null", path, None, libc::MS_BIND, None) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            done => done.at(path)?,
        }
    }
    Ok(())
}

/// Keeps the socket and the counters, closes every other descriptor, and points 0, 1 and 2 to /dev/null.
fn keep(socket: OwnedFd, meter: Meter) -> std::io::Result<(OwnedFd, Meter)> {
    /// Above the numbers that are given out below, which what is kept may have now.
    const AWAY: RawFd = 16;
    let lift = |fd: OwnedFd| -> std::io::Result<OwnedFd> {
        // SAFETY: no memory is involved.
        let r = sys::check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, AWAY) })?;
        std::mem::forget(fd);
        // SAFETY: just made for us.
        Ok(unsafe { OwnedFd::from_raw_fd(r) })
    };
    let null = lift(sys::openat(libc::AT_FDCWD, c"/dev/null", libc::O_RDWR, 0)?)?;
    let socket = lift(socket)?;
    let meter = meter.try_map(lift)?;
    for fd in 0..3 {
        sys::dup3(null.as_raw_fd(), fd)?;
    }
    std::mem::forget(null);
    let mut next = 3;
    let mut place = |fd: OwnedFd| -> std::io::Result<OwnedFd> {
        // SAFETY: no memory is involved; the number is below all that are kept.
        let r = sys::check(unsafe { libc::dup3(fd.as_raw_fd(), next, libc::O_CLOEXEC) })?;
        std::mem::forget(fd);
        next += 1;
        // SAFETY: just made for us.
        Ok(unsafe { OwnedFd::from_raw_fd(r) })
    };
    let socket = place(socket)?;
    let meter = meter.try_map(&mut place)?;
    sys::close_from(next)?;
    Ok((socket, meter))
}
