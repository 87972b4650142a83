//! Running one tool: start it, read what it prints, end its whole tree, say what it used and what it changed.

#![warn(clippy::arithmetic_side_effects)]

use std::cell::RefCell;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use drillyard_sandbox_init::frame::put;
use drillyard_sandbox_init::init::{Called, End, Reply, Space, What};

use crate::birth::TOOL_ID;
use crate::filetools;
use crate::landlock;
use crate::pid1::Inside;
use crate::relay::Carried;
use crate::scan::Index;
use crate::sys::{self, Cloned};

/// Between asking a tree to end and killing it.
const GRACE: Duration = Duration::from_millis(50);
/// What SIGKILL did not end by then can't be ended.
const UNKILLABLE: Duration = Duration::from_secs(5);
/// Told by the child on its side pipe when it could not start its program: the tool's own fault.
const NO_START: u8 = 1;
/// Told when it could not give up a privilege or take a limit on: nothing was run.
const NO_SETUP: u8 = 2;
/// So much of what a tool printed last is looked at for why it failed.
const LAST_WORDS: usize = 4 << 10;
/// Read from a tool's pipes at once.
const CHUNK: usize = 16 << 10;

const NUL: &str = "an argument holds a NUL byte";

enum Tool<'a> {
    Program {
        candidates: Vec<CString>,
        argv: Vec<CString>,
        env: Vec<CString>,
    },
    Read {
        path: &'a str,
        max: u64,
    },
    Write {
        path: &'a str,
        content: &'a [u8],
    },
    List {
        path: &'a str,
    },
    /// Words that no program can be started with; what is wrong with them.
    Impossible(&'static str),
}

/// Runs a call and answers it; bytes go to `out`.
pub fn run(
    inside: &Inside<'_>,
    index: &mut Index<'_>,
    what: &What,
    body: &[u8],
    timeout_us: u64,
    out: &mut Vec<u8>,
) -> Reply {
    let refused = |message: String| Reply::Refused { message };
    let (tool, stdin) = match prepare(inside, what, body) {
        Ok(prepared) => prepared,
        Err(message) => return refused(message),
    };
    match call(
        inside,
        index,
        &tool,
        stdin,
        Duration::from_micros(timeout_us),
        out,
    ) {
        Ok(called) => Reply::Called(Box::new(called)),
        Err(error) => Reply::NotStarted {
            message: error.to_string(),
        },
    }
}

fn prepare<'a>(
    inside: &Inside<'_>,
    what: &'a What,
    body: &'a [u8],
) -> Result<(Tool<'a>, &'a [u8]), String> {
    // Words no system call can carry are the caller's mistake, like a program that isn't there.
    let impossible = |why| Ok((Tool::Impossible(why), &[][..]));
    let nul = |_| String::from(NUL);
    let outside = || String::from("content lies outside the message");
    let env = || {
        let env = inside.start.env.iter();
        env.filter_map(|e| CString::new(e.as_str()).ok()).collect()
    };
    Ok(match what {
        What::Shell { command } if command.contains('\0') => return impossible(NUL),
        What::Exec { argv, .. } if argv.is_empty() => return impossible("no program is named"),
        What::Exec { argv, .. } if argv.iter().any(|a| a.contains('\0')) => {
            return impossible(NUL);
        }
        What::Shell { command } => {
            let shell = CString::new(inside.start.shell.as_str()).map_err(nul)?;
            let argv = vec![
                shell.clone(),
                c"-c".to_owned(),
                CString::new(command.as_str()).map_err(nul)?,
            ];
            (
                Tool::Program {
                    candidates: vec![shell],
                    argv,
                    env: env(),
                },
                &[][..],
            )
        }
        What::Exec { argv, stdin } => {
            let program = argv.first().ok_or("no program is named")?;
            let candidates = if program.contains('/') {
                vec![CString::new(program.as_str()).map_err(nul)?]
            } else {
                let path = inside
                    .start
                    .env
                    .iter()
                    .find_map(|e| e.strip_prefix("PATH="));
                path.unwrap_or("/usr/bin:/bin")
                    .split(':')
                    .map(|dir| CString::new(format!("{dir}/{program}")).map_err(nul))
                    .collect::<Result<_, _>>()?
            };
            let argv = argv
                .iter()
                .map(|a| CString::new(a.as_str()).map_err(nul))
                .collect::<Result<_, _>>()?;
            (
                Tool::Program {
                    candidates,
                    argv,
                    env: env(),
                },
                stdin.of(body).ok_or_else(outside)?,
            )
        }
        What::ReadFile { path, max_bytes } => (
            Tool::Read {
                path,
                max: (*max_bytes).min(inside.start.limits.output_bytes),
            },
            &[][..],
        ),
        What::WriteFile { path, content } => (
            Tool::Write {
                path,
                content: content.of(body).ok_or_else(outside)?,
            },
            &[][..],
        ),
        What::ListDir { path } => (Tool::List { path }, &[][..]),
    })
}

/// One stream of a tool.
struct Stream {
    pipe: Option<OwnedFd>,
    kept: Vec<u8>,
    total: u64,
}

impl Stream {
    /// Reads what is there; true once more than `limit` has come.
    fn drain(&mut self, limit: u64, buffer: &mut [u8]) -> bool {
        while let Some(pipe) = &self.pipe {
            match sys::read(pipe.as_raw_fd(), buffer) {
                Ok(0) => self.pipe = None,
                Ok(n) => {
                    self.total = self.total.saturating_add(n as u64);
                    let room = (limit as usize).saturating_sub(self.kept.len());
                    self.kept.extend_from_slice(&buffer[..n.min(room)]);
                    if self.total > limit {
                        return true;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => self.pipe = None,
            }
        }
        false
    }
}

/// What reaped processes used.
#[derive(Default)]
struct Used {
    user_us: u64,
    system_us: u64,
    peak_bytes: u64,
    read_bytes: u64,
    written_bytes: u64,
    /// The first process' end.
    status: Option<i32>,
}

impl Used {
    fn add(&mut self, ended: &sys::Reaped, first: i32) {
        let us = |t: libc::timeval| {
            let seconds = (t.tv_sec as u64).saturating_mul(1_000_000);
            seconds.saturating_add(t.tv_usec as u64)
        };
        let times = |n: libc::c_long, of: u64| (n as u64).saturating_mul(of);
        let add = |sum: &mut u64, more| *sum = sum.saturating_add(more);
        add(&mut self.user_us, us(ended.usage.ru_utime));
        add(&mut self.system_us, us(ended.usage.ru_stime));
        self.peak_bytes = self.peak_bytes.max(times(ended.usage.ru_maxrss, 1024));
        add(&mut self.read_bytes, times(ended.usage.ru_inblock, 512));
        add(&mut self.written_bytes, times(ended.usage.ru_oublock, 512));
        if ended.pid == first {
            self.status = Some(ended.status);
        }
    }

    /// Reaps all that ended; true when no child is left.
    fn reap(&mut self, first: i32) -> bool {
        loop {
            match sys::reap(-1, false) {
                Ok(Some(ended)) => self.add(&ended, first),
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }
}

fn call(
    inside: &Inside<'_>,
    index: &mut Index<'_>,
    tool: &Tool<'_>,
    stdin: &[u8],
    timeout: Duration,
    out: &mut Vec<u8>,
) -> io::Result<Called> {
    let limit = inside.start.limits.output_bytes;
    let stdin = if stdin.is_empty() {
        sys::openat(libc::AT_FDCWD, c"/dev/null", libc::O_RDONLY, 0)?
    } else {
        let memory = sys::memfd(c"stdin")?;
        sys::write_all(memory.as_raw_fd(), stdin)?;
        // SAFETY: no memory is involved.
        unsafe { libc::lseek(memory.as_raw_fd(), 0, libc::SEEK_SET) };
        memory
    };
    let (out_read, out_write) = sys::pipe()?;
    let (err_read, err_write) = sys::pipe()?;
    let (side_read, side_write) = sys::pipe()?;
    let full_before = full(&spaces());
    let peak_anew = inside.meter.reset_peak();
    let before = inside.meter.read();
    let counted_before = inside.counts.read();
    let started = Instant::now();
    let streams = [&stdin, &out_write, &err_write].map(AsRawFd::as_raw_fd);
    let side = side_write.as_raw_fd();
    let first = if let Tool::Program {
        candidates,
        argv,
        env,
    } = tool
    {
        let (argv, env) = (pointers(argv), pointers(env));
        let execute = || Err(execute(candidates, &argv, &env));
        sys::spawn(&inside.stack, || child(inside, streams, side, execute))?
    } else {
        match sys::fork()? {
            Cloned::Child => sys::exit(child(inside, streams, side, || Ok(file_tool(tool)))),
            Cloned::Parent(pid) => pid,
        }
    };
    drop((stdin, out_write, err_write, side_write));
    sys::set_nonblocking(out_read.as_raw_fd())?;
    sys::set_nonblocking(err_read.as_raw_fd())?;
    sys::set_nonblocking(side_read.as_raw_fd())?;
    let mut stdout = Stream {
        pipe: Some(out_read),
        kept: Vec::new(),
        total: 0,
    };
    let mut stderr = Stream {
        pipe: Some(err_read),
        kept: Vec::new(),
        total: 0,
    };
    let mut used = Used::default();
    let mut buffer = [0; CHUNK];

    if let Some(relay) = &inside.relay {
        relay.borrow_mut().begin();
    }
    let end = watch(
        inside,
        first,
        later(started, timeout),
        [&mut stdout, &mut stderr],
        &mut used,
        limit,
        &mut buffer,
    );
    let finished = finish(
        inside,
        first,
        end,
        [&mut stdout, &mut stderr],
        &mut used,
        limit,
        &mut buffer,
    );
    let carried = match &inside.relay {
        Some(relay) => relay.borrow_mut().end()?,
        None => Carried::default(),
    };
    remove_ipc(inside)?;
    // Every writer is dead: what the pipes still hold is all there will be.
    let flooded = stdout.drain(limit, &mut buffer) | stderr.drain(limit, &mut buffer);
    let end = if flooded && end == End::Finished {
        End::Output
    } else {
        end
    };
    let wall_us = started.elapsed().as_micros() as u64;
    let counted = inside.counts.read();
    let after = inside.meter.read();
    let at_rest = inside
        .meter
        .at_rest(after.peak_bytes, inside.start.limits.memory_bytes);

    let mut side = [0; 8];
    let told = sys::read(side_read.as_raw_fd(), &mut side).unwrap_or(0);
    let stdout_bytes = if told == 8 {
        u64::from_le_bytes(side)
    } else {
        stdout.total
    };
    let (mut exit_code, signal) = match used.status {
        Some(s) if libc::WIFEXITED(s) => (Some(libc::WEXITSTATUS(s)), None),
        Some(s) if libc::WIFSIGNALED(s) => (None, Some(libc::WTERMSIG(s))),
        _ => (None, None),
    };
    if told == 5 {
        let [kind, a, b, c, d, ..] = side;
        let error = io::Error::from_raw_os_error(i32::from_le_bytes([a, b, c, d]));
        let (NO_START, Tool::Program { argv, .. }) = (kind, tool) else {
            return Err(error);
        };
        let name = argv
            .first()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let missing = error.raw_os_error() == Some(libc::ENOENT);
        let why = if missing {
            "command not found".to_owned()
        } else {
            error.to_string()
        };
        stderr
            .kept
            .extend_from_slice(format!("{name}: {why}\n").as_bytes());
        stderr.total = stderr.kept.len() as u64;
        exit_code = Some(if missing { 127 } else { 126 });
    }
    let spaces = spaces();
    // One that was full before may have nothing to do with how the call ended, unless it says so.
    let filled = full(&spaces)
        .iter()
        .zip(full_before)
        .any(|(now, before)| *now && !before);
    let disk_full = filled || full(&spaces).contains(&true) && says_full([&stdout, &stderr]);
    // The fullest of the places, where they are not one.
    let disk = spaces.into_iter().flatten().max_by_key(Space::thousandths);
    let piped = stdout.total.saturating_add(stderr.total);
    let stdout_span = put(out, &stdout.kept);
    let stderr_span = put(out, &stderr.kept);
    let changes = index.changes(out);
    Ok(Called {
        end,
        exit_code,
        signal,
        stdout: stdout_span,
        stderr: stderr_span,
        stdout_bytes,
        stderr_bytes: stderr.total,
        wall_us,
        user_us: used.user_us,
        system_us: used.system_us,
        cgroup_cpu_us: since(after.cpu_us, before.cpu_us),
        hard: finished.hard,
        peak_process_bytes: used.peak_bytes,
        // A peak over the whole life tells of this call only where it rose above all before.
        peak_cgroup_bytes: after
            .peak_bytes
            .filter(|peak| peak_anew || Some(*peak) > before.peak_bytes),
        peak_bytes_now: after.peak_bytes > before.peak_bytes,
        cache_bytes: at_rest.cache_bytes,
        left_bytes: at_rest.used_bytes,
        // The group also knows of what is written later than the process that caused it lived.
        read_bytes: used
            .read_bytes
            .max(after.io_bytes.0.saturating_sub(before.io_bytes.0)),
        written_bytes: used
            .written_bytes
            .max(after.io_bytes.1.saturating_sub(before.io_bytes.1)),
        // PID 1 itself read what came through the pipes, and carried connections.
        read_chars: since(counted.read_chars, counted_before.read_chars)
            .map(|n| n.saturating_sub(piped.saturating_add(carried.read))),
        written_chars: since(counted.written_chars, counted_before.written_chars)
            .map(|n| n.saturating_sub(carried.written)),
        started: inside.counts.started(counted_before, counted),
        // The group counts PID 1 too.
        peak_processes: after.peak_pids.map(|n| n.saturating_sub(1)),
        peak_now: after.peak_pids > before.peak_pids,
        oom_kills: after.oom_kills.saturating_sub(before.oom_kills),
        refused_forks: after.refused_forks.saturating_sub(before.refused_forks),
        disk_full,
        disk: disk.unwrap_or_default(),
        unkillable: finished.unkillable,
        survivors: finished.survivors,
        changes: changes.list,
        contents_missing: changes.contents_missing,
        changes_incomplete: changes.incomplete,
    })
}

/// How full each place is where files can be written; they may be one file system.
fn spaces() -> [Option<Space>; 3] {
    [c"/work", c"/tmp", c"/dev/shm"].map(|place| {
        sys::openat(libc::AT_FDCWD, place, libc::O_RDONLY | libc::O_DIRECTORY, 0)
            .and_then(|d| sys::space(d.as_raw_fd()))
            .ok()
    })
}

fn full(spaces: &[Option<Space>; 3]) -> [bool; 3] {
    let is_full = |space: &Space| space.free_bytes < 16 << 10 || space.free_files == 0;
    spaces
        .each_ref()
        .map(|space| space.as_ref().is_some_and(is_full))
}

/// Whether a tool's last words are those of a full disk, its own or the system's.
fn says_full(streams: [&Stream; 2]) -> bool {
    streams.into_iter().any(|stream| {
        let tail = &stream.kept[stream.kept.len().saturating_sub(LAST_WORDS)..];
        let tail = String::from_utf8_lossy(tail).to_ascii_lowercase();
        ["no space left on device", "disk is full"]
            .iter()
            .any(|words| tail.contains(words))
    })
}

/// A moment some time after another; one that no clock will show is now.
fn later(than: Instant, by: Duration) -> Instant {
    than.checked_add(by).unwrap_or(than)
}

fn since(now: Option<u64>, then: Option<u64>) -> Option<u64> {
    now.zip(then).map(|(now, then)| now.saturating_sub(then))
}

/// Until the first process ended, the clock ran out or too much was printed.
fn watch(
    inside: &Inside<'_>,
    first: i32,
    deadline: Instant,
    [stdout, stderr]: [&mut Stream; 2],
    used: &mut Used,
    limit: u64,
    buffer: &mut [u8],
) -> End {
    loop {
        let now = Instant::now();
        if now >= deadline {
            return End::Timeout;
        }
        wait(inside, stdout, stderr, deadline.duration_since(now));
        if stdout.drain(limit, buffer) | stderr.drain(limit, buffer) {
            return End::Output;
        }
        used.reap(first);
        if used.status.is_some() {
            return End::Finished;
        }
    }
}

/// Sleeps until a stream, a child or a connection has news; ends the sandbox when the program outside is gone.
fn wait(inside: &Inside<'_>, stdout: &Stream, stderr: &Stream, longest: Duration) {
    let fd = |s: &Stream| s.pipe.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    wait_on(inside, [fd(stdout), fd(stderr)], longest);
}

fn wait_on(inside: &Inside<'_>, [stdout, stderr]: [RawFd; 2], longest: Duration) {
    let mut control = sys::pollfd(inside.socket());
    control.events = libc::POLLRDHUP;
    let mut fds = vec![
        sys::pollfd(inside.signals.as_raw_fd()),
        control,
        sys::pollfd(stdout),
        sys::pollfd(stderr),
    ];
    let own = fds.len();
    let mut relay = inside.relay.as_ref().map(RefCell::borrow_mut);
    let longest = match &relay {
        Some(relay) => relay.watch(&mut fds, longest),
        None => longest,
    };
    let ms = longest.as_micros().div_ceil(1000).min(3_600_000) as i32;
    if sys::poll(&mut fds, ms).is_err() || fds[1].revents != 0 {
        sys::exit(0);
    }
    if fds[0].revents != 0 {
        sys::drain(inside.signals.as_raw_fd());
    }
    if let Some(relay) = &mut relay
        && relay.serve(&fds[own..]).is_err()
    {
        sys::exit(1);
    }
}

/// How the last processes of a call ended.
#[derive(Default)]
struct Finished {
    /// The first process left something running.
    survivors: bool,
    /// The call was stopped, and not all ended when they were asked to.
    hard: bool,
    /// Something lives on after SIGKILL.
    unkillable: bool,
}

/// Ends whatever lives.
fn finish(
    inside: &Inside<'_>,
    first: i32,
    end: End,
    [stdout, stderr]: [&mut Stream; 2],
    used: &mut Used,
    limit: u64,
    buffer: &mut [u8],
) -> Finished {
    if used.reap(first) {
        return Finished::default();
    }
    if end == End::Timeout {
        let _ = sys::kill(-1, libc::SIGTERM);
        let _ = sys::kill(-1, libc::SIGCONT);
        let until = later(Instant::now(), GRACE);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if used.reap(first) {
                return Finished::default();
            }
            if left.is_zero() {
                break;
            }
            wait(inside, stdout, stderr, left);
            if stdout.drain(limit, buffer) | stderr.drain(limit, buffer) {
                break;
            }
        }
    }
    let until = later(Instant::now(), UNKILLABLE);
    let mut finished = Finished {
        survivors: end == End::Finished,
        hard: end != End::Finished,
        unkillable: false,
    };
    loop {
        // Reaches every process of the namespace but this one, whatever session or group it hides in.
        let _ = sys::kill(-1, libc::SIGKILL);
        if used.reap(first) {
            return finished;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            finished.unkillable = true;
            return finished;
        }
        wait_on(inside, [-1, -1], left.min(Duration::from_millis(100)));
    }
}

/// Removes shared memory, queues and semaphores that outlast their processes: they would hold memory that no later call
/// could free, and only files are promised to last.
fn remove_ipc(inside: &Inside<'_>) -> io::Result<()> {
    if !sys::has_ipc() {
        return Ok(());
    }
    match sys::fork()? {
        Cloned::Child => {
            // Only their owner may remove them.
            let own = sys::become_id(TOOL_ID, TOOL_ID, inside.own_id != TOOL_ID);
            sys::exit(i32::from(own.and_then(|()| sys::remove_ipc()).is_err()))
        }
        Cloned::Parent(pid) => sys::reap(pid, true).map(drop),
    }
}

/// The tool's own process: gives up every privilege, then becomes the tool. It may share PID 1's memory until then, so
/// it keeps nothing it allocates. Returns the exit code.
fn child(
    inside: &Inside<'_>,
    streams: [RawFd; 3],
    side: RawFd,
    tool: impl Fn() -> io::Result<i32>,
) -> i32 {
    let mut telling = side;
    let mut become_tool = || -> io::Result<()> {
        let start = inside.start;
        // SAFETY: no memory is involved.
        sys::check(unsafe { libc::setsid() })?;
        // The kernel shall choose a tool before PID 1, and before anything of the host's. The file can only be opened
        // while this process is dumpable; nothing else runs in the sandbox now, and executing a program makes it so
        // anyway. Under Landlock's rules it cannot be opened at all, so that a tool stays first in line.
        let _ = sys::prctl(libc::PR_SET_DUMPABLE, 1, 0);
        let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
        let _ = sys::prctl(libc::PR_SET_DUMPABLE, 0, 0);
        if let Some(rules) = &inside.rules {
            landlock::enter(rules)?;
        }
        for (from, to) in streams.into_iter().zip(0..) {
            sys::dup3(from, to)?;
        }
        sys::dup3(side, 3)?;
        telling = 3;
        // SAFETY: no memory is involved.
        sys::check(unsafe { libc::fcntl(3, libc::F_SETFD, libc::FD_CLOEXEC) })?;
        sys::close_from(4)?;
        sys::reset_signals();
        if !inside.shares_ids {
            sys::setrlimit(libc::RLIMIT_NPROC, limit_processes(inside))?;
        }
        sys::setrlimit(libc::RLIMIT_NOFILE, start.limits.open_files)?;
        // Above the disk's size, so that a full disk says so; only files that are large by their holes meet it.
        sys::setrlimit(
            libc::RLIMIT_FSIZE,
            start.limits.disk_bytes.saturating_mul(2),
        )?;
        if inside.meter.peak.is_none() {
            sys::setrlimit(libc::RLIMIT_DATA, start.limits.memory_bytes)?;
        }
        sys::become_id(TOOL_ID, TOOL_ID, inside.own_id != TOOL_ID)?;
        sys::set_capabilities(0)
    };
    let ended = become_tool()
        .map_err(|error| (NO_SETUP, error))
        .and_then(|()| tool().map_err(|error| (NO_START, error)));
    ended.unwrap_or_else(|(kind, error)| {
        let [a, b, c, d] = error.raw_os_error().unwrap_or(libc::EIO).to_le_bytes();
        let _ = sys::write_all(telling, &[kind, a, b, c, d]);
        126
    })
}

fn file_tool(tool: &Tool<'_>) -> i32 {
    match tool {
        Tool::Read { path, max } => filetools::read_file(path, *max, 3),
        Tool::Write { path, content } => filetools::write_file(path, content),
        Tool::List { path } => filetools::list_dir(path),
        Tool::Impossible(why) => {
            let _ = sys::write_all(2, format!("{why}\n").as_bytes());
            126
        }
        Tool::Program { .. } => 126,
    }
}

/// Where PID 1 shares the tools' id it counts as one of their processes. A control group must refuse first, since it
/// counts its refusals; the kernel takes its time to forget the last call's dead, hence twice as many.
fn limit_processes(inside: &Inside<'_>) -> u64 {
    let pids = inside.start.limits.pids;
    if inside.meter.pids.is_some() {
        pids.saturating_mul(2)
    } else {
        pids.saturating_add(u64::from(inside.own_id == TOOL_ID))
    }
}

/// As `execve` takes them: pointers to strings, then null.
fn pointers(list: &[CString]) -> Vec<*const libc::c_char> {
    list.iter()
        .map(|s| s.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

/// Executes the first candidate that is there; returns only with an error.
fn execute(
    candidates: &[CString],
    argv: &[*const libc::c_char],
    env: &[*const libc::c_char],
) -> io::Error {
    let mut error = io::Error::from_raw_os_error(libc::ENOENT);
    for candidate in candidates {
        // SAFETY: null-terminated arrays of C strings that outlive the call.
        unsafe { libc::execve(candidate.as_ptr(), argv.as_ptr(), env.as_ptr()) };
        let last = io::Error::last_os_error();
        if last.raw_os_error() != Some(libc::ENOENT) {
            error = last;
        }
    }
    error
}
