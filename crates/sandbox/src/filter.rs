//! The system call filter of everything that runs inside: a deny list over what tools have no business with.
//!
//! Refused calls fail with EPERM, so that a tool can say so; calls of another architecture kill the process; calls
//! newer than this list, those of the x32 interface, and `clone3` (whose flags no filter can see) do not exist as far as
//! a tool can tell.
//!
//! Numbers are told apart by a tree of comparisons, not one after the other: the kernel tries every number when a filter is
//! installed, which took a fifth of a millisecond of each sandbox. Only calls that depend on arguments go on to rules.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// The first system call number that this list does not know (Linux 6.18 ends before it).
const FIRST_UNKNOWN: u32 = 470;

/// Numbers and names of system calls.
macro_rules! calls {
    ($($name:ident,)*) => {
        &[$((libc::$name, stringify!($name))),*]
    };
}

const REFUSED: &[(i64, &str)] = calls![
    // Mounts and other roots.
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_move_mount,
    SYS_open_tree,
    SYS_fsopen,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fspick,
    SYS_mount_setattr,
    SYS_swapon,
    SYS_swapoff,
    SYS_quotactl,
    SYS_quotactl_fd,
    // Namespaces (clone is looked into below).
    SYS_unshare,
    SYS_setns,
    // Other processes' insides.
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_process_madvise,
    SYS_process_mrelease,
    SYS_pidfd_getfd,
    SYS_kcmp,
    // Wide kernel interfaces with a history.
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_io_uring_setup,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_keyctl,
    SYS_add_key,
    SYS_request_key,
    SYS_memfd_secret,
    SYS_vmsplice,
    SYS_fanotify_init,
    SYS_name_to_handle_at,
    SYS_open_by_handle_at,
    SYS_lookup_dcookie,
    SYS_modify_ldt,
    SYS_remap_file_pages,
    // The machine itself.
    SYS_reboot,
    SYS_kexec_load,
    SYS_kexec_file_load,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_acct,
    SYS_syslog,
    SYS_iopl,
    SYS_ioperm,
    SYS_sethostname,
    SYS_setdomainname,
    SYS_settimeofday,
    SYS_clock_settime,
    SYS_clock_adjtime,
    SYS_adjtimex,
    SYS_vhangup,
    SYS_uselib,
    SYS_ustat,
    SYS_sysfs,
    SYS__sysctl,
    SYS_nfsservctl,
    SYS_migrate_pages,
    SYS_move_pages,
    SYS_mbind,
    SYS_set_mempolicy,
];

/// Calls that the libc crate has no name for.
const REFUSED_NEWER: &[(i64, &str)] = &[
    (457, "statmount"),
    (458, "listmount"),
    (467, "open_tree_attr"),
];

/// Sockets may be of these families: vsock leads to the hypervisor, packet and netlink to the kernel.
const FAMILIES: [i32; 3] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];

/// New namespaces by clone (a new time namespace cannot be asked for this way: its bit is part of the exit signal).
const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

/// Typing into a terminal on behalf of its user: TIOCSTI and TIOCLINUX.
const TYPING: [u64; 2] = [libc::TIOCSTI, 0x541C];

fn refused() -> impl Iterator<Item = (i64, &'static str)> {
    REFUSED.iter().chain(REFUSED_NEWER).copied()
}

/// What becomes of a call by its number alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allowed,
    Refused,
    Missing,
    /// Nothing is done, and that is called a success.
    Idle,
    /// Allowed but with huge pages.
    SmallPages,
    /// Its arguments decide.
    Rules,
}

/// The compiled filter, as an array of `struct sock_filter`.
pub fn program() -> Result<Vec<u8>, String> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let no_family: Vec<_> = FAMILIES
        .iter()
        .map(|family| condition(0, Op::Ne, *family as u64))
        .collect::<Result<_, _>>()?;
    let mut sockets = vec![rule(no_family)?];
    // Of the internet families only streams and datagrams of TCP and UDP: raw ones reach other protocols, and asking for
    // a rare protocol makes the kernel load its module.
    let internet = || condition(0, Op::Ne, libc::AF_UNIX as u64);
    for kind in [
        libc::SOCK_RAW,
        libc::SOCK_RDM,
        libc::SOCK_SEQPACKET,
        6,  // SOCK_DCCP
        10, // SOCK_PACKET
    ] {
        sockets.push(rule(vec![
            internet()?,
            condition(1, Op::MaskedEq(0xf), kind as u64)?,
        ])?);
    }
    let mut rare = vec![internet()?];
    for protocol in [0, libc::IPPROTO_TCP, libc::IPPROTO_UDP] {
        rare.push(condition(2, Op::Ne, protocol as u64)?);
    }
    sockets.push(rule(rare)?);
    rules.insert(libc::SYS_socket, sockets);
    rules.insert(
        libc::SYS_socketpair,
        vec![rule(vec![condition(0, Op::Ne, libc::AF_UNIX as u64)?])?],
    );
    let clone = NAMESPACES
        .iter()
        .map(|flag| {
            let flag = *flag as u64;
            rule(vec![condition(0, Op::MaskedEq(flag), flag)?])
        })
        .collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_clone, clone);
    let ioctl = TYPING
        .iter()
        .map(|request| rule(vec![condition(1, Op::Eq, *request)?]))
        .collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_ioctl, ioctl);
    // Limits of other processes (PID 1 may have the same user id).
    rules.insert(
        libc::SYS_prlimit64,
        vec![rule(vec![condition(0, Op::Ne, 0)?, quad(2, Op::Ne, 0)?])?],
    );
    // PID 1's share of the processors, by its number or by that user id: it must be awake when the clock runs out.
    for call in [
        libc::SYS_sched_setscheduler,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setattr,
        libc::SYS_sched_setaffinity,
    ] {
        rules.insert(call, vec![rule(vec![condition(0, Op::Eq, 1)?])?]);
    }
    for (call, by_user) in [
        (libc::SYS_setpriority, u64::from(libc::PRIO_USER)),
        (libc::SYS_ioprio_set, 3),
    ] {
        let supervisor = rule(vec![condition(1, Op::Eq, 1)?])?;
        rules.insert(
            call,
            vec![supervisor, rule(vec![condition(0, Op::Eq, by_user)?])?],
        );
    }
    // Huge pages by the other two ways to them (see mmap below).
    for (call, argument, flag) in [
        (libc::SYS_memfd_create, 1, u64::from(libc::MFD_HUGETLB)),
        (libc::SYS_shmget, 2, libc::SHM_HUGETLB as u64),
    ] {
        let huge = rule(vec![condition(argument, Op::MaskedEq(flag), flag)?])?;
        rules.insert(call, vec![huge]);
    }
    let mut verdicts = vec![Verdict::Allowed; FIRST_UNKNOWN as usize];
    let numbers = refused().map(|(call, _)| (call, Verdict::Refused));
    let numbers = numbers.chain(rules.keys().map(|call| (*call, Verdict::Rules)));
    let special = [
        (libc::SYS_clone3, Verdict::Missing),
        // The host's disks are not the sandbox's to flush, and its own files are on none: done at once.
        (libc::SYS_sync, Verdict::Idle),
        (libc::SYS_syncfs, Verdict::Idle),
        // Huge pages are the host's own store and not counted as memory. Not among the rules, since mmap is called often.
        (libc::SYS_mmap, Verdict::SmallPages),
    ];
    for (call, verdict) in numbers.chain(special) {
        let place = usize::try_from(call).ok().and_then(|n| verdicts.get_mut(n));
        *place.ok_or_else(|| format!("system call {call} is not below {FIRST_UNKNOWN}"))? = verdict;
    }
    verdicts.push(Verdict::Missing);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::x86_64,
    )
    .map_err(|e| e.to_string())?;
    let compiled: BpfProgram = filter
        .try_into()
        .map_err(|e: seccompiler::BackendError| e.to_string())?;
    let runs: Vec<(u32, Verdict)> = (0_u32..)
        .zip(&verdicts)
        .filter(|(n, v)| *n == 0 || verdicts.get(*n as usize - 1) != Some(v))
        .map(|(n, v)| (n, *v))
        .collect();
    let mut code = vec![
        Step(0x20, 0, 0, 4), // load the architecture
        Step(0x15, 1, 0, AUDIT_ARCH_X86_64),
        Step(0x06, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        Step(0x20, 0, 0, 0), // load the call's number
    ];
    let tree = tree(&runs)?;
    let end = tree.len();
    code.extend(tree.into_iter().enumerate().map(|(at, step)| match step {
        Step(JUMP, ..) => Step(JUMP, 0, 0, (end - at - 1) as u32),
        other => other,
    }));
    code.extend(compiled.iter().map(|i| Step(i.code, i.jt, i.jf, i.k)));
    let mut bytes = Vec::with_capacity(8 * code.len());
    for Step(code, yes, no, value) in code {
        bytes.extend_from_slice(&code.to_le_bytes());
        bytes.extend_from_slice(&[yes, no]);
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    Ok(bytes)
}

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// Opcode of an unconditional jump; in a tree it leads to the rules behind it.
const JUMP: u16 = 0x05;

/// One instruction: opcode, how many to skip if true, if false, operand.
#[derive(Debug, Clone, Copy)]
struct Step(u16, u8, u8, u32);

/// Comparisons that find the verdict of a number among runs of equal verdicts, each given by its first number.
fn tree(runs: &[(u32, Verdict)]) -> Result<Vec<Step>, String> {
    if let [(_, verdict)] = runs {
        let answer = |value: u32| Step(0x06, 0, 0, value);
        let fail = |error: i32| answer(libc::SECCOMP_RET_ERRNO | error as u32);
        return Ok(match verdict {
            Verdict::Allowed => vec![answer(libc::SECCOMP_RET_ALLOW)],
            Verdict::Refused => vec![fail(libc::EPERM)],
            Verdict::Missing => vec![fail(libc::ENOSYS)],
            Verdict::Idle => vec![fail(0)],
            Verdict::SmallPages => vec![
                Step(0x20, 0, 0, 16 + 3 * 8), // load the fourth argument
                Step(0x45, 0, 1, libc::MAP_HUGETLB as u32),
                fail(libc::EPERM),
                answer(libc::SECCOMP_RET_ALLOW),
            ],
            Verdict::Rules => vec![Step(JUMP, 0, 0, 0)],
        });
    }
    let (low, high) = runs.split_at(runs.len() / 2);
    let (first, _) = high.first().ok_or("no system calls")?;
    let (low, high) = (tree(low)?, tree(high)?);
    let over = u8::try_from(low.len()).map_err(|_| "too many system calls for one tree")?;
    let mut steps = vec![Step(0x35, over, 0, *first)]; // at least this: over the lower ones
    steps.extend(low);
    steps.extend(high);
    Ok(steps)
}

/// The same list as a profile for container engines, in the format of theirs. What it cannot say (calls newer than the
/// list) is left to [`program`], which PID 1 puts in place in any case.
pub fn profile() -> String {
    let mut rules = Vec::new();
    let mut refuse = |names: &[&str], errno: i32, args: Value| {
        rules.push(json!({
            "names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno, "args": args,
        }));
    };
    // Engines compare all 64 bits of an argument, the kernel looks at 32 of these: the upper ones must not make a
    // difference.
    let low = u64::from(u32::MAX);
    let equals = |index: u32, value: u64| json!({"index": index, "value": low, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"});
    let names: Vec<&str> = refused()
        .map(|(_, name)| name.trim_start_matches("SYS_"))
        .collect();
    refuse(&names, libc::EPERM, json!([]));
    let last = 63;
    for family in (0..=last).filter(|f| !FAMILIES.contains(f)) {
        refuse(&["socket"], libc::EPERM, json!([equals(0, family as u64)]));
    }
    refuse(
        &["socket"],
        libc::EPERM,
        json!([{"index": 0, "value": last, "op": "SCMP_CMP_GT"}]),
    );
    refuse(
        &["socketpair"],
        libc::EPERM,
        json!([{"index": 0, "value": libc::AF_UNIX, "op": "SCMP_CMP_NE"}]),
    );
    for flag in NAMESPACES {
        refuse(
            &["clone"],
            libc::EPERM,
            json!([{"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}]),
        );
    }
    for request in TYPING {
        refuse(&["ioctl"], libc::EPERM, json!([equals(1, request)]));
    }
    refuse(
        &["prlimit64"],
        libc::EPERM,
        json!([
            {"index": 0, "value": 0, "op": "SCMP_CMP_NE"},
            {"index": 2, "value": 0, "op": "SCMP_CMP_NE"},
        ]),
    );
    refuse(&["clone3"], libc::ENOSYS, json!([]));
    // The x32 interface is named only so that its calls reach PID 1's filter, for which they do not exist; those of any
    // other architecture kill the process.
    json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X32"],
        "syscalls": rules,
    })
    .to_string()
}

fn condition(argument: u8, op: Op, value: u64) -> Result<SeccompCondition, String> {
    SeccompCondition::new(argument, Len::Dword, op, value).map_err(|e| e.to_string())
}

fn quad(argument: u8, op: Op, value: u64) -> Result<SeccompCondition, String> {
    SeccompCondition::new(argument, Len::Qword, op, value).map_err(|e| e.to_string())
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, String> {
    SeccompRule::new(conditions).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would answer, for the instructions that the filter is made of, and after how many of them.
    fn answer(program: &[u8], arch: u32, number: u32, arguments: [u64; 6]) -> (u32, usize) {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(arch.to_le_bytes());
        data.extend([0; 8]);
        data.extend(arguments.iter().flat_map(|a| a.to_le_bytes()));
        let word = |at: usize| u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
        let (mut at, mut a) = (0, 0);
        for steps in 1.. {
            let i = &program[8 * at..8 * at + 8];
            let k = u32::from_le_bytes(i[4..].try_into().unwrap());
            let branch = |yes: bool| usize::from(if yes { i[2] } else { i[3] });
            at += 1;
            match u16::from_le_bytes([i[0], i[1]]) {
                0x20 => a = word(k as usize),
                0x05 => at += k as usize,
                0x15 => at += branch(a == k),
                0x25 => at += branch(a > k),
                0x35 => at += branch(a >= k),
                0x45 => at += branch(a & k != 0),
                0x54 => a &= k,
                0x06 => return (k, steps),
                other => panic!("opcode {other:#x}"),
            }
        }
        unreachable!()
    }

    #[test]
    fn every_number_gets_its_verdict_soon() {
        let program = program().unwrap();
        let forbidden = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        let ask = |number: i64| answer(&program, AUDIT_ARCH_X86_64, number as u32, [0; 6]);
        let by_arguments = [
            libc::SYS_socket,
            libc::SYS_socketpair,
            libc::SYS_clone,
            libc::SYS_ioctl,
            libc::SYS_prlimit64,
            libc::SYS_sched_setscheduler,
            libc::SYS_sched_setparam,
            libc::SYS_sched_setattr,
            libc::SYS_sched_setaffinity,
            libc::SYS_setpriority,
            libc::SYS_ioprio_set,
            libc::SYS_memfd_create,
            libc::SYS_shmget,
        ];
        for number in 0..1000 {
            let (verdict, steps) = ask(number);
            if by_arguments.contains(&number) {
                continue;
            }
            let expected = if number >= i64::from(FIRST_UNKNOWN) || number == libc::SYS_clone3 {
                missing
            } else if [libc::SYS_sync, libc::SYS_syncfs].contains(&number) {
                libc::SECCOMP_RET_ERRNO
            } else if refused().any(|(call, _)| call == number) {
                forbidden
            } else {
                libc::SECCOMP_RET_ALLOW
            };
            assert_eq!(verdict, expected, "system call {number}");
            assert!(steps <= 16, "system call {number} took {steps} steps");
        }
        assert_eq!(ask(0x4000_0000 + libc::SYS_getppid).0, missing);
        let i386 = answer(&program, 0x4000_0003, 20, [0; 6]).0;
        assert_eq!(i386, libc::SECCOMP_RET_KILL_PROCESS);
        let socket = |family: i32| {
            let arguments = [family as u64, 1, 0, 0, 0, 0];
            answer(
                &program,
                AUDIT_ARCH_X86_64,
                libc::SYS_socket as u32,
                arguments,
            )
            .0
        };
        assert_eq!(socket(libc::AF_INET), libc::SECCOMP_RET_ALLOW);
        assert_eq!(socket(libc::AF_VSOCK), forbidden);
        assert!(program.len() / 8 < 512, "{}", program.len() / 8);
    }

    #[test]
    fn the_profile_for_engines_names_every_refused_call() {
        let profile: serde_json::Value = serde_json::from_str(&super::profile()).unwrap();
        let first = &profile["syscalls"][0]["names"];
        assert_eq!(first.as_array().unwrap().len(), super::refused().count());
        for name in ["mount", "io_uring_setup", "_sysctl", "statmount"] {
            assert!(
                first.as_array().unwrap().iter().any(|n| n == name),
                "{name}"
            );
        }
        let vsock = profile["syscalls"].as_array().unwrap().iter().any(|rule| {
            rule["names"][0] == "socket" && rule["args"][0]["valueTwo"] == libc::AF_VSOCK
        });
        assert!(vsock);
    }
}
