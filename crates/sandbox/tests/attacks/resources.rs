//! Using up what the host has: processes, memory, disk, processors, time, output.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drillyard_sandbox::{CallOutcome, Sandbox, Setup};

use crate::common::{MIB, elf, exec, fresh, host_processes, output, resident, shell, text, unique};
use crate::yard::{Outcome, Yard, python, python_result, shell_for, thorough};

/// Watches how many processes with a word in their command line there are, while something runs.
struct Watch {
    most: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Watch {
    fn start(mark: &str) -> Self {
        let most = Arc::new(AtomicUsize::new(0));
        let (seen, mark) = (Arc::clone(&most), mark.to_owned());
        let task = tokio::spawn(async move {
            loop {
                seen.fetch_max(host_processes(&mark), Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        Self { most, task }
    }

    fn stop(self) -> usize {
        self.task.abort();
        self.most.load(Ordering::Relaxed)
    }
}

pub async fn fork_bomb(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let mark = unique();
    let watch = Watch::start(&mark);
    let bomb = format!(": {mark}; b() {{ b | b & }}; b; sleep 30");
    let time = if thorough() { 9000 } else { 1000 };
    let result = shell_for(&mut sandbox, time, &bomb).await;
    assert!(
        text(&result.stderr).contains("Resource temporarily unavailable"),
        "{}",
        text(&result.stderr)
    );
    let most = watch.stop();
    assert!((10..=64).contains(&most), "{most} processes");
    yard.control("many of its processes were seen on the host at once");
    assert_eq!(host_processes(&mark), 0);

    // One that tells: it is for want of processes.
    let plain = "for i in range(500):\n    if os.fork() == 0: time.sleep(1); os._exit(0)";
    let result = python_result(&mut sandbox, plain).await;
    assert!(
        matches!(result.outcome, CallOutcome::Processes | CallOutcome::Error),
        "{result:?}"
    );

    // Each process starts the next and ends: there is never one to wait for.
    let mark = unique();
    let watch = Watch::start(&mark);
    let chain = format!("# {mark}\nwhile True:\n    if os.fork():\n        os._exit(0)\n");
    let started = Instant::now();
    python_result(&mut sandbox, &chain).await;
    let alive = format!("{chain}    time.sleep(0.001)\n");
    let code = format!("pid = os.fork()\nif pid == 0:\n    exec({alive:?})\ntime.sleep(1)");
    python_result(&mut sandbox, &code).await;
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(watch.stop() > 0);
    assert_eq!(host_processes(&mark), 0);
    assert_eq!(
        output(&mut sandbox, "echo fine; ls -d /proc/[0-9]* | wc -l")
            .await
            .lines()
            .next(),
        Some("fine")
    );
    sandbox.close().await;
    Outcome::Holds
}

pub async fn thread_bomb(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let code = |wanted: u32| {
        format!(
            "import _thread\nmade = 0\ntry:\n    for i in range({wanted}):\n        _thread.start_new_thread(time.sleep, (0.5,))\n        made += 1\nexcept RuntimeError as e:\n    pass\nprint(made)"
        )
    };
    assert_eq!(python(&mut sandbox, &code(20)).await, "20");
    yard.control("a few threads can be had");
    let made: u32 = python(&mut sandbox, &code(1000)).await.parse().unwrap();
    assert!((30..=64).contains(&made), "{made} threads");
    let storm = "for i in range(400):\n    pid = os.posix_spawn('/bin/true', ['true'], {})\n    if i % 3: os.waitpid(pid, 0)";
    let result = python_result(&mut sandbox, storm).await;
    assert!(result.exit_code.is_some(), "{result:?}");
    assert_eq!(output(&mut sandbox, "echo fine").await, "fine");
    sandbox.close().await;
    Outcome::Holds
}

/// Python that writes to so much memory of its own.
fn hog(mib: u64) -> String {
    format!(
        "x = bytearray({mib} << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint(len(x) >> 20)"
    )
}

pub async fn memory(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let mut other = yard.sandbox().await;
    assert_eq!(python(&mut sandbox, &hog(50)).await, "50");
    yard.control("the same program with less memory runs");
    let big = hog(1024);
    let (result, fine) = tokio::join!(
        python_result(&mut sandbox, &big),
        python_result(
            &mut other,
            "x = bytearray(20 << 20); time.sleep(0.5); print('untouched')"
        )
    );
    assert_eq!(
        (fine.outcome, fine.oom_kills),
        (CallOutcome::Ok, 0),
        "{fine:?}"
    );
    assert_ne!(result.outcome, CallOutcome::Ok);
    let outcome = if yard.enforced("memory") {
        assert_eq!(
            (result.outcome, result.oom_kills),
            (CallOutcome::Memory, 1),
            "{result:?}"
        );
        Outcome::Holds
    } else {
        assert!(yard.row("memory").how.contains("each process"));
        yard.said("memory")
    };
    assert_eq!(python(&mut sandbox, &hog(8)).await, "8");
    sandbox.close().await;
    other.close().await;
    outcome
}

pub async fn memory_of_a_child(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let code = format!(
        "sys.stdout.flush()\npid = os.fork()\nif pid == 0:\n    exec({:?})\n    os._exit(0)\nprint(os.waitpid(pid, 0)[1])",
        hog(1024)
    );
    let result = python_result(&mut sandbox, &code).await;
    assert_eq!(result.outcome, CallOutcome::Ok, "{result:?}");
    let status: i32 = text(&result.stdout).trim().parse().unwrap();
    assert_ne!(status, 0);
    yard.control("the child was ended and its parent exited with 0");
    let outcome = if yard.enforced("memory") {
        assert_eq!((status, result.oom_kills), (9, 1), "{result:?}");
        Outcome::Holds
    } else {
        yard.said("memory")
    };
    let next = shell(&mut sandbox, "true").await;
    assert_eq!((next.outcome, next.oom_kills), (CallOutcome::Ok, 0));
    sandbox.close().await;
    outcome
}

pub async fn poison(yard: Arc<Yard>) -> Outcome {
    // Everything that outlasts the processes that made it: files, their names and attributes, shared memory.
    let pool = yard
        .pool_with(|c| {
            c.limits.memory_bytes = 64 * MIB;
            c.limits.disk_bytes = 1 << 40;
            c.limits.files = 1 << 20;
        })
        .await;
    let shared = r"
made = 0
for i in range(200):
    key = call(29, 0, 1 << 20, 0o1666)
    if key < 0:
        break
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(key, None, 0)
    if at == 2**64 - 1:
        break
    ctypes.memset(at, 1, 1 << 20)
    libc.shmdt(ctypes.c_void_p(at))
    made += 1
    if made == 40:
        break
print(made)
";
    let queues = r"
made = 0
for i in range(500):
    q = call(68, 0, 0o1666)
    if q < 0:
        break
    while call(69, q, struct.pack('q', 1) + b'x' * 4000, 4000, 0o4000) == 0:
        made += 1
print(made)
";
    let names = "n = 0\ntry:\n    while True:\n        os.close(os.open('/tmp/%0250d' % n, os.O_CREAT | os.O_WRONLY)); n += 1\nexcept OSError: pass\nprint(n)";
    let attributes = "os.close(os.open('f', os.O_CREAT | os.O_WRONLY)); n = 0\ntry:\n    while True:\n        os.setxattr('f', 'user.%d' % n, b'x' * 30000); n += 1\nexcept OSError: pass\nprint(n)";
    for (what, fill) in [
        (
            "files",
            "p = 0\ntry:\n    f = open('/dev/shm/big', 'wb', 0)\n    while True: p += f.write(b'x' * (1 << 20))\nexcept OSError: pass\nprint(p >> 20)",
        ),
        ("names", names),
        ("attributes", attributes),
        ("shared memory", shared),
        ("messages", queues),
    ] {
        let mut sandbox = fresh(&pool).await;
        let filled = python_result(&mut sandbox, fill).await;
        let many = text(&filled.stdout).trim().parse::<u64>().unwrap_or(0);
        assert!(
            many > 0 || filled.oom_kills > 0 || what == "attributes",
            "{what}: {filled:?}"
        );
        yard.control("something was left behind");
        if sandbox.is_lost() {
            // Said in the result of the call that did it; the next call gets a fresh one.
            assert_eq!(filled.outcome, CallOutcome::Memory, "{what}: {filled:?}");
            sandbox.reset().await.unwrap();
        }
        let small = shell(&mut sandbox, "true").await;
        assert_eq!(
            (small.outcome, small.oom_kills),
            (CallOutcome::Ok, 0),
            "{what} {many}: {small:?}"
        );
        let eight = python_result(&mut sandbox, &hog(8)).await;
        assert_eq!(
            (text(&eight.stdout).trim(), eight.oom_kills),
            ("8", 0),
            "{what} {many}: {eight:?}"
        );
        sandbox.close().await;
    }
    Outcome::Holds
}

pub async fn memory_together(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let many = |mib: u64| {
        format!(
            "kids = []\nfor i in range(20):\n    pid = os.fork()\n    if pid == 0:\n        exec({:?}); time.sleep(1); os._exit(0)\n    kids.append(pid)\nprint([os.waitpid(k, 0)[1] for k in kids].count(0))",
            hog(mib).replace("print(", "str(")
        )
    };
    assert_eq!(python(&mut sandbox, &many(3)).await, "20");
    yard.control("as many processes with less memory live together");
    let together = python_result(&mut sandbox, &many(20)).await;
    let shared = |mib: u64| {
        format!(
            "import mmap\nfor i in range({mib} >> 5):\n    f = os.memfd_create('m')\n    os.ftruncate(f, 32 << 20)\n    m = mmap.mmap(f, 32 << 20)\n    for p in range(0, 32 << 20, 4096): m[p] = 1\n    globals()['m%d' % i] = m\nprint('had')"
        )
    };
    assert_eq!(python(&mut sandbox, &shared(64)).await, "had");
    let mapped = python_result(&mut sandbox, &shared(512)).await;
    // Huge pages are counted nowhere: they are not to be had, and others take their place.
    let huge = "print(name(call(9, 0, 2 << 20, 3, 0x40022, -1, 0)), name(call(319, b'h', 4)), name(call(29, 0, 2 << 20, 0o5600)), name(call(9, 0, 2 << 20, 3, 0x22, -1, 0)))";
    assert_eq!(python(&mut sandbox, huge).await, "EPERM EPERM EPERM ok");
    let outcome = if yard.enforced("memory") {
        assert!(
            together.oom_kills > 0 && text(&together.stdout).trim() != "20",
            "{together:?}"
        );
        assert_eq!(
            (mapped.outcome, mapped.oom_kills),
            (CallOutcome::Memory, 1),
            "{mapped:?}"
        );
        Outcome::Holds
    } else {
        assert!(yard.row("memory").how.contains("each process"));
        yard.said("memory")
    };
    assert_eq!(python(&mut sandbox, &hog(8)).await, "8");
    sandbox.close().await;
    outcome
}

/// Free bytes and files where the host keeps things.
fn free() -> Vec<(u64, u64)> {
    ["/", "/dev/shm", "/tmp"]
        .iter()
        .filter_map(|p| rustix::fs::statvfs(*p).ok())
        .map(|s| ((s.f_bfree * s.f_frsize) >> 20, s.f_ffree >> 10))
        .collect()
}

pub async fn disk(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let before = free();
    assert_eq!(
        output(
            &mut sandbox,
            "head -c 4M /dev/zero > some; stat -c %s some; rm some"
        )
        .await,
        "4194304"
    );
    yard.control("a file that fits is written");
    let result = shell(&mut sandbox, "head -c 100M /dev/zero > big").await;
    assert_eq!(
        result.outcome,
        CallOutcome::Disk,
        "{}",
        text(&result.stderr)
    );
    assert!(text(&result.stderr).contains("No space left"));
    let size: u64 = output(&mut sandbox, "stat -c %s big")
        .await
        .parse()
        .unwrap();
    assert!((8 * MIB..=16 * MIB).contains(&size), "{size}");
    // /tmp and /dev/shm share the space, or have a part of it each.
    for path in ["/tmp/more", "/dev/shm/more"] {
        let result = shell(&mut sandbox, &format!("head -c 5M /dev/zero > {path}")).await;
        assert_eq!(result.outcome, CallOutcome::Disk, "{path}");
    }
    let said = output(
        &mut sandbox,
        "rm -f big /tmp/more /dev/shm/more; echo ok > small; cat small",
    )
    .await;
    assert_eq!(said, "ok");
    let result = shell(
        &mut sandbox,
        "for i in {1..1000}; do : > f$i || exit 1; done",
    )
    .await;
    assert_eq!(
        result.outcome,
        CallOutcome::Disk,
        "{}",
        text(&result.stderr)
    );
    assert_eq!(output(&mut sandbox, "rm f*; ls").await, "small");
    // Sizes that are all hole, long names, attributes.
    assert_ne!(
        shell(&mut sandbox, "truncate -s 1P huge").await.outcome,
        CallOutcome::Ok
    );
    output(
        &mut sandbox,
        "rm -f huge; for i in {1..100}; do truncate -s 30M h$i; done; ls | wc -l",
    )
    .await;
    let started = Instant::now();
    let result = shell(&mut sandbox, "touch again").await;
    assert_eq!(result.outcome, CallOutcome::Ok);
    let snapshot = sandbox.snapshot().await;
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
    if let Err(error) = snapshot {
        assert!(error.to_string().contains("larger than"), "{error}");
    }
    let names = "n = 0\nos.system('rm -rf /work/*')\ntry:\n    while True:\n        os.mkdir('%0255d' % n); n += 1\nexcept OSError as e: print(n, e.errno)";
    let said = python(&mut sandbox, names).await;
    assert!(said.ends_with(" 28"), "{said}");
    let attributes = "n = 0\nos.system('rm -rf /work/*')\nopen('f', 'w').close()\ntry:\n    while n < 5000:\n        os.setxattr('f', 'user.%d' % n, b'x' * 60000); n += 1\nexcept OSError as e: pass\nprint(n)";
    let many: u64 = python(&mut sandbox, attributes).await.parse().unwrap();
    assert!(many * 60_000 < 64 * MIB, "{many} attributes");
    let after = free();
    for (before, after) in before.iter().zip(after) {
        assert!(after.0 + 256 > before.0, "{before:?} {after:?} MiB free");
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn processors(yard: Arc<Yard>) -> Outcome {
    let pool = yard.pool_with(|c| c.limits.cpus = 0.25).await;
    let mut sandbox = fresh(&pool).await;
    let busy = "for i in 1 2 3; do while :; do :; done & done; while :; do :; done";
    let result = shell_for(&mut sandbox, 1000, busy).await;
    let share = result.cpu.unwrap().as_secs_f64() / result.wall.as_secs_f64();
    assert!(share > 0.05, "{share}");
    yard.control("it was busy");
    let row = pool.limits().row("processors").unwrap();
    assert_eq!(row.holds, yard.row("processors").holds);
    let outcome = if yard.enforced("processors") {
        assert!(share < 0.40, "{share}");
        Outcome::Holds
    } else {
        assert!(row.how.contains("no control group"), "{row:?}");
        yard.said("processors")
    };
    sandbox.close().await;
    outcome
}

pub async fn clock(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let polite = shell_for(
        &mut sandbox,
        300,
        "trap 'echo bye; exit 0' TERM; sleep 50 & wait",
    )
    .await;
    assert_eq!(
        (polite.outcome, text(&polite.stdout).as_str()),
        (CallOutcome::Timeout, "bye\n")
    );
    yard.control("a process that listens is asked to end first");
    for command in [
        "sleep 1000",
        "trap '' TERM; while :; do :; done",
        "trap '' TERM HUP INT; sleep 1000; sleep 1000; sleep 1000",
        "kill -STOP $$",
        "python3 -c 'import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(1000)'",
        "while :; do setsid sleep 1000 & sleep 0.01; done",
    ] {
        let started = Instant::now();
        let result = shell_for(&mut sandbox, 300, command).await;
        assert_eq!(result.outcome, CallOutcome::Timeout, "{command}");
        assert!(
            started.elapsed() < Duration::from_secs(3),
            "{command}: {:?}",
            started.elapsed()
        );
    }
    // An agent's own clock cannot be longer than the configured one.
    let pool = yard
        .pool_with(|c| c.limits.call_timeout = Duration::from_millis(300))
        .await;
    let mut short = fresh(&pool).await;
    assert_eq!(
        shell_for(&mut short, 60_000, "sleep 1000").await.outcome,
        CallOutcome::Timeout
    );
    assert_eq!(output(&mut sandbox, "echo fine").await, "fine");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn daemons(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    for hide in [
        "setsid nohup sleep N >/dev/null 2>&1 & disown",
        "(trap '' TERM HUP; setsid sh -c 'trap \"\" TERM; sleep N; :' & ) &",
        "python3 -c 'import os\nos.fork() and os._exit(0)\nos.setsid()\nos.fork() and os._exit(0)\nos.execlp(\"sleep\", \"sleep\", \"N\")' &",
        "trap '' TERM; sleep N & while :; do :; done &",
        "python3 -c 'import os, time # N\nwhile True:\n  p = os.fork()\n  if p == 0: os.setsid(); time.sleep(0.05); os._exit(0)\n  time.sleep(0.02)' &",
    ] {
        let mark = unique();
        let command = hide.replace('N', &mark);
        // Ended by the clock, then by the end of its call. On a busy host it may take its time to appear.
        for time in [300, 2000, 6000] {
            let watch = Watch::start(&mark);
            let result = shell_for(&mut sandbox, time, &format!("{command}\nsleep 600")).await;
            assert_eq!(result.outcome, CallOutcome::Timeout, "{hide}");
            if watch.stop() > 0 {
                yard.control("the daemon was seen on the host");
                break;
            }
            assert!(time < 6000, "the daemon never ran: {hide}");
        }
        assert_eq!(host_processes(&mark), 0, "{hide}");
        let result = shell(&mut sandbox, &format!("{command}\nsleep 0.2; echo done")).await;
        assert_eq!(
            (text(&result.stdout).as_str(), result.survivors),
            ("done\n", true),
            "{hide}"
        );
        assert_eq!(host_processes(&mark), 0, "{hide}");
        let left = output(
            &mut sandbox,
            "cat /proc/[0-9]*/comm | sort -u | tr '\\n' ' '",
        )
        .await;
        assert!(
            !left.contains("sleep") && !left.contains("python"),
            "{hide}: {left}"
        );
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn held_output(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let mark = unique();
    let started = Instant::now();
    let result = shell(
        &mut sandbox,
        &format!("sleep {mark} & setsid sleep {mark} & echo hi"),
    )
    .await;
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(
        (result.outcome, text(&result.stdout).as_str()),
        (CallOutcome::Ok, "hi\n")
    );
    assert!(result.survivors);
    yard.control("the processes that held the output were counted as survivors");
    assert_eq!(host_processes(&mark), 0);
    assert!(!shell(&mut sandbox, "true").await.survivors);
    sandbox.close().await;
    Outcome::Holds
}

pub async fn unkillable(yard: Arc<Yard>) -> Outcome {
    // vfork, then the child pauses for ever: its parent waits in the kernel.
    let vfork = b"\xb8\x3a\0\0\0\x0f\x05\xb8\x22\0\0\0\x0f\x05\xeb\xf7";
    let setup = Setup::new([("vfork", elf(vfork))]);
    let mut sandbox = yard.pool().lease(&setup).await.unwrap();
    output(&mut sandbox, "chmod +x vfork").await;
    let seen = shell_for(&mut sandbox, 400, "./vfork & sleep 0.1; cat /proc/$!/stat").await;
    assert!(
        text(&seen.stdout).contains("(vfork) D") || text(&seen.stdout).contains("(vfork) S"),
        "{}",
        text(&seen.stdout)
    );
    yard.control("the parent was seen waiting in the kernel");
    for command in [
        "./vfork",
        "for i in 1 2 3 4 5; do ./vfork & done; wait",
        "sleep 100 & kill -STOP $!; kill -STOP $$",
        "mkfifo p; cat p",
        "python3 -c 'import os, ctypes\nif os.fork() == 0:\n  os.kill(os.getpid(), 19)\nos.wait()'",
        "flock f -c 'flock f true'",
    ] {
        let started = Instant::now();
        let result = shell_for(&mut sandbox, 300, command).await;
        assert_eq!(result.outcome, CallOutcome::Timeout, "{command}");
        assert!(
            started.elapsed() < Duration::from_secs(3),
            "{command}: {:?}",
            started.elapsed()
        );
        let left = output(&mut sandbox, "ls -d /proc/[0-9]* | wc -l; rm -f p f").await;
        assert!(left.parse::<u32>().unwrap() <= 5, "{command}: {left}");
    }
    if let Ok(states) = std::fs::read_to_string("/sys/fs/cgroup/freezer/freezer.state") {
        assert!(!states.contains("FROZEN"));
    }
    sandbox.close().await;
    Outcome::Holds
}

async fn flood(sandbox: &mut Sandbox, command: &str) {
    let before = resident(std::process::id());
    let result = shell(sandbox, command).await;
    assert_eq!(result.outcome, CallOutcome::OutputLimit, "{command}");
    let kept = result.stdout.len().max(result.stderr.len());
    assert_eq!(kept as u64, MIB, "{command}");
    assert!(result.wall < Duration::from_secs(5), "{command}");
    let grown = resident(std::process::id()).saturating_sub(before);
    assert!(grown < 24 * MIB, "{command}: {} MiB", grown >> 20);
    assert_eq!(output(sandbox, "echo fine").await, "fine");
}

pub async fn output_flood(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    for command in [
        "yes",
        "yes >&2",
        "head -c 1G /dev/zero",
        "yes & sleep 0.2",
        "yes & yes >&2 & wait",
        "trap '' PIPE TERM; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
        "setsid yes & disown; sleep 5",
    ] {
        flood(&mut sandbox, command).await;
    }
    let result = shell(&mut sandbox, "printf 'a\\0b\\377\\r\\e[31m'").await;
    assert_eq!(result.stdout, b"a\0b\xff\r\x1b[31m");
    yard.control("bytes that fit come out as they were written");
    let closed = shell(&mut sandbox, "exec >&- 2>&-; sleep 0.1; exit 3").await;
    assert_eq!((closed.exit_code, closed.stdout.len()), (Some(3), 0));
    sandbox.close().await;
    Outcome::Holds
}

pub async fn gigabytes(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    flood(&mut sandbox, "while :; do yes | head -c 10G; done").await;
    flood(&mut sandbox, "cat /dev/zero").await;
    // Beyond the pipe everything goes, but not for longer than the clock allows.
    let gone = output(&mut sandbox, "yes | head -c 300M | wc -c").await;
    assert_eq!(gone, (300 << 20).to_string());
    yard.control("inside so much was printed into a pipe");
    let result = shell_for(&mut sandbox, 500, "yes > /dev/null").await;
    assert_eq!(result.outcome, CallOutcome::Timeout);
    let result = shell(&mut sandbox, "yes > all").await;
    assert_eq!(result.outcome, CallOutcome::Disk);
    sandbox.close().await;
    Outcome::Holds
}

pub async fn search_proc(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    // What has an end ends: all but the page maps of one's own processes, which are as large as their address spaces.
    let started = Instant::now();
    let search =
        "grep -r --exclude=pagemap agent /proc 2>/dev/null | wc -l; find /proc 2>/dev/null | wc -l";
    let result = shell_for(&mut sandbox, 10_000, search).await;
    assert_eq!(result.outcome, CallOutcome::Ok, "{result:?}");
    let seen = text(&result.stdout);
    assert!(
        seen.lines().nth(1).unwrap().parse::<u32>().unwrap() > 100,
        "{seen}"
    );
    yard.control("hundreds of files were there to be searched");
    assert!(started.elapsed() < Duration::from_secs(10));
    for command in [
        "grep -r agent /proc",
        "cat /proc/self/pagemap > /dev/null",
        "find / -type f -exec cat {} + > /dev/null",
    ] {
        let started = Instant::now();
        let result = shell_for(&mut sandbox, if thorough() { 9000 } else { 800 }, command).await;
        assert!(
            matches!(
                result.outcome,
                CallOutcome::Timeout
                    | CallOutcome::Error
                    | CallOutcome::OutputLimit
                    | CallOutcome::Ok
            ),
            "{command}: {result:?}"
        );
        assert!(
            started.elapsed() < Duration::from_secs(12),
            "{command}: {:?}",
            started.elapsed()
        );
        assert_eq!(output(&mut sandbox, "echo fine").await, "fine", "{command}");
    }
    for path in [
        "kcore",
        "kmsg",
        "kpagecgroup",
        "kpagecount",
        "kpageflags",
        "sysrq-trigger",
        "timer_list",
        "slabinfo",
        "vmallocinfo",
    ] {
        let result = exec(
            &mut sandbox,
            &["head", "-c", "1", &format!("/proc/{path}")],
            b"",
        )
        .await;
        assert_eq!(result.stdout, b"", "{path}");
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn socket_memory(yard: Arc<Yard>) -> Outcome {
    let limit = 64 * MIB;
    let pool = yard.pool_with(|c| c.limits.memory_bytes = limit).await;
    let mut sandbox = fresh(&pool).await;
    let code = r"
sockets = []
try:
    for n in range(900):
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        s.bind(('127.0.0.1', 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as t:
            t.setblocking(False)
            for i in range(400):
                t.sendto(b'x' * 1400, s.getsockname())
        sockets.append(s)
except OSError:
    pass
waiting = 0
for s in sockets:
    s.setblocking(False)
    while tried(lambda: s.recv(2000)) == 'ok':
        waiting += 1400
print(waiting)
";
    let result = python_result(&mut sandbox, code).await;
    let held: u64 = text(&result.stdout).trim().parse().unwrap_or(0);
    assert!(held > 100_000 || result.oom_kills > 0, "{result:?}");
    yard.control("what had been left waiting was read at the end");
    let row = if yard.is_local() {
        "memory"
    } else {
        "socket memory"
    };
    let outcome = if yard.enforced(row) {
        assert!(held < limit, "{} MiB", held >> 20);
        Outcome::Holds
    } else {
        assert!(yard.row(row).how.contains("sockets"));
        yard.said(row)
    };
    assert_eq!(output(&mut sandbox, "echo fine").await, "fine");
    sandbox.close().await;
    outcome
}
