//! An exclusive lock on a file, held while it is open.

use std::io::{Read, Write};

use camino::Utf8Path;
use fs_err::OpenOptions;

use crate::error::LakeError;

/// The lock. It ends with the process, however that ends.
#[derive(Debug)]
pub(crate) struct Lock {
    file: std::fs::File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough while a process that was just forked has the file, too. That process ends it by running its program.
        let _ = self.file.unlock();
    }
}

impl Lock {
    /// Takes the lock at once or says who holds it.
    pub(crate) fn take(path: &Utf8Path) -> Result<Self, LakeError> {
        let writing = |e: std::io::Error| LakeError::writing(path, e);
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path)
            .map_err(writing)?;
        match file.file().try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Empty where the holder is just starting.
                let _ = file.read_to_string(&mut holder);
                let holder = if holder.trim().is_empty() {
                    "another process"
                } else {
                    holder.trim()
                };
                return Err(LakeError::Locked {
                    path: path.to_owned(),
                    holder: holder.to_owned(),
                });
            }
            Err(std::fs::TryLockError::Error(e)) => return Err(writing(e)),
        }
        let name = format!("process {} on {}\n", std::process::id(), host());
        file.set_len(0)
            .and_then(|()| file.write_all(name.as_bytes()))
            .map_err(writing)?;
        Ok(Self {
            file: file.into_parts().0,
        })
    }
}

fn host() -> String {
    fs_err::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "this machine".to_owned(), |name| name.trim().to_owned())
}
