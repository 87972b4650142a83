//! What a kind of sandbox must bring: a place where PID 1 runs, and a byte stream to it.

use std::future::Future;
use std::pin::Pin;

use drillyard_sandbox_init::control::Lower;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{ImageReport, LimitsReport, NetworkRequest, SandboxError};

/// A future that can be kept in a trait object.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A kind of sandbox.
pub trait Backend: Send + Sync {
    /// Its name in configuration and records.
    fn name(&self) -> &'static str;
    /// Which limits hold.
    fn limits(&self) -> &LimitsReport;
    /// Which root file system is used.
    fn image(&self) -> &ImageReport;
    /// Makes a sandbox; its PID 1 says [`drillyard_sandbox_init::init::Reply::Ready`] on the stream when it is set up.
    fn create(&self) -> Boxed<'_, Result<Box<dyn Cell>, SandboxError>>;
    /// Whether its sandboxes can start on read-only layers.
    fn has_layers(&self) -> bool {
        false
    }
    /// Makes a sandbox whose files begin with read-only layers. A backend without them keeps this refusal.
    fn create_on(&self, lower: Lower) -> Boxed<'_, Result<Box<dyn Cell>, SandboxError>> {
        if lower == Lower::default() {
            return self.create();
        }
        Box::pin(async {
            Err(SandboxError::Config {
                field: "backend",
                message: format!("{} sandboxes cannot start on layers", self.name()),
            })
        })
    }
    /// Memory of all its sandboxes together, measured now; nothing where that cannot be told.
    fn memory_bytes(&self) -> Boxed<'_, Option<u64>> {
        Box::pin(std::future::ready(None))
    }
    /// The error of a sandbox whose [`Autopsy`] says that the backend is gone, given how the sandbox's end was noticed.
    fn gone(&self, _cause: String) -> SandboxError {
        SandboxError::HelperGone
    }
}

/// One sandbox, as its backend knows it. Dropping it kills it without waiting.
pub trait Cell: Send + Sync {
    /// The stream to PID 1, unless it is lost.
    fn stream(&mut self) -> Option<&mut dyn Stream>;
    /// Gives it twice its memory, for a last service: copying its files out when they and what else it holds leave no
    /// room for that.
    fn relax(&mut self) -> Boxed<'_, ()> {
        Box::pin(std::future::ready(()))
    }
    /// To be asked when a call has ended: what it asked of the network. Nothing where there is none.
    fn traffic(&mut self) -> Boxed<'_, Vec<NetworkRequest>> {
        Box::pin(async { Vec::new() })
    }
    /// Kills every process and takes away what the sandbox held; comes back when it is gone.
    fn destroy(self: Box<Self>) -> Boxed<'static, Autopsy>;
}

/// What is known of an ended sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Autopsy {
    /// The signal that ended PID 1.
    pub signal: Option<i32>,
    /// Processes killed for want of memory over the sandbox's life.
    pub oom_kills: u64,
    /// What made the sandbox, the helper or a container engine, is gone too.
    pub backend_gone: bool,
}
