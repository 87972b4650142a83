//! The helper: takes orders on its control socket, makes and ends sandboxes, and leaves nothing behind.
//!
//! Two processes play it. The first, which the program starts, only waits. The second is PID 1 of a pid namespace that
//! holds every sandbox, so that whatever ends it ends them all; it leaves when the control socket closes.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::process::ExitCode;

use drillyard_sandbox_init::control::{Event, Holds, LimitRow, Order, Start};
use drillyard_sandbox_init::frame;

use crate::birth::{self, Sandbox};
use crate::cgroup::{Controller, Driver, find_io_devices};
use crate::landlock;
use crate::sys::{self, Failure};
use crate::world::{self, Mode, Store};

const CONTROL: RawFd = 0;
const PACKET: usize = 192 << 10;

/// Plays the helper until the control socket closes.
pub fn run() -> ExitCode {
    // It may be run from a copy in memory, which has no name.
    sys::set_name(c"drillyard-init");
    let mut buffer = vec![0; PACKET];
    // Finding out what the processor can do is dear in a virtual machine; every sandbox inherits the answer.
    let _ = blake3::hash(&[]);
    let Some((start, filter)) = receive_start(&mut buffer) else {
        return ExitCode::from(2);
    };
    let (driver, swept) = if start.cgroups {
        Driver::open(&start.owner, start.limits.io_bytes_per_s.is_some())
    } else {
        (Driver::None("not asked for".into()), 0)
    };
    let devices = find_io_devices(&start.limits);
    let outcome = world::leave().and_then(|mode| {
        let inner = sys::fork().map_err(|error| Failure {
            step: "fork".into(),
            error,
        })?;
        Ok((mode, inner))
    });
    match outcome {
        Err(failure) => {
            driver.remove_own(&start.owner);
            unable(&failure)
        }
        Ok((_, sys::Cloned::Parent(pid))) => {
            // Keep no copy of the control socket: its end must be seen by both sides.
            let _ = sys::close_from(0);
            match sys::reap(pid, true) {
                Ok(Some(ended)) if ended.status == 0 => ExitCode::SUCCESS,
                _ => ExitCode::FAILURE,
            }
        }
        Ok((mode, sys::Cloned::Child)) => {
            let _ = sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as _, 0);
            let built = world::seclude()
                .and_then(|()| world::Store::open(&start))
                .and_then(|store| world::build(&start).map(|()| store));
            let store = match built {
                Ok(store) => store,
                Err(failure) => {
                    driver.remove_own(&start.owner);
                    return unable(&failure);
                }
            };
            let limits = report(&start, &driver, mode, devices);
            let started = Event::Started {
                limits,
                mode: match mode {
                    Mode::Root => "root".into(),
                    Mode::User => "user".into(),
                },
                swept,
            };
            if tell(&started, None).is_err() {
                return ExitCode::FAILURE;
            }
            Yard {
                start,
                filter,
                driver,
                mode,
                store,
                live: BTreeMap::new(),
                doomed: Vec::new(),
            }
            .serve(&mut buffer)
        }
    }
}

struct Yard {
    start: Start,
    filter: Vec<u8>,
    driver: Driver,
    mode: Mode,
    store: Option<Store>,
    /// By the pid of their PID 1.
    live: BTreeMap<i32, Sandbox>,
    /// Ended, but their control group was still busy.
    doomed: Vec<Sandbox>,
}

impl Yard {
    fn serve(mut self, buffer: &mut [u8]) -> ExitCode {
        let Ok(signals) = sys::sigchld_fd() else {
            return ExitCode::FAILURE;
        };
        loop {
            let mut fds = [sys::pollfd(CONTROL), sys::pollfd(signals.as_raw_fd())];
            let wait = if self.doomed.is_empty() { -1 } else { 20 };
            if sys::poll(&mut fds, wait).is_err() {
                break;
            }
            if fds[1].revents != 0 {
                sys::drain(signals.as_raw_fd());
                self.reap();
            }
            let driver = &self.driver;
            self.doomed
                .retain(|s| s.group.as_ref().is_some_and(|g| driver.remove(g).is_err()));
            if fds[0].revents != 0 {
                match sys::read(CONTROL, buffer) {
                    Ok(0) | Err(_) => break,
                    Ok(n) => {
                        let Some(order) = parse::<Order>(&buffer[..n]) else {
                            break;
                        };
                        if self.obey(&order).is_err() {
                            break;
                        }
                    }
                }
            }
        }
        self.end()
    }

    fn obey(&mut self, order: &Order) -> std::io::Result<()> {
        match *order {
            Order::Create { id, ref lower } => {
                let made = birth::lower(id, &self.start, lower, self.store.as_ref(), self.mode)
                    .and_then(|trees| {
                        let (start, filter) = (&self.start, &self.filter);
                        birth::make(id, start, filter, &self.driver, self.mode, trees)
                    });
                match made {
                    Ok((sandbox, socket)) => {
                        self.live.insert(sandbox.pid, sandbox);
                        tell(&Event::Created { id }, Some(socket.as_raw_fd()))
                    }
                    Err(failure) => tell(
                        &Event::Failed {
                            id,
                            step: failure.step,
                            message: failure.error.to_string(),
                        },
                        None,
                    ),
                }
            }
            Order::Relax { id } => {
                let bytes = self.start.limits.memory_bytes.saturating_mul(2);
                if let Some(sandbox) = self.live.values().find(|s| s.id == id)
                    && let Some(group) = &sandbox.group
                {
                    self.driver.set_memory(group, bytes);
                }
                Ok(())
            }
            Order::Measure => tell(
                &Event::Measured {
                    memory_bytes: self.driver.memory_bytes().or_else(resident_bytes),
                },
                None,
            ),
            Order::Destroy { id } => {
                // One that is gone already was told of then.
                if let Some(sandbox) = self.live.values().find(|s| s.id == id) {
                    let _ = sys::kill(sandbox.pid, libc::SIGKILL);
                }
                Ok(())
            }
        }
    }

    fn reap(&mut self) {
        while let Ok(Some(ended)) = sys::reap(-1, false) {
            let Some(sandbox) = self.live.remove(&ended.pid) else {
                continue;
            };
            let signal = libc::WIFSIGNALED(ended.status).then(|| libc::WTERMSIG(ended.status));
            let oom_kills = sandbox
                .group
                .as_ref()
                .map_or(0, |g| g.meter.read().oom_kills);
            let id = sandbox.id;
            if sandbox
                .group
                .as_ref()
                .is_some_and(|g| self.driver.remove(g).is_err())
            {
                self.doomed.push(sandbox);
            }
            let _ = tell(
                &Event::Gone {
                    id,
                    signal,
                    oom_kills,
                },
                None,
            );
        }
    }

    /// Kills what lives, waits for it, removes every group.
    fn end(mut self) -> ExitCode {
        for pid in self.live.keys() {
            let _ = sys::kill(*pid, libc::SIGKILL);
        }
        while let Ok(Some(ended)) = sys::reap(-1, true) {
            if let Some(sandbox) = self.live.remove(&ended.pid) {
                self.doomed.push(sandbox);
            }
        }
        for _ in 0..50 {
            let driver = &self.driver;
            self.doomed
                .retain(|s| s.group.as_ref().is_some_and(|g| driver.remove(g).is_err()));
            if self.doomed.is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.driver.remove_own(&self.start.owner);
        ExitCode::SUCCESS
    }
}

fn receive_start(buffer: &mut [u8]) -> Option<(Start, Vec<u8>)> {
    let n = sys::read(CONTROL, buffer).ok()?;
    let packet = buffer.get(..n)?;
    let start: Start = parse(packet)?;
    let prefix = packet.get(..frame::PREFIX)?.try_into().ok()?;
    let (head, _) = frame::lengths(prefix, PACKET as u64).ok()?;
    let filter = start
        .filter
        .of(packet.get(frame::PREFIX + head..)?)?
        .to_vec();
    Some((start, filter))
}

fn parse<T: serde::de::DeserializeOwned>(packet: &[u8]) -> Option<T> {
    let prefix = packet.get(..frame::PREFIX)?.try_into().ok()?;
    let (head, _) = frame::lengths(prefix, PACKET as u64).ok()?;
    frame::decode(packet.get(frame::PREFIX..frame::PREFIX + head)?).ok()
}

fn tell(event: &Event, pass: Option<RawFd>) -> std::io::Result<()> {
    sys::send(CONTROL, &frame::encode(event, 0)?, pass)
}

fn unable(failure: &Failure) -> ExitCode {
    let _ = tell(
        &Event::Unable {
            step: failure.step.clone(),
            errno: failure.error.raw_os_error().unwrap_or(0),
            message: failure.error.to_string(),
        },
        None,
    );
    ExitCode::from(30)
}

/// Resident memory of every process in the helper's pid namespace, which holds the sandboxes and nothing else; pages
/// that several share count for each.
fn resident_bytes() -> Option<u64> {
    let mut pages = 0;
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        if !entry.file_name().as_encoded_bytes()[0].is_ascii_digit() {
            continue;
        }
        // size resident shared …, in pages
        let statm = std::fs::read_to_string(entry.path().join("statm")).unwrap_or_default();
        let mut fields = statm.split(' ').filter_map(|f| f.parse::<u64>().ok());
        let (resident, shared) = (fields.nth(1).unwrap_or(0), fields.next().unwrap_or(0));
        pages = resident.saturating_sub(shared).saturating_add(pages);
    }
    Some(pages.saturating_mul(4096))
}

#[expect(clippy::too_many_lines, reason = "a table, row by row")]
fn report(start: &Start, driver: &Driver, mode: Mode, devices: usize) -> Vec<LimitRow> {
    let limits = &start.limits;
    let row = |limit: &str, value: String, holds: Holds, how: String| LimitRow {
        limit: limit.into(),
        value,
        holds,
        how,
    };
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let mut rows = vec![row(
        "wall time",
        "per call and episode".into(),
        Holds::Yes,
        "clock outside and inside; the whole pid namespace is killed".into(),
    )];
    let memory = driver.has(Controller::Memory);
    rows.push(row(
        "memory",
        mib(limits.memory_bytes),
        if memory { Holds::Yes } else { Holds::Partly },
        if memory {
            driver.how(Controller::Memory)
        } else {
            format!(
                "for each process alone (RLIMIT_DATA), and not what they share or leave in sockets; {}",
                driver.how(Controller::Memory)
            )
        },
    ));
    rows.push(row(
        "processes",
        limits.pids.to_string(),
        Holds::Yes,
        if driver.has(Controller::Pids) {
            format!(
                "{}; behind it, at twice as many, RLIMIT_NPROC of its user namespace",
                driver.how(Controller::Pids)
            )
        } else {
            "RLIMIT_NPROC of its user namespace".into()
        },
    ));
    let cpu = driver.has(Controller::Cpu);
    rows.push(row(
        "processors",
        format!(
            "{}.{:03}",
            limits.milli_cpus / 1000,
            limits.milli_cpus % 1000
        ),
        if cpu { Holds::Yes } else { Holds::No },
        driver.how(Controller::Cpu),
    ));
    rows.push(row(
        "disk",
        if limits.disk_bytes < limits.disk_asked_bytes {
            format!(
                "{} asked, {} given",
                mib(limits.disk_asked_bytes),
                mib(limits.disk_bytes)
            )
        } else {
            mib(limits.disk_bytes)
        },
        Holds::Yes,
        if limits.disk_bytes < limits.disk_asked_bytes {
            "size of a tmpfs that holds /work, /tmp and /dev/shm; files lie in memory and get three quarters of it"
        } else {
            "size of a tmpfs that holds /work, /tmp and /dev/shm"
        }
        .into(),
    ));
    rows.push(row(
        "files",
        limits.inodes.to_string(),
        Holds::Yes,
        "inodes of that tmpfs".into(),
    ));
    rows.push(match limits.io_bytes_per_s {
        None => row(
            "io rate",
            "not set".into(),
            Holds::Unset,
            "files written lie in memory; reads of the host's programs are not throttled".into(),
        ),
        Some(bytes) => {
            let holds = driver.has(Controller::Io) && devices > 0;
            row(
                "io rate",
                format!("{} KiB/s a device", bytes >> 10),
                if holds { Holds::Yes } else { Holds::No },
                if holds {
                    format!(
                        "{}, {devices} devices; files written lie in memory",
                        driver.how(Controller::Io)
                    )
                } else if devices == 0 {
                    "this host shows no block device".into()
                } else {
                    driver.how(Controller::Io)
                },
            )
        }
    });
    rows.push(row(
        "open files",
        limits.open_files.to_string(),
        Holds::Yes,
        "RLIMIT_NOFILE, each process".into(),
    ));
    rows.push(row(
        "output",
        format!("{} a stream and call", mib(limits.output_bytes)),
        Holds::Yes,
        "read inside with a cap; the call is killed beyond it".into(),
    ));
    let landlock = landlock::version();
    let (value, root) = if start.rootfs.is_some() {
        (
            "none",
            "a root of their own, each sandbox's a copy on write of the image (overlay, size as of disk)",
        )
    } else {
        (
            "read only, by an allow-list",
            "a root of their own, read-only mounts",
        )
    };
    rows.push(row(
        "host files",
        value.into(),
        Holds::Yes,
        if landlock == 0 {
            format!("{root} (this kernel has no Landlock)")
        } else {
            format!("{root}, Landlock version {landlock}")
        },
    ));
    rows.push(row(
        "network",
        "none".into(),
        Holds::Yes,
        "a network namespace of its own with loopback only; other address families refused".into(),
    ));
    rows.push(row(
        "identity",
        "no privileges".into(),
        Holds::Yes,
        match mode {
            Mode::Root => "tools and PID 1 under two host ids of their own, no capabilities",
            Mode::User => "tools under the id of PID 1, which cannot be traced; no capabilities",
        }
        .into(),
    ));
    rows
}
