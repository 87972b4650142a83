//! The stream to PID 1 of a container whose tools have a network, and their connections, which come along with it.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::{mpsc, oneshot};

use drillyard_sandbox_init::control::Streams;
use drillyard_sandbox_init::mux::{CHUNK, Decoder, Flow, Frame, Piece};

use crate::Stream;

/// With so many bytes waiting to go to PID 1, no more are taken from the proxy.
const ENOUGH: usize = 64 << 10;
/// With so many it is no PID 1 that we know: that one always reads, and is told little but data.
const TOO_MUCH: usize = 1 << 20;
/// Read from PID 1 at once.
const INPUT: usize = 64 << 10;
/// Bytes on their way between here and the proxy, for each connection and direction.
const ON_THE_WAY: usize = 2 * CHUNK;

/// Reads and writes carry requests and replies; whoever waits for a reply also moves the bytes of all connections.
///
/// Nothing that the container sends makes it hold more than [`Streams`] allows: what goes beyond is an error of the
/// stream.
pub struct Mux<S> {
    inner: S,
    limits: Streams,
    decoder: Decoder,
    /// From PID 1.
    input: Box<[u8]>,
    /// What of it was not looked at yet.
    unseen: Range<usize>,
    /// Of a reply, not read yet.
    message: VecDeque<u8>,
    /// To PID 1.
    out: Vec<u8>,
    /// By their number.
    connections: BTreeMap<u32, Connection>,
    /// The number that the next one must at least have.
    next: u32,
    opened: mpsc::Sender<Box<dyn Stream>>,
    /// For bytes between the proxy and `out`.
    chunk: Box<[u8; CHUNK]>,
}

struct Connection {
    flow: Flow,
    io: DuplexStream,
    /// Ends when the proxy has dropped its end.
    held: oneshot::Receiver<Infallible>,
    dropped: bool,
    /// The proxy was told that no more bytes come.
    shut: bool,
}

/// The proxy's end of a connection.
struct End {
    io: DuplexStream,
    _held: oneshot::Sender<Infallible>,
}

impl<S: Stream> Mux<S> {
    /// The limits are those that PID 1 was told. Connections come out of the second part.
    pub fn new(inner: S, limits: Streams) -> (Self, mpsc::Receiver<Box<dyn Stream>>) {
        let (opened, connections) = mpsc::channel(most(limits));
        let mux = Self {
            inner,
            limits,
            decoder: Decoder::default(),
            input: vec![0; INPUT].into(),
            unseen: 0..0,
            message: VecDeque::new(),
            out: Vec::new(),
            connections: BTreeMap::new(),
            next: 0,
            opened,
            chunk: Box::new([0; CHUNK]),
        };
        (mux, connections)
    }

    /// Takes apart what has come, up to the next bytes of a reply.
    fn look(&mut self) -> io::Result<()> {
        let mut bytes = &self.input[self.unseen.clone()];
        while self.message.is_empty()
            && let Some(piece) = self.decoder.next(&mut bytes)?
        {
            match piece {
                Piece::Message(bytes) => {
                    // The call is over, and so are its connections.
                    self.connections.clear();
                    self.message.extend(bytes);
                }
                Piece::Stream(id, Frame::Open) => {
                    if id < self.next {
                        return Err(violation("PID 1 opened a stream anew"));
                    }
                    self.next = id.saturating_add(1);
                    let mut flow = Flow::new(id, self.limits.window);
                    let (io, theirs) = tokio::io::duplex(ON_THE_WAY);
                    let (hold, held) = oneshot::channel();
                    let end = Box::new(End {
                        io: theirs,
                        _held: hold,
                    });
                    if self.connections.len() >= most(self.limits)
                        || self.opened.try_send(end).is_err()
                    {
                        flow.reset(&mut self.out);
                        continue;
                    }
                    let connection = Connection {
                        flow,
                        io,
                        held,
                        dropped: false,
                        shut: false,
                    };
                    self.connections.insert(id, connection);
                }
                Piece::Stream(id, frame) => {
                    // One that is not there is over.
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.flow.receive(frame)?;
                        if connection.flow.is_over() {
                            self.connections.remove(&id);
                        }
                    }
                }
            }
        }
        self.unseen.start = self.unseen.end - bytes.len();
        Ok(())
    }

    /// Moves bytes of connections until there is nothing to move, and sends what goes to PID 1.
    fn carry(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        loop {
            let (out, chunk) = (&mut self.out, &mut self.chunk[..]);
            self.connections.retain(|_, c| c.pump(cx, chunk, out));
            let held_up = self.out.len() >= ENOUGH;
            let sent = self.send(cx)?;
            if self.out.len() > TOO_MUCH {
                return Err(violation("PID 1 does not read what it is sent"));
            }
            if !(held_up && sent) {
                return Ok(());
            }
        }
    }

    /// Sends what is taken now; whether anything was.
    fn send(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let mut sent = false;
        while !self.out.is_empty() {
            match Pin::new(&mut self.inner).poll_write(cx, &self.out) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(n)) => {
                    self.out.drain(..n);
                    sent = true;
                }
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => break,
            }
        }
        Ok(sent)
    }
}

/// Most connections here: as many as PID 1 has, and as many that it is done with and the proxy is not.
fn most(limits: Streams) -> usize {
    2 * limits.most
}

fn violation(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Connection {
    /// Moves bytes between the proxy and the stream; false once it is over.
    fn pump(&mut self, cx: &mut Context<'_>, chunk: &mut [u8], out: &mut Vec<u8>) -> bool {
        let Self { flow, io, held, .. } = self;
        if flow.is_over() {
            return false;
        }
        while !flow.front().is_empty() {
            match Pin::new(&mut *io).poll_write(cx, flow.front()) {
                Poll::Ready(Ok(n)) => flow.pass(n, out),
                // Nobody reads it any more.
                Poll::Ready(Err(_)) => flow.discard(),
                Poll::Pending => break,
            }
        }
        if flow.is_drained() && !std::mem::replace(&mut self.shut, true) {
            // Of a stream in memory; that is done at once.
            let _ = Pin::new(&mut *io).poll_shutdown(cx);
        }
        while flow.room() > 0 && out.len() < ENOUGH {
            let mut buffer = ReadBuf::new(&mut chunk[..flow.room()]);
            match Pin::new(&mut *io).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    flow.send(buffer.filled(), out);
                }
                Poll::Ready(_) => flow.end(out),
                Poll::Pending => break,
            }
        }
        if !self.dropped {
            self.dropped = Pin::new(held).poll(cx).is_ready();
        }
        if self.dropped && flow.has_ended() {
            flow.reset(out);
        }
        !flow.is_over()
    }
}

impl<S: Stream> AsyncRead for Mux<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            this.look()?;
            if !this.message.is_empty() {
                let (bytes, _) = this.message.as_slices();
                let n = bytes.len().min(buffer.remaining());
                buffer.put_slice(&bytes[..n]);
                this.message.drain(..n);
                return Poll::Ready(Ok(()));
            }
            this.carry(cx)?;
            let mut input = ReadBuf::new(&mut this.input);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut input))?;
            this.unseen = 0..input.filled().len();
            if this.unseen.is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: Stream> AsyncWrite for Mux<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Behind what the last call's connections had still to send: frames go out whole.
        self.send(cx)?;
        if !self.out.is_empty() {
            return Poll::Pending;
        }
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

impl AsyncRead for End {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl AsyncWrite for End {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
