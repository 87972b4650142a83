//! The pool: sandboxes made ahead, each handed out once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use drillyard_sandbox_init::frame::put;
use drillyard_sandbox_init::init::{Entry, Kind, Reply, Request};

use crate::admission::Door;
use crate::docker::Docker;
use crate::local::Local;
use crate::sandbox::{Contents, exchange, receive};
use crate::{
    Admission, Backend, Cell, Gauge, HostGauge, ImageReport, Limits, LimitsReport, Policy, Sandbox,
    SandboxConfig, SandboxError, Snapshot,
};

/// How long a sandbox may take to set itself up or to write its first files.
const PATIENCE: Duration = Duration::from_secs(30);

/// Files a sandbox starts with. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Setup {
    /// Path (relative to `/work`, or absolute under `/tmp`) and content. Parent directories are made.
    pub files: Vec<(String, Arc<[u8]>)>,
}

impl Setup {
    /// From paths and contents.
    pub fn new<P: Into<String>, B: Into<Arc<[u8]>>>(
        files: impl IntoIterator<Item = (P, B)>,
    ) -> Self {
        Self {
            files: files
                .into_iter()
                .map(|(p, b)| (p.into(), b.into()))
                .collect(),
        }
    }

    fn entries(&self) -> (Vec<Entry>, Vec<u8>) {
        let mut body = Vec::with_capacity(self.files.iter().map(|(_, b)| b.len()).sum());
        let entries = self
            .files
            .iter()
            .map(|(path, bytes)| Entry {
                path: path.clone(),
                kind: Kind::File,
                mode: 0o644,
                mtime_ns: None,
                content: put(&mut body, bytes),
            })
            .collect();
        (entries, body)
    }
}

/// Sandboxes of one configuration. Cheap to clone; when the last clone and the last sandbox are dropped, everything ends.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    backend: Box<dyn Backend>,
    limits: Limits,
    ready: Mutex<VecDeque<Box<dyn Cell>>>,
    size: usize,
    filling: AtomicBool,
    door: Door,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("backend", &self.inner.backend.name())
            .field("ready", &self.inner.ready().len())
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Probes the host, starts the backend and makes the first sandboxes. Fails, with the remedy, where the host forbids
    /// isolation: nothing is ever run without it.
    pub async fn start(config: SandboxConfig) -> Result<Self, SandboxError> {
        let policy = Policy {
            oversubscription: config.oversubscription,
            ..Policy::default()
        };
        policy.check()?;
        let backend: Box<dyn Backend> = match config.backend.as_str() {
            "local" => Box::new(Local::start(&config).await?),
            "docker" => Box::new(Docker::start(&config).await?),
            other => {
                return Err(SandboxError::Config {
                    field: "backend",
                    message: format!("unknown backend '{other}'; there are: local, docker"),
                });
            }
        };
        Self::with_policy(
            backend,
            config.limits,
            config.pool_size,
            policy,
            Box::new(HostGauge::new()),
        )
        .await
    }

    /// A pool over a backend of one's own.
    pub async fn with_backend(
        backend: Box<dyn Backend>,
        limits: Limits,
        pool_size: usize,
    ) -> Result<Self, SandboxError> {
        let gauge = Box::new(HostGauge::new());
        Self::with_policy(backend, limits, pool_size, Policy::default(), gauge).await
    }

    /// A pool of `local` sandboxes that grants leases by a policy and readings of one's own.
    pub async fn start_with(
        config: SandboxConfig,
        policy: Policy,
        gauge: Box<dyn Gauge>,
    ) -> Result<Self, SandboxError> {
        policy.check()?;
        let backend = Box::new(Local::start(&config).await?);
        Self::with_policy(backend, config.limits, config.pool_size, policy, gauge).await
    }

    async fn with_policy(
        backend: Box<dyn Backend>,
        limits: Limits,
        pool_size: usize,
        policy: Policy,
        gauge: Box<dyn Gauge>,
    ) -> Result<Self, SandboxError> {
        let door = Door::new(policy, gauge, limits.memory_bytes);
        let pool = Self {
            inner: Arc::new(Inner {
                backend,
                limits,
                ready: Mutex::default(),
                size: pool_size,
                filling: AtomicBool::new(false),
                door,
            }),
        };
        // The first one shows that the host really lets sandboxes be made.
        let first = pool.inner.make().await?;
        if pool_size > 0 {
            pool.inner.ready().push_back(first);
            pool.refill();
        } else {
            first.destroy().await;
        }
        Ok(pool)
    }

    /// Which limits hold on this host, and how.
    pub fn limits(&self) -> &LimitsReport {
        self.inner.backend.limits()
    }

    /// The limits as configured.
    pub fn configured(&self) -> &Limits {
        &self.inner.limits
    }

    /// The root file system of the sandboxes.
    pub fn image(&self) -> &ImageReport {
        self.inner.backend.image()
    }

    /// How many sandboxes are leased now.
    pub fn live(&self) -> usize {
        self.inner.door.live()
    }

    /// How many leases wait for room.
    pub fn waiting(&self) -> usize {
        self.inner.door.waiting()
    }

    /// How leases stand: also what a sandbox is expected to use, and why leases wait.
    pub fn admission(&self) -> Admission {
        self.inner.door.standing()
    }

    /// How many sandboxes are ready to be leased.
    pub fn ready(&self) -> usize {
        self.inner.ready().len()
    }

    /// Hands out a fresh sandbox with these files in it; waits, in order, while there is no room for another one.
    pub async fn lease(&self, setup: &Setup) -> Result<Sandbox, SandboxError> {
        self.lease_contents(Contents::Setup(setup.clone())).await
    }

    /// Hands out a fresh sandbox in a snapshot's state: a branch.
    pub async fn branch(&self, from: &Snapshot) -> Result<Sandbox, SandboxError> {
        self.lease_contents(Contents::Snapshot(from.clone())).await
    }

    async fn lease_contents(&self, contents: Contents) -> Result<Sandbox, SandboxError> {
        let ticket = self.inner.door.enter(&*self.inner.backend).await;
        let cell = self.fresh(&contents).await?;
        ticket.keep();
        Ok(Sandbox::new(self.clone(), cell, contents))
    }

    /// The error of a sandbox that was lost together with what made it.
    pub(crate) fn backend_gone(&self, cause: String) -> SandboxError {
        self.inner.backend.gone(cause)
    }

    pub(crate) fn returned(&self) {
        self.inner.door.release();
    }

    /// Learns what a sandbox used at its peak.
    pub(crate) fn note_use(&self, bytes: u64) {
        self.inner.door.note(bytes);
    }

    /// A sandbox nobody has used, with the given contents.
    pub(crate) async fn fresh(&self, contents: &Contents) -> Result<Box<dyn Cell>, SandboxError> {
        let (entries, body) = match contents {
            Contents::Setup(setup) => setup.entries(),
            Contents::Snapshot(snapshot) => (snapshot.entries.to_vec(), snapshot.body.to_vec()),
        };
        let request = Request::Unpack {
            entries,
            remove: Vec::new(),
        };
        loop {
            let taken = self.inner.ready().pop_front();
            let kept_ready = taken.is_some();
            self.refill();
            let mut cell = match taken {
                Some(cell) => cell,
                None => self.inner.make().await?,
            };
            match exchange(&mut *cell, &request, &body, 0, PATIENCE).await {
                Ok((Reply::Done, _)) => return Ok(cell),
                Ok((Reply::Refused { message }, _)) => {
                    return Err(SandboxError::Refused { message });
                }
                // One that died while it waited in the pool is nobody's fault; the next one serves.
                Err(SandboxError::Lost { .. }) if kept_ready => {}
                Ok(_) => {
                    return Err(SandboxError::Protocol(std::io::Error::other(
                        "not an answer to unpacking",
                    )));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes sandboxes in the background until enough are ready.
    fn refill(&self) {
        let inner = &self.inner;
        if inner.ready().len() >= inner.size || inner.filling.swap(true, Ordering::AcqRel) {
            return;
        }
        // The task must not keep the pool alive: what nobody holds any more need not be filled.
        let weak = Arc::downgrade(inner);
        tokio::spawn(async move {
            while let Some(inner) = weak.upgrade() {
                if inner.ready().len() >= inner.size {
                    inner.filling.store(false, Ordering::Release);
                    // Someone may have taken one between the look and the store; they saw `filling` and left it to us.
                    if inner.ready().len() >= inner.size
                        || inner.filling.swap(true, Ordering::AcqRel)
                    {
                        return;
                    }
                }
                match inner.make().await {
                    Ok(cell) => inner.ready().push_back(cell),
                    Err(error) => {
                        tracing::warn!(%error, "a sandbox could not be made ahead");
                        inner.filling.store(false, Ordering::Release);
                        return;
                    }
                }
            }
        });
    }
}

impl Inner {
    fn ready(&self) -> MutexGuard<'_, VecDeque<Box<dyn Cell>>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one and waits until it is set up.
    async fn make(&self) -> Result<Box<dyn Cell>, SandboxError> {
        let mut cell = self.backend.create().await?;
        match tokio::time::timeout(PATIENCE, receive(&mut *cell, 0)).await {
            Ok(Ok((Reply::Ready, _))) => Ok(cell),
            Ok(Ok((Reply::Broken { step, message }, _))) => {
                Err(SandboxError::Create { step, message })
            }
            Ok(Ok(_)) => Err(SandboxError::Protocol(std::io::Error::other("no greeting"))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(SandboxError::Stuck {
                seconds: PATIENCE.as_secs(),
            }),
        }
    }
}
