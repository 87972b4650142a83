//! What every backend must do: run against each by [`every_backend_must!`]. What hostile code tries is in `attacks`.

use std::time::Duration;

use drillyard_sandbox::Change::{Created, Deleted, Modified};
use drillyard_sandbox::{
    Call, CallOutcome, Kind, Pool, SandboxConfig, SandboxError, Setup, Snapshot,
};
use rustix::process::Signal;

use crate::common::{
    MIB, changes, eventually, exec, fresh, host_processes, is_root, kill, list, open_dir_for_all,
    output, proc, processes_with, read, shell, shell_for, text, unique, write,
};

/// Makes a test of each part of the contract. Takes an asynchronous function that gives the backend's configuration, or
/// nothing where the backend cannot be had.
#[macro_export]
macro_rules! every_backend_must {
    ($config:path) => {
        $crate::every_backend_must!($config;
            a_call_says_what_it_did,
            the_environment_is_exactly_the_promised_one,
            a_timeout_asks_before_it_kills,
            a_full_disk_is_named_only_where_it_was_met,
            file_tools_read_write_and_list,
            setup_files_cannot_leave_the_sandbox,
            changed_files_are_told_exactly,
            large_files_changed_in_place_are_noticed,
            snapshots_restore_and_branch,
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

async fn pool(config: SandboxConfig) -> Pool {
    Pool::start(config).await.unwrap()
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
    assert_eq!(changes(&result), [("out.txt", Created)]);
    assert_eq!(output(&mut sandbox, "cat deep/down/x").await, "x");

    let result = exec(&mut sandbox, &["no-such-program"], b"").await;
    assert_eq!(
        (result.exit_code, text(&result.stderr)),
        (Some(127), "no-such-program: command not found\n".into())
    );
    let input = vec![7; 300_000];
    let result = exec(&mut sandbox, &["cat"], &input).await;
    assert_eq!(result.stdout, input);
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
    let mut sandbox = fresh(&pool(config).await).await;
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

pub async fn a_timeout_asks_before_it_kills(config: SandboxConfig) {
    let mut sandbox = fresh(&pool(config).await).await;
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

pub async fn a_full_disk_is_named_only_where_it_was_met(config: SandboxConfig) {
    let mut sandbox = fresh(&pool(config).await).await;
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

pub async fn file_tools_read_write_and_list(config: SandboxConfig) {
    let mut sandbox = fresh(&pool(config).await).await;
    write(&mut sandbox, "a/b/c.txt", "hello").await.unwrap();
    let whole = read(&mut sandbox, "/work/a/b/c.txt").await;
    assert_eq!(whole.as_deref(), Ok("hello"));
    let part = Call::ReadFile {
        path: "a/b/c.txt".into(),
        max_bytes: 2,
    };
    let result = sandbox.call(part).await.unwrap();
    assert_eq!(
        (text(&result.stdout).as_str(), result.stdout_bytes),
        ("he", 5)
    );
    let make = "mkdir dir; mkfifo pipe; ln -s /etc/passwd passwd; ln -s a/b/c.txt good; ln -s nowhere/x dangling; truncate -s 10M sparse";
    output(&mut sandbox, make).await;
    // Links are followed, and lead to the sandbox's own files.
    assert_eq!(read(&mut sandbox, "good").await.as_deref(), Ok("hello"));
    let passwd = read(&mut sandbox, "passwd").await.unwrap();
    assert!(passwd.contains("agent:x:1000"), "{passwd}");
    assert_eq!(read(&mut sandbox, "sparse").await.unwrap().len(), 1000);
    for (path, why) in [
        ("nothing", "No such file"),
        ("dangling", "No such file"),
        ("dir", "Is a directory"),
        ("a/b/c.txt/d", "Not a directory"),
        ("pipe", "not a regular file"),
    ] {
        let error = read(&mut sandbox, path).await.unwrap_err();
        assert!(
            error.starts_with(&format!("read_file: {path}: ")) && error.contains(why),
            "{error}"
        );
    }
    for (path, why) in [
        ("dir", "Is a directory"),
        ("a/b/c.txt/d", "Not a directory"),
        ("pipe", "No such device"),
        ("/etc/x", "Read-only"),
    ] {
        let error = write(&mut sandbox, path, "x").await.unwrap_err();
        assert!(
            error.starts_with(&format!("write_file: {path}: ")) && error.contains(why),
            "{error}"
        );
    }
    assert_eq!(
        list(&mut sandbox, "").await.unwrap(),
        "a/\ndangling -> nowhere/x\ndir/\ngood -> a/b/c.txt\npasswd -> /etc/passwd\npipe\t(special)\nsparse\t10485760\n"
    );
    let error = list(&mut sandbox, "nowhere").await.unwrap_err();
    assert!(error.contains("No such file"), "{error}");
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
    let mut sandbox = fresh(&pool(config).await).await;
    shell(&mut sandbox, "head -c 3M /dev/zero > big").await;
    for round in 1..6 {
        let result = shell(
            &mut sandbox,
            &format!("printf {round} | dd of=big conv=notrunc seek=1000 bs=1 status=none"),
        )
        .await;
        assert_eq!(changes(&result), [("big", Modified)], "round {round}");
    }
    assert_eq!(
        shell(&mut sandbox, "cat big > /dev/null")
            .await
            .files_changed,
        []
    );
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

pub async fn a_lost_sandbox_is_said_to_be_lost(config: SandboxConfig) {
    let pool = pool(config).await;
    let mut sandbox = fresh(&pool).await;
    let mark = unique();
    // Someone on the host kills PID 1 of the sandbox in the middle of a call.
    let killer = tokio::spawn({
        let mark = mark.clone();
        async move {
            eventually("the tool runs", || host_processes(&mark) > 0).await;
            let status = proc(&format!("{}/status", processes_with(&mark)[0]));
            let parent = status.lines().find_map(|l| l.strip_prefix("PPid:"));
            kill(parent.unwrap().trim().parse().unwrap(), Signal::KILL);
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
    let mut sandbox = fresh(&pool(config).await).await;
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
    // Only root can place something elsewhere than below /tmp, where the sandbox' own directory hides it.
    let dir = open_dir_for_all(if is_root() { "/var/lib" } else { "/tmp" });
    let data = dir.path().join("data");
    std::fs::write(&data, "shown").unwrap();
    config.host_paths = vec![dir.path().to_str().unwrap().into()];
    let mut sandbox = fresh(&pool(config).await).await;
    let path = data.display();
    if is_root() {
        assert_eq!(output(&mut sandbox, &format!("cat {path}")).await, "shown");
    }
    let result = shell(&mut sandbox, &format!("echo x > {path}")).await;
    assert_eq!(result.outcome, CallOutcome::Error);
    assert_eq!(std::fs::read_to_string(&data).unwrap(), "shown");
    sandbox.close().await;
}
