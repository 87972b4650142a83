//! The `docker` backend against a real engine: the contract of every backend, and what is its own.
//!
//! The engine is that of DOCKER_HOST, else one started here when this is root and `dockerd` is installed, else everything is
//! skipped, loudly.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
mod contract;

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bollard::Docker;
use bollard::exec::{CreateExecOptions, StartExecResults};
use bollard::models::{
    ContainerCreateBody, ContainerSummary, ContainerSummaryStateEnum, HostConfig,
};
use bollard::query_parameters::{
    CreateContainerOptions, InspectContainerOptions, ListContainersOptions, RemoveContainerOptions,
};
use futures::StreamExt;

use drillyard_sandbox::{
    Call, CallOutcome, Holds, Image, Pool, SandboxConfig, SandboxError, Setup,
};

use common::engine::{OwnEngine, engine, skipped};
use common::{eventually, host_processes, output, shell, shell_for, small, text, unique};

async fn configured() -> Option<SandboxConfig> {
    let address = tokio::task::spawn_blocking(engine).await.unwrap()?;
    Some(SandboxConfig {
        backend: "docker".into(),
        engine: Some(address.to_owned()),
        ..small()
    })
}

every_backend_must!(configured);

/// The engine's own interface.
async fn api(address: &str) -> Docker {
    Docker::connect_with_host(address)
        .unwrap()
        .negotiate_version()
        .await
        .unwrap()
}

/// Containers of this program, or of another process of it.
async fn containers(api: &Docker, pid: u32) -> Vec<ContainerSummary> {
    let options = ListContainersOptions {
        all: true,
        filters: Some(HashMap::from([(
            "label".to_owned(),
            vec!["drillyard.owner".to_owned()],
        )])),
        ..ListContainersOptions::default()
    };
    let mut all = api.list_containers(Some(options)).await.unwrap();
    all.retain(|c| {
        c.labels
            .as_ref()
            .is_some_and(|l| l["drillyard.owner"].starts_with(&format!("{pid}-")))
    });
    all
}

/// Waits until the engine has removed what a process ran. What that created and had no time to start stays for the next
/// start.
async fn gone(api: &Docker, pid: u32) {
    let until = Instant::now() + Duration::from_mins(1);
    loop {
        let mut left = containers(api, pid).await;
        left.retain(|c| c.state != Some(ContainerSummaryStateEnum::CREATED));
        if left.is_empty() {
            return;
        }
        assert!(
            Instant::now() < until,
            "containers are still there: {left:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn the_report_tells_what_was_seen_inside() {
    let Some(config) = configured().await else {
        return;
    };
    let pool = Pool::start(config).await.unwrap();
    let limits = pool.limits();
    let how = |name: &str| {
        let row = limits.rows.iter().find(|r| r.limit == name).unwrap();
        (row.holds, row.how.as_str())
    };
    for (name, part) in [
        ("memory", "as read inside"),
        ("processes", "as read inside"),
        ("processors", "as read inside"),
        ("disk", "/work 10 MiB, /tmp 4 MiB, /dev/shm 2 MiB"),
        ("system calls", "the engine's filter and PID 1's own"),
        ("network", "of its own"),
    ] {
        let (holds, how) = how(name);
        assert_eq!(holds, Holds::Yes, "{name}: {how}");
        assert!(how.contains(part), "{name}: {how}");
    }
    assert_eq!(
        (limits.backend.as_str(), pool.image().name.as_str()),
        ("docker", "host")
    );
}

/// Runs a program in a container by the engine's own means.
async fn exec(api: &Docker, id: &str, command: &[&str]) -> Option<i64> {
    let options = CreateExecOptions {
        cmd: Some(command.to_vec()),
        user: Some("1000:1000"),
        attach_stdout: Some(true),
        ..CreateExecOptions::default()
    };
    let exec = api.create_exec(id, options).await.ok()?;
    if let StartExecResults::Attached { mut output, .. } =
        api.start_exec(&exec.id, None).await.ok()?
    {
        while output.next().await.is_some() {}
    }
    api.inspect_exec(&exec.id).await.ok()?.exit_code
}

#[tokio::test]
async fn the_engines_filter_refuses_by_itself() {
    let Some(config) = configured().await else {
        return;
    };
    let api = api(config.engine.as_deref().unwrap()).await;
    let pool = Pool::start(config).await.unwrap();
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let mark = unique();
    let busy = tokio::spawn(async move {
        shell_for(
            &mut sandbox,
            Duration::from_secs(8),
            &format!("sleep {mark}"),
        )
        .await
    });
    // What the engine starts in a container has the engine's filter and not PID 1's.
    let family = |n: u32| format!("socket(S, {n}, 1, 0) or exit($!+0); exit(0)");
    let call = |n: i64| format!("$r = syscall({n}, 0, 0, 0, 0, 0); exit($r == -1 ? $!+0 : 0)");
    let clone = format!(
        "$r = syscall(56, {}, 0, 0, 0, 0); exit($r == -1 ? $!+0 : 0)",
        libc::CLONE_NEWUSER
    );
    // The kernel looks at 32 bits of a family only: bits above must not hide it.
    let hidden = "$r = syscall(41, 40 + (1 << 32), 1, 0); exit($r == -1 ? $!+0 : 0)".to_owned();
    let status = "open F, '/proc/self/status'; while (<F>) { exit 9 if /^Seccomp_filters:\\s+1$/ }"
        .to_owned();
    for (program, code) in [
        (family(1), 0),
        (family(2), 0),
        (family(40), libc::EPERM),
        (family(16), libc::EPERM),
        (family(38), libc::EPERM),
        (hidden, libc::EPERM),
        (call(libc::SYS_getppid), 0),
        (call(libc::SYS_io_uring_setup), libc::EPERM),
        (call(libc::SYS_mount), libc::EPERM),
        (call(libc::SYS_open_tree), libc::EPERM),
        (call(libc::SYS_clone3), libc::ENOSYS),
        (clone, libc::EPERM),
        (status, 9),
    ] {
        let until = Instant::now() + Duration::from_mins(1);
        let seen = 'ran: loop {
            assert!(Instant::now() < until, "no container runs {program}");
            for container in containers(&api, std::process::id()).await {
                let host = container
                    .image
                    .is_some_and(|i| i.starts_with("drillyard/host"));
                let id = container.id.filter(|_| host).unwrap_or_default();
                // Another test's container may end at any time; so do its programs then.
                match exec(&api, &id, &["perl", "-e", &program]).await {
                    None | Some(126 | 127 | 137) => {}
                    Some(seen) => break 'ran seen,
                }
            }
        };
        assert_eq!(seen, i64::from(code), "{program}");
    }
    busy.await.unwrap();
}

#[tokio::test]
async fn an_engine_is_asked_for_confinement() {
    let Some(config) = configured().await else {
        return;
    };
    let api = api(config.engine.as_deref().unwrap()).await;
    let pool = Pool::start(config).await.unwrap();
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    // Other tests' containers are asked for the same; they may end at any time.
    let host = 'found: loop {
        for container in containers(&api, std::process::id()).await {
            let id = container.id.unwrap();
            let seen = api.inspect_container(&id, None::<InspectContainerOptions>);
            if let Some(host) = seen.await.ok().and_then(|seen| seen.host_config) {
                break 'found host;
            }
        }
    };
    assert_eq!(host.readonly_rootfs, Some(true));
    assert_eq!(host.network_mode.as_deref(), Some("none"));
    assert_eq!(host.privileged, Some(false));
    assert_eq!(host.memory, host.memory_swap);
    assert_eq!(host.cap_drop, Some(vec!["ALL".to_owned()]));
    assert_eq!(host.log_config.unwrap().typ.as_deref(), Some("none"));
    assert!(
        host.mounts
            .unwrap()
            .iter()
            .all(|m| m.read_only == Some(true))
    );
    // The engine's resolver is not told inside.
    assert_eq!(
        output(&mut sandbox, "grep -v '^#' /etc/resolv.conf").await,
        "nameserver 127.0.0.1"
    );
    assert_eq!(
        output(&mut sandbox, "ls /sys/class /sys/devices | tr -d '\\n'").await,
        "/sys/class:/sys/devices:"
    );
    sandbox.close().await;
}

#[tokio::test]
async fn what_is_dropped_is_removed() {
    if std::env::var_os("DRILLYARD_TEST_DROPS").is_some() {
        let config = configured().await.unwrap();
        let pool = Pool::start(config).await.unwrap();
        let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
        output(&mut sandbox, "true").await;
        // Nothing is closed in order.
        return;
    }
    let Some(config) = configured().await else {
        return;
    };
    let address = config.engine.unwrap();
    let api = api(&address).await;
    let mut child = again("what_is_dropped_is_removed", &address)
        .env("DRILLYARD_TEST_DROPS", "1")
        .spawn()
        .unwrap();
    assert!(child.wait().unwrap().success());
    gone(&api, child.id()).await;
}

/// This very test as another process.
fn again(test: &str, address: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env("DOCKER_HOST", address)
        .stdout(Stdio::null())
        .process_group(0);
    command
}

#[tokio::test]
async fn killing_the_program_leaves_nothing() {
    if let Ok(mark) = std::env::var("DRILLYARD_TEST_VICTIM") {
        let pool = Pool::start(configured().await.unwrap()).await.unwrap();
        let mut sandboxes = Vec::new();
        for _ in 0..3 {
            sandboxes.push(pool.lease(&Setup::default()).await.unwrap());
        }
        for mut sandbox in sandboxes {
            let command = format!("setsid sleep {mark} & sleep {mark}");
            tokio::spawn(async move {
                shell_for(&mut sandbox, Duration::from_secs(10), &command).await
            });
        }
        tokio::time::sleep(Duration::from_mins(1)).await;
        return;
    }
    let Some(config) = configured().await else {
        return;
    };
    let address = config.engine.clone().unwrap();
    let api = api(&address).await;
    let mark = unique();
    let mut child = again("killing_the_program_leaves_nothing", &address)
        .env("DRILLYARD_TEST_VICTIM", &mark)
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_mins(1);
    while host_processes(&mark) < 6 {
        assert!(Instant::now() < until, "the sandboxes are not busy");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(containers(&api, child.id()).await.len() >= 3);
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("processes are gone", || host_processes(&mark) == 0).await;
    // The engine removes what has ended by itself.
    gone(&api, child.id()).await;
    let pool = Pool::start(config.clone()).await.unwrap();
    assert!(containers(&api, child.id()).await.is_empty());
    // What a killed program created and never started is swept at the next start; what a live one has is left alone.
    let model = loop {
        let all = containers(&api, std::process::id()).await;
        if let Some(labels) = all.into_iter().find_map(|c| c.labels.zip(c.image)) {
            break labels;
        }
    };
    let mut labels = model.0;
    let own = labels["drillyard.owner"].clone();
    labels.insert("drillyard.owner".into(), "4194304-1-0".into());
    let name = format!("drillyard-test-{mark}");
    let dead = ContainerCreateBody {
        image: Some(model.1),
        entrypoint: Some(vec!["/none".into()]),
        labels: Some(labels),
        host_config: Some(HostConfig::default()),
        ..ContainerCreateBody::default()
    };
    let options = CreateContainerOptions {
        name: Some(name.clone()),
        ..CreateContainerOptions::default()
    };
    api.create_container(Some(options), dead).await.unwrap();
    let other = Pool::start(config).await.unwrap();
    let left = api
        .inspect_container(&name, None::<InspectContainerOptions>)
        .await;
    if left.is_ok() {
        let _ = api
            .remove_container(&name, None::<RemoveContainerOptions>)
            .await;
    }
    assert!(left.is_err(), "the leftover container is still there");
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    assert_eq!(output(&mut sandbox, "echo alive").await, "alive", "{own}");
    drop(other);
    sandbox.close().await;
}

/// A root file system of nothing but busybox.
fn busybox(dir: &Path) -> bool {
    let Some(program) = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .find(|p| Path::new(p).exists())
    else {
        skipped("no static busybox for a root file system");
        return false;
    };
    for sub in ["bin", "etc", "usr/lib"] {
        std::fs::create_dir_all(dir.join(sub)).unwrap();
    }
    std::fs::copy(program, dir.join("bin/busybox")).unwrap();
    for name in ["sh", "ls", "cat", "echo", "id", "test", "wc"] {
        std::os::unix::fs::symlink("busybox", dir.join("bin").join(name)).unwrap();
    }
    std::fs::write(dir.join("etc/mine"), "of the image").unwrap();
    std::fs::write(
        dir.join("usr/lib/os-release"),
        "PRETTY_NAME=\"Busybox of mine\"\n",
    )
    .unwrap();
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    true
}

#[tokio::test]
async fn a_root_file_system_is_imported_once() {
    let Some(mut config) = configured().await else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    if !busybox(dir.path()) {
        return;
    }
    let api = api(config.engine.as_deref().unwrap()).await;
    let digest = format!("blake3:test{}", unique());
    config.image = Image::RootFs {
        dir: dir.path().to_str().unwrap().into(),
        digest: digest.clone(),
    };
    let pool = Pool::start(config.clone()).await.unwrap();
    assert_eq!(
        (pool.image().digest.as_str(), pool.image().system.as_str()),
        (digest.as_str(), "Busybox of mine")
    );
    let mut sandbox = pool.lease(&Setup::new([("in", &b"x"[..])])).await.unwrap();
    assert_eq!(
        output(&mut sandbox, "cat /etc/mine in; id -u; echo; ls /").await,
        "of the imagex1000\n\nbin\ndev\netc\nopt\nproc\nsys\ntmp\nusr\nwork"
    );
    assert_eq!(
        shell(&mut sandbox, "echo x > /etc/mine").await.outcome,
        CallOutcome::Error
    );
    // The SQL tool comes with every image.
    let answer = output(
        &mut sandbox,
        "echo 'select 42' | drillyard-sql-tool :memory:",
    )
    .await;
    assert!(answer.contains("42"), "{answer}");
    sandbox.close().await;
    // The directory has served: what the engine has is used again.
    let tag = || async {
        let all = containers(&api, std::process::id()).await;
        let image = all
            .into_iter()
            .filter_map(|c| c.image)
            .find(|i| i.starts_with("drillyard/blake3-test"))
            .unwrap();
        let created = api.inspect_image(&image).await.unwrap().created;
        (image, created)
    };
    let first = tag().await;
    std::fs::write(dir.path().join("etc/mine"), "changed").unwrap();
    let again = Pool::start(config).await.unwrap();
    assert_eq!(tag().await, first);
    let mut sandbox = again.lease(&Setup::default()).await.unwrap();
    assert_eq!(output(&mut sandbox, "cat /etc/mine").await, "of the image");
    sandbox.close().await;
    drop((pool, again));
    for _ in 0..100 {
        let removed = api.remove_image(
            &first.0,
            None::<bollard::query_parameters::RemoveImageOptions>,
            None,
        );
        if removed.await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn an_engine_that_sees_other_files_cannot_have_the_hosts_image() {
    if configured().await.is_none() {
        return;
    }
    // The directory that this host shows is another one in the engine's mount namespace.
    let shown = tempfile::tempdir_in("/var/lib").unwrap();
    let path = shown.path().to_str().unwrap().to_owned();
    let hide = format!("mount -t tmpfs other {path} || exit 1");
    let Some(own) = tokio::task::spawn_blocking(move || OwnEngine::start(&[], &hide))
        .await
        .unwrap()
    else {
        skipped("an engine of one's own needs root and dockerd");
        return;
    };
    let mut config = SandboxConfig {
        backend: "docker".into(),
        engine: Some(own.address()),
        ..small()
    };
    // The control: without it all is well.
    let pool = Pool::start(config.clone()).await.unwrap();
    drop(pool);
    config.host_paths = vec![path.as_str().into()];
    let error = Pool::start(config.clone()).await.unwrap_err().to_string();
    assert!(
        error.starts_with("sandbox.image: ")
            && error.contains(&own.address())
            && error.contains(&path),
        "{error}"
    );
    // A path that is not there at all.
    let missing = shown.path().join("only-here");
    std::fs::create_dir(&missing).unwrap();
    config.host_paths = vec![missing.to_str().unwrap().into()];
    let error = Pool::start(config).await.unwrap_err().to_string();
    assert!(error.starts_with("sandbox.image: "), "{error}");
}

#[tokio::test]
async fn an_engine_that_dies_is_said_to_be_gone() {
    if configured().await.is_none() {
        return;
    }
    let Some(own) = tokio::task::spawn_blocking(|| OwnEngine::start(&[], ""))
        .await
        .unwrap()
    else {
        skipped("an engine of one's own needs root and dockerd");
        return;
    };
    let mut config = SandboxConfig {
        backend: "docker".into(),
        engine: Some(own.address()),
        ..small()
    };
    config.limits.call_timeout = Duration::from_secs(5);
    let pool = Pool::start(config.clone()).await.unwrap();
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let mark = unique();
    let command = format!("sleep {mark}");
    let call = sandbox.call(Call::shell(command));
    let crash = async {
        eventually("the tool runs", || host_processes(&mark) > 0).await;
        own.crash();
    };
    let (result, ()) = tokio::join!(call, crash);
    let error = result.unwrap_err();
    assert!(matches!(error, SandboxError::EngineGone { .. }), "{error}");
    assert!(error.to_string().contains(&own.address()), "{error}");
    assert!(sandbox.is_lost());
    // What runs in its container ends with the call's own clock though nobody manages it.
    eventually("processes are gone", || host_processes(&mark) == 0).await;
    let error = sandbox.reset().await.unwrap_err();
    assert!(matches!(error, SandboxError::EngineGone { .. }), "{error}");
    let error = Pool::start(config).await.unwrap_err();
    assert!(matches!(error, SandboxError::NoEngine { .. }), "{error}");
}

#[tokio::test]
async fn an_engine_is_reached_over_tls() {
    const PORT: &str = "tcp://127.0.0.1:23769";
    if std::env::var_os("DRILLYARD_TEST_TLS").is_some() {
        // DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH say everything.
        let config = SandboxConfig {
            backend: "docker".into(),
            ..small()
        };
        let pool = Pool::start(config).await.unwrap();
        let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
        assert_eq!(output(&mut sandbox, "echo over TLS").await, "over TLS");
        let big = Call::Exec {
            argv: vec!["cat".into()],
            stdin: vec![7; 300_000],
            timeout: None,
        };
        assert_eq!(sandbox.call(big).await.unwrap().stdout, vec![7; 300_000]);
        sandbox.close().await;
        return;
    }
    if configured().await.is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let made = Command::new("sh")
        .args(["-ec", CERTIFICATES])
        .current_dir(dir.path())
        .output();
    if !made.is_ok_and(|m| m.status.success()) {
        skipped("openssl is needed for certificates");
        return;
    }
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (ca, cert, key) = (at("ca.pem"), at("server.pem"), at("server-key.pem"));
    let Some(own) = tokio::task::spawn_blocking(move || {
        let arguments = [
            "-H",
            PORT,
            "--tlsverify",
            "--tlscacert",
            &ca,
            "--tlscert",
            &cert,
            "--tlskey",
            &key,
        ];
        OwnEngine::start(&arguments, "")
    })
    .await
    .unwrap() else {
        skipped("an engine of one's own needs root and dockerd");
        return;
    };
    let run = |certificates: &str| {
        again("an_engine_is_reached_over_tls", PORT)
            .env("DRILLYARD_TEST_TLS", "1")
            .env("DOCKER_TLS_VERIFY", "1")
            .env("DOCKER_CERT_PATH", certificates)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output()
            .unwrap()
    };
    let done = run(dir.path().to_str().unwrap());
    let said = format!("{}{}", text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{said}");
    // Without the right certificates it is refused, and said why.
    let done = run("/nonexistent");
    let said = format!("{}{}", text(&done.stdout), text(&done.stderr));
    assert!(
        !done.status.success() && said.contains("DOCKER_CERT_PATH"),
        "{said}"
    );
    drop(own);
}

const CERTIFICATES: &str = r"
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca-key.pem -out ca.pem \
  -addext basicConstraints=critical,CA:TRUE
for who in server client; do
  openssl req -newkey rsa:2048 -nodes -subj /CN=$who -keyout $who-key.pem -out $who.csr
  printf 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' > ext
  openssl x509 -req -days 2 -in $who.csr -CA ca.pem -CAkey ca-key.pem -CAcreateserial -extfile ext -out $who.pem
done
mv client-key.pem key.pem; mv client.pem cert.pem
";

#[tokio::test]
async fn without_an_engine_it_says_where_it_looked() {
    let config = SandboxConfig {
        backend: "docker".into(),
        engine: Some("unix:///nonexistent/engine.sock".into()),
        ..small()
    };
    let error = Pool::start(config.clone()).await.unwrap_err();
    assert!(matches!(error, SandboxError::NoEngine { .. }), "{error}");
    let text = error.to_string();
    for part in ["/nonexistent/engine.sock", "DOCKER_HOST", "dockerd"] {
        assert!(text.contains(part), "{text}");
    }
    let config = SandboxConfig {
        control_groups: false,
        ..config
    };
    let error = Pool::start(config).await.unwrap_err().to_string();
    assert!(error.starts_with("sandbox.control_groups"), "{error}");
}
