//! The files of a sandbox: what changed since the last look, copying all of them out, and writing them back.
//!
//! Runs while no tool is alive, walks by descriptors and follows no link. Where read-only layers lie beneath, only what
//! was written above them is walked: the layers' own files are looked at one by one, where something covers them.
//!
//! Sizes, times and names are the tools' to choose, and a panic here ends the sandbox: no sum is left unchecked.

#![warn(clippy::arithmetic_side_effects)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

use drillyard_sandbox_init::frame::put;
use drillyard_sandbox_init::init::{CONTENT_BYTES, Change, Changed, Entry, Kind, Reply};
use drillyard_sandbox_init::time::nanoseconds;

use crate::birth::TOOL_ID;
use crate::sys;

/// Deeper directories are not looked into.
const MAX_DEPTH: usize = 100;
/// Deeper directories are not removed.
const MAX_REMOVED_DEPTH: usize = 1000;
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
/// Where more files of the layers are hidden at once (`rm -rf /usr`), only the first of them are listed; the directory
/// they were in always is.
const MAX_HIDDEN: usize = 10_000;
/// Bytes of the layers' files hashed a look, to tell what a changed file was before.
const MAX_BEFORE: u64 = 64 << 20;
/// Of the root's own files: mount points, and the tools put there from outside.
const NOT_OF_THE_ROOT: [&[u8]; 5] = [b"/dev", b"/proc", b"/work", b"/tmp", b"/opt/drillyard"];

type Hash = [u8; 32];

/// A place where files can be written.
pub struct Area {
    /// Where tools see it.
    root: &'static CStr,
    /// What paths of its files begin with.
    prefix: &'static str,
    /// What it is made of, where layers lie beneath.
    overlay: Option<Overlay>,
}

impl Area {
    pub const fn new(root: &'static CStr, prefix: &'static str, overlay: Option<Overlay>) -> Self {
        Self {
            root,
            prefix,
            overlay,
        }
    }

    /// The places where files can be written in a root that cannot, with nothing beneath them.
    pub fn plain() -> Vec<Self> {
        vec![
            Self::new(c"/work", "", None),
            Self::new(c"/tmp", "/tmp/", None),
            Self::new(c"/dev/shm", "/dev/shm/", None),
        ]
    }
}

/// The two sides of an overlay, as directories.
pub struct Overlay {
    /// What was written.
    pub upper: OwnedFd,
    /// What the layers show together.
    pub lower: OwnedFd,
}

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

impl Node {
    fn of(stat: &libc::stat, now: i64) -> Self {
        let kind = kind_of(stat.st_mode);
        let ctime_ns = nanoseconds(stat.st_ctime, stat.st_ctime_nsec);
        Self {
            kind,
            mode: stat.st_mode & 0o7777,
            size: if kind == Kind::File {
                stat.st_size as u64
            } else {
                0
            },
            hash: None,
            inode: stat.st_ino,
            mtime_ns: nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
            ctime_ns,
            racy: now.saturating_sub(ctime_ns) < RACY_NS,
        }
    }

    /// Whether two have the same content, as far as can be told.
    fn same(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.mode == other.mode
            && self.hash == other.hash
            && (other.hash.is_some() || other.kind != Kind::File)
    }
}

type Nodes = BTreeMap<Vec<u8>, Node>;
/// By the name that hides them.
type Hidden = BTreeMap<Vec<u8>, Rc<Vec<(Vec<u8>, Node)>>>;

/// What the files were at the last look.
pub struct Index<'a> {
    areas: &'a [Area],
    /// What is there; of an overlay, what was written.
    nodes: Nodes,
    /// What the layers have where something was written.
    under: Nodes,
    /// What the layers have and nobody sees.
    gone: Nodes,
    /// Names that hide something, with what it is: it never changes and may be much.
    hidden: Hidden,
    /// Some files were out of reach: too many, or too deep.
    incomplete: bool,
}

/// What changed between two looks.
pub struct Changes {
    /// Sorted by path.
    pub list: Vec<Changed>,
    /// Of some in the list the content, which it would take to restore them, is not there.
    pub contents_missing: bool,
    /// More may have changed than the list tells.
    pub incomplete: bool,
}

/// What one look found.
struct Found {
    nodes: Vec<(Vec<u8>, Node)>,
    under: Nodes,
    gone: Nodes,
    hidden: Hidden,
    /// Whiteouts and opaque directories that hide something.
    removed: Vec<Vec<u8>>,
    /// Room for more paths.
    path_bytes: usize,
    incomplete: bool,
}

impl Found {
    const fn new() -> Self {
        Self {
            nodes: Vec::new(),
            under: BTreeMap::new(),
            gone: BTreeMap::new(),
            hidden: BTreeMap::new(),
            removed: Vec::new(),
            path_bytes: MAX_PATH_BYTES,
            incomplete: false,
        }
    }

    /// Takes a path off the room; false when there is none.
    const fn keeps(&mut self, path: &[u8]) -> bool {
        match self.path_bytes.checked_sub(path.len()) {
            Some(left) => {
                self.path_bytes = left;
                true
            }
            None => false,
        }
    }
}

impl<'a> Index<'a> {
    pub const fn new(areas: &'a [Area]) -> Self {
        Self {
            areas,
            nodes: BTreeMap::new(),
            under: BTreeMap::new(),
            gone: BTreeMap::new(),
            hidden: BTreeMap::new(),
            incomplete: false,
        }
    }

    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::new(self.areas))
    }

    /// Takes the files as they are now for the state to compare with.
    pub fn look(&mut self) {
        let old = self.take();
        *self = old.again();
    }

    /// Looks again and tells what changed, contents appended to `out`.
    pub fn changes(&mut self, out: &mut Vec<u8>) -> Changes {
        let old = self.take();
        let new = old.again();
        let mut incomplete = new.incomplete || old.incomplete;
        let mut contents_missing = false;
        let mut room = CONTENT_BYTES;
        let mut before_budget = MAX_BEFORE;
        let mut changes = Vec::new();
        let mut head = MAX_TOLD_BYTES;
        let mut files = Files::new(self.areas);
        let mut layers = Files::beneath(self.areas);
        // Where nothing is written any more but was, the layer's file shows again.
        let uncovered = old
            .nodes
            .keys()
            .filter_map(|path| Some((path, old.under.get(path)?)))
            .chain(&old.gone)
            .filter(|(path, _)| !new.nodes.contains_key(*path) && !new.gone.contains_key(*path));
        let now = new.nodes.iter().chain(uncovered);
        for (path, node) in now {
            let mut of_layer = |node: &Node| Node {
                hash: node
                    .hash
                    .or_else(|| layers.hash_of(path, node, &mut before_budget)),
                ..node.clone()
            };
            let before = match old.nodes.get(path) {
                Some(before) => Some(before.clone()),
                None if old.gone.contains_key(path) => None,
                None => new.under.get(path).map(&mut of_layer),
            };
            let node = if new.nodes.contains_key(path) {
                node.clone()
            } else {
                of_layer(node)
            };
            if before.as_ref().is_some_and(|b| b.same(&node)) {
                continue;
            }
            if !told(path, &mut head) {
                incomplete = true;
                break;
            }
            let name = text(path, &mut incomplete);
            let content = match node.kind {
                Kind::File if node.size <= room => files.content(path, node.size),
                Kind::Link => files.target(path).filter(|t| t.len() as u64 <= room),
                _ => None,
            };
            contents_missing |= match node.kind {
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
        let vanished = old.nodes.iter().filter(|(path, _)| {
            !new.nodes.contains_key(*path)
                && (new.gone.contains_key(*path) || !old.under.contains_key(*path))
        });
        let hidden = new
            .gone
            .iter()
            .filter(|(path, _)| !old.nodes.contains_key(*path) && !old.gone.contains_key(*path));
        for (path, node) in vanished.chain(hidden) {
            if !told(path, &mut head) {
                incomplete = true;
                break;
            }
            let hash = node
                .hash
                .or_else(|| layers.hash_of(path, node, &mut before_budget));
            changes.push(Changed {
                path: text(path, &mut incomplete),
                change: Change::Deleted,
                kind: node.kind,
                mode: node.mode,
                before: hash.map(hex),
                after: None,
                size: 0,
                content: None,
            });
        }
        changes.sort_by(|a, b| a.path.cmp(&b.path));
        *self = new;
        Changes {
            list: changes,
            contents_missing,
            incomplete,
        }
    }

    fn find(&self) -> Found {
        let mut found = Found::new();
        for area in self.areas {
            if let Some(overlay) = &area.overlay {
                let sides = Sides {
                    upper: &overlay.upper,
                    lower: Some(&overlay.lower),
                    opaque: false,
                };
                walk_over(&sides, area.prefix.as_bytes(), 0, &self.hidden, &mut found);
                continue;
            }
            match open_dir(libc::AT_FDCWD, area.root) {
                Ok(dir) => walk(&dir, area.prefix.as_bytes(), 0, &mut found),
                Err(_) => found.incomplete = true,
            }
        }
        found
    }

    /// The state now; hashes of untouched files are taken over.
    fn again(&self) -> Self {
        let found = self.find();
        let total: u64 = found
            .nodes
            .iter()
            .filter(|(_, n)| n.kind == Kind::File)
            .fold(0, |sum, (_, n)| sum.saturating_add(n.size));
        let mut budget = MAX_HASHED;
        let mut under_budget = MAX_HASHED;
        let mut files = Files::new(self.areas);
        let mut layers = Files::beneath(self.areas);
        let mut nodes = BTreeMap::new();
        let mut under = found.under;
        for (path, mut node) in found.nodes {
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
                } else {
                    node.hash = files.hash(&path, node.size, &mut budget);
                }
            } else if node.kind == Kind::Link {
                node.hash = files.target(&path).map(|t| *blake3::hash(&t).as_bytes());
            }
            // Copied up, but not changed.
            if let Some(below) = under.get_mut(&path) {
                if let Some(known) = self.under.get(&path) {
                    below.hash = known.hash;
                }
                let alike =
                    below.kind == node.kind && below.mode == node.mode && below.size == node.size;
                if alike && below.hash.is_none() && below.kind != Kind::Dir {
                    below.hash = layers.hash_of(&path, below, &mut under_budget);
                }
                if alike && below.same(&node) {
                    under.remove(&path);
                    continue;
                }
            }
            nodes.insert(path, node);
        }
        Self {
            areas: self.areas,
            nodes,
            under,
            gone: found.gone,
            hidden: found.hidden,
            incomplete: found.incomplete,
        }
    }

    /// Every file with its content, appended to `out`; of the root, and with `delta` of /work too, only what differs from
    /// the layers beneath, and what of them is hidden.
    pub fn pack(&self, max_bytes: u64, delta: bool, out: &mut Vec<u8>) -> Result<Reply, String> {
        let mut found = Found::new();
        for area in self.areas {
            let prefix = area.prefix.as_bytes();
            match &area.overlay {
                Some(overlay) if delta || area.prefix == "/" => {
                    let sides = Sides {
                        upper: &overlay.upper,
                        lower: Some(&overlay.lower),
                        opaque: false,
                    };
                    walk_over(&sides, prefix, 0, &self.hidden, &mut found);
                }
                _ => {
                    let dir = open_dir(libc::AT_FDCWD, area.root)
                        .map_err(|e| format!("{}: {e}", area.root.to_string_lossy()))?;
                    walk(&dir, prefix, 0, &mut found);
                }
            }
        }
        if found.incomplete {
            return Err(format!(
                "more than {MAX_FILES} files or deeper than {MAX_DEPTH} directories"
            ));
        }
        found.nodes.sort_by(|a, b| a.0.cmp(&b.0));
        found.removed.sort();
        // Before any is read: holes cost nothing to whoever made them.
        let total = found
            .nodes
            .iter()
            .fold(0_u64, |sum, (_, node)| sum.saturating_add(node.size));
        if total > max_bytes {
            return Err(format!(
                "files are larger than {max_bytes} bytes together: {total}"
            ));
        }
        let mut head = MAX_TOLD_BYTES;
        let mut plain = |path: &[u8]| {
            if !told(path, &mut head) {
                return Err(format!(
                    "names are longer than {MAX_TOLD_BYTES} bytes together"
                ));
            }
            let mut odd = false;
            let name = text(path, &mut odd);
            if odd {
                return Err(format!("{name:?}: the name is not UTF-8"));
            }
            Ok(name)
        };
        let (mut entries, mut left_out) = (Vec::new(), 0);
        let mut files = Files::new(self.areas);
        for (path, node) in found.nodes {
            let name = plain(&path)?;
            let bytes = match node.kind {
                Kind::File => files.content(&path, node.size),
                Kind::Link => files.target(&path),
                Kind::Dir => Some(Vec::new()),
                Kind::Other => {
                    left_out = u64::saturating_add(left_out, 1);
                    continue;
                }
            }
            .ok_or_else(|| format!("{name}: cannot be read"))?;
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
        let removed = found
            .removed
            .iter()
            .map(|path| plain(path))
            .collect::<Result<_, _>>()?;
        Ok(Reply::Packed {
            entries,
            removed,
            left_out,
        })
    }
}

/// A directory of an overlay while it is walked.
struct Sides<'a> {
    upper: &'a OwnedFd,
    /// The layers' directory of the same name, if they have one.
    lower: Option<&'a OwnedFd>,
    /// Nothing of the layers shows through.
    opaque: bool,
}

/// The mark the kernel leaves where a file of the layers was deleted.
fn is_whiteout(stat: &libc::stat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFCHR && stat.st_rdev == 0
}

fn walk_over(sides: &Sides<'_>, prefix: &[u8], depth: usize, known: &Hidden, found: &mut Found) {
    let Ok(names) = sys::names(sides.upper) else {
        found.incomplete = true;
        return;
    };
    let now = now_ns();
    let mut seen = BTreeSet::new();
    for name in names {
        let path = [prefix, name.as_bytes()].concat();
        if prefix.first() == Some(&b'/') && NOT_OF_THE_ROOT.contains(&path.as_slice()) {
            continue;
        }
        if found.nodes.len() >= MAX_FILES || !found.keeps(&path) {
            found.incomplete = true;
            return;
        }
        let Ok(stat) = sys::stat_at(sides.upper.as_raw_fd(), &name) else {
            found.incomplete = true;
            continue;
        };
        let below = sides.lower.and_then(|lower| below(lower, &name, now));
        if sides.opaque {
            seen.insert(name.clone());
        }
        if is_whiteout(&stat) {
            if let (Some(below), Some(lower)) = (below, sides.lower) {
                if !sides.opaque {
                    found.removed.push(path.clone());
                }
                hide(lower, &name, path, below, known, found);
            }
            continue;
        }
        let node = Node::of(&stat, now);
        let is_dir = node.kind == Kind::Dir;
        let was_dir = below.as_ref().is_some_and(|b| b.kind == Kind::Dir);
        if was_dir
            && !is_dir
            && let Some(lower) = sides.lower
        {
            hide_below(lower, &name, &path, known, found);
        }
        if let Some(below) = below {
            found.under.insert(path.clone(), below);
        }
        found.nodes.push((path.clone(), node));
        if !is_dir {
            continue;
        }
        let Some(Ok(upper)) = (depth < MAX_DEPTH).then(|| open_dir(sides.upper.as_raw_fd(), &name))
        else {
            found.incomplete = true;
            continue;
        };
        let opaque =
            sys::attribute(upper.as_raw_fd(), c"user.overlay.opaque").is_some_and(|v| v == b"y");
        let lower = sides
            .lower
            .filter(|_| was_dir)
            .and_then(|lower| open_dir(lower.as_raw_fd(), &name).ok());
        if opaque && !sides.opaque && lower.is_some() {
            found.removed.push(path.clone());
        }
        let inner = Sides {
            upper: &upper,
            lower: lower.as_ref(),
            opaque: opaque || sides.opaque,
        };
        walk_over(
            &inner,
            &[&path, &b"/"[..]].concat(),
            depth.saturating_add(1),
            known,
            found,
        );
    }
    if let (true, Some(lower)) = (sides.opaque, sides.lower) {
        for name in sys::names(lower).unwrap_or_default() {
            if !seen.contains(&name)
                && let Some(below) = below(lower, &name, now)
            {
                let path = [prefix, name.as_bytes()].concat();
                if !found.keeps(&path) {
                    found.incomplete = true;
                    return;
                }
                hide(lower, &name, path, below, known, found);
            }
        }
    }
}

/// What the layers have under a name.
fn below(lower: &OwnedFd, name: &CStr, now: i64) -> Option<Node> {
    let stat = sys::stat_at(lower.as_raw_fd(), name).ok()?;
    (!is_whiteout(&stat)).then(|| Node::of(&stat, now))
}

/// Notes that a file of the layers, with all it holds, is not seen.
fn hide(
    lower: &OwnedFd,
    name: &CStr,
    path: Vec<u8>,
    node: Node,
    known: &Hidden,
    found: &mut Found,
) {
    if node.kind == Kind::Dir {
        hide_below(lower, name, &path, known, found);
    }
    found.gone.insert(path, node);
}

fn hide_below(lower: &OwnedFd, name: &CStr, path: &[u8], known: &Hidden, found: &mut Found) {
    let list = known.get(path).map_or_else(
        || {
            let mut list = Vec::new();
            if let Ok(dir) = open_dir(lower.as_raw_fd(), name) {
                let mut path_bytes = found.path_bytes;
                gather(&dir, &[path, b"/"].concat(), 0, &mut path_bytes, &mut list);
            }
            Rc::new(list)
        },
        Rc::clone,
    );
    for (path, node) in list.iter() {
        if !found.keeps(path) {
            break;
        }
        found.gone.insert(path.clone(), node.clone());
    }
    found.hidden.insert(path.to_vec(), list);
}

fn gather(
    dir: &OwnedFd,
    prefix: &[u8],
    depth: usize,
    path_bytes: &mut usize,
    list: &mut Vec<(Vec<u8>, Node)>,
) {
    for name in sys::names(dir).unwrap_or_default() {
        let path = [prefix, name.as_bytes()].concat();
        if list.len() >= MAX_HIDDEN || depth > MAX_DEPTH || *path_bytes < path.len() {
            return;
        }
        *path_bytes = path_bytes.saturating_sub(path.len());
        let Some(node) = below(dir, &name, 0) else {
            continue;
        };
        let sub = (node.kind == Kind::Dir).then(|| open_dir(dir.as_raw_fd(), &name));
        list.push((path.clone(), node));
        if let Some(Ok(sub)) = sub {
            let inner = [&path, &b"/"[..]].concat();
            gather(&sub, &inner, depth.saturating_add(1), path_bytes, list);
        }
    }
}

/// Whose files are written, and where they may lie.
#[derive(Clone, Copy)]
pub struct Owner {
    /// The id of PID 1.
    pub own_id: u32,
    /// The whole root can be written, not only /work, /tmp and /dev/shm.
    pub whole_root: bool,
}

/// Removes what is to be removed, then writes the given files, owned by the tools' user.
pub fn unpack(
    entries: &[Entry],
    remove: &[String],
    body: &[u8],
    owner: Owner,
) -> Result<(), String> {
    for path in remove {
        let (dir, name) = match parent(path, false, owner) {
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
        write(entry, bytes, owner).map_err(|e| format!("{}: {e}", entry.path))?;
    }
    // Directories last and from the bottom: what is written into them moves their times.
    for entry in entries.iter().rev() {
        if let (Kind::Dir, Some(time)) = (entry.kind, entry.mtime_ns)
            && let Ok((dir, name)) = parent(&entry.path, false, owner)
        {
            let _ = sys::set_mtime_at(dir.as_raw_fd(), &name, time);
        }
    }
    Ok(())
}

fn write(entry: &Entry, bytes: &[u8], owner: Owner) -> io::Result<()> {
    let (dir, name) = parent(&entry.path, true, owner)?;
    let own_id = owner.own_id;
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
            // Beside a file that is there: it stays where there is no room for the new one.
            let beside = there.is_some_and(|kind| kind != Kind::Dir);
            let to: &CStr = if beside { c".being-unpacked" } else { &name };
            let mut written = write_file(at, to, bytes, entry.mode, own_id);
            if beside && written.is_ok() {
                written = sys::rename_at(at, to, &name);
            }
            if written.is_err() {
                let _ = sys::unlink_at(at, to, 0);
            }
            written?;
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

fn write_file(at: RawFd, name: &CStr, bytes: &[u8], mode: u32, own_id: u32) -> io::Result<()> {
    remove_all(at, name, 0)?;
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
    let file = sys::openat(at, name, flags, 0o600)?;
    sys::write_all(file.as_raw_fd(), bytes)?;
    give(file.as_raw_fd(), c"", own_id)?;
    sys::fchmod(file.as_raw_fd(), mode & 0o7777)
}

fn give(dir: RawFd, name: &CStr, own_id: u32) -> io::Result<()> {
    if own_id == TOOL_ID {
        return Ok(());
    }
    sys::chown_at(dir, name, TOOL_ID, TOOL_ID)
}

/// Opens the directory that holds a path, following no link, and gives the path's last name.
fn parent(path: &str, make: bool, owner: Owner) -> io::Result<(OwnedFd, CString)> {
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
    } else if let Some(rest) = path.strip_prefix('/') {
        let foreign = |p: &&[u8]| {
            path.as_bytes()
                .strip_prefix(*p)
                .is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
        };
        if !owner.whole_root || NOT_OF_THE_ROOT.iter().any(foreign) {
            return Err(invalid());
        }
        (c"/", rest)
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
                give(next.as_raw_fd(), c"", owner.own_id)?;
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

/// The area a path lies in, by its number, and the rest of the path in it.
fn area_of<'p>(areas: &[Area], path: &'p [u8]) -> (usize, &'p [u8]) {
    areas
        .iter()
        .enumerate()
        .filter_map(|(n, area)| Some((n, path.strip_prefix(area.prefix.as_bytes())?)))
        .min_by_key(|(_, rest)| rest.len())
        .unwrap_or((0, path))
}

/// Opens the index's files by their names in it, one after another; names may be any bytes. The directories on the way
/// to the last one stay open, so that a file's depth is paid for once and not by each of its neighbours.
struct Files<'a> {
    areas: &'a [Area],
    /// The layers' files, not those that are seen.
    beneath: bool,
    area: usize,
    way: Vec<(Vec<u8>, OwnedFd)>,
}

impl<'a> Files<'a> {
    const fn new(areas: &'a [Area]) -> Self {
        Self {
            areas,
            beneath: false,
            area: 0,
            way: Vec::new(),
        }
    }

    const fn beneath(areas: &'a [Area]) -> Self {
        Self {
            beneath: true,
            areas,
            area: 0,
            way: Vec::new(),
        }
    }

    fn root(&self) -> io::Result<OwnedFd> {
        let area = &self.areas[self.area];
        if !self.beneath {
            return open_dir(libc::AT_FDCWD, area.root);
        }
        match &area.overlay {
            Some(overlay) => overlay.lower.try_clone(),
            None => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }

    /// The directory that holds a file, and the file's name in it.
    fn locate(&mut self, path: &[u8]) -> io::Result<(RawFd, CString)> {
        let (area, rest) = area_of(self.areas, path);
        if area != self.area {
            self.area = area;
            self.way.clear();
        }
        if self.way.is_empty() {
            self.way.push((Vec::new(), self.root()?));
        }
        let mut parts: Vec<&[u8]> = rest.split(|b| *b == b'/').collect();
        let name = sys::c(parts.pop().unwrap_or_default())?;
        let common = self.way[1..]
            .iter()
            .zip(&parts)
            .take_while(|((known, _), part)| known == *part)
            .count();
        self.way.truncate(common.saturating_add(1));
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
                Ok(n) => got = got.saturating_add(n),
                Err(_) => return None,
            }
        }
        bytes.truncate(got);
        Some(bytes)
    }

    /// A file's hash, if the budget allows. Of a file that is large only by its holes, the hash of its extents.
    fn hash(&mut self, path: &[u8], size: u64, budget: &mut u64) -> Option<Hash> {
        let file = self.open(path).ok()?;
        if size <= *budget {
            *budget = budget.saturating_sub(size);
            return hash_all(&file, size);
        }
        let held = sys::fstat(file.as_raw_fd())
            .ok()?
            .st_blocks
            .max(0)
            .unsigned_abs()
            .saturating_mul(512);
        if held > *budget {
            return None;
        }
        *budget = budget.saturating_sub(held);
        hash_extents(&file, size)
    }

    /// The hash of a file or link that is known to be there, if the budget allows.
    fn hash_of(&mut self, path: &[u8], node: &Node, budget: &mut u64) -> Option<Hash> {
        match node.kind {
            Kind::File if node.size <= *budget => {
                *budget = budget.saturating_sub(node.size);
                hash_all(&self.open(path).ok()?, node.size)
            }
            Kind::Link => Some(*blake3::hash(&self.target(path)?).as_bytes()),
            _ => None,
        }
    }

    fn target(&mut self, path: &[u8]) -> Option<Vec<u8>> {
        let (dir, name) = self.locate(path).ok()?;
        sys::readlink_at(dir, &name).ok()
    }
}

fn hash_all(file: &OwnedFd, size: u64) -> Option<Hash> {
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

/// Over the size, and place and bytes of each piece of data: a hole of a petabyte costs nothing.
fn hash_extents(file: &OwnedFd, size: u64) -> Option<Hash> {
    let fd = file.as_raw_fd();
    let mut hasher = blake3::Hasher::new_derive_key("drillyard extents of a sparse file");
    hasher.update(&size.to_le_bytes());
    let mut buffer = vec![0; 64 << 10];
    let mut at = 0;
    while let Some(start) = sys::seek(fd, at, libc::SEEK_DATA) {
        let end = sys::seek(fd, start, libc::SEEK_HOLE)?;
        hasher.update(&start.to_le_bytes());
        hasher.update(&end.to_le_bytes());
        at = start;
        while at < end {
            let want = buffer
                .len()
                .min(usize::try_from(end.saturating_sub(at)).ok()?);
            let n = sys::pread(fd, &mut buffer[..want], at).ok()?;
            if n == 0 {
                return None;
            }
            hasher.update(&buffer[..n]);
            at = at.saturating_add(n as i64);
        }
    }
    Some(*hasher.finalize().as_bytes())
}

/// Takes what a path costs off a head's room; false when there is none.
fn told(path: &[u8], head: &mut usize) -> bool {
    let escaped = path.iter().filter(|b| **b < 0x20).count();
    let cost = escaped
        .saturating_mul(5)
        .saturating_add(path.len())
        .saturating_add(TOLD_BYTES);
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

fn walk(dir: &OwnedFd, prefix: &[u8], depth: usize, found: &mut Found) {
    let Ok(names) = sys::names(dir) else {
        found.incomplete = true;
        return;
    };
    let now = now_ns();
    for name in names {
        let mut path = [prefix, name.as_bytes()].concat();
        if found.nodes.len() >= MAX_FILES || !found.keeps(&path) {
            found.incomplete = true;
            return;
        }
        let Ok(stat) = sys::stat_at(dir.as_raw_fd(), &name) else {
            found.incomplete = true;
            continue;
        };
        let node = Node::of(&stat, now);
        let kind = node.kind;
        found.nodes.push((path.clone(), node));
        if kind == Kind::Dir {
            path.push(b'/');
            match (depth < MAX_DEPTH).then(|| open_dir(dir.as_raw_fd(), &name)) {
                Some(Ok(sub)) => walk(&sub, &path, depth.saturating_add(1), found),
                _ => found.incomplete = true,
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
    if depth > MAX_REMOVED_DEPTH {
        return Err(io::Error::from_raw_os_error(libc::ELOOP));
    }
    let sub = open_dir(dir, name)?;
    for inner in sys::names(&sub)? {
        remove_all(sub.as_raw_fd(), &inner, depth.saturating_add(1))?;
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
