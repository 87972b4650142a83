//! The stream to PID 1 of a `local` sandbox, and its network, which comes along with it.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpListener, UnixStream};

use crate::{NetworkRequest, Proxy, Traffic, client};

/// The stream to PID 1. Where there is a network, a listening socket of the sandbox's own loopback comes with the first
/// bytes of it: whoever connects to that socket is this sandbox.
pub struct Pipe {
    stream: UnixStream,
    /// While the listening socket is still to come.
    proxy: Option<Arc<Proxy>>,
    traffic: Option<Traffic>,
}

impl Pipe {
    pub fn new(socket: OwnedFd, proxy: Option<Arc<Proxy>>) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Self {
            stream: UnixStream::from_std(socket)?,
            proxy,
            traffic: None,
        })
    }

    /// What the call that just ended asked of the network.
    pub async fn traffic(&self) -> Vec<NetworkRequest> {
        match &self.traffic {
            Some(traffic) => traffic.take().await,
            None => Vec::new(),
        }
    }

    /// Closes the network, if there is one, and comes back when it is closed.
    pub async fn close_network(&mut self) {
        if let Some(traffic) = self.traffic.take() {
            traffic.close().await;
        }
    }
}

impl AsyncRead for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(proxy) = self.proxy.clone() else {
            return Pin::new(&mut self.stream).poll_read(cx, buffer);
        };
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            let received = self.stream.try_io(Interest::READABLE, || {
                client::receive_passed(&self.stream, buffer.initialize_unfilled())
            });
            match received {
                Ok((n, passed)) => {
                    buffer.advance(n);
                    self.proxy = None;
                    if let Some(listener) = passed {
                        let listener = std::net::TcpListener::from(listener);
                        listener.set_nonblocking(true)?;
                        self.traffic = Some(proxy.serve(TcpListener::from_std(listener)?));
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
