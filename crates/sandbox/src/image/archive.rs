//! Archives: a root file system as a tar, and what `docker save` and OCI tools write.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::os::fd::OwnedFd;

use camino::Utf8Path;
use drillyard_sandbox_init::time::nanoseconds;
use ring::digest::{self, SHA256, SHA512};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use serde_json::Value;
use tar::EntryType;

use super::tree::{self, Caps, Writer};

/// Long names and extended headers are read into memory, so they have a limit of their own.
const MAX_HEADER: u64 = 1 << 20;
const MAX_MANIFEST: u64 = 16 << 20;
/// Of all entries' names together.
const MAX_NAMES: usize = 512 << 20;
/// More layers are refused; engines make 127 at most.
const MAX_LAYERS: usize = 512;

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// What may still be read, be it taken in or not: a name that is skipped costs as much as one that is written.
struct Room {
    caps: Caps,
    bytes: u64,
    entries: u64,
    /// Headers that say more of the next entry; each may have a long name, a long target and one of pax.
    extended: u64,
    /// Bytes of names together, many of which are kept.
    names: usize,
}

impl Room {
    const fn new(caps: Caps) -> Self {
        Self {
            caps,
            // Headers and padding come on top of the files' bytes.
            bytes: caps.bytes.saturating_add(caps.entries.saturating_mul(2048)),
            entries: caps.entries,
            extended: caps.entries.saturating_mul(3),
            names: MAX_NAMES,
        }
    }

    /// A name without what means nothing in it.
    fn name(&mut self, name: &[u8]) -> io::Result<Vec<u8>> {
        let plain = tree::parts(name)?.join(&b'/');
        self.names = self
            .names
            .checked_sub(plain.len())
            .ok_or_else(|| invalid(format!("names are longer than {MAX_NAMES} bytes together")))?;
        Ok(plain)
    }

    fn header(&mut self, kind: EntryType) -> io::Result<()> {
        let left = if is_extended(kind) {
            &mut self.extended
        } else {
            &mut self.entries
        };
        *left = left
            .checked_sub(1)
            .ok_or_else(|| invalid(format!("more than {} entries", self.caps.entries)))?;
        Ok(())
    }
}

const fn is_extended(kind: EntryType) -> bool {
    matches!(
        kind,
        EntryType::GNULongName
            | EntryType::GNULongLink
            | EntryType::XHeader
            | EntryType::XGlobalHeader
    )
}

/// Gives an error once more than so many bytes came.
struct Bounded<'a> {
    inner: Box<dyn Read>,
    left: &'a mut u64,
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        *self.left = self.left.checked_sub(n as u64).ok_or_else(|| {
            invalid("the archive is larger, once uncompressed, than an image may be")
        })?;
        Ok(n)
    }
}

/// Plain, gzip or zstd, as the first bytes tell.
fn uncompressed(file: std::fs::File) -> io::Result<Box<dyn Read>> {
    let mut file = BufReader::with_capacity(128 << 10, file);
    let start = file.fill_buf()?;
    Ok(if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(file))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::Decoder::with_buffer(file)?)
    } else {
        Box::new(file)
    })
}

/// What an archive is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A root file system: a plain tar, or what `docker export` writes.
    RootFs,
    /// `docker save`: `manifest.json` names the layers.
    Docker,
    /// An OCI layout.
    Oci,
}

/// Unpacks an archive of any kind, a regular file, into `tree`; layered ones are first laid out in `scratch`. Returns the
/// kind, the name the archive gives its image, and how many devices, pipes and the like were left out.
pub fn unpack(
    file: OwnedFd,
    scratch: &Utf8Path,
    tree: &mut Writer,
    caps: Caps,
) -> io::Result<(Kind, Option<String>, u64)> {
    let mut file = std::fs::File::from(file);
    let mut again = || {
        file.rewind()?;
        uncompressed(file.try_clone()?)
    };
    let kind = kind(again()?, Room::new(caps))?;
    let mut room = Room::new(caps);
    if kind == Kind::RootFs {
        let skipped = unpack_tar(again()?, &mut room, tree, false)?;
        return Ok((kind, None, skipped));
    }
    fs_err::create_dir_all(scratch)?;
    let mut laid_out = Writer::new(scratch, caps)?;
    unpack_tar(again()?, &mut room, &mut laid_out, false)?;
    let mut layout = Layout::new(scratch)?;
    let (layers, name) = match kind {
        Kind::Docker => docker_layers(&mut layout)?,
        _ => oci_layers(&mut layout)?,
    };
    if layers.len() > MAX_LAYERS {
        return Err(invalid(format!(
            "the image has {} layers; {MAX_LAYERS} are taken",
            layers.len()
        )));
    }
    // One room for all of them: an archive may name a layer as often as it likes.
    let mut room = Room::new(caps);
    let mut skipped = 0;
    for layer in layers {
        let file = uncompressed(layout.open(&layer)?)?;
        skipped += unpack_tar(file, &mut room, tree, true)
            .map_err(|e| io::Error::new(e.kind(), format!("layer {layer:?}: {e}")))?;
    }
    fs_err::remove_dir_all(scratch)?;
    Ok((kind, name, skipped))
}

fn kind(file: Box<dyn Read>, mut room: Room) -> io::Result<Kind> {
    let mut bytes = room.bytes;
    let mut archive = tar::Archive::new(Bounded {
        inner: file,
        left: &mut bytes,
    });
    let mut seen = BTreeSet::new();
    let mut any = false;
    for entry in archive.entries()?.raw(true) {
        let entry = entry?;
        room.header(entry.header().entry_type())?;
        any = true;
        let name = entry.path_bytes();
        let name = name.strip_prefix(b"./").unwrap_or(&name);
        if matches!(name, b"manifest.json" | b"oci-layout" | b"index.json") {
            seen.insert(name.to_vec());
        }
    }
    let has = |name: &str| seen.contains(name.as_bytes());
    Ok(match any {
        false => return Err(invalid("the archive is empty, or no tar")),
        true if has("manifest.json") => Kind::Docker,
        true if has("oci-layout") && has("index.json") => Kind::Oci,
        true => Kind::RootFs,
    })
}

/// An archive's files, laid out in a directory.
struct Layout {
    root: OwnedFd,
    /// Blobs that are what their names say.
    checked: BTreeSet<String>,
}

impl Layout {
    fn new(scratch: &Utf8Path) -> io::Result<Self> {
        Ok(Self {
            root: tree::open_root(scratch)?,
            checked: BTreeSet::new(),
        })
    }

    /// Opens a file, whatever links the archive holds. A blob must be what its name says.
    fn open(&mut self, name: &str) -> io::Result<std::fs::File> {
        let file = openat2(
            &self.root,
            name,
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        )
        .map_err(|e| {
            invalid(format!(
                "the archive names {name:?}, which cannot be read: {e}"
            ))
        })?;
        let mut file = std::fs::File::from(file);
        let blob = name.strip_prefix("blobs/").and_then(|b| b.split_once('/'));
        if let Some((algorithm, hex)) = blob
            && !self.checked.contains(name)
        {
            match algorithm {
                "sha256" => check(&mut file, &SHA256, name, hex)?,
                "sha512" => check(&mut file, &SHA512, name, hex)?,
                other => {
                    return Err(invalid(format!(
                        "{name:?}: digests of the kind {other:?} cannot be checked; write the image with sha256"
                    )));
                }
            }
            self.checked.insert(name.to_owned());
        }
        Ok(file)
    }

    fn json(&mut self, name: &str) -> io::Result<Value> {
        let mut text = Vec::new();
        self.open(name)?.take(MAX_MANIFEST).read_to_end(&mut text)?;
        serde_json::from_slice(&text).map_err(|e| invalid(format!("{name:?}: {e}")))
    }

    /// Refuses a configuration that says it is for other processors. Some tools leave it out.
    fn check_platform(&mut self, config: &str) -> io::Result<()> {
        if !tree::is_file(&self.root, config) {
            return Ok(());
        }
        match self.json(config)?["architecture"].as_str() {
            Some(other) if !other.is_empty() && other != architecture() => {
                Err(other_platform(&[other.to_owned()]))
            }
            _ => Ok(()),
        }
    }
}

fn check(
    file: &mut std::fs::File,
    kind: &'static digest::Algorithm,
    name: &str,
    expected: &str,
) -> io::Result<()> {
    let mut hasher = digest::Context::new(kind);
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    let mut found = String::new();
    for byte in hasher.finish().as_ref() {
        let _ = write!(found, "{byte:02x}");
    }
    if found != expected {
        return Err(invalid(format!(
            "{name:?} is damaged: its content has the digest {found}; fetch the archive again"
        )));
    }
    file.rewind()
}

/// This host's processors, as engines call them.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn other_platform(there: &[String]) -> io::Error {
    let there: Vec<_> = there.iter().map(|a| format!("{a:?}")).collect();
    invalid(format!(
        "there is no image for {} in the archive; there are: {}",
        architecture(),
        there.join(", ")
    ))
}

type Layers = (Vec<String>, Option<String>);

fn docker_layers(layout: &mut Layout) -> io::Result<Layers> {
    let manifest = layout.json("manifest.json")?;
    let images = manifest
        .as_array()
        .ok_or_else(|| invalid("manifest.json: not a list"))?;
    let [image] = images.as_slice() else {
        return Err(invalid(format!(
            "the archive holds {} images; save one at a time",
            images.len()
        )));
    };
    if let Some(config) = image["Config"].as_str() {
        layout.check_platform(config)?;
    }
    let layers = image["Layers"]
        .as_array()
        .ok_or_else(|| invalid("manifest.json: Layers is missing"))?
        .iter()
        .map(|l| {
            l.as_str()
                .map(str::to_owned)
                .ok_or_else(|| invalid("manifest.json: a layer without a name"))
        })
        .collect::<io::Result<_>>()?;
    Ok((layers, image["RepoTags"][0].as_str().map(str::to_owned)))
}

fn oci_layers(layout: &mut Layout) -> io::Result<Layers> {
    let mut index = layout.json("index.json")?;
    let mut name = None;
    // An index may name an index for several platforms.
    for _ in 0..4 {
        if let Some(layers) = index["layers"].as_array() {
            if index["config"]["digest"].is_string() {
                layout.check_platform(&blob(&index["config"]["digest"])?)?;
            }
            let layers = layers
                .iter()
                .map(|l| blob(&l["digest"]))
                .collect::<io::Result<_>>()?;
            return Ok((layers, name));
        }
        let manifests = index["manifests"]
            .as_array()
            .ok_or_else(|| invalid("index.json: neither layers nor manifests"))?;
        let chosen = choose(manifests)?;
        if let Some(given) = chosen["annotations"]["org.opencontainers.image.ref.name"].as_str() {
            name = Some(given.to_owned());
        }
        index = layout.json(&blob(&chosen["digest"])?)?;
    }
    Err(invalid("index.json: indexes within indexes"))
}

/// The manifest for this host: one that says so, or the only one that doesn't say for what it is.
fn choose(manifests: &[Value]) -> io::Result<&Value> {
    let platform = |m: &Value| {
        let part = |key| m["platform"][key].as_str().unwrap_or_default().to_owned();
        (part("os"), part("architecture"))
    };
    let ours = |m: &&Value| {
        let (os, arch) = platform(m);
        arch == architecture() && (os.is_empty() || os == "linux")
    };
    if let Some(ours) = manifests.iter().find(ours) {
        return Ok(ours);
    }
    let mut silent = manifests.iter().filter(|m| platform(m).1.is_empty());
    match (silent.next(), silent.count()) {
        (Some(only), 0) => Ok(only),
        (Some(_), more) => Err(invalid(format!(
            "the archive holds {} images; save one at a time",
            more + 1
        ))),
        (None, _) if manifests.is_empty() => Err(invalid("index.json: no manifest")),
        (None, _) => {
            let there: Vec<String> = manifests
                .iter()
                .take(20)
                .map(|m| {
                    let (os, arch) = platform(m);
                    format!("{os}/{arch}").trim_start_matches('/').to_owned()
                })
                .collect();
            Err(other_platform(&there))
        }
    }
}

/// Where the layout keeps a blob.
fn blob(digest: &Value) -> io::Result<String> {
    digest
        .as_str()
        .and_then(|d| d.split_once(':'))
        .filter(|(algorithm, hex)| {
            let plain = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric());
            plain(algorithm) && plain(hex)
        })
        .map(|(algorithm, hex)| format!("blobs/{algorithm}/{hex}"))
        .ok_or_else(|| invalid(format!("{digest} is no digest")))
}

/// What extended headers said of the next entry.
#[derive(Default)]
struct Extra {
    name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
}

/// Unpacks a tar; `layer` obeys whiteouts. Extended headers are read here rather than by the tar library, which would take
/// as much memory for them as they ask.
fn unpack_tar(
    from: Box<dyn Read>,
    room: &mut Room,
    to: &mut Writer,
    layer: bool,
) -> io::Result<u64> {
    let mut bytes = room.bytes;
    let mut archive = tar::Archive::new(Bounded {
        inner: from,
        left: &mut bytes,
    });
    let mut extra = Extra::default();
    let mut skipped = 0;
    let mut marks = Marks::default();
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        let size = entry.header().entry_size()?;
        room.header(kind)?;
        if is_extended(kind) {
            let text = header_text(&mut entry, size)?;
            match kind {
                EntryType::GNULongName => extra.name = Some(until_nul(text)),
                EntryType::GNULongLink => extra.target = Some(until_nul(text)),
                EntryType::XHeader => pax(&text, &mut extra)?,
                _ => {}
            }
            continue;
        }
        let Extra { name, target } = std::mem::take(&mut extra);
        let name = name.unwrap_or_else(|| entry.header().path_bytes().into_owned());
        let target = target.or_else(|| {
            entry
                .header()
                .link_name_bytes()
                .map(std::borrow::Cow::into_owned)
        });
        // Before anything of it is kept.
        let plain = room.name(&name)?;
        if layer && marks.obey(&plain, to)? {
            continue;
        }
        let mode = entry.header().mode().unwrap_or(0o644);
        let mtime = entry
            .header()
            .mtime()
            .ok()
            .and_then(|t| i64::try_from(t).ok())
            .filter(|t| *t < 1 << 33)
            .map(|t| nanoseconds(t, 0));
        let target = || {
            target.filter(|t| !t.is_empty()).ok_or_else(|| {
                invalid(format!(
                    "{:?}: a link to nothing",
                    String::from_utf8_lossy(&name)
                ))
            })
        };
        match kind {
            EntryType::Directory => to.dir(&name, mode, mtime)?,
            // Old archives mark directories by a slash at the end.
            EntryType::Regular | EntryType::Continuous if name.ends_with(b"/") => {
                to.dir(&name, mode, mtime)?;
            }
            EntryType::Regular | EntryType::Continuous => {
                to.file(&name, mode, mtime, &mut entry)?;
            }
            EntryType::Symlink => to.link(&name, &target()?, mtime)?,
            EntryType::Link => to.hard_link(&name, &target()?)?,
            EntryType::GNUSparse => {
                return Err(invalid(format!(
                    "{:?}: a sparse entry; write the archive without --sparse",
                    String::from_utf8_lossy(&name)
                )));
            }
            // Devices and pipes: a sandbox has its own.
            _ => {
                skipped += 1;
                continue;
            }
        }
        if layer {
            marks.own.insert(plain);
        }
    }
    drop(archive);
    room.bytes = bytes;
    Ok(skipped)
}

fn header_text(entry: &mut dyn Read, size: u64) -> io::Result<Vec<u8>> {
    if size > MAX_HEADER {
        return Err(invalid(format!("an extended header of {size} bytes")));
    }
    let mut text = Vec::new();
    entry.take(MAX_HEADER).read_to_end(&mut text)?;
    Ok(text)
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    text.truncate(end);
    text
}

fn pax(text: &[u8], extra: &mut Extra) -> io::Result<()> {
    for field in tar::PaxExtensions::new(text) {
        let field = field?;
        let value = field.value_bytes().to_vec();
        match field.key_bytes() {
            b"path" => extra.name = Some(value),
            b"linkpath" => extra.target = Some(value),
            b"size" => {
                return Err(invalid(
                    "an extended header gives a file's size; files of 8 GiB and more are not taken",
                ));
            }
            key if key.starts_with(b"GNU.sparse") => {
                return Err(invalid(
                    "a sparse entry; write the archive without --sparse",
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// A layer's marks that something of the layers below is gone.
#[derive(Default)]
struct Marks {
    /// What this layer itself brought: that stays.
    own: BTreeSet<Vec<u8>>,
    /// Directories whose mark was obeyed: what is there now is the layer's own.
    opaque: BTreeSet<(u64, u64)>,
}

impl Marks {
    /// Obeys a mark; false if the entry is none.
    fn obey(&mut self, name: &[u8], to: &mut Writer) -> io::Result<bool> {
        let cut = name.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
        let (dir, last) = name.split_at(cut);
        let Some(hidden) = last.strip_prefix(b".wh.") else {
            return Ok(false);
        };
        if hidden == b".wh..opq" {
            if let Some((id, entries)) = to.directory(dir)?
                && self.opaque.insert(id)
            {
                self.empty(dir, &tree::names(&entries)?, to)?;
            }
        } else if hidden.starts_with(b".wh.") {
            // Bookkeeping of other storage drivers.
        } else if hidden.is_empty() || hidden == b".." || hidden == b"." {
            return Err(invalid("a whiteout of nothing"));
        } else {
            to.remove(&[dir, hidden].concat())?;
        }
        Ok(true)
    }

    fn empty(&self, dir: &[u8], names: &[Vec<u8>], to: &mut Writer) -> io::Result<()> {
        for child in names {
            let path = [dir, child].concat();
            let mut below = path.clone();
            below.push(b'/');
            let ours = self.own.contains(&path)
                || self
                    .own
                    .range(below.clone()..)
                    .next()
                    .is_some_and(|n| n.starts_with(&below));
            if !ours {
                to.remove(&path)?;
            }
        }
        Ok(())
    }
}
