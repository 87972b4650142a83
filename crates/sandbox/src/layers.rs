//! Layers on disk: states of sandboxes' files that others start from, without a copy.
//!
//! ```text
//! CACHE/layers/<key>/work/        beneath /work, in the form the kernel's overlay reads (whiteouts, opaque directories)
//! CACHE/layers/<key>/root/        beneath the root, where sandboxes have one of their own
//! CACHE/layers/<key>/rest         files of /tmp and /dev/shm, written at each start: see `Snapshot`
//! CACHE/layers/<key>/layer.json   what it is made of, and what it stands on
//! ```
//!
//! A layer of a set-up can be made again and goes, least recently used first, when the cache is full; a saved state stays
//! until it is removed. A layer in use, or that another stands on, stays. In use means a shared lock on its record.

use std::io;
use std::sync::Arc;

use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use drillyard_sandbox_init::control::Lower;
use drillyard_sandbox_init::init::{Entry, Kind};

use crate::image::tree::{self, Caps, Seen, What, Writer};
use crate::image::{lock_alone, sweep, temporary_name};
use crate::{SandboxError, Snapshot};

const VERSION: u32 = 1;
/// More layers on one another are made one.
const MAX_DEPTH: usize = 8;

/// What a layer was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    Setup,
    Saved,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    origin: Origin,
    /// The image it was made in.
    image: String,
    /// Keys of the layers it stands on, the topmost first.
    parents: Vec<String>,
    /// Whether it has files of the root.
    root: bool,
    bytes: u64,
}

/// A layer with all it stands on, held against removal.
#[derive(Debug)]
pub struct Layer {
    pub key: String,
    pub lower: Lower,
    pub rest: Snapshot,
    /// Keys, the topmost first, this one's included.
    pub chain: Vec<String>,
    _held: Vec<std::fs::File>,
}

/// The layers in a directory.
#[derive(Debug, Clone)]
pub struct Layers {
    dir: Utf8PathBuf,
    image: String,
    /// Whether sandboxes have a root of their own, which layers may change.
    own_root: bool,
    /// Bytes that layers of set-ups may take together.
    cap: u64,
}

/// What a new layer holds.
pub struct Content<'a> {
    pub entries: &'a [Entry],
    pub removed: &'a [String],
    pub body: &'a [u8],
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "an error, as map_err gives it, or a text"
)]
fn no_layer(key: &str, message: impl ToString) -> SandboxError {
    SandboxError::Layer {
        key: key.to_owned(),
        message: message.to_string(),
    }
}

/// Where a path of a sandbox belongs.
enum Place<'a> {
    Work(&'a str),
    Root(&'a str),
    Rest,
    /// Not the sandbox's to change.
    Foreign,
}

fn place(path: &str) -> Place<'_> {
    if let Some(rest) = path.strip_prefix("/work/") {
        Place::Work(rest)
    } else if path.starts_with("/tmp/") || path.starts_with("/dev/shm/") {
        Place::Rest
    } else if let Some(rest) = path.strip_prefix('/') {
        let within = |dir: &str| {
            rest.strip_prefix(dir)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if ["dev", "proc", "work", "tmp", "opt/drillyard"]
            .into_iter()
            .any(within)
        {
            return Place::Foreign;
        }
        Place::Root(rest)
    } else {
        Place::Work(path)
    }
}

/// As PID 1 says it.
fn elsewhere(path: &str) -> SandboxError {
    SandboxError::Refused {
        message: format!("{path}: not a path under /work, /tmp or /dev/shm"),
    }
}

impl Layers {
    /// Opens the directory, which is made if missing, and sweeps what dead programs left half-done.
    pub fn open(
        cache: &Utf8Path,
        image: &str,
        own_root: bool,
        cap: u64,
    ) -> Result<Self, SandboxError> {
        let dir = cache.join("layers");
        fs_err::create_dir_all(&dir)?;
        let dir = dir.canonicalize_utf8()?;
        let only_owner = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs_err::set_permissions(&dir, only_owner)?;
        sweep(&dir)?;
        Ok(Self {
            dir,
            image: image.to_owned(),
            own_root,
            cap,
        })
    }

    pub fn dir(&self) -> &Utf8Path {
        &self.dir
    }

    /// Where the tool versions of the image are kept.
    pub fn tools(&self) -> Utf8PathBuf {
        self.dir
            .with_file_name(format!("tools-{}.json", self.image))
    }

    fn record(&self, key: &str) -> Result<Record, SandboxError> {
        let whole = key.len() == 64 && key.bytes().all(|b| b.is_ascii_hexdigit());
        let path = self.dir.join(key).join("layer.json");
        if !whole || !path.exists() {
            return Err(no_layer(key, format!("there is none in {}", self.dir)));
        }
        let record: Record = serde_json::from_slice(&fs_err::read(&path)?)
            .map_err(|e| no_layer(key, format!("layer.json: {e}")))?;
        if record.version != VERSION {
            return Err(no_layer(
                key,
                format!(
                    "it is of version {}; this program reads {VERSION}",
                    record.version
                ),
            ));
        }
        Ok(record)
    }

    /// Gets a layer; nothing if it is not there.
    pub fn get(&self, key: &str) -> Result<Option<Arc<Layer>>, SandboxError> {
        let dir = self.dir.join(key);
        if !dir.is_dir() {
            return Ok(None);
        }
        match self.load(key) {
            // Another program let it go in this moment.
            Err(_) if !dir.is_dir() => Ok(None),
            layer => layer.map(Some),
        }
    }

    /// Gets a layer that must be there.
    pub fn load(&self, key: &str) -> Result<Arc<Layer>, SandboxError> {
        let record = self.record(key)?;
        let mut chain = vec![key.to_owned()];
        chain.extend(record.parents);
        let mut lower = Lower::default();
        let mut held = Vec::new();
        for key in &chain {
            let record = self.record(key)?;
            let file = fs_err::File::open(self.dir.join(key).join("layer.json"))?;
            flock(&file, FlockOperation::NonBlockingLockShared)
                .map_err(|_| no_layer(key, "it is being removed"))?;
            if !self.dir.join(key).is_dir() {
                return Err(no_layer(key, "it was removed"));
            }
            // When it was last used.
            let _ = file.file().set_modified(std::time::SystemTime::now());
            held.push(file.into());
            if record.root && record.image != self.image {
                return Err(no_layer(
                    key,
                    format!(
                        "it holds changes to the image {}; this pool's image is {}",
                        record.image, self.image
                    ),
                ));
            }
            lower.work.push(format!("{key}/work"));
            if record.root {
                lower.root.push(format!("{key}/root"));
            }
        }
        let rest = Snapshot::from_bytes(&fs_err::read(self.dir.join(key).join("rest"))?)?;
        Ok(Arc::new(Layer {
            key: key.to_owned(),
            lower,
            rest,
            chain,
            _held: held,
        }))
    }

    /// The key of a saved state: what is in it and what it stands on.
    pub fn key(&self, content: &Content<'_>, parents: &[String]) -> Result<String, SandboxError> {
        let mut hasher = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(b"saved 1");
        part(self.image.as_bytes());
        for parent in parents {
            part(parent.as_bytes());
        }
        part(b"");
        for entry in content.entries {
            part(entry.path.as_bytes());
            part(&[entry.kind as u8]);
            part(&entry.mode.to_le_bytes());
            part(&entry.mtime_ns.unwrap_or(0).to_le_bytes());
            part(bytes_of(entry, content.body)?);
        }
        for path in content.removed {
            part(path.as_bytes());
        }
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// Like [`Layers::put`], off the async threads.
    pub async fn write(
        &self,
        key: String,
        origin: Origin,
        parents: Vec<String>,
        entries: Vec<Entry>,
        removed: Vec<String>,
        body: Vec<u8>,
    ) -> Result<Arc<Layer>, SandboxError> {
        let layers = self.clone();
        let write = move || {
            let content = Content {
                entries: &entries,
                removed: &removed,
                body: &body,
            };
            layers.flatten(layers.put(&key, origin, &parents, &content)?)
        };
        tokio::task::spawn_blocking(write)
            .await
            .map_err(|_| no_layer("", "the thread that wrote it has ended"))?
    }

    /// Writes a layer, unless it is there, and gets it.
    pub fn put(
        &self,
        key: &str,
        origin: Origin,
        parents: &[String],
        content: &Content<'_>,
    ) -> Result<Arc<Layer>, SandboxError> {
        if let Some(there) = self.get(key)? {
            return Ok(there);
        }
        let new = New::in_dir(&self.dir)?;
        let mut work = new.tree("work")?;
        let mut root = new.tree("root")?;
        let mut has_root = false;
        let mut rest = Vec::new();
        let mut rest_body = Vec::new();
        let failed = |e: io::Error| no_layer(key, e);
        let (mut dirs, mut bytes) = (std::collections::BTreeSet::new(), 0);
        for entry in content.entries {
            let content = bytes_of(entry, content.body)?;
            bytes += content.len() as u64;
            let (tree, name) = match place(&entry.path) {
                Place::Work(name) => (&mut work, name),
                Place::Root(name) if self.own_root => {
                    has_root = true;
                    (&mut root, name)
                }
                Place::Rest => {
                    let mut entry = entry.clone();
                    entry.content = drillyard_sandbox_init::frame::put(&mut rest_body, content);
                    rest.push(entry);
                    continue;
                }
                Place::Root(_) | Place::Foreign => return Err(elsewhere(&entry.path)),
            };
            let name = name.as_bytes();
            let time = entry.mtime_ns;
            match entry.kind {
                Kind::Dir => {
                    dirs.insert(entry.path.as_str());
                    tree.dir(name, entry.mode, time).map_err(failed)?;
                }
                Kind::File => {
                    let mut content = content;
                    tree.file(name, entry.mode, time, &mut content)
                        .map_err(failed)?;
                }
                Kind::Link => tree.link(name, content, time).map_err(failed)?,
                Kind::Other => {}
            }
        }
        for path in content.removed {
            let (tree, name) = match place(path) {
                Place::Work(name) => (&mut work, name),
                Place::Root(name) if self.own_root => {
                    has_root = true;
                    (&mut root, name)
                }
                Place::Rest => continue,
                Place::Root(_) | Place::Foreign => return Err(elsewhere(path)),
            };
            if dirs.contains(path.as_str()) {
                tree.opaque(name.as_bytes()).map_err(failed)?;
            } else {
                tree.whiteout(name.as_bytes()).map_err(failed)?;
            }
        }
        work.finish().map_err(failed)?;
        root.finish().map_err(failed)?;
        let rest = Snapshot {
            entries: Arc::new(rest),
            removed: Arc::default(),
            body: Arc::new(rest_body),
        };
        let record = Record {
            version: VERSION,
            origin,
            image: self.image.clone(),
            parents: parents.to_vec(),
            root: has_root,
            bytes,
        };
        let layer = self.settle(&new, key, &record, &rest)?;
        if origin == Origin::Setup {
            self.shrink()?;
        }
        Ok(layer)
    }

    /// Gives a written layer its place.
    fn settle(
        &self,
        new: &New,
        key: &str,
        record: &Record,
        rest: &Snapshot,
    ) -> Result<Arc<Layer>, SandboxError> {
        fs_err::write(new.0.join("rest"), rest.to_bytes()?)?;
        let text = serde_json::to_vec_pretty(record).map_err(io::Error::from)?;
        fs_err::write(new.0.join("layer.json"), text)?;
        rustix::fs::syncfs(tree::open_root(&new.0)?).map_err(io::Error::from)?;
        match rustix::fs::rename(new.0.as_str(), self.dir.join(key).as_str()) {
            Ok(()) => rustix::fs::fsync(tree::open_root(&self.dir)?).map_err(io::Error::from)?,
            // Another program was faster.
            Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(no_layer(key, io::Error::from(error))),
        }
        self.load(key)
    }

    /// Where a new layer on these would stand too high, makes them and it one, which stands on nothing.
    pub fn flatten(&self, layer: Arc<Layer>) -> Result<Arc<Layer>, SandboxError> {
        if layer.chain.len() <= MAX_DEPTH {
            return Ok(layer);
        }
        let mut hasher = blake3::Hasher::new();
        for key in &layer.chain {
            hasher.update(key.as_bytes());
        }
        let key = hasher.finalize().to_hex().to_string();
        if let Some(there) = self.get(&key)? {
            return Ok(there);
        }
        let new = New::in_dir(&self.dir)?;
        let mut bytes = 0;
        for (part, names) in [("work", &layer.lower.work), ("root", &layer.lower.root)] {
            let mut tree = new.tree(part)?;
            for name in names.iter().rev() {
                let from = tree::open_root(&self.dir.join(name))?;
                bytes += merge(&from, &mut tree, part == "work").map_err(|e| no_layer(&key, e))?;
            }
            tree.finish().map_err(|e| no_layer(&key, e))?;
        }
        let record = Record {
            version: VERSION,
            origin: Origin::Saved,
            image: self.image.clone(),
            parents: Vec::new(),
            root: !layer.lower.root.is_empty(),
            bytes,
        };
        self.settle(&new, &key, &record, &layer.rest)
    }

    /// Removes a layer that is not in use and that no other stands on.
    pub fn remove(&self, key: &str) -> Result<(), SandboxError> {
        self.record(key)?;
        if let Some(child) = self.children(key)?.first() {
            return Err(no_layer(
                key,
                format!("{child} stands on it; remove that first"),
            ));
        }
        self.discard(key)
    }

    fn discard(&self, key: &str) -> Result<(), SandboxError> {
        let lock = fs_err::File::open(self.dir.join(key).join("layer.json"))?;
        if !lock_alone(lock.file()) {
            return Err(no_layer(key, "it is in use"));
        }
        let old = self.dir.join(temporary_name()?);
        fs_err::rename(self.dir.join(key), &old)?;
        remove_tree(&self.dir, &old)
    }

    fn keys(&self) -> Result<Vec<String>, SandboxError> {
        let mut keys = Vec::new();
        for entry in self.dir.read_dir_utf8()? {
            let name = entry?.file_name().to_owned();
            if !name.starts_with('.') {
                keys.push(name);
            }
        }
        Ok(keys)
    }

    fn children(&self, key: &str) -> Result<Vec<String>, SandboxError> {
        let mut children = self.keys()?;
        children.retain(|k| {
            self.record(k)
                .is_ok_and(|r| r.parents.iter().any(|p| p == key))
        });
        Ok(children)
    }

    /// Lets the least recently used layers of set-ups go until they fit the cap.
    fn shrink(&self) -> Result<(), SandboxError> {
        let mut setups = Vec::new();
        let mut total = 0;
        for key in self.keys()? {
            // Another program may have removed it.
            let Ok(record) = self.record(&key) else {
                continue;
            };
            if record.origin == Origin::Setup {
                let used = fs_err::metadata(self.dir.join(&key).join("layer.json"))
                    .and_then(|m| m.modified());
                total += record.bytes;
                setups.push((used.ok(), key, record.bytes));
            }
        }
        setups.sort();
        for (_, key, bytes) in setups {
            if total <= self.cap {
                break;
            }
            if self.children(&key)?.is_empty() && self.discard(&key).is_ok() {
                total -= bytes;
            }
        }
        Ok(())
    }
}

fn bytes_of<'a>(entry: &Entry, body: &'a [u8]) -> Result<&'a [u8], SandboxError> {
    entry
        .content
        .of(body)
        .ok_or_else(|| SandboxError::Protocol(io::Error::other("contents lie outside the message")))
}

/// A directory not yet whole; goes when dropped.
struct New(Utf8PathBuf);

impl New {
    fn in_dir(dir: &Utf8Path) -> Result<Self, SandboxError> {
        let path = dir.join(temporary_name()?);
        fs_err::create_dir(&path)?;
        Ok(Self(path))
    }

    fn tree(&self, name: &str) -> Result<Writer, SandboxError> {
        let dir = self.0.join(name);
        fs_err::create_dir(&dir)?;
        let caps = Caps {
            entries: u64::MAX,
            bytes: u64::MAX,
        };
        Ok(Writer::new(&dir, caps)?.exact())
    }
}

impl Drop for New {
    fn drop(&mut self) {
        if let Some(dir) = self.0.parent()
            && self.0.exists()
        {
            let _ = remove_tree(dir, &self.0);
        }
    }
}

/// Removes a tree whose directories may forbid their owner.
fn remove_tree(dir: &Utf8Path, path: &Utf8Path) -> Result<(), SandboxError> {
    let name = path.file_name().unwrap_or_default();
    Ok(tree::remove_all(
        &tree::open_root(dir)?,
        name.as_bytes(),
        0,
    )?)
}

/// Puts a layer over what a tree holds; its files become further names of the same files. With `bottom` nothing lies
/// below, and marks of what is gone are done with.
fn merge(from: &std::os::fd::OwnedFd, to: &mut Writer, bottom: bool) -> io::Result<u64> {
    let mut bytes = 0;
    tree::walk_layer(from, &mut |seen: &Seen<'_>, opaque, mtime| {
        match &seen.what {
            What::Dir => {
                if opaque {
                    to.remove(seen.path)?;
                }
                to.dir(seen.path, seen.mode, Some(mtime))?;
                if opaque && !bottom {
                    to.opaque(seen.path)?;
                }
            }
            What::File {
                dir, name, size, ..
            } => {
                bytes += size;
                to.adopt(seen.path, dir, name)?;
            }
            What::Link(target) => to.link(seen.path, target, Some(mtime))?,
            What::Special if bottom => to.remove(seen.path)?,
            What::Special => to.whiteout(seen.path)?,
        }
        Ok(())
    })?;
    Ok(bytes)
}
