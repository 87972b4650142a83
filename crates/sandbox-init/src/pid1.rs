//! PID 1 of a sandbox: answers one request after another until its socket closes, then ends, and everything with it.

use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use drillyard_sandbox_init::control::Start;
use drillyard_sandbox_init::frame;
use drillyard_sandbox_init::init::{Reply, Request};

use crate::cgroup::Meter;
use crate::counts::Counts;
use crate::relay::Relay;
use crate::scan::{Area, Index};
use crate::{calls, scan, sys};

/// Most bytes a request carries beside its head: set-up files, a snapshot, a file to write.
const MAX_BODY: u64 = 1 << 31;

/// What PID 1 holds.
pub struct Inside<'a> {
    /// To the program outside.
    pub socket: OwnedFd,
    /// Where replies go when `socket` carries requests only.
    pub replies: Option<OwnedFd>,
    /// Readable when a child ended.
    pub signals: OwnedFd,
    pub meter: Meter,
    pub counts: Counts,
    /// What tools may write, where the kernel can be told.
    pub rules: Option<OwnedFd>,
    /// For tools' processes until they execute their program.
    pub stack: sys::Stack,
    pub start: &'a Start,
    /// Where files can be written.
    pub areas: Vec<Area>,
    /// The id of PID 1 itself; the tools' own where the host allows only one.
    pub own_id: u32,
    /// Goes to the program outside with the greeting; PID 1 keeps no copy.
    pub listener: Option<OwnedFd>,
    /// Carries connections where no socket can be handed out.
    pub relay: Option<RefCell<Relay>>,
    /// The tools' id is in use outside this sandbox too, so that limits the kernel counts by id would count strangers.
    pub shares_ids: bool,
}

impl Inside<'_> {
    pub fn socket(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Serves until the socket closes.
pub fn serve(mut inside: Inside<'_>) -> ! {
    let listener = inside.listener.take();
    let ends = inside.socket.try_clone().and_then(|requests| {
        let replies = inside.replies.as_ref().unwrap_or(&inside.socket);
        Ok((File::from(requests), File::from(replies.try_clone()?)))
    });
    let code = match ends {
        Ok((requests, replies)) => i32::from(talk(&inside, listener, requests, replies).is_err()),
        Err(_) => 1,
    };
    sys::exit(code)
}

fn talk(
    inside: &Inside<'_>,
    listener: Option<OwnedFd>,
    mut requests: File,
    mut replies: File,
) -> std::io::Result<()> {
    let mut index = Index::new(&inside.areas);
    index.look();
    match listener {
        Some(listener) => sys::send(
            inside.socket(),
            &frame::encode(&Reply::Ready, 0)?,
            Some(listener.as_raw_fd()),
        )?,
        None => frame::write(&mut replies, &Reply::Ready, &[])?,
    }
    loop {
        let begun = inside.relay.as_ref().map(|r| r.borrow_mut().take_begun());
        let begun = begun.unwrap_or_default();
        let mut requests = begun.as_slice().chain(&mut requests);
        let Some((request, body)) = frame::read::<Request>(&mut requests, MAX_BODY)? else {
            return Ok(());
        };
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
            // The copy is held in the sandbox's own memory, beside the files.
            Request::Pack { max_bytes, delta } => match index.pack(
                max_bytes.min(inside.start.limits.memory_bytes / 4),
                delta,
                &mut out,
            ) {
                Ok(packed) => packed,
                Err(message) => Reply::Refused { message },
            },
        };
        frame::write(&mut replies, &reply, &out)?;
    }
}
