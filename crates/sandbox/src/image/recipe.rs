//! Recipes: small images from a distribution's packages, or from the programs of this host.

use std::collections::BTreeSet;
use std::io;
use std::process::{Command, Stdio};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_sandbox_init::time::nanoseconds;
use serde::Deserialize;

use super::tree::{self, Writer};
use super::{ImageStore, NewTree, StoredImage, failed, problem, wrong_name};
use crate::{Call, CallOutcome, Image, Pool, SandboxConfig, SandboxError, Setup};

/// How to build an image, as a small TOML file:
///
/// ```toml
/// name = "tools"
/// from = "debian:bookworm"            # or "host-slice": the named programs of this host and what they load
/// packages = ["bash", "sqlite3"]      # of the distribution; for host-slice, names of programs
/// run = ["sqlite3 /opt/empty.db 'create table t (x)'"]   # in a sandbox of the image so far, without network
///
/// [[files]]
/// to = "/etc/motd"
/// text = "hello\n"                    # or: from = "path on this host" (a file or a directory)
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The image's name.
    pub name: String,
    /// `debian:SUITE`, `ubuntu:SUITE`, or `host-slice`.
    pub from: String,
    /// Packages, or programs of this host.
    #[serde(default)]
    pub packages: Vec<String>,
    /// Files to put in.
    #[serde(default)]
    pub files: Vec<RecipeFile>,
    /// Command lines to run inside, one after another.
    #[serde(default)]
    pub run: Vec<String>,
    /// Its text, for the image's record.
    #[serde(skip)]
    text: String,
}

/// A file of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipeFile {
    /// Where it goes, absolute.
    pub to: String,
    /// Its text.
    pub text: Option<String>,
    /// Where it, or a directory, lies on this host.
    pub from: Option<Utf8PathBuf>,
    /// Permission bits of a text.
    pub mode: Option<u32>,
}

impl Recipe {
    /// Reads a recipe.
    pub fn parse(text: &str) -> Result<Self, SandboxError> {
        let mut recipe: Self = toml::from_str(text).map_err(|e| problem("the recipe", e))?;
        text.clone_into(&mut recipe.text);
        if let Some(wrong) = wrong_name(&recipe.name) {
            return Err(problem("the recipe", format!("name: {wrong}")));
        }
        for file in &recipe.files {
            if !file.to.starts_with('/') {
                let message = format!("files: '{}' is not absolute", file.to);
                return Err(problem(&recipe.name, message));
            }
            if file.text.is_some() == file.from.is_some() {
                let message = format!("files: {} needs either text or from", file.to);
                return Err(problem(&recipe.name, message));
            }
        }
        Ok(recipe)
    }

    pub(super) fn text(&self) -> String {
        self.text.clone()
    }
}

/// Where a distribution's packages come from.
fn mirror(distribution: &str) -> Option<&'static str> {
    match distribution {
        "debian" => Some("http://deb.debian.org/debian"),
        "ubuntu" => Some("http://archive.ubuntu.com/ubuntu"),
        _ => None,
    }
}

impl ImageStore {
    /// Builds an image; `progress` hears of each step. Its commands run in sandboxes of `sandbox`'s limits.
    pub async fn build(
        &self,
        recipe: &Recipe,
        sandbox: &SandboxConfig,
        progress: &mut (dyn FnMut(&str) + Send),
    ) -> Result<StoredImage, SandboxError> {
        // Nobody else sees it before it is whole: it has neither a name nor a digest until then.
        let base = self.base(recipe, progress)?;
        let whole = if recipe.run.is_empty() {
            base
        } else {
            self.run(recipe, &base, sandbox, progress).await?
        };
        self.keep(&whole, &recipe.name, "recipe", 0, Some(recipe.text()))
    }

    /// Runs a recipe's commands, each of which must succeed, and puts what they changed over the image so far.
    async fn run(
        &self,
        recipe: &Recipe,
        base: &NewTree,
        sandbox: &SandboxConfig,
        progress: &mut (dyn FnMut(&str) + Send),
    ) -> Result<NewTree, SandboxError> {
        let failed = |e: io::Error| failed(&recipe.name, e);
        let root = tree::open_root(&base.rootfs)?;
        let pool = Pool::start(SandboxConfig {
            image: Image::RootFs {
                dir: base.rootfs.clone(),
                digest: tree::digest(&root).map_err(failed)?,
            },
            pool_size: 0,
            host_paths: Vec::new(),
            cache_dir: None,
            ..sandbox.clone()
        })
        .await?;
        let mut inside = pool.lease(&Setup::default()).await?;
        for command in &recipe.run {
            progress(&format!("running {command}"));
            let result = inside.call(Call::shell(command)).await?;
            if result.outcome != CallOutcome::Ok {
                return Err(SandboxError::Setup {
                    command: command.clone(),
                    outcome: result.outcome.as_str(),
                    said: String::from_utf8_lossy(&result.stderr).into_owned(),
                });
            }
        }
        let changed = inside.snapshot().await?;
        inside.close().await;
        drop(pool);
        progress("putting the image together");
        let new = self.new_tree()?;
        let mut writer = new.writer(self.caps).map_err(failed)?;
        tree::copy(&root, &mut writer).map_err(failed)?;
        changed.onto(&mut writer).map_err(failed)?;
        writer.finish().map_err(failed)?;
        Ok(new)
    }

    /// Builds an image without running anything inside.
    fn base(
        &self,
        recipe: &Recipe,
        progress: &mut dyn FnMut(&str),
    ) -> Result<NewTree, SandboxError> {
        let failed = |e: io::Error| failed(&recipe.name, e);
        let new = self.new_tree()?;
        let mut writer = new.writer(self.caps).map_err(failed)?;
        writer.dir(b"", 0o755, None).map_err(failed)?;
        if recipe.from == "host-slice" {
            progress("copying programs of this host");
            let files = programs(&recipe.packages)?;
            slice(&files, &mut writer).map_err(failed)?;
        } else {
            let (distribution, suite) = recipe.from.split_once(':').unwrap_or((&recipe.from, ""));
            let plain = |s: &str| {
                !s.is_empty()
                    && !s.starts_with('-')
                    && s.bytes()
                        .all(|b| b.is_ascii_alphanumeric() || b"-+.:".contains(&b))
            };
            let Some(mirror) = mirror(distribution).filter(|_| plain(suite)) else {
                return Err(problem(
                    &recipe.name,
                    format!(
                        "from: '{}' is unknown; there are debian:SUITE, ubuntu:SUITE and host-slice",
                        recipe.from
                    ),
                ));
            };
            if let Some(odd) = recipe.packages.iter().find(|p| !plain(p)) {
                return Err(problem(
                    &recipe.name,
                    format!("packages: '{odd}' is no name of a package"),
                ));
            }
            let boot = bootstrap(suite, mirror, &recipe.packages, new.dir(), progress)?;
            let root = tree::open_root(&boot).map_err(failed)?;
            tree::copy(&root, &mut writer).map_err(failed)?;
            let above = tree::open_root(new.dir()).map_err(failed)?;
            tree::remove_all(&above, BOOT.as_bytes(), 0).map_err(failed)?;
        }
        for file in &recipe.files {
            progress(&format!("putting {} in", file.to));
            put(file, &mut writer).map_err(failed)?;
        }
        writer.finish().map_err(failed)?;
        Ok(new)
    }
}

fn put(file: &RecipeFile, to: &mut Writer) -> io::Result<()> {
    let name = file.to.trim_start_matches('/').as_bytes();
    if let Some(text) = &file.text {
        return to.file(
            name,
            file.mode.unwrap_or(0o644),
            Some(0),
            &mut text.as_bytes(),
        );
    }
    let Some(from) = &file.from else {
        return Ok(());
    };
    // What the recipe names may be a link; what lies in it is taken as it is.
    let from = &fs_err::canonicalize(from)
        .and_then(|path| Utf8PathBuf::from_path_buf(path).map_err(not_utf8))?;
    if !from.is_dir() {
        return copy_file(from, name, to);
    }
    let root = tree::open_root(from)?;
    let at = |path: &[u8]| [name, b"/", path].concat();
    to.dir(name, 0o755, Some(0))?;
    tree::walk(&root, &mut |seen| match &seen.what {
        tree::What::Dir => to.dir(&at(seen.path), seen.mode, Some(0)),
        tree::What::File {
            dir, name, mtime, ..
        } => {
            let mut file = tree::open_file(dir, name)?;
            to.file(&at(seen.path), seen.mode, Some(*mtime), &mut file)
        }
        tree::What::Link(target) => to.link(&at(seen.path), target, Some(0)),
        tree::What::Special => Ok(()),
    })
}

fn copy_file(from: &Utf8Path, name: &[u8], to: &mut Writer) -> io::Result<()> {
    let mut file = fs_err::File::open(from)?;
    let meta = file.metadata()?;
    let mode = std::os::unix::fs::MetadataExt::mode(&meta);
    let mtime = nanoseconds(std::os::unix::fs::MetadataExt::mtime(&meta), 0);
    to.file(name, mode, Some(mtime), &mut file)
}

#[expect(clippy::needless_pass_by_value, reason = "what map_err hands over")]
fn not_utf8(path: std::path::PathBuf) -> io::Error {
    io::Error::other(format!("{}: the name is not UTF-8", path.display()))
}

/// Where programs lie on this host.
fn programs(names: &[String]) -> Result<Vec<Utf8PathBuf>, SandboxError> {
    let find = |name: &String| {
        which(name).ok_or_else(|| SandboxError::Tool {
            message: format!("packages: the program '{name}' is not on this host"),
        })
    };
    names.iter().map(find).collect()
}

/// Copies programs of this host and all they load. Links on the way (of a merged /usr, of sonames, of alternatives)
/// stay links.
fn slice(programs: &[Utf8PathBuf], to: &mut Writer) -> io::Result<()> {
    let mut done = BTreeSet::new();
    for dir in ["tmp", "work", "proc", "dev", "run", "var", "etc"] {
        to.dir(dir.as_bytes(), 0o755, Some(0))?;
    }
    for path in programs {
        for needed in closure(path)?.into_iter().chain([path.clone()]) {
            trace(&needed, to, &mut done, 0)?;
        }
    }
    Ok(())
}

fn which(program: &str) -> Option<Utf8PathBuf> {
    if program.starts_with('/') {
        return Some(Utf8PathBuf::from(program)).filter(|p| p.is_file());
    }
    ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        .iter()
        .map(|dir| Utf8Path::new(dir).join(program))
        .find(|p| p.is_file())
}

/// What the loader says a program needs; scripts and static programs need nothing.
fn closure(program: &Utf8Path) -> io::Result<Vec<Utf8PathBuf>> {
    let said = Command::new("ldd")
        .arg(program)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::null())
        .output()?;
    if !said.status.success() {
        return Ok(Vec::new());
    }
    Ok(String::from_utf8_lossy(&said.stdout)
        .lines()
        .filter_map(|line| {
            let place = line
                .split_once("=>")
                .map_or(line, |(_, place)| place)
                .trim();
            let place = place.split(" (").next()?.trim();
            place.starts_with('/').then(|| Utf8PathBuf::from(place))
        })
        .collect())
}

/// Copies a path with every link on the way to it.
fn trace(
    path: &Utf8Path,
    to: &mut Writer,
    done: &mut BTreeSet<Utf8PathBuf>,
    depth: usize,
) -> io::Result<()> {
    if depth > 40 {
        return Err(io::Error::other(format!("{path}: links without end")));
    }
    let mut above = Utf8PathBuf::from("/");
    let parts: Vec<&str> = path.as_str().split('/').filter(|p| !p.is_empty()).collect();
    for (at, part) in parts.iter().enumerate() {
        if *part == ".." {
            above.pop();
            continue;
        }
        let here = above.join(part);
        let meta = fs_err::symlink_metadata(&here)?;
        if meta.is_symlink() {
            let target = fs_err::read_link(&here)?;
            let target = Utf8PathBuf::from_path_buf(target).map_err(not_utf8)?;
            if done.insert(here.clone()) {
                to.link(&inside(&here), target.as_str().as_bytes(), Some(0))?;
            }
            let rest: Utf8PathBuf = parts[at + 1..].iter().collect();
            return trace(&above.join(target).join(rest), to, done, depth + 1);
        }
        if meta.is_file() && done.insert(here.clone()) {
            copy_file(&here, &inside(&here), to)?;
        }
        above = here;
    }
    Ok(())
}

fn inside(path: &Utf8Path) -> Vec<u8> {
    path.as_str().trim_start_matches('/').as_bytes().to_vec()
}

/// Where a distribution's tree is put together, beside the image's own.
const BOOT: &str = "boot";

/// Has mmdebstrap or debootstrap make a tree beneath `dir`.
fn bootstrap(
    suite: &str,
    mirror: &str,
    packages: &[String],
    dir: &Utf8Path,
    progress: &mut dyn FnMut(&str),
) -> Result<Utf8PathBuf, SandboxError> {
    let boot = dir.join(BOOT);
    let root = rustix::process::geteuid().is_root();
    let mut command = if which("mmdebstrap").is_some() {
        let mut command = Command::new("mmdebstrap");
        command.arg("--variant=minbase").arg("--format=directory");
        command
    } else if which("debootstrap").is_some() && root {
        let mut command = Command::new("debootstrap");
        command.arg("--variant=minbase");
        command
    } else {
        let message = if root {
            "packages need mmdebstrap or debootstrap; install one: apt-get install mmdebstrap"
        } else {
            "packages need mmdebstrap (debootstrap works as root only); install it: apt-get install mmdebstrap"
        };
        return Err(SandboxError::Tool {
            message: message.to_owned(),
        });
    };
    progress(&format!("installing packages of {suite}"));
    if !packages.is_empty() {
        command.arg(format!("--include={}", packages.join(",")));
    }
    let done = command
        .args([suite, boot.as_str(), mirror])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        let last: Vec<&str> = said.lines().rev().take(5).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        return Err(SandboxError::Tool {
            message: format!(
                "{} failed: {}",
                command.get_program().display(),
                last.join("\n")
            ),
        });
    }
    Ok(boot)
}
