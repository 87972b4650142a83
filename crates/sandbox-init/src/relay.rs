//! The network of a sandbox whose listening socket cannot be handed out: PID 1 takes the connections that tools make and
//! carries them to the program outside, as streams of [`drillyard_sandbox_init::mux`].
//!
//! It is looked after wherever a call waits, and never waits itself. Everything it holds is bounded: connections by their
//! number, what comes for each by its window, what goes out by [`ENOUGH`].

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use drillyard_sandbox_init::control::Streams;
use drillyard_sandbox_init::mux::{CHUNK, Decoder, Flow, Frame, Piece};

use crate::sys;

/// With so many bytes waiting to go out, tools' connections are neither taken nor read.
const ENOUGH: usize = 64 << 10;
/// Read from the program at once.
const INPUT: usize = 64 << 10;
/// How long to leave the listening socket alone where a connection could not be taken.
const PAUSE: Duration = Duration::from_millis(20);
/// Connections left waiting by dead tools: more than the kernel lets wait.
const WAITING: usize = 4096;

/// Tools' connections during a call.
pub struct Relay {
    listener: OwnedFd,
    requests: OwnedFd,
    replies: OwnedFd,
    limits: Streams,
    /// Those that were served last come last.
    connections: Vec<Connection>,
    /// The next stream's number; nothing once all were used.
    next: Option<u32>,
    decoder: Decoder,
    /// On its way to the program.
    out: Vec<u8>,
    /// The last connection could not be taken, for want of descriptors most likely.
    pausing: bool,
    carried: Carried,
    buffer: Box<[u8]>,
}

/// Bytes that PID 1 itself read and wrote for the current call.
#[derive(Debug, Default, Clone, Copy)]
pub struct Carried {
    pub read: u64,
    pub written: u64,
}

struct Connection {
    id: u32,
    socket: OwnedFd,
    flow: Flow,
    /// The tool was told that no more bytes come.
    shut: bool,
}

impl Relay {
    /// Takes a listening socket, and both ends of the conversation with the program.
    pub fn new(
        listener: OwnedFd,
        requests: OwnedFd,
        replies: OwnedFd,
        limits: Streams,
    ) -> io::Result<Self> {
        sys::set_nonblocking(listener.as_raw_fd())?;
        Ok(Self {
            listener,
            requests,
            replies,
            limits,
            connections: Vec::new(),
            next: Some(0),
            decoder: Decoder::default(),
            out: Vec::new(),
            pausing: false,
            carried: Carried::default(),
            buffer: vec![0; INPUT].into(),
        })
    }

    /// To be called when a call begins.
    pub fn begin(&mut self) {
        self.carried = Carried::default();
        // It is open: that cannot fail.
        let _ = sys::set_nonblocking(self.replies.as_raw_fd());
    }

    /// Adds what it waits for; returns how long that may take, given how long the caller would wait.
    pub fn watch(&self, fds: &mut Vec<libc::pollfd>, longest: Duration) -> Duration {
        let watch = |fd: &OwnedFd, events: i16| libc::pollfd {
            // One without events would still wake us when it hangs up, over and over.
            fd: if events == 0 { -1 } else { fd.as_raw_fd() },
            events,
            revents: 0,
        };
        let on = |events: i16, holds: bool| if holds { events } else { 0 };
        let takes = self.has_room() && !self.pausing;
        fds.extend([
            watch(&self.requests, libc::POLLIN),
            watch(&self.replies, on(libc::POLLOUT, !self.out.is_empty())),
            watch(&self.listener, on(libc::POLLIN, takes)),
        ]);
        fds.extend(self.connections.iter().map(|c| {
            let reads = c.flow.room() > 0 && self.out.len() < ENOUGH;
            let writes = !c.flow.front().is_empty();
            watch(
                &c.socket,
                on(libc::POLLIN, reads) | on(libc::POLLOUT, writes),
            )
        }));
        if self.pausing {
            longest.min(PAUSE)
        } else {
            longest
        }
    }

    /// Does what can be done without waiting, given what [`Relay::watch`] added.
    ///
    /// Fails when the program is gone or speaks nonsense.
    pub fn serve(&mut self, fds: &[libc::pollfd]) -> io::Result<()> {
        let [requests, _, listener, connections @ ..] = fds else {
            return Ok(());
        };
        self.pausing = false;
        if requests.revents != 0 {
            self.receive()?;
        }
        let mut readable = connections
            .iter()
            .map(|fd| fd.revents & !libc::POLLOUT != 0);
        let mut kept = std::mem::take(&mut self.connections);
        kept.retain_mut(|c| self.pump(c, readable.next().unwrap_or(false)));
        self.connections = kept;
        if listener.revents != 0 {
            self.accept();
        }
        // Another one comes first where there is not enough room for all.
        if self.connections.len() > 1 {
            self.connections.rotate_left(1);
        }
        self.send()
    }

    /// Ends every connection and what the program was still to be told of them, when a call's processes are dead. What
    /// has begun to go out goes out.
    pub fn end(&mut self) -> io::Result<Carried> {
        self.connections.clear();
        for _ in 0..WAITING {
            if sys::accept(self.listener.as_raw_fd()).is_err() {
                break;
            }
        }
        sys::set_blocking(self.replies.as_raw_fd())?;
        sys::write_all(self.replies.as_raw_fd(), &self.out)?;
        self.carried.written += self.out.len() as u64;
        self.out = Vec::new();
        Ok(self.carried)
    }

    /// What came of a frame that was not whole when the call ended: the next request is read behind it.
    pub fn take_begun(&mut self) -> Vec<u8> {
        self.decoder.take_begun()
    }

    fn has_room(&self) -> bool {
        self.connections.len() < self.limits.most && self.out.len() < ENOUGH && self.next.is_some()
    }

    /// Takes what the program sent.
    fn receive(&mut self) -> io::Result<()> {
        let n = sys::read(self.requests.as_raw_fd(), &mut self.buffer)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.carried.read += n as u64;
        let mut bytes = &self.buffer[..n];
        while let Some(piece) = self.decoder.next(&mut bytes)? {
            let Piece::Stream(id, frame) = piece else {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            };
            // One that is not there is over.
            if let Some(connection) = self.connections.iter_mut().find(|c| c.id == id) {
                connection.flow.receive(frame)?;
            }
        }
        Ok(())
    }

    /// Moves bytes between a tool and its stream; false once it is over.
    fn pump(&mut self, connection: &mut Connection, readable: bool) -> bool {
        let moved = self.exchange(connection, readable);
        if moved.is_err() {
            // The tool has reset it.
            connection.flow.reset(&mut self.out);
            return false;
        }
        !connection.flow.is_over()
    }

    fn exchange(&mut self, connection: &mut Connection, readable: bool) -> io::Result<()> {
        let Connection {
            socket, flow, shut, ..
        } = connection;
        let socket = socket.as_raw_fd();
        while !flow.front().is_empty() {
            match sys::write(socket, flow.front()) {
                Ok(n) => {
                    self.carried.written += n as u64;
                    flow.pass(n, &mut self.out);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if flow.is_drained() && !std::mem::replace(shut, true) {
            sys::shutdown_write(socket)?;
        }
        let room = flow.room();
        if !readable || room == 0 || self.out.len() >= ENOUGH {
            return Ok(());
        }
        match sys::read(socket, &mut self.buffer[..room.min(CHUNK)]) {
            Ok(0) => flow.end(&mut self.out),
            Ok(n) => {
                self.carried.read += n as u64;
                flow.send(&self.buffer[..n], &mut self.out);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Takes waiting connections, as many as there is room for.
    fn accept(&mut self) {
        while self.has_room() {
            let socket = match sys::accept(self.listener.as_raw_fd()) {
                Ok(socket) => socket,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    self.pausing = error.kind() != io::ErrorKind::WouldBlock;
                    return;
                }
            };
            let Some(id) = self.next else { return };
            self.next = id.checked_add(1);
            let _ = sys::set_nodelay(socket.as_raw_fd());
            Frame::Open.encode(id, &mut self.out);
            let mut connection = Connection {
                id,
                socket,
                flow: Flow::new(id, self.limits.window),
                shut: false,
            };
            // Its first bytes are often there already.
            if self.pump(&mut connection, true) {
                self.connections.push(connection);
            }
        }
    }

    /// Sends what the program takes now.
    fn send(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            match sys::write(self.replies.as_raw_fd(), &self.out) {
                Ok(n) => {
                    self.carried.written += n as u64;
                    self.out.drain(..n);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
