//! The `docker` backend: each sandbox is a container whose first program is PID 1 of `drillyard-sandbox-init`, spoken to
//! over the container's attached standard input and output.
//!
//! So a call costs what a few pipes cost, not what the engine's `exec` does, ends with its whole tree, and works with an
//! engine on another machine. Tools' connections to the proxy come the same way, as streams beside requests and replies:
//! the container itself has no network. A container whose program is gone loses its input, ends and is removed by the
//! engine; one that was never started is swept at the next start.

mod attached;
mod engine;
mod image;
mod mux;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bollard::models::{
    ContainerCreateBody, ContainerSummary, ContainerSummaryStateEnum, EventMessage, HostConfig,
    HostConfigCgroupnsModeEnum, HostConfigLogConfig, ResourcesUlimits,
};
use bollard::query_parameters::{
    AttachContainerOptions, CreateContainerOptions, EventsOptions, ListContainersOptions,
    RemoveContainerOptions,
};
use futures::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use drillyard_sandbox_init::control::{
    Contained, Greeting, Holds, LimitRow, LimitSpec, Settled, Streams,
};
use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::mux::CHUNK;

use self::attached::Attached;
use self::engine::{Engine, chain, is_missing};
use self::mux::Mux;
use crate::local::{owner, spec};
use crate::{
    Autopsy, Backend, Boxed, Cell, Image, ImageReport, LimitsReport, Network, NetworkLimits,
    NetworkRequest, Proxy, SandboxConfig, SandboxError, Stream, Traffic,
};
use crate::{filter, host, network};

/// Numbers the pools of this program.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// Says whose a container is: `PID-STARTTIME-N`.
const OWNER: &str = "drillyard.owner";
/// Says which boot and pid namespace the owner's process id belongs to.
const HOST: &str = "drillyard.host";

/// How long a container may take to be made, to be removed, and how long its end may take to be told.
const MAKE: Duration = Duration::from_mins(1);
const REMOVE: Duration = Duration::from_secs(20);
const TOLD: Duration = Duration::from_millis(500);

/// Most connections of one container at once, whatever the proxy would serve.
const STREAMS: usize = 256;
/// Bytes that PID 1 may hold for all of them together, where each has at least a [`CHUNK`].
const STREAM_BYTES: usize = 4 << 20;
/// Bytes under way on one connection: enough for 2.5 MB/s where an answer takes 50 ms.
const WINDOW: usize = 128 << 10;

/// More processes than one user has on an engine's host; how many a container may have is for its control group.
const MANY_PROCESSES: i64 = 1 << 15;

/// What PID 1 needs to start tools as another user, to end them, and to see to their files whatever the mode; SETPCAP so
/// that it can give up for good what it does not need.
const CAPABILITIES: [&str; 7] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "KILL",
    "SETGID",
    "SETPCAP",
    "SETUID",
];
/// The engines' usual list, and of /sys everything but the control group that PID 1 reads.
const MASKED: [&str; 19] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/block",
    "/sys/bus",
    "/sys/class",
    "/sys/dev",
    "/sys/devices",
    "/sys/firmware",
    "/sys/hypervisor",
    "/sys/kernel",
    "/sys/module",
    "/sys/power",
];

pub struct Docker {
    shared: Arc<Shared>,
    limits: LimitsReport,
    image: ImageReport,
    /// Says everything of a container but its name.
    body: ContainerCreateBody,
    /// First message to each PID 1.
    first: Vec<u8>,
    /// What tools' connections come to, and how.
    way_out: Option<(Arc<Proxy>, Streams)>,
    /// The one that showed how limits hold here.
    spare: Mutex<Option<DockerCell>>,
}

struct Shared {
    engine: Engine,
    owner: String,
    next: AtomicU64,
    fates: Mutex<HashMap<String, Fate>>,
    told: Notify,
    events: Mutex<Option<AbortHandle>>,
}

/// What the engine told of a container.
#[derive(Debug, Clone, Copy, Default)]
struct Fate {
    oom_kills: u64,
    exit_code: Option<i64>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(events) = locked(&self.events).take() {
            events.abort();
        }
    }
}

impl Docker {
    pub async fn start(config: &SandboxConfig) -> Result<Self, SandboxError> {
        let limits = spec(config)?;
        if !config.control_groups {
            return Err(SandboxError::Config {
                field: "control_groups",
                message: "the docker backend cannot do without; leave it true".into(),
            });
        }
        let helpers = host::helpers_dir(config.helpers_dir.as_deref())?;
        let way_out = match config.network.allow_list() {
            None => None,
            Some(list) => Some((Proxy::new(list.clone())?, streams(&list.limits))),
        };
        let engine = Engine::connect(config.engine.as_deref()).await?;
        let swept = sweep(&engine).await;
        if swept > 0 {
            tracing::info!(
                containers = swept,
                "removed containers that an earlier program left"
            );
        }
        let mut prepared = image::prepare(&engine, config, &helpers).await?;
        prepared.env.extend(config.network.env());
        let mut filter = Vec::new();
        let program = filter::program().map_err(|message| SandboxError::Create {
            step: "system call filter".into(),
            message,
        })?;
        let contained = Contained {
            filter: frame::put(&mut filter, &program),
            limits,
            shell: prepared.shell,
            env: prepared.env,
            witnesses: prepared.witnesses,
            network: way_out.as_ref().map(|(_, streams)| *streams),
        };
        let mut first = frame::encode(&contained, filter.len())?;
        first.extend_from_slice(&filter);
        let owner = format!("{}-{}", owner()?, POOLS.fetch_add(1, Ordering::Relaxed));
        let body = body(
            &engine,
            &contained.limits,
            &owner,
            prepared.name,
            prepared.mounts,
        );
        let shared = Arc::new(Shared {
            engine,
            owner,
            next: AtomicU64::new(0),
            fates: Mutex::default(),
            told: Notify::new(),
            events: Mutex::new(None),
        });
        let watching = tokio::spawn(watch(Arc::downgrade(&shared))).abort_handle();
        *locked(&shared.events) = Some(watching);
        let mut docker = Self {
            limits: LimitsReport {
                backend: "docker".into(),
                mode: String::new(),
                rows: Vec::new(),
            },
            image: prepared.report,
            shared,
            body,
            first,
            way_out,
            spare: Mutex::default(),
        };
        let (cell, settled) = docker.make().await.map_err(|error| match error {
            // The paths of image `host` are looked for where the engine runs.
            SandboxError::Engine { message, .. }
                if config.image == Image::Host && message.contains("bind source path") =>
            {
                elsewhere(&docker.shared.engine, &message)
            }
            other => other,
        })?;
        docker.limits = report(
            &docker.shared.engine,
            &contained.limits,
            &settled,
            &config.network,
        );
        docker.spare = Mutex::new(Some(cell));
        Ok(docker)
    }

    /// Makes a container and has its PID 1 set up.
    async fn make(&self) -> Result<(DockerCell, Settled), SandboxError> {
        timeout(MAKE, self.begin())
            .await
            .unwrap_or(Err(SandboxError::Stuck {
                seconds: MAKE.as_secs(),
            }))
    }

    async fn begin(&self) -> Result<(DockerCell, Settled), SandboxError> {
        let engine = &self.shared.engine;
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let options = CreateContainerOptions {
            name: Some(format!("drillyard-{}-{number}", self.shared.owner)),
            ..CreateContainerOptions::default()
        };
        let id = engine
            .api
            .create_container(Some(options), self.body.clone())
            .await
            .map_err(|e| engine.fault("creating a container", &e))?
            .id;
        // From here on dropping it removes the container.
        let mut cell = DockerCell {
            id,
            shared: Arc::clone(&self.shared),
            stream: None,
            traffic: None,
            gone: false,
        };
        let options = AttachContainerOptions {
            stream: true,
            stdin: true,
            stdout: true,
            stderr: true,
            // No sequence of bytes shall mean anything but itself.
            detach_keys: Some(String::new()),
            ..AttachContainerOptions::default()
        };
        let attached = engine
            .api
            .attach_container(&cell.id, Some(options))
            .await
            .map_err(|e| engine.fault("attaching to a container", &e))?;
        let mut stream = Attached::new(attached);
        engine
            .api
            .start_container(&cell.id, None)
            .await
            .map_err(|e| engine.fault("starting a container", &e))?;
        let greeting = async {
            stream.write_all(&self.first).await?;
            stream.flush().await?;
            let mut prefix = [0; frame::PREFIX];
            stream.read_exact(&mut prefix).await?;
            let (head, _) = frame::lengths(prefix, 0)?;
            let mut head = vec![0; head];
            stream.read_exact(&mut head).await?;
            frame::decode::<Greeting>(&head)
        }
        .await;
        match greeting {
            Ok(Greeting::Settled(settled)) => {
                let stream: Box<dyn Stream> = match &self.way_out {
                    None => Box::new(stream),
                    Some((proxy, streams)) => {
                        let (mux, connections) = Mux::new(stream, *streams);
                        cell.traffic = Some(proxy.serve(connections));
                        Box::new(mux)
                    }
                };
                cell.stream = Some(Mutex::new(stream));
                Ok((cell, settled))
            }
            Ok(Greeting::Elsewhere { inside }) => Err(elsewhere(
                engine,
                &format!("{inside} is another directory there"),
            )),
            Ok(Greeting::Unable { step, message }) => Err(SandboxError::Create { step, message }),
            Err(error) => {
                let noise = stream.noise();
                let message = if noise.is_empty() {
                    format!("PID 1 of the container did not answer: {error}")
                } else {
                    noise
                };
                Err(SandboxError::Create {
                    step: "first program of the container".into(),
                    message,
                })
            }
        }
    }
}

impl Backend for Docker {
    fn name(&self) -> &'static str {
        "docker"
    }

    fn limits(&self) -> &LimitsReport {
        &self.limits
    }

    fn image(&self) -> &ImageReport {
        &self.image
    }

    fn create(&self) -> Boxed<'_, Result<Box<dyn Cell>, SandboxError>> {
        Box::pin(async {
            if let Some(cell) = locked(&self.spare).take() {
                return Ok(Box::new(cell) as Box<dyn Cell>);
            }
            let (cell, _) = self.make().await?;
            Ok(Box::new(cell) as Box<dyn Cell>)
        })
    }

    fn gone(&self, cause: String) -> SandboxError {
        SandboxError::EngineGone {
            engine: self.shared.engine.address.clone(),
            message: cause,
        }
    }
}

struct DockerCell {
    id: String,
    shared: Arc<Shared>,
    /// Never locked: it makes the cell one that threads can share.
    stream: Option<Mutex<Box<dyn Stream>>>,
    traffic: Option<Traffic>,
    gone: bool,
}

impl Cell for DockerCell {
    fn stream(&mut self) -> Option<&mut dyn Stream> {
        let stream = self.stream.as_mut()?.get_mut();
        Some(stream.unwrap_or_else(PoisonError::into_inner))
    }

    fn traffic(&mut self) -> Boxed<'_, Vec<NetworkRequest>> {
        Box::pin(async {
            match &self.traffic {
                Some(traffic) => traffic.take().await,
                None => Vec::new(),
            }
        })
    }

    fn destroy(mut self: Box<Self>) -> Boxed<'static, Autopsy> {
        Box::pin(async move {
            self.gone = true;
            self.stream = None;
            if let Some(traffic) = self.traffic.take() {
                traffic.close().await;
            }
            let removed = timeout(REMOVE, remove(&self.shared.engine, &self.id)).await;
            let fate = self
                .shared
                .fate(&self.id, matches!(removed, Ok(Ok(()))))
                .await;
            Autopsy {
                // As shells do, engines tell of a signal by an exit code beyond 128.
                signal: fate
                    .exit_code
                    .and_then(|code| i32::try_from(code).ok())
                    .filter(|code| (129..=192).contains(code))
                    .map(|code| code - 128),
                oom_kills: fate.oom_kills,
                backend_gone: !matches!(removed, Ok(Ok(()))),
            }
        })
    }
}

impl Drop for DockerCell {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        // PID 1 ends with its input, and the engine removes what has ended; asking for it is only quicker.
        self.stream = None;
        locked(&self.shared.fates).remove(&self.id);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (shared, id) = (Arc::clone(&self.shared), std::mem::take(&mut self.id));
            runtime.spawn(async move {
                let _ = timeout(REMOVE, remove(&shared.engine, &id)).await;
                locked(&shared.fates).remove(&id);
            });
        }
    }
}

impl Shared {
    /// What the engine told of a container's end, waiting a little for it if it is still to come.
    async fn fate(&self, id: &str, comes: bool) -> Fate {
        let told = async {
            loop {
                let more = self.told.notified();
                tokio::pin!(more);
                more.as_mut().enable();
                if locked(&self.fates)
                    .get(id)
                    .is_some_and(|f| f.exit_code.is_some())
                {
                    return;
                }
                more.await;
            }
        };
        if comes {
            let _ = timeout(TOLD, told).await;
        }
        locked(&self.fates).remove(id).unwrap_or_default()
    }

    fn hear(&self, event: EventMessage) {
        let (Some(action), Some(actor)) = (event.action, event.actor) else {
            return;
        };
        let Some(id) = actor.id else { return };
        let attributes = actor.attributes.unwrap_or_default();
        let mut fates = locked(&self.fates);
        match action.as_str() {
            "oom" => fates.entry(id).or_default().oom_kills += 1,
            // Docker's and Podman's words.
            "die" | "died" => {
                fates.entry(id).or_default().exit_code = ["exitCode", "containerExitCode"]
                    .iter()
                    .find_map(|key| attributes.get(*key)?.parse().ok())
                    .or(Some(0));
            }
            _ => return,
        }
        drop(fates);
        self.told.notify_waiters();
    }
}

/// Listens to what the engine tells of this pool's containers, as long as the pool lives.
async fn watch(shared: Weak<Shared>) {
    let started = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    while let Some(strong) = shared.upgrade() {
        let filters = HashMap::from([
            ("type".to_owned(), vec!["container".to_owned()]),
            (
                "event".to_owned(),
                ["die", "died", "oom"].map(str::to_owned).to_vec(),
            ),
            (
                "label".to_owned(),
                vec![format!("{OWNER}={}", strong.owner)],
            ),
        ]);
        let options = EventsOptions {
            // Told again from here on, whenever the connection stands.
            since: Some(started.to_string()),
            filters: Some(filters),
            ..EventsOptions::default()
        };
        let mut events = Box::pin(strong.engine.api.events(Some(options)));
        drop(strong);
        while let Some(Ok(event)) = events.next().await {
            match shared.upgrade() {
                Some(strong) => strong.hear(event),
                None => return,
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Kills a container, removes it with what belongs to it, and comes back when it is gone.
async fn remove(engine: &Engine, id: &str) -> Result<(), bollard::errors::Error> {
    let options = RemoveContainerOptions {
        v: true,
        force: true,
        ..RemoveContainerOptions::default()
    };
    loop {
        match engine.api.remove_container(id, Some(options.clone())).await {
            Ok(()) => return Ok(()),
            Err(error) if is_missing(&error) => return Ok(()),
            // It is being removed already, or was in the middle of something.
            Err(bollard::errors::Error::DockerResponseServerError { .. }) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Removes containers whose program is dead; returns how many.
async fn sweep(engine: &Engine) -> u64 {
    let mut filters = HashMap::from([("label".to_owned(), vec![OWNER.to_owned()])]);
    if engine.podman {
        // One in a state that only Podman knows would make its whole answer unreadable.
        let known = ["created", "running", "exited"].map(str::to_owned);
        filters.insert("status".to_owned(), known.to_vec());
    }
    let options = ListContainersOptions {
        all: true,
        filters: Some(filters),
        ..ListContainersOptions::default()
    };
    let found = match engine.api.list_containers(Some(options)).await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(
                error = chain(&error),
                "leftover containers could not be looked for"
            );
            return 0;
        }
    };
    let mut swept = 0;
    for id in found.iter().filter_map(leftover) {
        if matches!(timeout(REMOVE, remove(engine, id)).await, Ok(Ok(()))) {
            swept += 1;
        }
    }
    swept
}

/// The id of a container that nobody will use any more.
fn leftover(container: &ContainerSummary) -> Option<&str> {
    let labels = container.labels.as_ref()?;
    let dead = if labels.get(HOST) == Some(&here()) {
        !is_alive(labels.get(OWNER)?)
    } else {
        // Another machine's, or of an earlier boot of this one: whether its program lives cannot be told, but what has
        // ended serves nobody.
        matches!(
            container.state,
            Some(ContainerSummaryStateEnum::EXITED | ContainerSummaryStateEnum::DEAD)
        )
    };
    container.id.as_deref().filter(|_| dead)
}

/// Names this boot and pid namespace, in which a process id means something.
fn here() -> String {
    let boot = fs_err::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs_err::read_link("/proc/self/ns/pid")
        .map(|link| link.display().to_string())
        .unwrap_or_default();
    format!("{} {namespace}", boot.trim())
}

/// Whether the process of an owner's label lives.
fn is_alive(owner: &str) -> bool {
    let mut parts = owner.split('-');
    let (Some(pid), Some(started)) = (parts.next(), parts.next()) else {
        return false;
    };
    let Some(pid) = pid.parse::<u32>().ok() else {
        return false;
    };
    crate::local::started(pid).is_some_and(|s| s == started)
}

/// How PID 1 carries connections: as many as the proxy serves, within bounds.
fn streams(limits: &NetworkLimits) -> Streams {
    let most = limits.connections.min(STREAMS);
    Streams {
        port: network::PORT,
        most,
        window: (STREAM_BYTES / most).clamp(CHUNK, WINDOW),
    }
}

fn elsewhere(engine: &Engine, message: &str) -> SandboxError {
    SandboxError::Config {
        field: "image",
        message: format!(
            "the engine at {} does not see this host's files ({message}), so image \"host\" cannot be used with it; use a root \
             file system",
            engine.address
        ),
    }
}

/// How much of the disk limit each place gets: an engine mounts each as a tmpfs of its own.
fn shares(limits: &LimitSpec) -> [(&'static str, u64, u64); 3] {
    let part = |eighths: u64| {
        (
            (limits.disk_bytes / 8 * eighths).max(64 << 10),
            (limits.inodes / 8 * eighths).max(8),
        )
    };
    [("/work", 5), ("/tmp", 2), ("/dev/shm", 1)].map(|(place, eighths)| {
        let (bytes, files) = part(eighths);
        (place, bytes, files)
    })
}

fn body(
    engine: &Engine,
    limits: &LimitSpec,
    owner: &str,
    image: String,
    mounts: Vec<bollard::models::Mount>,
) -> ContainerCreateBody {
    let mount = |bytes: u64, files: u64| {
        let more = if engine.podman {
            // It knows no limit of files, and would copy what lies beneath.
            "notmpcopyup".to_owned()
        } else {
            format!("nr_inodes={files}")
        };
        format!("rw,exec,nosuid,nodev,size={bytes},{more}")
    };
    let mut tmpfs: HashMap<_, _> = shares(limits)
        .map(|(place, bytes, files)| (place.to_owned(), mount(bytes, files)))
        .into();
    if engine.podman {
        // Beside a read-only root it would mount both without a limit: the second over /tmp, where it is a link there.
        tmpfs.insert("/run".to_owned(), mount(64 << 10, 8));
        if let Some(tmp) = tmpfs.get("/tmp").cloned() {
            tmpfs.insert("/var/tmp".to_owned(), tmp);
        }
    }
    let mut security = vec!["no-new-privileges".to_owned()];
    if engine.podman {
        // It keeps its own profile, since it takes only a path on its own machine here, and PID 1 adds ours. It reads no
        // list of masked paths.
        security.push(format!("mask={}", MASKED.join(":")));
    } else if engine.has("seccomp") {
        security.push(format!("seccomp={}", filter::profile()));
    }
    let ulimit = |name: &str, value: i64| ResourcesUlimits {
        name: Some(name.to_owned()),
        soft: Some(value),
        hard: Some(value),
    };
    let mut ulimits = vec![ulimit("core", 0)];
    if engine.podman {
        // It would raise them to the most the kernel knows, which not every root may. Tools' own come from PID 1.
        ulimits.push(ulimit("nofile", (limits.open_files as i64).max(1024)));
        ulimits.push(ulimit("nproc", MANY_PROCESSES));
    }
    let list = |names: &[&str]| Some(names.iter().map(|n| (*n).to_owned()).collect());
    ContainerCreateBody {
        image: Some(image),
        entrypoint: Some(vec![
            format!("{}/{}", host::TOOLS, host::INIT),
            "container".to_owned(),
        ]),
        cmd: Some(Vec::new()),
        env: Some(Vec::new()),
        user: Some("0:0".to_owned()),
        working_dir: Some("/".to_owned()),
        hostname: Some("sandbox".to_owned()),
        attach_stdin: Some(true),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        open_stdin: Some(true),
        // What ends it need not ask first: it holds nothing that outlives it.
        stop_signal: Some("SIGKILL".to_owned()),
        // The input ends with the connection: so a container ends with its program.
        stdin_once: Some(true),
        tty: Some(false),
        labels: Some(HashMap::from([
            (OWNER.to_owned(), owner.to_owned()),
            (HOST.to_owned(), here()),
        ])),
        host_config: Some(HostConfig {
            auto_remove: Some(true),
            network_mode: Some("none".to_owned()),
            // Else the resolver of the engine's host is told.
            dns: list(&["127.0.0.1"]),
            dns_search: list(&["."]),
            readonly_rootfs: Some(true),
            tmpfs: Some(tmpfs),
            mounts: Some(mounts),
            memory: Some(limits.memory_bytes as i64),
            memory_swap: Some(limits.memory_bytes as i64),
            // PID 1 is one process more than the tools may have.
            pids_limit: Some(limits.pids as i64 + 1),
            cpu_period: Some(100_000),
            cpu_quota: Some(limits.milli_cpus as i64 * 100),
            oom_score_adj: Some(500),
            ulimits: Some(ulimits),
            cap_drop: list(&["ALL"]),
            cap_add: list(&CAPABILITIES),
            security_opt: Some(security),
            masked_paths: list(&MASKED),
            cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
            ipc_mode: Some("private".to_owned()),
            init: Some(false),
            log_config: Some(HostConfigLogConfig {
                typ: Some("none".to_owned()),
                config: None,
            }),
            ..HostConfig::default()
        }),
        ..ContainerCreateBody::default()
    }
}

fn report(engine: &Engine, limits: &LimitSpec, found: &Settled, network: &Network) -> LimitsReport {
    let row = |limit: &str, value: String, holds: Holds, how: String| LimitRow {
        limit: limit.into(),
        value,
        holds,
        how,
    };
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let groups = match found.cgroups {
        0 => format!("the container's control group ({} says so)", engine.name),
        version => format!("the container's control group, version {version}, as read inside"),
    };
    // Without a look from inside, the engine is taken at its word.
    let granted = |seen: Option<u64>, wanted: u64, claimed: Option<bool>| match seen {
        Some(value) => value <= wanted,
        None => found.cgroups == 0 && claimed == Some(true),
    };
    let by_group = |holds: bool| {
        if holds {
            (Holds::Yes, groups.clone())
        } else {
            (Holds::No, format!("{} cannot limit this here", engine.name))
        }
    };
    let info = &engine.info;
    let mut rows = vec![row(
        "wall time",
        "per call and episode".into(),
        Holds::Yes,
        "clock outside and inside; the whole pid namespace is killed, hard by removing the container".into(),
    )];
    let (holds, mut how) = by_group(granted(
        found.memory_bytes,
        limits.memory_bytes,
        info.memory_limit,
    ));
    let swaps = info.swap_limit == Some(false);
    if swaps {
        how.push_str("; swap is not limited");
    }
    if !found.counts_oom {
        how.push_str("; kills for want of memory cannot be counted during a call");
    }
    rows.push(row(
        "memory",
        mib(limits.memory_bytes),
        if holds == Holds::Yes && swaps {
            Holds::Partly
        } else {
            holds
        },
        how,
    ));
    rows.push(row(
        "socket memory",
        "with the memory".into(),
        if found.cgroups == 2 {
            Holds::Yes
        } else {
            Holds::No
        },
        if found.cgroups == 2 {
            groups.clone()
        } else {
            "control groups of version 1 count what waits in sockets apart, and the engine's interface sets no limit for it".into()
        },
    ));
    let (holds, how) = by_group(granted(found.pids, limits.pids + 1, info.pids_limit));
    rows.push(row("processes", limits.pids.to_string(), holds, how));
    let (holds, how) = by_group(granted(
        found.milli_cpus,
        limits.milli_cpus,
        info.cpu_cfs_quota,
    ));
    rows.push(row(
        "processors",
        format!(
            "{}.{:03}",
            limits.milli_cpus / 1000,
            limits.milli_cpus % 1000
        ),
        holds,
        how,
    ));
    let parts: Vec<String> = shares(limits)
        .iter()
        .map(|(place, bytes, _)| format!("{place} {}", mib(*bytes)))
        .collect();
    let most: u64 = shares(limits).iter().map(|(_, bytes, _)| bytes).sum();
    let counted = found.inodes.is_some_and(|n| n <= limits.inodes.max(24));
    rows.push(row(
        "disk",
        format!("{}, {} files", mib(limits.disk_bytes), limits.inodes),
        match (found.disk_bytes <= most + (64 << 10), counted) {
            (true, true) => Holds::Yes,
            (true, false) => Holds::Partly,
            _ => Holds::No,
        },
        format!(
            "size{} of a tmpfs each: {}",
            if counted {
                " and inodes"
            } else {
                ", but no number of files,"
            },
            parts.join(", ")
        ),
    ));
    rows.push(row(
        "open files",
        limits.open_files.to_string(),
        Holds::Yes,
        "RLIMIT_NOFILE, each process".into(),
    ));
    rows.push(row(
        "output",
        format!("{} a stream and call", mib(limits.output_bytes)),
        Holds::Yes,
        "read inside with a cap; the call is killed beyond it".into(),
    ));
    rows.push(row(
        "files",
        "of the image: read only".into(),
        Holds::Yes,
        format!(
            "a read-only root ({}), {}",
            info.driver.as_deref().unwrap_or("unknown storage driver"),
            if found.landlock == 0 {
                "no Landlock in the engine's kernel".to_owned()
            } else {
                format!("Landlock version {}", found.landlock)
            }
        ),
    ));
    rows.push(row(
        "system calls",
        "a deny list".into(),
        Holds::Yes,
        if found.engine_filter {
            "the engine's filter and PID 1's own".into()
        } else {
            "PID 1's own filter (the engine has none)".into()
        },
    ));
    rows.push(match network.row() {
        None => row(
            "network",
            "none".into(),
            Holds::Yes,
            "a network namespace of its own with loopback only; other address families refused"
                .into(),
        ),
        Some(mut allowed) => {
            allowed
                .how
                .push_str("; PID 1 carries connections to it beside its replies");
            allowed
        }
    });
    rows.push(row(
        "identity",
        "no privileges".into(),
        Holds::Yes,
        if found.host_ids {
            "tools without capabilities under id 1000, which the engine's host may use too (userns-remap gives ids of their own)"
        } else {
            "tools without capabilities under an id of a user namespace"
        }
        .into(),
    ));
    LimitsReport {
        backend: "docker".into(),
        mode: if engine.has("rootless") {
            "user"
        } else {
            "root"
        }
        .into(),
        rows,
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_can_use_is_left_over() {
        use ContainerSummaryStateEnum::{CREATED, EXITED, RUNNING};
        let container = |owner: &str, host: &str, state| ContainerSummary {
            id: Some("id".into()),
            labels: Some(HashMap::from([
                (OWNER.to_owned(), owner.to_owned()),
                (HOST.to_owned(), host.to_owned()),
            ])),
            state: Some(state),
            ..ContainerSummary::default()
        };
        let (own, here) = (format!("{}-0", owner().unwrap()), here());
        for (owner, host, state, left) in [
            (own.as_str(), here.as_str(), RUNNING, false),
            (&own, &here, EXITED, false),
            ("1-1-0", &here, RUNNING, true),
            ("4294967295-1-0", &here, CREATED, true),
            (&own, "elsewhere", RUNNING, false),
            ("1-1-0", "elsewhere", CREATED, false),
            ("1-1-0", "elsewhere", EXITED, true),
        ] {
            assert_eq!(
                leftover(&container(owner, host, state)).is_some(),
                left,
                "{owner} {host} {state}"
            );
        }
    }

    #[test]
    fn the_shares_of_the_disk_are_the_disk() {
        let limits = LimitSpec {
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            disk_asked_bytes: 1 << 30,
            inodes: 8000,
            pids: 1,
            milli_cpus: 1,
            io_bytes_per_s: None,
            open_files: 1,
            output_bytes: 1,
        };
        let all = shares(&limits);
        assert_eq!(all.iter().map(|s| s.1).sum::<u64>(), 1 << 30);
        assert_eq!(all.iter().map(|s| s.2).sum::<u64>(), 8000);
    }
}
