//! The `local` backend: the contract of every backend, and what is its own.
//!
//! As root the whole file also runs once more as an ordinary user (`also_as_an_ordinary_user`).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod contract;

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use drillyard_sandbox::{CallOutcome, Pool, SandboxConfig, SandboxError, Setup};

use contract::{
    eventually, host_processes, is_root, output, shell, shell_for, small, text, unique,
};

#[expect(clippy::unused_async, reason = "what the contract asks for")]
async fn configured() -> Option<SandboxConfig> {
    Some(small())
}

every_backend_must!(configured);

async fn pool() -> Pool {
    Pool::start(small()).await.unwrap()
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
