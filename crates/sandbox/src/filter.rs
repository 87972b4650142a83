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

/// The first system call number that this list does not know (Linux 6.18 ends before it).
const FIRST_UNKNOWN: u32 = 470;

/// x86-64, as the kernel's audit calls it.
const ARCHITECTURE: u32 = 0xC000_003E;

const REFUSED: &[i64] = &[
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
    let no_family: Vec<_> = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6]
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
    // New namespaces by clone (a new time namespace cannot be asked for this way: its bit is part of the exit signal).
    let namespaces = [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWCGROUP,
    ];
    let clone = namespaces
        .iter()
        .map(|flag| {
            let flag = *flag as u64;
            rule(vec![condition(0, Op::MaskedEq(flag), flag)?])
        })
        .collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_clone, clone);
    // Typing into a terminal on behalf of its user.
    let ioctl = [libc::TIOCSTI, 0x541C /* TIOCLINUX */]
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
        (libc::SYS_setpriority, libc::PRIO_USER as u64),
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
        (libc::SYS_memfd_create, 1, libc::MFD_HUGETLB as u64),
        (libc::SYS_shmget, 2, libc::SHM_HUGETLB as u64),
    ] {
        let huge = rule(vec![condition(argument, Op::MaskedEq(flag), flag)?])?;
        rules.insert(call, vec![huge]);
    }
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
    let mut bytes = Vec::with_capacity(8 * (compiled.len() + 14));
    let mut add = |code: u16, jt: u8, jf: u8, k: u32| {
        bytes.extend_from_slice(&code.to_le_bytes());
        bytes.extend_from_slice(&[jt, jf]);
        bytes.extend_from_slice(&k.to_le_bytes());
    };
    let (load, equal, at_least, any_bit, answer) = (0x20, 0x15, 0x35, 0x45, 0x06);
    let refused = |error: i32| libc::SECCOMP_RET_ERRNO | error as u32;
    add(load, 0, 0, 4); // the architecture
    add(equal, 1, 0, ARCHITECTURE);
    add(answer, 0, 0, libc::SECCOMP_RET_KILL_PROCESS);
    add(load, 0, 0, 0); // the call's number
    add(at_least, 1, 0, FIRST_UNKNOWN);
    add(equal, 0, 1, libc::SYS_clone3 as u32);
    add(answer, 0, 0, refused(libc::ENOSYS));
    // The host's disks are not the sandbox's to flush, and its own files are on none: done at once.
    add(equal, 1, 0, libc::SYS_sync as u32);
    add(equal, 0, 1, libc::SYS_syncfs as u32);
    add(answer, 0, 0, refused(0));
    // Huge pages are the host's own store and not counted as memory. Decided here, since mmap is called often.
    add(equal, 0, 4, libc::SYS_mmap as u32);
    add(load, 0, 0, 16 + 3 * 8); // the fourth argument
    add(any_bit, 0, 1, libc::MAP_HUGETLB as u32);
    add(answer, 0, 0, refused(libc::EPERM));
    add(answer, 0, 0, libc::SECCOMP_RET_ALLOW);
    for i in &compiled {
        add(i.code, i.jt, i.jf, i.k);
    }
    Ok(bytes)
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
