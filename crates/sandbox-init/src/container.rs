//! PID 1 of a container. The engine made the namespaces, the mounts and the control group; what is left is to look at
//! what it made, to give up every privilege that serving calls does not need, and to serve.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

use drillyard_sandbox_init::control::{Contained, Greeting, Settled, Start, Streams};
use drillyard_sandbox_init::frame;

use crate::birth::{self, TOOL_ID};
use crate::cgroup::Meter;
use crate::counts::Counts;
use crate::landlock;
use crate::pid1::{self, Inside};
use crate::relay::Relay;
use crate::scan::Area;
use crate::sys::{self, At, Failure};

/// Most bytes beside the first message's head: the system call filter.
const MAX_BODY: u64 = 1 << 20;
/// Descriptors that are kept get numbers from here on, out of the way of the tools'.
const HIGH: RawFd = 500;
const PLACES: [(&str, u32); 3] = [("/work", 0o755), ("/tmp", 0o1777), ("/dev/shm", 0o1777)];

/// Serves over standard input and output until the input ends.
pub fn run() -> ExitCode {
    // It kills every process it can reach between calls; anywhere but in a pid namespace of its own that would be all.
    if std::process::id() != 1 {
        return ExitCode::from(2);
    }
    let Ok((mut requests, mut replies)) = ends() else {
        return ExitCode::FAILURE;
    };
    let Ok(Some((contained, body))) = frame::read::<Contained>(&mut requests, MAX_BODY) else {
        return ExitCode::from(2);
    };
    let elsewhere = contained.witnesses.iter().find(|w| {
        std::fs::metadata(&w.inside).map_or(true, |m| (m.dev(), m.ino()) != (w.device, w.inode))
    });
    if let Some(witness) = elsewhere {
        let greeting = Greeting::Elsewhere {
            inside: witness.inside.clone(),
        };
        let _ = frame::write(&mut replies, &greeting, &[]);
        return ExitCode::from(30);
    }
    let start = Start {
        owner: String::new(),
        limits: contained.limits,
        binds: Vec::new(),
        copies: Vec::new(),
        made: Vec::new(),
        links: Vec::new(),
        filter: contained.filter,
        shell: contained.shell,
        env: contained.env,
        cgroups: true,
        network: None,
        rootfs: None,
        layers: None,
    };
    let filter = start.filter.of(&body).unwrap_or_default();
    let relay = contained
        .network
        .map(|network| listen(network, &requests, &replies))
        .transpose()
        .at("listening socket of the network");
    match relay.and_then(|relay| Ok((relay, settle(&start, filter)?))) {
        Ok((relay, (settled, meter, counts, rules, signals))) => {
            let Ok(stack) = sys::Stack::new() else {
                return ExitCode::FAILURE;
            };
            let shares_ids = settled.host_ids;
            if frame::write(&mut replies, &Greeting::Settled(settled), &[]).is_err() {
                return ExitCode::FAILURE;
            }
            pid1::serve(Inside {
                socket: requests.into(),
                replies: Some(replies.into()),
                signals,
                meter,
                counts,
                rules,
                stack,
                start: &start,
                areas: Area::plain(),
                own_id: 0,
                listener: None,
                relay: relay.map(RefCell::new),
                shares_ids,
            })
        }
        Err(failure) => {
            let greeting = Greeting::Unable {
                step: failure.step,
                message: failure.error.to_string(),
            };
            let _ = frame::write(&mut replies, &greeting, &[]);
            ExitCode::from(30)
        }
    }
}

/// Standard input and output under high numbers; 0, 1 and 2 point to /dev/null from here on.
fn ends() -> std::io::Result<(File, File)> {
    let requests = lift(0)?;
    let replies = lift(1)?;
    let null = sys::openat(libc::AT_FDCWD, c"/dev/null", libc::O_RDWR, 0)?;
    for fd in 0..3 {
        sys::dup3(null.as_raw_fd(), fd)?;
    }
    drop(null);
    // SAFETY: nothing here owns a descriptor of these numbers.
    sys::check(unsafe { libc::syscall(libc::SYS_close_range, 3, HIGH - 1, 0) } as i32)?;
    sys::close_from(replies.as_raw_fd().max(requests.as_raw_fd()) + 1)?;
    Ok((requests.into(), replies.into()))
}

/// Listens before anything of the agent's runs, so that nothing inside can take its place.
fn listen(network: Streams, requests: &File, replies: &File) -> std::io::Result<Relay> {
    let listener = sys::listen_on_loopback(network.port)?;
    let (requests, replies) = (lift(requests.as_raw_fd())?, lift(replies.as_raw_fd())?);
    Relay::new(listener, requests, replies, network)
}

fn lift(fd: RawFd) -> std::io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let raw = sys::check(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH) })?;
    // SAFETY: just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

type Set = (Settled, Meter, Counts, Option<OwnedFd>, OwnedFd);

fn settle(start: &Start, filter: &[u8]) -> Result<Set, Failure> {
    let mut settled = Settled {
        landlock: landlock::version(),
        host_ids: maps_to_itself(),
        engine_filter: std::fs::read_to_string("/proc/self/status")
            .is_ok_and(|s| s.lines().any(|l| l == "Seccomp:\t2")),
        inodes: Some(0),
        ..Settled::default()
    };
    let meter = measure(&mut settled, start.limits.memory_bytes);
    settled.counts_oom = meter.oom.is_some();
    let counts = Counts::open();
    sys::become_id(0, 0, true).at("user")?;
    for (place, mode) in PLACES {
        let dir = sys::c(place)
            .and_then(|path| {
                let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
                sys::openat(libc::AT_FDCWD, &path, flags, 0)
            })
            .at(place)?;
        let (bytes, files) = sys::size(dir.as_raw_fd()).at(place)?;
        settled.disk_bytes = settled.disk_bytes.saturating_add(bytes);
        // A tmpfs without a limit says 0.
        settled.inodes = settled
            .inodes
            .filter(|_| files > 0)
            .map(|all| all.saturating_add(files));
        if place == "/work" {
            sys::chown_at(dir.as_raw_fd(), c"", TOOL_ID, TOOL_ID).at(place)?;
        }
        sys::fchmod(dir.as_raw_fd(), mode).at(place)?;
    }
    // SAFETY: no memory is involved.
    unsafe { libc::umask(0o022) };
    std::env::set_current_dir("/work").at("/work")?;
    sys::setrlimit(libc::RLIMIT_CORE, 0).at("core limit")?;
    let rules = landlock::prepare(false).at("landlock")?;
    let signals = sys::sigchld_fd().at("signals")?;
    sys::drop_bounding();
    sys::set_capabilities(birth::KEPT & !birth::CAP_DAC_READ_SEARCH).at("capabilities")?;
    sys::prctl(libc::PR_SET_DUMPABLE, 0, 0).at("dumpable")?;
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0).at("no_new_privs")?;
    sys::install_filter(filter).at("system call filter")?;
    Ok((settled, meter, counts, rules, signals))
}

/// Whether root here is root of the host, as far as can be told from inside.
fn maps_to_itself() -> bool {
    std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| {
        let mut numbers = map.split_whitespace();
        numbers.next() == numbers.next()
    })
}

/// Reads the limits of this container's control group and opens its counters. What shows another memory limit than the
/// container's is another group; its counters would tell of strangers.
fn measure(settled: &mut Settled, memory_bytes: u64) -> Meter {
    const ROOT: &str = "/sys/fs/cgroup";
    let number = |file: &str| -> Option<u64> {
        let text = std::fs::read_to_string(format!("{ROOT}/{file}")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let open = |file: &str| File::open(format!("{ROOT}/{file}")).ok().map(OwnedFd::from);
    let page = 4096;
    let own = |limit: Option<u64>| limit.is_some_and(|l| l / page == memory_bytes / page);
    if own(number("memory/memory.limit_in_bytes")) {
        settled.cgroups = 1;
        settled.memory_bytes = number("memory/memory.limit_in_bytes");
        settled.pids = number("pids/pids.max");
        settled.milli_cpus = number("cpu/cpu.cfs_quota_us")
            .zip(number("cpu/cpu.cfs_period_us"))
            .and_then(|(quota, period)| quota.saturating_mul(1000).checked_div(period));
        return Meter {
            peak: open("memory/memory.max_usage_in_bytes"),
            oom: open("memory/memory.oom_control"),
            cpu: open("cpuacct/cpuacct.usage"),
            pids: open("pids/pids.events"),
            peak_pids: open("pids/pids.peak"),
            usage: open("memory/memory.usage_in_bytes"),
            stat: open("memory/memory.stat"),
            io: open("blkio/blkio.throttle.io_service_bytes"),
        };
    }
    if own(number("memory.max")) {
        settled.cgroups = 2;
        settled.memory_bytes = number("memory.max");
        settled.pids = number("pids.max");
        settled.milli_cpus = number("cpu.max")
            .zip(std::fs::read_to_string(format!("{ROOT}/cpu.max")).ok())
            .and_then(|(quota, line)| {
                let period: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
                quota.saturating_mul(1000).checked_div(period)
            });
        return Meter {
            peak: open("memory.peak"),
            oom: open("memory.events"),
            cpu: open("cpu.stat"),
            pids: open("pids.events"),
            peak_pids: open("pids.peak"),
            usage: open("memory.current"),
            stat: open("memory.stat"),
            io: open("io.stat"),
        };
    }
    Meter::default()
}
