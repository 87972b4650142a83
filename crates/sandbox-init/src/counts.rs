//! Counters the kernel keeps without control groups: what PID 1 and all it reaped read and wrote, and how many processes
//! its namespace ever had.

#![warn(clippy::arithmetic_side_effects)]

use std::os::fd::{AsRawFd, OwnedFd};

use crate::sys;

/// The smallest number the kernel gives out after it went round.
const FIRST_AFTER_WRAP: u64 = 300;

/// Open files of `/proc`, as far as they can be had.
pub struct Counts {
    /// `/proc/self/io`: a process's own figures and those of every child it reaped.
    io: Option<OwnedFd>,
    /// `/proc/loadavg`: its last number is the newest process of the namespace.
    newest: Option<OwnedFd>,
    /// Where process numbers go round.
    pid_max: u64,
}

/// One reading; only differences mean something.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    pub read_chars: Option<u64>,
    pub written_chars: Option<u64>,
    pub newest: Option<u64>,
}

impl Counts {
    /// To be called while `/proc` is there and nothing else runs in the sandbox.
    pub fn open() -> Self {
        let open = |path| sys::openat(libc::AT_FDCWD, path, libc::O_RDONLY, 0).ok();
        // The file belongs to this process only while it can be traced, which it must not be later.
        let _ = sys::prctl(libc::PR_SET_DUMPABLE, 1, 0);
        let io = open(c"/proc/self/io");
        let _ = sys::prctl(libc::PR_SET_DUMPABLE, 0, 0);
        let pid_max = open(c"/proc/sys/kernel/pid_max")
            .and_then(|fd| text(&fd)?.trim().parse().ok())
            .unwrap_or(32_768);
        Self {
            io,
            newest: open(c"/proc/loadavg"),
            pid_max,
        }
    }

    pub fn read(&self) -> Counted {
        let io = self.io.as_ref().and_then(text).unwrap_or_default();
        let of = |key: &str| {
            io.lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix(": ")?.parse().ok())
        };
        Counted {
            read_chars: of("rchar"),
            written_chars: of("wchar"),
            newest: self
                .newest
                .as_ref()
                .and_then(text)
                .and_then(|t| t.split_whitespace().last()?.parse().ok()),
        }
    }

    /// How many processes and threads were started between two readings; too few where numbers went round twice.
    pub fn started(&self, before: Counted, after: Counted) -> Option<u64> {
        let (before, after) = (before.newest?, after.newest?);
        Some(if after >= before {
            after.saturating_sub(before)
        } else {
            self.pid_max
                .saturating_sub(before)
                .saturating_add(after)
                .saturating_sub(FIRST_AFTER_WRAP)
        })
    }
}

fn text(fd: &OwnedFd) -> Option<String> {
    let mut buffer = [0; 512];
    let n = sys::pread(fd.as_raw_fd(), &mut buffer, 0).ok()?;
    Some(String::from_utf8_lossy(&buffer[..n]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_went_round_are_still_counted() {
        let counts = Counts {
            io: None,
            newest: None,
            pid_max: 1000,
        };
        let at = |newest| Counted {
            newest: Some(newest),
            ..Counted::default()
        };
        assert_eq!(counts.started(at(10), at(13)), Some(3));
        assert_eq!(counts.started(at(998), at(302)), Some(4));
        assert_eq!(counts.started(at(1), Counted::default()), None);
    }
}
