//! How one sandbox comes to be: cloned from the helper with namespaces of its own, it sets itself up and turns PID 1.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use drillyard_sandbox_init::control::{Lower, Start};
use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::Reply;

use crate::cgroup::{Driver, Group, Meter};
use crate::landlock;
use crate::pid1::{self, Inside};
use crate::scan::{Area, Overlay};
use crate::sys::{self, At, Cloned, Failure};
use crate::world::{self, Mode, Store};

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
const CAP_DAC_READ_SEARCH: u64 = 1 << 2;
const CAP_FOWNER: u64 = 1 << 3;
const CAP_KILL: u64 = 1 << 5;
const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;
/// What PID 1 keeps to do its work, within its user namespace: start tools as another user, end them, and see to
/// their files whatever the mode.
const KEPT: u64 = CAP_CHOWN
    | CAP_DAC_OVERRIDE
    | CAP_DAC_READ_SEARCH
    | CAP_FOWNER
    | CAP_KILL
    | CAP_SETGID
    | CAP_SETUID;

/// A sandbox as the helper knows it.
pub struct Sandbox {
    pub id: u64,
    /// Its PID 1, as the helper sees it.
    pub pid: i32,
    pub group: Option<Group>,
}

/// Read-only mounts, attached nowhere yet, that lie beneath a sandbox's files; the topmost first.
#[derive(Default)]
pub struct Trees {
    work: Vec<OwnedFd>,
    root: Vec<OwnedFd>,
}

fn first_host_id(id: u64) -> u64 {
    FIRST_HOST_ID + 2 * (id % HOST_IDS)
}

/// Gets what lies beneath a sandbox's files. Tools may change what the image's root owns, so that is theirs.
pub fn lower(
    id: u64,
    start: &Start,
    lower: &Lower,
    store: Option<&Store>,
    mode: Mode,
) -> Result<Trees, Failure> {
    if start.rootfs.is_none() && !lower.root.is_empty() {
        let step = "layers of the root, without an image";
        return Err(std::io::Error::from_raw_os_error(libc::EINVAL)).at(step);
    }
    let to = (mode == Mode::Root).then_some(first_host_id(id) + 1);
    let tree = |name: Option<&str>| {
        let step = name.map_or("image".to_owned(), |name| format!("layer {name}"));
        let missing = || std::io::Error::from_raw_os_error(libc::ENOENT);
        store
            .ok_or_else(missing)
            .and_then(|s| s.tree(name, to))
            .at(&step)
    };
    let trees = |names: &[String]| {
        names
            .iter()
            .map(|n| tree(Some(n)))
            .collect::<Result<Vec<_>, _>>()
    };
    let mut found = Trees {
        work: trees(&lower.work)?,
        root: trees(&lower.root)?,
    };
    if start.rootfs.is_some() {
        found.root.push(tree(None)?);
    }
    Ok(found)
}

/// Makes a sandbox; returns it with the program's end of its socket.
pub fn make(
    id: u64,
    start: &Start,
    filter: &[u8],
    driver: &Driver,
    mode: Mode,
    trees: Trees,
) -> Result<(Sandbox, OwnedFd), Failure> {
    let (outer, inner) = sys::socketpair(libc::SOCK_STREAM).at("socket")?;
    let (gate, open_gate) = sys::pipe().at("pipe")?;
    let group = driver.create(id, &start.limits).at("control group")?;
    let cloned = sys::clone3(NAMESPACES as u64, None).at("new namespaces");
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
            let meter = group.map_or_else(Meter::default, |g| g.meter);
            live(&gate, inner, meter, start, filter, mode, trees)
        }
        Cloned::Parent(pid) => {
            let sandbox = Sandbox { id, pid, group };
            let attached = sandbox
                .group
                .as_ref()
                .map_or(Ok(()), |group| driver.attach(group, pid))
                .at("joining the control group");
            let ready = attached
                .and_then(|()| map_ids(id, pid, mode).at("id map"))
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
            let first = first_host_id(id);
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
    socket: OwnedFd,
    meter: Meter,
    start: &Start,
    filter: &[u8],
    mode: Mode,
    trees: Trees,
) -> ! {
    // The gate opens when ids are mapped and the control group is joined; it closes unopened if the helper gave up.
    let mut byte = [0];
    if !matches!(sys::read(gate.as_raw_fd(), &mut byte), Ok(1)) {
        sys::exit(1);
    }
    match settle(socket, meter, start, filter, mode, trees) {
        Ok(inside) => pid1::serve(&inside),
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
    trees: Trees,
) -> Result<Inside<'a>, (RawFd, Failure)> {
    let raw = socket.as_raw_fd();
    let (socket, meter, trees) = keep(socket, meter, trees)
        .at("descriptors")
        .map_err(|f| (raw, f))?;
    let raw = socket.as_raw_fd();
    let own_id = match mode {
        Mode::Root => 0,
        Mode::User => TOOL_ID,
    };
    let areas = confine(start, filter, mode, own_id, trees).map_err(|f| (raw, f))?;
    let rules = landlock::prepare(start.rootfs.is_some())
        .at("landlock")
        .map_err(|f| (raw, f))?;
    let signals = sys::sigchld_fd().at("signals").map_err(|f| (raw, f))?;
    Ok(Inside {
        socket,
        signals,
        meter,
        rules,
        start,
        areas,
        own_id,
    })
}

fn confine(
    start: &Start,
    filter: &[u8],
    mode: Mode,
    own_id: u32,
    trees: Trees,
) -> Result<Vec<Area>, Failure> {
    sys::become_id(own_id, own_id, mode == Mode::Root).at("user")?;
    let _ = sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as _, 0);
    let areas = mounts(start, own_id, &trees)?;
    // The overlays have mounts of their own by now.
    drop(trees);
    // After the group was joined, so that it is what this namespace calls its root.
    let _ = sys::unshare(libc::CLONE_NEWCGROUP);
    sys::loopback_up().at("loopback")?;
    // SAFETY: no memory is involved.
    unsafe { libc::umask(0o022) };
    std::env::set_current_dir("/work").at("/work")?;
    sys::setrlimit(libc::RLIMIT_CORE, 0).at("core limit")?;
    sys::drop_bounding();
    sys::set_capabilities(KEPT).at("capabilities")?;
    sys::prctl(libc::PR_SET_DUMPABLE, 0, 0).at("dumpable")?;
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0).at("no_new_privs")?;
    sys::install_filter(filter).at("system call filter")?;
    Ok(areas)
}

/// Where the root of one's own is put together, and what lies in every sandbox's root beside an image's own.
const NEW_ROOT: &str = "/run";
const MOUNT_POINTS: [&str; 4] = ["dev", "proc", "work", "tmp"];
const TOOLS: &str = "/opt/drillyard/bin";

/// One tmpfs carries every place that can be written, so that its size bounds them together.
fn mounts(start: &Start, own_id: u32, trees: &Trees) -> Result<Vec<Area>, Failure> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    let options = format!(
        "mode=0755,size={},nr_inodes={}",
        start.limits.disk_bytes, start.limits.inodes
    );
    sys::mount("disk", "/mnt", Some("tmpfs"), flags, Some(&options)).at("disk")?;
    let mut areas = Vec::new();
    let mut at = "";
    if !trees.root.is_empty() {
        let given = trees.root.len() > 1;
        let upper = place("root", 0o755, own_id)?;
        furnish(start, own_id, given)?;
        let overlay = overlay(&upper, NEW_ROOT, &trees.root)?;
        areas.push(Area::new(c"/", "/", Some(overlay)));
        at = NEW_ROOT;
        sys::mount(
            "/dev",
            &format!("{at}/dev"),
            None,
            libc::MS_BIND | libc::MS_REC,
            None,
        )
        .at("/dev")?;
        if std::path::Path::new(TOOLS).exists() {
            sys::mount(TOOLS, &format!("{at}{TOOLS}"), None, libc::MS_BIND, None).at(TOOLS)?;
        }
    }
    for (name, to, prefix, mode) in [
        ("work", c"/work", "", 0o755),
        ("tmp", c"/tmp", "/tmp/", 0o1777),
        ("shm", c"/dev/shm", "/dev/shm/", 0o1777),
    ] {
        let from = place(name, mode, own_id)?;
        let target = format!("{at}{}", to.to_string_lossy());
        let over = if name == "work" && !trees.work.is_empty() {
            Some(overlay(&from, &target, &trees.work)?)
        } else {
            sys::mount(&from, &target, None, libc::MS_BIND, None).at(&target)?;
            None
        };
        areas.push(Area::new(to, prefix, over));
    }
    sys::umount_detach("/mnt").at("disk")?;
    let proc = format!("{at}/proc");
    sys::mount("proc", &proc, Some("proc"), flags | libc::MS_NOEXEC, None).at("proc")?;
    // Locks on host files whose holder has ended show there with the host's numbers.
    let locks = format!("{proc}/locks");
    if std::path::Path::new(&locks).exists() {
        sys::mount("/dev/null", &locks, None, libc::MS_BIND, None).at(&locks)?;
    }
    if !at.is_empty() {
        for part in ["sys", "sysrq-trigger", "irq", "bus", "fs"] {
            let part = format!("{proc}/{part}");
            if std::path::Path::new(&part).exists() {
                let read_only = libc::MOUNT_ATTR_RDONLY;
                sys::mount(&part, &part, None, libc::MS_BIND, None).at(&part)?;
                sys::mount_setattr(&part, read_only, false).at(&part)?;
            }
        }
        std::env::set_current_dir(at).at("root")?;
        sys::pivot_root_here().at("pivot_root")?;
    }
    Ok(areas)
}

/// A directory of the tmpfs.
fn place(name: &str, mode: u32, own_id: u32) -> Result<String, Failure> {
    let path = format!("/mnt/{name}");
    std::fs::create_dir(&path).at(&path)?;
    let c_path = sys::c(path.as_str()).at(&path)?;
    if mode == 0o755 && own_id != TOOL_ID {
        sys::chown_at(libc::AT_FDCWD, &c_path, TOOL_ID, TOOL_ID).at(&path)?;
    }
    // SAFETY: a C string that outlives the call.
    sys::check(unsafe { libc::chmod(c_path.as_ptr(), mode) }).at(&path)?;
    Ok(path)
}

/// Puts into the upper directory of a root what every sandbox has, before an image can say what is a link. What lies above
/// the image already was furnished when it came to be; only mount points must be directories again.
fn furnish(start: &Start, own_id: u32, given: bool) -> Result<(), Failure> {
    let mut parents = std::collections::BTreeSet::new();
    let dir = |path: &str, parents: &mut std::collections::BTreeSet<String>| {
        let mut made = String::from("root");
        for part in path.split('/').filter(|p| !p.is_empty()) {
            made = format!("{made}/{part}");
            if parents.insert(made.clone()) {
                place(&made, 0o755, own_id)?;
            }
        }
        Ok::<_, Failure>(())
    };
    for point in MOUNT_POINTS {
        dir(point, &mut parents)?;
    }
    if std::path::Path::new(TOOLS).exists() {
        dir(TOOLS, &mut parents)?;
    }
    if given {
        return Ok(());
    }
    for made in &start.made {
        let cut = made.inside.rfind('/').unwrap_or(0);
        dir(&made.inside[..cut], &mut parents)?;
        let path = format!("/mnt/root{}", made.inside);
        std::fs::write(&path, &made.text).at(&made.inside)?;
        if own_id != TOOL_ID {
            let path = sys::c(path).at(&made.inside)?;
            sys::chown_at(libc::AT_FDCWD, &path, TOOL_ID, TOOL_ID).at(&made.inside)?;
        }
    }
    Ok(())
}

/// Mounts an overlay; `user.` attributes are all that a user namespace may set (others fail only later, with EIO).
fn overlay(upper: &str, target: &str, lower: &[OwnedFd]) -> Result<Overlay, Failure> {
    let step = format!("overlay on {target}");
    let work = format!("{upper}.overlay");
    std::fs::create_dir(&work).at(&step)?;
    let mut names = Vec::new();
    for (n, tree) in lower.iter().enumerate() {
        let name = format!("/mnt/l{n}");
        std::fs::create_dir(&name).at(&step)?;
        world::move_mount(tree, &name).at(&step)?;
        names.push(name);
    }
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    let below = names.join(":");
    let options = format!("lowerdir={below},upperdir={upper},workdir={work},userxattr");
    sys::mount("overlay", target, Some("overlay"), flags, Some(&options)).at(&step)?;
    let open = |path: &str| {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        sys::openat(libc::AT_FDCWD, &sys::c(path).at(&step)?, flags, 0).at(&step)
    };
    let upper = open(upper)?;
    // What the layers show together, for telling what changed. The descriptor keeps the mount.
    let lower = if let [one] = names.as_slice() {
        open(one)?
    } else {
        let view = format!("{work}/view");
        std::fs::create_dir(&view).at(&step)?;
        let options = format!("lowerdir={below},userxattr");
        let read_only = flags | libc::MS_RDONLY;
        sys::mount("overlay", &view, Some("overlay"), read_only, Some(&options)).at(&step)?;
        let fd = open(&view)?;
        sys::umount_detach(&view).at(&step)?;
        std::fs::remove_dir(&view).at(&step)?;
        fd
    };
    for name in names {
        sys::umount_detach(&name).at(&step)?;
        std::fs::remove_dir(&name).at(&step)?;
    }
    Ok(Overlay { upper, lower })
}

/// Keeps the socket and the counters, closes every other descriptor, and points 0, 1 and 2 to /dev/null.
fn keep(socket: OwnedFd, meter: Meter, trees: Trees) -> std::io::Result<(OwnedFd, Meter, Trees)> {
    const HIGH: RawFd = 500;
    let lift = |fd: OwnedFd| -> std::io::Result<OwnedFd> {
        // SAFETY: no memory is involved.
        let r = sys::check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH) })?;
        std::mem::forget(fd);
        // SAFETY: just made for us.
        Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(r) })
    };
    let null = sys::openat(libc::AT_FDCWD, c"/dev/null", libc::O_RDWR, 0)?;
    let socket = lift(socket)?;
    let meter = Meter {
        peak: meter.peak.map(lift).transpose()?,
        oom: meter.oom.map(lift).transpose()?,
        cpu: meter.cpu.map(lift).transpose()?,
        pids: meter.pids.map(lift).transpose()?,
    };
    let all = |list: Vec<OwnedFd>| {
        list.into_iter()
            .map(lift)
            .collect::<std::io::Result<Vec<_>>>()
    };
    let trees = Trees {
        work: all(trees.work)?,
        root: all(trees.root)?,
    };
    for fd in 0..3 {
        sys::dup3(null.as_raw_fd(), fd)?;
    }
    std::mem::forget(null);
    // SAFETY: closes what the helper holds; its values are never used or dropped in this process.
    sys::check(unsafe { libc::syscall(libc::SYS_close_range, 3, HIGH - 1, 0) } as i32)?;
    let last = [
        Some(&socket),
        meter.peak.as_ref(),
        meter.oom.as_ref(),
        meter.cpu.as_ref(),
        meter.pids.as_ref(),
    ]
    .into_iter()
    .flatten()
    .chain(&trees.work)
    .chain(&trees.root)
    .map(AsRawFd::as_raw_fd)
    .max()
    .unwrap_or(HIGH);
    sys::close_from(last + 1)?;
    Ok((socket, meter, trees))
}
