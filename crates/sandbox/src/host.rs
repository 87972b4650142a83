//! What of the host goes into a sandbox's root, where the helper programs lie, and what to tell a user whose host forbids
//! sandboxes.

use camino::{Utf8Path, Utf8PathBuf};

use drillyard_sandbox_init::control::{Bind, Link, Made};

use crate::{ImageReport, SandboxError, image};

/// The helper that makes sandboxes.
pub const INIT: &str = "drillyard-sandbox-init";
/// The SQL tool, shown inside.
pub const SQL_TOOL: &str = "drillyard-sql-tool";
/// Where the helper programs for tools appear inside.
pub const TOOLS: &str = "/opt/drillyard/bin";

/// The directories that hold a host's programs and libraries; links among them stay links.
const SYSTEM: [&str; 7] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
];
const DEVICES: [&str; 5] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
];
/// Files of /etc that programs need and that tell nothing of the host's people or network.
const ETC: [&str; 6] = [
    "/etc/mime.types",
    "/etc/protocols",
    "/etc/services",
    "/etc/inputrc",
    "/etc/debian_version",
    "/etc/magic",
];

const PASSWD: &str = "root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:1000:1000:agent:/work:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n";

/// The root of sandboxes, as orders to the helper.
pub struct Root {
    pub binds: Vec<Bind>,
    pub copies: Vec<Bind>,
    pub made: Vec<Made>,
    pub links: Vec<Link>,
    pub shell: String,
    pub env: Vec<String>,
    pub report: ImageReport,
}

/// Describes a root of the sandbox's own: of the host it has five devices and the helper programs for tools.
pub fn own_root(
    helpers: &Utf8Path,
    extra: &[Utf8PathBuf],
    dir: &Utf8Path,
    digest: &str,
) -> Result<Root, SandboxError> {
    if !extra.is_empty() {
        return Err(SandboxError::Config {
            field: "host_paths",
            message: "with an image, nothing of the host is shown; put the files into the image"
                .into(),
        });
    }
    let failed = |e: std::io::Error| image::problem(digest, format!("{dir}: {e}"));
    // What a configuration names may be a link.
    let root = dir
        .canonicalize_utf8()
        .and_then(|dir| image::tree::open_root(&dir))
        .map_err(failed)?;
    let Some(shell) = ["/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh"]
        .into_iter()
        .find(|path| image::tree::is_file(&root, path))
    else {
        return Err(image::problem(
            digest,
            format!("{dir}: neither /bin/bash nor /bin/sh is in it"),
        ));
    };
    let mut own = self::root(helpers, &[])?;
    own.binds
        .retain(|bind| DEVICES.contains(&bind.host.as_str()));
    // Its own os-release and the like stay; names and addresses are a sandbox's.
    own.made.retain(|made| {
        let text = [
            "/etc/passwd",
            "/etc/group",
            "/etc/hostname",
            "/etc/hosts",
            "/etc/resolv.conf",
            "/etc/nsswitch.conf",
        ];
        text.contains(&made.inside.as_str())
    });
    shell.clone_into(&mut own.shell);
    let passwd = own.made.iter_mut().find(|m| m.inside == "/etc/passwd");
    if let Some(passwd) = passwd {
        passwd.text = passwd.text.replace("/bin/bash", shell);
    }
    own.report = ImageReport {
        name: "rootfs".to_owned(),
        digest: digest.to_owned(),
        system: image::system(&root),
    };
    Ok(own)
}

/// Describes the root made of the host's own programs.
pub fn root(helpers: &Utf8Path, extra: &[Utf8PathBuf]) -> Result<Root, SandboxError> {
    let mut binds = Vec::new();
    let mut links = Vec::new();
    let bind = |path: &str| Bind {
        host: path.to_owned(),
        inside: path.to_owned(),
    };
    for path in SYSTEM {
        match fs_err::symlink_metadata(path) {
            Ok(meta) if meta.is_symlink() => links.push(Link {
                inside: path.to_owned(),
                target: fs_err::read_link(path)?.to_string_lossy().into_owned(),
            }),
            Ok(meta) if meta.is_dir() => binds.push(bind(path)),
            _ => {}
        }
    }
    for path in ["/etc/alternatives", "/etc/ld.so.cache"]
        .into_iter()
        .chain(DEVICES)
    {
        if Utf8Path::new(path).exists() {
            binds.push(bind(path));
        }
    }
    binds.extend(extra_binds(extra)?);
    let sql_tool = helpers.join(SQL_TOOL);
    let mut copies = Vec::new();
    if sql_tool.exists() {
        copies.push(Bind {
            host: sql_tool.to_string(),
            inside: format!("{TOOLS}/{SQL_TOOL}"),
        });
    }
    for (inside, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
        ("/var/tmp", "/tmp"),
    ] {
        links.push(Link {
            inside: inside.to_owned(),
            target: target.to_owned(),
        });
    }
    let system = fs_err::read_to_string("/etc/os-release").unwrap_or_default();
    let mut made: Vec<Made> = [
        ("/etc/passwd", PASSWD),
        ("/etc/group", GROUP),
        ("/etc/hostname", "sandbox\n"),
        ("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
        ("/etc/resolv.conf", ""),
        (
            "/etc/nsswitch.conf",
            "passwd: files\ngroup: files\nhosts: files\n",
        ),
        ("/etc/os-release", &system),
    ]
    .into_iter()
    .map(|(inside, text)| Made {
        inside: inside.to_owned(),
        text: text.to_owned(),
    })
    .collect();
    for path in ETC {
        if let Ok(text) = fs_err::read_to_string(path)
            && text.len() <= 64 << 10
        {
            made.push(Made {
                inside: path.to_owned(),
                text,
            });
        }
    }
    let shell = if Utf8Path::new("/bin/bash").exists() {
        "/bin/bash"
    } else {
        "/bin/sh"
    };
    let report = report(&system, helpers, &binds);
    Ok(Root {
        binds,
        copies,
        made,
        links,
        shell: shell.to_owned(),
        env: env(),
        report,
    })
}

/// The environment of every tool.
pub fn env() -> Vec<String> {
    [
        &format!("PATH={TOOLS}:/usr/local/bin:/usr/bin:/bin"),
        "HOME=/work",
        "TMPDIR=/tmp",
        "LANG=C.UTF-8",
    ]
    .into_iter()
    .map(str::to_owned)
    .collect()
}

/// The host paths a configuration shows inside beside the image.
pub fn extra_binds(paths: &[Utf8PathBuf]) -> Result<Vec<Bind>, SandboxError> {
    let mut binds = Vec::new();
    for path in paths {
        if !path.is_absolute() || path.as_str() == "/" {
            return Err(SandboxError::Config {
                field: "host_paths",
                message: format!("'{path}' is not an absolute path below /"),
            });
        }
        if !path.exists() {
            return Err(SandboxError::Config {
                field: "host_paths",
                message: format!("'{path}' does not exist on this host"),
            });
        }
        binds.push(Bind {
            host: path.to_string(),
            inside: path.to_string(),
        });
    }
    Ok(binds)
}

fn report(system: &str, helpers: &Utf8Path, binds: &[Bind]) -> ImageReport {
    let mut hasher = blake3::Hasher::new();
    hasher.update(system.as_bytes());
    for list in [
        "/var/lib/dpkg/status",
        "/lib/apk/db/installed",
        "/var/lib/rpm/rpmdb.sqlite",
    ] {
        if let Ok(bytes) = fs_err::read(list) {
            hasher.update(&bytes);
        }
    }
    for bind in binds {
        hasher.update(bind.inside.as_bytes());
        hasher.update(b"\n");
    }
    for program in [INIT, SQL_TOOL] {
        if let Ok(bytes) = fs_err::read(helpers.join(program)) {
            hasher.update(&bytes);
        }
    }
    ImageReport {
        name: "host".to_owned(),
        digest: hasher.finalize().to_hex().to_string(),
        system: pretty_name(system),
    }
}

/// What of the host layers and tool versions depend on beside its digest: the programs on the tools' path, the directories
/// of libraries and what a configuration shows, by their inodes, sizes and last changes. A file changed in place deep in a
/// directory of libraries or of `paths` is not noticed.
pub fn state(digest: &str, paths: &[Utf8PathBuf]) -> String {
    const PROGRAMS: [&str; 3] = ["/usr/local/bin", "/usr/bin", "/bin"];
    const LIBRARIES: [&str; 5] = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64"];
    let mut hasher = blake3::Hasher::new();
    hasher.update(digest.as_bytes());
    let mut witness = |path: &[u8], meta: std::io::Result<rustix::fs::Stat>| {
        hasher.update(path).update(b"\n");
        if let Ok(stat) = meta {
            for number in [
                stat.st_ino,
                stat.st_size as u64,
                stat.st_ctime as u64,
                stat.st_ctime_nsec,
            ] {
                hasher.update(&number.to_le_bytes());
            }
        }
    };
    let programs = PROGRAMS.iter().map(|dir| (Utf8Path::new(*dir), true));
    let libraries = LIBRARIES.iter().map(|dir| (Utf8Path::new(*dir), false));
    let shown = paths.iter().map(|path| (path.as_path(), true));
    let mut seen = std::collections::BTreeSet::new();
    for (path, files) in programs.chain(libraries).chain(shown) {
        let found = rustix::fs::stat(path.as_str());
        // A merged /usr has each directory under two names.
        if found.is_ok_and(|s| !seen.insert((s.st_dev, s.st_ino, files))) {
            continue;
        }
        witness(path.as_str().as_bytes(), found.map_err(Into::into));
        // Of libraries, the directories: who installs one puts it beside others.
        let inside = path
            .canonicalize_utf8()
            .and_then(|path| image::tree::open_root(&path))
            .and_then(|dir| Ok((image::tree::names(&dir)?, dir)));
        let Ok((names, dir)) = inside else { continue };
        for name in names {
            let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
            let stat = rustix::fs::statat(&dir, &*name, flags);
            let directory = stat.is_ok_and(|s| {
                rustix::fs::FileType::from_raw_mode(s.st_mode) == rustix::fs::FileType::Directory
            });
            if files || directory {
                witness(&name, stat.map_err(Into::into));
            }
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// A distribution's name out of its os-release.
pub fn pretty_name(system: &str) -> String {
    system
        .lines()
        .find_map(|l| l.strip_prefix("PRETTY_NAME="))
        .unwrap_or("unknown")
        .trim_matches('"')
        .chars()
        // It is an image's to choose and is shown on terminals.
        .filter(|c| !c.is_control())
        .take(100)
        .collect()
}

/// Finds the directory of the helper programs.
pub fn helpers_dir(configured: Option<&Utf8Path>) -> Result<Utf8PathBuf, SandboxError> {
    let mut looked = Vec::new();
    let mut places = Vec::new();
    if let Some(dir) = configured {
        places.push(dir.to_owned());
    } else if let Ok(dir) = std::env::var("DRILLYARD_HELPERS") {
        places.push(Utf8PathBuf::from(dir));
    } else if let Some(exe) = std::env::current_exe()
        .ok()
        .and_then(|e| Utf8PathBuf::from_path_buf(e).ok())
    {
        for dir in exe.ancestors().skip(1) {
            places.push(dir.join("helpers"));
            if dir.file_name() == Some("target") {
                break;
            }
        }
    }
    for place in places {
        if place.join(INIT).is_file() {
            return Ok(place.canonicalize_utf8().unwrap_or(place));
        }
        looked.push(place.to_string());
    }
    Err(SandboxError::NoHelper {
        looked: looked.join(", "),
    })
}

/// What stands in the way of sandboxes on this host, and what removes it.
pub fn remedy() -> String {
    let sysctl = |path: &str| {
        fs_err::read_to_string(format!("/proc/sys/{path}"))
            .ok()
            .map(|text| text.trim().to_owned())
    };
    let mut lines = Vec::new();
    if sysctl("kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        lines.push(
            "AppArmor restricts user namespaces here (Ubuntu 24.04 and later do): as root, run\n  \
             sysctl -w kernel.apparmor_restrict_unprivileged_userns=0\n\
             or give drillyard-sandbox-init an AppArmor profile with the rule 'userns,'",
        );
    }
    if sysctl("kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        lines.push("user namespaces are off for ordinary users: as root, run\n  sysctl -w kernel.unprivileged_userns_clone=1");
    }
    if sysctl("user/max_user_namespaces").as_deref() == Some("0") {
        lines.push("no user namespaces are allowed: as root, run\n  sysctl -w user.max_user_namespaces=10000");
    }
    if Utf8Path::new("/.dockerenv").exists() || Utf8Path::new("/run/.containerenv").exists() {
        lines.push(
            "this is a container, whose system call filter or masked /proc may forbid it: start it with\n  \
             --security-opt seccomp=unconfined --security-opt systempaths=unconfined --cap-add SYS_ADMIN",
        );
    }
    if lines.is_empty() {
        lines.push(
            "sandboxes need Linux 5.14 or newer with user namespaces; run as root, or ask whoever runs this host to allow them \
             (is a system call filter or security module in the way?)",
        );
    }
    lines.push("nothing is run without isolation");
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_helper_says_how_to_get_it() {
        let error = helpers_dir(Some(Utf8Path::new("/nonexistent")))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("make helpers") && error.contains("/nonexistent"),
            "{error}"
        );
    }

    #[test]
    fn nothing_of_home_or_etc_passwd_is_shown() {
        let root = root(Utf8Path::new("/nonexistent"), &[]).unwrap();
        for bind in &root.binds {
            let allowed = [
                "/usr",
                "/bin",
                "/sbin",
                "/lib",
                "/dev/",
                "/etc/alternatives",
                "/etc/ld.so.cache",
            ];
            assert!(allowed.iter().any(|a| bind.host.starts_with(a)), "{bind:?}");
        }
        let passwd = root
            .made
            .iter()
            .find(|m| m.inside == "/etc/passwd")
            .unwrap();
        assert_eq!(passwd.text.lines().count(), 3);
    }

    #[test]
    fn a_changed_program_is_another_state_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
        fs_err::write(path.join("tool"), "1").unwrap();
        let paths = [path.clone()];
        let first = state("x", &paths);
        assert_eq!(state("x", &paths), first);
        assert_ne!(state("y", &paths), first);
        // Another file of the same size and time; one changed in place; one more.
        fs_err::write(path.join("new"), "2").unwrap();
        fs_err::rename(path.join("new"), path.join("tool")).unwrap();
        let second = state("x", &paths);
        fs_err::write(path.join("tool"), "22").unwrap();
        let third = state("x", &paths);
        fs_err::write(path.join("more"), "").unwrap();
        let states = std::collections::BTreeSet::from([first, second, third, state("x", &paths)]);
        assert_eq!(states.len(), 4);
    }

    #[test]
    fn the_remedy_always_ends_with_the_promise() {
        assert!(remedy().ends_with("nothing is run without isolation"));
    }
}
