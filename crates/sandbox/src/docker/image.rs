//! The root file system of containers: images made locally and imported once, with the helper programs in them.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;

use bollard::models::{Mount, MountBindOptions, MountBindOptionsPropagationEnum, MountType};
use bollard::query_parameters::{CreateImageOptions, TagImageOptions};
use bytes::Bytes;
use camino::{Utf8Path, Utf8PathBuf};
use futures::StreamExt;
use tar::{Builder, EntryType, Header};
use tokio::sync::mpsc;

use drillyard_sandbox_init::control::{Bind, Link, Made, Witness};

use super::engine::{Engine, is_missing};
use crate::host::{self, INIT, SQL_TOOL, TOOLS};
use crate::{Image, ImageReport, SandboxConfig, SandboxError};

/// Changes when what is put into images does.
const LAYOUT: &[u8] = b"1";
/// Directories that are mounted over: their content in an image is never seen.
const COVERED: [&str; 5] = ["dev", "proc", "sys", "tmp", "work"];
/// How long an engine may take to import an image.
const IMPORT: std::time::Duration = std::time::Duration::from_hours(1);

/// An image the engine has, and what containers of it need beside it.
pub struct Prepared {
    pub name: String,
    pub mounts: Vec<Mount>,
    /// Bound files that must be this host's.
    pub witnesses: Vec<Witness>,
    pub shell: String,
    pub env: Vec<String>,
    pub report: ImageReport,
}

/// What goes into an image.
#[derive(Default)]
struct Content {
    /// A root file system that comes first.
    base: Option<Utf8PathBuf>,
    /// Directories and empty files to mount on; true for directories.
    points: BTreeMap<String, bool>,
    made: Vec<Made>,
    links: Vec<Link>,
    /// Programs: where they lie and where they appear.
    programs: Vec<(Utf8PathBuf, String)>,
}

/// Sees to it that the engine has the configured image.
pub async fn prepare(
    engine: &Engine,
    config: &SandboxConfig,
    helpers: &Utf8Path,
) -> Result<Prepared, SandboxError> {
    let mut content = Content::default();
    for point in COVERED {
        content.points.insert(format!("/{point}"), true);
    }
    for program in [INIT, SQL_TOOL] {
        let path = helpers.join(program);
        if path.is_file() {
            content.programs.push((path, format!("{TOOLS}/{program}")));
        }
    }
    let (repository, binds, shell, env, report) = match &config.image {
        Image::Host => {
            let root = host::root(helpers, &config.host_paths)?;
            content.made = root.made;
            content.links = root.links;
            content.points.insert("/mnt".into(), true);
            content.points.insert("/run".into(), true);
            (
                "drillyard/host".to_owned(),
                root.binds,
                root.shell,
                root.env,
                root.report,
            )
        }
        Image::RootFs { dir, digest } => {
            content.base = Some(dir.clone());
            let shell = shell_of(dir)?;
            let report = ImageReport {
                name: "rootfs".to_owned(),
                digest: digest.clone(),
                system: system_of(dir),
            };
            (
                format!("drillyard/{}", component(digest)),
                host::extra_binds(&config.host_paths)?,
                shell,
                host::env(),
                report,
            )
        }
    };
    // Devices and what belongs to them is the engine's to make; what lies where sandboxes have files of their own is hidden
    // by them, as in any other sandbox.
    content.links.retain(|l| !l.inside.starts_with("/dev/"));
    let hidden = |path: &str| {
        let hiding = COVERED.iter().map(|c| format!("/{c}"));
        let mut hiding = hiding.chain(content.links.iter().map(|l| l.inside.clone()));
        hiding.any(|over| Utf8Path::new(path).starts_with(over))
    };
    let binds: Vec<Bind> = binds.into_iter().filter(|b| !hidden(&b.inside)).collect();
    for bind in &binds {
        let directory = Utf8Path::new(&bind.host).is_dir();
        content.points.insert(bind.inside.clone(), directory);
    }
    let tag = content.tag()?;
    let name = format!("{repository}:{tag}");
    match engine.api.inspect_image(&name).await {
        Ok(_) => {}
        Err(error) if is_missing(&error) => import(engine, &repository, &tag, content).await?,
        Err(error) => return Err(engine.fault("looking for the image", &error)),
    }
    let witnesses = binds
        .iter()
        .filter_map(|b| {
            // Files are replaced in the course of things, directories hardly ever.
            let meta = fs_err::metadata(&b.host)
                .ok()
                .filter(std::fs::Metadata::is_dir)?;
            Some(Witness {
                inside: b.inside.clone(),
                device: meta.dev(),
                inode: meta.ino(),
            })
        })
        .collect();
    Ok(Prepared {
        name,
        mounts: binds.iter().map(mount).collect(),
        witnesses,
        shell,
        env,
        report,
    })
}

/// A host path inside, read-only. Mounts below it stay outside: engines before Docker 25 would let them be written to.
fn mount(bind: &Bind) -> Mount {
    Mount {
        target: Some(bind.inside.clone()),
        source: Some(bind.host.clone()),
        typ: Some(MountType::BIND),
        read_only: Some(true),
        bind_options: Some(MountBindOptions {
            propagation: Some(MountBindOptionsPropagationEnum::RPRIVATE),
            non_recursive: Some(true),
            ..MountBindOptions::default()
        }),
        ..Mount::default()
    }
}

/// A digest as part of an image's name: lower case letters, digits and single dashes.
fn component(digest: &str) -> String {
    let mut name = String::new();
    for c in digest.to_ascii_lowercase().chars() {
        if c.is_ascii_alphanumeric() {
            name.push(c);
        } else if !name.is_empty() && !name.ends_with('-') {
            name.push('-');
        }
    }
    let name = name.trim_end_matches('-');
    if name.is_empty() {
        "rootfs".into()
    } else {
        name.into()
    }
}

/// The best shell of a root file system. Links count as being there: where they lead is only known inside.
fn shell_of(dir: &Utf8Path) -> Result<String, SandboxError> {
    let there = |path: &str| {
        fs_err::symlink_metadata(dir.join(path)).is_ok()
            || fs_err::symlink_metadata(dir.join("usr").join(path)).is_ok()
    };
    ["bin/bash", "bin/sh"]
        .into_iter()
        .find(|path| there(path))
        .map(|path| format!("/{path}"))
        .ok_or_else(|| SandboxError::Config {
            field: "image",
            message: format!("{dir} holds neither bin/bash nor bin/sh; is it a root file system?"),
        })
}

fn system_of(dir: &Utf8Path) -> String {
    // Not through a link that leads out of the directory: /etc/os-release usually is one.
    ["usr/lib/os-release", "etc/os-release"]
        .into_iter()
        .map(|path| dir.join(path))
        .filter(|path| fs_err::symlink_metadata(path).is_ok_and(|m| m.is_file()))
        .find_map(|path| fs_err::read_to_string(path).ok())
        .and_then(|text| {
            let line = text.lines().find_map(|l| l.strip_prefix("PRETTY_NAME="))?;
            Some(line.trim_matches('"').to_owned())
        })
        .unwrap_or_else(|| "unknown".to_owned())
}

impl Content {
    /// Names what is added to the base, so that an image made with other helper programs is another image.
    fn tag(&self) -> Result<String, SandboxError> {
        let mut hasher = blake3::Hasher::new();
        let mut add = |part: &[u8]| {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        };
        add(LAYOUT);
        for (point, directory) in &self.points {
            add(point.as_bytes());
            add(&[u8::from(*directory)]);
        }
        for made in &self.made {
            add(made.inside.as_bytes());
            add(made.text.as_bytes());
        }
        for link in &self.links {
            add(link.inside.as_bytes());
            add(link.target.as_bytes());
        }
        for (from, to) in &self.programs {
            add(to.as_bytes());
            add(&fs_err::read(from)?);
        }
        Ok(hasher.finalize().to_hex()[..16].to_owned())
    }

    fn write(&self, to: impl Write) -> io::Result<()> {
        let mut tar = Builder::new(to);
        if let Some(base) = &self.base {
            append_tree(&mut tar, base)?;
        }
        let entry = |kind: EntryType, mode: u32, size: usize| {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_size(size as u64);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header
        };
        let inside = |path: &str| path.trim_start_matches('/').to_owned();
        let mut add = |kind, mode, path: &str, bytes: &[u8]| {
            tar.append_data(&mut entry(kind, mode, bytes.len()), inside(path), bytes)
        };
        for (point, directory) in &self.points {
            if *directory {
                add(EntryType::Directory, 0o755, point, b"")?;
            } else {
                add(EntryType::Regular, 0o644, point, b"")?;
            }
        }
        for made in &self.made {
            add(
                EntryType::Regular,
                0o644,
                &made.inside,
                made.text.as_bytes(),
            )?;
        }
        for (from, path) in &self.programs {
            add(EntryType::Regular, 0o755, path, &fs_err::read(from)?)?;
        }
        for link in &self.links {
            let mut header = entry(EntryType::Symlink, 0o777, 0);
            tar.append_link(&mut header, inside(&link.inside), &link.target)?;
        }
        tar.into_inner()?.flush()
    }
}

/// Appends everything below a directory, following no link. What no root file system needs is left out: devices, pipes,
/// sockets, extended attributes, and the content of directories that are mounted over.
fn append_tree<W: Write>(tar: &mut Builder<W>, base: &Utf8Path) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    let mut seen = BTreeMap::new();
    let mut left = vec![std::path::PathBuf::new()];
    while let Some(dir) = left.pop() {
        let mut entries: Vec<_> =
            fs_err::read_dir(base.as_std_path().join(&dir))?.collect::<io::Result<_>>()?;
        entries.sort_by_key(fs_err::DirEntry::file_name);
        for found in entries {
            let path = dir.join(found.file_name());
            let meta = found.metadata()?;
            let mut header = Header::new_gnu();
            header.set_metadata(&meta);
            // Unpacked by an ordinary user, files belong to that user; they were root's.
            if meta.uid() == own {
                header.set_uid(0);
                header.set_gid(0);
            }
            if meta.is_dir() {
                header.set_size(0);
                tar.append_data(&mut header, &path, io::empty())?;
                let covered = COVERED.iter().any(|c| path.as_os_str() == *c);
                if !covered {
                    left.push(path);
                }
            } else if meta.is_symlink() {
                header.set_size(0);
                tar.append_link(&mut header, &path, fs_err::read_link(found.path())?)?;
            } else if meta.is_file() {
                let first = (meta.nlink() > 1)
                    .then(|| seen.get(&(meta.dev(), meta.ino())))
                    .flatten();
                if let Some(first) = first {
                    header.set_entry_type(EntryType::Link);
                    header.set_size(0);
                    tar.append_link(&mut header, &path, first)?;
                } else {
                    let file = fs_err::File::open(found.path())?;
                    tar.append_data(&mut header, &path, io::Read::take(file, meta.len()))?;
                    seen.insert((meta.dev(), meta.ino()), path);
                }
            }
        }
    }
    Ok(())
}

/// Hands what is written to it to a request's body.
struct Chunks(mpsc::Sender<io::Result<Bytes>>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .blocking_send(Ok(Bytes::copy_from_slice(bytes)))
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn import(
    engine: &Engine,
    repository: &str,
    tag: &str,
    content: Content,
) -> Result<(), SandboxError> {
    tracing::info!(repository, tag, "importing the image");
    let (send, mut receive) = mpsc::channel(16);
    let packing = tokio::task::spawn_blocking(move || {
        let packed = content.write(io::BufWriter::with_capacity(
            256 << 10,
            Chunks(send.clone()),
        ));
        if let Err(error) = &packed {
            // The engine must see that this is not all.
            let _ = send.blocking_send(Err(io::Error::new(error.kind(), error.to_string())));
        }
        packed
    });
    let options = CreateImageOptions {
        from_src: Some("-".into()),
        repo: Some(repository.to_owned()),
        tag: Some(tag.to_owned()),
        ..CreateImageOptions::default()
    };
    let body = futures::stream::poll_fn(move |cx| receive.poll_recv(cx));
    let api = engine.api.clone().with_timeout(IMPORT);
    let imported = async {
        let mut said = std::pin::pin!(api.create_image(
            Some(options),
            Some(bollard::body_try_stream(body)),
            None
        ));
        let mut id = None;
        while let Some(line) = said.next().await {
            id = line?.id.or(id);
        }
        // Podman takes no notice of the tag above.
        if let Some(id) = id.filter(|_| engine.podman) {
            let options = TagImageOptions {
                repo: Some(repository.to_owned()),
                tag: Some(tag.to_owned()),
            };
            api.tag_image(&id, Some(options)).await?;
        }
        Ok(())
    }
    .await;
    let packed = packing.await.map_err(io::Error::other)?;
    match (packed, imported) {
        (Err(error), _) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        (_, Err(error)) => Err(engine.fault("importing the image", &error)),
        (packed, Ok(())) => packed.map_err(Into::into),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_becomes_a_part_of_a_name() {
        assert_eq!(component("blake3:AbC--d"), "blake3-abc-d");
        assert_eq!(component("::"), "rootfs");
    }

    #[test]
    fn a_tree_is_packed_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let base = Utf8Path::from_path(dir.path()).unwrap();
        for sub in ["bin", "proc", "etc"] {
            fs_err::create_dir(base.join(sub)).unwrap();
        }
        fs_err::write(base.join("bin/sh"), "shell").unwrap();
        fs_err::hard_link(base.join("bin/sh"), base.join("bin/other")).unwrap();
        fs_err::write(base.join("proc/cpuinfo"), "x").unwrap();
        std::os::unix::fs::symlink("/etc/shadow", base.join("etc/link")).unwrap();
        rustix::fs::mkfifoat(
            rustix::fs::CWD,
            base.join("etc/pipe").as_std_path(),
            rustix::fs::Mode::RUSR,
        )
        .unwrap();
        let content = Content {
            base: Some(base.to_owned()),
            ..Content::default()
        };
        let mut bytes = Vec::new();
        content.write(&mut bytes).unwrap();
        let mut found = BTreeMap::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let entry = entry.unwrap();
            let link = entry.link_name().unwrap().map(|l| l.display().to_string());
            found.insert(
                entry.path().unwrap().display().to_string(),
                (entry.size(), link),
            );
        }
        let names: Vec<_> = found.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["bin/", "bin/other", "bin/sh", "etc/", "etc/link", "proc/"]
                .map(|n| n.trim_end_matches('/')),
            "{found:?}"
        );
        assert_eq!(found["etc/link"].1.as_deref(), Some("/etc/shadow"));
        assert_eq!(found["bin/sh"].1.as_deref(), Some("bin/other"));
        assert_eq!(shell_of(base).unwrap(), "/bin/sh");
    }
}
