//! Saved states: layers on disk that hold what a sandbox wrote, to go on from days later or many times.

use std::sync::Arc;

use crate::layers::{Content, Layer, Origin};
use crate::sandbox::Contents;
use crate::{Pool, Sandbox, SandboxError};

/// The files of a sandbox at one moment, on disk. While it is held it cannot be removed. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Saved {
    layer: Arc<Layer>,
}

impl Saved {
    /// What [`Pool::saved`] finds it by, in any process with the same cache.
    pub fn id(&self) -> &str {
        &self.layer.key
    }

    /// How many layers it consists of.
    pub fn depth(&self) -> usize {
        self.layer.chain.len()
    }
}

impl Sandbox {
    /// Stores the files as they are, on top of what the sandbox began with: only what differs is written. Between calls
    /// no process lives, so that a database and its log belong together. The sandbox goes on as it is.
    pub async fn save(&mut self) -> Result<Saved, SandboxError> {
        let layers = self.pool().layers()?.clone();
        let parents = self.chain();
        let delta = self.delta().await?;
        let content = Content {
            entries: &delta.entries,
            removed: &delta.removed,
            body: &delta.body,
        };
        let key = layers.key(&content, &parents)?;
        let layer = layers.write(key, Origin::Saved, parents, delta).await?;
        Ok(Saved { layer })
    }

    /// Goes on from a saved state, in a fresh sandbox.
    pub async fn restore_saved(&mut self, saved: &Saved) -> Result<(), SandboxError> {
        self.swap(Contents::Layer(Arc::clone(&saved.layer))).await
    }
}

impl Pool {
    /// Finds a saved state.
    pub fn saved(&self, id: &str) -> Result<Saved, SandboxError> {
        Ok(Saved {
            layer: self.layers()?.load(id)?,
        })
    }

    /// Hands out a fresh sandbox in a saved state. Nothing is copied: it costs the same whatever is in it.
    pub async fn lease_saved(&self, saved: &Saved) -> Result<Sandbox, SandboxError> {
        self.lease_contents(Contents::Layer(Arc::clone(&saved.layer)))
            .await
    }

    /// Hands out several sandboxes in one saved state.
    pub async fn branches(&self, saved: &Saved, n: usize) -> Result<Vec<Sandbox>, SandboxError> {
        let mut branches = Vec::with_capacity(n);
        for _ in 0..n {
            branches.push(self.lease_saved(saved).await?);
        }
        Ok(branches)
    }

    /// Removes a saved state that nobody holds and no other stands on.
    pub fn remove_saved(&self, id: &str) -> Result<(), SandboxError> {
        self.layers()?.remove(id)
    }
}
