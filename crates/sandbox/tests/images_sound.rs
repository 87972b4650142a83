//! Images, layers and saved states where someone is killed, hostile, careless, or out of room.
//!
//! As root the whole file also runs once more as an ordinary user (`also_as_an_ordinary_user`).

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt::Write as _;
mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_sandbox::{
    Call, Image, ImageCaps, ImageStore, Limits, Pool, Recipe, SandboxConfig, SandboxError, Setup,
    StoredImage,
};
use tar::EntryType::{Directory, Fifo, Regular};

use common::{MIB, is_root, output, sha256};

/// Says to a process of this program which part of a test it plays, and where.
const PART: &str = "DRILLYARD_TEST_PART";

fn small() -> SandboxConfig {
    SandboxConfig {
        limits: Limits {
            call_timeout: Duration::from_secs(20),
            memory_bytes: 256 * MIB,
            disk_bytes: 64 * MIB,
            files: 20_000,
            pids: 64,
            ..Limits::default()
        },
        pool_size: 0,
        ..SandboxConfig::default()
    }
}

/// A directory on a disk that goes at the end, whatever is in it.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir_in("/var/tmp").unwrap())
    }

    fn path(&self) -> Utf8PathBuf {
        Utf8PathBuf::from_path_buf(self.0.path().to_owned()).unwrap()
    }
}

async fn cached(dir: &Utf8Path, image: Image) -> Pool {
    let config = SandboxConfig {
        image,
        cache_dir: Some(dir.join("cache")),
        ..small()
    };
    Pool::start(config).await.unwrap()
}

/// The layers of a cache.
fn layers(dir: &Utf8Path) -> Vec<Utf8PathBuf> {
    let entries = dir.join("cache/layers").read_dir_utf8().unwrap();
    entries.map(|e| e.unwrap().path().to_owned()).collect()
}

/// What a store holds that is no image.
fn leftovers(store: &Utf8Path) -> usize {
    let entries = store.join("images").read_dir_utf8().unwrap();
    entries
        .filter(|e| e.as_ref().unwrap().file_name().len() != 64)
        .count()
}

/// A small tree that differs by its text.
fn tree(dir: &Utf8Path, text: &str) -> Utf8PathBuf {
    std::fs::create_dir_all(dir.join("etc")).unwrap();
    std::fs::write(dir.join("etc/text"), text).unwrap();
    dir.to_owned()
}

fn slice_recipe(name: &str, run: &str) -> Recipe {
    let programs = "\"bash\", \"cat\", \"ls\", \"mkdir\", \"rm\", \"sleep\", \"stat\"";
    let text = format!(
        "name = \"{name}\"\nfrom = \"host-slice\"\npackages = [{programs}]\nrun = [{run}]\n\
         [[files]]\nto = \"/data/deep/secret\"\ntext = \"of the image\"\n"
    );
    Recipe::parse(&text).unwrap()
}

async fn slice(store: &ImageStore) -> StoredImage {
    let recipe = slice_recipe("slice", "");
    store.build(&recipe, &small(), &mut |_| {}).await.unwrap()
}

/// A tar of entries with any names and contents.
fn tar(entries: &[(&str, tar::EntryType, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, kind, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(content);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

fn write(dir: &Utf8Path, name: &str, bytes: &[u8]) -> Utf8PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// This program again, playing a part of a test.
fn part(test: &str, dir: &Utf8Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(PART, dir.as_str())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// The same with mounts that nobody else sees, made by `mounts`; what it says, if it failed.
fn with_mounts(test: &str, dir: &Utf8Path, mounts: &str) -> Result<(), String> {
    let done = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-ec"])
        .arg(format!("{mounts}\nexec \"$0\" --exact {test} --nocapture"))
        .arg(std::env::current_exe().unwrap())
        .env(PART, dir.as_str())
        .current_dir(dir)
        .output()
        .unwrap();
    if done.status.success() {
        return Ok(());
    }
    let said = [done.stdout, done.stderr].concat();
    Err(String::from_utf8_lossy(&said).into_owned())
}

fn my_part() -> Option<Utf8PathBuf> {
    std::env::var(PART).ok().map(Utf8PathBuf::from)
}

fn wait_for(path: &Utf8Path) {
    let until = Instant::now() + Duration::from_secs(30);
    while !path.exists() {
        assert!(Instant::now() < until, "{path} never came");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[tokio::test]
async fn also_as_an_ordinary_user() {
    common::also_as_an_ordinary_user().await;
}

#[tokio::test]
async fn times_that_no_number_holds_cost_nobody_his_sandbox() {
    let place = Place::new();
    let pool = cached(&place.path(), Image::Host).await;
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let command = "for t in 20000000000 -20000000000 67768036191676799 -67768040609740800; do \
        touch -d @$t f$t; mkdir d$t; touch -d @$t d$t; ln -s x l$t; touch -h -d @$t l$t; done; \
        chmod 7777 d20000000000; stat -c %Y f67768036191676799";
    assert_eq!(output(&mut sandbox, command).await, "67768036191676799");
    assert_eq!(output(&mut sandbox, "ls | wc -l").await, "12");
    sandbox.snapshot().await.unwrap();
    let saved = sandbox.save().await.unwrap();
    sandbox.close().await;
    let mut branch = pool.lease_saved(&saved).await.unwrap();
    assert_eq!(output(&mut branch, "ls | wc -l").await, "12");
    branch.close().await;
}

#[tokio::test]
async fn what_was_deleted_from_the_image_stays_deleted_when_layers_are_made_one() {
    let place = Place::new();
    let store = ImageStore::open(place.path().join("store")).unwrap();
    let pool = cached(&place.path(), slice(&store).await.image()).await;
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    output(
        &mut sandbox,
        "rm -r /data; rm -r /usr/share /opt/x 2>/dev/null; true",
    )
    .await;
    let mut last = sandbox.save().await.unwrap();
    sandbox.close().await;
    // In a layer of its own: nothing tells there that something was hidden.
    let mut depths = Vec::new();
    for n in 0..10 {
        let mut next = pool.lease_saved(&last).await.unwrap();
        let change = match n {
            0 => "mkdir -p /data/deep".to_owned(),
            1 => "rm -r /data; echo file > /data".to_owned(),
            2 => "rm /data; mkdir -p /data/deep; echo mine > /data/mine".to_owned(),
            n => format!("echo {n} > /n{n}"),
        };
        output(&mut next, &change).await;
        last = next.save().await.unwrap();
        depths.push(last.depth());
        let look = "ls -A /data /data/deep 2>/dev/null; true";
        let seen = output(&mut next, look).await;
        let mut again = pool.lease_saved(&last).await.unwrap();
        if n != 1 {
            assert!(!seen.contains("secret"), "{n}: the control: {seen}");
            assert_eq!(output(&mut again, look).await, seen, "{n}");
        }
        next.close().await;
        again.close().await;
    }
    assert!(
        depths.contains(&8) && depths.last() < Some(&8),
        "{depths:?}"
    );
}

#[tokio::test]
async fn a_state_stacked_too_high_leaves_only_what_it_became() {
    let place = Place::new();
    let dir = place.path();
    let pool = cached(&dir, Image::Host).await;
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let mut saved = Vec::new();
    for n in 0..9 {
        output(&mut sandbox, &format!("echo {n} > n{n}")).await;
        let state = sandbox.save().await.unwrap();
        sandbox.restore_saved(&state).await.unwrap();
        saved.push(state);
        assert_eq!(layers(&dir).len(), n + 1);
    }
    assert_eq!((saved[7].depth(), saved[8].depth()), (8, 1));
    assert_eq!(
        output(&mut sandbox, "cat n* | tr '\\n' ' '").await,
        "0 1 2 3 4 5 6 7 8"
    );
    let ids: Vec<String> = saved.iter().map(|s| s.id().to_owned()).collect();
    drop(saved);
    // What it was made of can go; it stays.
    for id in ids[..8].iter().rev() {
        pool.remove_saved(id).unwrap();
    }
    assert_eq!(output(&mut sandbox, "cat n0").await, "0");
    sandbox.close().await;
    let mut again = pool
        .lease_saved(&pool.saved(&ids[8]).unwrap())
        .await
        .unwrap();
    assert_eq!(output(&mut again, "cat n0 n8").await, "0\n8");
    again.close().await;
}

#[tokio::test]
async fn directories_that_forbid_their_owner_are_kept_readable_and_shown_as_they_are() {
    let place = Place::new();
    let dir = place.path();
    let pool = cached(&dir, Image::Host).await;
    let setup = Setup::default().then([
        "echo first > 0; mkdir -p a/b; echo s > a/b/s; chmod 0 a/b; chmod 300 a; touch -d @1000 a",
    ]);
    let look = "stat -c '%a %Y' a; chmod 700 a; stat -c %a a/b; chmod 700 a/b; cat a/b/s; chmod 0 a/b; chmod 300 a";
    let mut sandbox = pool.lease(&setup).await.unwrap();
    let idle = sandbox.call(Call::shell("true")).await.unwrap();
    assert_eq!(idle.files_changed, []);
    assert_eq!(output(&mut sandbox, look).await, "300 1000\n0\ns");
    // On the disk nobody needs to change a mode to read it, also while others use it.
    let [layer] = layers(&dir).try_into().unwrap();
    let mode = |path: &str| {
        std::fs::metadata(layer.join("work").join(path))
            .unwrap()
            .mode()
            & 0o777
    };
    assert_eq!((mode("a"), mode("a/b")), (0o700, 0o700));
    // A mode that then is the one on the disk is a mode like any other.
    output(&mut sandbox, "chmod 700 a; chmod 711 a/b").await;
    let mut last = sandbox.save().await.unwrap();
    sandbox.close().await;
    for _ in 0..9 {
        let mut next = pool.lease_saved(&last).await.unwrap();
        assert_eq!(
            output(&mut next, "stat -c %a a a/b | tr '\\n' ' '; cat a/b/s").await,
            "700 711 s"
        );
        output(&mut next, "date +%N > a/n").await;
        last = next.save().await.unwrap();
        next.close().await;
    }
}

#[tokio::test]
async fn an_image_being_built_is_nobodys_until_it_is_whole() {
    const TEST: &str = "an_image_being_built_is_nobodys_until_it_is_whole";
    let recipe = slice_recipe("tools", "\"mkdir /opt/made\", \"sleep 60\"");
    if let Some(dir) = my_part() {
        let store = ImageStore::open(dir.join("store")).unwrap();
        let mut said = |step: &str| {
            if step.contains("sleep") {
                std::fs::write(dir.join("ready"), "").unwrap();
            }
        };
        store.build(&recipe, &small(), &mut said).await.unwrap();
        return;
    }
    let place = Place::new();
    let dir = place.path();
    let store = ImageStore::open(dir.join("store")).unwrap();
    // The very tree that the build begins with is an image of its own, too.
    let kept = slice(&store).await;
    let mut child = part(TEST, &dir);
    wait_for(&dir.join("ready"));
    let names = |store: &ImageStore| -> Vec<String> {
        store.list().unwrap().into_iter().map(|i| i.name).collect()
    };
    assert_eq!(names(&store), ["slice"]);
    assert!(store.find("tools").is_err());
    // Another program opens the store meanwhile, and builds the same.
    let other = ImageStore::open(dir.join("store")).unwrap();
    assert!(
        leftovers(&dir.join("store")) > 0,
        "the control: it is half-way"
    );
    let quick = slice_recipe("tools", "\"mkdir /opt/made\"");
    let built = other.build(&quick, &small(), &mut |_| {}).await.unwrap();
    assert!(built.rootfs.join("opt/made").is_dir());
    child.kill().unwrap();
    child.wait().unwrap();
    // What it held may live on until its helper has ended.
    let until = Instant::now() + Duration::from_secs(10);
    while leftovers(&dir.join("store")) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        ImageStore::open(dir.join("store")).unwrap();
    }
    assert_eq!(leftovers(&dir.join("store")), 0);
    assert_eq!(names(&store), ["slice", "tools"]);
    assert_eq!(store.find("slice").unwrap().digest, kept.digest);
    assert_eq!(store.find("tools").unwrap().digest, built.digest);
}

#[test]
fn a_record_that_cannot_be_read_is_one_images_trouble() {
    let place = Place::new();
    let dir = place.path();
    let store = ImageStore::open(dir.join("store")).unwrap();
    let [good, bad] = ["good", "bad"].map(|name| {
        let from = tree(&dir.join(name), name);
        store.import(&from, Some(name)).unwrap()
    });
    let record = bad.rootfs.with_file_name("image.json");
    for half in ["", "{\"version\": 1, \"na", "{\"version\": 7}"] {
        std::fs::write(&record, half).unwrap();
        assert_eq!(store.list().unwrap(), std::slice::from_ref(&good));
        let broken = store.broken().unwrap();
        assert_eq!(broken.len(), 1);
        assert!(
            broken[0].1.to_string().contains(&bad.digest),
            "{}",
            broken[0].1
        );
        assert_eq!(store.find("good").unwrap(), good);
        assert!(
            store
                .find(&bad.digest)
                .unwrap_err()
                .to_string()
                .contains("image.json")
        );
    }
    // The next import makes it whole.
    let again = store.import(&dir.join("bad"), Some("healed")).unwrap();
    assert_eq!(
        (again.digest.as_str(), store.broken().unwrap().len()),
        (bad.digest.as_str(), 0)
    );
    assert_eq!(store.find("healed").unwrap(), again);
    // It can be removed too, by the beginning of its digest.
    std::fs::remove_file(&record).unwrap();
    store
        .remove(&store.digest_of(&bad.digest[..12]).unwrap())
        .unwrap();
    assert_eq!(
        (store.list().unwrap().len(), store.broken().unwrap().len()),
        (1, 0)
    );
    // Who reads a record while it is replaced gets the old one or the new one, and what is in use stays so.
    let held = good.rootfs.parent().unwrap();
    let held = std::fs::File::open(held).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockShared).unwrap();
    let writer = std::thread::spawn({
        let (store, digest) = (store.clone(), good.digest.clone());
        move || {
            for n in 0..300 {
                let tools = (0..n % 50).map(|t| (format!("tool{t}"), "1".repeat(100)));
                store.record_tools(&digest, tools.collect()).unwrap();
            }
        }
    });
    while !writer.is_finished() {
        assert_eq!(store.find("good").unwrap().digest, good.digest);
    }
    writer.join().unwrap();
    let error = store.remove(&good.digest).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
    drop(held);
    store.remove(&good.digest).unwrap();
    assert_eq!(leftovers(&dir.join("store")), 0);
}

#[test]
fn what_an_archive_makes_others_do_is_bounded_too() {
    let place = Place::new();
    let dir = place.path();
    let caps = ImageCaps {
        entries: 1000,
        bytes: MIB,
    };
    let store = ImageStore::open(dir.join("store")).unwrap().with_caps(caps);
    let import = |bytes: &[u8]| {
        let image = store.import(&write(&dir, "a.tar", bytes), Some("a"));
        image.map(|i| i.entries).map_err(|e| e.to_string())
    };
    let layered = |layers: &[(&str, Vec<u8>)], listed: &[&str]| {
        let listed: Vec<String> = listed.iter().map(|l| format!("\"{l}\"")).collect();
        let manifest = format!("[{{\"Layers\":[{}]}}]", listed.join(","));
        let mut entries = vec![("manifest.json", Regular, manifest.as_bytes())];
        entries.extend(layers.iter().map(|(n, b)| (*n, Regular, b.as_slice())));
        tar(&entries)
    };
    let names: Vec<String> = (0..1100).map(|n| format!("d/f{n}")).collect();
    let pipes: Vec<_> = names.iter().map(|n| (n.as_str(), Fifo, &b""[..])).collect();
    let few: Vec<_> = pipes[..900].to_vec();
    assert_eq!(import(&tar(&few)), Ok(0), "the control");
    let too_many = |outcome: Result<u64, String>| {
        assert!(
            outcome
                .as_ref()
                .is_err_and(|e| e.contains("more than 1000 entries")),
            "{outcome:?}"
        );
    };
    too_many(import(&tar(&pipes)));
    // Marks of a layer count, and each layer as often as it is named.
    let marks: Vec<String> = (0..1100).map(|n| format!("d/.wh.f{n}")).collect();
    let marks: Vec<_> = marks
        .iter()
        .map(|n| (n.as_str(), Regular, &b""[..]))
        .collect();
    too_many(import(&layered(&[("l", tar(&marks))], &["l"])));
    assert!(import(&layered(&[("l", tar(&marks[..400]))], &["l", "l"])).is_ok());
    too_many(import(&layered(
        &[("l", tar(&marks[..400]))],
        &["l", "l", "l"],
    )));
    let outcome = import(&layered(&[("l", tar(&[("x", Regular, b"")]))], &["l"; 600]));
    assert!(
        outcome.as_ref().is_err_and(|e| e.contains("600 layers")),
        "{outcome:?}"
    );
    // So do the bytes of what is left out.
    let blob = vec![0; 700 << 10];
    let layer = tar(&[("d/.wh.x", Regular, &blob)]);
    let outcome = import(&layered(&[("l", layer)], &["l"; 20]));
    assert!(
        outcome.as_ref().is_err_and(|e| e.contains("larger")),
        "{outcome:?}"
    );
    // A name as long as a header allows is refused before it is kept, be it of nothing.
    let mut long = tar(&[("././@LongLink", tar::EntryType::GNULongName, &[b'n'; 5000])]);
    long.truncate(long.len() - 1024);
    long.extend(tar(&[("x", Fifo, b"")]));
    let outcome = import(&long);
    assert!(
        outcome.as_ref().is_err_and(|e| e.contains("too long")),
        "{outcome:?}"
    );
    // A mark that is said again changes nothing, and still hides what it shall.
    let below = tar(&[("d/", Directory, b""), ("d/old", Regular, b"o")]);
    let mark = ("d/.wh..wh..opq", Regular, &b""[..]);
    let above = tar(&[
        ("d/early", Regular, b"e"),
        mark,
        ("d/new", Regular, b"n"),
        mark,
        mark,
    ]);
    let archive = layered(&[("1", below), ("2", above)], &["1", "2"]);
    let image = store.import(&write(&dir, "a.tar", &archive), Some("marks"));
    let rootfs = image.unwrap().rootfs;
    let there = |p: &str| rootfs.join("d").join(p).exists();
    assert_eq!(
        (there("old"), there("early"), there("new")),
        (false, true, true)
    );
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let place = Place::new();
    let dir = place.path();
    let store = ImageStore::open(dir.join("store")).unwrap();
    let pipe = dir.join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let started = Instant::now();
    for path in [&pipe, Utf8Path::new("/dev/null")] {
        let error = store.import(path, Some("x")).unwrap_err().to_string();
        assert!(
            error.contains("cat ") && error.contains("image.tar"),
            "{error}"
        );
    }
    assert!(started.elapsed() < Duration::from_secs(5));
    // A regular file by another name is one.
    let archive = write(&dir, "a.tar", &tar(&[("x", Regular, b"x")]));
    let file = std::fs::File::open(&archive).unwrap();
    let by_number = Utf8PathBuf::from(format!(
        "/dev/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&file)
    ));
    assert_eq!(store.import(&by_number, Some("x")).unwrap().entries, 1);
    assert_eq!(leftovers(&dir.join("store")), 0);
}

#[test]
fn links_that_the_user_names_are_followed() {
    let place = Place::new();
    let dir = place.path();
    std::fs::create_dir_all(dir.join("elsewhere")).unwrap();
    std::fs::create_dir_all(dir.join("store")).unwrap();
    symlink(dir.join("elsewhere"), dir.join("store/images")).unwrap();
    symlink(tree(&dir.join("tree"), "x"), dir.join("link")).unwrap();
    let store = ImageStore::open(dir.join("store")).unwrap();
    let image = store.import(&dir.join("link"), None).unwrap();
    assert_eq!((image.name.as_str(), image.entries), ("link", 2));
    store.verify(&image.digest).unwrap();
    store
        .record_tools(&image.digest, std::collections::BTreeMap::new())
        .unwrap();
    assert_eq!(store.find("link").unwrap(), image);
    let recipe = format!(
        "name = \"built\"\nfrom = \"host-slice\"\n[[files]]\nto = \"/data\"\nfrom = \"{}\"\n",
        dir.join("link")
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let recipe = Recipe::parse(&recipe).unwrap();
    let built = runtime
        .block_on(store.build(&recipe, &small(), &mut |_| {}))
        .unwrap();
    assert_eq!(
        std::fs::read_to_string(built.rootfs.join("data/etc/text")).unwrap(),
        "x"
    );
    store.remove(&image.digest).unwrap();
}

#[test]
fn what_is_mounted_is_neither_left_out_nor_swept() {
    const TEST: &str = "what_is_mounted_is_neither_left_out_nor_swept";
    if let Some(dir) = my_part() {
        // Opening the store succeeds although what a killed bootstrap left cannot be removed.
        let store = ImageStore::open(dir.join("store")).unwrap();
        let left = dir.join("store/images/.new-1-1");
        assert!(left.join("boot/proc/here").exists() && left.join("boot/bound/text").exists());
        assert!(!left.join("boot/file").exists(), "the rest goes");
        let error = store
            .import(&dir.join("tree"), None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("mnt") && error.contains("another file system"),
            "{error}"
        );
        return;
    }
    if !is_root() {
        eprintln!("SKIPPED: only root mounts");
        return;
    }
    let place = Place::new();
    let dir = place.path();
    let left = dir.join("store/images/.new-1-1/boot");
    for name in ["proc", "bound"] {
        std::fs::create_dir_all(left.join(name)).unwrap();
    }
    std::fs::write(left.join("file"), "").unwrap();
    tree(&dir.join("tree"), "x");
    std::fs::create_dir(dir.join("tree/mnt")).unwrap();
    let mounts = format!(
        "mount -t tmpfs t {left}/proc; touch {left}/proc/here; mount --bind tree/etc {left}/bound; mount -t tmpfs t tree/mnt"
    );
    with_mounts(TEST, &dir, &mounts).unwrap();
    assert!(dir.join("tree/etc/text").exists());
    // Without the mounts all of it goes.
    ImageStore::open(dir.join("store")).unwrap();
    assert_eq!(leftovers(&dir.join("store")), 0);
}

#[tokio::test]
async fn set_ups_work_with_a_cache_as_they_do_without() {
    let place = Place::new();
    let dir = place.path();
    let pool = cached(&dir, Image::Host).await;
    for (what, command) in [
        ("a name of any bytes", "touch $'\\xff\\xfe'; echo x > x"),
        ("a pipe", "mkfifo p; echo x > x"),
        (
            "a path that is too long",
            "perl -e '$n = \"n\" x 200; for (1..25) { mkdir $n or die; chdir $n or die }'; echo x > x",
        ),
        (
            "a depth",
            "perl -e 'for (1..150) { mkdir \"d\" or die; chdir \"d\" or die }'; echo x > x",
        ),
        (
            "much of the memory",
            "head -c 90M /dev/zero > big; echo x > x",
        ),
    ] {
        let config = SandboxConfig {
            limits: Limits {
                disk_bytes: 128 * MIB,
                ..small().limits
            },
            cache_dir: Some(dir.join("cache")),
            ..small()
        };
        let pool = Pool::start(config).await.unwrap();
        let setup = Setup::default().then([format!(
            "{command}; cat /proc/sys/kernel/random/uuid > once"
        )]);
        let mut ran = Vec::new();
        for _ in 0..2 {
            let mut sandbox = pool
                .lease(&setup)
                .await
                .map_err(|e| format!("{what}: {e}"))
                .unwrap();
            assert_eq!(
                output(&mut sandbox, "cat x; test -p p || test ! -e p").await,
                "x",
                "{what}"
            );
            if what == "a pipe" {
                output(&mut sandbox, "test -p p").await;
            }
            ran.push(output(&mut sandbox, "cat once").await);
            sandbox.reset().await.unwrap();
            ran.push(output(&mut sandbox, "cat once").await);
            sandbox.close().await;
        }
        ran.dedup();
        assert_eq!(ran.len(), 4, "{what}: each time anew");
        assert_eq!(layers(&dir).len(), 0, "{what}");
    }
    // What is wrong with a set-up itself is told.
    let failing = Setup::default().then(["exit 3"]);
    assert!(matches!(
        pool.lease(&failing).await,
        Err(SandboxError::Setup { .. })
    ));
    // A layer that was damaged is no reason to fail either.
    let setup = Setup::default().then(["echo y > y"]);
    pool.lease(&setup).await.unwrap().close().await;
    let [layer] = layers(&dir).try_into().unwrap();
    std::fs::write(layer.join("layer.json"), "{").unwrap();
    let mut sandbox = pool.lease(&setup).await.unwrap();
    assert_eq!(output(&mut sandbox, "cat y").await, "y");
    sandbox.close().await;
    // It can be removed, damaged as it is.
    pool.remove_saved(layer.file_name().unwrap()).unwrap();
    assert_eq!(layers(&dir).len(), 0);
    // Nor is a cache that cannot be written.
    if !is_root() {
        std::fs::set_permissions(dir.join("cache/layers"), PermissionsExt::from_mode(0o500))
            .unwrap();
        let mut sandbox = pool.lease(&setup).await.unwrap();
        assert_eq!(output(&mut sandbox, "cat y").await, "y");
        sandbox.close().await;
        std::fs::set_permissions(dir.join("cache/layers"), PermissionsExt::from_mode(0o700))
            .unwrap();
    }
}

#[tokio::test]
async fn a_cache_on_an_odd_or_full_disk_is_done_without() {
    const TEST: &str = "a_cache_on_an_odd_or_full_disk_is_done_without";
    if let Some(dir) = my_part() {
        let pool = cached(&dir, Image::Host).await;
        let setups = [
            Setup::new([("in", &b"x"[..])]).then(["echo y > y"]),
            Setup::new([
                ("in", b"x".to_vec()),
                ("y", b"y\n".to_vec()),
                ("big", vec![7; 2 << 20]),
            ]),
        ];
        for setup in setups.iter().chain(&setups) {
            let mut sandbox = pool.lease(setup).await.unwrap();
            assert_eq!(output(&mut sandbox, "cat in y").await, "xy");
            sandbox.reset().await.unwrap();
            assert_eq!(output(&mut sandbox, "cat y").await, "y");
            sandbox.close().await;
        }
        assert!(pool.tool_versions().await.unwrap().contains_key("bash"));
        return;
    }
    if !is_root() {
        eprintln!("SKIPPED: only root mounts");
        return;
    }
    let place = Place::new();
    let dir = place.path();
    std::fs::create_dir(dir.join("cache")).unwrap();
    // One that cannot be shown under another owner, and one without room.
    with_mounts(TEST, &dir, "mount -t ramfs r cache").unwrap();
    with_mounts(TEST, &dir, "mount -t tmpfs -o size=16k t cache").unwrap();
}

#[tokio::test]
async fn a_state_no_layer_can_hold_is_refused_and_nobodys_fault() {
    let place = Place::new();
    let pool = cached(&place.path(), Image::Host).await;
    let mut sandbox = pool.lease(&Setup::default()).await.unwrap();
    let deep = "perl -e '$n = \"n\" x 200; for (1..25) { mkdir $n or die; chdir $n or die }'";
    output(&mut sandbox, deep).await;
    let error = sandbox.save().await.unwrap_err();
    assert!(matches!(error, SandboxError::Refused { .. }), "{error}");
    assert!(
        !error.is_infrastructure() && error.to_string().contains("too long"),
        "{error}"
    );
    assert_eq!(output(&mut sandbox, "rm -rf n*; echo on").await, "on");
    sandbox.save().await.unwrap();
    sandbox.close().await;
    assert_eq!(layers(&place.path()).len(), 1);
}

#[tokio::test]
async fn the_caches_bound_is_one_of_the_disk() {
    let place = Place::new();
    let dir = place.path();
    let config = SandboxConfig {
        cache_dir: Some(dir.join("cache")),
        cache_bytes: 3 * MIB,
        ..small()
    };
    let pool = Pool::start(config).await.unwrap();
    // Hardly a content, and a block each.
    for n in 0..6 {
        let files = (0..400).map(|f| (format!("f{f}"), vec![n; 1]));
        let mut sandbox = pool.lease(&Setup::new(files)).await.unwrap();
        assert_eq!(output(&mut sandbox, "ls | wc -l").await, "400");
        sandbox.close().await;
        assert!(layers(&dir).len() <= 2, "{n}: {}", layers(&dir).len());
    }
}

#[test]
fn an_image_for_other_processors_is_refused_by_name() {
    let place = Place::new();
    let dir = place.path();
    let store = ImageStore::open(dir.join("store")).unwrap();
    let ours = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    // An index of manifests, each for a platform (or saying nothing) and with a configuration that says one.
    let oci = |platforms: &[(&str, &str)], damage: bool| {
        let mut blobs: Vec<(String, Vec<u8>)> = Vec::new();
        let mut manifests = Vec::new();
        for (n, (index, config)) in platforms.iter().enumerate() {
            let layer = tar(&[("which", Regular, format!("{n}").as_bytes())]);
            let config = format!("{{\"architecture\":\"{config}\"}}").into_bytes();
            let manifest = format!(
                "{{\"config\":{{\"digest\":\"sha256:{}\"}},\"layers\":[{{\"digest\":\"sha256:{}\"}}]}}",
                sha256(&config),
                sha256(&layer)
            );
            let platform = match *index {
                "" => String::new(),
                arch => format!(",\"platform\":{{\"os\":\"linux\",\"architecture\":\"{arch}\"}}"),
            };
            manifests.push(format!(
                "{{\"digest\":\"sha256:{}\"{platform}}}",
                sha256(manifest.as_bytes())
            ));
            for bytes in [layer, config, manifest.into_bytes()] {
                blobs.push((format!("blobs/sha256/{}", sha256(&bytes)), bytes));
            }
        }
        if damage {
            blobs[0].1[0] ^= 1;
        }
        let index = format!("{{\"manifests\":[{}]}}", manifests.join(","));
        let mut entries = vec![
            ("oci-layout", Regular, &b"{}"[..]),
            ("index.json", Regular, index.as_bytes()),
        ];
        entries.extend(
            blobs
                .iter()
                .map(|(n, b)| (n.as_str(), Regular, b.as_slice())),
        );
        let path = write(&dir, "oci.tar", &tar(&entries));
        let image = store.import(&path, Some("oci"));
        image
            .map(|i| std::fs::read_to_string(i.rootfs.join("which")).unwrap())
            .map_err(|e| e.to_string())
    };
    assert_eq!(
        oci(&[("s390x", "s390x"), (ours, ours)], false),
        Ok("1".into())
    );
    assert_eq!(oci(&[("", ours)], false), Ok("0".into()));
    let refused = |outcome: Result<String, String>, why: &[&str]| {
        let said = outcome.unwrap_err();
        assert!(why.iter().all(|w| said.contains(w)), "{said}");
    };
    refused(
        oci(&[("s390x", "s390x"), ("riscv64", "riscv64")], false),
        &["s390x", "riscv64", ours],
    );
    refused(oci(&[("", "s390x")], false), &["s390x"]);
    refused(oci(&[("", ours), ("", ours)], false), &["2 images"]);
    refused(oci(&[("", ours)], true), &["blobs/sha256/", "is damaged"]);
    let docker = |arch: &str| {
        let config = format!("{{\"architecture\":\"{arch}\"}}");
        let archive = tar(&[
            (
                "manifest.json",
                Regular,
                br#"[{"Config":"c.json","Layers":["l"]}]"#,
            ),
            ("c.json", Regular, config.as_bytes()),
            ("l", Regular, &tar(&[("x", Regular, b"x")])),
        ]);
        let image = store.import(&write(&dir, "docker.tar", &archive), Some("docker"));
        image.map(|i| i.name).map_err(|e| e.to_string())
    };
    assert_eq!(docker(ours), Ok("docker".into()));
    refused(docker("s390x"), &["s390x"]);
    assert_eq!(leftovers(&dir.join("store")), 0);
}

#[test]
fn names_are_plain_and_a_digest_is_a_digest() {
    let place = Place::new();
    let dir = place.path();
    let store = ImageStore::open(dir.join("store")).unwrap();
    let first = store
        .import(&tree(&dir.join("first"), "1"), Some("first"))
        .unwrap();
    let second = tree(&dir.join("second"), "2");
    let odd = [
        "\u{1b}[2Jx",
        "a\nb",
        "a b",
        "",
        "\u{202e}x",
        &first.digest,
        &first.digest[..12],
    ];
    for name in odd {
        let error = store.import(&second, Some(name)).unwrap_err().to_string();
        assert!(
            !error.contains('\u{1b}') && !error.contains('\n'),
            "{error:?}"
        );
        let text = toml_text(name);
        assert!(Recipe::parse(&format!("name = {text}\nfrom = \"host-slice\"")).is_err());
        // An archive names itself.
        let manifest = format!("[{{\"RepoTags\":[{}],\"Layers\":[]}}]", json_text(name));
        let archive = tar(&[("manifest.json", Regular, manifest.as_bytes())]);
        let error = store
            .import(&write(&dir, "a.tar", &archive), None)
            .unwrap_err();
        assert!(error.to_string().contains("another name"), "{error}");
    }
    for name in [
        "debian:12",
        "registry.local:5000/a/b@x",
        "größe_1.0-rc+2",
        "dead",
    ] {
        assert_eq!(store.import(&second, Some(name)).unwrap().name, name);
        assert_eq!(store.find(name).unwrap().name, name);
    }
    // Of another program or an older one: a record that names another's digest.
    let record = store
        .find("dead")
        .unwrap()
        .rootfs
        .with_file_name("image.json");
    let text = std::fs::read_to_string(&record).unwrap();
    std::fs::write(
        &record,
        text.replace("\"dead\"", &format!("\"{}\"", first.digest)),
    )
    .unwrap();
    assert_eq!(store.find(&first.digest).unwrap().name, "first");
    // What an image calls its system is shown too.
    std::fs::write(
        second.join("etc/os-release"),
        "PRETTY_NAME=\"Evil\u{1b}[2J\u{7} 1\"\n",
    )
    .unwrap();
    assert_eq!(
        store.import(&second, Some("evil")).unwrap().system,
        "Evil[2J 1"
    );
}

fn json_text(text: &str) -> String {
    let mut escaped = String::new();
    for unit in text.encode_utf16() {
        write!(escaped, "\\u{unit:04x}").unwrap();
    }
    format!("\"{escaped}\"")
}

fn toml_text(text: &str) -> String {
    json_text(text)
}

#[test]
fn an_import_under_way_is_left_alone_whoever_its_number_belongs_to() {
    const TEST: &str = "an_import_under_way_is_left_alone_whoever_its_number_belongs_to";
    if let Some(dir) = my_part() {
        let store = ImageStore::open(dir.join("store")).unwrap();
        store.import(&dir.join("large"), Some("large")).unwrap();
        return;
    }
    let place = Place::new();
    let dir = place.path();
    ImageStore::open(dir.join("store")).unwrap();
    std::fs::create_dir(dir.join("large")).unwrap();
    let large = std::fs::File::create(dir.join("large/file")).unwrap();
    large.set_len(1 << 30).unwrap();
    // In a pid namespace of its own, as a container has one: here its number is another program's, or nobody's.
    let mut child = if is_root() {
        Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", TEST])
            .env(PART, dir.as_str())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    } else {
        part(TEST, &dir)
    };
    let until = Instant::now() + Duration::from_secs(20);
    while leftovers(&dir.join("store")) == 0 {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..20 {
        ImageStore::open(dir.join("store")).unwrap();
    }
    assert!(
        child.try_wait().unwrap().is_none(),
        "the control: it was half-way"
    );
    assert!(
        child.wait().unwrap().success(),
        "its tree was swept under its hands"
    );
    let store = ImageStore::open(dir.join("store")).unwrap();
    store.verify(&store.find("large").unwrap().digest).unwrap();
}
