//! A container engine for tests: that of DOCKER_HOST, else one started here when this is root and `dockerd` is installed.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::is_root;

/// An engine of one's own. It ends, with what it started, when this does, however this ends.
pub struct OwnEngine {
    dir: PathBuf,
    keeper: Child,
}

/// Ends the engine when its input closes; what belongs to it is found by the files it wrote.
const KEEPER: &str = r#"
dir=$1; shift
"$@" > "$dir/log" 2>&1 < /dev/null &
engine=$!
cat > /dev/null
containerd=$(cat "$dir/exec/containerd/containerd.pid" 2>/dev/null)
kill "$engine" 2>/dev/null
wait "$engine"
[ -n "$containerd" ] && kill -9 "$containerd" 2>/dev/null
for p in $(grep -lx containerd-shim /proc/[0-9]*/comm 2>/dev/null); do
  p=${p%/comm}
  tr '\0' ' ' 2>/dev/null < "$p/cmdline" | grep -q "$dir/exec" && kill -9 "${p#/proc/}"
done
grep " $dir/" /proc/self/mountinfo | cut -d' ' -f5 | sort -r | while read -r m; do umount -l "$m"; done
rm -rf "$dir"
"#;

impl OwnEngine {
    /// Starts one; nothing where that cannot be done.
    pub fn start(more: &[&str], before: &str) -> Option<Self> {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let dockerd = [
            "/usr/sbin/dockerd",
            "/usr/bin/dockerd",
            "/usr/local/bin/dockerd",
        ]
        .into_iter()
        .find(|p| Path::new(p).exists())?;
        if !is_root() {
            return None;
        }
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("drillyard-engine-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let at = |name: &str| dir.join(name).display().to_string();
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &format!("{before}\n{KEEPER}"), "keeper"]);
        command.arg(&dir).arg(dockerd);
        command.args(["--data-root", &at("data"), "--exec-root", &at("exec")]);
        command.args([
            "-H",
            &format!("unix://{}", at("d.sock")),
            "-p",
            &at("d.pid"),
        ]);
        command.args(["--bridge=none", "--iptables=false"]);
        let keeper = command
            .args(more)
            .env_remove("DOCKER_HOST")
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let engine = Self { dir, keeper };
        let until = Instant::now() + Duration::from_mins(2);
        while !engine.answers() {
            let log = std::fs::read_to_string(engine.dir.join("log")).unwrap_or_default();
            assert!(Instant::now() < until, "the engine does not start:\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(engine)
    }

    pub fn address(&self) -> String {
        format!("unix://{}", self.dir.join("d.sock").display())
    }

    fn answers(&self) -> bool {
        let ask = || -> std::io::Result<String> {
            let mut socket = UnixStream::connect(self.dir.join("d.sock"))?;
            socket.write_all(b"GET /_ping HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            socket.read_to_string(&mut answer)?;
            Ok(answer)
        };
        ask().is_ok_and(|answer| answer.contains("200 OK"))
    }

    /// Kills the engine, and only it, as a crash would.
    pub fn crash(&self) {
        let pid = std::fs::read_to_string(self.dir.join("d.pid")).unwrap();
        let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
}

impl Drop for OwnEngine {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// Said past the test harness, which would keep it to itself.
pub fn skipped(why: &str) {
    let _ = writeln!(
        std::io::stderr(),
        "\n*** SKIPPED (docker backend): {why} ***"
    );
}

/// The engine's address.
pub fn engine() -> Option<&'static str> {
    static ENGINE: OnceLock<Option<(String, Option<OwnEngine>)>> = OnceLock::new();
    let engine = ENGINE.get_or_init(|| match std::env::var("DOCKER_HOST") {
        Ok(address) if !address.is_empty() => Some((address, None)),
        _ => OwnEngine::start(&[], "").map(|own| (own.address(), Some(own))),
    });
    if engine.is_none() {
        skipped("no DOCKER_HOST, and no root with dockerd to start an engine");
    }
    engine.as_ref().map(|(address, _)| address.as_str())
}
