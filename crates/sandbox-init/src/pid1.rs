//! PID 1 of a sandbox: answers one request after another until its socket closes, then ends, and everything with it.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use drillyard_sandbox_init::control::Start;
use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::{Reply, Request};

use crate::cgroup::Meter;
use crate::scan::{Area, Index};
use crate::{calls, scan, sys};

/// Most bytes a request carries beside its head: set-up files, a snapshot, a file to write.
const MAX_BODY: u64 = 1 << 31;

/// What PID 1 holds.
pub struct Inside<'a> {
    /// To the program outside.
    pub socket: OwnedFd,
    /// Readable when a child ended.
    pub signals: OwnedFd,
    pub meter: Meter,
    /// What tools may write, where the kernel can be told.
    pub rules: Option<OwnedFd>,
    pub start: &'a Start,
    /// Where files can be written.
    pub areas: Vec<Area>,
    /// The id of PID 1 itself; the tools' own where the host allows only one.
    pub own_id: u32,
}

impl Inside<'_> {
    pub fn socket(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Serves until the socket closes.
pub fn serve(inside: &Inside<'_>) -> ! {
    let code = match inside.socket.try_clone() {
        Ok(socket) => i32::from(talk(inside, File::from(socket)).is_err()),
        Err(_) => 1,
    };
    sys::exit(code)
}

fn talk(inside: &Inside<'_>, mut socket: File) -> std::io::Result<()> {
    let mut index = Index::new(&inside.areas);
    index.look();
    frame::write(&mut socket, &Reply::Ready, &[])?;
    while let Some((request, body)) = frame::read::<Request>(&mut socket, MAX_BODY)? {
        let mut out = Vec::new();
        let reply = match request {
            Request::Call { what, timeout_us } => {
                calls::run(inside, &mut index, &what, &body, timeout_us, &mut out)
            }
            Request::Unpack { entries, remove } => {
                let owner = scan::Owner {
                    own_id: inside.own_id,
                    whole_root: inside.start.rootfs.is_some(),
                };
                match scan::unpack(&entries, &remove, &body, owner) {
                    Ok(()) => {
                        index.look();
                        Reply::Done
                    }
                    Err(message) => Reply::Refused { message },
                }
            }
            Request::Pack { max_bytes, delta } => match index.pack(max_bytes, delta, &mut out) {
                Ok((entries, removed)) => Reply::Packed { entries, removed },
                Err(message) => Reply::Refused { message },
            },
        };
        frame::write(&mut socket, &reply, &out)?;
    }
    Ok(())
}
