//! How one sandbox comes to be: cloned from the helper with namespaces of its own, it sets itself up and turns PID 1.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use drillyard_sandbox_init::control::{Lower, Start};
use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::Reply;

use crate::cgroup::{Driver, Entrance, Group, Meter};
use crate::counts::Counts;
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
/// Kernel files that show memory, keys and addresses, some without end, and the host's numbers (of locks whose holder has
/// ended): not to be read.
const EMPTY: [&str; 9] = [
    "/proc/kcore",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/keys",
    "/proc/timer_list",
    "/proc/kallsyms",
    "/proc/locks",
];

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

impl Trees {
    fn try_map(
        self,
        mut f: impl FnMut(OwnedFd) -> std::io::Result<OwnedFd>,
    ) -> std::io::Result<Self> {
        let mut all = |list: Vec<OwnedFd>| {
            list.into_iter()
                .map(&mut f)
                .collect::<std::io::Result<Vec<_>>>()
        };
        Ok(Self {
            work: all(self.work)?,
            root: all(self.root)?,
        })
    }
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
            // The gate opens when ids are mapped; it closes unopened if the helper gave up.
            if !matches!(sys::read(gate.as_raw_fd(), &mut [0]), Ok(1)) {
                sys::exit(1);
            }
            live(match entered {
                Ok(()) => settle(inner, meter, start, filter, mode, trees),
                Err(failure) => Err((inner.into_raw_fd(), failure)),
            })
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

/// The life of the child that is set up: serve, end with the process. One that could not be says so on its socket.
fn live(settled: Result<Inside<'_>, (RawFd, Failure)>) -> ! {
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
    trees: Trees,
) -> Result<Inside<'a>, (RawFd, Failure)> {
    let raw = socket.as_raw_fd();
    let (socket, meter, trees) = keep(socket, meter, trees)
        .at("descriptors")
        .map_err(|f| (raw, f))?;
    // Stays open where something fails, so that it can be said.
    let raw = socket.into_raw_fd();
    let own_id = match mode {
        Mode::Root => 0,
        Mode::User => TOOL_ID,
    };
    let (areas, counts, listener) =
        confine(start, filter, mode, own_id, trees).map_err(|f| (raw, f))?;
    let rules = landlock::prepare(start.rootfs.is_some())
        .at("landlock")
        .map_err(|f| (raw, f))?;
    let signals = sys::sigchld_fd().at("signals").map_err(|f| (raw, f))?;
    let stack = sys::Stack::new().at("stack").map_err(|f| (raw, f))?;
    Ok(Inside {
        // SAFETY: taken from its owner above.
        socket: unsafe { OwnedFd::from_raw_fd(raw) },
        replies: None,
        signals,
        meter,
        counts,
        rules,
        stack,
        start,
        areas,
        own_id,
        listener,
        relay: None,
        shares_ids: false,
    })
}

/// Shuts the process in; returns where files can be written, the counters, and the socket at which the program outside
/// takes connections, if there is a network.
fn confine(
    start: &Start,
    filter: &[u8],
    mode: Mode,
    own_id: u32,
    trees: Trees,
) -> Result<(Vec<Area>, Counts, Option<OwnedFd>), Failure> {
    sys::become_id(own_id, own_id, mode == Mode::Root).at("user")?;
    let _ = sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as _, 0);
    let areas = mounts(start, own_id, &trees)?;
    // The overlays have mounts of their own by now.
    drop(trees);
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
    Ok((areas, counts, listener))
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
    // A program that runs as the host's root without its privileges makes sandboxes whose tools own the kernel's files.
    for path in READ_ONLY {
        match world::read_only(&format!("{at}{path}")) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            done => done.at(path)?,
        }
    }
    for path in EMPTY {
        let target = format!("{at}{path}");
        match sys::mount("/dev/null", &target, None, libc::MS_BIND, None) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            done => done.at(path)?,
        }
    }
    if !at.is_empty() {
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
    /// Above the numbers that are given out below, which what is kept may have now; the trees come on top.
    const AWAY: RawFd = 16;
    let away = AWAY + (trees.work.len() + trees.root.len()) as RawFd;
    let lift = |fd: OwnedFd| -> std::io::Result<OwnedFd> {
        // SAFETY: no memory is involved.
        let r = sys::check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, away) })?;
        std::mem::forget(fd);
        // SAFETY: just made for us.
        Ok(unsafe { OwnedFd::from_raw_fd(r) })
    };
    let null = lift(sys::openat(libc::AT_FDCWD, c"/dev/null", libc::O_RDWR, 0)?)?;
    let socket = lift(socket)?;
    let meter = meter.try_map(lift)?;
    let trees = trees.try_map(lift)?;
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
    let trees = trees.try_map(&mut place)?;
    sys::close_from(next)?;
    Ok((socket, meter, trees))
}
