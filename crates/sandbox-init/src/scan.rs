//! The files of a sandbox: what changed since the last look, copying all of them out, and writing them back.
//!
//! Runs while no tool is alive, walks by descriptors and follows no link.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use drillyard_sandbox_init::frame::put;
use drillyard_sandbox_init::init::{CONTENT_BYTES, Change, Changed, Entry, Kind};

use crate::birth::TOOL_ID;
use crate::sys;

/// Where files can be written, and what their paths are called.
const ROOTS: [(&CStr, &str); 3] = [
    (c"/work", ""),
    (c"/tmp", "/tmp/"),
    (c"/dev/shm", "/dev/shm/"),
];
/// Deeper directories are not looked into.
const MAX_DEPTH: usize = 100;
/// More files are not looked at.
const MAX_FILES: usize = 50_000;
/// Paths longer than this together are not kept.
const MAX_PATH_BYTES: usize = 8 << 20;
/// Changes are told while their part of a reply's head is smaller: a name may take six times its bytes there.
const MAX_TOLD_BYTES: usize = 32 << 20;
/// What a change takes of a head beside its path.
const TOLD_BYTES: usize = 400;
/// Larger files are not hashed.
const MAX_HASHED: u64 = 256 << 20;
/// While all files together are smaller, each is hashed at every look: writes through a shared mapping change neither
/// size nor times on a tmpfs.
const ALWAYS_HASHED: u64 = 1 << 20;
/// A file changed so shortly before a look may change again without its times telling.
const RACY_NS: i64 = 20_000_000;

type Hash = [u8; 32];

#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    kind: Kind,
    mode: u32,
    size: u64,
    hash: Option<Hash>,
    inode: u64,
    mtime_ns: i64,
    ctime_ns: i64,
    racy: bool,
}

/// What the files were at the last look.
#[derive(Default)]
pub struct Index {
    nodes: BTreeMap<Vec<u8>, Node>,
    /// Some files were out of reach: too many, too deep, too large.
    incomplete: bool,
}

impl Index {
    /// Takes the files as they are now for the state to compare with.
    pub fn look(&mut self) {
        let old = std::mem::take(self);
        *self = old.again();
    }

    /// Looks again and tells what changed, contents appended to `out`; the second is true where the changes are not
    /// enough to restore the state.
    pub fn changes(&mut self, out: &mut Vec<u8>) -> (Vec<Changed>, bool) {
        let old = std::mem::take(self);
        let new = old.again();
        let mut lost = new.incomplete || old.incomplete;
        let mut room = CONTENT_BYTES;
        let mut changes = Vec::new();
        let mut head = MAX_TOLD_BYTES;
        let mut files = Files::default();
        for (path, node) in &new.nodes {
            let before = old.nodes.get(path);
            if before.is_some_and(|b| {
                b.kind == node.kind
                    && b.mode == node.mode
                    && b.hash == node.hash
                    && (node.hash.is_some() || node.kind != Kind::File)
            }) {
                continue;
            }
            if !told(path, &mut head) {
                lost = true;
                break;
            }
            let name = text(path, &mut lost);
            let content = match node.kind {
                Kind::File if node.size <= room => files.content(path, node.size),
                Kind::Link => files.target(path).filter(|t| t.len() as u64 <= room),
                _ => None,
            };
            lost |= match node.kind {
                Kind::Dir => false,
                Kind::Other => true,
                Kind::File | Kind::Link => content.is_none() || node.hash.is_none(),
            };
            let span = content.map(|bytes| {
                room = room.saturating_sub(bytes.len() as u64);
                put(out, &bytes)
            });
            changes.push(Changed {
                path: name,
                change: if before.is_some() {
                    Change::Modified
                } else {
                    Change::Created
                },
                kind: node.kind,
                mode: node.mode,
                before: before.and_then(|b| b.hash).map(hex),
                after: node.hash.map(hex),
                size: node.size,
                content: span,
            });
        }
        for (path, node) in &old.nodes {
            if !new.nodes.contains_key(path) {
                if !told(path, &mut head) {
                    lost = true;
                    break;
                }
                changes.push(Changed {
                    path: text(path, &mut lost),
                    change: Change::Deleted,
                    kind: node.kind,
                    mode: node.mode,
                    before: node.hash.map(hex),
                    after: None,
                    size: 0,
                    content: None,
                });
            }
        }
        changes.sort_by(|a, b| a.path.cmp(&b.path));
        *self = new;
        (changes, lost)
    }

    /// The state now; hashes of untouched files are taken over.
    fn again(&self) -> Self {
        let mut found = Vec::new();
        let mut incomplete = false;
        let mut path_bytes = MAX_PATH_BYTES;
        for (root, name) in ROOTS {
            match open_dir(libc::AT_FDCWD, root) {
                Ok(dir) => walk(
                    &dir,
                    name.as_bytes(),
                    0,
                    &mut path_bytes,
                    &mut found,
                    &mut incomplete,
                ),
                Err(_) => incomplete = true,
            }
        }
        let total: u64 = found
            .iter()
            .filter(|(_, n)| n.kind == Kind::File)
            .fold(0, |sum, (_, n)| sum.saturating_add(n.size));
        let mut budget = MAX_HASHED;
        let mut files = Files::default();
        let mut nodes = BTreeMap::new();
        for (path, mut node) in found {
            if node.kind == Kind::File {
                let known = self.nodes.get(&path).filter(|b| {
                    total > ALWAYS_HASHED
                        && !b.racy
                        && b.hash.is_some()
                        && b.inode == node.inode
                        && b.size == node.size
                        && b.mtime_ns == node.mtime_ns
                        && b.ctime_ns == node.ctime_ns
                });
                if let Some(known) = known {
                    node.hash = known.hash;
                } else if node.size <= budget {
                    node.hash = files.hash(&path, node.size);
                    budget -= node.size;
                }
                incomplete |= node.hash.is_none();
            } else if node.kind == Kind::Link {
                node.hash = files.target(&path).map(|t| *blake3::hash(&t).as_bytes());
            }
            nodes.insert(path, node);
        }
        Self { nodes, incomplete }
    }
}

/// Every file with its content, appended to `out`.
pub fn pack(max_bytes: u64, out: &mut Vec<u8>) -> Result<Vec<Entry>, String> {
    let mut found = Vec::new();
    let mut incomplete = false;
    let mut path_bytes = MAX_PATH_BYTES;
    for (root, name) in ROOTS {
        let dir = open_dir(libc::AT_FDCWD, root)
            .map_err(|e| format!("{}: {e}", root.to_string_lossy()))?;
        walk(
            &dir,
            name.as_bytes(),
            0,
            &mut path_bytes,
            &mut found,
            &mut incomplete,
        );
    }
    if incomplete {
        return Err(format!(
            "more than {MAX_FILES} files or deeper than {MAX_DEPTH} directories"
        ));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    // Before any is read: holes cost nothing to whoever made them.
    let total = found
        .iter()
        .fold(0_u64, |sum, (_, node)| sum.saturating_add(node.size));
    if total > max_bytes {
        return Err(format!(
            "files are larger than {max_bytes} bytes together: {total}"
        ));
    }
    let mut entries = Vec::new();
    let mut head = MAX_TOLD_BYTES;
    let mut files = Files::default();
    for (path, node) in found {
        if !told(&path, &mut head) {
            return Err(format!(
                "names are longer than {MAX_TOLD_BYTES} bytes together"
            ));
        }
        let mut odd = false;
        let name = text(&path, &mut odd);
        if odd {
            return Err(format!("{name:?}: the name is not UTF-8"));
        }
        let bytes = match node.kind {
            Kind::File => files
                .content(&path, node.size)
                .ok_or_else(|| format!("{name}: cannot be read"))?,
            Kind::Link => files
                .target(&path)
                .ok_or_else(|| format!("{name}: cannot be read"))?,
            Kind::Dir => Vec::new(),
            Kind::Other => continue,
        };
        entries.push(Entry {
            path: name,
            kind: node.kind,
            mode: node.mode,
            mtime_ns: Some(node.mtime_ns),
            content: put(out, &bytes),
        });
        if out.len() as u64 > max_bytes {
            return Err(format!(
                "files and links are larger than {max_bytes} bytes together"
            ));
        }
    }
    Ok(entries)
}

/// Removes what is to be removed, then writes the given files, owned by the tools' user.
pub fn unpack(
    entries: &[Entry],
    remove: &[String],
    body: &[u8],
    own_id: u32,
) -> Result<(), String> {
    for path in remove {
        let (dir, name) = match parent(path, false, own_id) {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(format!("{path}: {e}")),
        };
        remove_all(dir.as_raw_fd(), &name, 0).map_err(|e| format!("{path}: {e}"))?;
    }
    for entry in entries {
        let bytes = entry
            .content
            .of(body)
            .ok_or_else(|| format!("{}: content lies outside the message", entry.path))?;
        write(entry, bytes, own_id).map_err(|e| format!("{}: {e}", entry.path))?;
    }
    // Directories last and from the bottom: what is written into them moves their times.
    for entry in entries.iter().rev() {
        if let (Kind::Dir, Some(time)) = (entry.kind, entry.mtime_ns)
            && let Ok((dir, name)) = parent(&entry.path, false, own_id)
        {
            let _ = sys::set_mtime_at(dir.as_raw_fd(), &name, time);
        }
    }
    Ok(())
}

fn write(entry: &Entry, bytes: &[u8], own_id: u32) -> io::Result<()> {
    let (dir, name) = parent(&entry.path, true, own_id)?;
    let at = dir.as_raw_fd();
    let there = sys::stat_at(at, &name).ok().map(|s| kind_of(s.st_mode));
    match entry.kind {
        Kind::Dir => {
            if there != Some(Kind::Dir) {
                remove_all(at, &name, 0)?;
                sys::mkdir_at(at, &name, 0o755)?;
            }
            let made = open_dir(at, &name)?;
            give(made.as_raw_fd(), c"", own_id)?;
            sys::fchmod(made.as_raw_fd(), entry.mode & 0o7777)?;
        }
        Kind::File => {
            remove_all(at, &name, 0)?;
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
            let file = sys::openat(at, &name, flags, 0o600)?;
            sys::write_all(file.as_raw_fd(), bytes)?;
            give(file.as_raw_fd(), c"", own_id)?;
            sys::fchmod(file.as_raw_fd(), entry.mode & 0o7777)?;
        }
        Kind::Link => {
            remove_all(at, &name, 0)?;
            let target =
                CString::new(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
            sys::symlink_at(&target, at, &name)?;
            give(at, &name, own_id)?;
        }
        Kind::Other => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
    match entry.mtime_ns {
        Some(time) => sys::set_mtime_at(at, &name, time),
        None => Ok(()),
    }
}

fn give(dir: RawFd, name: &CStr, own_id: u32) -> io::Result<()> {
    if own_id == TOOL_ID {
        return Ok(());
    }
    sys::chown_at(dir, name, TOOL_ID, TOOL_ID)
}

/// Opens the directory that holds a path, following no link, and gives the path's last name.
fn parent(path: &str, make: bool, own_id: u32) -> io::Result<(OwnedFd, CString)> {
    let invalid = || {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a path under /work, /tmp or /dev/shm",
        )
    };
    let under = |root: &str| {
        path.strip_prefix(root)
            .and_then(|rest| rest.strip_prefix('/'))
    };
    let (root, rest) = if let Some(rest) = under("/work") {
        (c"/work", rest)
    } else if let Some(rest) = under("/tmp") {
        (c"/tmp", rest)
    } else if let Some(rest) = under("/dev/shm") {
        (c"/dev/shm", rest)
    } else if path.starts_with('/') {
        return Err(invalid());
    } else {
        (c"/work", path)
    };
    let mut parts: Vec<&str> = rest
        .split('/')
        .filter(|p| !p.is_empty() && *p != ".")
        .collect();
    if parts.contains(&"..") {
        return Err(invalid());
    }
    let name = sys::c(parts.pop().ok_or_else(invalid)?)?;
    let mut dir = open_dir(libc::AT_FDCWD, root)?;
    for part in parts {
        let part = sys::c(part)?;
        dir = match open_dir(dir.as_raw_fd(), &part) {
            Ok(next) => next,
            Err(e) if make && e.raw_os_error() == Some(libc::ENOENT) => {
                sys::mkdir_at(dir.as_raw_fd(), &part, 0o755)?;
                let next = open_dir(dir.as_raw_fd(), &part)?;
                give(next.as_raw_fd(), c"", own_id)?;
                next
            }
            Err(e) => return Err(e),
        };
    }
    Ok((dir, name))
}

fn open_dir(at: RawFd, name: &CStr) -> io::Result<OwnedFd> {
    sys::openat(
        at,
        name,
        libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW,
        0,
    )
}

/// Opens the index's files by their names in it, one after another; names may be any bytes. The directories on the way
/// to the last one stay open, so that a file's depth is paid for once and not by each of its neighbours.
#[derive(Default)]
struct Files {
    root: usize,
    way: Vec<(Vec<u8>, OwnedFd)>,
}

impl Files {
    /// The directory that holds a file, and the file's name in it.
    fn locate(&mut self, path: &[u8]) -> io::Result<(RawFd, CString)> {
        let (root, rest) = ROOTS
            .iter()
            .enumerate()
            .skip(1)
            .find_map(|(i, (_, prefix))| Some((i, path.strip_prefix(prefix.as_bytes())?)))
            .unwrap_or((0, path));
        if root != self.root {
            self.root = root;
            self.way.clear();
        }
        if self.way.is_empty() {
            let dir = open_dir(libc::AT_FDCWD, ROOTS[root].0)?;
            self.way.push((Vec::new(), dir));
        }
        let mut parts: Vec<&[u8]> = rest.split(|b| *b == b'/').collect();
        let name = sys::c(parts.pop().unwrap_or_default())?;
        let common = self.way[1..]
            .iter()
            .zip(&parts)
            .take_while(|((known, _), part)| known == *part)
            .count();
        self.way.truncate(1 + common);
        for part in &parts[common..] {
            let dir = open_dir(self.last(), &sys::c(*part)?)?;
            self.way.push((part.to_vec(), dir));
        }
        Ok((self.last(), name))
    }

    fn last(&self) -> RawFd {
        self.way.last().map_or(-1, |(_, dir)| dir.as_raw_fd())
    }

    fn open(&mut self, path: &[u8]) -> io::Result<OwnedFd> {
        let (dir, name) = self.locate(path)?;
        let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = sys::openat(dir, &name, flags, 0)?;
        if kind_of(sys::fstat(file.as_raw_fd())?.st_mode) != Kind::File {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(file)
    }

    fn content(&mut self, path: &[u8], size: u64) -> Option<Vec<u8>> {
        let file = self.open(path).ok()?;
        let size = usize::try_from(size).ok()?;
        let mut bytes = vec![0; size];
        let mut got = 0;
        while got < size {
            match sys::read(file.as_raw_fd(), &mut bytes[got..]) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(_) => return None,
            }
        }
        bytes.truncate(got);
        Some(bytes)
    }

    fn hash(&mut self, path: &[u8], size: u64) -> Option<Hash> {
        let file = self.open(path).ok()?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; (64 << 10).min(usize::try_from(size).ok()?).max(1)];
        loop {
            match sys::read(file.as_raw_fd(), &mut buffer) {
                Ok(0) => return Some(*hasher.finalize().as_bytes()),
                Ok(n) => {
                    hasher.update(&buffer[..n]);
                }
                Err(_) => return None,
            }
        }
    }

    fn target(&mut self, path: &[u8]) -> Option<Vec<u8>> {
        let (dir, name) = self.locate(path).ok()?;
        sys::readlink_at(dir, &name).ok()
    }
}

/// Takes what a path costs off a head's room; false when there is none.
fn told(path: &[u8], head: &mut usize) -> bool {
    let escaped = path.iter().filter(|b| **b < 0x20).count();
    let cost = TOLD_BYTES + path.len() + 5 * escaped;
    match head.checked_sub(cost) {
        Some(left) => {
            *head = left;
            true
        }
        None => false,
    }
}

const fn kind_of(mode: u32) -> Kind {
    match mode & libc::S_IFMT {
        libc::S_IFREG => Kind::File,
        libc::S_IFDIR => Kind::Dir,
        libc::S_IFLNK => Kind::Link,
        _ => Kind::Other,
    }
}

fn walk(
    dir: &OwnedFd,
    prefix: &[u8],
    depth: usize,
    path_bytes: &mut usize,
    found: &mut Vec<(Vec<u8>, Node)>,
    incomplete: &mut bool,
) {
    let Ok(names) = sys::names(dir) else {
        *incomplete = true;
        return;
    };
    let now = now_ns();
    for name in names {
        let bytes = prefix.len() + name.as_bytes().len();
        if found.len() >= MAX_FILES || *path_bytes < bytes {
            *incomplete = true;
            return;
        }
        *path_bytes -= bytes;
        let Ok(stat) = sys::stat_at(dir.as_raw_fd(), &name) else {
            *incomplete = true;
            continue;
        };
        let mut path = prefix.to_vec();
        path.extend_from_slice(name.as_bytes());
        let kind = kind_of(stat.st_mode);
        let ctime_ns = stat.st_ctime * 1_000_000_000 + stat.st_ctime_nsec;
        found.push((
            path.clone(),
            Node {
                kind,
                mode: stat.st_mode & 0o7777,
                size: if kind == Kind::File {
                    stat.st_size as u64
                } else {
                    0
                },
                hash: None,
                inode: stat.st_ino,
                mtime_ns: stat.st_mtime * 1_000_000_000 + stat.st_mtime_nsec,
                ctime_ns,
                racy: now - ctime_ns < RACY_NS,
            },
        ));
        if kind == Kind::Dir {
            path.push(b'/');
            match (depth < MAX_DEPTH).then(|| open_dir(dir.as_raw_fd(), &name)) {
                Some(Ok(sub)) => walk(&sub, &path, depth + 1, path_bytes, found, incomplete),
                _ => *incomplete = true,
            }
        }
    }
}

/// Removes a file, or a directory with all it holds; what is not there is fine.
fn remove_all(dir: RawFd, name: &CStr, depth: usize) -> io::Result<()> {
    let stat = match sys::stat_at(dir, name) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
        other => other?,
    };
    if kind_of(stat.st_mode) != Kind::Dir {
        return sys::unlink_at(dir, name, 0);
    }
    if depth > 10 * MAX_DEPTH {
        return Err(io::Error::from_raw_os_error(libc::ELOOP));
    }
    let sub = open_dir(dir, name)?;
    for inner in sys::names(&sub)? {
        remove_all(sub.as_raw_fd(), &inner, depth + 1)?;
    }
    sys::unlink_at(dir, name, libc::AT_REMOVEDIR)
}

fn now_ns() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}

fn text(path: &[u8], odd: &mut bool) -> String {
    let name = String::from_utf8_lossy(path);
    *odd |= matches!(name, std::borrow::Cow::Owned(_));
    name.into_owned()
}

fn hex(hash: Hash) -> String {
    blake3::Hash::from_bytes(hash).to_hex().to_string()
}
