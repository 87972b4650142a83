//! The files of a sandbox at one moment, to be restored, branched from, or stored.

use std::sync::Arc;

use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::{Entry, Kind};

use crate::SandboxError;

/// Every file, directory and link under /work, /tmp and /dev/shm. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub(crate) entries: Arc<Vec<Entry>>,
    pub(crate) body: Arc<Vec<u8>>,
}

impl Snapshot {
    /// Bytes of all contents together.
    pub fn content_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    /// Paths and contents of the regular files, sorted by path.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.entries
            .iter()
            .filter(|e| e.kind == Kind::File)
            .filter_map(|e| Some((e.path.as_str(), e.content.of(&self.body)?)))
    }

    /// BLAKE3, in hexadecimal, over paths, kinds, modes and contents; times do not count.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for entry in self.entries.iter() {
            let content = entry.content.of(&self.body).unwrap_or_default();
            let kind: &[u8] = match entry.kind {
                Kind::File => b"file",
                Kind::Dir => b"dir",
                Kind::Link => b"link",
                Kind::Other => b"other",
            };
            for part in [
                entry.path.as_bytes(),
                kind,
                &entry.mode.to_le_bytes(),
                content,
            ] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Bytes to store; [`Snapshot::from_bytes`] reads them.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SandboxError> {
        let mut bytes = frame::encode(&*self.entries, self.body.len())?;
        bytes.extend_from_slice(&self.body);
        Ok(bytes)
    }

    /// Reads what [`Snapshot::to_bytes`] made.
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Self, SandboxError> {
        let wrong = |what: String| SandboxError::NoSnapshot(what);
        let (entries, body): (Vec<Entry>, Vec<u8>) = frame::read(&mut bytes, u64::from(u32::MAX))
            .map_err(|e| wrong(e.to_string()))?
            .ok_or_else(|| wrong("empty".into()))?;
        if let Some(entry) = entries.iter().find(|e| e.content.of(&body).is_none()) {
            return Err(wrong(format!("{}: content is missing", entry.path)));
        }
        Ok(Self {
            entries: Arc::new(entries),
            body: Arc::new(body),
        })
    }
}
