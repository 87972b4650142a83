//! Images: root file systems by content, in a directory of the caller's.
//!
//! ```text
//! DIR/images/<digest>/rootfs/       the tree, owned by whoever unpacked it
//! DIR/images/<digest>/image.json    name, source, size, tool versions, recipe
//! DIR/images/.new-<pid>-<n>         being written, see `unfinished`; what nobody holds is swept at the next opening
//! ```
//!
//! A digest says what is in a tree and nothing of where it came from, so a directory, a tar of it and a container
//! image of it are one image. An image appears by a rename once it is whole and on the disk, and only then it has a name.
//! The lock on its directory tells whether it is in use; its record is replaced by a rename.

mod archive;
mod recipe;
pub(crate) mod tree;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use serde::{Deserialize, Serialize};

pub use recipe::{Recipe, RecipeFile};
pub use tree::Caps as ImageCaps;

use crate::unfinished::{self, Unfinished};
use crate::{Image, SandboxError};
use tree::Writer;

const VERSION: u32 = 1;

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

/// What is wrong with an image, or with the disk it lies on.
pub(crate) fn failed(subject: &str, error: io::Error) -> SandboxError {
    if SandboxError::is_of_the_disk(error.kind()) {
        io::Error::new(error.kind(), format!("image {subject}: {error}")).into()
    } else {
        problem(subject, error)
    }
}

/// Longest name of an image, in bytes.
const MAX_NAME: usize = 128;

/// Why an image cannot be called this. Names are shown on terminals, and stand where digests may.
fn wrong_name(name: &str) -> Option<String> {
    let shown: String = name.chars().take(MAX_NAME).collect();
    let odd = |c: char| !(c.is_alphanumeric() || "._-+:/@~".contains(c));
    if name.is_empty() || name.len() > MAX_NAME || name.contains(odd) {
        Some(format!(
            "{shown:?} is no name: up to {MAX_NAME} letters, digits and ._-+:/@~"
        ))
    } else if may_be_digest(name) {
        Some(format!("{shown:?} may be read as a digest"))
    } else {
        None
    }
}

/// Whether this may be meant as (the beginning of) a digest.
fn may_be_digest(text: &str) -> bool {
    (8..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && may_be_digest(text)
}

impl ImageStore {
    /// Opens the store in a directory, which is made if missing, and sweeps what ended programs left half-done.
    pub fn open(dir: impl Into<Utf8PathBuf>) -> Result<Self, SandboxError> {
        let images = dir.into().join("images");
        fs_err::create_dir_all(&images)?;
        // Absolute and no link: the store's paths go into configurations.
        let images = images.canonicalize_utf8()?;
        let only_owner = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs_err::set_permissions(&images, only_owner)?;
        unfinished::sweep(&images)?;
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
        let failed = |e: io::Error| failed(from.as_str(), e);
        // Once: what is looked at is what is taken in. A pipe would wait here for whoever writes it.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(CWD, from.as_str(), flags, Mode::empty())
            .map_err(io::Error::from)
            .map_err(failed)?;
        let kind = FileType::from_raw_mode(fstat(&opened).map_err(io::Error::from)?.st_mode);
        if !matches!(kind, FileType::Directory | FileType::RegularFile) {
            return Err(problem(
                from.as_str(),
                format!(
                    "neither a directory nor a regular file, and an archive is read twice; \
                     write it to a file first: cat {from} > image.tar"
                ),
            ));
        }
        if let Some(wrong) = name.and_then(wrong_name) {
            return Err(problem(from.as_str(), wrong));
        }
        let new = self.new_tree()?;
        let mut writer = new.writer(self.caps).map_err(failed)?;
        let (source, given, left_out) = if kind == FileType::Directory {
            let left_out = tree::copy(&opened, &mut writer).map_err(failed)?;
            ("directory", None, left_out)
        } else {
            let scratch = new.dir().join("archive");
            let (kind, given, left_out) =
                archive::unpack(opened, &scratch, &mut writer, self.caps).map_err(failed)?;
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
        if let Some(wrong) = wrong_name(&name) {
            return Err(problem(
                from.as_str(),
                format!("{wrong}; give it another name"),
            ));
        }
        self.keep(&new, &name, source, left_out, None)
    }

    /// Every image that can be read, sorted by name; see [`ImageStore::broken`] for the others.
    pub fn list(&self) -> Result<Vec<StoredImage>, SandboxError> {
        let digests = self.digests()?;
        let mut images: Vec<_> = digests.iter().filter_map(|d| self.load(d).ok()).collect();
        images.sort_by(|a, b| (&a.name, &a.digest).cmp(&(&b.name, &b.digest)));
        Ok(images)
    }

    /// Digests of the images whose record can't be read, and why. They can be removed, or made whole by another import.
    pub fn broken(&self) -> Result<Vec<(String, SandboxError)>, SandboxError> {
        let mut broken = Vec::new();
        for digest in self.digests()? {
            if let Err(error) = self.load(&digest)
                && self.dir.join(&digest).is_dir()
            {
                broken.push((digest, error));
            }
        }
        Ok(broken)
    }

    fn digests(&self) -> Result<Vec<String>, SandboxError> {
        let mut digests = Vec::new();
        for entry in self.dir.read_dir_utf8()? {
            let entry = entry?;
            if is_digest(entry.file_name()) {
                digests.push(entry.file_name().to_owned());
            }
        }
        digests.sort();
        Ok(digests)
    }

    /// The digest of an image, of one that can't be read too, by its name, its digest, or the beginning of its digest
    /// (eight characters or more). A whole digest is that and nothing else.
    pub fn digest_of(&self, wanted: &str) -> Result<String, SandboxError> {
        let mut found = self.digests()?;
        if let Some(digest) = found.iter().find(|d| *d == wanted) {
            return Ok(digest.clone());
        }
        found.retain(|digest| {
            wanted.len() >= 8 && digest.starts_with(wanted)
                || self.load(digest).is_ok_and(|i| i.name == wanted)
        });
        match (found.pop(), found.len()) {
            (Some(digest), 0) => Ok(digest),
            (None, _) => Err(problem(wanted, format!("no such image in {}", self.dir))),
            (Some(_), more) => Err(problem(
                wanted,
                format!("{} images are meant; give the digest", more + 1),
            )),
        }
    }

    /// An image by what [`ImageStore::digest_of`] takes.
    pub fn find(&self, wanted: &str) -> Result<StoredImage, SandboxError> {
        self.load(&self.digest_of(wanted)?)
    }

    /// Whether an image still is what its digest says.
    pub fn verify(&self, digest: &str) -> Result<(), SandboxError> {
        let image = self.load(digest)?;
        let root = tree::open_root(&image.rootfs)?;
        let now = tree::digest(&root).map_err(|e| failed(digest, e))?;
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
        let dir = self.place(digest)?;
        match unfinished::alone(&dir, true)? {
            Some(alone) => Ok(unfinished::remove(&dir, alone)?),
            None => Err(problem(digest, "in use by a pool; close that first")),
        }
    }

    /// Puts tool versions into an image's record.
    pub fn record_tools(
        &self,
        digest: &str,
        tools: BTreeMap<String, String>,
    ) -> Result<(), SandboxError> {
        let mut image = self.load(digest)?;
        image.tools = tools;
        self.write_record(&self.place(digest)?, &image)
    }

    /// Where an image lies, whether its record can be read or not.
    fn place(&self, digest: &str) -> Result<Utf8PathBuf, SandboxError> {
        let dir = self.dir.join(digest);
        if is_digest(digest) && dir.is_dir() {
            Ok(dir)
        } else {
            Err(problem(digest, format!("no such image in {}", self.dir)))
        }
    }

    fn load(&self, digest: &str) -> Result<StoredImage, SandboxError> {
        let rootfs = self.place(digest)?.join("rootfs");
        let text = fs_err::read(record(&rootfs)).map_err(|e| failed(digest, e))?;
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
        digest.clone_into(&mut image.digest);
        image.rootfs = rootfs;
        Ok(image)
    }

    fn new_tree(&self) -> Result<NewTree, SandboxError> {
        let place = Unfinished::dir(&self.dir)?;
        let rootfs = place.path().join("rootfs");
        fs_err::create_dir(&rootfs)?;
        Ok(NewTree { place, rootfs })
    }

    /// Gives a finished tree its digest, its name and its place.
    fn keep(
        &self,
        new: &NewTree,
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
        .map_err(|e| failed(name, e))?;
        let digest = tree::digest(&root).map_err(|e| failed(name, e))?;
        let place = self.dir.join(&digest);
        let image = StoredImage {
            version: VERSION,
            name: name.to_owned(),
            digest,
            source: source.to_owned(),
            bytes,
            entries,
            left_out,
            system: system(&root),
            tools: BTreeMap::new(),
            recipe,
            rootfs: place.join("rootfs"),
        };
        self.write_record(new.dir(), &image)?;
        // The same tree may be there already, or just be going.
        for _ in 0..100 {
            if new.place.publish(&place)? {
                return Ok(image);
            }
            if !image.rootfs.is_dir() && place.is_dir() {
                self.remove(&image.digest)?;
                continue;
            }
            match unfinished::hold(&place) {
                Ok(Some(_held)) => {
                    // Its record stays, where it can be read, under the new name.
                    let kept = match self.load(&image.digest) {
                        Ok(there) => StoredImage {
                            name: image.name,
                            ..there
                        },
                        Err(_) => image,
                    };
                    self.write_record(&place, &kept)?;
                    return Ok(kept);
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        Err(problem(name, "the same image is being removed"))
    }

    /// By a rename: whoever reads it meanwhile gets the old record or the new one, also where this program is killed.
    fn write_record(&self, dir: &Utf8Path, image: &StoredImage) -> Result<(), SandboxError> {
        let mut text = serde_json::to_vec_pretty(image).map_err(io::Error::from)?;
        text.push(b'\n');
        let new = Unfinished::file(&self.dir, &text)?;
        new.publish(&dir.join("image.json"))?;
        Ok(())
    }
}

/// A tree not yet whole; goes when dropped.
struct NewTree {
    place: Unfinished,
    rootfs: Utf8PathBuf,
}

impl NewTree {
    fn dir(&self) -> &Utf8Path {
        self.place.path()
    }

    fn writer(&self, caps: ImageCaps) -> io::Result<Writer> {
        Writer::new(&self.rootfs, caps)
    }
}

/// The record beside a root file system.
fn record(rootfs: &Utf8Path) -> Utf8PathBuf {
    rootfs.with_file_name("image.json")
}

/// Marks an image as in use for as long as the result is held; a root file system outside a store is nobody's to remove.
pub(crate) fn hold(rootfs: &Utf8Path) -> Result<Option<OwnedFd>, SandboxError> {
    let Some(dir) = rootfs.parent().filter(|_| record(rootfs).exists()) else {
        return Ok(None);
    };
    let held = unfinished::hold(dir)?;
    held.map(Some)
        .ok_or_else(|| problem(rootfs.as_str(), "it is being removed"))
}

/// The distribution's name; nothing is followed out of the tree for it.
pub(crate) fn system(root: &OwnedFd) -> String {
    use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
    let read = || -> io::Result<String> {
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
