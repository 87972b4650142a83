//! Forty attacks, six more that agents were seen to make, and two on the sandbox's own bookkeeping, against every kind of sandbox there is here.
//!
//! Each attack shows by a positive control that it ran: the same thing done outside, or a marker from inside. Its outcome
//! for a target is that the sandbox **holds**, that a limit is **not enforceable here and said so** (the row of the
//! `LimitsReport` must say it), or that the sandbox **fails**. At the end the outcomes are printed as a Markdown table,
//! also into the file that `DRILLYARD_ATTACK_MATRIX` names.
//!
//! Every target is attacked from a process of its own (this program again), so that an ordinary user's sandboxes are
//! made by an ordinary user. Two are attacked at a time, but one alone by what uses resources up. The engine is that of
//! DOCKER_HOST, else one started here when this is root and `dockerd` is installed. `DRILLYARD_ATTACK_HEAVY` asks for the
//! long variants, `DRILLYARD_ATTACK_TIMES` for how long each took.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]
#![expect(
    clippy::print_stdout,
    reason = "a test program: its output is its report"
)]
#![expect(
    clippy::unnecessary_debug_formatting,
    reason = "paths are written as literals of Python"
)]

mod common;

#[path = "attacks/apart.rs"]
mod apart;
#[path = "attacks/escape.rs"]
mod escape;
#[path = "attacks/files.rs"]
mod files;
#[path = "attacks/matrix.rs"]
mod matrix;
#[path = "attacks/probe.rs"]
mod probe;
#[path = "attacks/resources.rs"]
mod resources;
#[path = "attacks/target.rs"]
mod target;
#[path = "attacks/yard.rs"]
mod yard;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};

use matrix::Matrix;
use target::{TARGETS, Target, Worker};
use yard::{Attack, Outcome, attack};

/// The host shall start a program within 50 ms at p99 throughout; on a host that others load too only this is a failure.
const UNRESPONSIVE: Duration = Duration::from_secs(1);

/// The attacks: number, what is tried, whether the host's responsiveness is measured meanwhile, how.
static ATTACKS: &[Attack] = &[
    attack!(1, "read the host's files by path", escape::host_files),
    attack!(2, "climb out of the root", escape::climb),
    attack!(3, "use leaked descriptors", escape::descriptors),
    attack!(4, "mount, unmount, remount", escape::mounts),
    attack!(5, "enter or make namespaces", escape::namespaces),
    attack!(6, "trace the supervisor or write its memory", escape::trace),
    attack!(7, "kill or stop the supervisor", escape::kill_supervisor),
    attack!(
        8,
        "read environments and command lines",
        escape::environments
    ),
    attack!(9, "change the kernel's settings", escape::settings),
    attack!(10, "make or open devices", escape::devices),
    attack!(
        11,
        "gain privileges by set-uid or file capabilities",
        escape::set_uid
    ),
    attack!(
        12,
        "overwrite the supervisor's program",
        escape::overwrite_program
    ),
    attack!(13, "wide kernel interfaces", escape::interfaces),
    attack!(14, "calls of another architecture", escape::architectures),
    attack!(15, "sockets that lead out", escape::socket_families),
    attack!(16, "reach the host's network", apart::network),
    attack!(17, "meet another sandbox or the host", apart::rendezvous),
    attack!(18, "type into a terminal", escape::terminal),
    attack!(19, "protections that cannot be had", apart::fails_closed),
    attack!(20, "fork bomb and fork chain", heavy resources::fork_bomb),
    attack!(21, "thread bomb and vfork storm", heavy resources::thread_bomb),
    attack!(22, "four times the memory", heavy resources::memory),
    attack!(23, "out of memory behind a parent that exits 0", heavy resources::memory_of_a_child),
    attack!(24, "memory left behind for the next call", heavy resources::poison),
    attack!(25, "memory of many processes, and shared", heavy resources::memory_together),
    attack!(26, "fill the disk", heavy resources::disk),
    attack!(27, "busy processors", heavy resources::processors),
    attack!(28, "ignore the clock", resources::clock),
    attack!(29, "daemons that outlive their call", resources::daemons),
    attack!(30, "hold the output open", resources::held_output),
    attack!(
        31,
        "processes that cannot die at once",
        resources::unkillable
    ),
    attack!(32, "floods of output", heavy resources::output_flood),
    attack!(33, "wait for input", files::input),
    attack!(34, "links in the way of file tools", files::links),
    attack!(35, "swap a directory for a link meanwhile", files::swap),
    attack!(
        36,
        "pipes, devices and giants for file tools",
        files::special
    ),
    attack!(
        37,
        "change the image through links and renames",
        files::image
    ),
    attack!(38, "forge deletions and attributes", files::forged),
    attack!(39, "names and trees nobody expects", files::odd),
    attack!(40, "leave something for the next sandbox", heavy apart::residue),
    attack!(
        41,
        "look for leftovers of earlier answers",
        apart::leftovers
    ),
    attack!(42, "forge calls to the control socket", apart::forged_calls),
    attack!(43, "overwrite the shell", escape::overwrite_shell),
    attack!(44, "scan ports", apart::port_scan),
    attack!(45, "search /proc recursively", heavy resources::search_proc),
    attack!(46, "print tens of gigabytes", heavy resources::gigabytes),
    attack!(47, "slow the supervisor or choke its reply", heavy files::burden),
    attack!(48, "memory that waits in sockets", heavy resources::socket_memory),
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(target::WORKER) {
        return target::work(&name);
    }
    if std::env::var_os(apart::FAULT).is_some() {
        return apart::suffer();
    }
    if let Ok(mark) = std::env::var(apart::VICTIM) {
        return apart::be_a_victim(&mark);
    }
    let mut arguments = Arguments::from_args();
    if !std::path::Path::new("/usr/bin/python3").exists() {
        eprintln!(
            "SKIPPED: all attacks: they are written in Python, and this host has no /usr/bin/python3"
        );
        return ExitCode::SUCCESS;
    }
    arguments.test_threads.get_or_insert(2);
    let wanted = |name: &str| match &arguments.filter {
        Some(filter) if arguments.exact => name == filter,
        Some(filter) => name.contains(filter),
        None => true,
    };
    let matrix = Arc::new(Mutex::new(Matrix::default()));
    let starting: Vec<_> = TARGETS
        .iter()
        .filter(|target| ATTACKS.iter().any(|a| wanted(&a.test_name(target.name))))
        .filter(|_| !arguments.list)
        .map(|target| (target, std::thread::spawn(move || Worker::start(target))))
        .collect();
    let mut workers = Vec::new();
    for (target, start) in starting {
        match start.join() {
            Ok(Ok(worker)) => {
                matrix.lock().unwrap().attacked(target.title);
                workers.push((target, Arc::new(Mutex::new(worker))));
            }
            Ok(Err(reason)) => {
                eprintln!("SKIPPED: all attacks on {}: {reason}", target.name);
                matrix.lock().unwrap().skipped(target.title, &reason);
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    let mut trials = Vec::new();
    if arguments.list {
        let all = |target: &'static Target| {
            ATTACKS
                .iter()
                .map(|attack| Trial::test(attack.test_name(target.name), || Ok(())))
        };
        trials.extend(TARGETS.iter().flat_map(all));
    }
    // Who uses resources up is alone: the host's responsiveness is measured, and attacks shall not blame each other.
    let alone = Arc::new(RwLock::new(()));
    for attack in ATTACKS {
        for (target, worker) in &workers {
            let target: &'static Target = target;
            let (worker, alone, matrix) =
                (Arc::clone(worker), Arc::clone(&alone), Arc::clone(&matrix));
            trials.push(Trial::test(attack.test_name(target.name), move || {
                let mut worker = worker.lock().unwrap();
                let outcome = if attack.heavy {
                    let _alone = alone.write().unwrap();
                    worker.attack(attack)
                } else {
                    let _with_others = alone.read().unwrap();
                    worker.attack(attack)
                };
                let failed = match &outcome {
                    Outcome::Fails { why } => Err(Failed::from(why)),
                    _ => Ok(()),
                };
                matrix.lock().unwrap().add(attack, target.title, outcome);
                failed
            }));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let mut responsive = true;
    if !arguments.list {
        let mut matrix = matrix.lock().unwrap();
        for (target, worker) in workers {
            if let Some(latency) = worker.lock().unwrap().end() {
                responsive &= latency.p99 < UNRESPONSIVE;
                matrix.latency(target.title, latency);
            }
        }
        println!("{matrix}");
        if let Some(path) = std::env::var_os("DRILLYARD_ATTACK_MATRIX") {
            std::fs::write(path, matrix.to_string()).unwrap();
        }
    }
    if !responsive {
        eprintln!(
            "the host was unresponsive: a fork and exec took {UNRESPONSIVE:?} or more at p99"
        );
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
