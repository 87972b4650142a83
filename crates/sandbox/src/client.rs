//! The program's side of the control socket: starts the helper, sends orders, and hands its answers to who waits.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use camino::Utf8Path;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, Shutdown,
    SocketFlags, SocketType, recvmsg, send, shutdown, socketpair,
};
use tokio::sync::oneshot;

use drillyard_sandbox_init::control::{Event, LimitRow, Lower, Order, Start};
use drillyard_sandbox_init::frame;

use crate::{Autopsy, SandboxError};

const PACKET: usize = 192 << 10;

/// What the helper said when it was ready.
pub struct Started {
    pub limits: Vec<LimitRow>,
    pub mode: String,
    pub swept: u64,
}

type Made = Result<OwnedFd, SandboxError>;

#[derive(Default)]
struct Waiting {
    made: HashMap<u64, oneshot::Sender<Made>>,
    /// Of every sandbox that lives or whose end nobody has asked about.
    gone: HashMap<u64, Gone>,
    /// Who asked how much memory is used, in order.
    measured: VecDeque<oneshot::Sender<Option<u64>>>,
    /// The helper has ended.
    closed: bool,
}

enum Gone {
    NotYet,
    Asked(oneshot::Sender<Autopsy>),
    Known(Autopsy),
}

struct Shared {
    socket: OwnedFd,
    waiting: Mutex<Waiting>,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, order: &Order) -> io::Result<()> {
        let packet = frame::encode(order, 0)?;
        send(&self.socket, &packet, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// A running helper. Dropping it ends the helper and every sandbox.
pub struct Client {
    shared: Arc<Shared>,
    next: AtomicU64,
    reader: Option<JoinHandle<()>>,
    helper: Child,
}

impl Client {
    /// Starts the helper and waits until it is ready; blocks for some milliseconds.
    pub fn start(
        program: &Utf8Path,
        start: &Start,
        body: &[u8],
    ) -> Result<(Self, Started), SandboxError> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(io::Error::from)?;
        let spawn = |executable: &str, stdin: OwnedFd| {
            Command::new(executable)
                .arg0(crate::host::INIT)
                .arg("helper")
                .env_clear()
                .current_dir("/")
                .stdin(Stdio::from(stdin))
                .stdout(Stdio::null())
                .stderr(Stdio::inherit())
                // Ctrl-C at a terminal is for this program to act on; the helper ends after it, in order.
                .process_group(0)
                .spawn()
        };
        let again = theirs.try_clone()?;
        let mut helper = sealed(program)
            .and_then(|copy| spawn(&format!("/proc/self/fd/{}", copy.as_raw_fd()), theirs))
            .or_else(|_| spawn(program.as_str(), again))
            .map_err(|source| SandboxError::HelperStart {
                path: program.to_owned(),
                source,
            })?;
        match Self::greet(&ours, start, body) {
            Ok(started) => {
                let shared = Arc::new(Shared {
                    socket: ours,
                    waiting: Mutex::default(),
                });
                let reader = std::thread::Builder::new()
                    .name("sandbox-control".into())
                    .spawn({
                        let shared = Arc::clone(&shared);
                        move || read_events(&shared)
                    })?;
                let client = Self {
                    shared,
                    next: AtomicU64::new(0),
                    reader: Some(reader),
                    helper,
                };
                Ok((client, started))
            }
            Err(error) => {
                drop(ours);
                let _ = helper.wait();
                Err(error)
            }
        }
    }

    fn greet(socket: &OwnedFd, start: &Start, body: &[u8]) -> Result<Started, SandboxError> {
        let mut packet = frame::encode(start, body.len())?;
        packet.extend_from_slice(body);
        send(socket, &packet, SendFlags::NOSIGNAL).map_err(io::Error::from)?;
        match receive(socket, &mut vec![0; PACKET])? {
            Some((
                Event::Started {
                    limits,
                    mode,
                    swept,
                },
                _,
            )) => Ok(Started {
                limits,
                mode,
                swept,
            }),
            Some((Event::Unable { step, message, .. }, _)) => Err(SandboxError::Unable {
                step,
                message,
                remedy: crate::host::remedy(),
            }),
            _ => Err(SandboxError::HelperGone),
        }
    }

    /// Has a sandbox made; returns its name and the socket of its PID 1.
    pub async fn create(&self, lower: Lower) -> Result<(u64, OwnedFd), SandboxError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        {
            let mut waiting = self.shared.waiting();
            if waiting.closed {
                return Err(SandboxError::HelperGone);
            }
            waiting.made.insert(id, tell);
        }
        self.shared
            .order(&Order::Create { id, lower })
            .map_err(|_| SandboxError::HelperGone)?;
        let socket = told.await.map_err(|_| SandboxError::HelperGone)??;
        Ok((id, socket))
    }

    /// Memory of all sandboxes together, in bytes.
    pub async fn measure(&self) -> Option<u64> {
        let (tell, told) = oneshot::channel();
        {
            let mut waiting = self.shared.waiting();
            if waiting.closed {
                return None;
            }
            waiting.measured.push_back(tell);
        }
        // Whoever asks at the same time may get the other's answer, which is as good.
        self.shared.order(&Order::Measure).ok()?;
        told.await.ok().flatten()
    }

    /// Doubles a sandbox's memory; comes back when that is done.
    pub async fn relax(&self, id: u64) {
        if self.shared.order(&Order::Relax { id }).is_ok() {
            // Orders are obeyed in order: when this one is answered, the other is done.
            self.measure().await;
        }
    }

    /// Has a sandbox killed without waiting for it.
    pub fn kill(&self, id: u64) {
        // Whoever asks later learns of its end; if nobody does, it is forgotten when it comes.
        let _ = self.shared.order(&Order::Destroy { id });
    }

    /// Says that nobody will ask about a sandbox's end.
    pub fn forget(&self, id: u64) {
        self.shared.waiting().gone.remove(&id);
    }

    /// Has a sandbox killed and comes back when it is gone.
    pub async fn destroy(&self, id: u64) -> Autopsy {
        let told = {
            let mut waiting = self.shared.waiting();
            match waiting.gone.remove(&id) {
                Some(Gone::Known(autopsy)) => return autopsy,
                Some(Gone::NotYet) if !waiting.closed => {
                    let (tell, told) = oneshot::channel();
                    waiting.gone.insert(id, Gone::Asked(tell));
                    told
                }
                _ => return Autopsy::default(),
            }
        };
        self.kill(id);
        told.await.unwrap_or_default()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = shutdown(&self.shared.socket, Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        // The helper kills, reaps and removes; that takes milliseconds. Not waiting for ever is a precaution.
        let patience = Instant::now() + Duration::from_secs(10);
        while matches!(self.helper.try_wait(), Ok(None)) {
            if Instant::now() > patience {
                let _ = self.helper.kill();
                let _ = self.helper.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A copy of a program that nobody can change: whatever runs inside, no way leads from it to the file on the host's
/// disk. Where this can't be had (a host may forbid programs in memory) the file itself is run, which the kernel keeps
/// from being written meanwhile.
fn sealed(program: &Utf8Path) -> io::Result<OwnedFd> {
    let mut from = fs_err::File::open(program)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Older kernels know no flag for programs, and need none.
    let copy = memfd_create(crate::host::INIT, flags | MemfdFlags::EXEC)
        .or_else(|_| memfd_create(crate::host::INIT, flags))?;
    let mut to = std::fs::File::from(copy);
    io::copy(&mut from, &mut to)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&to, seals)?;
    Ok(to.into())
}

fn read_events(shared: &Shared) {
    let mut buffer = vec![0; PACKET];
    while let Ok(Some((event, socket))) = receive(&shared.socket, &mut buffer) {
        let mut waiting = shared.waiting();
        match event {
            Event::Created { id } => {
                if let Some(tell) = waiting.made.remove(&id) {
                    waiting.gone.insert(id, Gone::NotYet);
                    let made = socket.ok_or(SandboxError::HelperGone);
                    if tell.send(made).is_err() {
                        waiting.gone.remove(&id);
                        let _ = shared.order(&Order::Destroy { id });
                    }
                }
            }
            Event::Failed { id, step, message } => {
                if let Some(tell) = waiting.made.remove(&id) {
                    let _ = tell.send(Err(SandboxError::Create { step, message }));
                }
            }
            Event::Gone {
                id,
                signal,
                oom_kills,
            } => {
                let autopsy = Autopsy {
                    signal,
                    oom_kills,
                    backend_gone: false,
                };
                if let Some(gone) = waiting.gone.get_mut(&id) {
                    match std::mem::replace(gone, Gone::Known(autopsy)) {
                        Gone::Asked(tell) => {
                            waiting.gone.remove(&id);
                            let _ = tell.send(autopsy);
                        }
                        Gone::NotYet | Gone::Known(_) => {}
                    }
                }
            }
            Event::Measured { memory_bytes } => {
                if let Some(tell) = waiting.measured.pop_front() {
                    let _ = tell.send(memory_bytes);
                }
            }
            Event::Started { .. } | Event::Unable { .. } => break,
        }
    }
    let mut waiting = shared.waiting();
    waiting.closed = true;
    waiting.made.clear();
    waiting.gone.clear();
    waiting.measured.clear();
}

/// Reads once, with the descriptor that comes along, if one does.
pub fn receive_passed(
    socket: impl AsFd,
    buffer: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let n = loop {
        match recvmsg(
            &socket,
            &mut [IoSliceMut::new(buffer)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Ok(message) => break message.bytes,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    let passed = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((n, passed))
}

fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<(Event, Option<OwnedFd>)>> {
    let (n, passed) = receive_passed(socket, buffer)?;
    if n == 0 {
        return Ok(None);
    }
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let prefix = buffer[..n]
        .first_chunk::<{ frame::PREFIX }>()
        .ok_or_else(short)?;
    let (head, _) = frame::lengths(*prefix, PACKET as u64)?;
    let head = buffer[..n]
        .get(frame::PREFIX..frame::PREFIX + head)
        .ok_or_else(short)?;
    Ok(Some((frame::decode(head)?, passed)))
}
