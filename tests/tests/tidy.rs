//! The architecture's invariants, checked on the manifests and the sources. ARCHITECTURE.md says why each holds.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// Direct dependencies of each crate, dev-dependencies apart.
fn manifests() -> BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> {
    let mut crates = BTreeMap::new();
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.is_dir() {
            continue;
        }
        let text = std::fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        let manifest: toml::Table = toml::from_str(&text).unwrap();
        let keys = |section: &str| -> BTreeSet<String> {
            manifest
                .get(section)
                .and_then(|s| s.as_table())
                .map(|t| t.keys().cloned().collect())
                .unwrap_or_default()
        };
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let mut normal = keys("dependencies");
        normal.extend(keys("build-dependencies"));
        crates.insert(name, (normal, keys("dev-dependencies")));
    }
    assert!(crates.len() > 15, "found only {} crates", crates.len());
    crates
}

/// Tracked files, by git; an exported tree without git has every file checked.
fn tracked() -> Vec<PathBuf> {
    let output = std::process::Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "git ls-files failed");
    let files: Vec<PathBuf> = output
        .stdout
        .split(|b| *b == 0)
        .filter(|p| !p.is_empty())
        .map(|p| root().join(std::str::from_utf8(p).unwrap()))
        .filter(|p| p.exists())
        .collect();
    assert!(files.len() > 50);
    files
}

#[test]
fn each_heavy_engine_lives_in_its_own_crates() {
    let homes: &[(&str, &[&str])] = &[
        ("datafusion", &["query"]),
        ("polars", &["credit"]),
        ("tch", &["model", "trainer", "serve", "torch-cli"]),
        ("bollard", &["sandbox"]),
        ("deltalake", &["lake"]),
    ];
    let crates = manifests();
    for (engine, allowed) in homes {
        for (name, (normal, dev)) in &crates {
            let named = normal
                .union(dev)
                .any(|d| d == engine || d.starts_with(&format!("{engine}-")));
            assert!(
                !named || allowed.contains(&name.as_str()),
                "crate {name} names {engine}; only {allowed:?} may"
            );
        }
    }
}

#[test]
fn the_front_door_builds_without_libtorch() {
    let crates = manifests();
    let mut todo = vec!["cli".to_owned()];
    let mut seen = BTreeSet::new();
    while let Some(name) = todo.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let (normal, _) = &crates[&name];
        assert!(
            !normal.contains("tch"),
            "drillyard (cli) reaches tch through {name}"
        );
        todo.extend(
            normal
                .iter()
                .filter_map(|d| d.strip_prefix("drillyard-"))
                .map(str::to_owned),
        );
    }
    assert!(
        seen.contains("lake") && seen.contains("agent"),
        "the walk saw only {seen:?}"
    );
}

#[test]
fn schema_and_credit_math_do_no_io() {
    for name in ["schema", "credit-math"] {
        for path in rust_files(&root().join("crates").join(name).join("src")) {
            let text = std::fs::read_to_string(&path).unwrap();
            for forbidden in [
                "std::fs",
                "std::net",
                "std::process",
                "fs_err",
                "tokio",
                "std::io",
            ] {
                assert!(
                    !text.contains(forbidden),
                    "{} names {forbidden}",
                    path.display()
                );
            }
        }
    }
}

#[test]
fn no_public_api_exposes_a_heavy_engine() {
    let engines: &[(&str, &[&str])] = &[
        ("query", &["datafusion::"]),
        ("credit", &["polars::"]),
        ("lake", &["deltalake::"]),
    ];
    for (name, paths) in engines {
        for path in rust_files(&root().join("crates").join(name).join("src")) {
            let text = std::fs::read_to_string(&path).unwrap();
            for line in text.lines().filter(|l| {
                l.trim_start().starts_with("pub use")
                    || l.trim_start().starts_with("pub fn")
                    || l.trim_start().starts_with("pub async fn")
            }) {
                for engine in *paths {
                    assert!(!line.contains(engine), "{}: {line}", path.display());
                }
            }
        }
    }
}

#[test]
fn the_front_door_starts_sandboxes_in_one_place() {
    let mut places = Vec::new();
    for path in rust_files(&root().join("crates/cli/src")) {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().filter(|line| line.contains("Pool::start"));
        places.extend(lines.map(|line| format!("{}: {line}", path.display())));
    }
    assert!(
        places.len() == 1 && places[0].contains("stages/drill.rs"),
        "a pool that is started elsewhere ignores sandbox.require_limits: {places:?}"
    );
}

#[test]
fn nothing_is_stubbed_or_ignored() {
    let forbidden = [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("#[", "ignore"),
    ];
    for path in tracked()
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "rs"))
    {
        let text = std::fs::read_to_string(&path).unwrap();
        for word in forbidden {
            assert!(!text.contains(word), "{} has {word}", path.display());
        }
    }
}

#[test]
fn every_folder_says_what_belongs_there() {
    let crates = root().join("crates");
    let mut folders: Vec<PathBuf> = [
        "pipelines",
        "crates",
        "sql",
        "datasets",
        "datasets/tasks",
        "datasets/base",
        "datasets/golden",
        "notebooks",
        "tests",
    ]
    .iter()
    .map(|f| root().join(f))
    .collect();
    folders.extend(
        std::fs::read_dir(crates)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|path| path.is_dir()),
    );
    for folder in folders {
        assert!(
            folder.join("README.md").exists(),
            "{} has no README.md",
            folder.display()
        );
    }
}

#[test]
fn large_files_are_only_where_they_may_be() {
    for path in tracked() {
        let relative = path.strip_prefix(root()).unwrap().to_owned();
        let size = std::fs::metadata(&path).unwrap().len();
        let allowed = relative.starts_with("datasets/base")
            || relative.starts_with("datasets/golden")
            || relative == Path::new("Cargo.lock");
        assert!(
            size <= 1 << 20 || allowed,
            "{} has {size} bytes",
            relative.display()
        );
        assert!(
            !relative.starts_with("datasets/base") || size <= 8 << 20,
            "{} has {size} bytes",
            relative.display()
        );
    }
}

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    files
}
