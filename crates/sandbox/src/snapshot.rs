//! The files of a sandbox at one moment, to be restored, branched from, or stored.

use std::io;
use std::sync::Arc;

use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::{Entry, Kind};

use crate::SandboxError;
use crate::image::tree::Writer;

/// Every file, directory and link under /work, /tmp and /dev/shm, and what differs from the image where the root is a
/// sandbox's own. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub(crate) entries: Arc<Vec<Entry>>,
    /// What of the image is no longer there.
    pub(crate) removed: Arc<Vec<String>>,
    pub(crate) body: Arc<Vec<u8>>,
}

/// What is stored: with the paths removed only where there are any.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Stored {
    Files(Vec<Entry>),
    WithRemoved(Vec<Entry>, Vec<String>),
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
        for path in self.removed.iter() {
            hasher.update(b"removed").update(path.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Puts the root's changes onto a tree: those outside /work, /tmp and /dev/shm, and of what every sandbox is given.
    pub(crate) fn onto(&self, tree: &mut Writer) -> io::Result<()> {
        let given = [
            "/etc/passwd",
            "/etc/group",
            "/etc/hostname",
            "/etc/hosts",
            "/etc/resolv.conf",
            "/etc/nsswitch.conf",
        ];
        let of_root = |path: &str| {
            path.starts_with('/')
                && !path.starts_with("/tmp/")
                && !path.starts_with("/dev/shm/")
                && !given.contains(&path)
        };
        for path in self.removed.iter().filter(|p| of_root(p)) {
            tree.remove(path.trim_start_matches('/').as_bytes())?;
        }
        for entry in self.entries.iter().filter(|e| of_root(&e.path)) {
            let name = entry.path.trim_start_matches('/').as_bytes();
            let mut content = entry.content.of(&self.body).unwrap_or_default();
            match entry.kind {
                Kind::Dir => tree.dir(name, entry.mode, entry.mtime_ns)?,
                Kind::File => tree.file(name, entry.mode, entry.mtime_ns, &mut content)?,
                Kind::Link => tree.link(name, content, entry.mtime_ns)?,
                Kind::Other => {}
            }
        }
        Ok(())
    }

    /// Bytes to store; [`Snapshot::from_bytes`] reads them.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SandboxError> {
        let mut bytes = if self.removed.is_empty() {
            frame::encode(&*self.entries, self.body.len())?
        } else {
            frame::encode(&(&*self.entries, &*self.removed), self.body.len())?
        };
        bytes.extend_from_slice(&self.body);
        Ok(bytes)
    }

    /// Reads what [`Snapshot::to_bytes`] made.
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Self, SandboxError> {
        let wrong = |what: String| SandboxError::NoSnapshot(what);
        let (stored, body): (Stored, Vec<u8>) = frame::read(&mut bytes, u64::from(u32::MAX))
            .map_err(|e| wrong(e.to_string()))?
            .ok_or_else(|| wrong("empty".into()))?;
        let (entries, removed) = match stored {
            Stored::Files(entries) => (entries, Vec::new()),
            Stored::WithRemoved(entries, removed) => (entries, removed),
        };
        if let Some(entry) = entries.iter().find(|e| e.content.of(&body).is_none()) {
            return Err(wrong(format!("{}: content is missing", entry.path)));
        }
        Ok(Self {
            entries: Arc::new(entries),
            removed: Arc::new(removed),
            body: Arc::new(body),
        })
    }
}
