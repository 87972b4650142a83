//! System calls, thinly wrapped: each returns an `io::Result` and takes ordinary Rust types.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use drillyard_sandbox_init::init::Space;
use libc::{c_int, c_long, c_ulong};

/// An error that names the step it happened in.
#[derive(Debug)]
pub struct Failure {
    pub step: String,
    pub error: io::Error,
}

/// Puts a step's name to an error.
pub trait At<T> {
    fn at(self, step: &str) -> Result<T, Failure>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: &str) -> Result<T, Failure> {
        self.map_err(|error| Failure {
            step: step.to_owned(),
            error,
        })
    }
}

pub fn check(r: c_int) -> io::Result<c_int> {
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(r)
    }
}

fn check_long(r: c_long) -> io::Result<c_long> {
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(r)
    }
}

pub fn c(text: impl Into<Vec<u8>>) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Makes an owned descriptor of a system call's result.
fn fd(r: c_long) -> io::Result<OwnedFd> {
    let raw = check_long(r)? as RawFd;
    // SAFETY: the kernel just made this descriptor for us; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// The two ways back from a clone.
pub enum Cloned {
    Child,
    Parent(i32),
}

/// `clone3` without a stack of its own: like `fork`, with namespaces.
pub fn clone3(flags: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Cloned> {
    // SAFETY: an all-zero clone_args is valid.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(dir) = cgroup {
        args.flags |= 0x2_0000_0000; // CLONE_INTO_CGROUP
        args.cgroup = dir.as_raw_fd() as u64;
    }
    // SAFETY: single-threaded caller, no shared memory: the child goes on with a copy of everything.
    let r = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of_val(&args)) };
    Ok(match check_long(r)? {
        0 => Cloned::Child,
        pid => Cloned::Parent(pid as i32),
    })
}

pub fn fork() -> io::Result<Cloned> {
    // SAFETY: single-threaded caller.
    Ok(match check(unsafe { libc::fork() })? {
        0 => Cloned::Child,
        pid => Cloned::Parent(pid),
    })
}

/// Memory for [`spawn`]'s child to run on, with a guard below it.
pub struct Stack {
    base: *mut libc::c_void,
}

impl Stack {
    const BYTES: usize = 256 << 10;
    const GUARD: usize = 4 << 10;

    pub fn new() -> io::Result<Self> {
        // SAFETY: a new mapping, referred to by nothing yet.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the first page of the mapping just made.
        check(unsafe { libc::mprotect(base, Self::GUARD, libc::PROT_NONE) })?;
        Ok(Self { base })
    }
}

/// Runs `child` in a new process that shares this one's memory, as `vfork` does: this one goes on when the child has
/// executed a program or ended (with the number that `child` gives). A third cheaper than [`fork`], which copies page
/// tables and then pages. The child must free and allocate nothing that lasts.
pub fn spawn<F: FnMut() -> i32>(stack: &Stack, mut child: F) -> io::Result<i32> {
    extern "C" fn enter<F: FnMut() -> i32>(child: *mut libc::c_void) -> c_int {
        // SAFETY: the pointer that `clone` was given below; the parent waits and touches it no more meanwhile.
        unsafe { (*child.cast::<F>())() }
    }
    // SAFETY: the stack is used by one child at a time, since this process waits for it; without a shared table of
    // descriptors or signal actions the child changes only its own.
    check(unsafe {
        libc::clone(
            enter::<F>,
            stack.base.byte_add(Stack::BYTES),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            (&raw mut child).cast(),
        )
    })
}

/// Ends this process at once, running nothing.
pub fn exit(code: i32) -> ! {
    // SAFETY: always allowed.
    unsafe { libc::_exit(code) }
}

pub fn unshare(flags: c_int) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::unshare(flags) }).map(drop)
}

/// Enters a namespace held by a descriptor.
pub fn setns(namespace: &OwnedFd, kind: c_int) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::setns(namespace.as_raw_fd(), kind) }).map(drop)
}

/// A user namespace that maps one user and one group to a host id: what an id-mapped mount takes.
pub fn id_map(uid: u32, gid: u32, to: u64) -> io::Result<OwnedFd> {
    let (wait, release) = pipe()?;
    match clone3(libc::CLONE_NEWUSER as u64, None)? {
        Cloned::Child => {
            drop(release);
            let _ = read(wait.as_raw_fd(), &mut [0]);
            exit(0)
        }
        Cloned::Parent(pid) => {
            let made = (|| {
                std::fs::write(format!("/proc/{pid}/gid_map"), format!("{gid} {to} 1\n"))?;
                std::fs::write(format!("/proc/{pid}/uid_map"), format!("{uid} {to} 1\n"))?;
                openat(
                    libc::AT_FDCWD,
                    &c(format!("/proc/{pid}/ns/user"))?,
                    libc::O_RDONLY,
                    0,
                )
            })();
            drop(release);
            let _ = kill(pid, libc::SIGKILL);
            let _ = reap(pid, true);
            made
        }
    }
}

/// A user's extended attribute of an open file; nothing if it has none.
pub fn attribute(fd: RawFd, name: &CStr) -> Option<Vec<u8>> {
    let mut buffer = [0_u8; 64];
    // SAFETY: a C string, and a pointer and length that belong together.
    let n = unsafe { libc::fgetxattr(fd, name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    Some(buffer[..usize::try_from(n).ok()?].to_vec())
}

/// Moves on to the next data of a sparse file, or to the hole after it; nothing at its end.
pub fn seek(fd: RawFd, from: i64, whence: c_int) -> Option<i64> {
    // SAFETY: no memory is involved.
    let at = unsafe { libc::lseek(fd, from, whence) };
    (at >= 0).then_some(at)
}

pub fn mount(
    source: &str,
    target: &str,
    kind: Option<&str>,
    flags: c_ulong,
    data: Option<&str>,
) -> io::Result<()> {
    let source = c(source)?;
    let target = c(target)?;
    let kind = kind.map(c).transpose()?;
    let data = data.map(c).transpose()?;
    let pointer = |s: &Option<CString>| s.as_ref().map_or(std::ptr::null(), |s| s.as_ptr());
    // SAFETY: all pointers are null or to C strings that outlive the call.
    check(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            pointer(&kind),
            flags,
            pointer(&data).cast(),
        )
    })
    .map(drop)
}

pub fn umount_detach(target: &str) -> io::Result<()> {
    let target = c(target)?;
    // SAFETY: a C string that outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) }).map(drop)
}

/// Sets mount attributes, on everything below too if `recursive`.
pub fn mount_setattr(path: &str, set: u64, recursive: bool) -> io::Result<()> {
    let path = c(path)?;
    // SAFETY: an all-zero mount_attr is valid.
    let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
    attr.attr_set = set;
    let flags = if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: pointers outlive the call, the size is that of the structure.
    check_long(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            &raw const attr,
            size_of_val(&attr),
        )
    })
    .map(drop)
}

pub fn pivot_root_here() -> io::Result<()> {
    // SAFETY: C string literals.
    check_long(unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) })?;
    umount_detach(".")?;
    std::env::set_current_dir("/")
}

pub fn sethostname(name: &str) -> io::Result<()> {
    // SAFETY: pointer and length belong together.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }).map(drop)
}

pub fn socketpair(kind: c_int) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors.
    check(unsafe {
        libc::socketpair(
            libc::AF_UNIX,
            kind | libc::SOCK_CLOEXEC,
            0,
            fds.as_mut_ptr(),
        )
    })?;
    // SAFETY: both were just made for us.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// A pipe: (read end, write end), closed on exec.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors.
    check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: both were just made for us.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

pub fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: a C string that outlives the call.
    fd(c_long::from(unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC)
    }))
}

pub fn openat(dir: RawFd, name: &CStr, flags: c_int, mode: u32) -> io::Result<OwnedFd> {
    // SAFETY: a C string that outlives the call.
    fd(c_long::from(unsafe {
        libc::openat(dir, name.as_ptr(), flags | libc::O_CLOEXEC, mode)
    }))
}

pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }).map(drop)
}

pub fn set_blocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, 0) }).map(drop)
}

/// Reads once; 0 at the end.
pub fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        // SAFETY: pointer and length belong together.
        let n = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
        if n >= 0 {
            return Ok(n as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub fn pread(fd: RawFd, buffer: &mut [u8], at: i64) -> io::Result<usize> {
    // SAFETY: pointer and length belong together.
    let n = unsafe { libc::pread(fd, buffer.as_mut_ptr().cast(), buffer.len(), at) };
    check_long(n as c_long).map(|n| n as usize)
}

/// Writes once.
pub fn write(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    loop {
        // SAFETY: pointer and length belong together.
        let n = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
        if n >= 0 {
            return Ok(n as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Writes everything.
pub fn write_all(fd: RawFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        bytes = &bytes[write(fd, bytes)?..];
    }
    Ok(())
}

pub fn close_from(first: c_int) -> io::Result<()> {
    // SAFETY: closes descriptors nothing refers to any more; callers go on with lower ones only.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, first, c_int::MAX, 0) }).map(drop)
}

pub fn dup3(from: RawFd, to: RawFd) -> io::Result<()> {
    if from == to {
        // SAFETY: no memory is involved.
        return check(unsafe { libc::fcntl(from, libc::F_SETFD, 0) }).map(drop);
    }
    // SAFETY: no memory is involved; `to` is a number the caller owns.
    check(unsafe { libc::dup2(from, to) }).map(drop)
}

pub fn prctl(option: c_int, a: c_ulong, b: c_ulong) -> io::Result<c_int> {
    // SAFETY: only options with integer arguments are used.
    check(unsafe { libc::prctl(option, a, b, 0 as c_ulong, 0 as c_ulong) })
}

/// Names this process in listings.
pub fn set_name(name: &CStr) {
    // SAFETY: a C string that outlives the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

pub fn kill(pid: i32, signal: c_int) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

pub fn setrlimit(resource: libc::__rlimit_resource_t, value: u64) -> io::Result<()> {
    // SAFETY: an all-zero rlimit is valid.
    let mut now: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: room for one structure.
    check(unsafe { libc::getrlimit(resource, &raw mut now) })?;
    // Never above the hard limit we were given: raising it needs a privilege.
    let value = value.min(now.rlim_max);
    let limit = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: reads one structure.
    check(unsafe { libc::setrlimit(resource, &raw const limit) }).map(drop)
}

/// What `wait4` tells of one ended process.
pub struct Reaped {
    pub pid: i32,
    pub status: c_int,
    pub usage: libc::rusage,
}

/// Reaps one ended child, `Ok(None)` when all still run, `Err(ECHILD)` when there is none.
pub fn reap(pid: i32, block: bool) -> io::Result<Option<Reaped>> {
    let mut status = 0;
    // SAFETY: an all-zero rusage is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let options = if block { 0 } else { libc::WNOHANG };
    loop {
        // SAFETY: room for one status and one structure.
        let r =
            unsafe { libc::wait4(pid, &raw mut status, options | libc::__WALL, &raw mut usage) };
        if r > 0 {
            return Ok(Some(Reaped {
                pid: r,
                status,
                usage,
            }));
        }
        if r == 0 {
            return Ok(None);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Blocks SIGCHLD and gives a descriptor that becomes readable when one arrives.
pub fn sigchld_fd() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised before it is used.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        check(libc::sigprocmask(
            libc::SIG_BLOCK,
            &raw const set,
            std::ptr::null_mut(),
        ))?;
        fd(c_long::from(libc::signalfd(
            -1,
            &raw const set,
            libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
        )))
    }
}

/// Empties a signal descriptor.
pub fn drain(fd: RawFd) {
    let mut buffer = [0; 128 * 8];
    while matches!(read(fd, &mut buffer), Ok(n) if n > 0) {}
}

/// Every signal as at the start of a program: none blocked, none ignored.
pub fn reset_signals() {
    // SAFETY: the set is initialised before it is used; default actions are always allowed.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// Waits for events; the timeout in milliseconds, -1 for ever.
pub fn poll(fds: &mut [libc::pollfd], timeout_ms: c_int) -> io::Result<()> {
    // SAFETY: pointer and length belong together.
    let r = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
    if r < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        for f in fds {
            f.revents = 0;
        }
    }
    Ok(())
}

pub fn pollfd(fd: RawFd) -> libc::pollfd {
    libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }
}

/// Becomes another user for good, without supplementary groups where they can be dropped.
pub fn become_id(uid: u32, gid: u32, drop_groups: bool) -> io::Result<()> {
    // SAFETY: no memory is involved. Raw calls, since the library's would signal threads we do not have.
    unsafe {
        if drop_groups {
            check_long(libc::syscall(
                libc::SYS_setgroups,
                0,
                std::ptr::null::<u32>(),
            ))?;
        }
        check_long(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        check_long(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    }
    Ok(())
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Keeps exactly these capabilities (bits), effective and permitted, none inheritable.
pub fn set_capabilities(bits: u64) -> io::Result<()> {
    let header = CapHeader {
        version: 0x2008_0522,
        pid: 0,
    };
    let half = |shift: u32| CapData {
        effective: (bits >> shift) as u32,
        permitted: (bits >> shift) as u32,
        inheritable: 0,
    };
    let data = [half(0), half(32)];
    // SAFETY: version 3 of the interface reads one header and two data structures.
    check_long(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) })
        .map(drop)
}

/// Empties the bounding and ambient sets: nothing can be regained by executing a file.
pub fn drop_bounding() {
    let _ = prctl(
        libc::PR_CAP_AMBIENT,
        libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong,
        0,
    );
    for cap in 0..64 {
        if prctl(libc::PR_CAPBSET_DROP, cap, 0).is_err() {
            break;
        }
    }
}

/// Installs a system call filter given as an array of `struct sock_filter`.
pub fn install_filter(program: &[u8]) -> io::Result<()> {
    let count = program.len() / 8;
    if count == 0 || !program.len().is_multiple_of(8) || count > 4096 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let filters: Vec<libc::sock_filter> = program
        .chunks_exact(8)
        .map(|b| libc::sock_filter {
            code: u16::from_le_bytes([b[0], b[1]]),
            jt: b[2],
            jf: b[3],
            k: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
        })
        .collect();
    let prog = libc::sock_fprog {
        len: count as u16,
        filter: filters.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program during the call.
    check(unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            c_ulong::from(libc::SECCOMP_MODE_FILTER),
            &raw const prog,
        )
    })
    .map(drop)
}

/// Brings the loopback interface of this network namespace up.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: no memory is involved.
    let socket = fd(c_long::from(unsafe {
        libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0)
    }))?;
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: the request outlives the call.
    check(unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            &raw const request,
        )
    })
    .map(drop)
}

/// A TCP socket that listens on loopback. It belongs to this network namespace for good, whoever holds it later.
pub fn listen_on_loopback(port: u16) -> io::Result<OwnedFd> {
    const BACKLOG: c_int = 128;
    // SAFETY: no memory is involved.
    let socket = fd(c_long::from(unsafe {
        libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
    }))?;
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(std::net::Ipv4Addr::LOCALHOST).to_be(),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: the address outlives the call, the size is its own.
    check(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    })?;
    // SAFETY: no memory is involved.
    check(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) })?;
    Ok(socket)
}

/// Takes the next connection of a listening socket; it does not block.
pub fn accept(listener: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the peer's address is not asked for.
    fd(c_long::from(unsafe {
        libc::accept4(
            listener,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
        )
    }))
}

/// Has small packets sent at once.
pub fn set_nodelay(socket: RawFd) -> io::Result<()> {
    let on: c_int = 1;
    // SAFETY: the value outlives the call, the size is its own.
    check(unsafe {
        libc::setsockopt(
            socket,
            libc::IPPROTO_TCP,
            libc::TCP_NODELAY,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    })
    .map(drop)
}

/// Says to a connection's peer that no more bytes come.
pub fn shutdown_write(socket: RawFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::shutdown(socket, libc::SHUT_WR) }).map(drop)
}

/// Room for one descriptor beside a packet.
#[repr(align(8))]
struct Room([u8; 24]);

/// Sends one packet, with a descriptor if given.
pub fn send(socket: RawFd, bytes: &[u8], pass: Option<RawFd>) -> io::Result<()> {
    let mut iov = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut room = Room([0; 24]);
    // SAFETY: an all-zero msghdr is valid; the control buffer has room for one descriptor and is aligned.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        if let Some(fd) = pass {
            message.msg_control = room.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            std::ptr::write_unaligned(libc::CMSG_DATA(header).cast::<RawFd>(), fd);
        }
        check_long(libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) as c_long)
            .map(drop)
    }
}

/// How full the file system is that a descriptor is on.
pub fn space(fd: RawFd) -> io::Result<Space> {
    // SAFETY: an all-zero statvfs is valid.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: room for one structure.
    check(unsafe { libc::fstatvfs(fd, &raw mut stat) })?;
    Ok(Space {
        bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
        free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
        files: stat.f_files,
        free_files: stat.f_favail,
    })
}

/// Size in bytes and in files of the file system a descriptor is on; no files where it has no such limit.
pub fn size(fd: RawFd) -> io::Result<(u64, u64)> {
    // SAFETY: an all-zero statvfs is valid.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: room for one structure.
    check(unsafe { libc::fstatvfs(fd, &raw mut stat) })?;
    Ok((stat.f_blocks.saturating_mul(stat.f_frsize), stat.f_files))
}

pub fn fstat(fd: RawFd) -> io::Result<libc::stat> {
    // SAFETY: an all-zero stat is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: room for one structure.
    check(unsafe { libc::fstat(fd, &raw mut stat) })?;
    Ok(stat)
}

/// Like `lstat`, relative to a directory.
pub fn stat_at(dir: RawFd, name: &CStr) -> io::Result<libc::stat> {
    // SAFETY: an all-zero stat is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string that outlives the call, room for one structure.
    check(unsafe { libc::fstatat(dir, name.as_ptr(), &raw mut stat, libc::AT_SYMLINK_NOFOLLOW) })?;
    Ok(stat)
}

pub fn readlink_at(dir: RawFd, name: &CStr) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; libc::PATH_MAX as usize];
    // SAFETY: pointer and length belong together.
    let n =
        unsafe { libc::readlinkat(dir, name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    buffer.truncate(check_long(n as c_long)? as usize);
    Ok(buffer)
}

pub fn symlink_at(target: &CStr, dir: RawFd, name: &CStr) -> io::Result<()> {
    // SAFETY: C strings that outlive the call.
    check(unsafe { libc::symlinkat(target.as_ptr(), dir, name.as_ptr()) }).map(drop)
}

pub fn mkdir_at(dir: RawFd, name: &CStr, mode: u32) -> io::Result<()> {
    // SAFETY: a C string that outlives the call.
    check(unsafe { libc::mkdirat(dir, name.as_ptr(), mode) }).map(drop)
}

pub fn unlink_at(dir: RawFd, name: &CStr, flags: c_int) -> io::Result<()> {
    // SAFETY: a C string that outlives the call.
    check(unsafe { libc::unlinkat(dir, name.as_ptr(), flags) }).map(drop)
}

/// Within one directory.
pub fn rename_at(dir: RawFd, from: &CStr, to: &CStr) -> io::Result<()> {
    // SAFETY: C strings that outlive the call.
    check(unsafe { libc::renameat(dir, from.as_ptr(), dir, to.as_ptr()) }).map(drop)
}

pub fn chown_at(dir: RawFd, name: &CStr, uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: a C string that outlives the call.
    check(unsafe {
        libc::fchownat(
            dir,
            name.as_ptr(),
            uid,
            gid,
            libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH,
        )
    })
    .map(drop)
}

pub fn fchmod(fd: RawFd, mode: u32) -> io::Result<()> {
    // SAFETY: no memory is involved.
    check(unsafe { libc::fchmod(fd, mode) }).map(drop)
}

pub fn set_mtime_at(dir: RawFd, name: &CStr, mtime_ns: i64) -> io::Result<()> {
    let (tv_sec, tv_nsec) = drillyard_sandbox_init::time::seconds(mtime_ns);
    let time = libc::timespec { tv_sec, tv_nsec };
    let times = [time, time];
    // SAFETY: a C string and two structures that outlive the call.
    check(unsafe {
        libc::utimensat(
            dir,
            name.as_ptr(),
            times.as_ptr(),
            libc::AT_SYMLINK_NOFOLLOW,
        )
    })
    .map(drop)
}

/// Names in a directory, without `.` and `..`, sorted. Takes a descriptor opened for reading.
pub fn names(dir: &OwnedFd) -> io::Result<Vec<CString>> {
    let mut out = Vec::new();
    let mut buffer = [0_u8; 8 << 10];
    // SAFETY: no memory is involved.
    check_long(unsafe { libc::lseek(dir.as_raw_fd(), 0, libc::SEEK_SET) })?;
    loop {
        // SAFETY: pointer and length belong together.
        let n = check_long(unsafe {
            libc::syscall(
                libc::SYS_getdents64,
                dir.as_raw_fd(),
                buffer.as_mut_ptr(),
                buffer.len(),
            )
        })? as usize;
        if n == 0 {
            break;
        }
        let mut at = 0;
        while at < n {
            let length = usize::from(u16::from_le_bytes([buffer[at + 16], buffer[at + 17]]));
            let name = &buffer[at + 19..at + length];
            let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
            let name = &name[..end];
            if name != b"." && name != b".." {
                out.push(c(name)?);
            }
            at += length;
        }
    }
    out.sort();
    Ok(out)
}

/// The three kinds of System V objects: the call that controls them, its INFO and STAT_ANY commands, and where among
/// the integers of INFO's answer the number of objects stands.
const IPC: [(c_long, c_int, c_int, usize); 3] = [
    (libc::SYS_shmctl, 14, 15, 0),
    (libc::SYS_msgctl, 12, 13, 0),
    (libc::SYS_semctl, 19, 20, 7),
];

/// Asks for a kind's INFO: the highest index in use, and how many objects there are.
fn ipc_info((call, info, _, at): (c_long, c_int, c_int, usize)) -> (c_long, c_int) {
    let mut answer = [0 as c_int; 64];
    let argument = answer.as_mut_ptr();
    // SAFETY: room for the largest of the answers; semctl takes the pointer as its fourth argument, the others as their
    // third and no fourth.
    let highest = unsafe {
        if call == libc::SYS_semctl {
            libc::syscall(call, 0, 0, info, argument)
        } else {
            libc::syscall(call, 0, info, argument)
        }
    };
    (highest, answer[at])
}

/// Whether any System V object is in this ipc namespace.
pub fn has_ipc() -> bool {
    IPC.into_iter().any(|kind| ipc_info(kind).1 > 0)
}

/// Removes every System V object that this user owns.
pub fn remove_ipc() -> io::Result<()> {
    for kind in IPC {
        let (call, _, stat, _) = kind;
        let (highest, _) = ipc_info(kind);
        for index in 0..=highest {
            let mut answer = [0 as c_int; 64];
            let argument = answer.as_mut_ptr();
            // SAFETY: as above.
            unsafe {
                if call == libc::SYS_semctl {
                    let id = libc::syscall(call, index, 0, stat, argument);
                    if id >= 0 {
                        check_long(libc::syscall(call, id, 0, libc::IPC_RMID))?;
                    }
                } else {
                    let id = libc::syscall(call, index, stat, argument);
                    if id >= 0 {
                        check_long(libc::syscall(call, id, libc::IPC_RMID, argument))?;
                    }
                }
            }
        }
    }
    Ok(())
}
