//! Thousands of episodes, half of them hostile, 64 at a time: the host is afterwards as it was before. And the program
//! killed at random moments in their midst: the next start leaves nothing of it.
//!
//! 500 episodes and 10 kills by default; `DRILLYARD_ENDURANCE=10000` and `DRILLYARD_KILLS=50` are the long run. What
//! belongs to this process alone must be equal; what the whole host shares (other programs go on meanwhile) may differ by
//! less than a twentieth of what one leak an episode would leave. Each count first shows that it sees one more of its kind.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drillyard_sandbox::{CallOutcome, CallResult, Holds, Limits, Pool, SandboxConfig, Setup};

use common::{
    MIB, again, descriptors, eventually_in, fresh, groups_of, has_groups, host_processes, is_root,
    pids, proc, resident, shell, shell_for, small, text,
};

const PARALLEL: usize = 64;

/// Every other one is up to no good.
const TAME: [&str; 4] = [
    "cat mine > out; wc -c out",
    "sort /etc/passwd | head -n 1 > first",
    "mkdir -p a/b; for i in {1..20}; do echo $i > a/b/$i; done; tar -cf all.tar a; rm -r a",
    "perl -e 'print 6 * 7, \"\\n\"'; grep -c agent /etc/passwd",
];

/// A hostile command, how long it gets to show what it does, and what shows it. On a busy host what it shows may come too
/// late once or twice.
type Attack = (&'static str, [Duration; 3], fn(&CallResult) -> bool);

/// It ends by itself.
const LONG: [Duration; 3] = [Duration::from_secs(30); 3];
/// The clock ends it.
const SHORT: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(6),
];

const HOSTILE: [Attack; 18] = [
    ("b() { b | b & }; b; sleep 30", SHORT, |r| {
        text(&r.stderr).contains("Resource temporarily unavailable")
    }),
    (
        "for i in 1 2 3; do setsid nohup sleep 1000 > /dev/null 2>&1 & done; \
         (trap '' TERM HUP; setsid sh -c 'trap \"\" TERM; sleep 1000; :' &) &",
        LONG,
        |r| r.survivors,
    ),
    (
        "perl -e 'fork and exit; setpgrp; fork and exit; exec qw(sleep 1000)' & sleep 0.3",
        LONG,
        |r| r.survivors,
    ),
    (
        "head -c 1G /dev/zero > big; head -c 1G /dev/zero > /dev/shm/big",
        LONG,
        |r| r.outcome == CallOutcome::Disk,
    ),
    (
        "for i in {1..900}; do mkdir -p d$i || exit; done",
        LONG,
        |r| r.outcome == CallOutcome::Disk,
    ),
    ("yes", LONG, |r| r.outcome == CallOutcome::OutputLimit),
    ("head -c 1G /dev/zero >&2", LONG, |r| {
        r.outcome == CallOutcome::OutputLimit
    }),
    (
        "mkdir -p $(printf 'd/%.0s' {1..300}); mkdir -p a/b && echo x > a/b/f && chmod 000 a/b a",
        LONG,
        |r| r.state_lost,
    ),
    (
        "echo x > f; chmod 000 f /tmp; ln -s / root; ln -s loop loop; chmod 000 /work",
        LONG,
        |r| r.files_changed.iter().any(|c| c.path == "f" && c.mode == 0),
    ),
    (
        "truncate -s 20M s1; truncate -s 1P s2; cp --sparse=always s1 /tmp/s3; sleep 0.01",
        LONG,
        |r| r.files_changed.iter().any(|c| c.size == 20 * MIB),
    ),
    (
        "trap '' TERM INT HUP; while :; do sleep 1000; done",
        SHORT,
        |r| r.outcome == CallOutcome::Timeout,
    ),
    ("trap '' TERM; while :; do :; done", SHORT, |r| {
        r.outcome == CallOutcome::Timeout
    }),
    (
        "perl -e '$SIG{$_} = sub {} for qw(USR1 USR2 TERM CHLD); \
         for (1..2000) { kill \"USR1\", -1; kill \"STOP\", 1; kill \"TERM\", -1 } print \"stormed\"'",
        LONG,
        |r| text(&r.stdout) == "stormed",
    ),
    (
        "sleep 1000 & kill -9 -1; kill -9 1; wait $!; echo killed $?",
        LONG,
        |r| text(&r.stdout).contains("killed 137"),
    ),
    (
        "perl -e 'for $k (1..50) { shmget($k, 65536, 01666); msgget($k, 01666); semget($k, 3, 01666) } \
         syscall(240, \"q$_\", 0102, 0600, 0) for 1..5; open F, \">\", \"/dev/shm/left$_\" for 1..5'; ipcs | grep -c ^0x",
        LONG,
        |r| text(&r.stdout) == "150\n",
    ),
    (
        "perl -MIO::Socket::INET -MIO::Socket::UNIX -e '$| = 1; \
         @s = map { IO::Socket::INET->new(Listen => 1, LocalAddr => \"127.0.0.1\") } 1..50; \
         @u = map { IO::Socket::UNIX->new(Local => \"\\0s$_\", Listen => 1) } 1..50; \
         @f = map { IO::Socket::UNIX->new(Local => \"s$_\", Listen => 1) } 1..50; \
         print scalar(grep { defined } @s, @u, @f); sleep 1000'",
        SHORT,
        |r| text(&r.stdout) == "150",
    ),
    (
        "perl -e '$x = \"x\" x (1 << 30)'; cat /etc/hostname",
        LONG,
        |r| r.oom_kills > 0,
    ),
    (
        "rm -rf / /work /tmp 2> /dev/null; mkfifo p; cat p",
        SHORT,
        |r| r.outcome == CallOutcome::Timeout,
    ),
];

fn episode(i: usize) -> &'static str {
    if i.is_multiple_of(2) {
        TAME[i / 2 % TAME.len()]
    } else {
        HOSTILE[i / 2 % HOSTILE.len()].0
    }
}

fn config() -> SandboxConfig {
    SandboxConfig {
        limits: Limits {
            call_timeout: Duration::from_secs(1),
            memory_bytes: 64 * MIB,
            pids: 48,
            ..small().limits
        },
        pool_size: 4,
        ..small()
    }
}

/// Runs episodes until `all` are done; `mark` is in the command line of every one.
async fn episodes(pool: &Pool, all: usize, mark: &str) -> BTreeMap<&'static str, usize> {
    let next = Arc::new(AtomicUsize::new(0));
    let outcomes = Arc::new(Mutex::new(BTreeMap::new()));
    let workers: Vec<_> = (0..PARALLEL)
        .map(|_| {
            let (pool, next, outcomes) = (pool.clone(), Arc::clone(&next), Arc::clone(&outcomes));
            let mark = mark.to_owned();
            tokio::spawn(async move {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= all {
                        return;
                    }
                    let setup = Setup::new([("mine", format!("{i}\n").into_bytes())]);
                    let mut sandbox = pool.lease(&setup).await.unwrap();
                    let command = format!(": {mark}; {}", episode(i));
                    let result = shell(&mut sandbox, &command).await;
                    for (what, so) in [
                        (result.outcome.as_str(), true),
                        ("with survivors", result.survivors),
                        ("with kills for memory", result.oom_kills > 0),
                    ] {
                        if so {
                            *lock(&outcomes).entry(what).or_insert(0) += 1;
                        }
                    }
                    // The next call is never harmed by the one before, but for what is left of its time on a busy host.
                    let next = "rm -rf /work/* /tmp/* /dev/shm/*; echo $((6 * 7))";
                    let next = shell(&mut sandbox, next).await;
                    assert!(
                        next.stdout == b"42\n" || next.outcome == CallOutcome::Timeout,
                        "{}: {next:?}",
                        episode(i)
                    );
                    sandbox.close().await;
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    std::mem::take(&mut *lock(&outcomes))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Each attack does what it is here for, tried alone and with time enough.
async fn proofs() {
    let mut config = config();
    config.limits.call_timeout = LONG[0];
    let pool = Pool::start(config).await.unwrap();
    let memory = pool.limits().row("memory").unwrap().holds == Holds::Yes;
    for (command, tries, proof) in HOSTILE {
        if command.contains("1 << 30") && !memory {
            continue;
        }
        let mut seen = String::new();
        for timeout in tries {
            let mut sandbox = fresh(&pool).await;
            let result = shell_for(&mut sandbox, timeout, command).await;
            sandbox.close().await;
            if proof(&result) {
                seen.clear();
                break;
            }
            seen = format!("{result:?}");
        }
        assert!(
            seen.is_empty(),
            "{command} did not do what it should: {seen}"
        );
    }
}

/// The tests of this file count what the process holds: one at a time.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |n| n.parse().unwrap())
}

/// To the stream itself, since the test harness keeps what passing tests print.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "endurance: {line}");
}

/// This process' descendants, and whatever is in a control group of its name.
fn own_processes(root: u32) -> BTreeSet<u32> {
    let group = format!("/drillyard-{root}-");
    let parents: HashMap<u32, u32> = pids()
        .into_iter()
        .filter_map(|pid| {
            let stat = proc(&format!("{pid}/stat"));
            let rest = &stat[stat.rfind(')')? + 1..];
            Some((pid, rest.split_whitespace().nth(1)?.parse().ok()?))
        })
        .collect();
    let descends = |mut pid: u32| {
        while let Some(parent) = parents.get(&pid) {
            if *parent == root {
                return true;
            }
            pid = *parent;
        }
        false
    };
    parents
        .keys()
        .copied()
        .filter(|pid| descends(*pid) || proc(&format!("{pid}/cgroup")).contains(&group))
        .collect()
}

fn own_groups() -> i64 {
    groups_of(std::process::id()).len() as i64
}

/// Descriptors of this process and of its helper.
fn own_descriptors() -> i64 {
    let helper = |pid: &u32| proc(&format!("{pid}/cmdline")).contains("sandbox-init");
    let mut all = own_processes(std::process::id());
    all.retain(helper);
    all.insert(std::process::id());
    all.into_iter().map(|pid| descriptors(pid) as i64).sum()
}

fn own_network_namespaces() -> i64 {
    let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let all: BTreeSet<_> = own_processes(std::process::id())
        .into_iter()
        .filter_map(of)
        .collect();
    all.len() as i64
}

/// Network namespaces of the host, those that no process is in included, where the kernel tells root of them.
fn network_namespaces() -> i64 {
    let slabs = proc("slabinfo");
    let line = slabs.lines().find(|l| l.starts_with("net_namespace "));
    line.and_then(|l| l.split_whitespace().nth(1)?.parse().ok())
        .unwrap_or(0)
}

/// Memory that files in memory and the kernel itself hold, in MiB: what a leaked mount, group or namespace would grow.
fn kernel_memory() -> i64 {
    let text = proc("meminfo");
    let kib: i64 = text
        .lines()
        .filter(|l| {
            [
                "Shmem:",
                "SUnreclaim:",
                "KernelStack:",
                "PageTables:",
                "Percpu:",
            ]
            .iter()
            .any(|key| l.starts_with(key))
        })
        .filter_map(|l| l.split_whitespace().nth(1)?.parse::<i64>().ok())
        .sum();
    kib / 1024
}

/// Resident memory of this process and its helper, in MiB.
fn own_memory() -> i64 {
    let mut all = own_processes(std::process::id());
    all.insert(std::process::id());
    let bytes: u64 = all.into_iter().map(resident).sum();
    (bytes / MIB) as i64
}

/// Used disk under the directory for temporary files, in MiB.
fn disk() -> i64 {
    let stat = rustix::fs::statvfs(std::env::temp_dir()).unwrap();
    ((stat.f_blocks - stat.f_bfree) * stat.f_frsize / MIB) as i64
}

fn temporary_files() -> i64 {
    [
        &std::env::temp_dir(),
        Path::new("/var/tmp"),
        Path::new("/dev/shm"),
        Path::new("/run"),
    ]
    .into_iter()
    .filter_map(|dir| fs::read_dir(dir).ok())
    .map(|dir| dir.count() as i64)
    .sum()
}

fn ipc() -> i64 {
    let kinds = ["sysvipc/shm", "sysvipc/msg", "sysvipc/sem"];
    kinds
        .iter()
        .map(|kind| proc(kind).lines().count() as i64)
        .sum()
}

fn mounts() -> i64 {
    proc("self/mountinfo").lines().count() as i64
}

struct Count {
    name: &'static str,
    read: fn() -> i64,
    /// How much more there may be afterwards.
    slack: i64,
}

fn counts(episodes: usize) -> Vec<Count> {
    let shared = (episodes / 20) as i64;
    [
        (
            "processes",
            (|| own_processes(std::process::id()).len() as i64) as fn() -> i64,
            0,
        ),
        ("control groups", own_groups, 0),
        ("descriptors", own_descriptors, 0),
        (
            "network namespaces of these processes",
            own_network_namespaces,
            0,
        ),
        ("memory of these processes, MiB", own_memory, 32),
        ("SysV IPC objects", ipc, 0),
        ("mounts", mounts, shared),
        ("network namespaces of the host", network_namespaces, shared),
        ("files in temporary directories", temporary_files, shared),
        ("kernel and tmpfs memory, MiB", kernel_memory, 256),
        ("disk, MiB", disk, 1024),
    ]
    .map(|(name, read, slack)| Count { name, read, slack })
    .into()
}

fn count(counts: &[Count], name: &str) -> i64 {
    (counts
        .iter()
        .find(|c| c.name.starts_with(name))
        .unwrap()
        .read)()
}

/// Each count sees one more of its kind.
fn controls(counts: &[Count]) {
    let sees = |name: &str, least: i64, act: &mut dyn FnMut() -> Box<dyn std::any::Any>| {
        // Others may take away what we add while we look: once is proof.
        let saw = (0..10).any(|_| {
            let before = count(counts, name);
            let _held = act();
            count(counts, name) - before >= least
        });
        assert!(saw, "the count of {name} does not see one more");
    };
    let sleep = |program: &[&str]| {
        let child = Command::new(program[0])
            .args(&program[1..])
            .arg("1000")
            .spawn()
            .unwrap();
        // Whatever runs it has done its part once it has become that.
        let comm = format!("{}/comm", child.id());
        let until = Instant::now() + Duration::from_secs(10);
        while proc(&comm) != "sleep\n" {
            assert!(Instant::now() < until, "{program:?} does not come to sleep");
            std::thread::sleep(Duration::from_millis(1));
        }
        Box::new(Killed(child))
    };
    sees("processes", 1, &mut || sleep(&["sleep"]));
    sees("descriptors", 1, &mut || {
        Box::new(fs::File::open("/dev/null").unwrap())
    });
    let isolated: &[&str] = if is_root() {
        &["unshare", "-n", "sleep"]
    } else {
        &["unshare", "-Urn", "sleep"]
    };
    sees("network namespaces of these", 1, &mut || sleep(isolated));
    sees("files in temporary", 1, &mut || {
        Box::new(tempfile::tempdir().unwrap())
    });
    let fill = |dir: &Path| {
        let mut file = tempfile::NamedTempFile::new_in(dir).unwrap();
        file.write_all(&vec![7; 64 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        Box::new(file)
    };
    sees("disk", 30, &mut || fill(&std::env::temp_dir()));
    sees("kernel and tmpfs", 30, &mut || fill(Path::new("/dev/shm")));
    sees("memory of these", 30, &mut || {
        Box::new(std::hint::black_box(vec![7_u8; 64 << 20]))
    });
    sees("SysV IPC", 1, &mut || Box::new(Segment::new()));
    if is_root() {
        sees("mounts", 1, &mut || Box::new(Mounted::new()));
        sees("network namespaces of the host", 1, &mut || {
            // Slabs hold several: enough for one more slab.
            Box::new((0..16).map(|_| sleep(isolated)).collect::<Vec<_>>())
        });
        if let Some(at) = ["memory", "unified", ""]
            .map(|d| Path::new("/sys/fs/cgroup").join(d))
            .into_iter()
            .find(|p| p.join("cgroup.procs").exists())
        {
            sees("control groups", 1, &mut || {
                let path = at.join(format!("drillyard-{}-control", std::process::id()));
                fs::create_dir(&path).unwrap();
                Box::new(Removed(path))
            });
        }
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Removed(std::path::PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

struct Segment(i32);

impl Segment {
    fn new() -> Self {
        // SAFETY: no memory is involved.
        Self(unsafe { libc::shmget(libc::IPC_PRIVATE, 4096, 0o600) })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: removal reads no structure.
        unsafe { libc::shmctl(self.0, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}

struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "none"])
            .arg(dir.path())
            .status();
        assert!(done.unwrap().success());
        Self(dir)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

async fn settled(pool: &Pool) {
    eventually_in(Duration::from_mins(3), "the pool comes to rest", || {
        pool.ready() >= config().pool_size && pool.live() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_episodes_leave_the_host_as_it_was() {
    if std::env::var_os("DRILLYARD_VICTIM").is_some() {
        return;
    }
    let _alone = ALONE.lock().await;
    let all = number("DRILLYARD_ENDURANCE", 500);
    let counts = counts(all);
    controls(&counts);
    proofs().await;
    let pool = Pool::start(config()).await.unwrap();
    settled(&pool).await;
    // Once through everything, so that what is made once and kept (threads, buffers, caches) is there.
    episodes(&pool, PARALLEL, "warm").await;
    settled(&pool).await;
    let before: Vec<i64> = counts.iter().map(|c| (c.read)()).collect();
    let started = Instant::now();
    let outcomes = episodes(&pool, all, "episode").await;
    let took = started.elapsed();
    settled(&pool).await;
    let until = Instant::now() + Duration::from_secs(30);
    let mut after;
    loop {
        after = counts.iter().map(|c| (c.read)()).collect::<Vec<_>>();
        let more = counts
            .iter()
            .zip(&before)
            .zip(&after)
            .any(|((c, b), a)| *a > b + c.slack);
        if !more || Instant::now() > until {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut table = format!("{all} episodes, {PARALLEL} at a time, in {took:.1?}; {outcomes:?}");
    for ((c, before), after) in counts.iter().zip(&before).zip(&after) {
        let _ = write!(table, "\n  {}: {before} before, {after} after", c.name);
    }
    say(&table);
    for ((c, before), after) in counts.iter().zip(&before).zip(&after) {
        assert!(*after <= before + c.slack, "{} have grown\n{table}", c.name);
    }
    drop(pool);
    assert_eq!(own_groups(), 0);
    assert_eq!(own_processes(std::process::id()), BTreeSet::new());
}

/// Numbers that only look random, from a seed.
struct Random(AtomicU64);

impl Random {
    fn below(&self, n: u64) -> u64 {
        let mut x = self.0.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.0.store(x, Ordering::Relaxed);
        x % n
    }
}

/// A process and its start time, which together are never used twice.
fn alive(pid: u32) -> Option<(u32, String)> {
    let stat = proc(&format!("{pid}/stat"));
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?.to_owned();
    (state != "Z" && state != "X").then_some((pid, started))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_the_program_at_any_moment_leaves_nothing() {
    const NAME: &str = "killing_the_program_at_any_moment_leaves_nothing";
    if let Ok(mark) = std::env::var("DRILLYARD_VICTIM") {
        let pool = Pool::start(config()).await.unwrap();
        episodes(&pool, usize::MAX, &mark).await;
        return;
    }
    let _alone = ALONE.lock().await;
    let seed = std::env::var("DRILLYARD_SEED").map_or_else(
        |_| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.unwrap().as_nanos() as u64 | 1
        },
        |seed| seed.parse().unwrap(),
    );
    say(&format!("DRILLYARD_SEED={seed}"));
    let random = Random(AtomicU64::new(seed));
    let rounds = number("DRILLYARD_KILLS", 10);
    let (ipc_before, mounts_before, files_before) = (ipc(), mounts(), temporary_files());
    let mut slowest = Duration::ZERO;
    for round in 0..rounds {
        let mark = format!("mark-{}-{round}-{seed}", std::process::id());
        let mut child = again(NAME)
            .env("DRILLYARD_VICTIM", &mark)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually_in(Duration::from_mins(3), "the program runs episodes", || {
            host_processes(&mark) > 0
        })
        .await;
        tokio::time::sleep(Duration::from_millis(random.below(1500))).await;
        let id = child.id();
        let there: Vec<_> = own_processes(id).into_iter().filter_map(alive).collect();
        // The control: beside the helper's two processes sandboxes are there to be left behind.
        assert!(there.len() > 2, "{there:?} (seed {seed})");
        assert!(!has_groups() || !groups_of(id).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        let killed = Instant::now();
        drop(Pool::start(config()).await.unwrap());
        let until = killed + Duration::from_secs(20);
        loop {
            let left: Vec<_> = there
                .iter()
                .filter(|p| alive(p.0).as_ref() == Some(p))
                .collect();
            let (groups, marked) = (groups_of(id), host_processes(&mark));
            if left.is_empty() && groups.is_empty() && marked == 0 {
                break;
            }
            assert!(
                Instant::now() < until,
                "round {round} (seed {seed}): {left:?}, {groups:?}, {marked} tools are left"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        slowest = slowest.max(killed.elapsed());
    }
    assert!(ipc() <= ipc_before);
    let shared = 20 + rounds as i64;
    assert!(mounts() <= mounts_before + shared && temporary_files() <= files_before + shared);
    say(&format!(
        "{rounds} kills with {PARALLEL} episodes under way: all was gone at latest {slowest:.0?} after the kill, the next start's sweep included"
    ));
}
