//! Images, layers and saved states: what is taken in, what sandboxes do to it, what comes back.
//!
//! As root the whole file also runs once more as an ordinary user (`also_as_an_ordinary_user`).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_sandbox::Change::{Created, Deleted, Modified};
use drillyard_sandbox::{
    CallOutcome, Image, ImageCaps, ImageStore, Limits, Pool, Recipe, SandboxConfig, SandboxError,
    Setup, Snapshot, StoredImage,
};
use tokio::sync::Mutex;

use common::{
    MIB, again, changes, children, descriptors, eventually, eventually_in, fresh, is_root, output,
    pids, proc, sha256, shell, text,
};

fn small() -> SandboxConfig {
    SandboxConfig {
        limits: Limits {
            disk_bytes: 64 * MIB,
            files: 20_000,
            output_bytes: 4 * MIB,
            ..common::small().limits
        },
        pool_size: 0,
        ..common::small()
    }
}

/// A directory that goes with its tree, on a disk: layers must not lie in the way of what they are beneath.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir_in("/var/tmp").unwrap())
    }

    fn path(&self) -> &Utf8Path {
        Utf8Path::from_path(self.0.path()).unwrap()
    }

    fn store(&self) -> ImageStore {
        store(self.path())
    }
}

fn store(dir: &Utf8Path) -> ImageStore {
    ImageStore::open(dir.join("store")).unwrap()
}

const PROGRAMS: &[&str] = &[
    "bash",
    "sh",
    "cat",
    "ls",
    "rm",
    "mkdir",
    "touch",
    "chmod",
    "sort",
    "stat",
    "find",
    "sqlite3",
    "mv",
    "cp",
    "ln",
    "sha256sum",
    "env",
    "id",
    "sleep",
    "dd",
    "truncate",
    "head",
    "wc",
    "grep",
    "mknod",
    "tr",
    "rmdir",
    "setfattr",
    "true",
    "test",
    "sed",
    "tail",
    "nice",
    "setsid",
    "perl",
    "df",
    "ipcs",
    "ipcmk",
    "cut",
    "uname",
    "hostname",
];

/// An image of this host's programs.
async fn host_slice(store: &ImageStore) -> StoredImage {
    let packages: Vec<_> = PROGRAMS
        .iter()
        .filter(|p| {
            ["/usr/bin", "/bin", "/usr/sbin"]
                .iter()
                .any(|d| Path::new(d).join(p).exists())
        })
        .map(|p| format!("\"{p}\""))
        .collect();
    let recipe = format!(
        "name = \"slice\"\nfrom = \"host-slice\"\npackages = [{}]\n[[files]]\nto = \"/etc/motd\"\ntext = \"hello\\n\"\n\
         [[files]]\nto = \"/data/deep/file\"\ntext = \"of the image\"\n",
        packages.join(", ")
    );
    let recipe = Recipe::parse(&recipe).unwrap();
    store.build(&recipe, &small(), &mut |_| {}).await.unwrap()
}

/// That image in a place of its own.
struct Slice {
    _place: Place,
    store: ImageStore,
    image: StoredImage,
}

impl Slice {
    async fn new() -> Self {
        let place = Place::new();
        let store = place.store();
        let image = host_slice(&store).await;
        Self {
            _place: place,
            store,
            image,
        }
    }

    /// Tests that leave it as it is share one.
    async fn shared() -> Arc<Self> {
        static LAST: Mutex<Weak<Slice>> = Mutex::const_new(Weak::new());
        let mut last = LAST.lock().await;
        if let Some(slice) = last.upgrade() {
            return slice;
        }
        let slice = Arc::new(Self::new().await);
        *last = Arc::downgrade(&slice);
        slice
    }

    async fn pool(&self) -> Pool {
        over(self.image.image()).await
    }
}

/// A pool over an image.
async fn over(image: Image) -> Pool {
    Pool::start(SandboxConfig { image, ..small() })
        .await
        .unwrap()
}

/// A pool with a cache.
async fn cached(dir: &Utf8Path, image: Image) -> Pool {
    Pool::start(SandboxConfig {
        image,
        cache_dir: Some(dir.join("cache")),
        ..small()
    })
    .await
    .unwrap()
}

/// A kind of image, and where pools over it have their cache.
struct Ground {
    kind: &'static str,
    image: Image,
    place: Place,
    slice: Option<Arc<Slice>>,
}

impl Ground {
    fn host() -> Self {
        Self {
            kind: "host",
            image: Image::Host,
            place: Place::new(),
            slice: None,
        }
    }

    async fn rootfs() -> Self {
        let slice = Slice::shared().await;
        Self {
            kind: "rootfs",
            image: slice.image.image(),
            place: Place::new(),
            slice: Some(slice),
        }
    }

    async fn both() -> [Self; 2] {
        [Self::host(), Self::rootfs().await]
    }

    async fn pool(&self) -> Pool {
        cached(self.place.path(), self.image.clone()).await
    }

    fn layers(&self) -> Vec<String> {
        layers(self.place.path())
    }

    /// Nothing has changed the image.
    fn verify(&self) {
        if let Some(slice) = &self.slice {
            slice.store.verify(&slice.image.digest).unwrap();
        }
    }
}

fn layers(dir: &Utf8Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir.join("cache/layers"))
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A small tree with one of everything.
fn sample(dir: &Path) {
    let at = |p: &str| dir.join(p);
    std::fs::create_dir_all(at("etc/deep")).unwrap();
    std::fs::create_dir_all(at("bin")).unwrap();
    std::fs::create_dir_all(at("empty")).unwrap();
    std::fs::write(at("etc/os-release"), "PRETTY_NAME=\"Sample 1\"\n").unwrap();
    std::fs::write(at("bin/tool"), "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(at("bin/tool"), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(at("etc/deep/x"), vec![7; 100_000]).unwrap();
    symlink("../bin/tool", at("etc/link")).unwrap();
    symlink("/nowhere", at("etc/dangling")).unwrap();
    std::fs::hard_link(at("bin/tool"), at("bin/same")).unwrap();
    std::fs::set_permissions(at("empty"), PermissionsExt::from_mode(0o1777)).unwrap();
}

/// What a store holds, apart from its images.
fn leftovers(store: &Utf8Path) -> Vec<String> {
    std::fs::read_dir(store.join("images"))
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|n| n.len() != 64)
        .collect()
}

fn tar_of(dir: &Path) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    builder.follow_symlinks(false);
    builder.append_dir_all(".", dir).unwrap();
    builder.into_inner().unwrap()
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

fn header(kind: tar::EntryType, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o644);
    header.set_mtime(1_000_000);
    header
}

/// A tar of entries with any names: libraries refuse to write hostile ones.
fn raw_tar(entries: &[(&[u8], tar::EntryType, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, kind, content) in entries {
        let link = matches!(kind, tar::EntryType::Symlink | tar::EntryType::Link);
        let mut header = header(*kind, if link { 0 } else { content.len() as u64 });
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        if link {
            header.as_old_mut().linkname[..content.len()].copy_from_slice(content);
        }
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        if !link {
            out.extend_from_slice(content);
            out.resize(out.len().next_multiple_of(512), 0);
        }
    }
    out.resize(out.len() + 1024, 0);
    out
}

#[test]
fn the_same_tree_has_the_same_digest_wherever_it_comes_from() {
    let place = Place::new();
    let dir = place.path();
    let tree = dir.join("tree");
    sample(tree.as_std_path());
    let store = place.store();
    let one = store.import(&tree, Some("sample")).unwrap();
    assert_eq!(
        (one.name.as_str(), one.source.as_str(), one.system.as_str()),
        ("sample", "directory", "Sample 1")
    );
    store.verify(&one.digest).unwrap();
    let plain = tar_of(tree.as_std_path());
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let other = ImageStore::open(dir.join("other")).unwrap();
    for path in [
        write("plain.tar", &plain),
        write("gz.tar.gz", &gz(&plain)),
        write("zstd.tar.zst", &zstd::encode_all(&*plain, 1).unwrap()),
    ] {
        let image = other.import(&path, None).unwrap();
        assert_eq!(
            (image.digest.as_str(), image.source.as_str()),
            (one.digest.as_str(), "tar")
        );
        other.verify(&image.digest).unwrap();
        other.remove(&image.digest).unwrap();
        assert_eq!(other.list().unwrap(), []);
    }
    // With an owner's marks it is still the same; with other content it is not.
    std::fs::set_permissions(tree.join("bin/tool"), PermissionsExt::from_mode(0o6755)).unwrap();
    assert_eq!(
        store.import(&tree, Some("again")).unwrap().digest,
        one.digest
    );
    assert_eq!(store.find("again").unwrap().digest, one.digest);
    std::fs::write(tree.join("etc/deep/x"), "other").unwrap();
    let two = store.import(&tree, Some("two")).unwrap();
    assert_ne!(two.digest, one.digest);
    assert_eq!(store.list().unwrap().len(), 2);
    let set_id = std::fs::metadata(two.rootfs.join("bin/tool"))
        .unwrap()
        .mode()
        & 0o7777;
    assert_eq!(set_id, 0o755, "no set-id files are kept on the host");
    // Somebody changes a stored image: it is told.
    std::fs::write(two.rootfs.join("etc/os-release"), "forged").unwrap();
    let error = store.verify(&two.digest).unwrap_err().to_string();
    assert!(error.contains("were changed"), "{error}");
    assert!(
        store
            .find("nothing")
            .unwrap_err()
            .to_string()
            .contains("no such image")
    );
    assert_eq!(leftovers(&dir.join("store")), Vec::<String>::new());
}

/// `docker save` and OCI archives of the same two layers.
fn layered(dir: &Utf8Path, oci: bool) -> Utf8PathBuf {
    use tar::EntryType::{Directory, Regular, Symlink};
    let first = raw_tar(&[
        (b"bin/", Directory, b""),
        (b"bin/sh", Regular, b"shell"),
        (b"etc/a", Regular, b"a1"),
        (b"etc/b", Regular, b"b1"),
        (b"opt/old/x", Regular, b"x"),
        (b"opt/old/y", Regular, b"y"),
        (b"lib", Symlink, b"usr/lib"),
        (b"usr/lib/", Directory, b""),
        (b"gone/deep/z", Regular, b"z"),
    ]);
    let second = raw_tar(&[
        (b"etc/.wh.a", Regular, b""),
        (b"etc/b", Regular, b"b2"),
        (b"opt/old/.wh..wh..opq", Regular, b""),
        (b"opt/old/new", Regular, b"n"),
        (b"lib/through", Regular, b"t"),
        (b".wh.gone", Regular, b""),
    ]);
    let (first, second) = if oci {
        (gz(&first), zstd::encode_all(&*second, 1).unwrap())
    } else {
        (first, second)
    };
    let path = dir.join(if oci { "oci.tar" } else { "docker.tar" });
    let archive = if oci {
        let manifest = format!(
            r#"{{"layers":[{{"digest":"sha256:{}"}},{{"digest":"sha256:{}"}}]}}"#,
            sha256(&first),
            sha256(&second)
        );
        let index = format!(
            r#"{{"manifests":[{{"digest":"sha256:{}","annotations":{{"org.opencontainers.image.ref.name":"two:layers"}}}}]}}"#,
            sha256(manifest.as_bytes())
        );
        let place = |bytes: &[u8]| format!("blobs/sha256/{}", sha256(bytes));
        raw_tar(&[
            (b"oci-layout", Regular, br#"{"imageLayoutVersion":"1.0.0"}"#),
            (b"index.json", Regular, index.as_bytes()),
            (
                place(manifest.as_bytes()).as_bytes(),
                Regular,
                manifest.as_bytes(),
            ),
            (place(&first).as_bytes(), Regular, &first),
            (place(&second).as_bytes(), Regular, &second),
        ])
    } else {
        let manifest = br#"[{"Config":"c.json","RepoTags":["two:layers"],"Layers":["1/layer.tar","2/layer.tar"]}]"#;
        raw_tar(&[
            (b"1/layer.tar", Regular, &first),
            (b"2/layer.tar", Regular, &second),
            (b"manifest.json", Regular, manifest),
        ])
    };
    std::fs::write(&path, archive).unwrap();
    path
}

#[test]
fn layered_archives_obey_their_whiteouts() {
    let place = Place::new();
    let dir = place.path();
    let store = place.store();
    let docker = store.import(&layered(dir, false), None).unwrap();
    assert_eq!(
        (docker.name.as_str(), docker.source.as_str()),
        ("two:layers", "docker archive")
    );
    let read = |p: &str| std::fs::read_to_string(docker.rootfs.join(p)).ok();
    assert_eq!(read("etc/a"), None);
    assert_eq!(read("etc/b").as_deref(), Some("b2"));
    assert_eq!((read("opt/old/x"), read("opt/old/y")), (None, None));
    assert_eq!(read("opt/old/new").as_deref(), Some("n"));
    assert_eq!(
        read("usr/lib/through").as_deref(),
        Some("t"),
        "through a link, within the root"
    );
    assert!(!docker.rootfs.join("gone").exists());
    let oci = store.import(&layered(dir, true), None).unwrap();
    assert_eq!(
        (oci.name.as_str(), oci.digest.as_str()),
        ("two:layers", docker.digest.as_str())
    );
}

#[test]
fn hostile_archives_stay_inside_or_are_refused() {
    use tar::EntryType::{Block, Char, Directory, Fifo, Link, Regular, Symlink, XHeader};
    let place = Place::new();
    let dir = place.path();
    let outside = dir.join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("victim"), "untouched").unwrap();
    let caps = ImageCaps {
        entries: 1000,
        bytes: MIB,
    };
    let store = place.store().with_caps(caps);
    let outside_name = outside.as_str().as_bytes();
    let victim = [outside_name, b"/victim"].concat();
    let try_tar = |bytes: &[u8]| {
        let path = dir.join("hostile.tar");
        std::fs::write(&path, bytes).unwrap();
        store.import(&path, Some("hostile"))
    };
    // The control: the maker of these archives makes good ones.
    let good = try_tar(&raw_tar(&[
        (b"a/b", Regular, b"fine"),
        (b"c", Link, b"a/b"),
    ]))
    .unwrap();
    assert_eq!(
        std::fs::read_to_string(good.rootfs.join("c")).unwrap(),
        "fine"
    );

    let mut many: Vec<(Vec<u8>, tar::EntryType, &[u8])> = Vec::new();
    for n in 0..1100 {
        many.push((format!("f{n}").into_bytes(), Regular, b""));
    }
    let many: Vec<_> = many
        .iter()
        .map(|(n, k, c)| (n.as_slice(), *k, *c))
        .collect();
    let big = vec![0; 2 * MIB as usize];
    let deep = b"d/".repeat(45);
    let long_header = vec![b'x'; MIB as usize + 1];
    let refused: Vec<(&str, Vec<u8>, &str)> = vec![
        (
            "upwards",
            raw_tar(&[(b"../victim", Regular, b"x")]),
            "upwards",
        ),
        (
            "upwards in the middle",
            raw_tar(&[(b"a/../../victim", Regular, b"x")]),
            "upwards",
        ),
        (
            "absolute",
            raw_tar(&[(&victim[..victim.len().min(99)], Regular, b"x")]),
            "absolute",
        ),
        (
            "hard link upwards",
            raw_tar(&[(b"h", Link, b"../../outside/victim")]),
            "upwards",
        ),
        (
            "hard link outside",
            raw_tar(&[(b"h", Link, &victim[..victim.len().min(99)])]),
            "No such file",
        ),
        (
            "hard link to a directory",
            raw_tar(&[(b"d/", Directory, b""), (b"h", Link, b"d")]),
            "directory",
        ),
        ("too many entries", raw_tar(&many), "more than 1000 entries"),
        (
            "too many bytes",
            raw_tar(&[(b"big", Regular, &big)]),
            "more than 1048576 bytes",
        ),
        ("a gzip bomb", gz(&vec![0; 64 * MIB as usize]), "no tar"),
        (
            "a header without end",
            raw_tar(&[(b"x", XHeader, &long_header), (b"a", Regular, b"")]),
            "extended header",
        ),
        (
            "a link onto itself",
            raw_tar(&[(b"l", Symlink, b"l"), (b"l/x", Regular, b"x")]),
            "symbolic links",
        ),
        ("no tar at all", b"this is no archive".repeat(100), ""),
        (
            "an image that names what lies outside",
            raw_tar(&[(
                b"manifest.json",
                Regular,
                br#"[{"Layers":["../../outside/victim"]}]"#,
            )]),
            "cannot be read",
        ),
        (
            "a layer behind a link",
            raw_tar(&[
                (b"l", Symlink, &victim[..victim.len().min(99)]),
                (b"manifest.json", Regular, br#"[{"Layers":["l"]}]"#),
            ]),
            "cannot be read",
        ),
        (
            "a whiteout of what lies above",
            raw_tar(&[
                (b"1", Regular, &raw_tar(&[(b"a/.wh...", Regular, b"")])),
                (b"manifest.json", Regular, br#"[{"Layers":["1"]}]"#),
            ]),
            "whiteout",
        ),
    ];
    for (what, bytes, why) in refused {
        let error = try_tar(&bytes).unwrap_err();
        assert!(
            matches!(error, SandboxError::Image { .. }),
            "{what}: {error}"
        );
        assert!(error.to_string().contains(why), "{what}: {error}");
        assert_eq!(
            leftovers(&dir.join("store")),
            Vec::<String>::new(),
            "{what}"
        );
    }
    // Contained, as for a program whose root this is.
    let inside = try_tar(&raw_tar(&[
        (b"l1", Symlink, outside_name),
        (outside_name.strip_prefix(b"/").unwrap(), Directory, b""),
        (b"l2", Symlink, b"l1"),
        (b"l2/victim", Regular, b"hostile"),
        (b"up", Symlink, b"../../../../../../../.."),
        (b"up/top", Regular, b"top"),
        (b"null", Char, b""),
        (b"disk", Block, b""),
        (b"pipe", Fifo, b""),
        (b"odd-\xff\xfe\n", Regular, b"odd"),
        (&deep, Directory, b""),
    ]))
    .unwrap();
    assert_eq!(inside.left_out, 3);
    let read = |p: &Path| std::fs::read_to_string(inside.rootfs.as_std_path().join(p)).unwrap();
    assert_eq!(
        read(Path::new(
            outside.join("victim").as_str().trim_start_matches('/')
        )),
        "hostile"
    );
    assert_eq!(read(Path::new("top")), "top");
    let odd = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"odd-\xff\xfe\n");
    assert_eq!(read(Path::new(odd)), "odd");
    store.verify(&inside.digest).unwrap();
    assert_eq!(
        std::fs::read_to_string(outside.join("victim")).unwrap(),
        "untouched"
    );
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
}

#[tokio::test]
async fn what_a_killed_import_leaves_is_swept() {
    if let Ok(dir) = std::env::var("DRILLYARD_TEST_IMPORT") {
        let dir = Utf8PathBuf::from(dir);
        store(&dir)
            .import(&dir.join("large"), Some("never"))
            .unwrap();
        return;
    }
    let place = Place::new();
    let dir = place.path();
    place.store();
    // All holes, and so nothing on the disk; its copy is none.
    std::fs::create_dir(dir.join("large")).unwrap();
    let large = std::fs::File::create(dir.join("large/file")).unwrap();
    large.set_len(16 << 30).unwrap();
    let mut child = again("what_a_killed_import_leaves_is_swept")
        .env("DRILLYARD_TEST_IMPORT", dir.as_str())
        .spawn()
        .unwrap();
    eventually("it has begun", || !leftovers(&dir.join("store")).is_empty()).await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(
        leftovers(&dir.join("store")).len(),
        1,
        "the control: it was half-way"
    );
    assert_eq!(place.store().list().unwrap(), []);
    assert_eq!(leftovers(&dir.join("store")), Vec::<String>::new());
}

#[test]
fn recipes_say_what_is_wrong_with_them() {
    let parse = |text: &str| Recipe::parse(text).unwrap_err().to_string();
    assert!(parse("name = \"x\"").contains("from"));
    assert!(parse("name = \"x\"\nfrom = \"y\"\nrum = []").contains("rum"));
    assert!(
        parse("name = \"x\"\nfrom = \"y\"\n[[files]]\nto = \"rel\"\ntext = \"\"")
            .contains("not absolute")
    );
    assert!(
        parse("name = \"x\"\nfrom = \"y\"\n[[files]]\nto = \"/a\"").contains("either text or from")
    );
    let place = Place::new();
    let store = ImageStore::open(place.path()).unwrap();
    let build = |text: &str| {
        let recipe = Recipe::parse(text).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime
            .block_on(store.build(&recipe, &small(), &mut |_| {}))
            .unwrap_err()
            .to_string()
    };
    assert!(build("name = \"x\"\nfrom = \"plan9:4\"").contains("host-slice"));
    assert!(build("name = \"x\"\nfrom = \"debian:--hook\"").contains("unknown"));
    assert!(
        build("name = \"x\"\nfrom = \"host-slice\"\npackages = [\"no-such-program\"]")
            .contains("not on this host")
    );
    if ["mmdebstrap", "debootstrap"].iter().all(|p| {
        !Path::new("/usr/bin").join(p).exists() && !Path::new("/usr/sbin").join(p).exists()
    }) {
        assert!(
            build("name = \"x\"\nfrom = \"debian:bookworm\"")
                .contains("apt-get install mmdebstrap")
        );
    }
    assert_eq!(leftovers(place.path()), Vec::<String>::new());
}

#[tokio::test]
async fn a_root_of_its_own_can_be_changed_and_the_image_cannot() {
    let slice = Slice::new().await;
    let (store, image) = (&slice.store, &slice.image);
    let pool = slice.pool().await;
    assert_eq!(pool.image().digest, image.digest);
    let mut sandbox = pool.lease(&Setup::new([("in", &b"x"[..])])).await.unwrap();
    let mut neighbour = fresh(&pool).await;
    assert_eq!(
        output(&mut sandbox, "cat /etc/motd in; pwd; id -u; hostname").await,
        "hello\nx/work\n1000\nsandbox"
    );
    assert_eq!(
        output(
            &mut sandbox,
            "stat -c %u:%g / /etc/motd /data/deep/file /work in | tr '\\n' ' '"
        )
        .await
        .trim(),
        "1000:1000 1000:1000 1000:1000 1000:1000 1000:1000"
    );
    let result = shell(
        &mut sandbox,
        "echo more >> /etc/motd; echo new > /etc/new; mkdir /data2; echo t > /data2/t; chmod 700 /data/deep/file; \
         mv /data/deep/file /data/moved; ln -s /etc/motd /data/l",
    )
    .await;
    assert_eq!(result.outcome, CallOutcome::Ok, "{}", text(&result.stderr));
    assert_eq!(
        changes(&result),
        [
            ("/data/deep/file", Deleted),
            ("/data/l", Created),
            ("/data/moved", Created),
            ("/data2", Created),
            ("/data2/t", Created),
            ("/etc/motd", Modified),
            ("/etc/new", Created),
        ]
    );
    let motd = &result.files_changed[5];
    assert_eq!(
        motd.before_hash.as_deref(),
        Some(&*blake3::hash(b"hello\n").to_hex())
    );
    assert_eq!(motd.content.as_deref(), Some(&b"hello\nmore\n"[..]));
    assert!(!result.state_lost);
    // What is put back as it was is told, what only looks changed is not.
    let result = shell(
        &mut sandbox,
        "echo hello > /etc/motd; touch /data/moved; rm /etc/new",
    )
    .await;
    assert_eq!(
        changes(&result),
        [("/etc/motd", Modified), ("/etc/new", Deleted)]
    );
    let result = shell(
        &mut sandbox,
        "cp /data/moved /data/deep/file; chmod 644 /data/deep/file; rm /data/moved",
    )
    .await;
    assert_eq!(
        changes(&result),
        [("/data/deep/file", Created), ("/data/moved", Deleted)]
    );
    // A directory deleted and made again shows nothing of what was in it.
    let result = shell(
        &mut sandbox,
        "rm -r /data/deep && mkdir /data/deep && echo n > /data/deep/n; ls /data/deep",
    )
    .await;
    assert_eq!(text(&result.stdout), "n\n");
    assert_eq!(
        changes(&result),
        [("/data/deep/file", Deleted), ("/data/deep/n", Created)]
    );
    // Marks of the overlay cannot be forged.
    let result = shell(
        &mut sandbox,
        "echo w > /data/.wh.deep; mknod /data/w c 0 0 2>/dev/null && echo made; \
         setfattr -n user.overlay.opaque -v y /etc 2>/dev/null; ls /etc/motd; cat /data/.wh.deep",
    )
    .await;
    assert_eq!(text(&result.stdout), "/etc/motd\nw\n");
    assert_eq!(changes(&result), [("/data/.wh.deep", Created)]);
    for command in [
        "echo 1 > /proc/sys/kernel/pid_max",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo x > /proc/sys/kernel/hostname",
        "echo b > /proc/sysrq-trigger",
        "echo x > /dev/new",
        "rm /dev/null",
        "echo x > /opt/drillyard/bin/new",
        "mknod /n c 1 3",
        "mknod /dev/n c 1 3",
        "rmdir /proc /work",
    ] {
        assert_eq!(
            shell(&mut sandbox, command).await.outcome,
            CallOutcome::Error,
            "{command}"
        );
    }
    // Everything goes; the supervisor lives and says so.
    let before = pool.image().digest.clone();
    let result = shell(
        &mut sandbox,
        "rm -rf --no-preserve-root / 2>/dev/null; cd /; echo *",
    )
    .await;
    assert!(
        !text(&result.stdout).contains("usr"),
        "{}",
        text(&result.stdout)
    );
    let gone = changes(&result);
    assert!(gone.contains(&("/usr", Deleted)), "{gone:?}");
    assert_eq!(shell(&mut sandbox, "true").await.exit_code, Some(127));
    assert_eq!(
        output(&mut neighbour, "cat /etc/motd /data/deep/file").await,
        "hello\nof the image"
    );
    sandbox.reset().await.unwrap();
    assert_eq!(output(&mut sandbox, "cat /etc/motd in").await, "hello\nx");
    assert_eq!(before, image.digest);
    store.verify(&image.digest).unwrap();
    let error = store.remove(&image.digest).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
    sandbox.close().await;
    neighbour.close().await;
    drop(pool);
    store.remove(&image.digest).unwrap();
}

#[tokio::test]
async fn a_root_of_its_own_has_the_disks_size() {
    let slice = Slice::shared().await;
    let pool = slice.pool().await;
    let mut sandbox = fresh(&pool).await;
    let result = shell(
        &mut sandbox,
        "dd if=/dev/zero of=/data/big bs=1M count=100 2>&1",
    )
    .await;
    assert_eq!(
        result.outcome,
        CallOutcome::Disk,
        "{}",
        text(&result.stdout)
    );
    let result = shell(
        &mut sandbox,
        "rm /data/big; i=0; while echo > /data/f$i; do i=$((i+1)); done 2>/dev/null; echo $i",
    )
    .await;
    let made: u64 = text(&result.stdout).trim().parse().unwrap();
    assert!(made > 1000 && made < 20_000, "{made}");
    sandbox.close().await;
}

#[tokio::test]
async fn packed_snapshots_hold_the_roots_changes_too() {
    let slice = Slice::shared().await;
    let pool = slice.pool().await;
    let mut sandbox = fresh(&pool).await;
    output(&mut sandbox, "echo w > w; echo t > /tmp/t; echo more >> /etc/motd; rm -r /data/deep; mkdir /data/deep; rm /bin/sleep /usr/bin/sleep 2>/dev/null; true").await;
    let snapshot = sandbox.snapshot().await.unwrap();
    sandbox.close().await;
    let snapshot = Snapshot::from_bytes(&snapshot.to_bytes().unwrap()).unwrap();
    let mut other = pool.branch(&snapshot).await.unwrap();
    assert_eq!(
        output(
            &mut other,
            "cat w /tmp/t /etc/motd; ls /data/deep; test -e /usr/bin/sleep || echo none"
        )
        .await,
        "w\nt\nhello\nmore\nnone"
    );
    assert_eq!(other.snapshot().await.unwrap().digest(), snapshot.digest());
    let result = shell(&mut other, "true").await;
    assert_eq!(changes(&result), []);
    other.close().await;
}

#[tokio::test]
async fn images_without_a_shell_or_with_host_paths_are_refused() {
    let place = Place::new();
    let dir = place.path();
    sample(dir.join("tree").as_std_path());
    let store = place.store();
    let image = store.import(&dir.join("tree"), None).unwrap();
    let start = |config| async { Pool::start(config).await.unwrap_err().to_string() };
    let error = start(SandboxConfig {
        image: image.image(),
        ..small()
    })
    .await;
    assert!(error.contains("neither /bin/bash nor /bin/sh"), "{error}");
    let error = start(SandboxConfig {
        image: image.image(),
        host_paths: vec!["/usr/share".into()],
        ..small()
    })
    .await;
    assert!(error.contains("host_paths"), "{error}");
    let nowhere = Image::RootFs {
        dir: "/nonexistent".into(),
        digest: "0".repeat(64),
    };
    let error = start(SandboxConfig {
        image: nowhere,
        ..small()
    })
    .await;
    assert!(error.contains("/nonexistent"), "{error}");
}

#[tokio::test]
async fn an_image_whose_links_point_everywhere_builds_a_root_all_the_same() {
    let place = Place::new();
    let dir = place.path();
    let store = place.store();
    let slice = Slice::shared().await;
    // A copy of it with links in the places that are mounted over and written to.
    let tree = dir.join("tree");
    let copied = Command::new("cp")
        .args(["-a", slice.image.rootfs.as_str(), tree.as_str()])
        .status()
        .unwrap();
    assert!(copied.success());
    for (name, target) in [
        ("dev", "/proc"),
        ("proc", "/etc"),
        ("work", "/../.."),
        ("tmp", "etc"),
        ("opt", "/work"),
    ] {
        let _ = std::fs::remove_dir_all(tree.join(name));
        symlink(target, tree.join(name)).unwrap();
    }
    std::fs::remove_dir_all(tree.join("etc")).unwrap();
    std::fs::create_dir(tree.join("etc")).unwrap();
    symlink("/dev/null", tree.join("etc/passwd")).unwrap();
    symlink("/", tree.join("etc/group")).unwrap();
    let image = store.import(&tree, Some("links")).unwrap();
    let pool = over(image.image()).await;
    let mut sandbox = pool.lease(&Setup::new([("in", &b"x"[..])])).await.unwrap();
    assert_eq!(
        output(&mut sandbox, "pwd; cat /work/in; wc -l < /etc/passwd; ls /dev | tr '\\n' ' '; test -r /proc/self/stat && echo proc").await,
        "/work\nx3\nfd full null random shm stderr stdin stdout urandom zero proc"
    );
    sandbox.close().await;
    store.verify(&image.digest).unwrap();
}

#[tokio::test]
async fn a_large_set_up_becomes_a_layer_and_changes_are_told_against_it() {
    for ground in Ground::both().await {
        let (kind, pool) = (ground.kind, ground.pool().await);
        let mut files: Vec<(String, Vec<u8>)> = (0..150)
            .map(|n| {
                (
                    format!("d{}/f{n}", n % 3),
                    format!("content {n}").into_bytes(),
                )
            })
            .collect();
        files.push(("big".into(), vec![5; 3 << 20]));
        files.push(("/tmp/t".into(), b"t".to_vec()));
        let setup = Setup::new(files);
        let mut sandbox = pool.lease(&setup).await.unwrap();
        assert_eq!(ground.layers().len(), 1, "{kind}");
        assert_eq!(output(&mut sandbox, "pwd; cat d1/f1 /tmp/t; stat -c %u:%a big d1 . | tr '\\n' ' '; find . -type f | wc -l").await,
            "/work\ncontent 1t1000:644 1000:755 1000:755 151", "{kind}");
        // Without a look into the layer: nothing is told of what nobody touched.
        assert_eq!(
            changes(&shell(&mut sandbox, "cat big > /dev/null").await),
            []
        );
        let result = shell(&mut sandbox, "echo x >> d1/f1; rm d0/f0; touch d0/f3; mv d2/f2 d2/moved; chmod 600 d1/f4; rm -r d2/f5; mkdir d3").await;
        assert_eq!(
            result.outcome,
            CallOutcome::Ok,
            "{kind}: {}",
            text(&result.stderr)
        );
        assert_eq!(
            changes(&result),
            [
                ("d0/f0", Deleted),
                ("d1/f1", Modified),
                ("d1/f4", Modified),
                ("d2/f2", Deleted),
                ("d2/f5", Deleted),
                ("d2/moved", Created),
                ("d3", Created)
            ],
            "{kind}"
        );
        assert!(!result.state_lost);
        assert_eq!(
            result.files_changed[1].before_hash.as_deref(),
            Some(&*blake3::hash(b"content 1").to_hex())
        );
        // A directory of the layer replaced by a file and back, and one made again.
        let result = shell(
            &mut sandbox,
            "rm -r d0 && echo f > d0; rm -r d1 && mkdir d1 && echo n > d1/f7",
        )
        .await;
        let told = changes(&result);
        assert!(
            told.contains(&("d0", Modified)) && told.contains(&("d0/f3", Deleted)),
            "{told:?}"
        );
        assert!(
            told.contains(&("d1/f7", Modified))
                && told.contains(&("d1/f10", Deleted))
                && !told.iter().any(|c| c.0 == "d1"),
            "{told:?}"
        );
        // Forged marks of the overlay are data (the first says whether it was set).
        if kind == "host" {
            let result = shell(&mut sandbox, "perl -e '$d = \"d2\"; $n = \"user.overlay.opaque\"; $v = \"y\"; exit(syscall(188, $d, $n, $v, 1, 0) != 0)' && echo set; ls d2 | wc -l; echo > d2/.wh.f8; cat d2/f8").await;
            assert_eq!(text(&result.stdout), "set\n49\ncontent 8");
            assert_eq!(changes(&result), [("d2/.wh.f8", Created)]);
            let result = shell(&mut sandbox, "perl -e '$p = \"d2/w\"; exit(syscall(133, $p, 0020000, 0) == 0)' && echo refused; rm d2/.wh.f8").await;
            assert_eq!(text(&result.stdout), "refused\n");
        }
        // A petabyte of holes in a layered sandbox costs nothing.
        let limit = 100 * MIB;
        let result = shell(
            &mut sandbox,
            &format!("truncate -s {limit} sparse; echo end >> sparse"),
        )
        .await;
        assert_eq!(changes(&result), [("sparse", Created)]);
        // The changes bring another sandbox to the same state.
        let mut other = pool.lease(&setup).await.unwrap();
        let result = shell(
            &mut other,
            "echo x >> d1/f1; rm -r d0 d2; mkdir d2; echo y > d2/y",
        )
        .await;
        let mut third = pool.lease(&setup).await.unwrap();
        third.apply(&result.files_changed).await.unwrap();
        let state = "find . -type f | sort | grep -v big | tr '\\n' ' '; cat d1/f1";
        assert_eq!(
            output(&mut third, state).await,
            output(&mut other, state).await
        );
        // A reset is back at the layer.
        sandbox.reset().await.unwrap();
        assert_eq!(
            output(&mut sandbox, "find . -type f | wc -l; cat d1/f1 /tmp/t").await,
            "151\ncontent 1t"
        );
        for sandbox in [sandbox, other, third] {
            sandbox.close().await;
        }
        assert_eq!(ground.layers().len(), 1);
    }
}

#[tokio::test]
async fn a_set_ups_commands_run_once() {
    for ground in Ground::both().await {
        let (kind, pool) = (ground.kind, ground.pool().await);
        let setup = Setup::new([("rows", &b"1\n2\n"[..])]).then([
            "for i in 1 2 3; do cat rows >> all; done; rm rows; mkdir -m 000 shut; mkdir -m 1777 open; ln -s all l",
            "cat /proc/sys/kernel/random/uuid > once; echo t > /tmp/t",
        ]);
        let mut first = pool.lease(&setup).await.unwrap();
        let mut second = pool.lease(&setup).await.unwrap();
        let state = "cat once l /tmp/t; stat -c %a:%F:%N * | tr '\\n' ' '";
        assert_eq!(
            output(&mut first, state).await,
            output(&mut second, state).await,
            "{kind}"
        );
        assert!(
            output(&mut first, "stat -c %a shut open")
                .await
                .ends_with("0\n1777")
        );
        assert_eq!(output(&mut first, "ls").await, "all\nl\nonce\nopen\nshut");
        assert_eq!(changes(&shell(&mut first, "true").await), []);
        // Another program finds the same layer; without a cache it works too.
        let once = output(&mut first, "cat once").await;
        let other = ground.pool().await;
        let mut third = other.lease(&setup).await.unwrap();
        assert_eq!(output(&mut third, "cat once").await, once);
        let plain = Pool::start(small()).await.unwrap();
        let mut fourth = plain.lease(&setup).await.unwrap();
        assert_ne!(output(&mut fourth, "cat once").await, once);
        // One that fails says so, and leaves no layer.
        let failing = Setup::default().then(["echo no >&2; exit 3"]);
        let error = pool.lease(&failing).await.unwrap_err();
        assert!(
            matches!(&error, SandboxError::Setup { said, .. } if said == "no\n"),
            "{error}"
        );
        assert_eq!(ground.layers().len(), 1);
        for sandbox in [first, second, third, fourth] {
            sandbox.close().await;
        }
    }
}

#[tokio::test]
async fn layers_of_set_ups_are_bounded_and_those_in_use_stay() {
    let place = Place::new();
    let dir = place.path();
    let pool = Pool::start(SandboxConfig {
        cache_dir: Some(dir.join("cache")),
        cache_bytes: 10 * MIB,
        ..small()
    })
    .await
    .unwrap();
    let setup = |n: u8| Setup::new([("big", vec![n; 4 << 20])]);
    let held = pool.lease(&setup(0)).await.unwrap();
    for n in 1..5 {
        let mut sandbox = pool.lease(&setup(n)).await.unwrap();
        assert_eq!(output(&mut sandbox, "stat -c %s big").await, "4194304");
        sandbox.close().await;
        assert!(layers(dir).len() <= 3, "{n}: {:?}", layers(dir));
    }
    assert_eq!(layers(dir).len(), 2, "the one in use and the last");
    let mut held = held;
    assert_eq!(output(&mut held, "head -c 2 big | tr '\\0' z").await, "zz");
    held.close().await;
}

#[tokio::test]
async fn states_are_saved_restored_and_branched_from() {
    for ground in Ground::both().await {
        let (kind, pool) = (ground.kind, ground.pool().await);
        let setup = Setup::new([("in", &b"1"[..])]).then(["mkdir d; echo a > d/a; echo b > d/b"]);
        let mut sandbox = pool.lease(&setup).await.unwrap();
        output(
            &mut sandbox,
            "rm d/a; echo c > d/c; mkdir -p x/y; echo s > /dev/shm/s; mkfifo p 2>/dev/null; true",
        )
        .await;
        let root = kind == "rootfs";
        if root {
            output(&mut sandbox, "echo more >> /etc/motd; rm -r /data; mkdir /data; echo d > /data/d; echo u:x:5:5:::/bin/sh >> /etc/passwd").await;
        }
        let saved = sandbox.save().await.unwrap();
        assert_eq!(
            sandbox.save().await.unwrap().id(),
            saved.id(),
            "the same state is the same"
        );
        // It goes on, and the saved state does not.
        output(&mut sandbox, "echo later > d/c; rm in").await;
        let id = saved.id().to_owned();
        let error = pool.remove_saved(&id).unwrap_err().to_string();
        assert!(error.contains("in use"), "{error}");
        drop((saved, pool));
        sandbox.close().await;
        // Days later, another process.
        let pool = ground.pool().await;
        let saved = pool.saved(&id).unwrap();
        let mut branches = pool.branches(&saved, 3).await.unwrap();
        for branch in &mut branches {
            assert_eq!(
                output(branch, "cat in d/* /dev/shm/s; ls; ls d | tr '\\n' ' '").await,
                "1b\nc\ns\nd\nin\nx\nb c",
                "{kind}"
            );
            if root {
                assert_eq!(output(branch, "cat /etc/motd /data/d; ls /data; tail -n 1 /etc/passwd 2>/dev/null || grep ^u: /etc/passwd").await, "hello\nmore\nd\nd\nu:x:5:5:::/bin/sh");
            }
            assert_eq!(changes(&shell(branch, "true").await), []);
        }
        output(&mut branches[0], "echo mine > d/c").await;
        assert_eq!(
            output(&mut branches[1], "cat d/c").await,
            "c",
            "branches do not see one another"
        );
        // Up to a depth they are stacked, then made one.
        let mut last = saved.clone();
        for n in 0..12 {
            let mut next = pool.lease_saved(&last).await.unwrap();
            output(
                &mut next,
                &format!(
                    "echo {n} > n{n}; rm -f n{}; rm -rf again; mkdir again; echo {n} > again/f{n}",
                    n - 2
                ),
            )
            .await;
            last = next.save().await.unwrap();
            assert!(last.depth() <= 8, "{}", last.depth());
            next.close().await;
        }
        let mut end = pool.lease_saved(&last).await.unwrap();
        assert_eq!(
            output(&mut end, "ls | tr '\\n' ' '; ls again; cat d/b").await,
            "again d in n10 n11 x f11\nb",
            "{kind}"
        );
        if root {
            assert_eq!(
                output(&mut end, "cat /etc/motd /data/d; ls /data").await,
                "hello\nmore\nd\nd"
            );
        }
        end.restore_saved(&saved).await.unwrap();
        assert_eq!(output(&mut end, "cat d/c").await, "c");
        end.reset().await.unwrap();
        assert_eq!(
            output(&mut end, "cat d/c").await,
            "c",
            "a reset goes to what was restored"
        );
        end.close().await;
        for branch in branches {
            branch.close().await;
        }
        assert!(
            pool.saved(&"0".repeat(64))
                .unwrap_err()
                .to_string()
                .contains("there is none")
        );
        let without = Pool::start(small()).await.unwrap();
        assert!(
            without
                .saved(&id)
                .unwrap_err()
                .to_string()
                .contains("cache_dir")
        );
    }
}

#[tokio::test]
async fn a_database_and_its_log_are_saved_together() {
    if !Path::new("/usr/bin/sqlite3").exists() {
        eprintln!("SKIPPED: sqlite3 is not on this host");
        return;
    }
    let ground = Ground::host();
    let pool = ground.pool().await;
    let mut sandbox = fresh(&pool).await;
    // The writer is killed with its log not yet written back, in the middle of a transaction.
    let result = shell(
        &mut sandbox,
        "(echo \"pragma journal_mode = wal; pragma wal_autocheckpoint = 0; create table t (x); insert into t values (1), (2);\
          begin; insert into t values (3);\"; sleep 100) | sqlite3 a.db & sleep 0.5; ls",
    )
    .await;
    assert!(
        text(&result.stdout).contains("a.db-wal"),
        "the control: {}",
        text(&result.stdout)
    );
    assert!(result.survivors);
    let saved = sandbox.save().await.unwrap();
    for mut branch in pool.branches(&saved, 2).await.unwrap() {
        assert_eq!(
            output(
                &mut branch,
                "sqlite3 a.db 'select count(*) from t; pragma integrity_check'"
            )
            .await,
            "2\nok"
        );
        branch.close().await;
    }
    sandbox.close().await;
}

#[tokio::test]
async fn trees_that_forbid_everything_are_saved_too() {
    let ground = Ground::host();
    let pool = ground.pool().await;
    let mut sandbox = pool
        .lease(&Setup::default().then(["mkdir base; echo x > base/x"]))
        .await
        .unwrap();
    output(&mut sandbox, "mkdir a; mkdir a/b; echo s > a/b/s; chmod 000 a/b/s a/b a; chmod 000 base; echo o > .wh.o; mkdir -m 0 e").await;
    let saved = sandbox.save().await.unwrap();
    sandbox.close().await;
    let mut last = saved;
    for _ in 0..9 {
        let mut next = pool.lease_saved(&last).await.unwrap();
        assert_eq!(
            output(&mut next, "stat -c %a a base e | tr '\\n' ' '; chmod 700 a a/b base; chmod 600 a/b/s; cat a/b/s base/x .wh.o; chmod 000 a/b/s a/b a base").await,
            "0 0 0 s\nx\no"
        );
        last = next.save().await.unwrap();
        next.close().await;
    }
    // Without a cache there is nowhere to save to.
    drop(pool);
    let odd = Pool::start(small()).await.unwrap();
    let mut sandbox = odd.lease(&Setup::default()).await.unwrap();
    assert!(matches!(
        sandbox.save().await,
        Err(SandboxError::Config { .. })
    ));
    sandbox.close().await;
}

/// All that an agent could have left and another could find, one line a channel.
const START_STATE: &str = r#"
echo "tree $(cd / && find / -xdev \( -path /proc -o -path /dev \) -prune -o -printf '%p %y %m %U:%G %l\n' 2>/dev/null | grep -v '^/usr\|^/lib\|^/bin' | sort | sha256sum)"
echo "files $(find /work /tmp /dev/shm /etc -type f -exec sha256sum {} + | sort | sha256sum)"
echo "times $(find /work /etc/motd /data -newermt '+1 hour' 2>/dev/null | wc -l)"
echo "env $(env | sort | sha256sum)"
echo "shm $(ls -A /dev/shm | wc -l) tmp $(ls -A /tmp | tr '\n' ' ')"
echo "sysv $(cat /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg | wc -l)"
echo "host $(cat /proc/sys/kernel/hostname /proc/sys/kernel/domainname | tr '\n' ' ')"
echo "umask $(umask) cwd $PWD id $(id -u):$(id -g)"
echo "limits $(cat /proc/self/limits | sha256sum)"
echo "pid_max $(cat /proc/sys/kernel/pid_max)"
echo "sockets $(cat /proc/net/unix | wc -l) $(cat /proc/net/tcp /proc/net/udp | wc -l)"
echo "mounts $(cut -d' ' -f4- /proc/self/mountinfo | sed 's/size=[0-9]*k//; s/[ug]id=[0-9]*//g; s/lowerdir=.*//' | sha256sum)"
echo "status $(grep -E '^(Cap|NoNewPrivs|Seccomp|Groups|Sig(Blk|Ign|Cgt)|Cpus_allowed:|CoreDumping)' /proc/self/status | sha256sum)"
echo "fds $(ls /proc/self/fd | tr '\n' ' ')"
echo "left $(cat /proc/[0-9]*/comm 2>/dev/null | grep -c -e sleep -e perl)"
echo "keys $(cat /proc/keys 2>/dev/null | wc -l) nice $(cut -d' ' -f19 /proc/self/stat) oom $(cat /proc/self/oom_score_adj)"
echo "net $(cat /proc/net/route /proc/net/if_inet6 2>/dev/null | wc -l) $(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | tr '\n' ' ')"
echo "locks $(wc -l < /proc/locks) uptime $(test -r /proc/uptime && echo yes)"
"#;

/// Leaves something in every channel there is; prints what it managed.
const HOSTILE: &str = r#"
exec 2>/dev/null
echo x > /work/left; echo x > /tmp/left; echo x > /dev/shm/left; mkdir -m 777 /tmp/dir; ln -s /etc /tmp/link
ipcmk -M 4096 -S 2 -Q > /dev/null && echo sysv
perl -e '$| = 1; use Socket; socket(S, AF_UNIX, SOCK_STREAM, 0) or die; bind(S, pack("Sa*", AF_UNIX, "\0left")) and listen(S, 5) and print "abstract\n"; sleep 100' &
perl -e '$| = 1; use IO::Socket::INET; IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1", LocalPort => 5555) and print "tcp\n"; sleep 100' &
umask 0; ulimit -n 50; ulimit -c 0; cd /tmp; export LEFT=1
hostname left; echo 301 > /proc/sys/kernel/pid_max; echo left > /proc/sys/kernel/hostname
echo left >> /etc/motd; rm -rf /data /opt/x; chmod 777 /etc; echo evil > /usr/bin/left; touch -d '+2 days' /work /etc/motd
echo x > /work/in; rm -f /work/base; mkdir /work/base
(setsid sleep 100 &) ; nice -n 19 sleep 100 &
sleep 0.3
ls -A /work /tmp /dev/shm | grep -c left
"#;

#[tokio::test]
async fn every_sandbox_starts_byte_for_byte_alike() {
    for ground in Ground::both().await {
        let (kind, pool) = (ground.kind, ground.pool().await);
        let plain = Setup::new([("in", &b"1"[..]), ("base", b"2"), ("/tmp/t", b"3")]);
        let layered = plain.clone().then(["mkdir d; echo d > d/d"]);
        let mut first = pool.lease(&layered).await.unwrap();
        output(&mut first, "echo more > more; rm base").await;
        let saved = first.save().await.unwrap();
        let packed = first.snapshot().await.unwrap();
        first.close().await;
        for way in ["plain", "layered", "saved", "packed"] {
            let lease = async || match way {
                "plain" => pool.lease(&plain).await.unwrap(),
                "layered" => pool.lease(&layered).await.unwrap(),
                "saved" => pool.lease_saved(&saved).await.unwrap(),
                _ => pool.branch(&packed).await.unwrap(),
            };
            let mut sandbox = lease().await;
            let before = output(&mut sandbox, START_STATE).await;
            let result = shell(&mut sandbox, HOSTILE).await;
            let did = text(&result.stdout);
            assert!(did.ends_with("3\n"), "the control: {did:?}");
            if kind == "host" {
                let all = ["abstract", "tcp", "sysv"];
                assert!(all.iter().all(|a| did.contains(a)), "the control: {did:?}");
            }
            let meanwhile = output(&mut sandbox, START_STATE).await;
            assert_ne!(before, meanwhile, "the control: what it left is seen");
            sandbox.reset().await.unwrap();
            assert_eq!(
                output(&mut sandbox, START_STATE).await,
                before,
                "{kind}, {way}: reset"
            );
            sandbox.close().await;
            let mut next = lease().await;
            assert_eq!(
                output(&mut next, START_STATE).await,
                before,
                "{kind}, {way}: leased again"
            );
            next.close().await;
        }
    }
}

#[tokio::test]
async fn tools_are_asked_for_their_versions_once() {
    let pool = Pool::start(small()).await.unwrap();
    let versions = pool.tool_versions().await.unwrap();
    assert!(versions["bash"].contains("bash"), "{versions:?}");
    assert!(std::ptr::eq(versions, pool.tool_versions().await.unwrap()));
    let slice = Slice::new().await;
    let (store, image) = (&slice.store, &slice.image);
    let pool = slice.pool().await;
    let versions = pool.tool_versions().await.unwrap().clone();
    assert!(
        versions.contains_key("bash") && !versions.contains_key("python3"),
        "{versions:?}"
    );
    store.record_tools(&image.digest, versions.clone()).unwrap();
    assert_eq!(store.find("slice").unwrap().tools, versions);
}

#[tokio::test]
async fn recipes_run_commands_inside() {
    let place = Place::new();
    let store = place.store();
    let recipe = |run: &str| {
        let text = format!(
            "name = \"ran\"\nfrom = \"host-slice\"\npackages = [\"bash\", \"cat\", \"rm\", \"mkdir\"]\nrun = [{run}]\n\
             [[files]]\nto = \"/etc/motd\"\ntext = \"hello\\n\"\n"
        );
        Recipe::parse(&text).unwrap()
    };
    let mut steps = Vec::new();
    let image = store
        .build(
            &recipe(
                "\"mkdir -p /opt/made; echo x > /opt/made/x\", \"rm /etc/motd; echo tmp > /tmp/t\"",
            ),
            &small(),
            &mut |step| steps.push(step.to_owned()),
        )
        .await
        .unwrap();
    assert!(
        steps.iter().any(|s| s.starts_with("running mkdir")),
        "{steps:?}"
    );
    assert_eq!(
        std::fs::read_to_string(image.rootfs.join("opt/made/x")).unwrap(),
        "x\n"
    );
    assert!(!image.rootfs.join("etc/motd").exists() && !image.rootfs.join("etc/passwd").exists());
    assert!(!image.rootfs.join("tmp/t").exists());
    assert!(image.recipe.as_deref().unwrap().contains("host-slice"));
    assert_eq!(
        store.list().unwrap().len(),
        1,
        "what it was made of is gone"
    );
    let error = store
        .build(&recipe("\"exit 4\""), &small(), &mut |_| {})
        .await
        .unwrap_err();
    assert!(error.to_string().contains("exit 4"), "{error}");
    assert_eq!(store.list().unwrap().len(), 1);
}

/// The helpers that hold this program's sandboxes: grandchildren, each in a mount namespace of its own.
fn own_helpers() -> Vec<u32> {
    let outer = children(std::process::id());
    outer.into_iter().flat_map(children).collect()
}

fn mounts(pid: u32) -> String {
    proc(&format!("{pid}/mountinfo"))
}

/// Processes that see a place through a mount.
fn mounted_by(place: &str) -> usize {
    let sees = |pid: &u32| mounts(*pid).contains(place);
    pids().iter().filter(|pid| sees(pid)).count()
}

#[tokio::test]
async fn killing_the_program_leaves_neither_mounts_nor_locks_nor_files() {
    if let Ok(dir) = std::env::var("DRILLYARD_TEST_VICTIM") {
        let dir = Utf8PathBuf::from(dir);
        let image = store(&dir).find("slice").unwrap();
        let pool = cached(&dir, image.image()).await;
        let mut sandbox = pool
            .lease(&Setup::default().then(["echo x > x"]))
            .await
            .unwrap();
        output(
            &mut sandbox,
            "mkdir -p /data/a; chmod 000 /data/a /data/deep; echo y > y; chmod 000 y",
        )
        .await;
        std::fs::write(dir.join("ready"), "").unwrap();
        shell(&mut sandbox, "sleep 100").await;
        return;
    }
    let place = Place::new();
    let dir = place.path();
    let store = place.store();
    let image = host_slice(&store).await;
    for _ in 0..3 {
        let mut child = again("killing_the_program_leaves_neither_mounts_nor_locks_nor_files")
            .env("DRILLYARD_TEST_VICTIM", dir.as_str())
            .spawn()
            .unwrap();
        eventually_in(Duration::from_secs(30), "its sandbox is made", || {
            dir.join("ready").exists()
        })
        .await;
        let error = store.remove(&image.digest).unwrap_err().to_string();
        assert!(error.contains("in use"), "the control: {error}");
        if is_root() {
            assert!(mounted_by("overlay") > 0, "the control: there are mounts");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::remove_file(dir.join("ready")).unwrap();
        eventually("mounts are gone", || mounted_by(dir.as_str()) == 0).await;
    }
    store.verify(&image.digest).unwrap();
    let kept = layers(dir);
    assert_eq!(kept.len(), 1, "{kept:?}");
    // Nobody holds it any more.
    let pool = cached(dir, image.image()).await;
    pool.remove_saved(&kept[0]).unwrap();
    drop(pool);
    store.remove(&image.digest).unwrap();
    assert_eq!(
        std::fs::read_dir(dir.join("store/images")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn many_sandboxes_on_layers_leave_the_helper_as_it_was() {
    let ground = Ground::rootfs().await;
    let before = own_helpers();
    let pool = ground.pool().await;
    let mut helpers = own_helpers();
    helpers.retain(|helper| !before.contains(helper));
    let setup = Setup::new([("in", &b"x"[..])]).then(["echo y > y"]);
    pool.lease(&setup).await.unwrap().close().await;
    // Other tests of this program have helpers too; theirs come and go, this one's numbers are the same at last.
    let fewest = || {
        let alive: Vec<_> = helpers.iter().filter(|h| descriptors(**h) > 0).collect();
        (
            alive.iter().map(|h| descriptors(**h)).min(),
            alive.iter().map(|h| mounts(**h).lines().count()).min(),
        )
    };
    let state = fewest();
    for n in 0..40 {
        let mut sandbox = pool.lease(&setup).await.unwrap();
        if n % 8 == 0 {
            output(&mut sandbox, "rm -rf /data; cat in y").await;
        }
        sandbox.close().await;
    }
    // Whoever is no root is not told of them.
    assert!(!is_root() || state.0.is_some());
    eventually("there are no more of either", || {
        let now = fewest();
        now.0 <= state.0 && now.1 <= state.1
    })
    .await;
    ground.verify();
}

#[tokio::test]
async fn large_set_ups_are_refused_where_small_ones_are() {
    for ground in Ground::both().await {
        let (kind, pool) = (ground.kind, ground.pool().await);
        for path in [
            "../x",
            "/etc/x",
            "/dev/x",
            "/proc/x",
            "/tmp",
            "/opt/drillyard/x",
            "d/../../x",
            "/tmp/../x",
        ] {
            let allowed = kind == "rootfs" && path == "/etc/x";
            for size in [1, 3 << 20] {
                let leased = pool.lease(&Setup::new([(path, vec![1; size])])).await;
                assert_eq!(
                    leased.is_ok(),
                    allowed,
                    "{kind}, {path}, {size}: {leased:?}"
                );
            }
        }
    }
}

#[test]
fn a_digest_does_not_depend_on_the_umask() {
    if let Ok(dir) = std::env::var("DRILLYARD_TEST_UMASK") {
        let dir = Utf8PathBuf::from(dir);
        rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
        let image = ImageStore::open(dir.join("other"))
            .unwrap()
            .import(&dir.join("a.tar"), None)
            .unwrap();
        std::fs::write(dir.join("digest"), image.digest).unwrap();
        return;
    }
    let place = Place::new();
    let dir = place.path();
    let tar = dir.join("a.tar");
    std::fs::write(&tar, raw_tar(&[(b"a/b/c", tar::EntryType::Regular, b"x")])).unwrap();
    let image = place.store().import(&tar, None).unwrap();
    let done = again("a_digest_does_not_depend_on_the_umask")
        .env("DRILLYARD_TEST_UMASK", dir.as_str())
        .stdout(Stdio::piped())
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done.stdout));
    let digest = std::fs::read_to_string(dir.join("digest")).unwrap();
    assert_eq!(digest, image.digest);
}

#[tokio::test]
async fn a_renewed_sandbox_stands_on_the_same_layers() {
    for ground in Ground::both().await {
        let (kind, pool) = (ground.kind, ground.pool().await);
        let setup = Setup::new([("/tmp/t", &b"t"[..])]).then(["mkdir d; echo a > d/a; echo b > b"]);
        let mut sandbox = pool.lease(&setup).await.unwrap();
        let change = "rm b /tmp/t; rm -r d; mkdir d; echo c > d/c; echo u > /tmp/u";
        output(&mut sandbox, change).await;
        let look = "ls -AR . /tmp; cat d/c /tmp/u";
        let before = output(&mut sandbox, look).await;
        assert!(before.ends_with("c\nu"), "{kind}: {before}");
        sandbox.renew().await.unwrap();
        assert_eq!(output(&mut sandbox, look).await, before, "{kind}");
        let saved = sandbox.save().await.unwrap();
        sandbox.close().await;
        let mut branch = pool.lease_saved(&saved).await.unwrap();
        assert_eq!(output(&mut branch, look).await, before, "{kind}: saved");
        branch.close().await;
    }
}

#[tokio::test]
async fn a_renewed_sandbox_keeps_what_its_layers_changed_of_the_root() {
    let ground = Ground::rootfs().await;
    let pool = ground.pool().await;
    let setup = Setup::default().then(["echo x > /etc/of-the-layer"]);
    let mut sandbox = pool.lease(&setup).await.unwrap();
    sandbox.renew().await.unwrap();
    assert_eq!(output(&mut sandbox, "cat /etc/of-the-layer").await, "x");
    sandbox.close().await;
}

#[tokio::test]
async fn also_as_an_ordinary_user() {
    common::also_as_an_ordinary_user().await;
}
