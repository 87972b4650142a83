//! What the program outside a sandbox and the supervisor inside it say to each other.
//!
//! Two conversations, one framing ([`frame`]):
//!
//! - **control** ([`control`]): the asynchronous program and the single-threaded helper that makes sandboxes;
//! - **init** ([`init`]): the asynchronous program and PID 1 of one sandbox, which runs calls, moves files in and out
//!   and says what changed. Where tools have a network and no socket can be handed out, streams run beside it ([`mux`]).
//!
//! The executable of this crate, `drillyard-sandbox-init`, is static and plays both counterparts: started with the
//! argument `helper` it makes sandboxes, and the processes it clones become PID 1 without another `exec`; started with
//! the argument `container` as PID 1 of a container it serves over standard input and output.
//! Beside what both must reckon alike ([`time`]) this library holds only the messages, so that any backend that can carry a byte stream (a container's standard
//! input and output, a virtual machine's serial line) can speak to the same PID 1.

pub mod control;
pub mod frame;
pub mod init;
pub mod mux;
pub mod time;
