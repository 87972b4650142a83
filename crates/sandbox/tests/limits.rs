//! Limits, admission and accounting with real processes. Every refusal stands beside a control that was let through.
//!
//! As root the whole file also runs once more as an ordinary user (`also_as_an_ordinary_user`).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drillyard_sandbox::{
    CallOutcome, CallResult, Gauge, Holds, Limits, LimitsReport, Policy, Pool, Readings,
    SandboxConfig, SandboxError, Stop, Why,
};

use common::{
    MIB, eventually, fresh, host_processes, proc, processes_with, shell, shell_for, small, text,
    unique,
};

async fn pool() -> Pool {
    Pool::start(small()).await.unwrap()
}

fn holds(pool: &Pool, limit: &str) -> bool {
    pool.limits().row(limit).unwrap().holds == Holds::Yes
}

/// A program that holds so many MiB of memory while it runs `then`.
fn hog(mib: u64, then: &str) -> String {
    format!("perl -e '$x = \"\"; vec($x, ({mib} << 20) - 1, 8) = 1; {then}'")
}

fn warned(result: &CallResult) -> Vec<&str> {
    result.warnings.iter().map(|w| w.limit.as_str()).collect()
}

#[tokio::test]
async fn required_limits_hold_or_are_refused_with_the_way_out() {
    let with = pool().await;
    let names: Vec<&str> = with
        .limits()
        .rows
        .iter()
        .map(|r| r.limit.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "wall time",
            "memory",
            "processes",
            "processors",
            "disk",
            "files",
            "io rate",
            "open files",
            "output",
            "host files",
            "network",
            "identity"
        ]
    );
    let stored = serde_json::to_string(with.limits()).unwrap();
    let read: LimitsReport = serde_json::from_str(&stored).unwrap();
    assert_eq!(&read, with.limits());

    let mut config = small();
    config.control_groups = false;
    let without = Pool::start(config).await.unwrap();
    without
        .limits()
        .require(&["disk", "files", "wall time", "processes"])
        .unwrap();
    let error = without.limits().require(&["all"]).unwrap_err();
    assert!(matches!(error, SandboxError::LimitsDoNotHold { .. }));
    let error = error.to_string();
    for part in [
        "memory (256 MiB) holds in part: for each process alone",
        "processors (2.000) does not hold",
        "way out: set sandbox.control_groups to true",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!error.contains("disk"), "{error}");
    // A limit that nobody set can be required by name only.
    let error = with.limits().require(&["io rate"]).unwrap_err().to_string();
    assert!(
        error.contains("way out: set it in sandbox.limits"),
        "{error}"
    );
    if with.limits().weak().next().is_none() {
        with.limits().require(&["all"]).unwrap();
    } else {
        let error = with.limits().require(&["memory"]).unwrap_err().to_string();
        assert!(error.contains("run as root"), "{error}");
    }
}

#[tokio::test]
async fn a_disk_larger_than_memory_is_cut_and_the_table_says_so() {
    let mut config = small();
    config.limits.disk_bytes = Limits::default().disk_bytes;
    let pool = Pool::start(config).await.unwrap();
    let row = pool.limits().row("disk").unwrap();
    // Three quarters of the memory, less what the files' names take.
    assert_eq!(row.value, "10240 MiB asked, 191 MiB given");
    let mut sandbox = fresh(&pool).await;
    let result = shell(&mut sandbox, "head -c 100M /dev/zero > big").await;
    assert_eq!(result.outcome, CallOutcome::Ok);
    let result = shell(&mut sandbox, "head -c 300M /dev/zero > big").await;
    assert_eq!(result.outcome, CallOutcome::Disk, "{}", result.why());
    assert!(text(&result.stderr).contains("No space left"));
    assert!(warned(&result).contains(&"disk"), "{result:?}");
    // A full disk leaves memory to work with.
    assert_eq!(result.unusable, None);
    let result = shell(&mut sandbox, &hog(8, "print 1")).await;
    assert_eq!(text(&result.stdout), "1");
    sandbox.close().await;
}

#[tokio::test]
async fn a_call_is_accounted_for() {
    let pool = pool().await;
    let mut sandbox = fresh(&pool).await;
    let idle = shell(&mut sandbox, ":").await;
    assert_eq!(idle.processes, Some(1), "{idle:?}");
    assert!(idle.written_chars.unwrap() < 1000, "{idle:?}");
    assert_eq!((idle.stopped, idle.why().as_str()), (None, "exit code 0"));

    let busy = shell(
        &mut sandbox,
        "head -c 300000 /dev/zero > a; cat a > b; /bin/true & /bin/true & wait",
    )
    .await;
    assert_eq!(busy.processes, Some(5), "{busy:?}");
    let more = busy.written_chars.unwrap() - idle.written_chars.unwrap();
    assert!((600_000..605_000).contains(&more), "{more}");
    let more = busy.read_chars.unwrap() - idle.read_chars.unwrap();
    assert!((600_000..700_000).contains(&more), "{more}");

    // What is printed is written by the tool; that it is read outside is not the tool's.
    let printed = shell(&mut sandbox, "printf '%0500000d' 1").await;
    assert!(printed.written_chars.unwrap() >= 500_000);
    assert!(printed.read_chars.unwrap() < idle.read_chars.unwrap() + 100_000);

    let spun = shell(&mut sandbox, "i=0; while ((i++ < 200000)); do :; done").await;
    assert!(
        spun.user > idle.user && spun.cpu.unwrap() >= spun.user,
        "{spun:?}"
    );

    let large = shell(&mut sandbox, &hog(50, "print 1")).await;
    assert!((50 * MIB..90 * MIB).contains(&large.peak_process_memory.unwrap()));
    assert!(idle.peak_process_memory.unwrap() < 20 * MIB);
    if holds(&pool, "memory") {
        let two = format!("{} & {} & wait", hog(50, "sleep 1"), hog(50, "sleep 1"));
        let two = shell(&mut sandbox, &two).await;
        assert!(two.peak_memory.unwrap() > 100 * MIB, "{two:?}");
        assert!(two.peak_process_memory.unwrap() < 90 * MIB, "{two:?}");
        // The next call's peak is its own.
        let idle = shell(&mut sandbox, ":").await;
        assert!(idle.peak_memory.unwrap() < 50 * MIB, "{idle:?}");
        let crowd = shell(&mut sandbox, "for i in {1..20}; do sleep 0.5 & done; wait").await;
        assert!(
            (21..30).contains(&crowd.peak_processes.unwrap()),
            "{crowd:?}"
        );
    }

    let read = shell(
        &mut sandbox,
        "dd if=$(command -v perl) of=/dev/null bs=64k count=16 iflag=direct",
    )
    .await;
    // Not every file system reads past its cache.
    if read.outcome == CallOutcome::Ok {
        assert!(read.read_bytes.unwrap() >= MIB, "{read:?}");
    }
    sandbox.close().await;
}

#[tokio::test]
async fn a_stopped_call_says_whether_it_had_to_be_killed() {
    let mut config = small();
    config.limits.call_timeout = Duration::from_millis(300);
    let pool = Pool::start(config).await.unwrap();
    let mut sandbox = fresh(&pool).await;
    for (command, stop, outcome) in [
        ("sleep 50", Some(Stop::Soft), CallOutcome::Timeout),
        (
            "trap 'exit 0' TERM; sleep 50 & wait",
            Some(Stop::Soft),
            CallOutcome::Timeout,
        ),
        (
            "trap '' TERM; while :; do sleep 0.1; done",
            Some(Stop::Hard),
            CallOutcome::Timeout,
        ),
        ("yes", Some(Stop::Hard), CallOutcome::OutputLimit),
        ("true", None, CallOutcome::Ok),
        ("kill -9 $$", None, CallOutcome::Killed),
    ] {
        // The longer clock of the call does not count.
        let mut result = shell_for(&mut sandbox, Duration::from_mins(1), command).await;
        // On a busy machine whoever is asked may not get to run before the grace is over.
        for _ in 0..9 {
            if result.stopped != stop {
                result = shell_for(&mut sandbox, Duration::from_mins(1), command).await;
            }
        }
        assert_eq!(
            (result.outcome, result.stopped),
            (outcome, stop),
            "{command}: {}",
            result.why()
        );
        assert!(result.wall < Duration::from_secs(10), "{command}");
    }
    // The episode's clock goes on over a reset.
    let before = sandbox.age();
    sandbox.reset().await.unwrap();
    assert!(sandbox.age() > before);
    sandbox.close().await;
}

#[tokio::test]
async fn the_reason_is_the_first_that_applies() {
    let pool = pool().await;
    let mut sandbox = fresh(&pool).await;
    assert_eq!(
        shell(&mut sandbox, "truncate -s 1M hole").await.outcome,
        CallOutcome::Ok
    );
    // The limit on a file's size, told by the signal and by the shell's exit code for it.
    for command in ["exec truncate -s 1P huge", "truncate -s 1P huge"] {
        let result = shell(&mut sandbox, command).await;
        assert_eq!(result.outcome, CallOutcome::Disk, "{result:?}");
    }
    assert_eq!(
        shell(&mut sandbox, "kill -SEGV $$").await.outcome,
        CallOutcome::Killed
    );
    assert_eq!(
        shell(&mut sandbox, "exit 3").await.outcome,
        CallOutcome::Error
    );
    if holds(&pool, "memory") {
        let result = shell(&mut sandbox, &hog(1024, "print 1")).await;
        assert_eq!((result.outcome, result.oom_kills), (CallOutcome::Memory, 1));
        let result = shell(&mut sandbox, &format!("{}; exit 0", hog(1024, "print 1"))).await;
        assert_eq!((result.outcome, result.oom_kills), (CallOutcome::Ok, 1));
        // Our own kill comes before the kernel's.
        let command = format!("{}; sleep 50", hog(1024, "print 1"));
        let result = shell_for(&mut sandbox, Duration::from_secs(3), &command).await;
        assert_eq!(
            (result.outcome, result.oom_kills),
            (CallOutcome::Timeout, 1)
        );
        let forks = "perl -e 'for (1..500) { defined(fork) or exit 7 }; sleep 1'";
        let result = shell(&mut sandbox, forks).await;
        assert_eq!(result.outcome, CallOutcome::Processes, "{result:?}");
        assert!(warned(&result).contains(&"processes"), "{result:?}");
    }
    sandbox.close().await;
}

#[tokio::test]
async fn coming_near_a_limit_is_told() {
    let pool = pool().await;
    let mut sandbox = fresh(&pool).await;
    let result = shell(&mut sandbox, "head -c 1M /dev/zero > a").await;
    assert_eq!(warned(&result), [""; 0]);
    let result = shell(&mut sandbox, "head -c 14M /dev/zero > a").await;
    assert_eq!(warned(&result), ["disk"]);
    assert_eq!(result.outcome, CallOutcome::Ok);
    let warning = result.warnings[0].clone();
    assert_eq!(warning.to_string(), "disk: 14 of 16 MiB used");
    let stored = serde_json::to_string(&warning).unwrap();
    assert_eq!(
        serde_json::from_str::<drillyard_sandbox::LimitWarning>(&stored).unwrap(),
        warning
    );
    let result = shell(&mut sandbox, "rm a; for i in {1..440}; do : > f$i; done").await;
    assert_eq!(warned(&result), ["files"], "{result:?}");
    let result = shell(&mut sandbox, "rm f*").await;
    assert_eq!(warned(&result), [""; 0]);
    if holds(&pool, "memory") {
        let result = shell(&mut sandbox, &hog(50, "print 1")).await;
        assert_eq!(warned(&result), [""; 0]);
        let result = shell(&mut sandbox, &hog(230, "print 1")).await;
        assert_eq!(
            (result.outcome, warned(&result)),
            (CallOutcome::Ok, vec!["memory"])
        );
        let result = shell(&mut sandbox, "for i in {1..55}; do sleep 0.5 & done; wait").await;
        assert_eq!(warned(&result), ["processes"], "{result:?}");
        // That was then.
        assert_eq!(warned(&shell(&mut sandbox, ":").await), [""; 0]);
    }
    sandbox.close().await;

    let mut config = small();
    config.limits.warn_at = 0.05;
    let mut sandbox = fresh(&Pool::start(config).await.unwrap()).await;
    let result = shell(&mut sandbox, "head -c 1M /dev/zero > a").await;
    assert!(warned(&result).contains(&"disk"), "{result:?}");
    sandbox.close().await;
}

/// Makes a shared memory segment of so many MiB and fills it; it outlives its maker.
fn segment(mib: u64) -> String {
    format!(
        "perl -e '$i = shmget(0, {mib} << 20, 01600) // die \"shmget: $!\"; $x = \"x\" x (1 << 20); \
         for (0..{mib} - 1) {{ shmwrite($i, $x, $_ << 20, 1 << 20) or die \"shmwrite: $!\" }}'"
    )
}

const SEGMENTS: &str = "tail -n +2 /proc/sysvipc/shm | wc -l";

#[tokio::test]
async fn shared_memory_left_behind_is_gone_before_the_next_call() {
    let pool = pool().await;
    let mut sandbox = fresh(&pool).await;
    // The control: within its call a segment is there.
    let made = format!("{}; {SEGMENTS}", segment(10));
    let result = shell(&mut sandbox, &made).await;
    assert_eq!(text(&result.stdout), "1\n", "{}", text(&result.stderr));
    assert_eq!(result.unusable, None);
    assert_eq!(text(&shell(&mut sandbox, SEGMENTS).await.stdout), "0\n");
    if holds(&pool, "memory") {
        let result = shell(&mut sandbox, &segment(220)).await;
        assert_eq!(result.outcome, CallOutcome::Ok, "{}", text(&result.stderr));
        let result = shell(&mut sandbox, &hog(100, "print 1")).await;
        assert_eq!(
            (result.outcome, result.unusable, text(&result.stdout)),
            (CallOutcome::Ok, None, "1".into())
        );
    }
    sandbox.close().await;
}

/// A frozen control group of version 1: what is in it cannot be killed.
struct Freezer(PathBuf);

impl Freezer {
    fn new(name: &str) -> Option<Self> {
        let dir = Path::new("/sys/fs/cgroup/freezer").join(format!("test-{name}"));
        std::fs::create_dir(&dir).ok()?;
        Some(Self(dir))
    }

    fn set(&self, state: &str) {
        std::fs::write(self.0.join("freezer.state"), state).unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.set("THAWED");
        for _ in 0..500 {
            if std::fs::remove_dir(&self.0).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Freezes the processes of this mark once they run.
async fn freeze(freezer: &Freezer, mark: &str) {
    eventually("the tool runs", || host_processes(mark) > 0).await;
    for pid in processes_with(mark) {
        std::fs::write(freezer.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
    freezer.set("FROZEN");
}

#[tokio::test]
async fn a_process_that_cannot_be_killed_costs_one_call() {
    let mark = unique();
    let Some(freezer) = Freezer::new(&mark) else {
        // An ordinary user's processes can always be killed, and version 2 kills frozen ones.
        return;
    };
    let pool = pool().await;
    let mut sandbox = fresh(&pool).await;
    shell(&mut sandbox, "echo kept > file").await;
    let command = format!("exec sleep {mark}");
    let (result, ()) = tokio::join!(
        shell_for(&mut sandbox, Duration::from_secs(2), &command),
        freeze(&freezer, &mark)
    );
    // The control: it does live on.
    assert_eq!(host_processes(&mark), 1);
    assert_eq!(
        (result.outcome, result.stopped),
        (CallOutcome::Timeout, Some(Stop::Hard))
    );
    let why = result.unusable.unwrap();
    assert!(why.contains("could not be killed"), "{why}");
    let next = shell(&mut sandbox, "cat file").await;
    assert_eq!(
        (text(&next.stdout).as_str(), next.unusable),
        ("kept\n", None)
    );
    // The same once more, with files that can't be moved: the next call is not run, and that is no error of the sandbox.
    let mut config = small();
    config.limits.disk_bytes = 128 * MIB;
    let mut other = fresh(&Pool::start(config).await.unwrap()).await;
    shell(&mut other, "head -c 80M /dev/zero > large").await;
    freezer.set("THAWED");
    eventually("it ends once it can", || host_processes(&mark) == 0).await;
    let (result, ()) = tokio::join!(
        shell_for(&mut other, Duration::from_secs(2), &command),
        freeze(&freezer, &mark)
    );
    assert!(result.unusable.is_some());
    for _ in 0..2 {
        let next = shell(&mut other, "echo run").await;
        assert_eq!(
            (next.outcome, next.exit_code),
            (CallOutcome::Memory, Some(1))
        );
        assert!(text(&next.stderr).contains("not run"), "{next:?}");
        assert!(next.stdout.is_empty() && next.unusable.is_some());
    }
    other.close().await;
    sandbox.close().await;
    drop(freezer);
    eventually("it ends once it can", || host_processes(&mark) == 0).await;
}

#[tokio::test]
async fn reads_from_devices_are_slowed_where_the_table_says_so() {
    let read = "dd if=$(command -v perl) of=/dev/null bs=64k count=48 iflag=direct";
    let free = shell(&mut fresh(&pool().await).await, read).await;
    let mut config = small();
    config.limits.io_bytes_per_s = Some(MIB);
    let pool = Pool::start(config).await.unwrap();
    let row = pool.limits().row("io rate").unwrap();
    let slow = shell(&mut fresh(&pool).await, read).await;
    if row.holds == Holds::Yes {
        assert_eq!(row.value, "1024 KiB/s a device");
        // Where the file system has no direct reads there is nothing to time.
        if free.outcome == CallOutcome::Ok {
            assert!(slow.wall > Duration::from_millis(1500), "{slow:?}");
            assert!(free.wall < slow.wall, "{free:?}");
        }
    } else {
        assert!(pool.limits().require(&["io rate"]).is_err());
        assert_eq!(slow.outcome, free.outcome);
    }
}

/// A host of our making.
#[derive(Clone, Default)]
struct Host {
    total: u64,
    pressure: Arc<Mutex<Option<f64>>>,
    /// Memory of processes with this word is taken from the total.
    mark: String,
    /// The most that they ever took.
    most: Arc<Mutex<u64>>,
}

impl Host {
    fn taken(&self) -> u64 {
        let pages: u64 = processes_with(&self.mark)
            .iter()
            .filter_map(|pid| {
                proc(&format!("{pid}/statm"))
                    .split(' ')
                    .nth(1)?
                    .parse::<u64>()
                    .ok()
            })
            .sum();
        pages * 4096
    }
}

impl Gauge for Host {
    fn read(&self) -> std::io::Result<Readings> {
        let taken = if self.mark.is_empty() {
            0
        } else {
            self.taken()
        };
        let mut most = self.most.lock().unwrap();
        *most = taken.max(*most);
        Ok(Readings {
            total_bytes: self.total,
            available_bytes: self.total.saturating_sub(taken),
            memory_pressure: *self.pressure.lock().unwrap(),
            cpu_pressure: Some(100.0),
        })
    }
}

#[tokio::test]
async fn hungry_sandboxes_are_let_in_as_far_as_they_fit_and_in_order() {
    let host = Host {
        total: 1024 * MIB,
        mark: unique(),
        ..Host::default()
    };
    let policy = Policy {
        reserve: 0.0,
        ..Policy::default()
    };
    let pool = Pool::start_with(small(), policy, Box::new(host.clone()))
        .await
        .unwrap();
    assert_eq!(pool.admission().expected_bytes, 256 * MIB);
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..14 {
        let waiting = pool.waiting();
        let task = tokio::spawn({
            let (pool, order, mark) = (pool.clone(), Arc::clone(&order), host.mark.clone());
            async move {
                let mut sandbox = fresh(&pool).await;
                order.lock().unwrap().push(i);
                let command = hog(100, &format!("sleep 1; print {mark}"));
                let result = shell(&mut sandbox, &command).await;
                assert_eq!(text(&result.stdout), mark, "{result:?}");
                sandbox.close().await;
            }
        });
        // One after another at the door.
        let entered = order.lock().unwrap().len();
        eventually("it has come", || {
            order.lock().unwrap().len() > entered || pool.waiting() > waiting || task.is_finished()
        })
        .await;
        tasks.push(task);
    }
    let mut waited = 0;
    let mut most_live = 0;
    while tasks.iter().any(|t| !t.is_finished()) {
        waited = pool.waiting().max(waited);
        most_live = pool.live().max(most_live);
        let _ = host.read();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for task in tasks {
        task.await.unwrap();
    }
    let most = *host.most.lock().unwrap();
    assert!(most > 100 * MIB, "the hogs did not show: {most}");
    assert!(most <= host.total, "{most}");
    assert!(waited > 0, "nobody had to wait");
    // By their limits alone eight are let in; the first measurements may then show room for more.
    assert!((2..=12).contains(&most_live), "{most_live}");
    let order = order.lock().unwrap();
    // Those let in together are made together, and one may be ready before another.
    assert!(
        order.iter().enumerate().all(|(at, i)| at.abs_diff(*i) <= 4),
        "{order:?}"
    );
    let standing = pool.admission();
    assert_eq!((standing.live, standing.waiting), (0, 0));
    assert!(
        (100 * MIB..200 * MIB).contains(&standing.expected_bytes),
        "{standing:?}"
    );
}

#[tokio::test]
async fn leases_pause_under_memory_pressure_but_never_all() {
    let host = Host {
        total: 64 << 30,
        ..Host::default()
    };
    *host.pressure.lock().unwrap() = Some(50.0);
    let pool = Pool::start_with(small(), Policy::default(), Box::new(host.clone()))
        .await
        .unwrap();
    // Somebody always gets on.
    let first = fresh(&pool).await;
    let second = tokio::spawn({
        let pool = pool.clone();
        async move { fresh(&pool).await }
    });
    eventually("the second waits", || pool.waiting() == 1).await;
    // One that gives up leaves the queue.
    let third = tokio::time::timeout(Duration::from_millis(300), fresh(&pool)).await;
    assert!(third.is_err());
    assert_eq!((pool.waiting(), pool.live()), (1, 1));
    assert_eq!(pool.admission().why, Some(Why::MemoryPressure));
    assert!(!second.is_finished());
    *host.pressure.lock().unwrap() = Some(0.0);
    let second = second.await.unwrap();
    assert_eq!((pool.waiting(), pool.live()), (0, 2));
    // Under pressure again, the end of the last one lets the next in.
    *host.pressure.lock().unwrap() = Some(50.0);
    // Readings are kept for a moment.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(second);
    let third = tokio::spawn({
        let pool = pool.clone();
        async move { fresh(&pool).await }
    });
    eventually("the third waits", || pool.waiting() == 1).await;
    first.close().await;
    third.await.unwrap().close().await;
    assert_eq!((pool.waiting(), pool.live()), (0, 0));
}

#[tokio::test]
async fn many_idle_sandboxes_fit_although_their_limits_do_not() {
    // By their limits, two at a time.
    let host = Host {
        total: 300 * MIB,
        ..Host::default()
    };
    let policy = Policy {
        reserve: 0.0,
        oversubscription: 2.0,
        ..Policy::default()
    };
    let pool = Pool::start_with(small(), policy, Box::new(host))
        .await
        .unwrap();
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(fresh(&pool).await);
    }
    assert_eq!(pool.live(), 8);
    assert!(pool.admission().expected_bytes < 64 * MIB);
}

#[tokio::test]
async fn oversubscription_has_a_range() {
    for factor in [0.9, 2.1, f64::NAN] {
        let config = SandboxConfig {
            oversubscription: factor,
            ..small()
        };
        let error = Pool::start(config).await.unwrap_err();
        assert!(!error.is_infrastructure());
        assert!(
            error.to_string().starts_with("sandbox.oversubscription: "),
            "{error}"
        );
    }
    for factor in [1.0, 2.0] {
        let config = SandboxConfig {
            oversubscription: factor,
            ..small()
        };
        Pool::start(config).await.unwrap();
    }
}

#[tokio::test]
async fn also_as_an_ordinary_user() {
    common::also_as_an_ordinary_user().await;
}
