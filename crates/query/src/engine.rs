//! Where queries run: a runtime of their own.
//!
//! Planning nested views recurses deeply, deeper than the two megabytes of stack that a runtime's worker has by default; and queries
//! keep processors busy for long, which would starve whatever else the caller's runtime serves.

use std::future::Future;

use tokio::runtime::{Builder, Runtime};

use crate::error::{ErrorKind, QueryError};

const STACK_BYTES: usize = 16 * 1024 * 1024;

pub(crate) struct Engine {
    // Taken out only when dropped, because a runtime must not wait for its tasks inside another one.
    runtime: Option<Runtime>,
}

impl Engine {
    pub(crate) fn start(threads: usize) -> Result<Self, QueryError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .thread_stack_size(STACK_BYTES)
            .thread_name("drillyard-query")
            .enable_all()
            .build()
            .map_err(|e| {
                QueryError::new(
                    ErrorKind::Environment,
                    "",
                    format!("could not start query threads: {e}"),
                )
            })?;
        Ok(Self {
            runtime: Some(runtime),
        })
    }

    /// Runs a future on the query threads. Works under any executor.
    pub(crate) async fn run<F>(&self, future: F) -> Result<F::Output, QueryError>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let stopped = |why: String| QueryError::new(ErrorKind::Environment, "", why);
        let Some(runtime) = &self.runtime else {
            return Err(stopped("the query threads have stopped".to_owned()));
        };
        runtime
            .spawn(future)
            .await
            .map_err(|e| stopped(format!("a query thread stopped: {e}")))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
