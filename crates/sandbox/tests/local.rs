//! What the `local` backend does; what is done to it stands in `attacks.rs`.
//!
//! As root the whole file also runs once more as an ordinary user (`also_as_an_ordinary_user`).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drillyard_sandbox::Change::{Created, Deleted, Modified};
use drillyard_sandbox::{
    Call, CallOutcome, CallResult, Kind, Limits, Pool, Sandbox, SandboxConfig, SandboxError, Setup,
    Snapshot,
};

const MIB: u64 = 1 << 20;

fn small() -> SandboxConfig {
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

async fn pool() -> Pool {
    Pool::start(small()).await.unwrap()
}

async fn sandbox() -> Sandbox {
    pool().await.lease(&Setup::default()).await.unwrap()
}

async fn shell(sandbox: &mut Sandbox, command: &str) -> CallResult {
    sandbox.call(Call::shell(command)).await.unwrap()
}

async fn shell_for(sandbox: &mut Sandbox, timeout: Duration, command: &str) -> CallResult {
    let call = Call::Shell {
        command: command.into(),
        timeout: Some(timeout),
    };
    sandbox.call(call).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Standard output of a command that must succeed.
async fn output(sandbox: &mut Sandbox, command: &str) -> String {
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
fn host_processes(word: &str) -> usize {
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

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "not within ten seconds: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A number that no other process has in its command line.
fn unique() -> String {
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

#[tokio::test]
async fn a_call_says_what_it_did() {
    let pool = pool().await;
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

#[tokio::test]
async fn the_environment_is_exactly_the_promised_one() {
    let mut sandbox = sandbox().await;
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

#[tokio::test]
async fn file_tools_read_write_and_list() {
    let mut sandbox = sandbox().await;
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
        "ln -s a/b/c.txt link; mkfifo pipe; mkdir dir; truncate -s 10M sparse",
    )
    .await;
    assert_eq!(read(&mut sandbox, "link").await.unwrap(), "hello");
    assert_eq!(read(&mut sandbox, "sparse").await.unwrap().len(), 1000);
    let error = read(&mut sandbox, "nothing").await.unwrap_err();
    assert_eq!(error, "read_file: nothing: No such file or directory\n");
    let error = write(&mut sandbox, "dir", "x").await.unwrap_err();
    assert_eq!(error, "write_file: dir: Is a directory\n");
    let list = |path: &str| Call::ListDir { path: path.into() };
    let listed = text(&sandbox.call(list("")).await.unwrap().stdout);
    assert_eq!(
        listed,
        "a/\ndir/\nlink -> a/b/c.txt\npipe\t(special)\nsparse\t10485760\n"
    );
    let listed = sandbox.call(list("nowhere")).await.unwrap();
    assert_eq!(
        text(&listed.stderr),
        "list_dir: nowhere: No such file or directory\n"
    );
    let setup = Setup::new([("/tmp/fine", &b"x"[..]), ("./also//fine", b"y")]);
    let mut other = pool().await.lease(&setup).await.unwrap();
    assert_eq!(output(&mut other, "cat /tmp/fine also/fine").await, "xy");
    sandbox.close().await;
    other.close().await;
}

#[tokio::test]
async fn changed_files_are_told_exactly() {
    let pool = pool().await;
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
    assert!(shell(&mut sandbox, "mkfifo p").await.state_lost);
    assert!(shell(&mut sandbox, "touch $'\\xff'").await.state_lost);
    sandbox.close().await;
}

#[tokio::test]
async fn large_files_changed_in_place_are_noticed() {
    let mut sandbox = sandbox().await;
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

#[tokio::test]
async fn snapshots_restore_and_branch() {
    let pool = pool().await;
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

#[tokio::test]
async fn sixty_four_at_once() {
    let mut config = small();
    config.pool_size = 8;
    let pool = Pool::start(config).await.unwrap();
    let tasks: Vec<_> = (0..64)
        .map(|i| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let setup = Setup::new([("n", format!("{i}\n").into_bytes())]);
                let mut sandbox = pool.lease(&setup).await.unwrap();
                for _ in 0..3 {
                    assert_eq!(
                        output(&mut sandbox, "cat n; ls | wc -l").await,
                        format!("{i}\n1")
                    );
                }
                sandbox
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.unwrap());
    }
    assert_eq!(pool.live(), 64);
    for sandbox in all {
        sandbox.close().await;
    }
    assert_eq!(pool.live(), 0);
}

/// Half of these are up to no good; each is tried against the same pool many times over.
const EPISODES: [&str; 12] = [
    "echo hello > out; cat out",
    "b() { b | b & }; b; sleep 30",
    "yes",
    "setsid sleep 1000 & setsid sleep 1000 & sleep 1000",
    "sort /etc/passwd | head -n 1 > first",
    "head -c 1G /dev/zero > big",
    "rm -rf / /work /tmp 2>/dev/null; echo done",
    "perl -e '$x = \"x\" x (1 << 30)'; cat /etc/hostname",
    "kill -9 -1",
    "for i in {1..600}; do mkdir -p d$i; done",
    "mkfifo p; cat p",
    "grep -r agent /etc | wc -l; drillyard-sql-tool :memory: <<< 'select 1'",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_hostile_episodes_leave_the_host_as_it_was() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut config = small();
    config.pool_size = 4;
    config.limits.call_timeout = Duration::from_millis(400);
    let pool = Pool::start(config).await.unwrap();
    eventually("the pool is full", || pool.ready() == 4).await;
    let before = (descriptors(), mounts());
    let work = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> = (0..16)
        .map(|_| {
            let (pool, work) = (pool.clone(), Arc::clone(&work));
            tokio::spawn(async move {
                loop {
                    let i = work.fetch_add(1, Ordering::Relaxed);
                    if i >= 120 {
                        return;
                    }
                    let setup = Setup::new([("mine", format!("{i}\n").into_bytes())]);
                    let mut sandbox = pool.lease(&setup).await.unwrap();
                    sandbox
                        .call(Call::shell(EPISODES[i % EPISODES.len()]))
                        .await
                        .unwrap();
                    // The next call is never harmed by the one before.
                    let next = sandbox
                        .call(Call::shell(
                            "rm -rf /work/* /tmp/* /dev/shm/*; echo $((6 * 7))",
                        ))
                        .await
                        .unwrap();
                    assert!(
                        text(&next.stdout) == "42\n" || next.outcome == CallOutcome::Timeout,
                        "{}: {next:?}",
                        EPISODES[i % EPISODES.len()]
                    );
                    sandbox.close().await;
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    eventually("the pool is full again", || {
        pool.ready() == 4 && pool.live() == 0
    })
    .await;
    eventually("descriptors are closed", || descriptors() <= before.0).await;
    assert_eq!(mounts(), before.1);
    let owner = format!("{}-", std::process::id());
    drop(pool);
    // Of this pool; other tests of this process may have theirs.
    eventually("processes are gone", || {
        host_processes("sleep\u{0}1000") == 0
    })
    .await;
    if std::env::var_os("NEXTEST").is_some() {
        assert_eq!(groups(&owner), BTreeSet::new());
    }
}

/// Names of control groups of this user's programs, wherever they are.
fn groups(owner: &str) -> BTreeSet<String> {
    fn walk(dir: &std::path::Path, depth: usize, owner: &str, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                if entry
                    .file_name()
                    .to_string_lossy()
                    .starts_with(&format!("drillyard-{owner}"))
                {
                    found.insert(entry.path().display().to_string());
                }
                if depth < 6 {
                    walk(&entry.path(), depth + 1, owner, found);
                }
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(std::path::Path::new("/sys/fs/cgroup"), 0, owner, &mut found);
    found
}

/// This very test as another process, which keeps sandboxes busy until it is killed.
async fn victim(test: &str) -> Option<(std::process::Child, String)> {
    if let Ok(mark) = std::env::var("DRILLYARD_TEST_VICTIM") {
        let pool = pool().await;
        let mut sandboxes = Vec::new();
        for _ in 0..5 {
            sandboxes.push(pool.lease(&Setup::default()).await.unwrap());
        }
        let command = format!("setsid sleep {mark} & sleep {mark}");
        for mut sandbox in sandboxes {
            let command = command.clone();
            tokio::spawn(async move {
                shell_for(&mut sandbox, Duration::from_secs(10), &command).await
            });
        }
        tokio::time::sleep(Duration::from_mins(1)).await;
        return None;
    }
    let mark = unique();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("DRILLYARD_TEST_VICTIM", &mark)
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    eventually("all sandboxes are busy", || host_processes(&mark) >= 10).await;
    Some((child, mark))
}

#[tokio::test]
async fn killing_the_program_leaves_nothing() {
    for _ in 0..3 {
        let Some((mut child, mark)) = victim("killing_the_program_leaves_nothing").await else {
            return;
        };
        let owner = format!("{}-", child.id());
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(
            !is_root()
                || !groups(&owner).is_empty()
                || !std::path::Path::new("/sys/fs/cgroup/memory").exists()
        );
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("processes are gone", || host_processes(&mark) == 0).await;
        eventually("control groups are gone", || groups(&owner).is_empty()).await;
        assert_eq!(
            std::fs::read_to_string("/proc/self/mountinfo").unwrap(),
            mounts
        );
    }
}

#[tokio::test]
async fn killing_the_helper_too_leaves_what_the_next_start_sweeps() {
    let Some((mut child, mark)) =
        victim("killing_the_helper_too_leaves_what_the_next_start_sweeps").await
    else {
        return;
    };
    let owner = format!("{}-", child.id());
    // Stopped, the program cannot react; the helper's processes die first, then the program.
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::STOP,
    )
    .unwrap();
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()))
        .unwrap_or_default();
    let mut helpers: Vec<i32> = children
        .split_whitespace()
        .filter_map(|p| p.parse().ok())
        .collect();
    for entry in std::fs::read_dir(format!("/proc/{}/task", child.id()))
        .unwrap()
        .flatten()
    {
        let list = std::fs::read_to_string(entry.path().join("children")).unwrap_or_default();
        helpers.extend(
            list.split_whitespace()
                .filter_map(|p| p.parse::<i32>().ok()),
        );
    }
    assert!(!helpers.is_empty());
    for helper in helpers {
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(helper).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
    }
    eventually("sandboxes die with the helper", || {
        host_processes(&mark) == 0
    })
    .await;
    child.kill().unwrap();
    child.wait().unwrap();
    drop(pool().await);
    assert_eq!(groups(&owner), BTreeSet::new());
}

#[tokio::test]
async fn a_lost_sandbox_is_said_to_be_lost() {
    let pool = pool().await;
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

#[tokio::test]
async fn an_abandoned_call_does_not_mix_up_answers() {
    let mut sandbox = sandbox().await;
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

#[tokio::test]
async fn wrong_configurations_name_the_field() {
    let config = |change: fn(&mut SandboxConfig)| {
        let mut config = small();
        change(&mut config);
        config
    };
    for (config, part) in [
        (
            config(|c| c.backend = "docker2".into()),
            "sandbox.backend: unknown backend 'docker2'",
        ),
        (config(|c| c.limits.cpus = 0.0), "sandbox.cpus"),
        (
            config(|c| c.limits.memory_bytes = 1),
            "sandbox.memory_bytes",
        ),
        (
            config(|c| c.host_paths = vec!["/nonexistent".into()]),
            "does not exist",
        ),
        (
            config(|c| c.helpers_dir = Some("/nonexistent".into())),
            "make helpers",
        ),
    ] {
        let error = Pool::start(config).await.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test]
async fn a_host_that_forbids_it_is_told_what_to_do() {
    if std::env::var_os("DRILLYARD_TEST_FORBIDDEN").is_some() {
        let error = Pool::start(small()).await.unwrap_err();
        assert!(matches!(error, SandboxError::Unable { .. }), "{error}");
        let error = error.to_string();
        assert!(
            error.contains("sysctl -w user.max_user_namespaces="),
            "{error}"
        );
        assert!(
            error.contains("nothing is run without isolation"),
            "{error}"
        );
        return;
    }
    // A user namespace in which no more of them can be made stands for a host that allows none.
    let run = "echo 0 > /proc/sys/user/max_user_namespaces && \"$0\" --exact a_host_that_forbids_it_is_told_what_to_do";
    let done = Command::new("unshare")
        .args(["-Ur", "sh", "-c", run])
        .arg(std::env::current_exe().unwrap())
        .env("DRILLYARD_TEST_FORBIDDEN", "1")
        .output()
        .unwrap();
    let said = text(&done.stdout);
    assert!(
        done.status.success() && said.contains("1 passed"),
        "{said}{}",
        text(&done.stderr)
    );
}

#[tokio::test]
async fn more_host_paths_can_be_shown() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("data"), "shown").unwrap();
    let mut config = small();
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

#[tokio::test]
async fn without_control_groups_it_says_so_and_still_isolates() {
    let mut config = small();
    config.control_groups = false;
    let pool = Pool::start(config).await.unwrap();
    let weak: Vec<_> = pool.limits().weak().map(|r| r.limit.as_str()).collect();
    assert_eq!(weak, ["memory", "processors"]);
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let result = shell(
        &mut sandbox,
        "perl -e 'for (1..500) { defined(fork) or die \"limit: $!\\n\" }; sleep 1'",
    )
    .await;
    assert!(text(&result.stderr).contains("limit: Resource temporarily unavailable"));
    let result = shell(
        &mut sandbox,
        "perl -e '$x = \"x\" x (1 << 30); print length $x'",
    )
    .await;
    assert_ne!(result.outcome, CallOutcome::Ok);
    assert!(result.peak_memory.is_some());
    sandbox.close().await;
}

#[tokio::test]
async fn also_as_an_ordinary_user() {
    if !is_root() {
        let pool = pool().await;
        assert_eq!(pool.limits().mode, "user");
        return;
    }
    assert_eq!(pool().await.limits().mode, "root");
    // Copies that another user can reach, wherever this was built.
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let place = |from: &std::path::Path| {
        let to = dir.path().join(from.file_name().unwrap());
        std::fs::copy(from, &to).unwrap();
        to
    };
    let exe = std::env::current_exe().unwrap();
    let helpers = exe
        .ancestors()
        .map(|a| a.join("helpers"))
        .find(|h| h.join("drillyard-sandbox-init").exists())
        .or_else(|| std::env::var_os("DRILLYARD_HELPERS").map(Into::into))
        .unwrap();
    place(&helpers.join("drillyard-sandbox-init"));
    place(&helpers.join("drillyard-sql-tool"));
    let copy = place(&exe);
    std::fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let done = Command::new(copy)
        .env_clear()
        .env("DRILLYARD_HELPERS", dir.path())
        .env("TMPDIR", "/tmp")
        .args(["--test-threads", "2"])
        .current_dir("/")
        .gid(64_321)
        .uid(64_321)
        .output()
        .unwrap();
    let said = text(&done.stdout);
    assert!(done.status.success(), "{said}{}", text(&done.stderr));
    assert!(
        said.contains("test also_as_an_ordinary_user ... ok") && said.contains(" 0 failed"),
        "{said}"
    );
}
