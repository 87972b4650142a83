//! One leased sandbox.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::{CONTENT_BYTES, Change, Entry, Kind, Reply, Request};

use crate::call::most_memory;
use crate::layers::Layer;
use crate::{
    Autopsy, Call, CallResult, Cell, ChangedFile, NetworkRequest, Pool, SandboxError, Setup,
    Snapshot,
};

/// What PID 1 may need beyond a call's clock: killing a large tree, hashing what changed, sending it.
const SLACK: Duration = Duration::from_secs(20);
/// How long a killed sandbox may take to be gone; one whose processes cannot be killed goes when it can.
const DEATH: Duration = Duration::from_secs(10);
/// Largest snapshot, in bytes of contents.
const MAX_SNAPSHOT: u64 = 1 << 30;

/// What a sandbox starts with.
#[derive(Debug, Clone)]
pub(crate) enum Contents {
    Setup(Setup),
    Snapshot(Snapshot),
    Layer(Arc<Layer>),
}

/// What differs from the layers a sandbox began with.
pub(crate) struct Delta {
    pub entries: Vec<Entry>,
    /// What of the layers is hidden.
    pub removed: Vec<String>,
    /// Pipes and sockets, which are not copied.
    pub left_out: u64,
    pub body: Vec<u8>,
}

/// A sandbox in use. Dropping it kills it; [`Sandbox::close`] also waits until it is gone.
pub struct Sandbox {
    pool: Pool,
    /// There until the sandbox is lost or closed.
    cell: Option<Box<dyn Cell>>,
    contents: Contents,
    leased: Instant,
    /// A request was sent and its answer not yet read.
    asking: bool,
    /// Its last call left it so that another one would suffer.
    unusable: bool,
    /// What the last call asked of the network, until its result is made.
    network: Vec<NetworkRequest>,
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox")
            .field("alive", &self.cell.is_some())
            .finish_non_exhaustive()
    }
}

impl Sandbox {
    pub(crate) fn new(pool: Pool, cell: Box<dyn Cell>, contents: Contents) -> Self {
        Self {
            pool,
            cell: Some(cell),
            contents,
            leased: Instant::now(),
            asking: false,
            unusable: false,
            network: Vec::new(),
        }
    }

    /// Time since it was leased, also over reset and restore. Who runs episodes keeps their clock; the sandbox keeps that
    /// of each call.
    pub fn age(&self) -> Duration {
        self.leased.elapsed()
    }

    /// Whether it is lost: the next call would fail; [`Sandbox::reset`] or [`Sandbox::restore`] brings a fresh one.
    pub fn is_lost(&self) -> bool {
        self.cell.is_none()
    }

    /// Runs a call. What the tool does wrong is in the result; an error is the sandbox's fault. When the call returns,
    /// no process that it started is alive.
    ///
    /// Where the last call left the sandbox unusable (see [`CallResult::unusable`]), this one runs in a fresh sandbox with
    /// the same files. Where those can't be moved to one, it is not run, and that is its result.
    pub async fn call(&mut self, call: Call) -> Result<CallResult, SandboxError> {
        let started = Instant::now();
        if self.unusable && self.cell.is_some() {
            match self.renew().await {
                Ok(()) => {}
                Err(SandboxError::Refused { message }) => {
                    return Ok(CallResult::stranded(&message));
                }
                Err(SandboxError::OutOfMemory { oom_kills }) => {
                    return Ok(CallResult::out_of_memory(oom_kills, started.elapsed()));
                }
                Err(error) => return Err(error),
            }
        }
        let limits = self.pool.configured();
        let timeout = call
            .timeout()
            .unwrap_or(limits.call_timeout)
            .min(limits.call_timeout);
        let max_body = 2 * limits.output_bytes + CONTENT_BYTES + (1 << 20);
        let mut body = Vec::new();
        let request = Request::Call {
            what: call.into_what(&mut body),
            timeout_us: timeout.as_micros() as u64,
        };
        let started = Instant::now();
        let answer = self.ask(&request, &body, max_body, timeout + SLACK).await;
        let network = std::mem::take(&mut self.network);
        let mut result = match answer {
            Ok((Reply::Called(called), body)) => {
                let peak = most_memory(&called);
                let result = CallResult::of(*called, &body, self.pool.configured());
                self.pool.note_use(peak);
                self.unusable = result.as_ref().is_ok_and(|r| r.unusable.is_some());
                result
            }
            Ok((other, _)) => Err(unexpected(&other)),
            Err(SandboxError::OutOfMemory { oom_kills }) => {
                Ok(CallResult::out_of_memory(oom_kills, started.elapsed()))
            }
            Err(error) => Err(error),
        }?;
        result.network = network;
        Ok(result)
    }

    /// Copies every file out. What the layers it began with changed of the root is not among them: save it to keep that.
    pub async fn snapshot(&mut self) -> Result<Snapshot, SandboxError> {
        let request = Request::Pack {
            max_bytes: MAX_SNAPSHOT,
            delta: false,
        };
        match self
            .ask(&request, &[], MAX_SNAPSHOT + (1 << 20), 6 * SLACK)
            .await
        {
            Ok((
                Reply::Packed {
                    entries, removed, ..
                },
                body,
            )) => {
                if entries.iter().any(|e| e.content.of(&body).is_none()) {
                    return Err(SandboxError::Protocol(std::io::Error::other(
                        "contents lie outside the message",
                    )));
                }
                Ok(Snapshot {
                    entries: entries.into(),
                    removed: removed.into(),
                    body: body.into(),
                })
            }
            Ok((other, _)) => Err(unexpected(&other)),
            Err(error) => Err(error),
        }
    }

    /// Brings the files to a snapshot's state, in a fresh sandbox: nothing else of the past remains either.
    pub async fn restore(&mut self, snapshot: &Snapshot) -> Result<(), SandboxError> {
        self.swap(Contents::Snapshot(snapshot.clone())).await
    }

    /// Back to the state it was leased in, in a fresh sandbox. Taking one from the pool costs 0.3 ms with 100 changed files;
    /// emptying this one's file system in place would cost 0.5 ms, grow with what changed, need PID 1 to keep the right
    /// to mount, and leave what is no file. On a layer a fresh one costs 2.3 ms.
    pub async fn reset(&mut self) -> Result<(), SandboxError> {
        self.swap(self.contents.clone()).await
    }

    /// Swaps in a fresh sandbox with the same files; nothing else of the past remains. Fails where the files cannot be
    /// copied out: then only [`Sandbox::reset`] or [`Sandbox::restore`] goes on.
    pub async fn renew(&mut self) -> Result<(), SandboxError> {
        if let Some(cell) = &mut self.cell {
            // Copying them takes memory, and there may be none left.
            cell.relax().await;
        }
        // Above the same layers, or what is saved next would not know what of them was deleted.
        let fresh = if let Contents::Layer(layer) = &self.contents {
            let layer = Arc::clone(layer);
            let delta = self.delta().await?;
            self.pool
                .on_layer(&layer, delta.entries, delta.removed, &delta.body)
                .await?
        } else {
            let files = self.snapshot().await?;
            self.pool.fresh(&Contents::Snapshot(files)).await?
        };
        self.cell = Some(fresh);
        self.unusable = false;
        Ok(())
    }

    /// Replays recorded changes: writes files that were created or modified, removes those that were deleted. Refuses
    /// changes whose content was not recorded.
    pub async fn apply(&mut self, changes: &[ChangedFile]) -> Result<(), SandboxError> {
        let mut body = Vec::new();
        let mut entries = Vec::new();
        let mut remove = Vec::new();
        for change in changes {
            if change.change == Change::Deleted {
                remove.push(change.path.clone());
                continue;
            }
            let content = match (&change.content, change.kind) {
                (Some(bytes), _) => bytes.as_slice(),
                (None, Kind::Dir) => &[],
                (None, _) => {
                    return Err(SandboxError::Refused {
                        message: format!("the content of {} was not recorded", change.path),
                    });
                }
            };
            entries.push(Entry {
                path: change.path.clone(),
                kind: change.kind,
                mode: change.mode,
                mtime_ns: None,
                content: frame::put(&mut body, content),
            });
        }
        match self
            .ask(&Request::Unpack { entries, remove }, &body, 0, SLACK)
            .await
        {
            Ok((Reply::Done, _)) => Ok(()),
            Ok((other, _)) => Err(unexpected(&other)),
            Err(error) => Err(error),
        }
    }

    /// Kills what runs and comes back when the sandbox is gone.
    pub async fn close(mut self) {
        if let Some(cell) = self.cell.take() {
            let _ = tokio::time::timeout(DEATH, cell.destroy()).await;
        }
    }

    /// What differs from the layers this sandbox began with.
    pub(crate) async fn delta(&mut self) -> Result<Delta, SandboxError> {
        let request = Request::Pack {
            max_bytes: MAX_SNAPSHOT,
            delta: true,
        };
        match self
            .ask(&request, &[], MAX_SNAPSHOT + (1 << 20), 6 * SLACK)
            .await
        {
            Ok((
                Reply::Packed {
                    entries,
                    removed,
                    left_out,
                },
                body,
            )) => Ok(Delta {
                entries,
                removed,
                left_out,
                body,
            }),
            Ok((other, _)) => Err(unexpected(&other)),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The layers this sandbox began with, the topmost first.
    pub(crate) fn chain(&self) -> Vec<String> {
        match &self.contents {
            Contents::Layer(layer) => layer.chain.clone(),
            _ => Vec::new(),
        }
    }

    pub(crate) async fn swap(&mut self, contents: Contents) -> Result<(), SandboxError> {
        let fresh = self.pool.fresh(&contents).await?;
        // The old one dies in its own time.
        self.cell = Some(fresh);
        self.asking = false;
        self.unusable = false;
        self.contents = contents;
        Ok(())
    }

    async fn ask(
        &mut self,
        request: &Request,
        body: &[u8],
        max_body: u64,
        patience: Duration,
    ) -> Result<(Reply, Vec<u8>), SandboxError> {
        if self.asking {
            return Err(SandboxError::Abandoned);
        }
        let Some(cell) = self.cell.as_deref_mut() else {
            let cause = "it was lost in an earlier call".into();
            return Err(SandboxError::Lost { cause });
        };
        self.asking = true;
        let answer = exchange(cell, request, body, max_body, patience).await;
        self.network = cell.traffic().await;
        self.asking = false;
        let error = match answer {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let autopsy = match self.cell.take() {
            Some(cell) => tokio::time::timeout(DEATH, cell.destroy())
                .await
                .unwrap_or_default(),
            None => Autopsy::default(),
        };
        Err(match error {
            SandboxError::Lost { cause } if autopsy.backend_gone => self.pool.backend_gone(cause),
            SandboxError::Lost { .. } if autopsy.oom_kills > 0 => SandboxError::OutOfMemory {
                oom_kills: autopsy.oom_kills,
            },
            SandboxError::Lost { cause } => SandboxError::Lost {
                cause: match autopsy.signal {
                    Some(signal) => {
                        format!("{cause}; its supervisor was ended by signal {signal}")
                    }
                    None => cause,
                },
            },
            other => other,
        })
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.pool.returned();
    }
}

pub(crate) fn unexpected(reply: &Reply) -> SandboxError {
    match reply {
        Reply::Refused { message } => SandboxError::Refused {
            message: message.clone(),
        },
        Reply::NotStarted { message } => SandboxError::NotStarted {
            message: message.clone(),
        },
        _ => SandboxError::Protocol(std::io::Error::other("an answer to another question")),
    }
}

/// One request and its reply, within a time.
pub(crate) async fn exchange(
    cell: &mut dyn Cell,
    request: &Request,
    body: &[u8],
    max_body: u64,
    patience: Duration,
) -> Result<(Reply, Vec<u8>), SandboxError> {
    let talk = async {
        let mut bytes = frame::encode(request, body.len())?;
        let stream = cell.stream().ok_or_else(|| SandboxError::Lost {
            cause: "no connection".into(),
        })?;
        if body.len() <= 64 << 10 {
            bytes.extend_from_slice(body);
            stream.write_all(&bytes).await.map_err(lost)?;
        } else {
            stream.write_all(&bytes).await.map_err(lost)?;
            stream.write_all(body).await.map_err(lost)?;
        }
        receive(cell, max_body).await
    };
    tokio::time::timeout(patience, talk)
        .await
        .unwrap_or(Err(SandboxError::Stuck {
            seconds: patience.as_secs(),
        }))
}

/// The next reply.
pub(crate) async fn receive(
    cell: &mut dyn Cell,
    max_body: u64,
) -> Result<(Reply, Vec<u8>), SandboxError> {
    let stream = cell.stream().ok_or_else(|| SandboxError::Lost {
        cause: "no connection".into(),
    })?;
    let mut prefix = [0; frame::PREFIX];
    stream.read_exact(&mut prefix).await.map_err(lost)?;
    let (head_len, body_len) = frame::lengths(prefix, max_body).map_err(SandboxError::Protocol)?;
    let mut head = vec![0; head_len];
    stream.read_exact(&mut head).await.map_err(lost)?;
    let mut body = vec![0; body_len];
    stream.read_exact(&mut body).await.map_err(lost)?;
    let reply = frame::decode(&head).map_err(SandboxError::Protocol)?;
    Ok((reply, body))
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the shape that map_err calls"
)]
fn lost(error: std::io::Error) -> SandboxError {
    SandboxError::Lost {
        cause: match error.kind() {
            std::io::ErrorKind::UnexpectedEof
            | std::io::ErrorKind::BrokenPipe
            | std::io::ErrorKind::ConnectionReset => "its connection closed".into(),
            _ => error.to_string(),
        },
    }
}
