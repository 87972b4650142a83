//! Running one tool: start it, read what it prints, end its whole tree, say what it used and what it changed.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use drillyard_sandbox_init::frame::put;
use drillyard_sandbox_init::init::{Called, End, Reply, What};

use crate::birth::TOOL_ID;
use crate::filetools;
use crate::landlock;
use crate::pid1::Inside;
use crate::scan::Index;
use crate::sys::{self, Cloned};

/// Between asking a tree to end and killing it.
const GRACE: Duration = Duration::from_millis(50);
/// Told by the child on its side pipe when it could not start its program.
const NO_START: u8 = 1;

enum Tool<'a> {
    Program {
        candidates: Vec<CString>,
        argv: Vec<CString>,
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
        Err(error) => refused(format!("the call could not be started: {error}")),
    }
}

fn prepare<'a>(
    inside: &Inside<'_>,
    what: &'a What,
    body: &'a [u8],
) -> Result<(Tool<'a>, &'a [u8]), String> {
    let nul = |_| String::from("an argument holds a NUL byte");
    let outside = || String::from("content lies outside the message");
    Ok(match what {
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
                Tool::Program { candidates, argv },
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
                    self.total += n as u64;
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
        let us = |t: libc::timeval| (t.tv_sec * 1_000_000 + t.tv_usec) as u64;
        self.user_us += us(ended.usage.ru_utime);
        self.system_us += us(ended.usage.ru_stime);
        self.peak_bytes = self.peak_bytes.max(ended.usage.ru_maxrss as u64 * 1024);
        self.read_bytes += ended.usage.ru_inblock as u64 * 512;
        self.written_bytes += ended.usage.ru_oublock as u64 * 512;
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
    inside.meter.reset_peak();
    let before = inside.meter.read();
    let started = Instant::now();
    let first = match sys::fork()? {
        Cloned::Child => child(
            inside,
            tool,
            [
                stdin.as_raw_fd(),
                out_write.as_raw_fd(),
                err_write.as_raw_fd(),
            ],
            side_write.as_raw_fd(),
        ),
        Cloned::Parent(pid) => pid,
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
    let mut buffer = vec![0; 64 << 10];

    let end = watch(
        inside,
        first,
        started + timeout,
        [&mut stdout, &mut stderr],
        &mut used,
        limit,
        &mut buffer,
    );
    let survivors = finish(
        inside,
        first,
        end,
        [&mut stdout, &mut stderr],
        &mut used,
        limit,
        &mut buffer,
    );
    // Every writer is dead: what the pipes still hold is all there will be.
    let flooded = stdout.drain(limit, &mut buffer) | stderr.drain(limit, &mut buffer);
    let end = if flooded && end == End::Finished {
        End::Output
    } else {
        end
    };
    let wall_us = started.elapsed().as_micros() as u64;
    let after = inside.meter.read();

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
    if told == 5 && side[0] == NO_START {
        let [_, a, b, c, d, ..] = side;
        let error = io::Error::from_raw_os_error(i32::from_le_bytes([a, b, c, d]));
        let Tool::Program { argv, .. } = tool else {
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
    let disk_full = sys::openat(
        libc::AT_FDCWD,
        c"/work",
        libc::O_RDONLY | libc::O_DIRECTORY,
        0,
    )
    .and_then(|d| sys::free_space(d.as_raw_fd()))
    .is_ok_and(|(bytes, files)| bytes < 16 << 10 || files == 0);
    let stdout_span = put(out, &stdout.kept);
    let stderr_span = put(out, &stderr.kept);
    let (changes, state_lost) = index.changes(out);
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
        cgroup_cpu_us: after
            .cpu_us
            .zip(before.cpu_us)
            .map(|(a, b)| a.saturating_sub(b)),
        peak_process_bytes: used.peak_bytes,
        peak_cgroup_bytes: after.peak_bytes,
        read_bytes: used.read_bytes,
        written_bytes: used.written_bytes,
        oom_kills: after.oom_kills.saturating_sub(before.oom_kills),
        refused_forks: after.refused_forks.saturating_sub(before.refused_forks),
        disk_full,
        survivors,
        changes,
        state_lost,
    })
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
        wait(inside, stdout, stderr, deadline - now);
        if stdout.drain(limit, buffer) | stderr.drain(limit, buffer) {
            return End::Output;
        }
        used.reap(first);
        if used.status.is_some() {
            return End::Finished;
        }
    }
}

/// Sleeps until a stream or a child has news; ends the sandbox when the program outside is gone.
fn wait(inside: &Inside<'_>, stdout: &Stream, stderr: &Stream, longest: Duration) {
    let fd = |s: &Stream| s.pipe.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let mut control = sys::pollfd(inside.socket());
    control.events = libc::POLLRDHUP;
    let mut fds = [
        sys::pollfd(inside.signals.as_raw_fd()),
        control,
        sys::pollfd(fd(stdout)),
        sys::pollfd(fd(stderr)),
    ];
    let ms = longest.as_micros().div_ceil(1000).min(3_600_000) as i32;
    if sys::poll(&mut fds, ms).is_err() || fds[1].revents != 0 {
        sys::exit(0);
    }
    if fds[0].revents != 0 {
        sys::drain(inside.signals.as_raw_fd());
    }
}

/// Ends whatever lives; true if the first process left something running.
fn finish(
    inside: &Inside<'_>,
    first: i32,
    end: End,
    [stdout, stderr]: [&mut Stream; 2],
    used: &mut Used,
    limit: u64,
    buffer: &mut [u8],
) -> bool {
    if used.reap(first) {
        return false;
    }
    if end == End::Timeout {
        let _ = sys::kill(-1, libc::SIGTERM);
        let _ = sys::kill(-1, libc::SIGCONT);
        let until = Instant::now() + GRACE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if used.reap(first) {
                return false;
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
    loop {
        // Reaches every process of the namespace but this one, whatever session or group it hides in.
        let _ = sys::kill(-1, libc::SIGKILL);
        match sys::reap(-1, true) {
            Ok(Some(ended)) => used.add(&ended, first),
            Ok(None) => {}
            Err(_) => return end == End::Finished,
        }
    }
}

/// The tool's own process: gives up every privilege, then becomes the tool.
fn child(inside: &Inside<'_>, tool: &Tool<'_>, streams: [RawFd; 3], side: RawFd) -> ! {
    let become_tool = || -> io::Result<i32> {
        let start = inside.start;
        // SAFETY: no memory is involved.
        sys::check(unsafe { libc::setsid() })?;
        if let Some(rules) = &inside.rules {
            landlock::enter(rules)?;
        }
        for (from, to) in streams.into_iter().zip(0..) {
            sys::dup3(from, to)?;
        }
        sys::dup3(side, 3)?;
        // SAFETY: no memory is involved.
        sys::check(unsafe { libc::fcntl(3, libc::F_SETFD, libc::FD_CLOEXEC) })?;
        sys::close_from(4)?;
        sys::reset_signals();
        if inside.meter.oom.is_some() {
            // The kernel shall choose a tool before PID 1. The file can only be opened while this process is dumpable;
            // nothing else runs in the sandbox now, and executing a program makes it so anyway.
            let _ = sys::prctl(libc::PR_SET_DUMPABLE, 1, 0);
            let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
            let _ = sys::prctl(libc::PR_SET_DUMPABLE, 0, 0);
        }
        sys::setrlimit(libc::RLIMIT_NPROC, limit_processes(inside))?;
        sys::setrlimit(libc::RLIMIT_NOFILE, start.limits.open_files)?;
        // Above the disk's size, so that a full disk says so; only files that are large by their holes meet it.
        sys::setrlimit(libc::RLIMIT_FSIZE, 2 * start.limits.disk_bytes)?;
        if inside.meter.peak.is_none() {
            sys::setrlimit(libc::RLIMIT_DATA, start.limits.memory_bytes)?;
        }
        sys::become_id(TOOL_ID, TOOL_ID, inside.own_id != TOOL_ID)?;
        sys::set_capabilities(0)?;
        match tool {
            Tool::Program { candidates, argv } => Err(execute(candidates, argv, &start.env)),
            Tool::Read { path, max } => Ok(filetools::read_file(path, *max, 3)),
            Tool::Write { path, content } => Ok(filetools::write_file(path, content)),
            Tool::List { path } => Ok(filetools::list_dir(path)),
        }
    };
    match become_tool() {
        Ok(code) => sys::exit(code),
        Err(error) => {
            let mut told = vec![NO_START];
            told.extend(error.raw_os_error().unwrap_or(libc::EIO).to_le_bytes());
            // The side pipe is either in its place or still at its first number; only the right one is a pipe of ours.
            if sys::write_all(3, &told).is_err() {
                let _ = sys::write_all(side, &told);
            }
            sys::exit(126)
        }
    }
}

/// Where PID 1 shares the tools' id it counts as one of their processes.
fn limit_processes(inside: &Inside<'_>) -> u64 {
    inside.start.limits.pids + u64::from(inside.own_id == TOOL_ID)
}

/// Executes the first candidate that is there; returns only with an error.
fn execute(candidates: &[CString], argv: &[CString], env: &[String]) -> io::Error {
    let env: Vec<CString> = env
        .iter()
        .filter_map(|e| CString::new(e.as_str()).ok())
        .collect();
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter()
            .map(|s| s.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (argv, env) = (pointers(argv), pointers(&env));
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
