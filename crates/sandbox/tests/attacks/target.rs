//! What is attacked, and the processes that attack it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::ATTACKS;
use crate::common::engine::engine;
use crate::common::{as_an_ordinary_user, is_root, open_dir_for_all};
use crate::probe::{Latency, Probe};
use crate::yard::{Attack, Outcome, Yard, thorough};

/// A kind of sandbox, made by someone.
pub struct Target {
    /// In the names of tests.
    pub name: &'static str,
    /// In the table.
    pub title: &'static str,
    /// The backend.
    pub backend: &'static str,
    /// Whether this program, as root, attacks it as an ordinary user.
    pub ordinary: bool,
}

/// Every target. One that cannot be had here is skipped, loudly.
pub const TARGETS: &[Target] = &[
    Target {
        name: "local_root",
        title: "local, as root",
        backend: "local",
        ordinary: false,
    },
    Target {
        name: "local_user",
        title: "local, as a user",
        backend: "local",
        ordinary: true,
    },
    Target {
        name: "docker",
        title: "docker",
        backend: "docker",
        ordinary: false,
    },
];

/// Makes this program a worker against the target it names.
pub const WORKER: &str = "DRILLYARD_ATTACK_WORKER";
/// A variable of the attacking process that no sandbox may see, and its value.
pub const SECRET: (&str, &str) = ("DRILLYARD_ATTACK_SECRET", "secret-of-the-attacks-host");
/// Names a directory with a set-uid root program, where root has planted one.
pub const PLANTED: &str = "DRILLYARD_ATTACK_PLANTED";
/// No attack takes longer, and no long variant ten times as long.
const PATIENCE: Duration = Duration::from_mins(1);

#[derive(Serialize, Deserialize)]
enum Said {
    Ready,
    Unable(String),
    Outcome(Outcome),
    Latency(Option<Latency>),
}

/// A process that attacks one target.
pub struct Worker {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    _place: Option<TempDir>,
    _planted: Option<TempDir>,
}

impl Worker {
    pub fn start(target: &Target) -> Result<Self, String> {
        let root = is_root();
        if target.name == "local_root" && !root {
            return Err("this is no root".into());
        }
        let mut place = None;
        let mut command = if target.ordinary && root {
            let (mut command, dir) = as_an_ordinary_user();
            for name in ["DRILLYARD_ATTACK_HEAVY", "DRILLYARD_ATTACK_TIMES"] {
                command.envs(std::env::var_os(name).map(|value| (name, value)));
            }
            place = Some(dir);
            command
        } else {
            Command::new(std::env::current_exe().unwrap())
        };
        if target.backend == "docker" {
            // None of DOCKER_HOST and none of one's own: there may be one behind a usual socket.
            command.envs(engine().map(|address| ("DOCKER_HOST", address)));
        }
        let planted = root.then(plant);
        if let Some(dir) = &planted {
            command.env(PLANTED, dir.path());
        }
        let mut child = command
            .env(WORKER, target.name)
            .env(SECRET.0, SECRET.1)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| e.to_string())?;
        let mut worker = Self {
            orders: child.stdin.take(),
            answers: BufReader::new(child.stdout.take().unwrap()),
            child,
            _place: place,
            _planted: planted,
        };
        match worker.answer() {
            Some(Said::Ready) => Ok(worker),
            Some(Said::Unable(reason))
                if target.backend == "docker"
                    && std::env::var_os("DRILLYARD_REQUIRE_DOCKER").is_none() =>
            {
                Err(reason)
            }
            Some(Said::Unable(reason)) => panic!("{}: {reason}", target.name),
            _ => panic!("{}: the worker has ended", target.name),
        }
    }

    pub fn attack(&mut self, attack: &Attack) -> Outcome {
        match self.ask(&attack.number.to_string()) {
            Some(Said::Outcome(outcome)) => outcome,
            _ => Outcome::Fails {
                why: "the attacking process has ended".into(),
            },
        }
    }

    /// Ends the worker; returns how the host responded while it attacked.
    pub fn end(&mut self) -> Option<Latency> {
        let latency = match self.ask("latency") {
            Some(Said::Latency(latency)) => latency,
            _ => None,
        };
        drop(self.orders.take());
        let _ = self.child.wait();
        latency
    }

    fn ask(&mut self, what: &str) -> Option<Said> {
        writeln!(self.orders.as_mut()?, "{what}").ok()?;
        self.answer()
    }

    fn answer(&mut self) -> Option<Said> {
        let mut line = String::new();
        self.answers.read_line(&mut line).ok()?;
        serde_json::from_str(&line).ok()
    }
}

/// A program in reach of sandboxes that the host would run as root: one that only says who runs it.
fn plant() -> TempDir {
    let dir = open_dir_for_all("/opt");
    let to = dir.path().join("id");
    std::fs::copy("/usr/bin/id", &to).unwrap();
    std::fs::set_permissions(&to, PermissionsExt::from_mode(0o6755)).unwrap();
    dir
}

/// Attacks as ordered on standard input; says what came out on standard output.
pub fn work(name: &str) -> ExitCode {
    let say = |said: &Said| {
        println!("{}", serde_json::to_string(said).unwrap());
    };
    let target = TARGETS.iter().find(|t| t.name == name).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let yard = match runtime.block_on(Yard::open(target)) {
        Ok(yard) => Arc::new(yard),
        Err(error) => {
            say(&Said::Unable(error.to_string()));
            return ExitCode::SUCCESS;
        }
    };
    say(&Said::Ready);
    let mut took = Vec::new();
    let patience = PATIENCE * if thorough() { 10 } else { 1 };
    for order in std::io::stdin().lines().map_while(Result::ok) {
        let Ok(number) = order.parse::<u32>() else {
            say(&Said::Latency(Latency::of(took.clone())));
            continue;
        };
        let attack = ATTACKS.iter().find(|a| a.number == number).unwrap();
        let probe = attack.heavy.then(Probe::start);
        let started = Instant::now();
        let outcome = runtime.block_on(async {
            let task = tokio::spawn((attack.run)(Arc::clone(&yard)));
            let stop = task.abort_handle();
            match tokio::time::timeout(patience, task).await {
                Ok(Ok(outcome)) => yard.judge(outcome),
                Ok(Err(error)) => Outcome::Fails {
                    why: panic_text(error),
                },
                Err(_) => {
                    stop.abort();
                    Outcome::Fails {
                        why: format!("not over after {} s", patience.as_secs()),
                    }
                }
            }
        });
        if std::env::var_os("DRILLYARD_ATTACK_TIMES").is_some() {
            let ms = started.elapsed().as_millis();
            eprintln!("{ms:6} ms  {}", attack.test_name(name));
        }
        took.extend(probe.map(Probe::stop).unwrap_or_default());
        say(&Said::Outcome(outcome));
    }
    drop(yard);
    ExitCode::SUCCESS
}

fn panic_text(error: tokio::task::JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
            .unwrap_or_else(|| "it panicked".into()),
        Err(error) => error.to_string(),
    }
}
