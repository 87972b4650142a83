//! What every backend must do: run against each by [`every_backend_must!`]. Each attack first shows that it ran.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drillyard_sandbox::Change::{Created, Deleted, Modified};
use drillyard_sandbox::{
    Call, CallOutcome, CallResult, Holds, Kind, Limits, Pool, Sandbox, SandboxConfig, SandboxError,
    Setup, Snapshot,
};

pub const MIB: u64 = 1 << 20;

/// Makes a test of each part of the contract. Takes an asynchronous function that gives the backend's configuration, or
/// nothing where the backend cannot be had.
#[macro_export]
macro_rules! every_backend_must {
    ($config:path) => {
        $crate::every_backend_must!($config;
            a_call_says_what_it_did,
            the_environment_is_exactly_the_promised_one,
            nothing_of_the_host_is_to_be_seen,
            there_is_no_network,
            system_calls_that_lead_out_are_refused,
            another_architecture_is_no_way_around_the_filter,
            its_supervisor_cannot_be_harmed,
            a_timeout_kills_the_whole_tree,
            a_timeout_asks_before_it_kills,
            background_processes_do_not_hold_a_call_up,
            a_flood_of_output_is_capped,
            a_fork_bomb_is_bounded,
            the_disk_has_an_end,
            a_full_disk_is_named_only_where_it_was_met,
            memory_has_an_end,
            processor_time_is_capped_where_the_report_says_so,
            file_tools_stay_inside_whatever_lies_in_their_way,
            setup_files_cannot_leave_the_sandbox,
            changed_files_are_told_exactly,
            large_files_changed_in_place_are_noticed,
            odd_trees_are_walked_and_cleaned,
            snapshots_restore_and_branch,
            every_sandbox_starts_alike_and_apart,
            a_lost_sandbox_is_said_to_be_lost,
            an_abandoned_call_does_not_mix_up_answers,
            more_host_paths_can_be_shown,
        );
    };
    ($config:path; $($name:ident,)*) => {$(
        #[tokio::test]
        async fn $name() {
            if let Some(config) = $config().await {
                $crate::contract::$name(config).await;
            }
        }
    )*};
}

/// The configuration that most tests use, of the default backend.
pub fn small() -> SandboxConfig {
    SandboxConfig {
        limits: Limits {
            call_timeout: Duration::from_secs(10),
            memory_bytes: 256 * MIB,
            disk_bytes: 16 * MIB,
            files: 500,
            pids: 64,
            output_bytes: MIB,
            ..Limits::default()
        },
        pool_size: 1,
        ..SandboxConfig::default()
    }
}

async fn pool(config: SandboxConfig) -> Pool {
    Pool::start(config).await.unwrap()
}

async fn sandbox(config: SandboxConfig) -> Sandbox {
    pool(config).await.lease(&Setup::default()).await.unwrap()
}

pub async fn shell(sandbox: &mut Sandbox, command: &str) -> CallResult {
    sandbox.call(Call::shell(command)).await.unwrap()
}

pub async fn shell_for(sandbox: &mut Sandbox, timeout: Duration, command: &str) -> CallResult {
    let call = Call::Shell {
        command: command.into(),
        timeout: Some(timeout),
    };
    sandbox.call(call).await.unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Standard output of a command that must succeed.
pub async fn output(sandbox: &mut Sandbox, command: &str) -> String {
    let result = shell(sandbox, command).await;
    assert_eq!(
        result.outcome,
        CallOutcome::Ok,
        "{command}: {}",
        text(&result.stderr)
    );
    text(&result.stdout).trim_end().to_owned()
}

/// Host processes with this word in their command line.
pub fn host_processes(word: &str) -> usize {
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|e| {
            e.file_name()
                .to_string_lossy()
                .bytes()
                .all(|b| b.is_ascii_digit())
        })
        .filter(|e| std::fs::read(e.path().join("cmdline")).is_ok_and(|c| text(&c).contains(word)))
        .count()
}

pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "not within ten seconds: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A number that no other process has in its command line.
pub fn unique() -> String {
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos();
    format!(
        "{}{:05}",
        90_000 + nanos % 10_000,
        std::process::id() % 100_000
    )
}

/// A static program of this machine code.
fn elf(code: &[u8]) -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    let size = (64 + 56 + code.len()) as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    for word in [BASE + 120, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(b"\0\0\0\0\x40\0\x38\0\x01\0\x40\0\0\0\0\0\x01\0\0\0\x05\0\0\0");
    for word in [0, BASE, BASE, size, size, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(code);
    elf
}

async fn read(sandbox: &mut Sandbox, path: &str) -> Result<String, String> {
    let call = Call::ReadFile {
        path: path.into(),
        max_bytes: 1000,
    };
    let result = sandbox.call(call).await.unwrap();
    match result.outcome {
        CallOutcome::Ok => Ok(text(&result.stdout)),
        _ => Err(text(&result.stderr)),
    }
}

async fn write(sandbox: &mut Sandbox, path: &str, content: &str) -> Result<(), String> {
    let call = Call::WriteFile {
        path: path.into(),
        content: content.into(),
    };
    let result = sandbox.call(call).await.unwrap();
    match result.outcome {
        CallOutcome::Ok => Ok(()),
        _ => Err(text(&result.stderr)),
    }
}

pub async fn a_call_says_what_it_did(config: SandboxConfig) {
    let pool = pool(config).await;
    let setup = Setup::new([("in.csv", &b"a,b\n1,2\n"[..]), ("deep/down/x", b"x")]);
    let mut sandbox = pool.lease(&setup).await.unwrap();
    let result = shell(
        &mut sandbox,
        "cut -d, -f2 in.csv | tee out.txt; echo oops >&2; exit 3",
    )
    .await;
    assert_eq!(text(&result.stdout), "b\n2\n");
    assert_eq!(text(&result.stderr), "oops\n");
    assert_eq!(
        (result.outcome, result.exit_code, result.signal),
        (CallOutcome::Error, Some(3), None)
    );
    assert_eq!((result.stdout_bytes, result.stderr_bytes), (4, 5));
    assert!(result.cpu.unwrap() > Duration::ZERO && result.peak_memory.unwrap() > 100_000);
    assert!(result.wall > Duration::ZERO && !result.survivors && !result.state_lost);
    let changed: Vec<_> = result
        .files_changed
        .iter()
        .map(|c| (c.path.as_str(), c.change))
        .collect();
    assert_eq!(changed, [("out.txt", Created)]);
    assert_eq!(output(&mut sandbox, "cat deep/down/x").await, "x");

    let missing = Call::Exec {
        argv: vec!["no-such-program".into()],
        stdin: Vec::new(),
        timeout: None,
    };
    let result = sandbox.call(missing).await.unwrap();
    assert_eq!(
        (result.exit_code, text(&result.stderr)),
        (Some(127), "no-such-program: command not found\n".into())
    );
    let cat = Call::Exec {
        argv: vec!["cat".into()],
        stdin: vec![7; 300_000],
        timeout: None,
    };
    assert_eq!(sandbox.call(cat).await.unwrap().stdout, vec![7; 300_000]);
    // Standard input is empty otherwise: nothing waits for a terminal.
    assert_eq!(output(&mut sandbox, "cat; read x || echo eof").await, "eof");
    let result = shell(&mut sandbox, "kill -SEGV $$").await;
    assert_eq!(
        (result.outcome, result.signal),
        (CallOutcome::Killed, Some(11))
    );
    sandbox.close().await;
}

pub async fn the_environment_is_exactly_the_promised_one(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    let env = output(&mut sandbox, "env | grep -vE '^(_|SHLVL|PWD)=' | sort").await;
    assert_eq!(
        env,
        "HOME=/work\nLANG=C.UTF-8\nPATH=/opt/drillyard/bin:/usr/local/bin:/usr/bin:/bin\nTMPDIR=/tmp"
    );
    assert_eq!(
        output(&mut sandbox, "pwd; id -u; id -g; whoami; hostname; umask").await,
        "/work\n1000\n1000\nagent\nsandbox\n0022"
    );
    assert_eq!(
        output(&mut sandbox, "ls -A /work /tmp /dev/shm | tr -d '\\n'").await,
        "/dev/shm:/tmp:/work:"
    );
    let status = output(
        &mut sandbox,
        "grep -E '^(CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs|Seccomp):' /proc/self/status",
    )
    .await;
    let none = "0000000000000000";
    assert_eq!(
        status.split_whitespace().collect::<Vec<_>>(),
        [
            "CapPrm:",
            none,
            "CapEff:",
            none,
            "CapBnd:",
            none,
            "CapAmb:",
            none,
            "NoNewPrivs:",
            "1",
            "Seccomp:",
            "2"
        ]
    );
    // 0, 1, 2 and the directory that ls itself reads.
    assert_eq!(output(&mut sandbox, "ls /proc/self/fd | wc -l").await, "4");
    sandbox.close().await;
}

pub async fn nothing_of_the_host_is_to_be_seen(config: SandboxConfig) {
    let dir = tempfile::tempdir().unwrap();
    let canary = dir.path().join("canary");
    std::fs::write(&canary, "canary-bytes").unwrap();
    let docker = config.backend == "docker";
    let mut sandbox = sandbox(config).await;
    let root = output(&mut sandbox, "ls -A / | tr '\\n' ' '").await;
    let allowed = [
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "mnt", "opt", "proc", "run",
        "sbin", "tmp", "usr", "var", "work",
    ];
    assert!(
        root.split(' ')
            .all(|name| allowed.contains(&name) || docker && ["sys", ".dockerenv"].contains(&name)),
        "{root}"
    );
    for path in [
        canary.to_str().unwrap(),
        "/etc/shadow",
        "/root",
        "/home",
        if docker { "/sys/class/net" } else { "/sys" },
        env!("CARGO_MANIFEST_DIR"),
    ] {
        let result = shell(&mut sandbox, &format!("cat {path}; ls {path}")).await;
        assert_eq!(result.outcome, CallOutcome::Error, "{path}");
        assert!(!text(&result.stdout).contains("canary-bytes"));
        assert!(
            text(&result.stderr).contains("No such file"),
            "{path}: {}",
            text(&result.stderr)
        );
    }
    // The control: what is meant to be seen is.
    assert_eq!(output(&mut sandbox, "wc -l < /etc/passwd").await, "3");
    assert_eq!(
        output(&mut sandbox, "ls -A /mnt /run | tr -d '\\n'").await,
        "/mnt:/run:"
    );
    let devices = "fd full null random shm stderr stdin stdout urandom zero";
    let more = "mqueue ptmx pts tty";
    let seen = output(&mut sandbox, "ls /dev | tr '\\n' ' '").await;
    if docker {
        assert!(
            seen.split(' ')
                .all(|d| devices.contains(d) || more.contains(d)),
            "{seen}"
        );
    } else {
        assert_eq!(seen, devices);
    }
    for command in [
        "echo x > /etc/passwd",
        "echo x > /usr/bin/x",
        "touch /x",
        "rm -f /bin/true",
        "echo 1 > /proc/sys/kernel/pid_max",
        "echo x > /proc/sys/kernel/core_pattern",
        "mknod n c 1 3",
        "cd /proc/1/root",
        "cat /proc/1/environ",
        "ls /proc/1/fd",
        "cat /proc/1/mem",
        "echo b > /proc/sysrq-trigger",
    ] {
        assert_eq!(
            shell(&mut sandbox, command).await.outcome,
            CallOutcome::Error,
            "{command}"
        );
    }
    // Processes: PID 1, the shell, what it starts.
    let pids = output(&mut sandbox, "ls -d /proc/[0-9]* | wc -l").await;
    assert!(pids.parse::<u32>().unwrap() <= 5, "{pids}");
    assert!(std::fs::read_dir("/proc").unwrap().count() > 10);
    let seen = output(&mut sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").await;
    assert!(
        seen.contains("bash")
            && !seen.contains("target")
            && !seen.contains("cargo")
            && !seen.contains("tests"),
        "{seen}"
    );
    let mounts = output(&mut sandbox, "cat /proc/self/mountinfo").await;
    assert!(
        !mounts.contains("helpers") && !mounts.contains(env!("CARGO_MANIFEST_DIR")),
        "{mounts}"
    );
    let groups = output(&mut sandbox, "cut -d: -f3 /proc/self/cgroup | sort -u").await;
    if is_root() {
        assert!(!groups.contains("drillyard"), "{groups}");
    }
    sandbox.close().await;
}

pub async fn there_is_no_network(config: SandboxConfig) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    listener.accept().unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut sandbox = sandbox(config).await;
    let result = shell(
        &mut sandbox,
        &format!("echo hi > /dev/tcp/127.0.0.1/{port}"),
    )
    .await;
    assert!(
        text(&result.stderr).contains("Connection refused"),
        "{}",
        text(&result.stderr)
    );
    let result = shell(&mut sandbox, "echo hi > /dev/tcp/10.0.0.1/80").await;
    assert!(
        text(&result.stderr).contains("unreachable"),
        "{}",
        text(&result.stderr)
    );
    assert!(listener.accept().is_err(), "something came through");
    // Loopback of its own: a server and its client within one call.
    let server = "perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(Listen => 1, LocalAddr => \"127.0.0.1\", LocalPort => 7777) or die; print {$s->accept} \"inside\\n\"' & \
                  until exec 3<>/dev/tcp/127.0.0.1/7777; do sleep 0.01; done 2>/dev/null; cat <&3";
    assert_eq!(output(&mut sandbox, server).await, "inside");
    // unix and inet can be had, vsock, packet, netlink, xdp, alg and bluetooth cannot.
    let family = |n: u32| {
        format!(
            "perl -e 'socket(S, {n}, {}, 0) or exit($!+0); exit(0)'",
            if n == 17 { 3 } else { 1 }
        )
    };
    for (n, errno) in [
        (1, 0),
        (2, 0),
        (10, 0),
        (40, 1),
        (17, 1),
        (16, 1),
        (44, 1),
        (38, 1),
        (31, 1),
    ] {
        assert_eq!(
            shell(&mut sandbox, &family(n)).await.exit_code,
            Some(errno),
            "family {n}"
        );
    }
    sandbox.close().await;
}

pub async fn system_calls_that_lead_out_are_refused(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    let call = |number: i64, args: &str| {
        format!("perl -e '$r = syscall({number}{args}); exit($r == -1 ? $!+0 : 0)'")
    };
    // The control: an ordinary call works this way.
    assert_eq!(
        shell(&mut sandbox, &call(libc::SYS_getppid, ""))
            .await
            .exit_code,
        Some(0)
    );
    for number in [
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_pivot_root,
        libc::SYS_chroot,
        libc::SYS_move_mount,
        libc::SYS_open_tree,
        libc::SYS_fsopen,
        libc::SYS_mount_setattr,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_ptrace,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_getfd,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_io_uring_setup,
        libc::SYS_keyctl,
        libc::SYS_add_key,
        libc::SYS_kexec_load,
        libc::SYS_init_module,
        libc::SYS_reboot,
        libc::SYS_quotactl,
        libc::SYS_syslog,
        libc::SYS_clock_settime,
        libc::SYS_sethostname,
        libc::SYS_open_by_handle_at,
        libc::SYS_fanotify_init,
    ] {
        let result = shell(&mut sandbox, &call(number, ", 0, 0, 0, 0, 0")).await;
        assert_eq!(result.exit_code, Some(libc::EPERM), "system call {number}");
    }
    for flag in [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWIPC,
    ] {
        let clone = call(
            libc::SYS_clone,
            &format!(", {}, 0, 0, 0, 0", flag | libc::SIGCHLD),
        );
        assert_eq!(
            shell(&mut sandbox, &clone).await.exit_code,
            Some(libc::EPERM),
            "clone {flag:x}"
        );
    }
    for number in [libc::SYS_clone3, 469 + 1, 0x4000_0000 + libc::SYS_getppid] {
        let result = shell(&mut sandbox, &call(number, ", 0, 0, 0")).await;
        assert_eq!(result.exit_code, Some(libc::ENOSYS), "system call {number}");
    }
    for command in [
        "unshare -U true",
        "unshare -r true",
        "mount -t tmpfs x /mnt",
        "umount /proc",
        "chroot / true",
        "nsenter -t 1 -m true",
    ] {
        let result = shell(&mut sandbox, command).await;
        assert_eq!(result.outcome, CallOutcome::Error, "{command}");
    }
    // Limits of PID 1 cannot be touched, one's own can.
    let limit = |pid: u32| {
        format!(
            "perl -e '$l = pack(\"QQ\", 5, 5); $r = syscall({}, {pid}, 7, $l, 0); exit($r == -1 ? $!+0 : 0)'",
            libc::SYS_prlimit64
        )
    };
    assert_eq!(
        shell(&mut sandbox, &limit(1)).await.exit_code,
        Some(libc::EPERM)
    );
    assert_eq!(shell(&mut sandbox, &limit(0)).await.exit_code, Some(0));
    sandbox.close().await;
}

pub async fn another_architecture_is_no_way_around_the_filter(config: SandboxConfig) {
    let exit = b"\xb8\x3c\0\0\0\x31\xff\x0f\x05";
    let mut by_int_80 = b"\xb8\x14\0\0\0\xcd\x80".to_vec();
    by_int_80.extend(exit);
    let setup = Setup::new([("plain", elf(exit)), ("i386", elf(&by_int_80))]);
    let mut sandbox = pool(config).await.lease(&setup).await.unwrap();
    output(&mut sandbox, "chmod +x plain i386").await;
    let run = |program: &str| Call::Exec {
        argv: vec![program.into()],
        stdin: Vec::new(),
        timeout: None,
    };
    assert_eq!(
        sandbox.call(run("./plain")).await.unwrap().exit_code,
        Some(0)
    );
    assert_eq!(
        sandbox.call(run("./i386")).await.unwrap().signal,
        Some(libc::SIGSYS)
    );
    sandbox.close().await;
}

pub async fn its_supervisor_cannot_be_harmed(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    for command in [
        "kill -9 1; kill -STOP 1; kill -INT 1; echo alive",
        "kill -9 -1",
        "perl -e 'kill 9, -1; kill 9, 1'",
        "exec 2>&-; exec 1>&-; kill -9 $$",
    ] {
        shell(&mut sandbox, command).await;
        assert_eq!(
            output(&mut sandbox, "echo still here").await,
            "still here",
            "{command}"
        );
    }
    sandbox.close().await;
}

pub async fn a_timeout_kills_the_whole_tree(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    for hide in [
        "setsid nohup sleep N >/dev/null 2>&1 &",
        "(trap '' TERM HUP; setsid sh -c 'trap \"\" TERM; sleep N; :' & ) &",
        "perl -e 'fork and exit; setpgrp; fork and exit; exec qw(sleep N)' &",
        "trap '' TERM; sleep N & while :; do :; done &",
    ] {
        let mark = unique();
        let command = format!("{} sleep 600", hide.replace('N', &mark));
        let watch = tokio::spawn({
            let mark = mark.clone();
            async move { eventually("the daemon runs", || host_processes(&mark) > 0).await }
        });
        let started = Instant::now();
        let result = shell_for(&mut sandbox, Duration::from_millis(1500), &command).await;
        watch.await.unwrap();
        assert_eq!(result.outcome, CallOutcome::Timeout, "{hide}");
        assert!(
            started.elapsed() < Duration::from_secs(6),
            "{hide}: {:?}",
            started.elapsed()
        );
        assert_eq!(host_processes(&mark), 0, "{hide}");
        let left = output(
            &mut sandbox,
            "cat /proc/[0-9]*/comm | sort -u | tr '\\n' ' '",
        )
        .await;
        assert!(
            !left.contains("sleep") && !left.contains("perl"),
            "{hide}: {left}"
        );
    }
    sandbox.close().await;
}

pub async fn a_timeout_asks_before_it_kills(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    let result = shell_for(
        &mut sandbox,
        Duration::from_millis(300),
        "trap 'echo bye; exit 0' TERM; sleep 50 & wait",
    )
    .await;
    assert_eq!(
        (result.outcome, text(&result.stdout).as_str()),
        (CallOutcome::Timeout, "bye\n")
    );
    sandbox.close().await;
}

pub async fn background_processes_do_not_hold_a_call_up(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
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
    assert_eq!(host_processes(&mark), 0);
    assert!(!shell(&mut sandbox, "true").await.survivors);
    sandbox.close().await;
}

pub async fn a_flood_of_output_is_capped(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    for (command, stderr) in [
        ("yes", false),
        ("yes >&2", true),
        ("head -c 1G /dev/zero", false),
        ("yes & sleep 0.2", false),
    ] {
        let result = shell(&mut sandbox, command).await;
        assert_eq!(result.outcome, CallOutcome::OutputLimit, "{command}");
        let kept = if stderr {
            &result.stderr
        } else {
            &result.stdout
        };
        assert_eq!(kept.len() as u64, MIB, "{command}");
        assert!(result.wall < Duration::from_secs(5));
    }
    let result = shell(&mut sandbox, "printf 'a\\0b\\377'").await;
    assert_eq!(result.stdout, b"a\0b\xff");
    sandbox.close().await;
}

pub async fn a_fork_bomb_is_bounded(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    let mark = unique();
    let most = Arc::new(AtomicUsize::new(0));
    let watch = tokio::spawn({
        let (most, mark) = (Arc::clone(&most), mark.clone());
        async move {
            loop {
                most.fetch_max(host_processes(&mark), Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    });
    let bomb = format!(": {mark}; b() {{ b | b & }}; b; sleep 30");
    let result = shell_for(&mut sandbox, Duration::from_secs(1), &bomb).await;
    watch.abort();
    assert!(
        text(&result.stderr).contains("Resource temporarily unavailable"),
        "{}",
        text(&result.stderr)
    );
    let most = most.load(Ordering::Relaxed);
    assert!((20..=64).contains(&most), "{most} processes");
    assert_eq!(host_processes(&mark), 0);
    let result = shell(
        &mut sandbox,
        "perl -e 'for (1..500) { defined(fork) or die \"limit: $!\\n\" }; sleep 1'",
    )
    .await;
    assert!(
        matches!(result.outcome, CallOutcome::Processes | CallOutcome::Error),
        "{result:?}"
    );
    assert_eq!(output(&mut sandbox, "echo fine").await, "fine");
    sandbox.close().await;
}

pub async fn the_disk_has_an_end(config: SandboxConfig) {
    let docker = config.backend == "docker";
    let mut sandbox = sandbox(config).await;
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
    let more = if docker { "5M" } else { "4M" };
    assert_eq!(
        shell(
            &mut sandbox,
            &format!("head -c {more} /dev/zero > /tmp/more")
        )
        .await
        .outcome,
        CallOutcome::Disk
    );
    assert_eq!(
        output(
            &mut sandbox,
            "rm -f big /tmp/more; echo ok > small; cat small"
        )
        .await,
        "ok"
    );
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
    // A file larger than the disk by its size alone is refused too.
    assert_ne!(
        shell(&mut sandbox, "truncate -s 1P huge").await.outcome,
        CallOutcome::Ok
    );
    sandbox.close().await;
}

pub async fn a_full_disk_is_named_only_where_it_was_met(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    for place in ["/dev/shm", "/tmp", "/work"] {
        let fill = format!("cat /dev/zero > {place}/full");
        shell(&mut sandbox, &fill).await;
        // The control: it is full.
        let met = shell(&mut sandbox, &format!("echo more > {place}/more")).await;
        assert_eq!(met.outcome, CallOutcome::Disk, "{place}: {met:?}");
        let write = Call::WriteFile {
            path: format!("{place}/more"),
            content: vec![b'x'; 20_000],
        };
        let met = sandbox.call(write).await.unwrap();
        assert_eq!(met.outcome, CallOutcome::Disk, "{place}: {met:?}");
        for unrelated in ["grep nothing /etc/passwd", "exit 3", "no-such-program"] {
            let result = shell(&mut sandbox, unrelated).await;
            assert_eq!(result.outcome, CallOutcome::Error, "{place}: {result:?}");
        }
        shell(&mut sandbox, &format!("rm {place}/full {place}/more")).await;
    }
    sandbox.close().await;
}

pub async fn memory_has_an_end(config: SandboxConfig) {
    let pool = pool(config).await;
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    // The control: the same program with less.
    assert_eq!(
        output(
            &mut sandbox,
            "perl -e '$x = \"x\" x (50 << 20); print length $x'"
        )
        .await,
        (50 << 20).to_string()
    );
    let result = shell(
        &mut sandbox,
        "perl -e '$x = \"x\" x (1 << 30); print length $x'",
    )
    .await;
    let enforced = pool
        .limits()
        .rows
        .iter()
        .find(|r| r.limit == "memory")
        .unwrap()
        .holds;
    if enforced == Holds::Yes {
        assert_eq!(result.outcome, CallOutcome::Memory, "{result:?}");
        assert_eq!(result.oom_kills, 1);
        // A child killed for memory is told of even when its parent goes on.
        let result = shell(&mut sandbox, "perl -e '$x = \"x\" x (1 << 30)'; exit 0").await;
        assert_eq!((result.outcome, result.oom_kills), (CallOutcome::Ok, 1));
        // Many processes count together.
        let result = shell(
            &mut sandbox,
            "for i in {1..20}; do perl -e '$x = \"x\" x (30 << 20); sleep 2' & done; wait %20",
        )
        .await;
        assert!(result.oom_kills > 0, "{result:?}");
    } else {
        assert_ne!(result.outcome, CallOutcome::Ok);
    }
    let result = shell(
        &mut sandbox,
        "perl -e '$x = \"x\" x (8 << 20); print \"ok\"'",
    )
    .await;
    assert_eq!(
        (result.outcome, text(&result.stdout).as_str()),
        (CallOutcome::Ok, "ok")
    );
    sandbox.close().await;
}

pub async fn processor_time_is_capped_where_the_report_says_so(mut config: SandboxConfig) {
    config.limits.cpus = 0.25;
    let pool = Pool::start(config).await.unwrap();
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let result = shell_for(
        &mut sandbox,
        Duration::from_millis(1500),
        "while :; do :; done & while :; do :; done",
    )
    .await;
    let row = pool
        .limits()
        .rows
        .iter()
        .find(|r| r.limit == "processors")
        .unwrap();
    let share = result.cpu.unwrap().as_secs_f64() / result.wall.as_secs_f64();
    if row.holds == Holds::Yes {
        assert!(share < 0.40, "{share}");
    } else {
        assert!(row.how.contains("no control group"), "{row:?}");
    }
    // The control, however little a busy host leaves: the loops ran.
    assert!(result.cpu.unwrap() > Duration::from_millis(20), "{share}");
    sandbox.close().await;
}

pub async fn file_tools_stay_inside_whatever_lies_in_their_way(config: SandboxConfig) {
    let passwd = std::fs::read("/etc/passwd").unwrap();
    let mut sandbox = sandbox(config).await;
    write(&mut sandbox, "a/b/c.txt", "hello").await.unwrap();
    assert_eq!(
        read(&mut sandbox, "/work/a/b/c.txt").await.unwrap(),
        "hello"
    );
    let long = Call::ReadFile {
        path: "a/b/c.txt".into(),
        max_bytes: 2,
    };
    let result = sandbox.call(long).await.unwrap();
    assert_eq!(
        (text(&result.stdout).as_str(), result.stdout_bytes),
        ("he", 5)
    );
    output(
        &mut sandbox,
        "ln -s /etc/shadow shadow; ln -s /proc/1/environ environ; ln -s /etc/passwd passwd; mkfifo pipe; \
         ln -s ../../../../../../etc/passwd up; ln -s loop1 loop2; ln -s loop2 loop1; ln -s nowhere/x dangling; \
         ln -s /proc/self/root/proc/1/root/etc/shadow magic; ln -s /dev/zero zero; mkdir dir; truncate -s 10M sparse",
    )
    .await;
    for (path, why) in [
        ("shadow", "No such file"),
        ("environ", "Permission denied"),
        ("magic", "Permission denied"),
        ("loop1", "Too many levels"),
        ("dangling", "No such file"),
        ("pipe", "not a regular file"),
        ("zero", "not a regular file"),
        ("dir", "Is a directory"),
        ("nothing", "No such file"),
    ] {
        let error = read(&mut sandbox, path).await.unwrap_err();
        assert!(error.contains(why), "{path}: {error}");
        assert!(
            error.starts_with(&format!("read_file: {path}: ")),
            "{error}"
        );
    }
    // Links lead to the sandbox's own /etc.
    assert!(
        read(&mut sandbox, "up")
            .await
            .unwrap()
            .contains("agent:x:1000")
    );
    assert_eq!(read(&mut sandbox, "sparse").await.unwrap().len(), 1000);
    for (path, why) in [
        ("passwd", "Read-only"),
        ("up", "Read-only"),
        ("dir", "Is a directory"),
        ("/proc/1/mem", "Permission denied"),
        ("a/b/c.txt/d", "Not a directory"),
        ("pipe", "No such device"),
        ("/etc/x", "Read-only"),
    ] {
        let error = write(&mut sandbox, path, "evil").await.unwrap_err();
        assert!(error.contains(why), "{path}: {error}");
    }
    assert_eq!(std::fs::read("/etc/passwd").unwrap(), passwd);
    let list = Call::ListDir {
        path: String::new(),
    };
    let listed = text(&sandbox.call(list).await.unwrap().stdout);
    assert_eq!(
        listed,
        "a/\ndangling -> nowhere/x\ndir/\nenviron -> /proc/1/environ\nloop1 -> loop2\nloop2 -> loop1\nmagic -> \
         /proc/self/root/proc/1/root/etc/shadow\npasswd -> /etc/passwd\npipe\t(special)\nshadow -> /etc/shadow\nsparse\t10485760\n\
         up -> ../../../../../../etc/passwd\nzero -> /dev/zero\n"
    );
    let list = Call::ListDir {
        path: "nowhere".into(),
    };
    assert!(text(&sandbox.call(list).await.unwrap().stderr).contains("No such file"));
    sandbox.close().await;
}

pub async fn setup_files_cannot_leave_the_sandbox(config: SandboxConfig) {
    let pool = pool(config).await;
    for path in [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "",
        "/work",
        "/tmp/../etc/x",
    ] {
        let setup = Setup::new([(path, &b"x"[..])]);
        let error = pool.lease(&setup).await.unwrap_err();
        assert!(
            matches!(error, SandboxError::Refused { .. }),
            "{path}: {error}"
        );
    }
    assert!(
        pool.lease(&Setup::new([
            ("/tmp/fine", &b"x"[..]),
            ("./also//fine", b"y")
        ]))
        .await
        .is_ok()
    );
}

pub async fn changed_files_are_told_exactly(config: SandboxConfig) {
    let pool = pool(config).await;
    let setup = Setup::new([
        ("same", &b"same"[..]),
        ("edit", b"old"),
        ("gone", b"gone"),
        ("mode", b"mode"),
        ("touch", b"t"),
    ]);
    let mut sandbox = pool.lease(&setup).await.unwrap();
    assert_eq!(
        shell(
            &mut sandbox,
            "cat same > /dev/null; touch touch; cp edit /dev/null"
        )
        .await
        .files_changed,
        []
    );
    let result = shell(
        &mut sandbox,
        "echo -n new > edit; rm gone; chmod 600 mode; mkdir d; echo in > d/f; ln -s edit l; echo t > /tmp/t; echo s > /dev/shm/s",
    )
    .await;
    assert!(!result.state_lost);
    let hash = |bytes: &[u8]| Some(blake3::hash(bytes).to_hex().to_string());
    let got: Vec<_> = result
        .files_changed
        .iter()
        .map(|c| {
            (
                c.path.as_str(),
                c.change,
                c.kind,
                c.before_hash.clone(),
                c.after_hash.clone(),
                c.content.as_deref(),
            )
        })
        .collect();
    assert_eq!(
        got,
        [
            (
                "/dev/shm/s",
                Created,
                Kind::File,
                None,
                hash(b"s\n"),
                Some(&b"s\n"[..])
            ),
            (
                "/tmp/t",
                Created,
                Kind::File,
                None,
                hash(b"t\n"),
                Some(b"t\n")
            ),
            ("d", Created, Kind::Dir, None, None, None),
            (
                "d/f",
                Created,
                Kind::File,
                None,
                hash(b"in\n"),
                Some(b"in\n")
            ),
            (
                "edit",
                Modified,
                Kind::File,
                hash(b"old"),
                hash(b"new"),
                Some(b"new")
            ),
            ("gone", Deleted, Kind::File, hash(b"gone"), None, None),
            ("l", Created, Kind::Link, None, hash(b"edit"), Some(b"edit")),
            (
                "mode",
                Modified,
                Kind::File,
                hash(b"mode"),
                hash(b"mode"),
                Some(b"mode")
            ),
        ]
    );
    // Same size, same moment; and through a shared mapping, which moves no time.
    for round in 0..5 {
        let result = shell(&mut sandbox, &format!("printf %03d {round} > edit")).await;
        assert_eq!(result.files_changed.len(), 1, "round {round}");
    }
    let map = "perl -e 'open F, \"+<\", \"edit\"; $m = syscall(9, 0, 3, 3, 1, fileno F, 0); syscall(0, 0, 0, 0); \
               open Z, \"<\", \"/proc/self/mem\"; exit($m == -1)'";
    assert_eq!(shell(&mut sandbox, map).await.files_changed, []);
    // What is too much to carry is said to be lost, with its hash all the same.
    let result = shell(
        &mut sandbox,
        "head -c 2M /dev/zero > big; echo small > small",
    )
    .await;
    assert!(result.state_lost);
    let big = result
        .files_changed
        .iter()
        .find(|c| c.path == "big")
        .unwrap();
    assert_eq!(
        (big.size, big.content.is_none(), big.after_hash.clone()),
        (2 * MIB, true, hash(&vec![0; 2 << 20]))
    );
    let small = result
        .files_changed
        .iter()
        .find(|c| c.path == "small")
        .unwrap();
    assert_eq!(small.content.as_deref(), Some(&b"small\n"[..]));
    assert!(!result.changes_incomplete);
    let result = shell(&mut sandbox, "mkfifo p").await;
    assert!(result.state_lost && !result.changes_incomplete);
    // A large file does not hide that there is more.
    let result = shell(&mut sandbox, "head -c 2M /dev/zero > big2; touch $'\\xff'").await;
    assert!(result.state_lost && result.changes_incomplete);
    sandbox.close().await;
}

pub async fn large_files_changed_in_place_are_noticed(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    shell(&mut sandbox, "head -c 3M /dev/zero > big").await;
    for round in 1..6 {
        let result = shell(
            &mut sandbox,
            &format!("printf {round} | dd of=big conv=notrunc seek=1000 bs=1 status=none"),
        )
        .await;
        let paths: Vec<_> = result
            .files_changed
            .iter()
            .map(|c| c.path.as_str())
            .collect();
        assert_eq!(paths, ["big"], "round {round}");
    }
    assert_eq!(
        shell(&mut sandbox, "cat big > /dev/null")
            .await
            .files_changed,
        []
    );
    sandbox.close().await;
}

pub async fn odd_trees_are_walked_and_cleaned(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    let result = shell(
        &mut sandbox,
        "mkdir -p a/b && echo x > a/b/f && chmod 000 a/b a; touch $'line\\nbreak'; printf x > $(printf 'n%.0s' {1..255}); \
         mkdir -p $(printf 'd/%.0s' {1..200})",
    )
    .await;
    assert_eq!(result.outcome, CallOutcome::Ok, "{}", text(&result.stderr));
    // Deeper than is looked at, and said.
    assert!(result.state_lost);
    assert!(
        result
            .files_changed
            .iter()
            .any(|c| c.path == "a/b/f" && c.content.as_deref() == Some(b"x\n"))
    );
    assert!(result.files_changed.iter().any(|c| c.path == "line\nbreak"));
    sandbox.reset().await.unwrap();
    assert_eq!(output(&mut sandbox, "ls -A").await, "");
    sandbox.close().await;
}

pub async fn snapshots_restore_and_branch(config: SandboxConfig) {
    let pool = pool(config).await;
    let mut sandbox = pool
        .lease(&Setup::new([("start", &b"start"[..])]))
        .await
        .unwrap();
    output(
        &mut sandbox,
        "mkdir -p d/e; echo one > d/e/f; chmod 640 d/e/f; ln -s d/e/f link; echo t > /tmp/t; mkdir empty; touch -d 2001-02-03 old; \
         chmod 500 d; drillyard-sql-tool --create t.db <<< 'create table t(a); insert into t values (42)'",
    )
    .await;
    let snapshot = sandbox.snapshot().await.unwrap();
    let look = "cat link /tmp/t; stat -c '%n %a' d d/e/f empty; stat -c %Y old; drillyard-sql-tool t.db <<< 'select a from t'";
    let seen = output(&mut sandbox, look).await;
    assert!(
        seen.contains("one") && seen.contains("d 500") && seen.contains("42"),
        "{seen}"
    );
    output(
        &mut sandbox,
        "chmod 700 d; rm -rf d link t.db; echo more > more; mkdir /tmp/x; echo gone > start",
    )
    .await;
    sandbox.restore(&snapshot).await.unwrap();
    assert_eq!(output(&mut sandbox, look).await, seen);
    assert_eq!(
        output(&mut sandbox, "ls -A; ls -A /tmp; cat start").await,
        "d\nempty\nlink\nold\nstart\nt.db\nt\nstart"
    );
    assert_eq!(
        sandbox.snapshot().await.unwrap().digest(),
        snapshot.digest()
    );

    // Stored and read back, days later too.
    let stored = Snapshot::from_bytes(&snapshot.to_bytes().unwrap()).unwrap();
    assert_eq!(stored, snapshot);
    assert!(Snapshot::from_bytes(&snapshot.to_bytes().unwrap()[..100]).is_err());
    let (mut a, mut b) = (
        pool.branch(&stored).await.unwrap(),
        pool.branch(&stored).await.unwrap(),
    );
    output(&mut a, "echo a > mine").await;
    assert_eq!(shell(&mut b, "cat mine").await.outcome, CallOutcome::Error);
    assert_eq!(output(&mut b, look).await, seen);
    // What a call changed can be applied to another one.
    let result = shell(
        &mut a,
        "chmod 700 d; echo two > d/e/f; rm link; ln -s old link; rm -r empty",
    )
    .await;
    assert!(!result.state_lost);
    b.apply(&result.files_changed).await.unwrap();
    output(&mut a, "rm mine").await;
    assert_eq!(
        a.snapshot().await.unwrap().digest(),
        b.snapshot().await.unwrap().digest()
    );
    b.reset().await.unwrap();
    assert_eq!(b.snapshot().await.unwrap().digest(), snapshot.digest());
    assert!(
        snapshot
            .files()
            .any(|(path, bytes)| path == "d/e/f" && bytes == b"one\n")
    );
    for sandbox in [sandbox, a, b] {
        sandbox.close().await;
    }
}

pub async fn every_sandbox_starts_alike_and_apart(config: SandboxConfig) {
    let pool = pool(config).await;
    let probe = "ls -laR --time-style=+ /work /tmp /dev/shm | sed 's/total .*//'; ipcs -m -q -s; hostname; umask; ulimit -a; \
                 cat /proc/sys/kernel/pid_max /proc/self/cgroup /etc/passwd";
    let mut first = pool.lease(&Setup::default()).await.unwrap();
    let mut other = pool.lease(&Setup::default()).await.unwrap();
    let clean = output(&mut first, probe).await;
    let mess = "echo secret > /work/s; echo secret > /tmp/s; echo secret > /dev/shm/s; umask 077; ulimit -n 10; \
                perl -e 'shmget(4660, 4096, 01666) or die; msgget(4660, 01666) or die; semget(4660, 1, 01666) or die'; ipcs -m | grep 1234";
    assert!(output(&mut first, mess).await.contains("0x00001234"));
    // At the same time, next door.
    assert_eq!(output(&mut other, probe).await, clean);
    first.reset().await.unwrap();
    assert_eq!(output(&mut first, probe).await, clean);
    // Abstract sockets do not meet either.
    let serve = "perl -MIO::Socket::UNIX -e '$s = IO::Socket::UNIX->new(Local => \"\\0meet\", Listen => 1) or die $!; sleep 1'";
    let connect =
        "perl -MIO::Socket::UNIX -e 'exit(IO::Socket::UNIX->new(Peer => \"\\0meet\") ? 0 : 7)'";
    let control = format!("{serve} & sleep 0.3; {connect}");
    assert_eq!(shell(&mut first, &control).await.exit_code, Some(0));
    let (serving, connected) = tokio::join!(shell(&mut first, serve), async {
        tokio::time::sleep(Duration::from_millis(400)).await;
        shell(&mut other, connect).await
    });
    assert_eq!((serving.exit_code, connected.exit_code), (Some(0), Some(7)));
    first.close().await;
    other.close().await;
}

pub async fn a_lost_sandbox_is_said_to_be_lost(config: SandboxConfig) {
    let pool = pool(config).await;
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let mark = unique();
    // Someone on the host kills PID 1 of the sandbox in the middle of a call.
    let killer = tokio::spawn({
        let mark = mark.clone();
        async move {
            eventually("the tool runs", || host_processes(&mark) > 0).await;
            for entry in std::fs::read_dir("/proc").unwrap().flatten() {
                let Ok(cmdline) = std::fs::read(entry.path().join("cmdline")) else {
                    continue;
                };
                if text(&cmdline).contains(&mark) {
                    let status = std::fs::read_to_string(entry.path().join("status")).unwrap();
                    let parent = status
                        .lines()
                        .find_map(|l| l.strip_prefix("PPid:"))
                        .unwrap()
                        .trim();
                    let parent = rustix::process::Pid::from_raw(parent.parse().unwrap()).unwrap();
                    rustix::process::kill_process(parent, rustix::process::Signal::KILL).unwrap();
                    return;
                }
            }
        }
    });
    let error = sandbox
        .call(Call::shell(format!("exec sleep {mark}")))
        .await
        .unwrap_err();
    killer.await.unwrap();
    assert!(
        matches!(&error, SandboxError::Lost { cause } if cause.contains("signal 9")),
        "{error}"
    );
    assert!(sandbox.is_lost());
    assert!(matches!(
        sandbox.call(Call::shell("true")).await,
        Err(SandboxError::Lost { .. })
    ));
    sandbox.reset().await.unwrap();
    assert_eq!(output(&mut sandbox, "echo back").await, "back");
    sandbox.close().await;
}

pub async fn an_abandoned_call_does_not_mix_up_answers(config: SandboxConfig) {
    let mut sandbox = sandbox(config).await;
    let slow = sandbox.call(Call::shell("sleep 0.3; echo late"));
    assert!(
        tokio::time::timeout(Duration::from_millis(50), slow)
            .await
            .is_err()
    );
    let error = sandbox.call(Call::shell("echo other")).await.unwrap_err();
    assert!(matches!(error, SandboxError::Abandoned), "{error}");
    sandbox.reset().await.unwrap();
    assert_eq!(output(&mut sandbox, "echo fresh").await, "fresh");
    sandbox.close().await;
}

pub async fn more_host_paths_can_be_shown(mut config: SandboxConfig) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("data"), "shown").unwrap();
    config.host_paths = vec![dir.path().to_str().unwrap().into()];
    let pool = Pool::start(config).await.unwrap();
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let path = dir.path().display();
    // Below /tmp the private /tmp of the sandbox hides it; the path must lie elsewhere to be seen.
    if !dir.path().starts_with("/tmp") {
        assert_eq!(
            output(&mut sandbox, &format!("cat {path}/data")).await,
            "shown"
        );
    }
    assert_eq!(
        shell(&mut sandbox, &format!("echo x > {path}/data"))
            .await
            .outcome,
        CallOutcome::Error
    );
    assert_eq!(
        std::fs::read_to_string(dir.path().join("data")).unwrap(),
        "shown"
    );
    sandbox.close().await;
}
