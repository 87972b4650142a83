//! The `local` backend: sandboxes of kernel namespaces on this machine, made by the helper.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use drillyard_sandbox_init::control::{LimitSpec, Lower, Start};
use drillyard_sandbox_init::frame;

use crate::client::Client;
use crate::layers::Layers;
use crate::pipe::Pipe;
use crate::{
    Autopsy, Backend, Boxed, Cell, Image, ImageReport, LimitsReport, NetworkRequest, Proxy,
    SandboxConfig, SandboxError, Stream,
};
use crate::{filter, host, image, network};

/// Numbers the helpers of this program.
static HELPERS: AtomicU64 = AtomicU64::new(0);

/// Kernel memory that a file may take beside its content: inode, names, attributes.
const FILE_BYTES: u64 = 2048;

pub struct Local {
    client: Arc<Client>,
    limits: LimitsReport,
    image: ImageReport,
    proxy: Option<Arc<Proxy>>,
    /// Keeps the image from being removed.
    _in_use: Option<std::os::fd::OwnedFd>,
}

impl Local {
    pub async fn start(config: &SandboxConfig) -> Result<Self, SandboxError> {
        let limits = spec(config)?;
        let helpers = host::helpers_dir(config.helpers_dir.as_deref())?;
        let (mut root, in_use) = match &config.image {
            Image::Host => (host::root(&helpers, &config.host_paths)?, None),
            Image::RootFs { dir, digest } => (
                host::own_root(&helpers, &config.host_paths, dir, digest)?,
                image::hold(&dir.canonicalize_utf8()?)?,
            ),
        };
        root.env.extend(config.network.env());
        let proxy = config
            .network
            .allow_list()
            .map(|list| Proxy::new(list.clone()))
            .transpose()?;
        let mut body = Vec::new();
        let program = filter::program().map_err(|message| SandboxError::Create {
            step: "system call filter".into(),
            message,
        })?;
        let start = Start {
            owner: format!("{}-{}", owner()?, HELPERS.fetch_add(1, Ordering::Relaxed)),
            limits,
            binds: root.binds,
            copies: root.copies,
            made: root.made,
            links: root.links,
            filter: frame::put(&mut body, &program),
            shell: root.shell,
            env: root.env,
            cgroups: config.control_groups,
            network: proxy.as_ref().map(|_| network::PORT),
            rootfs: match &config.image {
                Image::Host => None,
                Image::RootFs { dir, .. } => Some(dir.canonicalize_utf8()?.into_string()),
            },
            layers: match &config.cache_dir {
                None => None,
                Some(dir) => {
                    let dir = Layers::open(
                        dir,
                        &root.report.digest,
                        config.image != Image::Host,
                        config.cache_bytes,
                    )?
                    .dir()
                    .to_owned();
                    Some(dir.into_string())
                }
            },
        };
        let helper = helpers.join(host::INIT);
        let (client, started) =
            tokio::task::spawn_blocking(move || Client::start(&helper, &start, &body))
                .await
                .map_err(|_| SandboxError::HelperGone)??;
        if started.swept > 0 {
            tracing::info!(
                groups = started.swept,
                "removed control groups that an earlier program left"
            );
        }
        let mut rows = started.limits;
        if let Some(row) = config.network.row() {
            rows.retain(|r| r.limit != row.limit);
            rows.push(row);
        }
        Ok(Self {
            client: Arc::new(client),
            limits: LimitsReport {
                backend: "local".into(),
                mode: started.mode,
                rows,
            },
            image: root.report,
            proxy,
            _in_use: in_use,
        })
    }
}

impl Backend for Local {
    fn memory_bytes(&self) -> Boxed<'_, Option<u64>> {
        Box::pin(self.client.measure())
    }

    fn name(&self) -> &'static str {
        "local"
    }

    fn limits(&self) -> &LimitsReport {
        &self.limits
    }

    fn image(&self) -> &ImageReport {
        &self.image
    }

    fn has_layers(&self) -> bool {
        true
    }

    fn create(&self) -> Boxed<'_, Result<Box<dyn Cell>, SandboxError>> {
        self.create_on(Lower::default())
    }

    fn create_on(&self, lower: Lower) -> Boxed<'_, Result<Box<dyn Cell>, SandboxError>> {
        Box::pin(async {
            let (id, socket) = self.client.create(lower).await?;
            let mut cell = LocalCell {
                id,
                client: Arc::clone(&self.client),
                stream: None,
                gone: false,
            };
            cell.stream = Some(Pipe::new(socket, self.proxy.clone())?);
            Ok(Box::new(cell) as Box<dyn Cell>)
        })
    }
}

struct LocalCell {
    id: u64,
    client: Arc<Client>,
    /// There from creation on.
    stream: Option<Pipe>,
    gone: bool,
}

impl Cell for LocalCell {
    fn stream(&mut self) -> Option<&mut dyn Stream> {
        self.stream.as_mut().map(|s| s as &mut dyn Stream)
    }

    fn relax(&mut self) -> Boxed<'_, ()> {
        Box::pin(self.client.relax(self.id))
    }

    fn traffic(&mut self) -> Boxed<'_, Vec<NetworkRequest>> {
        Box::pin(async {
            match &self.stream {
                Some(stream) => stream.traffic().await,
                None => Vec::new(),
            }
        })
    }

    fn destroy(mut self: Box<Self>) -> Boxed<'static, Autopsy> {
        Box::pin(async move {
            if let Some(stream) = &mut self.stream {
                stream.close_network().await;
            }
            let autopsy = self.client.destroy(self.id).await;
            self.gone = true;
            autopsy
        })
    }
}

impl Drop for LocalCell {
    fn drop(&mut self) {
        if !self.gone {
            self.client.forget(self.id);
            self.client.kill(self.id);
        }
    }
}

/// The limits of each sandbox as its PID 1 is told them.
pub fn spec(config: &SandboxConfig) -> Result<LimitSpec, SandboxError> {
    let limits = &config.limits;
    let at_least = |field: &'static str, value: u64, least: u64| {
        if value < least {
            return Err(SandboxError::Config {
                field,
                message: format!("{value} is too small; at least {least} is needed"),
            });
        }
        Ok(value)
    };
    if !(limits.cpus.is_finite() && limits.cpus >= 0.01) {
        return Err(SandboxError::Config {
            field: "cpus",
            message: format!("{} is no number of processors", limits.cpus),
        });
    }
    let memory_bytes = at_least("memory_bytes", limits.memory_bytes, 16 << 20)?;
    // Files count as memory, and so does what the kernel keeps about each: a full disk must be a full disk, not a kill
    // for want of memory, and leave the next call enough to work with.
    let inodes = at_least("files", limits.files, 16)?.min(memory_bytes / 4 / FILE_BYTES);
    let most = memory_bytes / 4 * 3 - inodes * FILE_BYTES;
    Ok(LimitSpec {
        memory_bytes,
        disk_bytes: at_least("disk_bytes", limits.disk_bytes, 1 << 16)?.min(most),
        inodes,
        pids: at_least("pids", limits.pids, 2)?,
        milli_cpus: (limits.cpus * 1000.0).round() as u64,
        open_files: at_least("open_files", limits.open_files, 16)?,
        output_bytes: at_least("output_bytes", limits.output_bytes, 1)?.min(256 << 20),
        disk_asked_bytes: limits.disk_bytes,
        io_bytes_per_s: limits
            .io_bytes_per_s
            .map(|bytes| at_least("io_bytes_per_s", bytes, 4096))
            .transpose()?,
    })
}

/// This program's process id and start time: together they are never used twice.
pub fn owner() -> Result<String, SandboxError> {
    let pid = std::process::id();
    let started = started(pid)
        .ok_or_else(|| std::io::Error::other(format!("/proc/{pid}/stat: too few fields")))?;
    Ok(format!("{pid}-{started}"))
}

/// Start time of a process in clock ticks since boot, as text; nothing if it does not live.
pub fn started(pid: u32) -> Option<String> {
    let stat = fs_err::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; fields are counted after its end.
    let rest = &stat[stat.rfind(')')? + 1..];
    rest.split_whitespace().nth(19).map(str::to_owned)
}
