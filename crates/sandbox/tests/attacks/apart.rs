//! Apart from the network, from each other, from what was before and what comes after.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use drillyard_sandbox::{Call, CallOutcome, Holds, Pool, SandboxError, Setup};
use rustix::process::Signal;

use crate::common::{
    children, eventually, exec, fresh, host_processes, kill, output, proc, processes_with, read,
    shell, text, unique,
};
use crate::target::{TARGETS, WORKER};
use crate::yard::{Outcome, Yard, python, python_outside, python_result, shell_for};

/// Addresses of this host that are not loopback.
fn host_addresses() -> Vec<String> {
    let list = Command::new("hostname")
        .arg("-I")
        .output()
        .map(|o| text(&o.stdout));
    let list = list.unwrap_or_default();
    list.split_whitespace().map(str::to_owned).collect()
}

pub async fn network(yard: Arc<Yard>) -> Outcome {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let udp = UdpSocket::bind("0.0.0.0:0").unwrap();
    let udp_port = udp.local_addr().unwrap().port();
    let mut addresses = host_addresses();
    addresses.push("127.0.0.1".into());
    let code = format!(
        r"
for a in {addresses:?} + ['::1', 'fe80::1%lo', '10.0.0.1', '169.254.169.254', '8.8.8.8', '224.0.0.1', '255.255.255.255']:
    family = socket.AF_INET6 if ':' in a else socket.AF_INET
    def tcp():
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.settimeout(0.3)
            s.connect((a, {port}))
    def udp():
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            s.sendto(b'x', (a, {udp_port}))
    print(a, tried(tcp), tried(udp))
"
    );
    let outside = python_outside(&code);
    assert!(outside.lines().any(|l| l == "127.0.0.1 ok ok"), "{outside}");
    udp.set_nonblocking(true).unwrap();
    listener.set_nonblocking(true).unwrap();
    eventually("the control comes through", || {
        udp.recv(&mut [0; 9]).is_ok() && listener.accept().is_ok()
    })
    .await;
    while udp.recv(&mut [0; 9]).is_ok() || listener.accept().is_ok() {}
    yard.control("outside the same program reaches both listeners");
    let mut sandbox = yard.sandbox().await;
    let said = python(&mut sandbox, &code).await;
    for line in said.lines() {
        let words: Vec<_> = line.split(' ').collect();
        assert_ne!(words[1], "ok", "{said}");
    }
    for why in ["127.0.0.1 ECONNREFUSED ", "10.0.0.1 ENETUNREACH "] {
        assert!(said.lines().any(|l| l.starts_with(why)), "{said}");
    }
    for command in [
        format!("echo hi > /dev/tcp/127.0.0.1/{port}"),
        format!("echo hi > /dev/tcp/10.0.0.1/{port}"),
        "getent ahosts example.com".into(),
        "python3 -c 'import socket; socket.getaddrinfo(\"example.com\", 80)'".into(),
    ] {
        assert_ne!(
            shell(&mut sandbox, &command).await.outcome,
            CallOutcome::Ok,
            "{command}"
        );
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(
        listener.accept().is_err() && udp.recv(&mut [0; 9]).is_err(),
        "something came through"
    );
    // Loopback of its own: a server and its client within one call.
    let server = "python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", 7777)); s.accept()[0].send(b\"inside\")' & \
                  until exec 3<>/dev/tcp/127.0.0.1/7777; do sleep 0.01; done 2>/dev/null; cat <&3";
    assert_eq!(output(&mut sandbox, server).await, "inside");
    let links = output(
        &mut sandbox,
        "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' \\n'; tail -n +2 /proc/net/route",
    )
    .await;
    assert_eq!(links, "lo");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn rendezvous(yard: Arc<Yard>) -> Outcome {
    let mut first = yard.sandbox().await;
    let mut other = yard.sandbox().await;
    // Targets are attacked at the same time: each has names of its own.
    let name = format!("meet-{}", unique());
    let key = 0x4000_0000 + std::process::id();
    // On the host: an abstract socket, a socket with a path, shared memory.
    let _abstract =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let _path = UnixListener::bind(&path).unwrap();
    let made = format!(
        r"
print(name(call(29, {key}, 4096, 0o1666)), name(call(68, {key}, 0o1666)), name(call(64, {key}, 1, 0o1666)),
      tried(lambda: open('/dev/shm/{name}', 'w').close()), name(call(240, b'{name}', 0o102, 0o666, 0)))
"
    );
    let meet = format!(
        r"
def c(a):
    with socket.socket(socket.AF_UNIX) as s: s.connect(a)
print(tried(lambda: c('\0{name}')), tried(lambda: c({path:?})), name(call(29, {key}, 4096, 0)), name(call(68, {key}, 0)),
      name(call(64, {key}, 1, 0)), tried(lambda: os.stat('/dev/shm/{name}')), name(call(240, b'{name}', 2, 0, 0)))
"
    );
    let host = python_outside(&format!("{made}{meet}"));
    let clean = python_outside(&format!(
        "print(name(call(31, call(29, {key}, 4096, 0), 0, 0)), name(call(71, call(68, {key}, 0), 0, 0)), name(call(66, call(64, {key}, 1, 0), 0, 0)), tried(lambda: os.unlink('/dev/shm/{name}')), name(call(241, b'{name}')))",
    ));
    assert!(host.ends_with("ok ok ok ok ok ok ok"), "{host}");
    assert_eq!(clean, "ok ok ok ok ok");
    let serve =
        format!("s = socket.socket(socket.AF_UNIX); s.bind('\\0{name}'); s.listen()\n{made}");
    let within = python(&mut first, &format!("{serve}{meet}")).await;
    let met = within.lines().last().unwrap();
    assert!(
        met.starts_with("ok ") && met.contains(" ok ok ok ok"),
        "{within}"
    );
    yard.control("on the host, and within one sandbox, they meet");
    // One that serves and then waits under another name, by which it is seen to be there.
    let mark = unique();
    let (one, two) = mark.split_at(5);
    let wait =
        format!("{serve}s.set_inheritable(True); os.execlp('sleep', 'sleep', '{one}' + '{two}')");
    let (_, met) = tokio::join!(python_result(&mut first, &wait), async {
        eventually("it serves", || host_processes(&mark) > 0).await;
        let met = python(&mut other, &meet).await;
        kill(processes_with(&mark)[0], Signal::KILL);
        met
    });
    assert_eq!(met.split(' ').filter(|w| *w == "ok").count(), 0, "{met}");
    first.close().await;
    other.close().await;
    Outcome::Holds
}

/// Names a fault that this program, run again, has to suffer.
pub const FAULT: &str = "DRILLYARD_ATTACK_FAULT";

/// Tries to run something although a protection cannot be had; says what became of it.
pub fn suffer() -> ExitCode {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let name = std::env::var(FAULT).unwrap();
    let target = TARGETS.iter().find(|t| t.name == name).unwrap();
    let tried = runtime.block_on(async {
        let pool = Pool::start(crate::yard::config(target)).await?;
        let files = pool.limits().row("host files").map(|r| r.how.clone());
        let mut sandbox = pool.lease(&Setup::default()).await?;
        let result = sandbox.call(Call::shell("echo RAN")).await?;
        Ok::<_, SandboxError>(format!(
            "{} {:?} {}",
            text(&result.stdout),
            result.exit_code,
            files.unwrap_or_default()
        ))
    });
    match tried {
        Ok(said) => println!("called: {said}"),
        Err(error) => println!("error: {error}"),
    }
    ExitCode::SUCCESS
}

pub async fn fails_closed(yard: Arc<Yard>) -> Outcome {
    let exe = std::env::current_exe().unwrap();
    // Runs this program under a filter in which one system call (with one first argument, if given) fails.
    let suffer = |number: i64, argument: Option<i32>, error: i32| {
        let code = format!(
            r"
f = [(0x20, 0, 0, 0), (0x15, 0, 3, {number}), (0x20, 0, 0, 16), (0x15, 0, 1, {a}), (0x06, 0, 0, 0x50000 + {error}), (0x06, 0, 0, 0x7fff0000)]
if {a} < 0:
    f = [f[0], (0x15, 0, 1, {number}), f[4], f[5]]
b = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *i) for i in f))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(struct.pack('HxxxxxxQ', len(f), ctypes.addressof(b))), 0, 0) == 0
os.environ['{FAULT}'] = '{name}'
os.environ.pop('{WORKER}', None)
os.execv({exe:?}, ['attacks'])
",
            a = argument.unwrap_or(-1),
            name = yard.target.name,
        );
        python_outside(&code)
    };
    // A call nobody makes: the program runs under the filter as ever.
    let control = suffer(libc::SYS_nfsservctl, None, 1);
    assert!(control.starts_with("called: RAN"), "{control}");
    yard.control("with an unrelated call failing, the command runs");
    if yard.is_local() {
        for (what, number, argument, error) in [
            (
                "the filter",
                libc::SYS_prctl,
                Some(libc::PR_SET_SECCOMP),
                libc::EINVAL,
            ),
            (
                "no_new_privs",
                libc::SYS_prctl,
                Some(libc::PR_SET_NO_NEW_PRIVS),
                libc::EINVAL,
            ),
            (
                "dumpable",
                libc::SYS_prctl,
                Some(libc::PR_SET_DUMPABLE),
                libc::EINVAL,
            ),
            (
                "landlock",
                libc::SYS_landlock_restrict_self,
                None,
                libc::EPERM,
            ),
            (
                "landlock's rules",
                libc::SYS_landlock_add_rule,
                None,
                libc::EINVAL,
            ),
            ("capabilities", libc::SYS_capset, None, libc::EPERM),
            ("the user", libc::SYS_setresuid, None, libc::EPERM),
            ("limits", libc::SYS_prlimit64, None, libc::EPERM),
            ("the session", libc::SYS_setsid, None, libc::EPERM),
            ("namespaces", libc::SYS_unshare, None, libc::EPERM),
            (
                "a sandbox's namespaces",
                libc::SYS_clone3,
                None,
                libc::ENOSYS,
            ),
            ("mounts", libc::SYS_mount, None, libc::EPERM),
            ("the root", libc::SYS_pivot_root, None, libc::EPERM),
            (
                "read-only mounts",
                libc::SYS_mount_setattr,
                None,
                libc::EPERM,
            ),
        ] {
            let said = suffer(number, argument, error);
            assert!(said.starts_with("error: "), "without {what}: {said}");
        }
        // Where the kernel has no such interface it is not used, and said.
        let said = suffer(libc::SYS_landlock_create_ruleset, None, libc::EOPNOTSUPP);
        assert!(
            said.starts_with("called: RAN") && said.contains("no Landlock"),
            "{said}"
        );
        let mut missing = yard.config();
        missing.host_paths = vec!["/nonexistent".into()];
        assert!(matches!(
            Pool::start(missing).await,
            Err(SandboxError::Config { .. })
        ));
    }
    // The helper, or the engine's side of one sandbox, is killed half-way.
    let helpers = || -> Vec<u32> {
        let mut all = children(std::process::id());
        all.retain(|pid| proc(&format!("{pid}/cmdline")).contains("sandbox-init"));
        all
    };
    let before = helpers();
    let pool = yard.pool_with(|_| {}).await;
    if yard.is_local() {
        let helper = helpers()
            .into_iter()
            .find(|pid| !before.contains(pid))
            .unwrap();
        let mut sandbox = fresh(&pool).await;
        let mark = unique();
        let killer = tokio::spawn({
            let mark = mark.clone();
            async move {
                eventually("the tool runs", || host_processes(&mark) > 0).await;
                kill(helper, Signal::KILL);
            }
        });
        let error = sandbox
            .call(Call::shell(format!("sleep {mark}")))
            .await
            .unwrap_err();
        killer.await.unwrap();
        assert!(matches!(error, SandboxError::Lost { .. }), "{error}");
        eventually("its processes are gone", || host_processes(&mark) == 0).await;
        let next = pool.lease(&Setup::default()).await;
        assert!(matches!(next, Err(SandboxError::HelperGone)), "{next:?}");
    }
    Outcome::Holds
}

/// Makes this program keep sandboxes busy until it is killed.
pub const VICTIM: &str = "DRILLYARD_ATTACK_VICTIM";

pub fn be_a_victim(mark: &str) -> ExitCode {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (name, mark) = mark.split_once(' ').unwrap();
    let target = TARGETS.iter().find(|t| t.name == name).unwrap();
    runtime.block_on(async {
        let pool = Pool::start(crate::yard::config(target)).await.unwrap();
        let mut busy = Vec::new();
        for _ in 0..3 {
            let mut sandbox = fresh(&pool).await;
            let command = format!("setsid sleep {mark} & sleep {mark}");
            busy.push(tokio::spawn(async move {
                shell_for(&mut sandbox, 10_000, &command).await
            }));
        }
        for task in busy {
            let _ = task.await;
        }
    });
    ExitCode::SUCCESS
}

pub async fn residue(yard: Arc<Yard>) -> Outcome {
    let probe = "ls -laR --time-style=+ /work /tmp /dev/shm | sed 's/total .*//'; ipcs -m -q -s; hostname; umask; ulimit -a; ls /proc/self/fd | wc -l; \
                 cat /proc/sys/kernel/pid_max /proc/sys/kernel/shmmax /proc/sys/kernel/shm_rmid_forced /proc/sys/fs/mqueue/msg_max /proc/self/cgroup /etc/passwd /proc/net/unix /proc/self/mountinfo /proc/self/oom_score_adj /proc/self/timerslack_ns 2>/dev/null; ls -A /proc/1/task | wc -l; pwd; env | sort | grep -v '^_='; true";
    // Numbers of mounts and sockets differ from sandbox to sandbox, and engines mount in any order.
    let stable = |said: String| -> String {
        let number = |w: &str| w.bytes().any(|b| b.is_ascii_digit());
        let mut lines: Vec<String> = said
            .lines()
            .map(|line| {
                if line.contains(" - ") {
                    line.split(' ')
                        .filter(|w| !number(w))
                        .collect::<Vec<_>>()
                        .join(" ")
                } else {
                    line.to_owned()
                }
            })
            .collect();
        lines.sort();
        lines.join("\n")
    };
    let mut first = yard.sandbox().await;
    let mut other = yard.sandbox().await;
    let clean = stable(output(&mut first, probe).await);
    let mess = "echo secret > /work/s; echo secret > /tmp/s; echo secret > /dev/shm/s; umask 077; ulimit -n 10; export EVIL=1; cd /tmp; hostname evil 2>/dev/null; \
                chmod 777 /work; chmod 700 /tmp; echo 400 > /proc/sys/kernel/pid_max; \
                python3 -c 'import os, socket; s = socket.socket(socket.AF_UNIX); s.bind(\"/tmp/sock\"); os.setxattr(\"/work/s\", \"user.evil\", b\"x\")'; \
                ipcmk -M 4096 > /dev/null; ipcmk -Q > /dev/null; ipcmk -S 1 > /dev/null; ipcs -m | tail -n +4 | wc -l; date -s 2001-01-01 > /dev/null 2>&1";
    let made = text(&shell(&mut first, mess).await.stdout);
    assert!(made.trim().parse::<u32>().unwrap() > 0, "{made}");
    let left = output(&mut first, "ls -A /work /tmp /dev/shm | tr '\\n' ' '").await;
    assert_eq!(left, "/dev/shm: s  /tmp: s sock  /work: s");
    yard.control("its files and shared memory were there");
    // Only files last from call to call: what else was made went with the processes that made it.
    let own = output(
        &mut first,
        "ipcs -m -q -s | grep -c 0x; umask; ulimit -n; echo $EVIL; pwd; hostname",
    )
    .await;
    assert_eq!(
        own,
        format!(
            "0\n0022\n1024\n\n/work\n{}",
            output(&mut other, "hostname").await
        )
    );
    // At the same time, next door; afterwards, here and there.
    assert_eq!(stable(output(&mut other, probe).await), clean);
    first.reset().await.unwrap();
    assert_eq!(stable(output(&mut first, probe).await), clean);
    let year: u32 = output(&mut first, "date +%Y").await.parse().unwrap();
    assert!(year > 2020);
    first.close().await;
    other.close().await;

    // The program is killed in the middle of it.
    // Others may mount what they like meanwhile; these are a sandbox's.
    let mounts = || -> Vec<String> {
        let all = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        all.lines()
            .filter(|l| l.contains(" - tmpfs disk ") || l.contains(" - tmpfs root "))
            .map(str::to_owned)
            .collect()
    };
    let rounds = if crate::yard::thorough() { 50 } else { 2 };
    for _ in 0..rounds {
        let mark = unique();
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .env_remove(WORKER)
            .env(VICTIM, format!("{} {mark}", yard.target.name))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually("its sandboxes are busy", || host_processes(&mark) >= 6).await;
        victim.kill().unwrap();
        victim.wait().unwrap();
        if !yard.is_local() {
            // An engine's containers end with the next start.
            drop(yard.pool_with(|_| {}).await);
        }
        eventually("its processes are gone", || host_processes(&mark) == 0).await;
        assert_eq!(mounts(), Vec::<String>::new());
    }
    Outcome::Holds
}

pub async fn leftovers(yard: Arc<Yard>) -> Outcome {
    let answer = format!("answer-{}", unique());
    let look = format!(
        "grep -rls {answer} /work /tmp /dev/shm /var /run /mnt /opt 2>/dev/null; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -v grep | grep -c {}; ipcs -m -q | grep -c 0x; true",
        &answer[..answer.len() - 1].replace("answer", "[a]nswer")
    );
    let setup = Setup::new([("solution.txt", answer.clone().into_bytes())]);
    let pool = yard.pool();
    let mut first = pool.lease(&setup).await.unwrap();
    output(&mut first, "cp solution.txt /tmp/copy; cp solution.txt /dev/shm/copy; mkdir -p .cache; cp solution.txt .cache/x").await;
    let found = output(&mut first, &look).await;
    assert!(
        found.contains("/work/solution.txt") && found.contains("/tmp/copy"),
        "{found}"
    );
    yard.control("in the sandbox that holds the answer it is found");
    let mut beside = fresh(pool).await;
    assert!(!output(&mut beside, &look).await.contains('/'));
    first.close().await;
    for _ in 0..5 {
        let mut next = fresh(pool).await;
        let found = output(&mut next, &look).await;
        assert!(!found.contains('/'), "{found}");
        // Fresh memory and fresh files hold nothing of others.
        let fresh = "f = open('f', 'wb'); f.truncate(4 << 20); f.close(); d = open('f', 'rb').read(); m = bytearray(8 << 20); print(d.count(0) == len(d), m.count(0) == len(m))";
        assert_eq!(python(&mut next, fresh).await, "True True");
        next.close().await;
    }
    beside.close().await;
    Outcome::Holds
}

pub async fn forged_calls(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    // Frames as the program and the supervisor exchange them, to whatever can be written to.
    let code = r#"
frames = []
for head in (b'"Done"', b'"Ready"', b'{"Call":{"what":{"Shell":{"command":"echo forged > /work/forged"}},"timeout_us":1000000}}', b'{"Refused":{"message":"forged"}}', b'{"Destroy":{"id":0}}', b'{"Create":{"id":99}}'):
    frames.append(struct.pack('<II', len(head), 0) + head)
wrote = []
for fd in range(0, 1024):
    for f in frames:
        if tried(lambda: os.write(fd, f)) == 'ok':
            wrote.append(fd)
for pid in os.listdir('/proc'):
    if pid.isdigit() and int(pid) != os.getpid():
        for fd in range(0, 600):
            if tried(lambda: os.open('/proc/%s/fd/%d' % (pid, fd), os.O_WRONLY | os.O_NONBLOCK)) == 'ok':
                wrote.append((pid, fd))
for line in open('/proc/net/unix').read().splitlines()[1:]:
    path = line.split()[7] if len(line.split()) > 7 else ''
    def reach():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.connect(path.replace('@', '\0'))
    if path and tried(reach) == 'ok':
        wrote.append(path)
os.write(2, str(sorted(set(wrote), key=str)).encode())
os._exit(5)
"#;
    let result = python_result(&mut sandbox, code).await;
    assert_eq!(
        (result.outcome, result.exit_code),
        (CallOutcome::Error, Some(5)),
        "{result:?}"
    );
    let seen = text(&result.stdout);
    assert!(
        seen.contains("echo forged > /work/forged") && seen.contains("Refused"),
        "{seen}"
    );
    yard.control("the forged frames came out as the call's output");
    assert!(
        text(&result.stderr).ends_with("[1, 2]") || text(&result.stderr).ends_with("[0, 1, 2]"),
        "{}",
        text(&result.stderr)
    );
    assert_eq!(result.files_changed, []);
    for _ in 0..3 {
        let next = shell(&mut sandbox, "echo next; ls -A; exit 4").await;
        assert_eq!(
            (text(&next.stdout).as_str(), next.exit_code),
            ("next\n", Some(4))
        );
    }
    // Words in a call that end it early or pass for something else do not.
    for command in ["echo a\0b", "\0"] {
        let result = sandbox.call(Call::shell(command)).await.unwrap();
        assert_ne!(result.outcome, CallOutcome::Ok);
    }
    assert_ne!(exec(&mut sandbox, &[], b"").await.outcome, CallOutcome::Ok);
    assert!(read(&mut sandbox, "a\0b").await.is_err());
    assert_eq!(output(&mut sandbox, "echo fine").await, "fine");
    sandbox.close().await;
    Outcome::Holds
}

pub async fn port_scan(yard: Arc<Yard>) -> Outcome {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    TcpStream::connect(("127.0.0.1", port)).unwrap();
    listener.accept().unwrap();
    listener.set_nonblocking(true).unwrap();
    let scan = |addresses: &[String], ports: &str| {
        format!(
            r"
found = []
for a in {addresses:?}:
    for p in range({ports}, 1 if a.startswith('127.0.0.1') else 257):
        s = socket.socket(socket.AF_INET6 if ':' in a else socket.AF_INET)
        s.settimeout(0.05)
        # One that meets itself has found nothing.
        if s.connect_ex((a, p)) == 0 and s.getsockname() != s.getpeername(): found.append(p)
        s.close()
print(found)
"
        )
    };
    let mut sandbox = yard.sandbox().await;
    let loopback = ["127.0.0.1".to_owned()];
    let server = "server = socket.create_server(('127.0.0.1', 4321))\n";
    let own = python(
        &mut sandbox,
        &format!("{server}{}", scan(&loopback, "4000, 5000")),
    )
    .await;
    assert_eq!(own, "[4321]");
    yard.control("a port opened inside is found by the same scan");
    let mut all = host_addresses();
    all.push("127.0.0.1".into());
    all.push("127.0.0.53".into());
    assert_eq!(python(&mut sandbox, &scan(&all, "1, 65536")).await, "[]");
    assert!(listener.accept().is_err(), "the scan came through");
    assert_eq!(yard.row("network").holds, Holds::Yes);
    sandbox.close().await;
    Outcome::Holds
}
