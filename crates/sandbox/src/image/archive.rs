//! Archives: a root file system as a tar, and what `docker save` and OCI tools write.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read};

use camino::Utf8Path;
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use serde_json::Value;
use tar::EntryType;

use super::tree::{self, Caps, Writer};

/// Long names and extended headers are read into memory, so they have a limit of their own.
const MAX_HEADER: u64 = 1 << 20;
const MAX_MANIFEST: u64 = 16 << 20;

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Gives an error once more than so many bytes came.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| {
            invalid("the archive is larger, once uncompressed, than an image may be")
        })?;
        Ok(n)
    }
}

/// Plain, gzip or zstd, as the first bytes tell.
fn uncompressed(file: std::fs::File, caps: Caps) -> io::Result<Bounded<Box<dyn Read>>> {
    let mut file = BufReader::with_capacity(128 << 10, file);
    let start = file.fill_buf()?;
    let inner: Box<dyn Read> = if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(file))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::Decoder::with_buffer(file)?)
    } else {
        Box::new(file)
    };
    Ok(Bounded {
        inner,
        // Headers and padding come on top of the files' bytes.
        left: caps.bytes.saturating_add(caps.entries.saturating_mul(2048)),
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

/// Unpacks an archive of any kind into `tree`; layered ones are first laid out in `scratch`. Returns the kind, the
/// name the archive gives its image, and how many devices, pipes and the like were left out.
pub fn unpack(
    path: &Utf8Path,
    scratch: &Utf8Path,
    tree: &mut Writer,
    caps: Caps,
) -> io::Result<(Kind, Option<String>, u64)> {
    let kind = kind(path, caps)?;
    if kind == Kind::RootFs {
        let mut archive = uncompressed(fs_err::File::open(path)?.into(), caps)?;
        let skipped = unpack_tar(&mut archive, tree, false)?;
        return Ok((kind, None, skipped));
    }
    fs_err::create_dir_all(scratch)?;
    let mut laid_out = Writer::new(scratch, caps)?;
    let mut archive = uncompressed(fs_err::File::open(path)?.into(), caps)?;
    unpack_tar(&mut archive, &mut laid_out, false)?;
    let (layers, name) = match kind {
        Kind::Docker => docker_layers(scratch)?,
        _ => oci_layers(scratch)?,
    };
    let mut skipped = 0;
    for layer in layers {
        let file = within(scratch, &layer)?;
        skipped += unpack_tar(&mut uncompressed(file, caps)?, tree, true)
            .map_err(|e| io::Error::new(e.kind(), format!("layer {layer}: {e}")))?;
    }
    fs_err::remove_dir_all(scratch)?;
    Ok((kind, name, skipped))
}

fn kind(path: &Utf8Path, caps: Caps) -> io::Result<Kind> {
    let mut archive = tar::Archive::new(uncompressed(fs_err::File::open(path)?.into(), caps)?);
    let mut seen = BTreeSet::new();
    let mut any = false;
    for entry in archive.entries()?.raw(true) {
        let entry = entry?;
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

/// Opens a file of a laid-out archive, whatever links it holds.
fn within(scratch: &Utf8Path, name: &str) -> io::Result<std::fs::File> {
    let file = openat2(
        tree::open_root(scratch)?,
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
    Ok(file.into())
}

fn json(scratch: &Utf8Path, name: &str) -> io::Result<Value> {
    let mut text = Vec::new();
    within(scratch, name)?
        .take(MAX_MANIFEST)
        .read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(|e| invalid(format!("{name}: {e}")))
}

type Layers = (Vec<String>, Option<String>);

fn docker_layers(scratch: &Utf8Path) -> io::Result<Layers> {
    let manifest = json(scratch, "manifest.json")?;
    let images = manifest
        .as_array()
        .ok_or_else(|| invalid("manifest.json: not a list"))?;
    let [image] = images.as_slice() else {
        return Err(invalid(format!(
            "the archive holds {} images; save one at a time",
            images.len()
        )));
    };
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

fn oci_layers(scratch: &Utf8Path) -> io::Result<Layers> {
    let mut index = json(scratch, "index.json")?;
    let mut name = None;
    // An index may name an index for several platforms.
    for _ in 0..4 {
        if let Some(layers) = index["layers"].as_array() {
            let layers = layers
                .iter()
                .map(|l| blob(&l["digest"]))
                .collect::<io::Result<_>>()?;
            return Ok((layers, name));
        }
        let manifests = index["manifests"]
            .as_array()
            .ok_or_else(|| invalid("index.json: neither layers nor manifests"))?;
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let chosen = manifests
            .iter()
            .find(|m| m["platform"]["architecture"] == arch)
            .or_else(|| manifests.first())
            .ok_or_else(|| invalid("index.json: no manifest"))?;
        if let Some(given) = chosen["annotations"]["org.opencontainers.image.ref.name"].as_str() {
            name = Some(given.to_owned());
        }
        index = json(scratch, &blob(&chosen["digest"])?)?;
    }
    Err(invalid("index.json: indexes within indexes"))
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
fn unpack_tar(from: &mut dyn Read, to: &mut Writer, layer: bool) -> io::Result<u64> {
    let mut archive = tar::Archive::new(from);
    let mut extra = Extra::default();
    let mut skipped = 0;
    let mut own: BTreeSet<Vec<u8>> = BTreeSet::new();
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        let size = entry.header().entry_size()?;
        if matches!(
            kind,
            EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader
        ) {
            let text = header_text(&mut entry, size)?;
            match kind {
                EntryType::GNULongName => extra.name = Some(until_nul(text)),
                EntryType::GNULongLink => extra.target = Some(until_nul(text)),
                _ => pax(&text, &mut extra)?,
            }
            continue;
        }
        if kind == EntryType::XGlobalHeader {
            header_text(&mut entry, size)?;
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
        if layer && whiteout(&name, to, &own)? {
            continue;
        }
        let mode = entry.header().mode().unwrap_or(0o644);
        let mtime = entry
            .header()
            .mtime()
            .ok()
            .and_then(|t| i64::try_from(t).ok())
            .filter(|t| *t < 1 << 33)
            .map(|t| tree::nanoseconds(t, 0));
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
            _ => skipped += 1,
        }
        if layer {
            own.insert(trimmed(&name).to_vec());
        }
    }
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

fn trimmed(name: &[u8]) -> &[u8] {
    let name = name.strip_prefix(b"./").unwrap_or(name);
    name.strip_suffix(b"/").unwrap_or(name)
}

/// Obeys a layer's mark that something of the layers below is gone; false if the entry is none.
fn whiteout(name: &[u8], to: &mut Writer, own: &BTreeSet<Vec<u8>>) -> io::Result<bool> {
    let name = trimmed(name);
    let cut = name.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
    let (dir, last) = name.split_at(cut);
    let Some(hidden) = last.strip_prefix(b".wh.") else {
        return Ok(false);
    };
    if hidden == b".wh..opq" {
        for child in to.children(dir)? {
            let path = [dir, &child].concat();
            // What this layer itself brought stays.
            let mut below = path.clone();
            below.push(b'/');
            let ours = own.contains(&path)
                || own
                    .range(below.clone()..)
                    .next()
                    .is_some_and(|n| n.starts_with(&below));
            if !ours {
                to.remove(&path)?;
            }
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
