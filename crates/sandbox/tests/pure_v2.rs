//! Control groups as hosts have them that this one is not: version 2 alone, and none at all, in a small virtual machine.
//!
//! The machine runs under emulation (qemu without KVM), on Debian's cloud kernel, which is fetched with apt into the
//! target directory and unpacked there, never installed. Its root holds busybox, the static helper and this very test
//! program with its libraries, which runs there once more (`DRILLYARD_VM`) and says on the serial line what held.
//! Where qemu, apt or busybox is missing the test says so and passes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use drillyard_sandbox::{CallOutcome, Limits, Pool, SandboxConfig};

use common::{MIB, fresh, helpers, shell, shell_for, text};

const GROUPS: &str = "/sys/fs/cgroup";

/// What the machine must report, as `vm: MODE CHECK`.
const CHECKS: [&str; 11] = [
    "none limits",
    "none call",
    "v2 limits",
    "v2 memory",
    "v2 child",
    "v2 peak",
    "v2 processes",
    "v2 processors",
    "v2 timeout",
    "v2 sweep",
    "v2 clean",
];

#[tokio::test]
async fn version_2_alone_and_no_groups_at_all() {
    match std::env::var("DRILLYARD_VM").as_deref() {
        Ok("none") => without_groups().await,
        Ok(_) => version_2().await,
        Err(_) => boot(),
    }
}

fn boot() {
    let image = match image() {
        Ok(image) => image,
        Err(why) => {
            // Straight to the stream: the test harness would keep it to itself.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED version_2_alone_and_no_groups_at_all: {why}"
            );
            return;
        }
    };
    let mut machine = Command::new("qemu-system-x86_64")
        .args(["-accel", "tcg", "-m", "512", "-smp", "1"])
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
        .args(["-no-reboot", "-nodefaults"])
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.root)
        .args([
            "-append",
            "console=ttyS0 cgroup_no_v1=all panic=-1 quiet init_on_alloc=0",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = machine.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = output.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).replace('\r', "")
    });
    let until = Instant::now() + Duration::from_mins(5);
    while machine.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            machine.kill().unwrap();
            machine.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let said = reader.join().unwrap();
    for line in said.lines().filter(|line| line.contains("vm: ")) {
        let _ = writeln!(std::io::stdout(), "{line}");
    }
    for check in CHECKS {
        let line = format!("vm: {check} ");
        assert!(said.contains(&line), "nothing of '{check}' in:\n{said}");
    }
}

struct Image {
    kernel: PathBuf,
    root: PathBuf,
}

/// Brings the kernel and puts the machine's root together; the error says what is missing.
fn image() -> Result<Image, String> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm");
    fs::create_dir_all(&dir).unwrap();
    run("qemu-system-x86_64", &["--version"], &dir)?;
    let busybox = Path::new("/usr/bin/busybox");
    // Of a static program ldd says that it has no libraries, and fails.
    if !busybox.exists() || run("ldd", &["/usr/bin/busybox"], &dir).is_ok() {
        return Err("no static busybox (Debian: busybox-static)".into());
    }
    let kernel = kernel(&dir)?;
    let tree = dir.join("root");
    let _ = fs::remove_dir_all(&tree);
    for name in [
        "bin", "dev", "proc", "sys", "tmp", "etc", "helpers", "new", "usr",
    ] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    fs::copy(busybox, tree.join("bin/busybox")).unwrap();
    for name in run("busybox", &["--list"], &dir)?
        .lines()
        .filter(|n| *n != "busybox")
    {
        symlink("busybox", tree.join("bin").join(name)).unwrap();
    }
    let own = std::env::current_exe().unwrap();
    fs::copy(
        helpers().join("drillyard-sandbox-init"),
        tree.join("helpers/drillyard-sandbox-init"),
    )
    .unwrap();
    fs::copy(&own, tree.join("test")).unwrap();
    // Without names of functions it is a third of the size; with them it works as well.
    let _ = run("strip", &["test"], &tree);
    for library in run("ldd", &[own.to_str().unwrap()], &dir)?
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        let to = tree.join(&library[1..]);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(library, to).unwrap();
    }
    fs::write(tree.join("init"), INIT).unwrap();
    fs::set_permissions(tree.join("init"), fs::Permissions::from_mode(0o755)).unwrap();
    let root = dir.join("root.cpio");
    run(
        "sh",
        &[
            "-c",
            "find . | busybox cpio -o -H newc > ../root.cpio 2>/dev/null",
        ],
        &tree,
    )?;
    Ok(Image { kernel, root })
}

/// The unpacked kernel of Debian's newest cloud package.
fn kernel(dir: &Path) -> Result<PathBuf, String> {
    let unpacked = || {
        fs::read_dir(dir.join("kernel/boot"))
            .ok()?
            .flatten()
            .map(|e| e.path())
            .find(|p| p.to_string_lossy().contains("vmlinuz"))
    };
    if let Some(kernel) = unpacked() {
        return Ok(kernel);
    }
    let depends = run("apt-cache", &["depends", "linux-image-cloud-amd64"], dir)?;
    let package = depends
        .lines()
        .find_map(|l| l.trim().strip_prefix("Depends: "))
        .ok_or("apt knows no linux-image-cloud-amd64 (apt-get update)")?;
    run("apt-get", &["download", package], dir)?;
    let file = fs::read_dir(dir)
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .ok_or("apt-get download left no package")?;
    run("dpkg", &["-x", file.to_str().unwrap(), "kernel"], dir)?;
    fs::remove_file(file).unwrap();
    let _ = fs::remove_dir_all(dir.join("kernel/lib"));
    unpacked().ok_or_else(|| format!("{package} holds no kernel"))
}

fn run(program: &str, arguments: &[&str], dir: &Path) -> Result<String, String> {
    let done = Command::new(program)
        .args(arguments)
        .current_dir(dir)
        .output()
        .map_err(|e| format!("{program}: {e}"))?;
    if !done.status.success() {
        return Err(format!(
            "{program} {arguments:?}: {}",
            String::from_utf8_lossy(&done.stderr)
        ));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The first program of the machine. The root it starts in cannot be left by pivot_root, so it moves to another one.
const INIT: &str = "#!/bin/busybox sh
if [ \"$1\" != moved ]; then
  busybox mount -t tmpfs none /new
  busybox cp -a /bin /dev /etc /helpers /init /lib* /proc /sys /test /tmp /usr /new/
  exec busybox switch_root /new /init moved
fi
export PATH=/bin HOME=/ TMPDIR=/tmp DRILLYARD_HELPERS=/helpers
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
exec > /dev/console 2>&1
DRILLYARD_VM=none /test --nocapture
mount -t cgroup2 none /sys/fs/cgroup
DRILLYARD_VM=v2 /test --nocapture
poweroff -f
";

fn held(mode: &str, check: &str, detail: impl std::fmt::Display) {
    let mut out = std::io::stdout();
    writeln!(out, "vm: {mode} {check} ({detail})").unwrap();
}

fn config() -> SandboxConfig {
    SandboxConfig {
        limits: Limits {
            call_timeout: Duration::from_mins(1),
            memory_bytes: 64 * MIB,
            disk_bytes: 8 * MIB,
            pids: 20,
            cpus: 1.0,
            ..Limits::default()
        },
        pool_size: 1,
        ..SandboxConfig::default()
    }
}

async fn without_groups() {
    let pool = Pool::start(config()).await.unwrap();
    let weak: Vec<_> = pool.limits().weak().map(|r| r.limit.clone()).collect();
    for limit in ["memory", "processors"] {
        assert!(weak.iter().any(|w| w == limit), "{}", pool.limits());
    }
    held("none", "limits", weak.join(", "));
    let mut sandbox = fresh(&pool).await;
    let result = shell(&mut sandbox, "echo $((6 * 7))").await;
    assert_eq!(text(&result.stdout), "42\n", "{result:?}");
    held("none", "call", "42");
    sandbox.close().await;
}

/// Groups of any Drillyard program.
fn groups() -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(GROUPS)
        .unwrap()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|n| n.starts_with("drillyard-"))
        .collect();
    names.sort();
    names
}

async fn version_2() {
    let none: Vec<String> = Vec::new();
    assert!(fs::exists(format!("{GROUPS}/cgroup.controllers")).unwrap());
    assert_eq!(groups(), none);

    // A dead program's group with a process still in it: gone once a pool has started.
    let left = format!("{GROUPS}/drillyard-999999-1-0/sb-0");
    fs::create_dir_all(&left).unwrap();
    let mut stray = Command::new("sleep").arg("1000").spawn().unwrap();
    fs::write(format!("{left}/cgroup.procs"), stray.id().to_string()).unwrap();
    assert_eq!(groups().len(), 1);
    assert!(stray.try_wait().unwrap().is_none());
    let pool = Pool::start(config()).await.unwrap();
    assert!(!fs::exists(&left).unwrap());
    let ended = stray.wait().unwrap();
    assert!(!ended.success());
    held("v2", "sweep", ended);

    let weak: Vec<_> = pool.limits().weak().map(|r| r.limit.clone()).collect();
    assert_eq!(weak, none, "{}", pool.limits());
    let by_group = pool
        .limits()
        .rows
        .iter()
        .filter(|r| r.how.contains("version 2"));
    assert!(by_group.count() >= 3, "{}", pool.limits());
    held("v2", "limits", "all hold");

    let mut sandbox = fresh(&pool).await;
    let fill = |mib: u32| format!("dd if=/dev/zero of=/dev/null bs={mib}M count=1");
    let result = shell(&mut sandbox, &format!("exec {}", fill(200))).await;
    assert_eq!(
        (result.outcome, result.oom_kills),
        (CallOutcome::Memory, 1),
        "{result:?}"
    );
    held("v2", "memory", "200 MiB of 64: killed, once");
    let result = shell(&mut sandbox, &format!("{}; exit 0", fill(200))).await;
    assert_eq!(
        (result.outcome, result.oom_kills),
        (CallOutcome::Ok, 1),
        "{result:?}"
    );
    held("v2", "child", "killed, its parent not");
    sandbox.reset().await.unwrap();

    let large = shell(&mut sandbox, &fill(30)).await;
    let small = shell(&mut sandbox, "true").await;
    let (large, small) = (large.peak_memory.unwrap(), small.peak_memory.unwrap());
    assert!(
        large > 30 * MIB && small < 10 * MIB,
        "peaks of {large} and {small}"
    );
    held("v2", "peak", format!("{large} then {small}"));

    let many = "i=0; while [ $i -lt 40 ]; do sleep 100 & i=$((i + 1)); done; exit 1";
    let result = shell(&mut sandbox, many).await;
    assert_eq!(result.outcome, CallOutcome::Processes, "{result:?}");
    held("v2", "processes", text(&result.stderr).trim());
    let busy = "sleep 1000 & while :; do :; done";
    let result = shell_for(&mut sandbox, Duration::from_secs(2), busy).await;
    assert_eq!(result.outcome, CallOutcome::Timeout, "{result:?}");
    assert_eq!(shell(&mut sandbox, "echo on").await.stdout, b"on\n");
    held("v2", "timeout", format!("{:?}", result.wall));
    sandbox.close().await;
    drop(pool);

    let mut slow = config();
    slow.limits.cpus = 0.2;
    let pool = Pool::start(slow).await.unwrap();
    let mut sandbox = fresh(&pool).await;
    let result = shell_for(&mut sandbox, Duration::from_secs(2), busy).await;
    let share = result.cpu.unwrap().as_secs_f64() / result.wall.as_secs_f64();
    assert!(share > 0.05 && share < 0.35, "{share}: {result:?}");
    held("v2", "processors", format!("{share:.3} of 0.2"));
    sandbox.close().await;
    drop(pool);
    assert_eq!(groups(), none);
    held("v2", "clean", "no group left");
}
