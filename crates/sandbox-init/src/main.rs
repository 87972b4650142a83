//! The static program behind the `local` sandboxes; see the library for what it speaks.
//!
//! `drillyard-sandbox-init helper` takes its control socket as standard input. It is single-threaded throughout: it
//! clones PID 1 of each sandbox from itself without another `exec`, which no threaded program could do safely.
//! `drillyard-sandbox-init container` is the first program of a container and its PID 1.

mod birth;
mod calls;
mod cgroup;
mod container;
mod counts;
mod filetools;
mod helper;
mod landlock;
mod pid1;
mod relay;
mod scan;
mod sys;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("helper") => return helper::run(),
        Some("container") => return container::run(),
        _ => {}
    }
    let _ = std::io::Write::write_all(
        &mut std::io::stderr(),
        b"drillyard-sandbox-init is started by drillyard; it does nothing by itself\n",
    );
    ExitCode::from(2)
}
