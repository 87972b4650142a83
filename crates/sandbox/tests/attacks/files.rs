//! Files, links and names made to fool whoever looks at them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drillyard_sandbox::Change::{Created, Deleted, Modified};
use drillyard_sandbox::{Call, CallOutcome, Kind, SandboxError, Setup};

use crate::common::{MIB, changes, exec, fresh, list, output, read, shell, text, write};
use crate::yard::{Canary, Outcome, Yard, python, python_result, shell_for, thorough};

pub async fn input(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let given = vec![7; 300_000];
    let read = exec(&mut sandbox, &["cat"], &given).await;
    assert_eq!(read.stdout, given);
    yard.control("input that is given is read");
    let started = Instant::now();
    assert_eq!(output(&mut sandbox, "cat; read x || echo eof").await, "eof");
    assert_eq!(
        output(&mut sandbox, "python3 -c 'input()' 2>&1 | tail -n 1").await,
        "EOFError: EOF when reading a line"
    );
    assert_ne!(
        shell(&mut sandbox, "bash -i < /dev/tty").await.outcome,
        CallOutcome::Timeout
    );
    assert_ne!(
        shell(
            &mut sandbox,
            "cat /dev/stdin; python3 -i < /dev/null; su; passwd; true"
        )
        .await
        .outcome,
        CallOutcome::Timeout
    );
    assert!(started.elapsed() < Duration::from_secs(9));
    sandbox.close().await;
    Outcome::Holds
}

pub async fn links(yard: Arc<Yard>) -> Outcome {
    let passwd = std::fs::read("/etc/passwd").unwrap();
    let canary = Canary::plant();
    let mut sandbox = yard.sandbox().await;
    write(&mut sandbox, "a/b/c.txt", "hello").await.unwrap();
    output(
        &mut sandbox,
        &format!("ln -s /etc/shadow shadow; ln -s /proc/1/environ environ; ln -s /etc/passwd passwd; ln -s {} canary; \
         ln -s ../../../../../../etc/passwd up; ln -s loop1 loop2; ln -s loop2 loop1; ln -s nowhere/x dangling; ln -s a/b/c.txt good; \
         ln -s /proc/self/root/proc/1/root/etc/passwd magic; ln -s /dev/zero zero; mkdir dir; ln -s / slash; \
         for i in {{1..45}}; do ln -s n$((i + 1)) n$i; done; echo end > n46", canary.path().display()),
    )
    .await;
    assert_eq!(read(&mut sandbox, "good").await.unwrap(), "hello");
    yard.control("a link that leads to a file of the sandbox is followed");
    for (path, why) in [
        ("environ", "Permission denied"),
        ("magic", "Permission denied"),
        ("shadow", "No such file"),
        ("loop1", "Too many levels"),
        ("n1", "Too many levels"),
        ("dangling", "No such file"),
        ("canary", "No such file"),
        ("zero", "not a regular file"),
        ("dir", "Is a directory"),
        ("slash", "Is a directory"),
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
    let own = read(&mut sandbox, "up").await.unwrap();
    assert!(own.contains("agent:x:1000"), "{own}");
    for (path, why) in [
        ("passwd", "Read-only"),
        ("up", "Read-only"),
        ("slash/etc/passwd", "Read-only"),
        ("/etc/x", "Read-only"),
        ("slash/usr/bin/x", "Read-only"),
        ("/proc/1/mem", "Permission denied"),
        ("a/b/c.txt/d", "Not a directory"),
        ("dir", "Is a directory"),
        ("magic", "Permission denied"),
        ("canary", "No such file"),
    ] {
        let error = write(&mut sandbox, path, "evil").await.unwrap_err();
        assert!(error.contains(why), "{path}: {error}");
    }
    assert_eq!(std::fs::read("/etc/passwd").unwrap(), passwd);
    assert_eq!(
        std::fs::read_to_string(canary.path()).unwrap(),
        canary.words
    );
    let dir = canary.path().parent().unwrap().display().to_string();
    for path in [
        dir.as_str(),
        "canary",
        "dangling",
        "/proc/1/fd",
        "/proc/1/root",
        "/root",
    ] {
        if let Ok(listed) = list(&mut sandbox, path).await {
            assert!(
                !yard.is_local() && !listed.contains(&canary.words),
                "{path}: {listed}"
            );
        }
    }
    sandbox.close().await;
    Outcome::Holds
}

pub async fn swap(yard: Arc<Yard>) -> Outcome {
    let canary = Canary::plant();
    let place = canary.path().parent().unwrap().display().to_string();
    let mut sandbox = yard.sandbox().await;
    // It goes on in the background when its call ends, if it is let.
    let swapper = format!(
        "os.mkdir('d'); open('d/{0}', 'w').write('inner')\nos.symlink('{place}', 'l')\nif os.fork():\n    time.sleep(0.2)\n    os._exit(0)\nos.setsid()\nn = 0\ncount = os.open('count', os.O_CREAT | os.O_WRONLY)\nwhile True:\n    os.rename('d', 't'); os.rename('l', 'd'); os.rename('t', 'l')\n    n += 1\n    if n % 64 == 0: os.pwrite(count, b'%09d' % n, 0)",
        canary.words
    );
    let result = python_result(&mut sandbox, &swapper).await;
    assert!(result.survivors, "{result:?}");
    let swaps: u64 = read(&mut sandbox, "count")
        .await
        .unwrap()
        .trim()
        .parse()
        .unwrap_or(0);
    assert!(swaps > 100, "{swaps} swaps");
    yard.control("hundreds of swaps took place during its call");
    let rounds = if thorough() { 3000 } else { 60 };
    for round in 0..rounds {
        if let Ok(said) = read(&mut sandbox, &format!("d/{}", canary.words)).await {
            assert_eq!(
                said,
                if round == 0 {
                    said.clone()
                } else {
                    "evil".into()
                }
            );
            assert!(!said.contains(&canary.words));
        }
        let _ = write(&mut sandbox, &format!("d/{}", canary.words), "evil").await;
        let _ = write(&mut sandbox, &format!("l/{}", canary.words), "evil").await;
        let _ = list(&mut sandbox, "d").await;
    }
    let snapshot = sandbox.snapshot().await.unwrap();
    assert!(
        snapshot
            .files()
            .all(|(_, bytes)| bytes != canary.words.as_bytes())
    );
    assert_eq!(
        std::fs::read_to_string(canary.path()).unwrap(),
        canary.words
    );
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
    // The swapper is dead: the count stands still.
    let count = read(&mut sandbox, "count").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(read(&mut sandbox, "count").await, count);
    // A branch with the link in the way of a set-up file does not follow it either.
    let mut branch = yard.pool().branch(&snapshot).await.unwrap();
    output(
        &mut branch,
        &format!("rm -rf d l; ln -s {place} d; ln -s /etc e"),
    )
    .await;
    let changes = shell(
        &mut sandbox,
        "rm -rf d l e; mkdir d e; echo evil > d/evil; echo evil > e/passwd",
    )
    .await
    .files_changed;
    let _ = branch.apply(&changes).await;
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
    assert!(
        !output(&mut branch, "cat /etc/passwd")
            .await
            .contains("evil")
    );
    sandbox.close().await;
    branch.close().await;
    Outcome::Holds
}

pub async fn special(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let code = "os.mkfifo('pipe')\ns = socket.socket(socket.AF_UNIX); s.bind('socket')\nopen('plain', 'w').write('plain')\nos.truncate('plain', 20 << 20)\nos.symlink('/dev/zero', 'zero')";
    python(&mut sandbox, code).await;
    assert_eq!(read(&mut sandbox, "plain").await.unwrap().len(), 1000);
    yard.control("a file far larger than asked for is read in part");
    let started = Instant::now();
    for path in [
        "pipe",
        "socket",
        "zero",
        "/dev/zero",
        "/dev/random",
        "/dev/stdin",
        "/dev/fd/0",
        "/proc/kmsg",
        "/proc/kcore",
        "/proc",
        ".",
        "/proc/self/mem",
        "/proc/1/mem",
        "/proc/sysrq-trigger",
    ] {
        let error = read(&mut sandbox, path).await.unwrap_err();
        assert!(error.starts_with("read_file: "), "{path}: {error}");
    }
    for path in [
        "pipe",
        "socket",
        "/dev/full",
        "/dev/zero",
        "/dev/stdout",
        "/proc/self/fd/1",
    ] {
        let error = write(&mut sandbox, path, "evil").await.unwrap_err();
        assert!(error.starts_with("write_file: "), "{path}: {error}");
    }
    for path in ["pipe", "plain", "zero"] {
        assert!(list(&mut sandbox, path).await.is_err(), "{path}");
    }
    // Without a size of its own, or with one that is all hole.
    assert!(
        read(&mut sandbox, "/proc/self/status")
            .await
            .unwrap()
            .contains("Name:")
    );
    let whole = Call::ReadFile {
        path: "plain".into(),
        max_bytes: u64::MAX,
    };
    let result = sandbox.call(whole).await.unwrap();
    assert_eq!(
        (result.stdout.len() as u64, result.stdout_bytes),
        (MIB, 20 * MIB)
    );
    let maps = Call::ReadFile {
        path: "/proc/self/pagemap".into(),
        max_bytes: u64::MAX,
    };
    assert!(sandbox.call(maps).await.unwrap().stdout.len() as u64 <= MIB);
    assert!(started.elapsed() < Duration::from_secs(8));
    // What is no file does not block whoever looks at the changes.
    let result = shell(&mut sandbox, "mkfifo other; touch x").await;
    assert!(
        result
            .files_changed
            .iter()
            .any(|c| c.path == "other" && c.kind == Kind::Other)
    );
    assert!(sandbox.snapshot().await.is_ok());
    output(&mut sandbox, "truncate -s 1 plain; echo fine").await;
    assert!(sandbox.snapshot().await.is_ok());
    sandbox.close().await;
    Outcome::Holds
}

pub async fn image(yard: Arc<Yard>) -> Outcome {
    let hash = |path: &str| blake3::hash(&std::fs::read(path).unwrap());
    let before = (hash("/bin/cat"), hash("/etc/passwd"));
    let mut sandbox = yard.sandbox().await;
    let inside = "sha256sum /bin/cat /etc/passwd /usr/bin/env; ls /usr/lib | wc -l";
    let clean = output(&mut sandbox, inside).await;
    for command in [
        "ln /bin/cat hard && echo evil >> hard",
        "ln /etc/passwd hard && echo evil >> hard",
        "mv /usr/lib /usr/lib2",
        "mv /bin/cat /work/cat",
        "rm -rf --no-preserve-root / 2>/dev/null",
        "cp /bin/true /bin/cat",
        "chmod u+w /bin/cat && echo evil > /bin/cat",
        "python3 -c 'import os; os.rename(\"/etc/passwd\", \"/etc/passwd2\")'",
        "python3 -c 'import os; os.truncate(\"/bin/cat\", 0)'",
        "python3 -c 'import os; os.utime(\"/bin/cat\", (1, 1))'",
        "python3 -c 'import os; os.setxattr(\"/bin/cat\", \"user.x\", b\"x\")'",
    ] {
        assert_ne!(
            shell_for(&mut sandbox, 2000, command).await.outcome,
            CallOutcome::Ok,
            "{command}"
        );
    }
    assert_eq!(output(&mut sandbox, inside).await, clean);
    assert_eq!((hash("/bin/cat"), hash("/etc/passwd")), before);
    // The same among the sandbox's own files, and told exactly.
    let setup = Setup::new([("file", &b"file"[..]), ("dir/in", b"in"), ("keep", b"keep")]);
    let mut sandbox = yard.pool().lease(&setup).await.unwrap();
    let result = shell(
        &mut sandbox,
        "ln keep hard; echo more >> hard; rm file; mkdir file; mv dir moved; ln -s moved dir",
    )
    .await;
    assert_eq!(result.outcome, CallOutcome::Ok);
    yard.control("the same is done to files that may be changed");
    let got: Vec<_> = result
        .files_changed
        .iter()
        .map(|c| (c.path.as_str(), c.change, c.kind))
        .collect();
    assert_eq!(
        got,
        [
            ("dir", Modified, Kind::Link),
            ("dir/in", Deleted, Kind::File),
            ("file", Modified, Kind::Dir),
            ("hard", Created, Kind::File),
            ("keep", Modified, Kind::File),
            ("moved", Created, Kind::Dir),
            ("moved/in", Created, Kind::File),
        ]
    );
    sandbox.close().await;
    Outcome::Holds
}

pub async fn forged(yard: Arc<Yard>) -> Outcome {
    let setup = Setup::new([
        ("dir/one", &b"one"[..]),
        ("dir/two", b"two"),
        ("mode", b"mode"),
        ("touch", b"touch"),
        ("back", b"back"),
        ("gone", b"gone"),
    ]);
    let mut sandbox = yard.pool().lease(&setup).await.unwrap();
    let result = shell(
        &mut sandbox,
        "rm -r dir; mkdir dir; echo new > dir/three; chmod 600 mode; touch touch; cp -p back b; rm back; mv b back; rm gone",
    )
    .await;
    assert_eq!(
        changes(&result),
        [
            ("dir/one", Deleted),
            ("dir/three", Created),
            ("dir/two", Deleted),
            ("gone", Deleted),
            ("mode", Modified)
        ]
    );
    yard.control("deletions and replacements are told exactly");
    // What means a deletion to a layered file system is data like any other.
    let code = r"
for d in ('dir', '.'):
    for n in ('user.overlay.opaque', 'user.overlay.whiteout', 'user.overlay.redirect', 'trusted.overlay.opaque', 'user.fuseoverlayfs.opaque'):
        print(n, tried(lambda: os.setxattr(d, n, b'y')))
print('mknod', tried(lambda: os.mknod('mode', 0o020000, 0)), tried(lambda: os.mknod('white', 0o020000, 0)))
for n in ('.wh.mode', '.wh..wh..opq', '.wh.dir', 'dir/.wh.three'):
    open(n, 'w').write('plain')
open('x', 'w').close()
print('x', tried(lambda: os.setxattr('x', 'user.overlay.metacopy', b'')), tried(lambda: os.setxattr('x', 'user.overlay.whiteout', b'')))
";
    let result = python_result(&mut sandbox, code).await;
    let said = text(&result.stdout);
    assert!(
        said.contains("mknod EEXIST E") && said.contains("trusted.overlay.opaque EPERM"),
        "{said}"
    );
    assert!(
        result.files_changed.iter().all(|c| c.change == Created),
        "{:?}",
        result.files_changed
    );
    assert_eq!(
        output(&mut sandbox, "cat mode dir/three .wh.mode; ls -A | wc -l").await,
        "modenew\nplain8"
    );
    let snapshot = sandbox.snapshot().await.unwrap();
    assert!(snapshot.files().any(|(p, b)| p == "mode" && b == b"mode"));
    assert!(
        snapshot
            .files()
            .any(|(p, b)| p == ".wh.mode" && b == b"plain")
    );
    let mut branch = yard.pool().branch(&snapshot).await.unwrap();
    assert_eq!(
        output(&mut branch, "cat mode dir/three .wh.mode; ls -A | wc -l").await,
        "modenew\nplain8"
    );
    sandbox.reset().await.unwrap();
    assert_eq!(
        output(&mut sandbox, "cat dir/one mode; ls -A | tr '\\n' ' '").await,
        "onemodeback dir gone mode touch"
    );
    sandbox.close().await;
    branch.close().await;
    Outcome::Holds
}

pub async fn odd(yard: Arc<Yard>) -> Outcome {
    let mut sandbox = yard.sandbox().await;
    let result = shell(
        &mut sandbox,
        "mkdir -p a/b && echo x > a/b/f && chmod 000 a/b a; touch -- $'line\\nbreak' ' ' '-rf' '*'; printf x > $(printf 'n%.0s' {1..255})",
    )
    .await;
    assert_eq!(result.outcome, CallOutcome::Ok, "{}", text(&result.stderr));
    assert!(!result.state_lost);
    assert!(
        result
            .files_changed
            .iter()
            .any(|c| c.path == "a/b/f" && c.content.as_deref() == Some(b"x\n"))
    );
    assert!(result.files_changed.iter().any(|c| c.path == "line\nbreak"));
    yard.control("a file in directories nobody may enter is told of");
    sandbox.snapshot().await.unwrap();
    // Where it cannot be told in whole it is said, never left out in silence.
    let result = shell(&mut sandbox, "touch $'\\xff\\xfe'").await;
    assert!(result.state_lost && result.outcome == CallOutcome::Ok);
    let result = shell(&mut sandbox, "mkdir -p $(printf 'd/%.0s' {1..200})").await;
    assert!(result.state_lost && result.outcome == CallOutcome::Ok);
    sandbox.reset().await.unwrap();
    assert_eq!(output(&mut sandbox, "ls -A").await, "");
    // Times that no number of nanoseconds holds, and every bit of a mode.
    let extreme = "for n, t in enumerate([2**63 - 1, -2**63, 20000000000, -20000000000]):\n    \
        open(f't{n}', 'w').write('x'); os.mkdir(f'd{n}'); os.utime(f't{n}', (t, t)); os.utime(f'd{n}', (t, t))\n\
        os.symlink('x', 'l'); os.utime('l', (2**62, 2**62), follow_symlinks=False)\n\
        open('sparse', 'w').truncate(2**16)\nos.chmod('t0', 0o7777); os.chmod('d0', 0o7777)\n\
        for n in range(200): os.link('t1', f'h{n}')\nprint('extreme')";
    let result = python_result(&mut sandbox, extreme).await;
    assert_eq!(
        text(&result.stdout),
        "extreme\n",
        "{}",
        text(&result.stderr)
    );
    assert!(!result.state_lost, "{result:?}");
    assert!(result.files_changed.iter().any(|c| c.path == "h199"));
    assert_eq!(output(&mut sandbox, "echo alive").await, "alive");
    sandbox.snapshot().await.unwrap();
    sandbox.close().await;
    let deep = "os.system('rm -rf *')\nfor i in range(1000):\n    os.mkdir('d'); os.chdir('d')\nopen('bottom', 'w').write('x')";
    let pool = yard.pool_with(|c| c.limits.files = 5000).await;
    let mut sandbox = fresh(&pool).await;
    let result = python_result(&mut sandbox, deep).await;
    assert_eq!(result.outcome, CallOutcome::Ok, "{}", text(&result.stderr));
    assert!(result.state_lost);
    assert!(matches!(
        sandbox.snapshot().await,
        Err(SandboxError::Refused { .. })
    ));
    let result = shell(&mut sandbox, "rm -rf d; ls -A; chattr +i / . 2>/dev/null; chown 0:0 . 2>/dev/null; chgrp 0 . 2>/dev/null; touch y; rm y").await;
    assert_eq!(
        (result.outcome, text(&result.stdout).as_str()),
        (CallOutcome::Ok, ""),
        "{}",
        text(&result.stderr)
    );
    sandbox.reset().await.unwrap();
    assert_eq!(output(&mut sandbox, "ls -A").await, "");
    // The places themselves made useless: the next call's troubles are its own, a reset ends them.
    shell(
        &mut sandbox,
        "chmod 000 /work /tmp /dev/shm; rm -rf /work /tmp /dev/shm",
    )
    .await;
    assert_eq!(
        exec(&mut sandbox, &["/bin/echo", "fine"], b"").await.stdout,
        b"fine\n"
    );
    sandbox.reset().await.unwrap();
    assert_eq!(output(&mut sandbox, "echo x > x; cat x").await, "x");
    sandbox.close().await;
    Outcome::Holds
}

/// Trees that cost whoever looks at them more than whoever made them.
pub async fn burden(yard: Arc<Yard>) -> Outcome {
    let pool = yard
        .pool_with(|c| {
            // Where each place has its share, /work gets what it has where they are one.
            let share = if yard.is_local() { 1 } else { 2 };
            c.limits.files = share * 60_000;
            c.limits.disk_bytes = share * 128 * MIB;
            c.limits.memory_bytes = share * 512 * MIB;
        })
        .await;
    for (what, code) in [
        // Names that grow sixfold in a message, long paths.
        (
            "names",
            "p = '\\x01' * 250\nfor i in range(8):\n    os.mkdir(p); os.chdir(p)\nfor i in range(40000):\n    os.close(os.open('\\x01' * 240 + '%05d' % i, os.O_CREAT | os.O_WRONLY))",
        ),
        // Files that are always looked into, far down, each between two directories.
        (
            "depth",
            "for i in range(95):\n    os.mkdir('d'); os.chdir('d')\nfor i in range(15000):\n    f = os.open('%05da' % i, os.O_CREAT | os.O_WRONLY); os.write(f, b'x'); os.close(f)\n    os.mkdir('%05db' % i)",
        ),
        // Links whose targets are as long as they can be.
        (
            "links",
            "for i in range(6000):\n    os.symlink('%04090d' % i, 'l%d' % i)",
        ),
        // Holes that read as if they were full.
        (
            "holes",
            "for i in range(2000):\n    f = os.open('h%d' % i, os.O_CREAT | os.O_WRONLY); os.ftruncate(f, 200 << 20); os.close(f)",
        ),
    ] {
        let mut sandbox = fresh(&pool).await;
        let started = Instant::now();
        let result = python_result(&mut sandbox, code).await;
        assert_eq!(
            result.outcome,
            CallOutcome::Ok,
            "{what}: {}",
            text(&result.stderr)
        );
        yard.control("such a tree was made");
        let first = started.elapsed();
        for command in ["true", "rm -rf /work/*"] {
            let started = Instant::now();
            let result = sandbox.call(Call::shell(command)).await;
            let result = result.unwrap_or_else(|e| panic!("{what}, {command}: {e}"));
            assert_eq!(result.outcome, CallOutcome::Ok, "{what}");
            assert!(
                started.elapsed() < Duration::from_secs(15),
                "{what}: {first:?}, {:?}",
                started.elapsed()
            );
        }
        let result = shell_for(&mut sandbox, 2000, "echo fine").await;
        assert_eq!(text(&result.stdout), "fine\n", "{what}");
        sandbox.close().await;
    }
    Outcome::Holds
}
