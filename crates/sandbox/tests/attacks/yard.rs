//! What an attack has at hand.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drillyard_sandbox::{
    CallOutcome, CallResult, Holds, LimitRow, Pool, Sandbox, SandboxConfig, SandboxError, Setup,
};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::common::{self, exec, fresh, said_well, small, text, unique};
use crate::target::Target;

/// How an attack on a target came out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Outcome {
    /// Nothing got out, nothing broke.
    Holds,
    /// A limit cannot be enforced on this host, and the report says so.
    Said { limit: String, how: String },
    /// The sandbox failed.
    Fails { why: String },
}

type Running = Pin<Box<dyn Future<Output = Outcome> + Send>>;

pub struct Attack {
    pub number: u32,
    pub name: &'static str,
    /// It uses resources up: the host's responsiveness is measured meanwhile.
    pub heavy: bool,
    pub run: fn(Arc<Yard>) -> Running,
}

impl Attack {
    pub fn test_name(&self, target: &str) -> String {
        format!("{target}::{:02} {}", self.number, self.name)
    }
}

/// An entry of the table.
macro_rules! attack {
    ($number:literal, $name:literal, heavy $run:path) => {
        attack!(@ $number, $name, true, $run)
    };
    ($number:literal, $name:literal, $run:path) => {
        attack!(@ $number, $name, false, $run)
    };
    (@ $number:literal, $name:literal, $heavy:literal, $run:path) => {
        $crate::yard::Attack {
            number: $number,
            name: $name,
            heavy: $heavy,
            run: |yard| Box::pin($run(yard)),
        }
    };
}
pub(crate) use attack;

/// A target's pool, and the host around it.
pub struct Yard {
    pub target: &'static Target,
    pool: Pool,
    controls: Mutex<Vec<&'static str>>,
}

impl Yard {
    pub async fn open(target: &'static Target) -> Result<Self, SandboxError> {
        let pool = Pool::start(config(target)).await?;
        if target.backend == "local" {
            let mode = if target.ordinary { "user" } else { "root" };
            assert_eq!(pool.limits().mode, mode);
        }
        // Most attacks are written in it.
        let mut sandbox = pool.lease(&Setup::default()).await?;
        let python = exec(&mut sandbox, &["python3", "-c", "import ctypes"], b"").await;
        sandbox.close().await;
        if python.outcome != CallOutcome::Ok {
            return Err(SandboxError::Refused {
                message: format!("its image has no Python: {}", text(&python.stderr)),
            });
        }
        Ok(Self {
            target,
            pool,
            controls: Mutex::default(),
        })
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn config(&self) -> SandboxConfig {
        config(self.target)
    }

    pub async fn pool_with(&self, change: impl FnOnce(&mut SandboxConfig)) -> Pool {
        let mut config = self.config();
        change(&mut config);
        Pool::start(config).await.unwrap()
    }

    pub async fn sandbox(&self) -> Sandbox {
        fresh(&self.pool).await
    }

    /// Whether sandboxes are made of this host's namespaces.
    pub fn is_local(&self) -> bool {
        self.target.backend == "local"
    }

    /// Says that the attack was shown to run.
    pub fn control(&self, how: &'static str) {
        self.controls.lock().unwrap().push(how);
    }

    pub fn row(&self, limit: &str) -> &LimitRow {
        self.pool.limits().row(limit).unwrap()
    }

    pub fn enforced(&self, limit: &str) -> bool {
        self.row(limit).holds == Holds::Yes
    }

    /// The outcome where a limit does not hold in whole: the report must say it.
    pub fn said(&self, limit: &str) -> Outcome {
        let row = self.row(limit);
        assert_ne!(row.holds, Holds::Yes, "{row:?}");
        assert!(!row.how.is_empty(), "{row:?}");
        Outcome::Said {
            limit: limit.into(),
            how: row.how.clone(),
        }
    }

    /// An attack that was not shown to run has shown nothing.
    pub fn judge(&self, outcome: Outcome) -> Outcome {
        let controls = std::mem::take(&mut *self.controls.lock().unwrap());
        if controls.is_empty() && !matches!(outcome, Outcome::Fails { .. }) {
            return Outcome::Fails {
                why: "no control has shown that the attack ran".into(),
            };
        }
        outcome
    }
}

pub fn config(target: &Target) -> SandboxConfig {
    SandboxConfig {
        backend: target.backend.into(),
        ..small()
    }
}

/// Whether the long variants are asked for.
pub fn thorough() -> bool {
    std::env::var_os("DRILLYARD_ATTACK_HEAVY").is_some()
}

pub async fn shell_for(sandbox: &mut Sandbox, ms: u64, command: &str) -> CallResult {
    common::shell_for(sandbox, Duration::from_millis(ms), command).await
}

/// `call(number, ...)` makes a system call and gives its result or the error's negative number; `name(result)` is the
/// error's name or `ok`; `tried(function)` the same for a function of Python's.
const PRELUDE: &str = r"
import ctypes, errno, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    r = libc.syscall(ctypes.c_long(number), *arguments)
    return -ctypes.get_errno() if r < 0 else r
def name(r):
    return errno.errorcode.get(-r, str(-r)) if r < 0 else 'ok'
def tried(function):
    try:
        function()
        return 'ok'
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))
";

fn program(code: &str) -> String {
    format!("{PRELUDE}\n{code}")
}

/// Runs Python inside, however it ends.
pub async fn python_result(sandbox: &mut Sandbox, code: &str) -> CallResult {
    exec(sandbox, &["python3", "-I", "-S", "-c", &program(code)], b"").await
}

/// Standard output of Python inside that must succeed.
pub async fn python(sandbox: &mut Sandbox, code: &str) -> String {
    said_well(&python_result(sandbox, code).await, code)
}

/// Standard output of the same Python on the host.
pub fn python_outside(code: &str) -> String {
    let done = Command::new("/usr/bin/python3")
        .args(["-I", "-S", "-c", &program(code)])
        .output()
        .unwrap();
    assert!(done.status.success(), "{code}: {}", text(&done.stderr));
    text(&done.stdout).trim_end().to_owned()
}

/// A file of the host with words that must never come out of a sandbox.
pub struct Canary {
    dir: TempDir,
    pub words: String,
}

impl Canary {
    pub fn plant() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let words = format!("canary-{}", unique());
        std::fs::write(dir.path().join(&words), &words).unwrap();
        Self { dir, words }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join(&self.words)
    }
}
