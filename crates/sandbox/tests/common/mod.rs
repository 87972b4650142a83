//! What the tests of sandboxes have in common.

#![allow(dead_code, reason = "each test program uses its part")]

pub mod engine;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use drillyard_sandbox::{
    Call, CallOutcome, CallResult, Change, Limits, Pool, Sandbox, SandboxConfig, Setup,
};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// Somebody who is nobody on this host.
pub const ORDINARY_ID: u32 = 64_321;

/// The configuration that most tests use, of the default backend.
pub fn small() -> SandboxConfig {
    SandboxConfig {
        limits: Limits {
            call_timeout: Duration::from_secs(20),
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

/// A sandbox without set-up files.
pub async fn fresh(pool: &Pool) -> Sandbox {
    pool.lease(&Setup::default()).await.unwrap()
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

/// Runs a program by its name.
pub async fn exec(sandbox: &mut Sandbox, argv: &[&str], stdin: &[u8]) -> CallResult {
    let call = Call::Exec {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        stdin: stdin.to_vec(),
        timeout: None,
    };
    sandbox.call(call).await.unwrap()
}

/// Standard output of a command that must succeed.
pub async fn output(sandbox: &mut Sandbox, command: &str) -> String {
    said_well(&shell(sandbox, command).await, command)
}

/// Standard output of a call that must have succeeded.
pub fn said_well(result: &CallResult, what: &str) -> String {
    let said = text(&result.stdout);
    let outcome = result.outcome;
    assert_eq!(
        outcome,
        CallOutcome::Ok,
        "{what}: {said}{}",
        text(&result.stderr)
    );
    said.trim_end().to_owned()
}

/// What a file tool said, or why it did nothing.
async fn file_tool(sandbox: &mut Sandbox, call: Call) -> Result<String, String> {
    let result = sandbox.call(call).await.unwrap();
    match result.outcome {
        CallOutcome::Ok => Ok(text(&result.stdout)),
        _ => Err(text(&result.stderr)),
    }
}

pub async fn read(sandbox: &mut Sandbox, path: &str) -> Result<String, String> {
    let path = path.into();
    let max_bytes = 1000;
    file_tool(sandbox, Call::ReadFile { path, max_bytes }).await
}

pub async fn write(sandbox: &mut Sandbox, path: &str, content: &str) -> Result<String, String> {
    let (path, content) = (path.into(), content.into());
    file_tool(sandbox, Call::WriteFile { path, content }).await
}

pub async fn list(sandbox: &mut Sandbox, path: &str) -> Result<String, String> {
    file_tool(sandbox, Call::ListDir { path: path.into() }).await
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let mut hex = String::new();
    for byte in digest.as_ref() {
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

/// The changes a call is said to have made.
pub fn changes(result: &CallResult) -> Vec<(&str, Change)> {
    let changed = result.files_changed.iter();
    changed.map(|c| (c.path.as_str(), c.change)).collect()
}

/// A static program of this machine code.
pub fn elf(code: &[u8]) -> Vec<u8> {
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

pub async fn eventually(what: &str, holds: impl FnMut() -> bool) {
    eventually_in(Duration::from_secs(20), what, holds).await;
}

pub async fn eventually_in(time: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + time;
    while !holds() {
        assert!(Instant::now() < until, "not within {time:?}: {what}");
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

/// A file of the host's /proc, nothing where it is gone or not to be read.
pub fn proc(name: &str) -> String {
    let bytes = std::fs::read(Path::new("/proc").join(name)).unwrap_or_default();
    text(&bytes)
}

/// Every process of the host.
pub fn pids() -> Vec<u32> {
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .collect()
}

/// Host processes with this word in their command line.
pub fn processes_with(word: &str) -> Vec<u32> {
    let mut all = pids();
    all.retain(|pid| proc(&format!("{pid}/cmdline")).contains(word));
    all
}

/// How many of them there are.
pub fn host_processes(word: &str) -> usize {
    processes_with(word).len()
}

pub fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let lists = tasks.into_iter().flatten().flatten();
    lists
        .flat_map(|task| {
            let list = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            list.split_whitespace()
                .filter_map(|child| child.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Resident memory of a process in bytes.
pub fn resident(pid: u32) -> u64 {
    let status = proc(&format!("{pid}/status"));
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Control groups that a program's pools made, wherever they are, and those beneath.
pub fn groups_of(program: u32) -> BTreeSet<PathBuf> {
    fn walk(dir: &Path, depth: usize, inside: bool, prefix: &str, found: &mut BTreeSet<PathBuf>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                let inside = inside || entry.file_name().to_string_lossy().starts_with(prefix);
                if inside {
                    found.insert(entry.path());
                }
                if depth < 6 {
                    walk(&entry.path(), depth + 1, inside, prefix, found);
                }
            }
        }
    }
    let prefix = format!("drillyard-{program}-");
    let mut found = BTreeSet::new();
    walk(Path::new("/sys/fs/cgroup"), 0, false, &prefix, &mut found);
    found
}

/// Whether a program that keeps sandboxes must have control groups here.
pub fn has_groups() -> bool {
    is_root() && Path::new("/sys/fs/cgroup/memory").exists()
}

pub fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// A test of this program, to be run in a process of its own.
pub fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .stdout(Stdio::null());
    command
}

/// Where the helper programs lie.
pub fn helpers() -> PathBuf {
    if let Some(dir) = std::env::var_os("DRILLYARD_HELPERS") {
        return dir.into();
    }
    let exe = std::env::current_exe().unwrap();
    let near = exe.ancestors().map(|dir| dir.join("helpers"));
    let mut built = near.filter(|dir| dir.join("drillyard-sandbox-init").exists());
    let found = built.next();
    assert!(found.is_some(), "the helpers are not built (make helpers)");
    found.unwrap()
}

/// A directory that everybody may enter.
pub fn open_dir_for_all(parent: &str) -> TempDir {
    let dir = tempfile::tempdir_in(parent).unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    dir
}

/// This program as an ordinary user runs it, from copies that are within reach wherever this was built.
pub fn as_an_ordinary_user() -> (Command, TempDir) {
    let dir = open_dir_for_all("/var/tmp");
    let copy = |from: &Path| {
        let to = dir.path().join(from.file_name().unwrap());
        std::fs::copy(from, &to).unwrap();
        to
    };
    for entry in std::fs::read_dir(helpers()).unwrap().flatten() {
        copy(&entry.path());
    }
    let mut command = Command::new(copy(&std::env::current_exe().unwrap()));
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("DRILLYARD_HELPERS", dir.path())
        .env("TMPDIR", "/tmp")
        .current_dir("/")
        .uid(ORDINARY_ID)
        .gid(ORDINARY_ID);
    (command, dir)
}

/// As root, runs every test of this program once more as an ordinary user.
pub async fn also_as_an_ordinary_user() {
    let pool = Pool::start(small()).await.unwrap();
    let mode = if is_root() { "root" } else { "user" };
    assert_eq!(pool.limits().mode, mode);
    if !is_root() {
        return;
    }
    drop(pool);
    let (mut command, _dir) = as_an_ordinary_user();
    let done = command.args(["--test-threads", "2"]).output().unwrap();
    let said = text(&done.stdout);
    assert!(done.status.success(), "{said}{}", text(&done.stderr));
    assert!(
        said.contains("test also_as_an_ordinary_user ... ok") && said.contains(" 0 failed"),
        "{said}"
    );
}
