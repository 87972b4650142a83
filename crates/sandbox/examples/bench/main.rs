//! What sandboxes cost, a JSON object a line, each beside a baseline measured in the same run: `make bench-sandbox`.
//!
//! `bench [N] [without-groups]`: N repetitions (200); `without-groups` leaves control groups out, which a real-time
//! scheduling class needs (`chrt -f 50` takes other programs' load out of the figures, but real-time processes cannot
//! join version 1 cpu groups). What cannot be measured here is left out and named on standard error.
//!
//! `fork_exec` and `tool_call` run a program of three instructions, so that they tell the price of processes and of the
//! sandbox alone: in a virtual machine the start of a C library, which asks the processor about itself eighty times, can
//! cost more than everything else (`fork_exec_bin_true`, `tool_call_bin_true`).

mod docker;

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drillyard_sandbox::{Call, Pool, Sandbox, SandboxConfig, Setup};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// So many sandboxes are alive at once when the memory of an idle one is told.
const ALIVE: usize = 256;
/// Rounds of that, of which the median counts.
const ROUNDS: usize = 3;

/// What was measured, and the yardsticks by name.
struct Report {
    /// Appended to names: `_busy` while every core spins.
    suffix: &'static str,
    yardsticks: BTreeMap<&'static str, f64>,
}

struct Figure {
    median: f64,
    p99: f64,
    n: usize,
}

impl Figure {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort();
        let at = |q: f64| times.get(((times.len() - 1) as f64 * q).round() as usize);
        let ms = |time: Option<&Duration>| time.map_or(0.0, |t| t.as_secs_f64() * 1e3);
        Self {
            median: ms(at(0.5)),
            p99: ms(at(0.99)),
            n: times.len(),
        }
    }
}

impl Report {
    /// Notes a figure under a short name and prints it beside each of the given baselines that was measured.
    fn ms(&mut self, short: &'static str, times: Vec<Duration>, baselines: &[&str]) -> Outcome<()> {
        let figure = Figure::of(times);
        self.yardsticks.insert(short, figure.median);
        let mut compared = false;
        for baseline in baselines {
            if let Some(value) = self.yardsticks.get(baseline).filter(|v| **v > 0.0) {
                compared = true;
                self.line(short, &figure, Some((baseline, *value)))?;
            }
        }
        if !compared {
            self.line(short, &figure, None)?;
        }
        Ok(())
    }

    fn line(
        &self,
        short: &str,
        figure: &Figure,
        baseline: Option<(&str, f64)>,
    ) -> std::io::Result<()> {
        let beside = baseline.map_or_else(
            || String::from("\"baseline\":null,\"baseline_value\":null,\"ratio\":null"),
            |(name, value)| {
                format!(
                    "\"baseline\":\"{name}{}\",\"baseline_value\":{value:.3},\"ratio\":{:.3}",
                    self.suffix,
                    figure.median / value
                )
            },
        );
        writeln!(
            std::io::stdout(),
            "{{\"bench\":\"{short}_p50_ms{}\",\"value\":{:.3},\"unit\":\"ms\",\"p99\":{:.3},\"n\":{},{beside}}}",
            self.suffix,
            figure.median,
            figure.p99,
            figure.n
        )
    }
}

fn left_out(what: &str, why: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "left out: {what}: {why}");
}

/// Times of a command that must succeed, after one run that is not counted.
fn commands(n: usize, mut make: impl FnMut() -> Command) -> Outcome<Vec<Duration>> {
    let mut times = Vec::new();
    for i in 0..=n {
        let mut command = make();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let started = Instant::now();
        let status = command.status()?;
        if i > 0 {
            times.push(started.elapsed());
        }
        if !status.success() {
            return Err(format!("{command:?} ended with {status}").into());
        }
    }
    Ok(times)
}

fn bubblewrap() -> Command {
    let mut command = Command::new("bwrap");
    command.args([
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/usr",
        "/usr",
    ]);
    for name in ["bin", "lib", "lib64", "sbin"] {
        let path = format!("/{name}");
        if let Ok(target) = std::fs::read_link(&path) {
            command.arg("--symlink").arg(target).arg(&path);
        } else if Path::new(&path).is_dir() {
            command.args(["--ro-bind", &path, &path]);
        }
    }
    command.args([
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "--tmpfs",
        "/work",
        "--chdir",
        "/work",
        "--",
        "/usr/bin/true",
    ]);
    command
}

fn nsjail(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["-Mo", "-Q", "--user", "1000", "--group", "1000"]);
    for path in ["/usr", "/bin", "/lib", "/lib64"] {
        if Path::new(path).exists() {
            command.args(["-R", path]);
        }
    }
    command.args(["-T", "/tmp", "-T", "/work", "--", "/usr/bin/true"]);
    command
}

/// nsjail in PATH, or where DRILLYARD_NSJAIL says.
fn find_nsjail() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("DRILLYARD_NSJAIL") {
        return Some(named.into());
    }
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join("nsjail"))
        .find(|program| program.is_file())
}

fn exec(program: &str) -> Call {
    Call::Exec {
        argv: vec![program.into()],
        stdin: Vec::new(),
        timeout: None,
    }
}

/// The smallest program that succeeds: a static one that asks the kernel to end it.
fn tiny_true() -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const CODE: &[u8] = b"\xb8\x3c\0\0\0\x31\xff\x0f\x05"; // mov eax, SYS_exit; xor edi, edi; syscall
    let size = (64 + 56 + CODE.len()) as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    for word in [BASE + 120, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(b"\0\0\0\0\x40\0\x38\0\x01\0\x40\0\0\0\0\0\x01\0\0\0\x05\0\0\0");
    for word in [0, BASE, BASE, size, size, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(CODE);
    elf
}

async fn calls(sandbox: &mut Sandbox, call: &Call, n: usize) -> Outcome<Vec<Duration>> {
    let mut times = Vec::new();
    for i in 0..=n {
        let started = Instant::now();
        let result = sandbox.call(call.clone()).await?;
        if i > 0 {
            times.push(started.elapsed());
        }
        if result.exit_code != Some(0) {
            return Err(format!("{call:?} gave {result:?}").into());
        }
    }
    Ok(times)
}

/// The other ways to run a program apart.
fn yardsticks(report: &mut Report, n: usize, engine: Option<&docker::Engine>) -> Outcome<()> {
    let dir = tempfile::tempdir()?;
    let tiny = dir.path().join("true");
    std::fs::write(&tiny, tiny_true())?;
    std::fs::set_permissions(&tiny, PermissionsExt::from_mode(0o755))?;
    let bare = commands(n, || Command::new(&tiny))?;
    report.ms("fork_exec", bare, &[])?;
    let bare = commands(n, || Command::new("/bin/true"))?;
    report.ms("fork_exec_bin_true", bare, &["fork_exec"])?;
    match commands(n / 2, bubblewrap) {
        Ok(times) => report.ms("bubblewrap", times, &["fork_exec_bin_true"])?,
        Err(error) => left_out("bubblewrap", error),
    }
    match find_nsjail() {
        None => left_out(
            "nsjail",
            "no such program in PATH (DRILLYARD_NSJAIL can name one)",
        ),
        Some(program) => match commands(n / 2, || nsjail(&program)) {
            Ok(times) => report.ms("nsjail", times, &["fork_exec_bin_true"])?,
            Err(error) => left_out("nsjail", error),
        },
    }
    if let Some(engine) = engine {
        match engine.exec(n / 4) {
            Ok(times) => report.ms("docker_exec", times, &["fork_exec_bin_true"])?,
            Err(error) => left_out("docker exec", error),
        }
        match engine.cycle(n.div_ceil(10)) {
            Ok(times) => report.ms("docker_cycle", times, &["fork_exec_bin_true"])?,
            Err(error) => left_out("docker cycle", error),
        }
    }
    Ok(())
}

async fn sandboxes(report: &mut Report, config: &SandboxConfig, n: usize) -> Outcome<()> {
    let others = ["fork_exec", "bubblewrap", "nsjail", "docker_cycle"];
    // Without a pool every lease makes a sandbox.
    let cold = Pool::start(SandboxConfig {
        pool_size: 0,
        ..config.clone()
    })
    .await?;
    let (mut create, mut close) = (Vec::new(), Vec::new());
    for _ in 0..n {
        let started = Instant::now();
        let sandbox = cold.lease(&Setup::default()).await?;
        create.push(started.elapsed());
        let started = Instant::now();
        sandbox.close().await;
        close.push(started.elapsed());
    }
    report.ms("sandbox_create", create, &others)?;
    report.ms("sandbox_close", close, &["sandbox_create"])?;
    drop(cold);

    let pool = Pool::start(config.clone()).await?;
    let full = |pool: &Pool| {
        let pool = pool.clone();
        async move {
            while pool.ready() < config.pool_size {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    };
    let setup = Setup::new([("in.csv", b"a,b\n1,2\n".to_vec()), ("true", tiny_true())]);
    let mut lease = Vec::new();
    for _ in 0..n {
        full(&pool).await;
        let started = Instant::now();
        let sandbox = pool.lease(&setup).await?;
        lease.push(started.elapsed());
        sandbox.close().await;
    }
    report.ms("sandbox_lease", lease, &["sandbox_create", "docker_cycle"])?;

    full(&pool).await;
    let mut sandbox = pool.lease(&setup).await?;
    full(&pool).await;
    sandbox.call(Call::shell("chmod +x true")).await?;
    let times = calls(&mut sandbox, &exec("./true"), n).await?;
    report.ms("tool_call", times, &["fork_exec", "docker_exec"])?;
    let times = calls(&mut sandbox, &exec("/bin/true"), n).await?;
    let beside = ["fork_exec_bin_true", "docker_exec"];
    report.ms("tool_call_bin_true", times, &beside)?;
    let times = calls(&mut sandbox, &Call::shell(":"), n).await?;
    report.ms("tool_call_shell", times, &beside)?;
    let read = Call::ReadFile {
        path: "in.csv".into(),
        max_bytes: 1000,
    };
    let times = calls(&mut sandbox, &read, n).await?;
    report.ms("tool_call_read_file", times, &["fork_exec"])?;

    let mut reset = Vec::new();
    for _ in 0..n / 2 {
        let many = Call::shell("for i in {1..100}; do echo $i > f$i; done");
        let changed = sandbox.call(many).await?.files_changed.len();
        if changed != 100 {
            return Err(format!("{changed} files changed, not 100").into());
        }
        full(&pool).await;
        let started = Instant::now();
        sandbox.reset().await?;
        reset.push(started.elapsed());
    }
    report.ms(
        "reset_100_files",
        reset,
        &["sandbox_create", "docker_cycle"],
    )?;
    sandbox.close().await;
    Ok(())
}

/// Calls through the `docker` backend, where there is one and an engine for it.
async fn docker_calls(
    report: &mut Report,
    engine: Option<&docker::Engine>,
    n: usize,
) -> Outcome<()> {
    let Some(engine) = engine else {
        return Ok(());
    };
    let config = engine.config();
    let pool = match Pool::start(config).await {
        Ok(pool) => pool,
        Err(error) => {
            left_out("docker_call", error);
            return Ok(());
        }
    };
    let setup = Setup::new([("true", tiny_true())]);
    let mut sandbox = pool.lease(&setup).await?;
    sandbox.call(Call::shell("chmod +x true")).await?;
    let times = calls(&mut sandbox, &exec("./true"), n).await?;
    report.ms("docker_call", times, &["docker_exec", "tool_call"])?;
    sandbox.close().await;
    Ok(())
}

/// Memory in KiB that files in memory, page tables, stacks and the kernel's own objects take on this host.
fn kernel_kib() -> Outcome<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kinds = [
        "Shmem:",
        "SUnreclaim:",
        "KernelStack:",
        "PageTables:",
        "Percpu:",
    ];
    text.lines()
        .filter(|line| kinds.iter().any(|kind| line.starts_with(kind)))
        .map(|line| {
            Ok(line
                .split_whitespace()
                .nth(1)
                .unwrap_or_default()
                .parse::<u64>()?)
        })
        .sum()
}

/// Processes of this program's sandboxes, and the memory in KiB that is theirs: shared pages count in part.
fn supervisors() -> Outcome<(usize, u64)> {
    let own = std::process::id();
    let parent = |pid: u32| -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("PPid:"))?;
        line.trim().parse().ok()
    };
    let (mut count, mut kib) = (0, 0);
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        // PID 1 of a sandbox is a child of the helper's second process.
        if parent(pid).and_then(parent).and_then(parent) != Some(own) {
            continue;
        }
        let memory = std::fs::read_to_string(entry.path().join("smaps_rollup")).unwrap_or_default();
        let share = memory.lines().find_map(|line| line.strip_prefix("Pss:"));
        count += 1;
        kib += share
            .and_then(|s| s.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0);
    }
    Ok((count, kib))
}

/// What each of many idle sandboxes takes: of its processes, and of the kernel for its mounts, namespaces and groups.
async fn idle(config: &SandboxConfig) -> Outcome<()> {
    let pool = Pool::start(SandboxConfig {
        pool_size: 0,
        ..config.clone()
    })
    .await?;
    let mut each = Vec::new();
    let mut processes = 0;
    for _ in 0..ROUNDS {
        let (kernel, (count, own)) = (kernel_kib()?, supervisors()?);
        let mut all = Vec::new();
        for _ in 0..ALIVE {
            all.push(pool.lease(&Setup::default()).await?);
        }
        let (kernel_now, (count_now, own_now)) = (kernel_kib()?, supervisors()?);
        // Other programs' share of the kernel's memory comes and goes meanwhile; a quiet host tells it best.
        each.push((kernel_now + own_now) as f64 - (kernel + own) as f64);
        processes = count_now.saturating_sub(count);
        for sandbox in &mut all {
            calls(sandbox, &exec("/bin/true"), 0).await?;
        }
        for sandbox in all {
            sandbox.close().await;
        }
    }
    each.sort_by(f64::total_cmp);
    let mib = |kib: f64| kib / 1024.0 / ALIVE as f64;
    writeln!(
        std::io::stdout(),
        "{{\"bench\":\"idle_sandbox_mib\",\"value\":{:.3},\"unit\":\"MiB\",\"p99\":{:.3},\"n\":{ALIVE},\"processes\":{processes},\
         \"baseline\":null,\"baseline_value\":null,\"ratio\":null}}",
        mib(each[ROUNDS / 2]),
        mib(each[ROUNDS - 1])
    )?;
    Ok(())
}

/// Keeps every core busy while it lives.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = (0..cores)
            .map(|_| {
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        Self { stop, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

async fn measure(n: usize, control_groups: bool) -> Outcome<()> {
    let config = SandboxConfig {
        control_groups,
        ..SandboxConfig::default()
    };
    let engine = match docker::Engine::start() {
        Ok(engine) => Some(engine),
        Err(error) => {
            left_out("docker", error);
            None
        }
    };
    for suffix in ["", "_busy"] {
        let load = (!suffix.is_empty()).then(Load::start);
        let mut report = Report {
            suffix,
            yardsticks: BTreeMap::new(),
        };
        let n = if load.is_some() { n.div_ceil(4) } else { n };
        yardsticks(&mut report, n, engine.as_ref())?;
        sandboxes(&mut report, &config, n).await?;
        docker_calls(&mut report, engine.as_ref(), n).await?;
        if load.is_none() {
            idle(&config).await?;
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let n = std::env::args().nth(1).map_or(Ok(200), |n| n.parse())?;
    let control_groups = std::env::args().nth(2).as_deref() != Some("without-groups");
    // As episodes do, on a thread that also waits for sockets: the main thread would be woken by another one.
    tokio::spawn(measure(n, control_groups)).await?
}
