//! The helper's own world: it leaves the host's namespaces and builds the root that every sandbox inherits.
//!
//! The root is a small read-only tmpfs with the allowed host paths bound into it. A sandbox is cloned out of a process
//! that already lives there, so it only adds its private mounts; nothing of the host's tree is reachable from it, not
//! even beneath a mount.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use drillyard_sandbox_init::control::Start;

use crate::sys::{self, At, Failure};

const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET;

/// Whose privileges sandboxes are made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Host root: each sandbox gets two host ids of its own.
    Root,
    /// An ordinary user: everything maps to that user's id.
    User,
}

/// Leaves the host's namespaces; children of this process live in a new pid namespace.
pub fn leave() -> Result<Mode, Failure> {
    // SAFETY: no memory is involved.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    if uid == 0 && may_map_ids() && sys::unshare(NAMESPACES).is_ok() {
        return Ok(Mode::Root);
    }
    sys::unshare(libc::CLONE_NEWUSER).at("new user namespace")?;
    std::fs::write("/proc/self/setgroups", "deny").at("setgroups")?;
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1")).at("group map")?;
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1")).at("user map")?;
    sys::unshare(NAMESPACES).at("new mount, pid, host name, ipc and network namespaces")?;
    Ok(Mode::User)
}

/// Nothing mounted from here on is seen by the host, and the other way round.
pub fn seclude() -> Result<(), Failure> {
    sys::mount("none", "/", None, libc::MS_REC | libc::MS_PRIVATE, None).at("private mounts")
}

/// Whether this root may map any host id: true in the first user namespace, false inside a container's small one.
fn may_map_ids() -> bool {
    std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| {
        let numbers: Vec<u64> = map
            .split_whitespace()
            .filter_map(|n| n.parse().ok())
            .collect();
        numbers == [0, 0, 4_294_967_295]
    })
}

/// Host directories that sandboxes get copies on write of. They hang in a mount namespace that only this process can
/// enter, so that no sandbox inherits a mount of them.
pub struct Store {
    here: OwnedFd,
    there: OwnedFd,
}

const IMAGE: &str = "image";
const LAYERS: &str = "layers";

impl Store {
    /// Puts the image and the layers aside; nothing if there are none. Comes before [`build`].
    pub fn open(start: &Start) -> Result<Option<Self>, Failure> {
        let mut trees = Vec::new();
        for (name, dir) in [(IMAGE, &start.rootfs), (LAYERS, &start.layers)] {
            if let Some(dir) = dir {
                let tree = open_tree(dir).at(dir)?;
                let attributes =
                    libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
                set_attributes(&tree, attributes).at(dir)?;
                trees.push((name, tree));
            }
        }
        if trees.is_empty() {
            return Ok(None);
        }
        let namespace = || {
            let flags = libc::O_RDONLY;
            sys::openat(libc::AT_FDCWD, c"/proc/self/ns/mnt", flags, 0).at("mount namespace")
        };
        let here = namespace()?;
        sys::unshare(libc::CLONE_NEWNS).at("new mount namespace")?;
        let there = namespace()?;
        let base = "/tmp";
        sys::mount(
            "store",
            base,
            Some("tmpfs"),
            libc::MS_NODEV,
            Some("mode=0700"),
        )
        .at("store")?;
        std::env::set_current_dir(base).at("store")?;
        for (name, tree) in trees {
            std::fs::create_dir(name).at(name)?;
            move_mount(&tree, name).at(name)?;
        }
        sys::pivot_root_here().at("store")?;
        let store = Self { here, there };
        sys::setns(&store.here, libc::CLONE_NEWNS).at("store")?;
        Ok(Some(store))
    }

    /// A read-only mount of the image, if `name` is nothing, or of a layer; attached nowhere. With an id, what belongs to
    /// the owner of the directory appears as that (host) id's.
    pub fn tree(&self, name: Option<&str>, id: Option<u64>) -> io::Result<OwnedFd> {
        let path = match name {
            None => format!("/{IMAGE}"),
            Some(name) if name.split('/').all(|p| !p.is_empty() && p != "..") => {
                format!("/{LAYERS}/{name}")
            }
            Some(_) => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        sys::setns(&self.there, libc::CLONE_NEWNS)?;
        let tree = open_tree(&path);
        sys::setns(&self.here, libc::CLONE_NEWNS)?;
        let tree = tree?;
        if let Some(id) = id {
            let stat = sys::fstat(tree.as_raw_fd())?;
            let map = sys::id_map(stat.st_uid, stat.st_gid, id)?;
            // SAFETY: an all-zero mount_attr is valid.
            let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
            attr.attr_set = libc::MOUNT_ATTR_IDMAP;
            attr.userns_fd = map.as_raw_fd() as u64;
            mount_setattr(&tree, &attr).map_err(|error| {
                io::Error::other(format!(
                    "its file system cannot be mounted with other owners (id-mapped): {error}; \
                     use ext4, xfs or btrfs, and Linux 5.19 or newer"
                ))
            })?;
        }
        Ok(tree)
    }
}

/// Builds the sandboxes' root and moves into it for good.
pub fn build(start: &Start) -> Result<(), Failure> {
    // Host trees are held by descriptors first: the new root is assembled on top of /tmp and would hide what lies there.
    let mut trees = Vec::new();
    for bind in &start.binds {
        let step = format!("{} inside", bind.host);
        let tree = open_tree(&bind.host).at(&step)?;
        let device = bind.inside.starts_with("/dev/");
        let attributes = if device {
            // Read-only is the host's node, not what lies behind it: a device can be written all the same.
            libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC
        } else {
            libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV
        };
        set_attributes(&tree, attributes).at(&step)?;
        let directory = Path::new(&bind.host).is_dir();
        trees.push((bind, tree, directory));
    }
    let mut copies = Vec::new();
    for copy in &start.copies {
        copies.push((copy, std::fs::File::open(&copy.host).at(&copy.host)?));
    }
    let base = "/tmp";
    sys::mount(
        "root",
        base,
        Some("tmpfs"),
        libc::MS_NOSUID | libc::MS_NODEV,
        Some("mode=0755,size=256m"),
    )
    .at("root file system")?;
    std::env::set_current_dir(base).at("root file system")?;
    for dir in [
        "dev", "dev/shm", "etc", "mnt", "proc", "run", "tmp", "var", "work",
    ] {
        std::fs::create_dir(dir).at(dir)?;
    }
    for (bind, tree, directory) in trees {
        let inside = inside(&bind.inside).at(&bind.inside)?;
        let parent = Path::new(inside).parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).at(&bind.inside)?;
        if directory {
            std::fs::create_dir_all(inside).at(&bind.inside)?;
        } else {
            std::fs::write(inside, "").at(&bind.inside)?;
        }
        move_mount(&tree, inside).at(&bind.inside)?;
    }
    for (copy, mut from) in copies {
        let inside = inside(&copy.inside).at(&copy.inside)?;
        if let Some(parent) = Path::new(inside).parent() {
            std::fs::create_dir_all(parent).at(&copy.inside)?;
        }
        let mut to = std::fs::File::create(inside).at(&copy.inside)?;
        io::copy(&mut from, &mut to).at(&copy.inside)?;
        sys::fchmod(to.as_raw_fd(), 0o755).at(&copy.inside)?;
    }
    for made in &start.made {
        let inside = inside(&made.inside).at(&made.inside)?;
        if let Some(parent) = Path::new(inside).parent() {
            std::fs::create_dir_all(parent).at(&made.inside)?;
        }
        std::fs::write(inside, &made.text).at(&made.inside)?;
    }
    for link in &start.links {
        let inside = inside(&link.inside).at(&link.inside)?;
        std::os::unix::fs::symlink(&link.target, inside).at(&link.inside)?;
    }
    sys::mount(
        "proc",
        "proc",
        Some("proc"),
        libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
        None,
    )
    .at("proc")?;
    sys::pivot_root_here().at("pivot_root")?;
    sys::mount_setattr(
        "/",
        libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        false,
    )
    .at("read-only root")?;
    sys::sethostname("sandbox").at("host name")
}

/// Makes one place of a mounted tree read-only.
pub fn read_only(path: &str) -> io::Result<()> {
    let tree = open_tree(path)?;
    set_attributes(&tree, libc::MOUNT_ATTR_RDONLY)?;
    move_mount(&tree, path)
}

/// A path inside, relative to the root being built.
fn inside(path: &str) -> io::Result<&str> {
    match path.strip_prefix('/') {
        Some(rest) if !rest.is_empty() && !rest.split('/').any(|part| part == "..") => Ok(rest),
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

fn open_tree(path: &str) -> io::Result<OwnedFd> {
    let path = sys::c(path)?;
    // SAFETY: a C string that outlives the call.
    let r = unsafe {
        libc::syscall(
            libc::SYS_open_tree,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_RECURSIVE as u32,
        )
    };
    if r < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(r as i32) })
}

fn set_attributes(tree: &OwnedFd, set: u64) -> io::Result<()> {
    // SAFETY: an all-zero mount_attr is valid.
    let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
    attr.attr_set = set;
    mount_setattr(tree, &attr)
}

fn mount_setattr(tree: &OwnedFd, attr: &libc::mount_attr) -> io::Result<()> {
    // SAFETY: pointers outlive the call, the size is that of the structure.
    let r = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            std::ptr::from_ref(attr),
            size_of_val(attr),
        )
    };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Attaches a mount that is attached nowhere.
pub fn move_mount(tree: &OwnedFd, to: &str) -> io::Result<()> {
    let to = sys::c(to)?;
    // SAFETY: C strings that outlive the call.
    let r = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            to.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
