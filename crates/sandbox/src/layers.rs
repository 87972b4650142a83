//! Layers on disk: states of sandboxes' files that others start from, without a copy.
//!
//! ```text
//! CACHE/layers/<key>/work/        beneath /work, in the form the kernel's overlay reads (whiteouts, opaque directories)
//! CACHE/layers/<key>/root/        beneath the root, where sandboxes have one of their own
//! CACHE/layers/<key>/rest         what is written at each start, a `Snapshot`: files of /tmp and /dev/shm, and directories
//!                                 that forbid their owner, which on the disk he can read
//! CACHE/layers/<key>/layer.json   what it is made of, and what it stands on
//! ```
//!
//! A layer of a set-up can be made again and goes, least recently used first, when the cache is full; a saved state stays
//! until it is removed. A layer in use, or that another stands on, stays. In use means a shared lock on its directory, see
//! `unfinished`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use camino::{Utf8Path, Utf8PathBuf};
use serde::{Deserialize, Serialize};

use drillyard_sandbox_init::control::Lower;
use drillyard_sandbox_init::frame::Span;
use drillyard_sandbox_init::init::{Entry, Kind};

use crate::image::tree::{self, Caps, Seen, What, Writer};
use crate::sandbox::Delta;
use crate::unfinished::{self, Unfinished};
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
    /// What it takes of the disk.
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
    _held: Vec<OwnedFd>,
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

/// What a layer cannot hold is refused; everything else is the disk's fault.
#[expect(
    clippy::needless_pass_by_value,
    reason = "an error, as map_err gives it"
)]
fn failed(key: &str, error: io::Error) -> SandboxError {
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidFilename => SandboxError::Refused {
            message: format!("a layer cannot hold this: {error}"),
        },
        kind => io::Error::new(kind, format!("layer {key}: {error}")).into(),
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
        unfinished::sweep(&dir)?;
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

    /// The image the layers belong to.
    pub fn image(&self) -> &str {
        &self.image
    }

    /// Where the tool versions of the image are kept.
    pub fn tools(&self) -> Utf8PathBuf {
        self.dir
            .with_file_name(format!("tools-{}.json", self.image))
    }

    /// Where a layer lies, whether its record can be read or not.
    fn place(&self, key: &str) -> Result<Utf8PathBuf, SandboxError> {
        let whole = key.len() == 64 && key.bytes().all(|b| b.is_ascii_hexdigit());
        let dir = self.dir.join(key);
        if whole && dir.is_dir() {
            Ok(dir)
        } else {
            Err(no_layer(key, format!("there is none in {}", self.dir)))
        }
    }

    fn record(&self, key: &str) -> Result<Record, SandboxError> {
        let path = self.place(key)?.join("layer.json");
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
            let dir = self.place(key)?;
            let held_now = unfinished::hold(&dir)?;
            held.push(held_now.ok_or_else(|| no_layer(key, "it is being removed"))?);
            let record = self.record(key)?;
            // When it was last used.
            let _ = fs_err::File::open(dir.join("layer.json"))
                .and_then(|f| f.file().set_modified(std::time::SystemTime::now()));
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
        delta: Delta,
    ) -> Result<Arc<Layer>, SandboxError> {
        let layers = self.clone();
        let write = move || {
            let content = Content {
                entries: &delta.entries,
                removed: &delta.removed,
                body: &delta.body,
            };
            layers.put(&key, origin, &parents, &content)
        };
        tokio::task::spawn_blocking(write)
            .await
            .map_err(|_| no_layer("", "the thread that wrote it has ended"))?
    }

    /// Writes a layer, unless it is there, and gets it. Where it would stand too high, it and those below are made one,
    /// which stands on nothing.
    pub fn put(
        &self,
        key: &str,
        origin: Origin,
        parents: &[String],
        content: &Content<'_>,
    ) -> Result<Arc<Layer>, SandboxError> {
        let chain: Vec<&str> = [key]
            .into_iter()
            .chain(parents.iter().map(String::as_str))
            .collect();
        let flat = (chain.len() > MAX_DEPTH).then(|| flat_key(&chain));
        if let Some(there) = self.get(flat.as_deref().unwrap_or(key))? {
            return Ok(there);
        }
        let new = New::in_dir(&self.dir)?;
        let mut work = new.tree("work")?;
        let mut root = new.tree("root")?;
        let mut has_root = false;
        let mut rest = Vec::new();
        let mut rest_body = Vec::new();
        let failed = |e: io::Error| failed(key, e);
        let mut dirs = std::collections::BTreeSet::new();
        for entry in content.entries {
            let content = bytes_of(entry, content.body)?;
            let (tree, name) = match place(&entry.path) {
                Place::Work(name) => (&mut work, name),
                Place::Root(name) if self.own_root => {
                    has_root = true;
                    (&mut root, name)
                }
                Place::Rest => {
                    let content = drillyard_sandbox_init::frame::put(&mut rest_body, content);
                    rest.push(Entry {
                        content,
                        ..entry.clone()
                    });
                    continue;
                }
                Place::Root(_) | Place::Foreign => return Err(elsewhere(&entry.path)),
            };
            let name = name.as_bytes();
            let time = entry.mtime_ns;
            match entry.kind {
                Kind::Dir => {
                    dirs.insert(entry.path.as_str());
                    let mut mode = entry.mode;
                    // The kernel would show an ordinary user's sandboxes what is in it, but nobody outside could read it,
                    // to make layers one.
                    if !tree::can_be_read(mode) {
                        mode |= 0o700;
                        rest.push(Entry {
                            content: Span::default(),
                            ..entry.clone()
                        });
                    }
                    tree.dir(name, mode, time).map_err(failed)?;
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
            bytes: 0,
        };
        if let Some(flat) = flat {
            return self.flatten(&new, &flat, record, &rest);
        }
        let layer = self.settle(&new, key, record, &rest)?;
        if origin == Origin::Setup
            && let Err(error) = self.shrink()
        {
            tracing::warn!(dir = %self.dir, %error, "layers of set-ups cannot be let go");
        }
        Ok(layer)
    }

    /// Gives a written layer its place.
    fn settle(
        &self,
        new: &New,
        key: &str,
        mut record: Record,
        rest: &Snapshot,
    ) -> Result<Arc<Layer>, SandboxError> {
        let dir = new.0.path();
        let root = tree::open_root(dir)?;
        fs_err::write(dir.join("rest"), rest.to_bytes()?)?;
        record.bytes = tree::disk_bytes(&root).map_err(|e| failed(key, e))?;
        let text = serde_json::to_vec_pretty(&record).map_err(io::Error::from)?;
        fs_err::write(dir.join("layer.json"), text)?;
        rustix::fs::syncfs(&root).map_err(io::Error::from)?;
        // Where it is there already, another program was faster.
        new.0
            .publish(&self.dir.join(key))
            .map_err(|e| failed(key, e))?;
        self.load(key)
    }

    /// Makes a new layer and those it would stand on one, which stands on nothing.
    fn flatten(
        &self,
        top: &New,
        key: &str,
        record: Record,
        rest: &Snapshot,
    ) -> Result<Arc<Layer>, SandboxError> {
        let Some(parent) = record.parents.first() else {
            return self.settle(top, key, record, rest);
        };
        let below = self.load(parent)?;
        let new = New::in_dir(&self.dir)?;
        for (part, names) in [("work", &below.lower.work), ("root", &below.lower.root)] {
            let mut tree = new.tree(part)?;
            let lower = names.iter().rev().map(|name| self.dir.join(name));
            for dir in lower.chain([top.0.path().join(part)]) {
                merge(&tree::open_root(&dir)?, &mut tree, part == "work")
                    .map_err(|e| failed(key, e))?;
            }
            tree.finish().map_err(|e| failed(key, e))?;
        }
        let record = Record {
            origin: Origin::Saved,
            parents: Vec::new(),
            root: record.root || !below.lower.root.is_empty(),
            ..record
        };
        self.settle(&new, key, record, rest)
    }

    /// Removes a layer that is not in use and that no other stands on.
    pub fn remove(&self, key: &str) -> Result<(), SandboxError> {
        self.discard(key, true)
    }

    fn discard(&self, key: &str, patience: bool) -> Result<(), SandboxError> {
        let dir = self.place(key)?;
        let alone =
            unfinished::alone(&dir, patience)?.ok_or_else(|| no_layer(key, "it is in use"))?;
        // Only now: what is being saved on top of it holds it until it is there.
        if let Some(child) = self.children(key)?.first() {
            return Err(no_layer(
                key,
                format!("{child} stands on it; remove that first"),
            ));
        }
        Ok(unfinished::remove(&dir, alone)?)
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
                total = record.bytes.saturating_add(total);
                setups.push((used.ok(), key, record.bytes));
            }
        }
        setups.sort();
        for (_, key, bytes) in setups {
            if total <= self.cap {
                break;
            }
            if self.discard(&key, false).is_ok() {
                total = total.saturating_sub(bytes);
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

/// The key of layers that were made one.
fn flat_key(chain: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for key in chain {
        hasher.update(key.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// A layer not yet whole.
struct New(Unfinished);

impl New {
    fn in_dir(dir: &Utf8Path) -> Result<Self, SandboxError> {
        Ok(Self(Unfinished::dir(dir)?))
    }

    fn tree(&self, name: &str) -> Result<Writer, SandboxError> {
        let dir = self.0.path().join(name);
        fs_err::create_dir(&dir)?;
        let caps = Caps {
            entries: u64::MAX,
            bytes: u64::MAX,
        };
        Ok(Writer::new(&dir, caps)?.exact())
    }
}

/// Puts a layer over what a tree holds; its files become further names of the same files. With `bottom` nothing lies
/// below, and marks of what is gone are done with.
fn merge(from: &OwnedFd, to: &mut Writer, bottom: bool) -> io::Result<()> {
    tree::walk_layer(from, &mut |seen: &Seen<'_>, opaque, mtime| {
        match &seen.what {
            What::Dir => {
                if opaque {
                    to.remove(seen.path)?;
                }
                // What hid a directory further below must go on hiding it.
                let instead = to.dir_over(seen.path, seen.mode, Some(mtime))?;
                if (opaque || instead) && !bottom {
                    to.opaque(seen.path)?;
                }
            }
            What::File { dir, name, .. } => to.adopt(seen.path, dir, name)?,
            What::Link(target) => to.link(seen.path, target, Some(mtime))?,
            What::Special if bottom => to.remove(seen.path)?,
            What::Special => to.whiteout(seen.path)?,
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Layers) {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
        (dir, Layers::open(&path, "image", true, 1 << 30).unwrap())
    }

    fn put(layers: &Layers, key: &str, parents: &[&str], entries: &[Entry], removed: &[&str]) {
        let strings = |list: &[&str]| list.iter().map(|s| key_of(s)).collect::<Vec<_>>();
        let removed: Vec<_> = removed.iter().map(|&s| s.to_owned()).collect();
        let content = Content {
            entries,
            removed: &removed,
            body: &[],
        };
        let parents = strings(parents);
        layers
            .put(&key_of(key), Origin::Saved, &parents, &content)
            .unwrap();
    }

    fn key_of(name: &str) -> String {
        blake3::hash(name.as_bytes()).to_hex().to_string()
    }

    fn dir(path: &str) -> Entry {
        Entry {
            path: path.to_owned(),
            kind: Kind::Dir,
            mode: 0o755,
            mtime_ns: None,
            content: Span::default(),
        }
    }

    #[test]
    fn children_are_looked_for_behind_the_lock() {
        let (_dir, layers) = cache();
        put(&layers, "parent", &[], &[dir("a")], &[]);
        put(&layers, "child", &["parent"], &[dir("b")], &[]);
        // Whoever comes to remove it, having asked for children before or not.
        for patience in [true, false] {
            let error = layers.discard(&key_of("parent"), patience).unwrap_err();
            assert!(error.to_string().contains("stands on it"), "{error}");
        }
        // Who makes a child holds the parents meanwhile.
        let held = layers.load(&key_of("child")).unwrap();
        for key in ["child", "parent"] {
            let error = layers.discard(&key_of(key), false).unwrap_err();
            assert!(error.to_string().contains("in use"), "{error}");
        }
        drop(held);
        layers.remove(&key_of("child")).unwrap();
        layers.remove(&key_of("parent")).unwrap();
        assert_eq!(layers.dir().read_dir_utf8().unwrap().count(), 0);
    }

    #[test]
    fn a_directory_made_in_place_of_anything_else_hides_what_lies_below_all_layers() {
        let (_dir, layers) = cache();
        put(&layers, "gone", &[], &[dir("/other")], &["/data"]);
        put(&layers, "again", &["gone"], &[dir("/data")], &[]);
        put(&layers, "more", &["again", "gone"], &[dir("/other")], &[]);
        let chain = ["more", "again", "gone"].map(key_of);
        let flat = New::in_dir(layers.dir()).unwrap();
        let mut root = flat.tree("root").unwrap();
        for key in chain.iter().rev() {
            let from = tree::open_root(&layers.dir().join(key).join("root")).unwrap();
            merge(&from, &mut root, false).unwrap();
        }
        root.finish().unwrap();
        let mut opaque = std::collections::BTreeMap::new();
        let from = tree::open_root(&flat.0.path().join("root")).unwrap();
        tree::walk_layer(&from, &mut |seen, mark, _| {
            opaque.insert(String::from_utf8_lossy(seen.path).into_owned(), mark);
            Ok(())
        })
        .unwrap();
        let expected = [("data", true), ("other", false)];
        assert_eq!(opaque, expected.map(|(p, o)| (p.to_owned(), o)).into());
    }
}
