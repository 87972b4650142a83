//! A second lock on the file system: even if a mount were writable by mistake, tools write only where they should, and
//! signals and abstract sockets of theirs stay among themselves.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::sys;

const WRITE_FILE: u64 = 1 << 1;
const REMOVE_DIR: u64 = 1 << 4;
const REMOVE_FILE: u64 = 1 << 5;
const MAKE_CHAR: u64 = 1 << 6;
const MAKE_DIR: u64 = 1 << 7;
const MAKE_REG: u64 = 1 << 8;
const MAKE_SOCK: u64 = 1 << 9;
const MAKE_FIFO: u64 = 1 << 10;
const MAKE_BLOCK: u64 = 1 << 11;
const MAKE_SYM: u64 = 1 << 12;
/// Version 2 of the interface.
const REFER: u64 = 1 << 13;
/// Version 3.
const TRUNCATE: u64 = 1 << 14;

/// Flag that asks for the interface's version.
const CREATE_RULESET_VERSION: u32 = 1;
/// The kind of a rule about a directory.
const PATH_BENEATH: u32 = 1;

/// Version 6: abstract unix sockets and signals.
const SCOPES: u64 = 0b11;

#[repr(C)]
#[derive(Default)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: i32,
}

/// The version of the interface this kernel has; 0 for none.
pub fn version() -> i64 {
    // SAFETY: asks for the version only; no memory is involved.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0,
            CREATE_RULESET_VERSION,
        )
    };
    version.max(0)
}

/// Prepares the rules once; nothing where the kernel has no such interface. Where the root is the sandbox's own copy,
/// tools may write all of it: rules only ever add, so /proc/sys and its like are read-only mounts there.
pub fn prepare(own_root: bool) -> io::Result<Option<OwnedFd>> {
    let version = version();
    if version == 0 {
        return Ok(None);
    }
    let mut handled = WRITE_FILE
        | REMOVE_DIR
        | REMOVE_FILE
        | MAKE_CHAR
        | MAKE_DIR
        | MAKE_REG
        | MAKE_SOCK
        | MAKE_FIFO
        | MAKE_BLOCK
        | MAKE_SYM;
    if version >= 2 {
        handled |= REFER;
    }
    if version >= 3 {
        handled |= TRUNCATE;
    }
    let attr = RulesetAttr {
        handled_access_fs: handled,
        handled_access_net: 0,
        scoped: if version >= 6 { SCOPES } else { 0 },
    };
    // Older kernels know a shorter structure and refuse a longer one unless the rest is zero, which it is.
    // SAFETY: pointer and size belong together.
    let raw = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const attr,
            size_of_val(&attr),
            0,
        )
    };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    let rules = unsafe { OwnedFd::from_raw_fd(raw as i32) };
    let everything = handled & !(MAKE_CHAR | MAKE_BLOCK);
    let in_place = handled & (WRITE_FILE | TRUNCATE);
    for (path, allowed_access) in [
        (c"/", if own_root { everything } else { 0 }),
        (c"/work", everything),
        (c"/tmp", everything),
        (c"/dev/shm", everything),
        // Not /proc: nothing there is a tool's to write, its own place in the kernel's order of killing least of all.
        (c"/dev", in_place),
    ] {
        if allowed_access == 0 {
            continue;
        }
        let dir = sys::openat(libc::AT_FDCWD, path, libc::O_PATH | libc::O_DIRECTORY, 0)?;
        let rule = PathBeneathAttr {
            allowed_access,
            parent_fd: dir.as_raw_fd(),
        };
        // SAFETY: the rule outlives the call.
        let r = unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                rules.as_raw_fd(),
                PATH_BENEATH,
                &raw const rule,
                0,
            )
        };
        if r < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(Some(rules))
}

/// Puts this process and all it starts under the rules for good.
pub fn enter(rules: &OwnedFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let r = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
