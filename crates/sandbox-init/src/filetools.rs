//! The file tools. They run as processes like any other tool, with a tool's privileges and clock, so that a planted
//! link, pipe or device gives what a shell command would get, and nothing more.

#![warn(clippy::arithmetic_side_effects)]

use std::ffi::CStr;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use crate::sys;

const OUT: RawFd = 1;
const ERR: RawFd = 2;

/// Prints up to `max` bytes of a regular file; tells its size on `side`. Returns the exit code.
pub fn read_file(path: &str, max: u64, side: RawFd) -> i32 {
    let result = (|| {
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = sys::openat(libc::AT_FDCWD, &sys::c(path)?, flags, 0)?;
        let stat = sys::fstat(file.as_raw_fd())?;
        match stat.st_mode & libc::S_IFMT {
            libc::S_IFREG => {}
            libc::S_IFDIR => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
            _ => return Err(io::Error::other("not a regular file")),
        }
        let mut sent = 0_u64;
        // Files of /proc claim to be empty.
        let buffer = (stat.st_size as u64).clamp(4 << 10, 64 << 10) as usize;
        let mut buffer = vec![0; buffer];
        while sent < max {
            let left = max.saturating_sub(sent);
            let want = buffer
                .len()
                .min(usize::try_from(left).unwrap_or(usize::MAX));
            let n = sys::read(file.as_raw_fd(), &mut buffer[..want])?;
            if n == 0 {
                break;
            }
            sys::write_all(OUT, &buffer[..n])?;
            sent = sent.saturating_add(n as u64);
        }
        // Files of /proc claim to be empty.
        let size = sent.max(stat.st_size as u64);
        sys::write_all(side, &size.to_le_bytes())
    })();
    finish("read_file", path, result)
}

/// Creates or replaces a file, with its parent directories.
pub fn write_file(path: &str, content: &[u8]) -> i32 {
    let result = (|| {
        for (cut, _) in path.match_indices('/').filter(|(cut, _)| *cut > 0) {
            match sys::mkdir_at(libc::AT_FDCWD, &sys::c(&path[..cut])?, 0o755) {
                Err(e) if !exists(&sys::c(&path[..cut])?) => return Err(e),
                _ => {}
            }
        }
        let flags =
            libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = sys::openat(libc::AT_FDCWD, &sys::c(path)?, flags, 0o644)?;
        if sys::fstat(file.as_raw_fd())?.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(io::Error::other("not a regular file"));
        }
        sys::write_all(file.as_raw_fd(), content)
    })();
    finish("write_file", path, result)
}

/// Lists a directory, a line an entry.
pub fn list_dir(path: &str) -> i32 {
    let result = (|| {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
        let dir = sys::openat(libc::AT_FDCWD, &sys::c(path)?, flags, 0)?;
        let mut text = Vec::new();
        for name in sys::names(&dir)? {
            text.extend_from_slice(name.as_bytes());
            if let Ok(stat) = sys::stat_at(dir.as_raw_fd(), &name) {
                match stat.st_mode & libc::S_IFMT {
                    libc::S_IFDIR => text.push(b'/'),
                    libc::S_IFLNK => {
                        text.extend_from_slice(b" -> ");
                        text.extend(sys::readlink_at(dir.as_raw_fd(), &name).unwrap_or_default());
                    }
                    libc::S_IFREG => {
                        text.extend_from_slice(format!("\t{}", stat.st_size).as_bytes());
                    }
                    _ => text.extend_from_slice(b"\t(special)"),
                }
            }
            text.push(b'\n');
        }
        sys::write_all(OUT, &text)
    })();
    finish("list_dir", path, result)
}

fn exists(path: &CStr) -> bool {
    // SAFETY: a C string that outlives the call.
    unsafe { libc::access(path.as_ptr(), libc::F_OK) == 0 }
}

fn finish(tool: &str, path: &str, result: io::Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => {
            let _ = sys::write_all(
                ERR,
                format!("{tool}: {path}: {}\n", words(&error)).as_bytes(),
            );
            1
        }
    }
}

/// An error without the number that Rust appends to the system's words.
fn words(error: &impl Display) -> String {
    let text = error.to_string();
    text.find(" (os error")
        .map_or(text.clone(), |cut| text[..cut].to_owned())
}
