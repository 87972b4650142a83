//! A container's standard input and output as one byte stream.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bollard::container::{AttachContainerResults, LogOutput};
use bytes::{Buf, Bytes};
use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Most that is kept of what a container says beside the stream.
const NOISE: usize = 4096;

type Output = Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>;

/// Reads take standard output out of the engine's multiplexed stream; writes go to standard input.
pub struct Attached {
    output: Output,
    input: Pin<Box<dyn AsyncWrite + Send>>,
    left: Bytes,
    noise: Vec<u8>,
}

impl Attached {
    pub fn new(attached: AttachContainerResults) -> Self {
        Self {
            output: attached.output,
            input: attached.input,
            left: Bytes::new(),
            noise: Vec::new(),
        }
    }

    /// What came on standard error: a runtime's complaint that it could not start the program.
    pub fn noise(&self) -> String {
        String::from_utf8_lossy(&self.noise).trim().to_owned()
    }
}

impl AsyncRead for Attached {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Who reads waits for an answer: the question must be on its way, which TLS does not see to by itself.
        if let Poll::Ready(Err(error)) = self.input.as_mut().poll_flush(cx) {
            return Poll::Ready(Err(error));
        }
        while self.left.is_empty() {
            match ready!(self.output.as_mut().poll_next(cx)) {
                None => return Poll::Ready(Ok(())),
                Some(Ok(LogOutput::StdOut { message })) => self.left = message,
                Some(Ok(other)) => {
                    let message = other.into_bytes();
                    let room = NOISE.saturating_sub(self.noise.len());
                    self.noise
                        .extend_from_slice(&message[..message.len().min(room)]);
                }
                Some(Err(error)) => {
                    // However the connection broke, it is gone.
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionReset, error)));
                }
            }
        }
        let n = self.left.len().min(buffer.remaining());
        buffer.put_slice(&self.left[..n]);
        self.left.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Attached {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.input.as_mut().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.input.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.input.as_mut().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn only_standard_output_is_the_stream() {
        let piece = |m: &'static str| Bytes::from_static(m.as_bytes());
        let output = futures::stream::iter([
            Ok(LogOutput::StdOut {
                message: piece("he"),
            }),
            Ok(LogOutput::StdErr {
                message: piece("oops\n"),
            }),
            Ok(LogOutput::StdOut { message: piece("") }),
            Ok(LogOutput::StdOut {
                message: piece("llo"),
            }),
        ]);
        let mut attached = Attached::new(AttachContainerResults {
            output: Box::pin(output),
            input: Box::pin(tokio::io::sink()),
        });
        let mut text = String::new();
        attached.read_to_string(&mut text).await.unwrap();
        assert_eq!(
            (text.as_str(), attached.noise().as_str()),
            ("hello", "oops")
        );
    }
}
