//! Writing a directory tree from names nobody vouches for, and telling one tree from another.
//!
//! Every name is resolved by the kernel beneath the tree's own root (`RESOLVE_IN_ROOT`): a link that points out, or a
//! link through a link, ends inside. Owners, set-id bits, extended attributes and device nodes are not taken over.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use camino::Utf8Path;
use drillyard_sandbox_init::time::{nanoseconds, seconds};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, fchmod, fstat,
    linkat, mkdirat, openat, openat2, readlinkat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

/// What a tree may hold at most.
#[derive(Debug, Clone, Copy)]
pub struct Caps {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes of all files together, and of an archive once uncompressed.
    pub bytes: u64,
}

impl Default for Caps {
    fn default() -> Self {
        Self {
            entries: 2_000_000,
            bytes: 64 << 30,
        }
    }
}

/// Deeper trees are refused.
const MAX_DEPTH: usize = 256;
/// What a system call takes, without the byte that ends it.
pub const MAX_PATH: usize = 4095;

fn refuse(name: &[u8], why: &str) -> io::Error {
    let name: String = String::from_utf8_lossy(name).chars().take(200).collect();
    io::Error::new(io::ErrorKind::InvalidData, format!("{name:?}: {why}"))
}

/// Puts an entry's name to an error.
fn named<T, E: Into<io::Error>>(result: Result<T, E>, name: &[u8]) -> io::Result<T> {
    result.map_err(|e| {
        let error = e.into();
        let shown: String = String::from_utf8_lossy(name).chars().take(200).collect();
        io::Error::new(error.kind(), format!("{shown:?}: {error}"))
    })
}

/// The parts of a name; none for the root itself.
pub fn parts(name: &[u8]) -> io::Result<Vec<&[u8]>> {
    if name.len() > MAX_PATH {
        return Err(refuse(name, "the name is too long"));
    }
    if name.first() == Some(&b'/') {
        return Err(refuse(name, "an absolute name"));
    }
    if name.contains(&0) {
        return Err(refuse(name, "the name holds a NUL byte"));
    }
    let parts: Vec<&[u8]> = name
        .split(|b| *b == b'/')
        .filter(|p| !p.is_empty() && *p != b".")
        .collect();
    if parts.contains(&&b".."[..]) {
        return Err(refuse(name, "the name leads upwards"));
    }
    if parts.len() > MAX_DEPTH {
        return Err(refuse(name, "too deep"));
    }
    Ok(parts)
}

/// A tree being written.
pub struct Writer {
    root: OwnedFd,
    caps: Caps,
    entries: u64,
    bytes: u64,
    /// The directory last written into: most entries follow a neighbour.
    last: Option<(Vec<u8>, OwnedFd)>,
    /// Modes are kept as they are.
    exact: bool,
    /// Modes and times of directories, set at the end and from the bottom: what is written into them moves the times, and
    /// the modes may forbid their owner.
    last_touch: BTreeMap<Vec<u8>, (u32, Option<i64>)>,
}

impl Writer {
    /// Over an existing, empty directory.
    pub fn new(dir: &Utf8Path, caps: Caps) -> io::Result<Self> {
        let root = open_root(dir)?;
        Ok(Self {
            root,
            caps,
            entries: 0,
            bytes: 0,
            last: None,
            exact: false,
            // Whatever this program's umask, and whether or not an archive names its root.
            last_touch: BTreeMap::from([(Vec::new(), (0o755, None))]),
        })
    }

    /// Keeps modes as they are given, also where they forbid the owner: for layers of sandboxes' files, which nobody but
    /// the kernel reads.
    pub fn exact(mut self) -> Self {
        self.exact = true;
        self
    }

    fn count(&mut self, name: &[u8]) -> io::Result<()> {
        self.entries += 1;
        if self.entries > self.caps.entries {
            return Err(refuse(
                name,
                &format!("more than {} entries", self.caps.entries),
            ));
        }
        Ok(())
    }

    fn open(&self, parts: &[&[u8]]) -> rustix::io::Result<OwnedFd> {
        let path = if parts.is_empty() {
            b".".to_vec()
        } else {
            parts.join(&b'/')
        };
        openat2(
            &self.root,
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        )
    }

    /// The directory an entry goes into, made if missing, and the entry's own name.
    fn parent<'a>(&mut self, name: &'a [u8]) -> io::Result<(OwnedFd, &'a [u8])> {
        let parts = parts(name)?;
        let Some((own, above)) = parts.split_last() else {
            return Err(refuse(name, "the name is empty"));
        };
        let key = above.join(&b'/');
        if let Some((last, dir)) = &self.last
            && *last == key
        {
            return Ok((dir.try_clone()?, own));
        }
        let dir = match self.open(above) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => {
                let mut dir = named(self.open(&[]), name)?;
                for cut in 1..=above.len() {
                    dir = match self.open(&above[..cut]) {
                        Ok(next) => next,
                        Err(Errno::NOENT) => {
                            self.count(name)?;
                            self.last_touch
                                .insert(above[..cut].join(&b'/'), (0o755, None));
                            named(
                                mkdirat(&dir, above[cut - 1], Mode::from_raw_mode(0o755)),
                                name,
                            )?;
                            named(self.open(&above[..cut]), name)?
                        }
                        Err(error) => return named(Err(error), name),
                    };
                }
                dir
            }
            Err(error) => return named(Err(error), name),
        };
        self.last = Some((key, dir.try_clone()?));
        Ok((dir, own))
    }

    /// Makes way for an entry: whatever has its name goes.
    fn make_way(&mut self, dir: &OwnedFd, own: &[u8]) -> io::Result<()> {
        match unlinkat(dir, own, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {
                self.last = None;
                remove_all(dir, own, 0)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A directory; one that is there keeps what it holds.
    pub fn dir(&mut self, name: &[u8], mode: u32, mtime: Option<i64>) -> io::Result<()> {
        self.dir_over(name, mode, mtime).map(drop)
    }

    /// Like [`Writer::dir`]; tells whether it took the place of something that was no directory.
    pub fn dir_over(&mut self, name: &[u8], mode: u32, mtime: Option<i64>) -> io::Result<bool> {
        let name = &parts(name)?.join(&b'/')[..];
        let at_last = if self.exact {
            mode & 0o7777
        } else {
            dir_mode(mode)
        };
        self.last_touch.insert(name.to_vec(), (at_last, mtime));
        if name.is_empty() {
            return Ok(false);
        }
        self.count(name)?;
        let (dir, own) = self.parent(name)?;
        match statat(&dir, own, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => Ok(false),
            there => {
                if there.is_ok() {
                    self.last = None;
                    named(self.make_way(&dir, own), name)?;
                }
                named(mkdirat(&dir, own, Mode::from_raw_mode(0o700)), name)?;
                Ok(there.is_ok())
            }
        }
    }

    /// What was to be set at last for a directory of this name, and those in it, is not: it goes.
    fn forget(&mut self, name: &[u8]) -> io::Result<()> {
        let name = parts(name)?.join(&b'/');
        let below = [&name, &b"/"[..]].concat();
        self.last_touch.remove(&name);
        let gone: Vec<_> = self
            .last_touch
            .range(below.clone()..)
            .map(|(n, _)| n.clone())
            .take_while(|n| n.starts_with(&below))
            .collect();
        for name in gone {
            self.last_touch.remove(&name);
        }
        Ok(())
    }

    /// A regular file.
    pub fn file(
        &mut self,
        name: &[u8],
        mode: u32,
        mtime: Option<i64>,
        content: &mut dyn Read,
    ) -> io::Result<()> {
        self.count(name)?;
        self.forget(name)?;
        let (dir, own) = self.parent(name)?;
        named(self.make_way(&dir, own), name)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = named(openat(&dir, own, flags, Mode::from_raw_mode(0o600)), name)?;
        let mut file = std::fs::File::from(file);
        let mut buffer = vec![0; 64 << 10];
        loop {
            let n = named(content.read(&mut buffer), name)?;
            if n == 0 {
                break;
            }
            self.bytes += n as u64;
            if self.bytes > self.caps.bytes {
                return Err(refuse(
                    name,
                    &format!("more than {} bytes", self.caps.bytes),
                ));
            }
            named(file.write_all(&buffer[..n]), name)?;
        }
        let mode = if self.exact {
            mode & 0o7777
        } else {
            file_mode(mode)
        };
        named(fchmod(&file, Mode::from_raw_mode(mode)), name)?;
        if let Some(mtime) = mtime {
            named(set_time(&dir, own, mtime), name)?;
        }
        Ok(())
    }

    /// A symbolic link; its target is text and is not looked at.
    pub fn link(&mut self, name: &[u8], target: &[u8], mtime: Option<i64>) -> io::Result<()> {
        self.count(name)?;
        self.forget(name)?;
        let (dir, own) = self.parent(name)?;
        named(self.make_way(&dir, own), name)?;
        named(symlinkat(target, &dir, own), name)?;
        if let Some(mtime) = mtime {
            named(set_time(&dir, own, mtime), name)?;
        }
        Ok(())
    }

    /// Another name of a file that is in the tree already.
    pub fn hard_link(&mut self, name: &[u8], to: &[u8]) -> io::Result<()> {
        self.count(name)?;
        self.forget(name)?;
        let to_parts = parts(to.strip_prefix(b"/").unwrap_or(to))?;
        let Some((to_own, to_above)) = to_parts.split_last() else {
            return Err(refuse(name, "a hard link to nothing"));
        };
        let from = named(self.open(to_above), name)?;
        let stat = named(statat(&from, *to_own, AtFlags::SYMLINK_NOFOLLOW), name)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Err(refuse(name, "a hard link to a directory"));
        }
        let (dir, own) = self.parent(name)?;
        let same = statat(&dir, own, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|s| (s.st_dev, s.st_ino) == (stat.st_dev, stat.st_ino));
        if same {
            return Ok(());
        }
        named(self.make_way(&dir, own), name)?;
        named(linkat(&from, *to_own, &dir, own, AtFlags::empty()), name)
    }

    /// Another name of a file outside the tree, on the same file system.
    pub fn adopt(&mut self, name: &[u8], from: &OwnedFd, own: &[u8]) -> io::Result<()> {
        self.count(name)?;
        self.forget(name)?;
        let (dir, new) = self.parent(name)?;
        named(self.make_way(&dir, new), name)?;
        named(linkat(from, own, &dir, new, AtFlags::empty()), name)
    }

    /// Takes away what lower layers put there.
    pub fn remove(&mut self, name: &[u8]) -> io::Result<()> {
        let parts = parts(name)?;
        let Some((own, above)) = parts.split_last() else {
            return Err(refuse(name, "the root cannot be removed"));
        };
        self.forget(name)?;
        self.last = None;
        match self.open(above) {
            Ok(dir) => named(remove_all(&dir, own, 0), name),
            Err(Errno::NOENT) => Ok(()),
            Err(error) => named(Err(error), name),
        }
    }

    /// Marks, for the kernel's overlay, that what layers below have under this name is gone.
    pub fn whiteout(&mut self, name: &[u8]) -> io::Result<()> {
        self.count(name)?;
        self.forget(name)?;
        let (dir, own) = self.parent(name)?;
        named(self.make_way(&dir, own), name)?;
        let kind = FileType::CharacterDevice;
        named(rustix::fs::mknodat(&dir, own, kind, Mode::empty(), 0), name)
    }

    /// Marks, for the kernel's overlay, that what layers below have in this directory is gone.
    pub fn opaque(&mut self, name: &[u8]) -> io::Result<()> {
        let (dir, own) = self.parent(name)?;
        let made = named(sub_dir(&dir, own), name)?;
        let none = rustix::fs::XattrFlags::empty();
        named(
            rustix::fs::fsetxattr(&made, c"user.overlay.opaque", b"y", none),
            name,
        )
    }

    /// A directory that is there, whatever links lead to it: what tells it from others, and it itself for reading.
    pub fn directory(&self, name: &[u8]) -> io::Result<Option<((u64, u64), OwnedFd)>> {
        let dir = match self.open(&parts(name)?) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return named(Err(error), name),
        };
        let stat = fstat(&dir)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let readable = openat(&dir, c".", flags, Mode::empty())?;
        Ok(Some(((stat.st_dev, stat.st_ino), readable)))
    }

    /// Sets the directories' times and brings everything to the disk.
    pub fn finish(mut self) -> io::Result<(u64, u64)> {
        for (name, (mode, mtime)) in std::mem::take(&mut self.last_touch).into_iter().rev() {
            let path = if name.is_empty() { &b"."[..] } else { &name };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            let dir = match openat2(&self.root, path, flags, Mode::empty(), inside) {
                // Taken away again under another name, through a link.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                dir => named(dir, &name)?,
            };
            if let Some(mtime) = mtime {
                named(rustix::fs::futimens(&dir, &stamps(mtime)), &name)?;
            }
            named(fchmod(&dir, Mode::from_raw_mode(mode)), &name)?;
        }
        rustix::fs::syncfs(&self.root)?;
        Ok((self.entries, self.bytes))
    }
}

/// Owners can always enter and read their own trees, whoever unpacked them; nothing is set-id.
pub const fn dir_mode(mode: u32) -> u32 {
    mode & 0o1777 | 0o700
}

/// See [`dir_mode`].
pub const fn file_mode(mode: u32) -> u32 {
    mode & 0o777 | 0o400
}

/// A mode that lets the owner read and enter a directory; the kernel tells nobody else what is in it.
pub const fn can_be_read(mode: u32) -> bool {
    mode & 0o500 == 0o500
}

pub fn open_root(dir: &Utf8Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(rustix::fs::CWD, dir.as_str(), flags, Mode::empty())
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{dir}: {e}")))
}

/// From nanoseconds.
fn stamps(mtime: i64) -> Timestamps {
    let (tv_sec, tv_nsec) = seconds(mtime);
    let time = Timespec { tv_sec, tv_nsec };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

fn set_time(dir: &OwnedFd, own: &[u8], mtime: i64) -> rustix::io::Result<()> {
    utimensat(dir, own, &stamps(mtime), AtFlags::SYMLINK_NOFOLLOW)
}

/// Whether a path of a tree leads to a regular file of the tree.
pub fn is_file(root: &OwnedFd, path: &str) -> bool {
    openat2(
        root,
        path.trim_start_matches('/'),
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    )
    .and_then(|file| fstat(&file))
    .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile)
}

/// Names in an open directory, without `.` and `..`, sorted.
pub fn names(dir: &OwnedFd) -> io::Result<Vec<Vec<u8>>> {
    let mut out = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            out.push(name.to_vec());
        }
    }
    out.sort();
    Ok(out)
}

pub fn sub_dir(dir: impl AsFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty())
}

pub fn open_file(dir: impl AsFd, name: &[u8]) -> rustix::io::Result<std::fs::File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty()).map(std::fs::File::from)
}

/// Removes a file, or a directory with all it holds whatever its modes are; never what is mounted there.
pub fn remove_all(dir: &OwnedFd, name: &[u8], depth: usize) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) if depth <= 2 * MAX_DEPTH => {}
        Err(error) => return named(Err(error), name),
    }
    // Through a readable descriptor: the one at hand may be a mere path.
    let open = || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat2(dir, name, flags, Mode::empty(), ResolveFlags::NO_XDEV)
    };
    // One's own directory may forbid oneself.
    let sub = match open() {
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(dir, name, Mode::RWXU, AtFlags::empty())?;
            open()
        }
        opened => opened,
    };
    let sub = match sub {
        Err(Errno::XDEV) => return Err(refuse(name, "something is mounted there; unmount it")),
        sub => named(sub, name)?,
    };
    let _ = fchmod(&sub, Mode::RWXU);
    // All that can go does.
    let mut removed = Ok(());
    for inner in names(&sub)? {
        removed = removed.and(remove_all(&sub, &inner, depth + 1));
    }
    removed.and_then(|()| named(unlinkat(dir, name, AtFlags::REMOVEDIR), name))
}

/// What a walk over a tree sees.
pub struct Seen<'a> {
    pub path: &'a [u8],
    pub mode: u32,
    pub what: What<'a>,
}

/// An entry's kind.
pub enum What<'a> {
    Dir,
    File {
        dir: &'a OwnedFd,
        name: &'a [u8],
        size: u64,
        mtime: i64,
    },
    Link(&'a [u8]),
    /// A device, pipe or socket.
    Special,
}

/// Walks a tree in the order of its names, parents first, following no link. What lies on another file system is refused:
/// left out it would be missed, and taken in it may have no end.
pub fn walk(root: &OwnedFd, see: &mut dyn FnMut(&Seen<'_>) -> io::Result<()>) -> io::Result<()> {
    let device = fstat(root)?.st_dev;
    walk_in(root, device, &mut Vec::new(), 0, see)
}

/// Walks a layer; tells too whether a directory is opaque, and the time.
pub fn walk_layer(
    root: &OwnedFd,
    see: &mut dyn FnMut(&Seen<'_>, bool, i64) -> io::Result<()>,
) -> io::Result<()> {
    walk_layer_in(root, &mut Vec::new(), see)
}

fn walk_layer_in(
    dir: &OwnedFd,
    path: &mut Vec<u8>,
    see: &mut dyn FnMut(&Seen<'_>, bool, i64) -> io::Result<()>,
) -> io::Result<()> {
    for name in names(dir)? {
        let stat = statat(dir, &*name, AtFlags::SYMLINK_NOFOLLOW)?;
        let mode = stat.st_mode & 0o7777;
        let mtime = nanoseconds(stat.st_mtime, stat.st_mtime_nsec as i64);
        let length = path.len();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let sub = named(sub_dir(dir, &name), path)?;
                let mut value = [0_u8; 8];
                let opaque = rustix::fs::fgetxattr(&sub, c"user.overlay.opaque", &mut value)
                    .is_ok_and(|n| value[..n] == *b"y");
                see(
                    &Seen {
                        path,
                        mode,
                        what: What::Dir,
                    },
                    opaque,
                    mtime,
                )?;
                walk_layer_in(&sub, path, see)?;
            }
            FileType::RegularFile => {
                let size = stat.st_size as u64;
                let what = What::File {
                    dir,
                    name: &name,
                    size,
                    mtime,
                };
                see(&Seen { path, mode, what }, false, mtime)?;
            }
            FileType::Symlink => {
                let target = readlinkat(dir, &*name, Vec::new())?;
                let what = What::Link(target.to_bytes());
                see(&Seen { path, mode, what }, false, mtime)?;
            }
            _ => see(
                &Seen {
                    path,
                    mode,
                    what: What::Special,
                },
                false,
                mtime,
            )?,
        }
        path.truncate(length);
    }
    Ok(())
}

fn walk_in(
    dir: &OwnedFd,
    device: u64,
    path: &mut Vec<u8>,
    depth: usize,
    see: &mut dyn FnMut(&Seen<'_>) -> io::Result<()>,
) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(refuse(path, "too deep"));
    }
    for name in names(dir)? {
        let stat = statat(dir, &*name, AtFlags::SYMLINK_NOFOLLOW)?;
        let length = path.len();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        let mode = stat.st_mode;
        match FileType::from_raw_mode(mode) {
            FileType::Directory => {
                see(&Seen {
                    path,
                    mode: dir_mode(mode),
                    what: What::Dir,
                })?;
                if stat.st_dev != device {
                    let why = "it lies on another file system; unmount it, or copy the tree to one place first";
                    return Err(refuse(path, why));
                }
                let sub = named(sub_dir(dir, &name), path)?;
                walk_in(&sub, device, path, depth + 1, see)?;
            }
            FileType::RegularFile => see(&Seen {
                path,
                mode: file_mode(mode),
                what: What::File {
                    dir,
                    name: &name,
                    size: stat.st_size as u64,
                    mtime: nanoseconds(stat.st_mtime, stat.st_mtime_nsec as i64),
                },
            })?,
            FileType::Symlink => {
                let target = readlinkat(dir, &*name, Vec::new())?;
                see(&Seen {
                    path,
                    mode: 0,
                    what: What::Link(target.to_bytes()),
                })?;
            }
            _ => see(&Seen {
                path,
                mode: 0,
                what: What::Special,
            })?,
        }
        path.truncate(length);
    }
    Ok(())
}

/// What a file, directory or link takes of a disk beside its blocks: its inode and its name, about.
const ENTRY_BYTES: u64 = 512;

/// What a tree takes of the disk: holes cost nothing, many small files do.
pub fn disk_bytes(root: &OwnedFd) -> io::Result<u64> {
    let mut sum = 0_u64;
    for name in names(root)? {
        let stat = statat(root, &*name, AtFlags::SYMLINK_NOFOLLOW)?;
        let blocks = (stat.st_blocks as u64).saturating_mul(512);
        sum = sum.saturating_add(blocks).saturating_add(ENTRY_BYTES);
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            sum = sum.saturating_add(disk_bytes(&named(sub_dir(root, &name), &name)?)?);
        }
    }
    Ok(sum)
}

/// BLAKE3, in hexadecimal, over a tree's canonical listing: path, kind, mode, and content or target of each entry.
/// Owners, times and what a [`Writer`] would not take over do not count.
pub fn digest(root: &OwnedFd) -> io::Result<String> {
    let mut all = blake3::Hasher::new();
    let root_mode = dir_mode(fstat(root)?.st_mode);
    all.update(b"drillyard image 1\n")
        .update(&root_mode.to_le_bytes());
    walk(root, &mut |seen| {
        let (kind, content): (&[u8], [u8; 32]) = match &seen.what {
            What::Dir => (b"d", [0; 32]),
            What::File { dir, name, .. } => {
                let mut hasher = blake3::Hasher::new();
                hasher.update_reader(named(open_file(dir, name), seen.path)?)?;
                (b"f", *hasher.finalize().as_bytes())
            }
            What::Link(target) => (b"l", *blake3::hash(target).as_bytes()),
            What::Special => return Ok(()),
        };
        all.update(&(seen.path.len() as u64).to_le_bytes())
            .update(seen.path)
            .update(kind)
            .update(&seen.mode.to_le_bytes())
            .update(&content);
        Ok(())
    })?;
    Ok(all.finalize().to_hex().to_string())
}

/// Copies a tree; returns how many devices, pipes and sockets were left out.
pub fn copy(from: &OwnedFd, to: &mut Writer) -> io::Result<u64> {
    let mut skipped = 0;
    to.dir(b"", fstat(from)?.st_mode, None)?;
    // Files with several names stay one file.
    let mut firsts: std::collections::HashMap<u64, Vec<u8>> = std::collections::HashMap::new();
    walk(from, &mut |seen| {
        match &seen.what {
            What::Dir => to.dir(seen.path, seen.mode, None)?,
            What::File {
                dir, name, mtime, ..
            } => {
                let mut file = named(open_file(dir, name), seen.path)?;
                let stat = fstat(&file)?;
                if stat.st_nlink > 1 {
                    if let Some(first) = firsts.get(&stat.st_ino) {
                        return to.hard_link(seen.path, first);
                    }
                    firsts.insert(stat.st_ino, seen.path.to_vec());
                }
                to.file(seen.path, seen.mode, Some(*mtime), &mut file)?;
            }
            What::Link(target) => to.link(seen.path, target, None)?,
            What::Special => skipped += 1,
        }
        Ok(())
    })?;
    Ok(skipped)
}
