//! The system call filter of everything that runs inside: a deny list over what tools have no business with.
//!
//! Refused calls fail with EPERM, so that a tool can say so; calls of another architecture kill the process; calls
//! newer than this list, those of the x32 interface, and `clone3` (whose flags no filter can see) do not exist as far as
//! a tool can tell.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use serde_json::{Value, json};

/// The first system call number that this list does not know (Linux 6.18 ends before it).
const FIRST_UNKNOWN: u32 = 470;

/// Families that sockets may be of.
const FAMILIES: [i32; 3] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];

const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

const TYPING: [u64; 2] = [libc::TIOCSTI, 0x541C /* TIOCLINUX */];

/// Numbers and names of system calls.
macro_rules! calls {
    ($($head:tt $(:: $name:ident)?,)*) => {
        &[$(($head $(:: $name)?, concat!($(stringify!($name))?))),*]
    };
}

/// The refused calls' numbers; their names are wanted by container engines.
const REFUSED: &[i64] = &{
    let mut numbers = [0; NAMED.len()];
    let mut i = 0;
    while i < numbers.len() {
        numbers[i] = NAMED[i].0;
        i += 1;
    }
    numbers
};

#[rustfmt::skip]
const NAMED: &[(i64, &str)] = calls![
    // Mounts and other roots.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    457, // statmount
    458, // listmount
    467, // open_tree_attr
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    // Namespaces (clone is looked into below).
    libc::SYS_unshare,
    libc::SYS_setns,
    // Other processes' insides.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // Wide kernel interfaces with a history.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_memfd_secret,
    libc::SYS_vmsplice,
    libc::SYS_fanotify_init,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_lookup_dcookie,
    libc::SYS_modify_ldt,
    libc::SYS_remap_file_pages,
    // The machine itself.
    libc::SYS_reboot,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_vhangup,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
    libc::SYS_nfsservctl,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
];

/// The compiled filter, as an array of `struct sock_filter`.
pub fn program() -> Result<Vec<u8>, String> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    // Sockets other than unix, inet and inet6: vsock leads to the hypervisor, packet and netlink to the kernel.
    let no_family: Vec<_> = FAMILIES
        .iter()
        .map(|family| condition(0, Op::Ne, *family as u64))
        .collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_socket, vec![rule(no_family)?]);
    rules.insert(
        libc::SYS_socketpair,
        vec![rule(vec![condition(0, Op::Ne, libc::AF_UNIX as u64)?])?],
    );
    // New namespaces by clone (a new time namespace cannot be asked for this way: its bit is part of the exit signal).
    let clone = NAMESPACES
        .iter()
        .map(|flag| {
            let flag = *flag as u64;
            rule(vec![condition(0, Op::MaskedEq(flag), flag)?])
        })
        .collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_clone, clone);
    // Typing into a terminal on behalf of its user.
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
    let mut bytes = Vec::with_capacity(8 * (compiled.len() + 4));
    let mut add = |code: u16, jt: u8, jf: u8, k: u32| {
        bytes.extend_from_slice(&code.to_le_bytes());
        bytes.extend_from_slice(&[jt, jf]);
        bytes.extend_from_slice(&k.to_le_bytes());
    };
    let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    add(0x20, 0, 0, 0); // load the call's number
    add(0x35, 1, 0, FIRST_UNKNOWN); // at least this: to the return
    add(0x15, 0, 1, libc::SYS_clone3 as u32); // not clone3: over the return
    add(0x06, 0, 0, missing);
    for i in &compiled {
        add(i.code, i.jt, i.jf, i.k);
    }
    Ok(bytes)
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
    let names: Vec<&str> = NAMED
        .iter()
        .map(|(number, name)| name_of(*number, name))
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

/// A call's name as engines know it.
fn name_of(number: i64, written: &'static str) -> &'static str {
    match number {
        457 => "statmount",
        458 => "listmount",
        467 => "open_tree_attr",
        _ => written.trim_start_matches("SYS_"),
    }
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
    #[test]
    fn the_profile_for_engines_names_every_refused_call() {
        let profile: serde_json::Value = serde_json::from_str(&super::profile()).unwrap();
        let known = |name: &str| {
            name.bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        };
        assert!(
            profile["syscalls"][0]["names"]
                .as_array()
                .unwrap()
                .iter()
                .all(|n| known(n.as_str().unwrap()))
        );
        let first = &profile["syscalls"][0]["names"];
        assert_eq!(first.as_array().unwrap().len(), super::REFUSED.len());
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

    #[test]
    fn the_filter_fits_the_kernels_limit() {
        let bytes = super::program().unwrap();
        assert_eq!(bytes.len() % 8, 0);
        assert!(
            (200..4096).contains(&(bytes.len() / 8)),
            "{}",
            bytes.len() / 8
        );
    }
}
