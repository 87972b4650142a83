//! The pool: sandboxes made ahead, each handed out once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use drillyard_sandbox_init::control::Lower;
use drillyard_sandbox_init::frame::put;
use drillyard_sandbox_init::init::{CONTENT_BYTES, Entry, Kind, Reply, Request, What};

use crate::admission::Door;
use crate::docker::Docker;
use crate::host;
use crate::layers::{Layer, Layers, Origin};
use crate::local::Local;
use crate::sandbox::{Contents, Delta, exchange, receive, unexpected};
use crate::{
    Admission, Backend, Call, CallOutcome, CallResult, Cell, Gauge, HostGauge, Image, ImageReport,
    Limits, LimitsReport, Policy, Sandbox, SandboxConfig, SandboxError, Snapshot,
};

/// How long a sandbox may take to set itself up or to write its first files.
const PATIENCE: Duration = Duration::from_secs(30);

/// Files a sandbox starts with. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Setup {
    /// Path (relative to `/work`, or absolute under `/tmp`) and content. Parent directories are made.
    pub files: Vec<(String, Arc<[u8]>)>,
    /// Command lines run one after another once the files are there, each of which must succeed: make a database, unpack
    /// an archive. Where the pool has a cache they run once, and their outcome is a layer that every lease starts from.
    pub commands: Vec<String>,
}

/// Set-ups of so many bytes or files, or more, become layers where the pool has a cache. Measured (`--example layers`, two
/// cores, without waits for a scheduler's tick): a lease from the pool costs 0.25 ms, and 2.3 ms with 100 files, 1.9 ms
/// with one of 1 MiB, 33 ms with 16 MiB unpacked into it; a sandbox made on a layer costs 2.3 ms whatever is in it.
const LAYER_BYTES: usize = 3 << 19;
const LAYER_FILES: usize = 100;

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
            commands: Vec::new(),
        }
    }

    /// With commands to run once the files are there.
    #[must_use]
    pub fn then<C: Into<String>>(mut self, commands: impl IntoIterator<Item = C>) -> Self {
        self.commands.extend(commands.into_iter().map(Into::into));
        self
    }

    fn is_large(&self) -> bool {
        self.files.len() >= LAYER_FILES
            || self.files.iter().map(|(_, b)| b.len()).sum::<usize>() >= LAYER_BYTES
    }

    /// Whether two are copies of one another; never looks at contents.
    fn is(&self, other: &Self) -> bool {
        self.files.len() == other.files.len()
            && self.commands == other.commands
            && self
                .files
                .iter()
                .zip(&other.files)
                .all(|((p, a), (q, b))| Arc::ptr_eq(a, b) && p == q)
    }

    /// What identifies its layer in an image.
    fn key(&self, image: &str) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(b"setup 1");
        part(image.as_bytes());
        for (path, content) in &self.files {
            part(path.as_bytes());
            part(content);
        }
        part(b"");
        for command in &self.commands {
            part(command.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
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

/// What a set-up's lease goes on from.
enum Begun {
    Layer(Arc<Layer>),
    /// One in which it was carried out already.
    Sandbox(Sandbox),
    Nothing,
}

pub(crate) struct Inner {
    backend: Box<dyn Backend>,
    limits: Limits,
    ready: Mutex<VecDeque<Box<dyn Cell>>>,
    size: usize,
    filling: AtomicBool,
    door: Door,
    layers: Option<Layers>,
    /// Whether sandboxes start on layers here, once that was tried.
    layered: OnceLock<bool>,
    /// Keys of set-ups that no layer can hold here.
    unheld: Mutex<BTreeSet<String>>,
    /// One set-up's layer is built at a time.
    building: tokio::sync::Mutex<()>,
    tools: tokio::sync::OnceCell<BTreeMap<String, String>>,
    /// Keys of the large set-ups leased last: hashing one would cost more than the lease.
    keys: Mutex<VecDeque<(Setup, String)>>,
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
        Self::assemble(backend, &config, policy, Box::new(HostGauge::new())).await
    }

    /// A pool over a backend of one's own.
    pub async fn with_backend(
        backend: Box<dyn Backend>,
        limits: Limits,
        pool_size: usize,
    ) -> Result<Self, SandboxError> {
        let config = SandboxConfig {
            limits,
            pool_size,
            ..SandboxConfig::default()
        };
        let gauge = Box::new(HostGauge::new());
        Self::assemble(backend, &config, Policy::default(), gauge).await
    }

    /// A pool of `local` sandboxes that grants leases by a policy and readings of one's own.
    pub async fn start_with(
        config: SandboxConfig,
        policy: Policy,
        gauge: Box<dyn Gauge>,
    ) -> Result<Self, SandboxError> {
        policy.check()?;
        let backend = Box::new(Local::start(&config).await?);
        Self::assemble(backend, &config, policy, gauge).await
    }

    async fn assemble(
        backend: Box<dyn Backend>,
        config: &SandboxConfig,
        policy: Policy,
        gauge: Box<dyn Gauge>,
    ) -> Result<Self, SandboxError> {
        // Without them every set-up is written anew at each lease.
        let layers = config
            .cache_dir
            .as_deref()
            .filter(|_| backend.has_layers())
            .map(|dir| {
                let image = &backend.image().digest;
                let image = match config.image {
                    Image::Host => host::state(image, &config.host_paths),
                    Image::RootFs { .. } => image.clone(),
                };
                let own_root = config.image != Image::Host;
                Layers::open(dir, &image, own_root, config.cache_bytes)
            })
            .transpose()?;
        let (limits, pool_size) = (config.limits.clone(), config.pool_size);
        let door = Door::new(policy, gauge, limits.memory_bytes);
        let pool = Self {
            inner: Arc::new(Inner {
                backend,
                limits,
                ready: Mutex::default(),
                size: pool_size,
                filling: AtomicBool::new(false),
                door,
                layers,
                layered: OnceLock::new(),
                unheld: Mutex::default(),
                building: tokio::sync::Mutex::default(),
                tools: tokio::sync::OnceCell::new(),
                keys: Mutex::default(),
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
        let layered = &self.inner.layered;
        if let Some(layers) = &self.inner.layers
            && (!setup.commands.is_empty() || setup.is_large())
            && layered.get() != Some(&false)
        {
            match self.begun(setup, layers).await? {
                Begun::Nothing => {}
                Begun::Sandbox(sandbox) => return Ok(sandbox),
                Begun::Layer(layer) => match self.lease_contents(Contents::Layer(layer)).await {
                    // An older kernel, or a disk whose files can't be shown under another owner: slower, and otherwise the
                    // same.
                    Err(SandboxError::Create { step, message }) if layered.get().is_none() => {
                        if layered.set(false).is_ok() {
                            let dir = layers.dir();
                            tracing::warn!(step, message, %dir, "no sandbox starts on a layer here; set-ups are written anew each time");
                        }
                    }
                    answer => {
                        if answer.is_ok() {
                            let _ = layered.set(true);
                        }
                        return answer;
                    }
                },
            }
        }
        self.lease_contents(Contents::Setup(setup.clone())).await
    }

    /// The layer of a set-up, made unless it is there; or what there is where none can be made. Whatever is wrong with the
    /// cache is no reason for a lease to fail that would do without.
    async fn begun(&self, setup: &Setup, layers: &Layers) -> Result<Begun, SandboxError> {
        let key = self.key_of(setup);
        let unheld = || {
            let keys = &self.inner.unheld;
            keys.lock().unwrap_or_else(PoisonError::into_inner)
        };
        let none = |why: &dyn std::fmt::Display| {
            if unheld().insert(key.clone()) {
                let dir = layers.dir();
                tracing::warn!(%why, %dir, "a set-up cannot become a layer; it is written anew each time");
            }
        };
        let there = || match layers.get(&key) {
            Ok(layer) => layer.map(Begun::Layer),
            Err(error) => {
                none(&error);
                Some(Begun::Nothing)
            }
        };
        if unheld().contains(&key) {
            return Ok(Begun::Nothing);
        }
        if let Some(begun) = there() {
            return Ok(begun);
        }
        let _building = self.inner.building.lock().await;
        if unheld().contains(&key) {
            return Ok(Begun::Nothing);
        }
        if let Some(begun) = there() {
            return Ok(begun);
        }
        let (sandbox, delta) = if setup.commands.is_empty() {
            let (entries, body) = setup.entries();
            let delta = Delta {
                entries,
                removed: Vec::new(),
                left_out: 0,
                body,
            };
            (None, delta)
        } else {
            let contents = Contents::Setup(setup.clone());
            let mut sandbox = self.lease_contents(contents).await?;
            let delta = match sandbox.delta().await {
                Ok(delta) if delta.left_out == 0 => delta,
                Ok(_) => {
                    none(&"it makes pipes or sockets, which no layer holds");
                    return Ok(Begun::Sandbox(sandbox));
                }
                Err(error) => {
                    none(&error);
                    return Ok(if sandbox.is_lost() {
                        Begun::Nothing
                    } else {
                        Begun::Sandbox(sandbox)
                    });
                }
            };
            (Some(sandbox), delta)
        };
        match layers
            .write(key.clone(), Origin::Setup, Vec::new(), delta)
            .await
        {
            Ok(layer) => {
                if let Some(sandbox) = sandbox {
                    sandbox.close().await;
                }
                Ok(Begun::Layer(layer))
            }
            Err(error) => {
                none(&error);
                Ok(sandbox.map_or(Begun::Nothing, Begun::Sandbox))
            }
        }
    }

    fn key_of(&self, setup: &Setup) -> String {
        const KEPT: usize = 8;
        let keys = || {
            self.inner
                .keys
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let known = keys()
            .iter()
            .find(|(known, _)| known.is(setup))
            .map(|(_, key)| key.clone());
        known.unwrap_or_else(|| {
            let image = self
                .inner
                .layers
                .as_ref()
                .map_or_else(|| self.image().digest.as_str(), Layers::image);
            let key = setup.key(image);
            let mut keys = keys();
            keys.truncate(KEPT - 1);
            keys.push_front((setup.clone(), key.clone()));
            key
        })
    }

    pub(crate) fn layers(&self) -> Result<&Layers, SandboxError> {
        self.inner.layers.as_ref().ok_or_else(|| {
            let backend = &self.inner.backend;
            if backend.has_layers() {
                SandboxError::Config {
                    field: "cache_dir",
                    message: "states can only be saved where it names a directory".into(),
                }
            } else {
                SandboxError::Config {
                    field: "backend",
                    message: format!(
                        "{} sandboxes cannot start on layers, so no state can be saved; take snapshots instead",
                        backend.name()
                    ),
                }
            }
        })
    }

    /// Versions of the tools there are inside, found by asking them once; where the pool has a cache, once for the image.
    pub async fn tool_versions(&self) -> Result<&BTreeMap<String, String>, SandboxError> {
        self.inner
            .tools
            .get_or_try_init(|| async {
                let kept = self.inner.layers.as_ref().map(Layers::tools);
                if let Some(tools) = kept
                    .as_ref()
                    .and_then(|path| serde_json::from_slice(&fs_err::read(path).ok()?).ok())
                {
                    return Ok(tools);
                }
                let mut sandbox = self.lease(&Setup::default()).await?;
                let result = sandbox.call(Call::shell(ASK_TOOLS)).await?;
                sandbox.close().await;
                let said = String::from_utf8_lossy(&result.stdout);
                let tools: BTreeMap<_, _> = said
                    .lines()
                    .filter_map(|line| line.split_once('\t'))
                    .map(|(tool, version)| (tool.to_owned(), version.trim().to_owned()))
                    .collect();
                if let Some(path) = kept {
                    let text = serde_json::to_vec(&tools).map_err(std::io::Error::from)?;
                    if let Err(error) = fs_err::write(path, text) {
                        tracing::warn!(%error, "the tools' versions cannot be kept");
                    }
                }
                Ok(tools)
            })
            .await
    }

    /// Hands out a fresh sandbox in a snapshot's state: a branch.
    pub async fn branch(&self, from: &Snapshot) -> Result<Sandbox, SandboxError> {
        self.lease_contents(Contents::Snapshot(from.clone())).await
    }

    pub(crate) async fn lease_contents(&self, contents: Contents) -> Result<Sandbox, SandboxError> {
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

    /// A sandbox nobody has used on a layer, with what is to be written above it.
    pub(crate) async fn on_layer(
        &self,
        layer: &Layer,
        entries: Vec<Entry>,
        remove: Vec<String>,
        body: &[u8],
    ) -> Result<Box<dyn Cell>, SandboxError> {
        let mut cell = self.inner.make_on(layer.lower.clone()).await?;
        if !(entries.is_empty() && remove.is_empty()) {
            let request = Request::Unpack { entries, remove };
            done(exchange(&mut *cell, &request, body, 0, PATIENCE).await)?;
        }
        Ok(cell)
    }

    /// A sandbox nobody has used, with the given contents.
    pub(crate) async fn fresh(&self, contents: &Contents) -> Result<Box<dyn Cell>, SandboxError> {
        if let Contents::Layer(layer) = contents {
            let rest = &layer.rest;
            let entries = rest.entries.to_vec();
            return self.on_layer(layer, entries, Vec::new(), &rest.body).await;
        }
        let (entries, remove, body) = match contents {
            Contents::Layer(_) => (Vec::new(), Vec::new(), Vec::new()),
            Contents::Setup(setup) => {
                let (entries, body) = setup.entries();
                (entries, Vec::new(), body)
            }
            Contents::Snapshot(snapshot) => (
                snapshot.entries.to_vec(),
                snapshot.removed.to_vec(),
                snapshot.body.to_vec(),
            ),
        };
        let request = Request::Unpack { entries, remove };
        loop {
            let taken = self.inner.ready().pop_front();
            let kept_ready = taken.is_some();
            let mut cell = match taken {
                Some(cell) => cell,
                None => self.inner.make().await?,
            };
            let answer = exchange(&mut *cell, &request, &body, 0, PATIENCE).await;
            // Only now: making the next one would take a processor from what this one is waited for.
            self.refill();
            match answer {
                // One that died while it waited in the pool is nobody's fault; the next one serves.
                Err(SandboxError::Lost { .. }) if kept_ready => continue,
                answer => done(answer)?,
            }
            if let Contents::Setup(setup) = contents {
                self.inner.run(&mut *cell, &setup.commands).await?;
            }
            return Ok(cell);
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

    /// Runs a set-up's commands.
    async fn run(&self, cell: &mut dyn Cell, commands: &[String]) -> Result<(), SandboxError> {
        let timeout = self.limits.call_timeout;
        for command in commands {
            let request = Request::Call {
                what: What::Shell {
                    command: command.clone(),
                },
                timeout_us: timeout.as_micros() as u64,
            };
            let room = 2 * self.limits.output_bytes + CONTENT_BYTES + (1 << 20);
            let result = match exchange(cell, &request, &[], room, timeout + PATIENCE).await? {
                (Reply::Called(called), body) => CallResult::of(*called, &body, &self.limits)?,
                (other, _) => return Err(unexpected(&other)),
            };
            if result.outcome != CallOutcome::Ok {
                return Err(SandboxError::Setup {
                    command: command.clone(),
                    outcome: result.outcome.as_str(),
                    said: String::from_utf8_lossy(&result.stderr).into_owned(),
                });
            }
        }
        Ok(())
    }

    /// Makes one and waits until it is set up.
    async fn make(&self) -> Result<Box<dyn Cell>, SandboxError> {
        self.make_on(Lower::default()).await
    }

    async fn make_on(&self, lower: Lower) -> Result<Box<dyn Cell>, SandboxError> {
        let mut cell = self.backend.create_on(lower).await?;
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

/// The answer to unpacking.
fn done(answer: Result<(Reply, Vec<u8>), SandboxError>) -> Result<(), SandboxError> {
    match answer? {
        (Reply::Done, _) => Ok(()),
        (other, _) => Err(unexpected(&other)),
    }
}

/// Prints name and first line of `--version` of each tool that is there.
const ASK_TOOLS: &str = "for t in bash sh python3 perl sqlite3 git ls sed awk gawk grep find tar gzip gcc make node java go rustc curl jq; do \
    command -v $t >/dev/null || continue; v=$($t --version 2>&1 </dev/null); \
    printf '%s\\t%s\\n' $t \"$v\" | head -n 1; done";
