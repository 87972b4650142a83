//! The `local` backend: the contract of every backend, and what is its own.
//!
//! As root the whole file also runs once more as an ordinary user (`also_as_an_ordinary_user`).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod contract;

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use drillyard_sandbox::{CallOutcome, Pool, SandboxConfig, SandboxError, Setup};
use rustix::process::Signal;

use common::{
    again, children, eventually, fresh, groups_of, has_groups, host_processes, kill, output, shell,
    shell_for, small, text, unique,
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

/// This very test as another process, which keeps sandboxes busy until it is killed.
async fn victim(test: &str) -> Option<(Child, String)> {
    if let Ok(mark) = std::env::var("DRILLYARD_TEST_VICTIM") {
        let pool = pool().await;
        let mut sandboxes = Vec::new();
        for _ in 0..5 {
            sandboxes.push(fresh(&pool).await);
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
    let child = again(test)
        .env("DRILLYARD_TEST_VICTIM", &mark)
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
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!has_groups() || !groups_of(child.id()).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("processes are gone", || host_processes(&mark) == 0).await;
        eventually("control groups are gone", || {
            groups_of(child.id()).is_empty()
        })
        .await;
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
    // Stopped, the program cannot react; the helper's processes die first, then the program.
    kill(child.id(), Signal::STOP);
    let helpers = children(child.id());
    assert!(!helpers.is_empty());
    for helper in helpers {
        kill(helper, Signal::KILL);
    }
    eventually("sandboxes die with the helper", || {
        host_processes(&mark) == 0
    })
    .await;
    child.kill().unwrap();
    child.wait().unwrap();
    drop(pool().await);
    assert_eq!(groups_of(child.id()), BTreeSet::new());
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
    let mut sandbox = fresh(&pool).await;
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
    common::also_as_an_ordinary_user().await;
}
