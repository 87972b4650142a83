//! Ways out of the sandbox, and into what runs it.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use drillyard_sandbox::{Call, CallOutcome, Setup};

use crate::common::{
    ORDINARY_ID, elf, eventually, exec, fresh, helpers, host_processes, is_root, output, read,
    shell, text, unique, write,
};
use crate::target::{PLANTED, SECRET};
use crate::yard::{Canary, Outcome, Yard, python, python_outside, python_result, shell_for};

pub async fn host_files(yard: Arc<Yard>) -> Outcome {
    let canary = Canary::plant();
    assert_eq!(
        std::fs::read_to_string(canary.path()).unwrap(),
        canary.words
    );
    yard.control("the same file is read by its path outside");
    let exe = std::env::current_exe().unwrap();
    let mut sandbox = yard.sandbox().await;
    for path in [
        canary.path().as_path(),
        canary.path().parent().unwrap(),
        exe.as_path(),
        exe.parent().unwrap(),
        Path::new(env!("CARGO_MANIFEST_DIR")),
        Path::new("/etc/shadow"),
        Path::new("/root"),
        Path::new("/home"),
        Path::new("/boot"),
        // An engine shows an empty /sys with empty directories in it.
        Path::new(if yard.is_local() {
            "/sys"
        } else {
            "/sys/class/net"
        }),
        Path::new("/var/lib/dpkg"),
    ] {
        let path = path.display();
        let result = shell(&mut sandbox, &format!("cat {path}; ls -A {path}")).await;
        assert!(
            text(&result.stderr).contains("No such file"),
            "{path}: {}",
            text(&result.stderr)
        );
        assert_eq!(result.stdout, b"", "{path}");
    }
    let found = output(
        &mut sandbox,
        &format!(
            "find / -path /usr -prune -o -path /proc -prune -o -name '{}' -print 2>/dev/null; true",
            canary.words
        ),
    )
    .await;
    assert_eq!(found, "");
    let root = output(&mut sandbox, "ls -A / | tr '\\n' ' '").await;
    let mut allowed = vec![
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "mnt", "opt", "proc", "run",
        "sbin", "tmp", "usr", "var", "work",
    ];
    if !yard.is_local() {
        allowed.extend(["sys", ".dockerenv"]);
    }
    assert!(
        root.split(' ').all(|name| allowed.contains(&name)),
        "{root}"
    );
    assert_eq!(output(&mut sandbox, "wc -l < /etc/passwd").await, "3");
    assert_eq!(
        output(&mut sandbox, "ls -A /mnt /run | tr -d '\\n'").await,
        "/mnt:/run:"
    );
    let groups = output(&mut sandbox, "cut -d: -f3 /proc/self/cgroup | sort -u").await;
    assert!(!is_root() || !groups.contains("drillyard"), "{groups}");
    let mounts = output(&mut sandbox, "cat /proc/self/mountinfo").await;
    assert!(
        !mounts.contains("helpers") && !mounts.contains(env!("CARGO_MANIFEST_DIR")),
        "{mounts}"
    );
    for command in [
        "echo x > /etc/passwd",
        "echo x > /usr/bin/x",
        "touch /x",
        "rm -f /bin/true",
    ] {
        assert_eq!(
            shell(&mut sandbox, command).await.outcome,
            CallOutcome::Error,
            "{command}"
        );
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn climb(yard: Arc<Yard>) -> Outcome {
    let canary = Canary::plant();
    let code = format!(
        r"
canary = {:?}
ways = ['/proc/self/root', '/proc/self/cwd', '/proc/1/root', '/proc/1/cwd', '/proc/thread-self/root', '.', '/proc/self/fd/0/..']
ups = ['', '/..' * 40]
for pid in os.listdir('/proc'):
    if pid.isdigit():
        ways += ['/proc/%s/root' % pid, '/proc/%s/cwd' % pid, '/proc/%s/fd/3' % pid]
for way in ways:
    for up in ups:
        try:
            print(open(way + up + canary).read())
        except OSError:
            pass
for n in (161, 155):  # chroot, pivot_root
    print(name(call(n, b'.', b'.')))
",
        canary.path()
    );
    assert!(python_outside(&code).contains(&canary.words));
    yard.control("outside the same ways lead to the file");
    let mut sandbox = yard.sandbox().await;
    assert_eq!(python(&mut sandbox, &code).await, "EPERM\nEPERM");
    let top = "s = os.stat('/'); print([(os.stat(p).st_dev, os.stat(p).st_ino) == (s.st_dev, s.st_ino) for p in ('/..', '/proc/self/root/../..', '/proc/self/cwd/../../..')])";
    assert_eq!(python(&mut sandbox, top).await, "[True, True, True]");
    for command in [
        "cd /proc/1/root",
        "ls /proc/1/fd",
        "cat /proc/1/mem",
        "chroot / true",
    ] {
        assert_eq!(
            shell(&mut sandbox, command).await.outcome,
            CallOutcome::Error,
            "{command}"
        );
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn descriptors(yard: Arc<Yard>) -> Outcome {
    const LOOK: &str = r"
found = []
for fd in range(4096):
    try:
        os.fstat(fd)
    except OSError:
        continue
    kind = os.readlink('/proc/self/fd/%d' % fd)
    way = tried(lambda: os.fchdir(fd))
    found.append((fd, kind.split(':')[0], way))
print(found)
";
    let mut sandbox = yard.sandbox().await;
    let leaked = format!("d = os.open('/', os.O_RDONLY | os.O_DIRECTORY)\n{LOOK}");
    assert!(
        python(&mut sandbox, &leaked)
            .await
            .contains("(3, '/', 'ok')")
    );
    yard.control("a descriptor of a directory is found and entered");
    assert_eq!(
        python(&mut sandbox, LOOK).await,
        "[(0, '/dev/null', 'ENOTDIR'), (1, 'pipe', 'ENOTDIR'), (2, 'pipe', 'ENOTDIR')]"
    );
    // File tools run without executing a program: what they hold is not to be had either.
    for path in ["/proc/self/fd/3", "/dev/fd/3", "/proc/self/fd/0"] {
        assert!(read(&mut sandbox, path).await.is_err(), "{path}");
    }
    sandbox.close().await;
    Outcome::Holds
}

/// Code that makes these system calls with zeros and prints the errors' names in a line.
fn calls(numbers: &[i64]) -> String {
    let numbers: Vec<_> = numbers.iter().map(ToString::to_string).collect();
    format!(
        "print(' '.join(name(call(n, 0, 0, 0, 0, 0)) for n in [{}]))",
        numbers.join(", ")
    )
}

/// By the filter, whether or not the kernel has them.
fn all_refused(said: &str, how_many: usize) {
    assert_eq!(said, vec!["EPERM"; how_many].join(" "));
}

pub async fn mounts(yard: Arc<Yard>) -> Outcome {
    let numbers = [
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_move_mount,
        libc::SYS_fsopen,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fspick,
        libc::SYS_open_tree,
        libc::SYS_mount_setattr,
        libc::SYS_pivot_root,
        457,
        458,
        467,
    ];
    let mut sandbox = yard.sandbox().await;
    let before = output(&mut sandbox, "cat /proc/self/mountinfo").await;
    assert!(before.contains(" / "));
    assert_eq!(python(&mut sandbox, "print(name(call(39)))").await, "ok");
    yard.control("an ordinary call works this way, and mounts can be read");
    all_refused(&python(&mut sandbox, &calls(&numbers)).await, numbers.len());
    for command in [
        "mount -t tmpfs x /mnt",
        "mount -o remount,rw /",
        "mount -o remount,rw,bind /usr",
        "mount --bind /tmp /mnt",
        "umount /proc",
        "umount -l /work",
    ] {
        assert_ne!(
            shell(&mut sandbox, command).await.outcome,
            CallOutcome::Ok,
            "{command}"
        );
    }
    assert_eq!(
        output(&mut sandbox, "cat /proc/self/mountinfo").await,
        before
    );
    sandbox.close().await;
    Outcome::Holds
}

pub async fn namespaces(yard: Arc<Yard>) -> Outcome {
    let outside = Command::new("unshare").args(["-U", "true"]).status();
    let code = r"
flags = [0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000]
print(' '.join(name(call(56, f | 17, 0, 0, 0, 0)) for f in flags))
print(' '.join(name(call(272, f)) for f in flags + [0x80]))
print(name(call(435, ctypes.create_string_buffer(88), 88)))
fds = [os.open('/proc/self/ns/' + n, os.O_RDONLY) for n in ('user', 'mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup')]
print(' '.join(name(call(308, fd, 0)) for fd in fds))
pid = os.fork()
if pid == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), tried(lambda: os.listdir('/proc/1/ns') and os.readlink('/proc/1/ns/mnt')))
";
    let mut sandbox = yard.sandbox().await;
    let said = python(&mut sandbox, code).await;
    let lines: Vec<_> = said.lines().collect();
    assert!(outside.is_ok_and(|s| s.success()));
    assert!(lines[4].starts_with("7 "), "{said}");
    yard.control("outside a namespace can be made; inside an ordinary fork works");
    all_refused(lines[0], 7);
    all_refused(lines[1], 8);
    assert_eq!(lines[2], "ENOSYS", "{said}");
    all_refused(lines[3], 7);
    assert!(lines[4] != "7 ok", "{said}");
    for command in ["unshare -U true", "unshare -r true", "nsenter -t 1 -m true"] {
        assert_eq!(
            shell(&mut sandbox, command).await.outcome,
            CallOutcome::Error,
            "{command}"
        );
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn trace(yard: Arc<Yard>) -> Outcome {
    // process_vm_readv of a child of one's own, by raw call.
    let own = r"
word = ctypes.create_string_buffer(b'own words')
into = ctypes.create_string_buffer(16)
pid = os.fork()
if pid == 0:
    time.sleep(5)
    os._exit(0)
local = struct.pack('QQ', ctypes.addressof(into), 9)
remote = struct.pack('QQ', ctypes.addressof(word), 9)
print(name(call(310, pid, local, 1, remote, 1, 0)), into.value)
os.kill(pid, 9)
";
    assert_eq!(python_outside(own), "ok b'own words'");
    yard.control("outside another process' memory is read this way");
    let mut sandbox = yard.sandbox().await;
    assert_eq!(python(&mut sandbox, own).await, "EPERM b''");
    let code = r"
word = ctypes.create_string_buffer(b'x' * 16)
vec = struct.pack('QQ', ctypes.addressof(word), 8)
for pid in (1, os.getppid()):
    print(name(call(101, 16, pid, 0, 0)), name(call(101, 0x4206, pid, 0, 0)),
          name(call(310, pid, vec, 1, vec, 1, 0)), name(call(311, pid, vec, 1, vec, 1, 0)))
fd = call(434, 1, 0)
print(name(fd), name(call(438, fd, 0, 0)), name(call(440, fd, vec, 1, 21, 0)), name(call(448, fd, 0)), name(call(312, 1, os.getpid(), 0, 0, 0)))
for file in ('mem', 'maps', 'environ', 'auxv', 'stack', 'syscall', 'io', 'pagemap', 'fd/0', 'exe', 'root', 'cwd', 'ns/user', 'map_files', 'personality', 'clear_refs', 'timers'):
    r = tried(lambda: os.open('/proc/1/' + file, os.O_RDONLY))
    w = tried(lambda: os.open('/proc/1/' + file, os.O_WRONLY))
    if 'ok' in (r, w):
        print('OPENED', file, r, w)
";
    let said = python(&mut sandbox, code).await;
    let lines: Vec<_> = said.lines().collect();
    for line in &lines[..2] {
        all_refused(line, 4);
    }
    assert_eq!(lines[2], "ok EPERM EPERM EPERM EPERM");
    assert_eq!(lines.len(), 3, "{said}");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn kill_supervisor(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let kill_child = "sleep 50 & kill -9 $!; wait $!; echo $?";
    assert_eq!(output(&mut sandbox, kill_child).await, "137");
    yard.control("a process of one's own is killed the same way");
    // Where the supervisor has the tools' user id it could be put last in line for the processors.
    let starve = r"
p = os.posix_spawn('/bin/sleep', ['sleep', '5'], {})
for pid in (p, 1):
    print(tried(lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))), tried(lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})),
          tried(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)), name(call(251, 1, pid, 3 << 13)), name(call(314, pid, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)), name(call(142, pid, struct.pack('i', 0))))
print(tried(lambda: os.setpriority(os.PRIO_USER, 0, 19)), tried(lambda: os.setpriority(os.PRIO_USER, 1000, 19)), name(call(251, 3, 0, 3 << 13)), name(call(251, 3, 1000, 3 << 13)))
os.kill(p, 9)
";
    assert_eq!(
        python(&mut sandbox, starve).await,
        "ok ok ok ok ok ok\nEPERM EPERM EPERM EPERM EPERM EPERM\nEPERM EPERM EPERM EPERM"
    );
    // Limits of one's own can be set, the supervisor's not.
    let limits = "print(*(name(call(302, pid, 7, struct.pack('QQ', 5, 5), 0)) for pid in (1, 0)))";
    assert_eq!(python(&mut sandbox, limits).await, "EPERM ok");
    for command in [
        "kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1; kill -SEGV 1; echo alive",
        "kill -9 -1",
        "kill -STOP -1",
        "python3 -c 'import os, signal; fd = os.pidfd_open(1); signal.pidfd_send_signal(fd, 9)'",
        "python3 -c 'import os\nfor s in range(1, 65):\n  try: os.kill(1, s)\n  except OSError: pass'",
        "python3 -c 'import os; os.setpriority(os.PRIO_PROCESS, 1, 19)'",
        "python3 -c 'import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (5, 5))'",
        "exec 2>&-; exec 1>&-; kill -9 $$",
    ] {
        let started = std::time::Instant::now();
        shell_for(&mut sandbox, 1000, command).await;
        assert!(started.elapsed().as_secs() < 5, "{command}");
        assert_eq!(
            output(&mut sandbox, "echo still here").await,
            "still here",
            "{command}"
        );
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn environments(yard: Arc<Yard>) -> Outcome {
    let own = text(&std::fs::read("/proc/self/environ").unwrap());
    assert!(own.contains(SECRET.1));
    yard.control("the attacking process' own environment holds the secret");
    let mut sandbox = yard.sandbox().await;
    let seen = output(
        &mut sandbox,
        "env; cat /proc/[0-9]*/environ /proc/[0-9]*/task/*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/task/*/cmdline 2>/dev/null | tr '\\0' ' '; true",
    )
    .await;
    assert!(seen.contains("bash"), "{seen}");
    for word in [
        SECRET.1, SECRET.0, "CARGO", "cargo", "target", "tests", "helpers",
    ] {
        assert!(!seen.contains(word), "{word} in {seen}");
    }
    assert_eq!(shell(&mut sandbox, "cat /proc/1/environ").await.stdout, b"");
    // The file tools do not execute a program: what their process inherited is not to be read either.
    let call = Call::ReadFile {
        path: "/proc/self/environ".into(),
        max_bytes: 10_000,
    };
    let own = sandbox.call(call).await.unwrap();
    assert!(!text(&own.stdout).contains(SECRET.1));
    let pids = output(&mut sandbox, "ls -d /proc/[0-9]* | wc -l").await;
    assert!(pids.parse::<u32>().unwrap() <= 5, "{pids}");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn settings(yard: Arc<Yard>) -> Outcome {
    let host = || {
        [
            "kernel/core_pattern",
            "kernel/pid_max",
            "kernel/sysrq",
            "vm/overcommit_memory",
            "fs/file-max",
            "kernel/hostname",
        ]
        .map(|name| std::fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default())
    };
    let before = host();
    let mut sandbox = yard.sandbox().await;
    // Every file of /proc but those of processes, opened for writing.
    let code = r"
tried_, opened = 0, []
for top, dirs, files in os.walk('/proc'):
    if top == '/proc':
        dirs[:] = [d for d in dirs if not d.isdigit()]
        dirs[:] = [d for d in dirs if d not in ('self', 'thread-self')]
    for file in files:
        path = os.path.join(top, file)
        if os.path.islink(path):
            continue
        tried_ += 1
        for flags in (os.O_WRONLY, os.O_RDWR):
            try:
                os.close(os.open(path, flags | os.O_NONBLOCK))
                opened.append(path)
                break
            except OSError:
                pass
print(tried_)
print(opened)
";
    let said = python(&mut sandbox, code).await;
    let (many, opened) = said.split_once('\n').unwrap();
    assert!(many.parse::<u32>().unwrap() > 100, "{many}");
    yard.control("hundreds of settings were there to be tried");
    assert_eq!(opened, "[]");
    let own = python(
        &mut sandbox,
        "print(tried(lambda: open('/proc/self/oom_score_adj', 'w').write('-1000')), tried(lambda: os.setpriority(os.PRIO_PROCESS, 0, -5)), name(call(144, 0, 1, struct.pack('i', 1))), name(call(170, b'evil', 4)), name(call(227, 0, struct.pack('QQ', 0, 0))), name(call(305, 0, ctypes.create_string_buffer(208))))",
    )
    .await;
    assert!(!own.contains("ok"), "{own}");
    assert_eq!(host(), before);
    sandbox.close().await;
    Outcome::Holds
}

pub async fn devices(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let said = output(&mut sandbox, "echo x > /dev/null; head -c 3 /dev/zero | od -An -tx1; head -c 4 /dev/urandom | wc -c; echo x > /dev/full; mkfifo p && echo made").await;
    assert_eq!(said, " 00 00 00\n4\nmade");
    yard.control("the devices that are meant to be there work, and a pipe can be made");
    let code = r"
for kind in (0o020666, 0o060666):
    for major, minor in ((0, 0), (1, 1), (1, 3), (1, 5), (8, 0), (10, 200), (10, 229), (10, 232), (254, 0)):
        r = tried(lambda: os.mknod('/work/node', kind, os.makedev(major, minor)))
        if r == 'ok':
            print('MADE', oct(kind), major, minor, tried(lambda: os.open('/work/node', os.O_RDONLY)))
            os.unlink('/work/node')
for path in ('mem', 'kmem', 'port', 'kvm', 'vda', 'sda', 'nvme0', 'fuse', 'net/tun', 'kmsg', 'ptmx', 'tty', 'console', 'loop-control', 'mapper/control', 'vsock', 'vhost-vsock', 'vhost-net', 'userfaultfd', 'uinput', 'snd', 'dri', 'nvidia0', 'cpu/0/msr', 'rtc', 'watchdog'):
    for flags in (os.O_RDONLY, os.O_RDWR):
        if tried(lambda: os.open('/dev/' + path, flags | os.O_NONBLOCK)) == 'ok':
            print('OPENED', path)
";
    let said = python(&mut sandbox, code).await;
    let devices = "fd full null random shm stderr stdin stdout urandom zero";
    let seen = output(&mut sandbox, "ls /dev | tr '\\n' ' '").await;
    if yard.is_local() {
        assert_eq!(said, "");
        assert_eq!(seen, devices);
    } else {
        for line in said.lines() {
            assert!(
                ["OPENED ptmx", "OPENED tty", "OPENED console"].contains(&line),
                "{said}"
            );
        }
        let more = ["mqueue", "ptmx", "pts", "tty"];
        assert!(
            seen.split(' ')
                .all(|d| devices.split(' ').any(|known| known == d) || more.contains(&d)),
            "{seen}"
        );
    }
    // The host's own nodes are shown inside: neither their modes nor their times may be changed.
    let before = host_node();
    let said = python(&mut sandbox, "print(tried(lambda: os.chmod('/dev/null', 0)), tried(lambda: os.utime('/dev/null', (1, 1))), tried(lambda: os.utime('/dev/null')), tried(lambda: os.unlink('/dev/null')), tried(lambda: os.setxattr('/dev/null', 'user.x', b'x')))").await;
    assert_eq!(host_node(), before);
    if yard.is_local() {
        assert!(!said.contains("ok"), "{said}");
    }
    sandbox.close().await;
    Outcome::Holds
}

fn host_node() -> (u32, std::time::SystemTime) {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata("/dev/null").unwrap();
    (meta.mode(), meta.modified().unwrap())
}

pub async fn set_uid(yard: Arc<Yard>) -> Outcome {
    let mut pool = yard.pool().clone();
    let planted = std::env::var(PLANTED).ok().filter(|_| yard.is_local());
    if let Some(dir) = &planted {
        let mut outside = Command::new(format!("{dir}/id"));
        if is_root() {
            std::os::unix::process::CommandExt::uid(&mut outside, ORDINARY_ID);
        }
        let outside = text(&outside.output().unwrap().stdout);
        assert!(outside.contains("euid=0(root)"), "{outside}");
        yard.control("outside the planted program runs as root");
        pool = yard
            .pool_with(|c| c.host_paths = vec![dir.as_str().into()])
            .await;
    }
    let mut sandbox = fresh(&pool).await;
    let own = output(
        &mut sandbox,
        "cp /bin/cat cat; chmod 6755 cat; stat -c %a cat; id -u",
    )
    .await;
    assert_eq!(own, "6755\n1000");
    yard.control("a file was made set-uid inside");
    let caps = r"
cap = struct.pack('<IIIII', 0x02000001, 0xffffffff, 0, 0xffffffff, 0)
print(tried(lambda: os.setxattr('cat', 'security.capability', cap)))
";
    python(&mut sandbox, caps).await;
    let status = output(&mut sandbox, "./cat /proc/self/status").await;
    let of = |key: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(key)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(of("Uid:"), "1000 1000 1000 1000");
    assert_eq!(of("Gid:"), "1000 1000 1000 1000");
    for key in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(of(key), "0000000000000000", "{key}");
    }
    assert_eq!(
        (of("NoNewPrivs:").as_str(), of("Seccomp:").as_str()),
        ("1", "2")
    );
    if let Some(dir) = &planted {
        let who = output(&mut sandbox, &format!("{dir}/id")).await;
        assert!(who.starts_with("uid=1000") && !who.contains("=0("), "{who}");
    }
    let said = python(
        &mut sandbox,
        "print(' '.join([tried(lambda: os.setuid(0)), tried(lambda: os.setgid(0)), tried(lambda: os.setgroups([0])), tried(lambda: os.setresuid(0, 0, 0)), tried(lambda: os.chown('cat', 0, 0)), name(call(126, struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[0xffffffff] * 6)))]))",
    )
    .await;
    assert!(!said.contains("ok"), "{said}");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn overwrite_program(yard: Arc<Yard>) -> Outcome {
    let helper = helpers().join("drillyard-sandbox-init");
    let before = blake3::hash(&std::fs::read(&helper).unwrap());
    let mut sandbox = yard.sandbox().await;
    let own = python(
        &mut sandbox,
        "import shutil\nshutil.copy('/bin/sleep', 's')\nimport subprocess\np = subprocess.Popen(['./s', '5'])\ntime.sleep(0.2)\nprint(tried(lambda: os.open('/proc/%d/exe' % p.pid, os.O_WRONLY)), tried(lambda: os.open('/proc/%d/exe' % p.pid, os.O_RDONLY)))\np.kill()",
    )
    .await;
    assert!(own.ends_with(" ok") && !own.starts_with("ok"), "{own}");
    yard.control("the program of a process of one's own is reached this way");
    // File tools run in the supervisor's own program.
    for path in ["/proc/self/exe", "/proc/1/exe", "/proc/thread-self/exe"] {
        let wrote = write(&mut sandbox, path, "#!/bin/sh\necho evil\n").await;
        assert!(wrote.is_err(), "{path}");
    }
    let said = python(
        &mut sandbox,
        "print(' '.join(tried(lambda: os.open('/proc/1/exe', f)) for f in (os.O_RDONLY, os.O_WRONLY, os.O_PATH)))\nfor r in range(200):\n    for p in os.listdir('/proc'):\n        if p.isdigit() and int(p) != os.getpid() and tried(lambda: os.open('/proc/%s/exe' % p, os.O_WRONLY)) == 'ok':\n            print('OPENED', p)",
    )
    .await;
    assert_eq!(said, "EACCES EACCES EACCES");
    assert_eq!(blake3::hash(&std::fs::read(&helper).unwrap()), before);
    assert_eq!(output(&mut sandbox, "echo fine").await, "fine");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn interfaces(yard: Arc<Yard>) -> Outcome {
    let numbers = [
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_bpf,
        libc::SYS_userfaultfd,
        libc::SYS_perf_event_open,
        libc::SYS_keyctl,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_kexec_load,
        libc::SYS_kexec_file_load,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_reboot,
        libc::SYS_quotactl,
        libc::SYS_quotactl_fd,
        libc::SYS_syslog,
        libc::SYS_clock_settime,
        libc::SYS_settimeofday,
        libc::SYS_adjtimex,
        libc::SYS_sethostname,
        libc::SYS_setdomainname,
        libc::SYS_swapon,
        libc::SYS_swapoff,
        libc::SYS_acct,
        libc::SYS_iopl,
        libc::SYS_ioperm,
        libc::SYS_open_by_handle_at,
        libc::SYS_name_to_handle_at,
        libc::SYS_fanotify_init,
        libc::SYS_lookup_dcookie,
        libc::SYS_modify_ldt,
        libc::SYS_uselib,
        libc::SYS_vmsplice,
        libc::SYS_move_pages,
        libc::SYS_migrate_pages,
        libc::SYS_memfd_secret,
        libc::SYS_kcmp,
        libc::SYS_vhangup,
        libc::SYS_nfsservctl,
    ];
    let mut sandbox = yard.sandbox().await;
    let control = "print(name(call(39)), name(call(250, 0, -3, 0)))";
    assert_eq!(python_outside(control), "ok ok");
    yard.control("outside the session's keyring is reached this way");
    assert_eq!(python(&mut sandbox, control).await, "ok EPERM");
    all_refused(&python(&mut sandbox, &calls(&numbers)).await, numbers.len());
    // Calls that did not exist when the list was made do not exist.
    let later =
        "print({name(call(n, 0, 0, 0, 0, 0)) for n in list(range(470, 600)) + [1000, 4095]})";
    assert_eq!(python(&mut sandbox, later).await, "{'ENOSYS'}");
    // Attributes that only root may set, by both interfaces; a program in anonymous memory gains nothing.
    let code = r"
fcntl_, dev = __import__('fcntl'), None
f = os.open('plain', os.O_CREAT | os.O_RDWR)
for flag in (0x10, 0x20):
    print(tried(lambda: fcntl_.ioctl(f, 0x40086602, struct.pack('l', flag))))
print(name(call(469, f, b'', struct.pack('QIIIIQ', 8, 0, 0, 0, 0, 0), 32, 0x1000)))
m = os.memfd_create('program', 0)
os.write(m, open('/bin/cat', 'rb').read())
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    os.execve(m, ['cat', '/proc/self/status'], {})
os.waitpid(pid, 0)
";
    let said = python(&mut sandbox, code).await;
    let lines: Vec<_> = said.lines().collect();
    assert!(lines[..3].iter().all(|l| *l != "ok"), "{said}");
    assert!(
        said.contains("CapEff:\t0000000000000000") && said.contains("Seccomp:\t2"),
        "{said}"
    );
    sandbox.close().await;
    Outcome::Holds
}

pub async fn architectures(yard: Arc<Yard>) -> Outcome {
    // exit(0), and getpid by int 0x80 before it.
    let exit = b"\xb8\x3c\0\0\0\x31\xff\x0f\x05";
    let mut by_int_80 = b"\xb8\x14\0\0\0\xcd\x80".to_vec();
    by_int_80.extend(exit);
    let setup = Setup::new([("plain", elf(exit)), ("i386", elf(&by_int_80))]);
    let mut sandbox = yard.pool().lease(&setup).await.unwrap();
    output(&mut sandbox, "chmod +x plain i386").await;
    assert_eq!(
        exec(&mut sandbox, &["./plain"], b"").await.exit_code,
        Some(0)
    );
    yard.control("the same program without the foreign call runs");
    assert_eq!(
        exec(&mut sandbox, &["./i386"], b"").await.signal,
        Some(libc::SIGSYS)
    );
    let x32 = "print({name(call(0x40000000 + n, 0, 0, 0, 0, 0)) for n in list(range(0, 470)) + list(range(512, 548))})";
    assert_eq!(python(&mut sandbox, x32).await, "{'ENOSYS'}");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn socket_families(yard: Arc<Yard>) -> Outcome {
    let code = r"
def made(*a):
    fd = call(41, *a)
    if fd >= 0:
        os.close(fd)
    return name(fd)
print(made(1, 1, 0), made(2, 1, 0), made(2, 2, 17), made(10, 1, 6), name(call(53, 1, 1, 0, ctypes.create_string_buffer(8))))
print([f for f in range(64) if f not in (1, 2, 10) for t in (1, 2, 3, 5) if made(f, t, 0) == 'ok'])
# Raw sockets, and protocols whose modules the kernel would load.
print([(f, t, p) for f in (2, 10) for t, p in ((3, 1), (3, 255), (2, 1), (2, 58), (1, 132), (5, 132), (6, 33), (2, 136), (1, 262), (1, 256), (10, 0), (4, 0)) if made(f, t, p) == 'ok'])
print(name(call(53, 16, 3, 0, ctypes.create_string_buffer(8))))
# Refused as the filter does, not for want of a module: netlink, packet, bluetooth, alg, vsock, xdp.
print(*(made(*a) for a in ((16, 1, 0), (17, 3, 0), (31, 1, 0), (38, 1, 0), (40, 1, 0), (44, 1, 0))))
";
    let outside = python_outside(code);
    let outside: Vec<_> = outside.lines().collect();
    assert!(outside[1].contains("16"), "{outside:?}");
    yard.control("outside such sockets can be made");
    let mut sandbox = yard.sandbox().await;
    let said = python(&mut sandbox, code).await;
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[0], "ok ok ok ok ok");
    assert_eq!(lines[1], "[]");
    assert_eq!(lines[2], "[]");
    assert_eq!(lines[3], "EPERM");
    all_refused(lines[4], 6);
    sandbox.close().await;
    Outcome::Holds
}

pub async fn terminal(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let code = r"
fcntl_ = __import__('fcntl')
r, w = os.pipe()
os.write(w, b'abc')
print(struct.unpack('i', fcntl_.ioctl(r, 0x541b, b'\0\0\0\0'))[0])
for fd in (0, 1, 2, r):
    print(tried(lambda: fcntl_.ioctl(fd, 0x5412, b'x')), tried(lambda: fcntl_.ioctl(fd, 0x541c, b'\x02')), os.isatty(fd),
          name(call(16, fd, 0x100005412, b'x')))
print(tried(lambda: os.open('/dev/tty', os.O_RDWR)))
";
    let said = python(&mut sandbox, code).await;
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[0], "3");
    yard.control("another request to a descriptor works");
    for line in &lines[1..5] {
        assert_eq!(*line, "EPERM EPERM False EPERM", "{said}");
    }
    assert_ne!(lines[5], "ok");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn overwrite_shell(yard: Arc<Yard>) -> Outcome {
    let hash = |path: &str| blake3::hash(&std::fs::read(path).unwrap());
    let before = (hash("/bin/bash"), hash("/bin/ls"));
    let mark = unique();
    let mut sandbox = yard.sandbox().await;
    let seen = "sha256sum $(readlink -f /bin/bash) $(readlink -f /bin/sh)";
    let clean = output(&mut sandbox, seen).await;
    let own = "printf '#!/bin/sh\\necho own' > ls; chmod +x ls; PATH=/work:$PATH ls";
    assert_eq!(output(&mut sandbox, own).await, "own");
    yard.control("a program of one's own stands in for another when it is asked for");
    for command in [
        "printf '#!/bin/sh\\necho evil' > /bin/bash",
        "cp /bin/true /bin/bash",
        "mv /work/ls /bin/sh",
        "ln -sf /work/ls /bin/bash",
        "rm -f /bin/bash /usr/bin/bash",
        "chmod 000 /bin/bash",
        "dd if=/dev/zero of=/usr/bin/bash conv=notrunc count=1",
        "mkdir -p /opt/drillyard/bin && cp ls /opt/drillyard/bin/bash",
        "echo /work/ls > /etc/ld.so.preload",
    ] {
        assert_ne!(
            shell(&mut sandbox, command).await.outcome,
            CallOutcome::Ok,
            "{command}"
        );
    }
    // Start-up files are not read, whatever is in them, and the environment does not last.
    output(&mut sandbox, &format!("for f in .bashrc .profile .bash_profile .bash_login .bash_env; do echo 'echo evil {mark}' > $f; done; export BASH_ENV=/work/.bashrc PATH=/work:$PATH")).await;
    let said = output(&mut sandbox, "echo good; ls -d /proc").await;
    assert_eq!(said, "good\n/proc");
    assert_eq!(output(&mut sandbox, seen).await, clean);
    assert_eq!((hash("/bin/bash"), hash("/bin/ls")), before);
    eventually("nothing is left", || host_processes(&mark) == 0).await;
    sandbox.close().await;
    let mut next = yard.sandbox().await;
    assert_eq!(output(&mut next, "echo good").await, "good");
    assert_eq!(python_result(&mut next, "print(1)").await.stdout, b"1\n");
    next.close().await;
    Outcome::Holds
}
