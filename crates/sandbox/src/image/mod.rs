//! Images: root file systems by content, in a directory of the caller's.
//!
//! ```text
//! DIR/images/<digest>/rootfs/       the tree, owned by whoever unpacked it
//! DIR/images/<digest>/image.json    name, source, size, tool versions, recipe
//! DIR/images/.new-<pid>-<start>-<n> being unpacked; of a dead program: swept at the next opening
//! ```
//!
//! A digest says what is in a tree and nothing of where it came from, so a directory, a tar of it and a container
//! image of it are one image. An image appears by a rename once it is whole and on the disk.

mod archive;
mod recipe;
pub(crate) mod tree;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

pub use recipe::{Recipe, RecipeFile};
pub use tree::Caps as ImageCaps;

use crate::{Image, SandboxError};
use tree::Writer;

const VERSION: u32 = 1;
static TEMPORARIES: AtomicU64 = AtomicU64::new(0);

/// An image in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredImage {
    /// Version of this record.
    version: u32,
    /// What people call it.
    pub name: String,
    /// BLAKE3 of its content.
    pub digest: String,
    /// What it was made from: `directory`, `tar`, `docker archive`, `oci archive`, `recipe`.
    pub source: String,
    /// Bytes of its files together.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
    /// Devices, pipes and sockets of the source that were left out.
    pub left_out: u64,
    /// The distribution's name, as its os-release tells.
    pub system: String,
    /// Versions of tools in it, once someone asked ([`crate::Pool::tool_versions`], [`ImageStore::record_tools`]).
    #[serde(default)]
    pub tools: BTreeMap<String, String>,
    /// The recipe's text, if it was built.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
    /// Where its root file system lies.
    #[serde(skip)]
    pub rootfs: Utf8PathBuf,
}

impl StoredImage {
    /// For [`crate::SandboxConfig::image`].
    pub fn image(&self) -> Image {
        Image::RootFs {
            dir: self.rootfs.clone(),
            digest: self.digest.clone(),
        }
    }
}

/// Images in a directory. Everything here blocks; call it off an async program's own threads.
#[derive(Debug, Clone)]
pub struct ImageStore {
    dir: Utf8PathBuf,
    caps: ImageCaps,
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "an error, as map_err gives it, or a text"
)]
pub(crate) fn problem(subject: impl Into<String>, message: impl ToString) -> SandboxError {
    SandboxError::Image {
        subject: subject.into(),
        message: message.to_string(),
    }
}

impl ImageStore {
    /// Opens the store in a directory, which is made if missing, and sweeps what dead programs left half-done.
    pub fn open(dir: impl Into<Utf8PathBuf>) -> Result<Self, SandboxError> {
        let dir = dir.into();
        fs_err::create_dir_all(&dir)?;
        // Absolute: the store's paths go into configurations.
        let images = dir.canonicalize_utf8()?.join("images");
        fs_err::create_dir_all(&images)?;
        let only_owner = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs_err::set_permissions(&images, only_owner)?;
        sweep(&images)?;
        Ok(Self {
            dir: images,
            caps: ImageCaps::default(),
        })
    }

    /// Refuses larger images than these.
    #[must_use]
    pub fn with_caps(mut self, caps: ImageCaps) -> Self {
        self.caps = caps;
        self
    }

    /// Takes in a directory, a tar of a root file system (plain, gzip or zstd; `docker export` writes one), or an archive
    /// with layers (`docker save`, OCI). Without a name the archive's own or the path's last part serves.
    pub fn import(&self, from: &Utf8Path, name: Option<&str>) -> Result<StoredImage, SandboxError> {
        let failed = |e: io::Error| problem(from.as_str(), e);
        let new = self.temporary()?;
        let mut writer = Writer::new(&new.rootfs, self.caps).map_err(failed)?;
        let (source, given, left_out) = if from.is_dir() {
            let root = tree::open_root(from).map_err(failed)?;
            let left_out = tree::copy(&root, &mut writer).map_err(failed)?;
            ("directory", None, left_out)
        } else {
            let scratch = new.dir.join("archive");
            let (kind, given, left_out) =
                archive::unpack(from, &scratch, &mut writer, self.caps).map_err(failed)?;
            let source = match kind {
                archive::Kind::RootFs => "tar",
                archive::Kind::Docker => "docker archive",
                archive::Kind::Oci => "oci archive",
            };
            (source, given, left_out)
        };
        writer.finish().map_err(failed)?;
        let name = name
            .map(str::to_owned)
            .or(given)
            .or_else(|| from.file_stem().map(str::to_owned))
            .unwrap_or_else(|| "image".to_owned());
        self.keep(&new, &name, source, left_out, None)
    }

    /// Every image, sorted by name.
    pub fn list(&self) -> Result<Vec<StoredImage>, SandboxError> {
        let mut images = Vec::new();
        for entry in self.dir.read_dir_utf8()? {
            let entry = entry?;
            if !entry.file_name().starts_with('.') {
                images.push(self.load(entry.file_name())?);
            }
        }
        images.sort_by(|a, b| (&a.name, &a.digest).cmp(&(&b.name, &b.digest)));
        Ok(images)
    }

    /// An image by its name, its digest, or the beginning of its digest (eight characters or more).
    pub fn find(&self, wanted: &str) -> Result<StoredImage, SandboxError> {
        let mut found: Vec<_> = self
            .list()?
            .into_iter()
            .filter(|i| i.name == wanted || wanted.len() >= 8 && i.digest.starts_with(wanted))
            .collect();
        match (found.pop(), found.len()) {
            (Some(image), 0) => Ok(image),
            (None, _) => Err(problem(wanted, format!("no such image in {}", self.dir))),
            (Some(_), more) => Err(problem(
                wanted,
                format!("{} images are meant; give the digest", more + 1),
            )),
        }
    }

    /// Whether an image still is what its digest says.
    pub fn verify(&self, digest: &str) -> Result<(), SandboxError> {
        let image = self.load(digest)?;
        let root = tree::open_root(&image.rootfs)?;
        let now = tree::digest(&root).map_err(|e| problem(digest, e))?;
        if now == digest {
            Ok(())
        } else {
            Err(problem(
                digest,
                format!(
                    "its files were changed: their digest is {now}; remove it and import it again"
                ),
            ))
        }
    }

    /// Removes an image that no pool uses.
    pub fn remove(&self, digest: &str) -> Result<(), SandboxError> {
        let image = self.load(digest)?;
        let lock = fs_err::File::open(record(&image.rootfs))?;
        if !lock_alone(lock.file()) {
            return Err(problem(digest, "in use by a pool; close that first"));
        }
        // Out of sight at once; a program that dies half-way leaves what the next opening sweeps.
        let old = self.dir.join(temporary_name()?);
        fs_err::rename(self.dir.join(&image.digest), &old)?;
        Ok(fs_err::remove_dir_all(old)?)
    }

    /// Puts tool versions into an image's record.
    pub fn record_tools(
        &self,
        digest: &str,
        tools: BTreeMap<String, String>,
    ) -> Result<(), SandboxError> {
        let mut image = self.load(digest)?;
        image.tools = tools;
        self.write(&image)
    }

    fn write(&self, image: &StoredImage) -> Result<(), SandboxError> {
        write_record(&record(&self.load(&image.digest)?.rootfs), image)
    }

    fn load(&self, digest: &str) -> Result<StoredImage, SandboxError> {
        let whole = digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit());
        let dir = self.dir.join(digest);
        if !whole || !dir.is_dir() {
            return Err(problem(digest, format!("no such image in {}", self.dir)));
        }
        let rootfs = dir.join("rootfs");
        let text = fs_err::read(record(&rootfs))?;
        let mut image: StoredImage = serde_json::from_slice(&text)
            .map_err(|e| problem(digest, format!("image.json: {e}")))?;
        if image.version != VERSION {
            return Err(problem(
                digest,
                format!(
                    "image.json is of version {}; this program reads {VERSION}",
                    image.version
                ),
            ));
        }
        image.rootfs = rootfs;
        Ok(image)
    }

    fn temporary(&self) -> Result<Temporary, SandboxError> {
        let dir = self.dir.join(temporary_name()?);
        let rootfs = dir.join("rootfs");
        fs_err::create_dir_all(&rootfs)?;
        Ok(Temporary { dir, rootfs })
    }

    /// Gives a finished tree its digest and its place.
    fn keep(
        &self,
        new: &Temporary,
        name: &str,
        source: &str,
        left_out: u64,
        recipe: Option<String>,
    ) -> Result<StoredImage, SandboxError> {
        let root = tree::open_root(&new.rootfs)?;
        let (mut entries, mut bytes) = (0, 0);
        tree::walk(&root, &mut |seen| {
            entries += 1;
            if let tree::What::File { size, .. } = seen.what {
                bytes += size;
            }
            Ok(())
        })
        .map_err(|e| problem(name, e))?;
        let digest = tree::digest(&root).map_err(|e| problem(name, e))?;
        let place = self.dir.join(&digest);
        let image = StoredImage {
            version: VERSION,
            name: name.to_owned(),
            digest,
            source: source.to_owned(),
            bytes,
            entries,
            left_out,
            system: system(&new.rootfs),
            tools: BTreeMap::new(),
            recipe,
            rootfs: place.join("rootfs"),
        };
        write_record(&record(&new.rootfs), &image)?;
        match rustix::fs::rename(new.dir.as_str(), place.as_str()) {
            Ok(()) => rustix::fs::fsync(tree::open_root(&self.dir)?).map_err(io::Error::from)?,
            // The same tree is there already: its record stays, under the new name.
            Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => {
                let mut there = self.load(&image.digest)?;
                there.name.clone_from(&image.name);
                write_record(&record(&there.rootfs), &there)?;
                return Ok(there);
            }
            Err(error) => return Err(problem(place.as_str(), io::Error::from(error))),
        }
        Ok(image)
    }
}

/// A tree not yet whole; goes when dropped.
struct Temporary {
    dir: Utf8PathBuf,
    rootfs: Utf8PathBuf,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs_err::remove_dir_all(&self.dir);
    }
}

/// The record beside a root file system.
pub(crate) fn record(rootfs: &Utf8Path) -> Utf8PathBuf {
    rootfs.with_file_name("image.json")
}

/// Locks a record against all use; false if it is in use. A process that this program starts holds every open file for
/// the moment until it executes, hence a little patience.
pub(crate) fn lock_alone(record: &std::fs::File) -> bool {
    for _ in 0..50 {
        if flock(record, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    false
}

/// Marks an image as in use for as long as the file is held; a root file system outside a store has no record to hold.
pub(crate) fn hold(rootfs: &Utf8Path) -> Result<Option<std::fs::File>, SandboxError> {
    let path = record(rootfs);
    if !path.exists() {
        return Ok(None);
    }
    let file = fs_err::File::open(&path)?;
    flock(&file, FlockOperation::NonBlockingLockShared)
        .map_err(|_| problem(rootfs.as_str(), "it is being removed"))?;
    Ok(Some(file.into()))
}

/// In place: a pool may hold the record's lock, which a rename would leave on the old file.
fn write_record(path: &Utf8Path, image: &StoredImage) -> Result<(), SandboxError> {
    let mut text = serde_json::to_vec_pretty(image).map_err(io::Error::from)?;
    text.push(b'\n');
    fs_err::write(path, text)?;
    Ok(fs_err::File::open(path)?.sync_all()?)
}

/// A name no other living program uses.
pub(crate) fn temporary_name() -> Result<String, SandboxError> {
    let n = TEMPORARIES.fetch_add(1, Ordering::Relaxed);
    Ok(format!(".new-{}-{n}", crate::local::owner()?))
}

/// Removes what dead programs left half-done.
pub(crate) fn sweep(dir: &Utf8Path) -> Result<(), SandboxError> {
    for entry in dir.read_dir_utf8()? {
        let entry = entry?;
        let mut parts = match entry.file_name().strip_prefix(".new-") {
            Some(rest) => rest.split('-'),
            None => continue,
        };
        let alive = match (parts.next(), parts.next()) {
            (Some(pid), Some(start)) => pid
                .parse()
                .is_ok_and(|pid| crate::local::started(pid).as_deref() == Some(start)),
            _ => false,
        };
        if !alive {
            // Another program may be sweeping too.
            match fs_err::remove_dir_all(entry.path()) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
                _ => {}
            }
        }
    }
    Ok(())
}

/// The distribution's name; nothing is followed out of the tree for it.
pub(crate) fn system(rootfs: &Utf8Path) -> String {
    use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
    let read = || -> io::Result<String> {
        let root = tree::open_root(rootfs)?;
        let file = openat2(
            root,
            "etc/os-release",
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        )?;
        let mut text = String::new();
        io::Read::read_to_string(
            &mut io::Read::take(std::fs::File::from(file), 64 << 10),
            &mut text,
        )?;
        Ok(text)
    };
    crate::host::pretty_name(&read().unwrap_or_default())
}
