//! A request to stop that everything in flight can see.

use std::sync::Arc;

use tokio::sync::watch;

/// Asks a rollout to stop: no new episode starts, no model turn is waited for, a running tool call is brought to its end. What was
/// left unfinished resumes when the same rollout is started again. Clones share the request.
#[derive(Debug, Clone)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Default for Stop {
    fn default() -> Self {
        Self(Arc::new(watch::channel(false).0))
    }
}

impl Stop {
    /// A request that nobody has made yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the request.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    /// Whether it was made.
    pub fn is_stopped(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until it is made.
    pub async fn stopped(&self) {
        let mut seen = self.0.subscribe();
        // The sender lives as long as self, so this can't fail.
        let _ = seen.wait_for(|stopped| *stopped).await;
    }

    /// Makes the request at the first Ctrl-C, until the guard is dropped. The second one ends the process at once, as an impatient
    /// user means it; a rollout started again resumes after that as well.
    pub fn on_ctrl_c(&self) -> CtrlC {
        let stop = self.clone();
        let task = tokio::spawn(async move {
            if tokio::signal::ctrl_c().await.is_ok() {
                stop.stop();
            }
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(130);
            }
        });
        CtrlC(task)
    }
}

/// Listens for Ctrl-C while it lives.
#[derive(Debug)]
#[must_use = "Ctrl-C is heard only while this lives"]
pub struct CtrlC(tokio::task::JoinHandle<()>);

impl Drop for CtrlC {
    fn drop(&mut self) {
        self.0.abort();
    }
}
