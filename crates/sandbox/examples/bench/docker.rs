//! A Docker engine of the benchmark's own, spoken to over its socket: the price of what sandboxes replace.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use drillyard_sandbox::SandboxConfig;

use crate::Outcome;

const IMAGE: &str = "drillyard-bench";

/// A running engine in a temporary directory; dropping it ends it.
pub struct Engine {
    daemon: Child,
    dir: tempfile::TempDir,
}

impl Engine {
    /// Starts `dockerd` by hand and makes an image of busybox.
    pub fn start() -> Outcome<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err("an engine of one's own needs root".into());
        }
        let busybox = ["/usr/bin/busybox", "/bin/busybox"]
            .into_iter()
            .find(|p| Path::new(p).is_file())
            .ok_or("no static busybox to make an image of (Debian: busybox-static)")?;
        let dir = tempfile::tempdir()?;
        let at = |name: &str| dir.path().join(name);
        let daemon = Command::new("dockerd")
            .arg("--data-root")
            .arg(at("data"))
            .arg("--exec-root")
            .arg(at("exec"))
            .arg("-p")
            .arg(at("pid"))
            .arg("-H")
            .arg(address(dir.path()))
            .args(["--bridge=none", "--iptables=false"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("dockerd: {e}"))?;
        let engine = Self { daemon, dir };
        let until = Instant::now() + Duration::from_mins(1);
        while engine.ask("GET", "/_ping", "", &[]).is_err() {
            if Instant::now() > until {
                return Err("dockerd did not answer within a minute".into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let root = engine.dir.path().join("image");
        for dir in ["bin", "proc", "sys", "dev", "etc", "tmp", "work"] {
            std::fs::create_dir_all(root.join(dir))?;
        }
        std::fs::copy(busybox, root.join("bin/busybox"))?;
        for name in ["true", "sh", "sleep"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name))?;
        }
        let tar = Command::new("tar")
            .arg("-C")
            .arg(&root)
            .args(["-c", "."])
            .output()?;
        engine.ask(
            "POST",
            &format!("/images/create?fromSrc=-&repo={IMAGE}&tag=latest"),
            "application/x-tar",
            &tar.stdout,
        )?;
        Ok(engine)
    }

    /// A configuration of the `docker` backend on this engine.
    pub fn config(&self) -> SandboxConfig {
        SandboxConfig {
            backend: "docker".to_owned(),
            engine: Some(address(self.dir.path())),
            pool_size: 1,
            ..SandboxConfig::default()
        }
    }

    /// Times of running `true` in a started container, as `docker exec` does.
    pub fn exec(&self, n: usize) -> Outcome<Vec<Duration>> {
        let container = self.create()?;
        self.json("POST", &format!("/containers/{container}/start"), "")?;
        let mut times = Vec::new();
        for i in 0..=n {
            let started = Instant::now();
            self.run_true(&container)?;
            if i > 0 {
                times.push(started.elapsed());
            }
        }
        self.remove(&container)?;
        Ok(times)
    }

    /// Times of a container's whole life: create, start, exec, remove.
    pub fn cycle(&self, n: usize) -> Outcome<Vec<Duration>> {
        let mut times = Vec::new();
        for i in 0..=n {
            let started = Instant::now();
            let container = self.create()?;
            self.json("POST", &format!("/containers/{container}/start"), "")?;
            self.run_true(&container)?;
            self.remove(&container)?;
            if i > 0 {
                times.push(started.elapsed());
            }
        }
        Ok(times)
    }

    fn create(&self) -> Outcome<String> {
        let body = format!(
            "{{\"Image\":\"{IMAGE}\",\"Cmd\":[\"sleep\",\"100000\"],\"HostConfig\":{{\"NetworkMode\":\"none\",\"Memory\":268435456,\
             \"NanoCpus\":1000000000,\"PidsLimit\":128,\"ReadonlyRootfs\":true,\"CapDrop\":[\"ALL\"],\
             \"SecurityOpt\":[\"no-new-privileges\"],\"Tmpfs\":{{\"/tmp\":\"\",\"/work\":\"\"}}}}}}"
        );
        id(&self.json("POST", "/containers/create", &body)?)
    }

    fn run_true(&self, container: &str) -> Outcome<()> {
        let exec = self.json(
            "POST",
            &format!("/containers/{container}/exec"),
            "{\"Cmd\":[\"true\"],\"AttachStdout\":true,\"AttachStderr\":true}",
        )?;
        self.json("POST", &format!("/exec/{}/start", id(&exec)?), "{}")?;
        Ok(())
    }

    fn remove(&self, container: &str) -> Outcome<()> {
        self.json("DELETE", &format!("/containers/{container}?force=1"), "")?;
        Ok(())
    }

    fn json(&self, method: &str, path: &str, body: &str) -> Outcome<String> {
        self.ask(method, path, "application/json", body.as_bytes())
    }

    /// One request of HTTP/1.0, after which the engine closes the connection: the answer's text.
    fn ask(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> Outcome<String> {
        let socket: PathBuf = self.dir.path().join("socket");
        let mut stream = UnixStream::connect(socket)?;
        let mut request = format!(
            "{method} {path} HTTP/1.0\r\nHost: docker\r\nContent-Length: {}\r\n",
            body.len()
        );
        if !kind.is_empty() {
            request.push_str("Content-Type: ");
            request.push_str(kind);
            request.push_str("\r\n");
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes())?;
        stream.write_all(body)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).unwrap_or_default();
        if !status.starts_with('2') {
            return Err(format!("{method} {path}: {answer}").into());
        }
        Ok(answer)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let Ok(pid) = i32::try_from(self.daemon.id()) else {
            return;
        };
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.daemon.wait();
    }
}

/// Where an engine in this directory listens.
fn address(dir: &Path) -> String {
    format!("unix://{}", dir.join("socket").display())
}

/// The value of the answer's field `Id`.
fn id(answer: &str) -> Outcome<String> {
    let (_, rest) = answer
        .split_once("\"Id\":\"")
        .ok_or_else(|| format!("no Id in {answer}"))?;
    Ok(rest.split('"').next().unwrap_or_default().to_owned())
}
