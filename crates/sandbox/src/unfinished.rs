//! What a store's entries are while they are written, used or removed.
//!
//! Whoever writes an entry or uses one holds a shared lock on it (`flock`, on the directory or file itself), and who removes
//! one locks it alone. A lock ends with its holder, in whatever container or on whatever host that runs: nobody is asked
//! whether he lives. An entry is written under a name that begins with `.new-` and appears by a rename; what nobody holds
//! and still has such a name is swept.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, fstat, lstat, openat};
use rustix::io::Errno;

use crate::image::tree;

const MARK: &str = ".new-";
static NUMBERS: AtomicU64 = AtomicU64::new(0);

fn name() -> String {
    let n = NUMBERS.fetch_add(1, Ordering::Relaxed);
    format!("{MARK}{}-{n}", std::process::id())
}

/// An entry being written; goes when dropped, unless it was renamed.
#[derive(Debug)]
pub struct Unfinished {
    path: Utf8PathBuf,
    held: OwnedFd,
}

impl Unfinished {
    /// An empty directory in a store.
    pub fn dir(store: &Utf8Path) -> io::Result<Self> {
        Self::make(store, &|path| fs_err::create_dir(path))
    }

    /// A file in a store, with this content, on the disk.
    pub fn file(store: &Utf8Path, content: &[u8]) -> io::Result<Self> {
        let new = Self::make(store, &|path| fs_err::File::create_new(path).map(drop))?;
        let mut file = fs_err::OpenOptions::new().write(true).open(&new.path)?;
        io::Write::write_all(&mut file, content)?;
        file.sync_all()?;
        Ok(new)
    }

    fn make(store: &Utf8Path, make: &dyn Fn(&Utf8Path) -> io::Result<()>) -> io::Result<Self> {
        loop {
            let path = store.join(name());
            match make(&path) {
                // Of another program with the same number, in another container.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            let held = match open(&path) {
                // A sweep saw it before it was locked.
                Err(Errno::NOENT) => continue,
                file => file?,
            };
            match flock(&held, FlockOperation::NonBlockingLockShared) {
                Err(Errno::WOULDBLOCK) => {}
                // Where there are no locks nobody sweeps either.
                _ if is(&held, &path) => return Ok(Self { path, held }),
                _ => {}
            }
        }
    }

    pub fn path(&self) -> &Utf8Path {
        &self.path
    }

    /// Gives it its place; false where something is there already.
    pub fn publish(&self, place: &Utf8Path) -> io::Result<bool> {
        match rustix::fs::rename(self.path.as_str(), place.as_str()) {
            Ok(()) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let above = place.parent().unwrap_or(Utf8Path::new("."));
        rustix::fs::fsync(tree::open_root(above)?)?;
        Ok(true)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if is(&self.held, &self.path) {
            let _ = clear(&self.path);
        }
    }
}

fn open(path: &Utf8Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(CWD, path.as_str(), flags, Mode::empty())
}

/// Whether an open file still is what has this name.
fn is(file: &OwnedFd, path: &Utf8Path) -> bool {
    let (Ok(open), Ok(named)) = (fstat(file), lstat(path.as_str())) else {
        return false;
    };
    (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino)
}

/// Marks an entry as in use for as long as the result is held; nothing where it is being removed.
pub fn hold(path: &Utf8Path) -> io::Result<Option<OwnedFd>> {
    let file = open(path)?;
    let locked = flock(&file, FlockOperation::NonBlockingLockShared);
    Ok((locked != Err(Errno::WOULDBLOCK) && is(&file, path)).then_some(file))
}

/// Locks an entry against all use; nothing where it is in use. A process that this program starts holds every open file
/// for the moment until it executes: patience waits for that.
pub fn alone(path: &Utf8Path, patience: bool) -> io::Result<Option<OwnedFd>> {
    let file = open(path)?;
    for attempt in 0..if patience { 50 } else { 1 } {
        if attempt > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is(&file, path) => return Ok(Some(file)),
            Ok(()) => return Err(io::ErrorKind::NotFound.into()),
            Err(Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Removes an entry that was locked alone: out of sight at once, and what a program that dies half-way leaves is swept.
pub fn remove(path: &Utf8Path, alone: OwnedFd) -> io::Result<()> {
    let store = path.parent().unwrap_or(Utf8Path::new("."));
    let old = loop {
        let old = store.join(name());
        match rustix::fs::rename(path.as_str(), old.as_str()) {
            Ok(()) => break old,
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    let cleared = clear(&old);
    drop(alone);
    cleared
}

/// Removes a tree whatever its modes are.
fn clear(path: &Utf8Path) -> io::Result<()> {
    let above = tree::open_root(path.parent().unwrap_or(Utf8Path::new(".")))?;
    tree::remove_all(&above, path.file_name().unwrap_or_default().as_bytes(), 0)
}

/// Removes what was left half-done. What can't be removed is told of and stays: the store serves all the same.
pub fn sweep(store: &Utf8Path) -> io::Result<()> {
    for entry in store.read_dir_utf8()? {
        let entry = entry?;
        if !entry.file_name().starts_with(MARK) {
            continue;
        }
        let path = entry.path();
        let lock = match alone(path, false) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let readable = std::os::unix::fs::PermissionsExt::from_mode(0o700);
                fs_err::set_permissions(path, readable).and_then(|()| alone(path, false))
            }
            lock => lock,
        };
        let swept = lock.and_then(|lock| match lock {
            // Another program writes it, or sweeps too.
            None => Ok(()),
            Some(_lock) => clear(path),
        });
        match swept {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%path, %error, "what an ended program left half-done cannot be removed");
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn store() -> (tempfile::TempDir, Utf8PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
        (dir, path)
    }

    fn names(store: &Utf8Path) -> usize {
        store.read_dir_utf8().unwrap().count()
    }

    #[test]
    fn a_sweep_leaves_what_someone_holds_whatever_its_name_says() {
        let (_dir, store) = store();
        let own = Unfinished::dir(&store).unwrap();
        // As a program of another container or host would name it: no process of this number lives here.
        let other = store.join(".new-4294967295-1-1");
        fs_err::create_dir(&other).unwrap();
        let held = hold(&other).unwrap().unwrap();
        sweep(&store).unwrap();
        assert!(own.path().exists() && other.exists());
        assert!(alone(&other, false).unwrap().is_none());
        drop(held);
        sweep(&store).unwrap();
        assert!(own.path().exists() && !other.exists());
        // Nor does the number of a living process protect what nobody holds.
        let left = store.join(format!(".new-{}-x", std::process::id()));
        fs_err::write(&left, "").unwrap();
        sweep(&store).unwrap();
        assert!(!left.exists());
        drop(own);
        assert_eq!(names(&store), 0);
    }

    #[test]
    fn a_sweep_removes_directories_that_forbid_their_owner() {
        let (_dir, store) = store();
        let left = store.join(".new-1-1");
        fs_err::create_dir_all(left.join("a/b/c")).unwrap();
        fs_err::write(left.join("a/b/c/file"), "").unwrap();
        for (dir, mode) in [("a/b/c", 0o500), ("a/b", 0), ("a", 0o300), ("", 0)] {
            fs_err::set_permissions(left.join(dir), PermissionsExt::from_mode(mode)).unwrap();
        }
        sweep(&store).unwrap();
        assert_eq!(names(&store), 0);
    }

    #[test]
    fn what_is_published_stays_and_is_held_until_then() {
        let (_dir, store) = store();
        let new = Unfinished::dir(&store).unwrap();
        fs_err::write(new.path().join("x"), "").unwrap();
        let place = store.join("place");
        assert!(new.publish(&place).unwrap());
        assert!(
            alone(&place, false).unwrap().is_none(),
            "the writer holds it"
        );
        drop(new);
        assert!(place.join("x").exists());
        let second = Unfinished::dir(&store).unwrap();
        assert!(!second.publish(&place).unwrap());
        drop(second);
        let lock = alone(&place, false).unwrap().unwrap();
        assert!(hold(&place).unwrap().is_none(), "it is being removed");
        remove(&place, lock).unwrap();
        assert_eq!(names(&store), 0);
    }
}
