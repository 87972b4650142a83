//! Whole runs through the command line, in real sandboxes. Where the host allows no sandbox they say so and test the refusal instead.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

struct Yard {
    dir: tempfile::TempDir,
    settings: Vec<String>,
}

impl Yard {
    fn new(settings: &[&str]) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            settings: settings.iter().map(|s| (*s).to_owned()).collect(),
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_drillyard"));
        command
            .current_dir(root())
            .arg("--set")
            .arg(format!("yard={}", self.dir.path().join("yard").display()));
        for setting in &self.settings {
            command.arg("--set").arg(setting);
        }
        command.args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> (String, String) {
        let output = self.run(arguments);
        let (out, err) = texts(&output);
        assert!(
            output.status.success(),
            "{arguments:?} ended with {}:\n{out}\n{err}",
            output.status
        );
        (out, err)
    }

    fn fails(&self, arguments: &[&str], code: i32, words: &[&str]) {
        let output = self.run(arguments);
        let (out, err) = texts(&output);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments:?}:\n{out}\n{err}"
        );
        for word in words {
            assert!(
                err.contains(word),
                "{arguments:?} does not say '{word}':\n{err}"
            );
        }
    }

    fn rows(&self, query: &str) -> Vec<Value> {
        let (out, _) = self.ok(&["sql", "--format", "json", query]);
        out.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

fn texts(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

const SMALL: [&str; 2] = ["tasks.train=14", "tasks.samples=4"];

#[test]
fn the_loop_runs_and_a_second_run_redoes_nothing() {
    let yard = Yard::new(&[
        "tasks.train=28",
        "tasks.samples=4",
        "train.epochs=1",
        "eval.tasks=14",
        "eval.unseen_tasks=1",
    ]);
    yard.ok(&["rollout"]);
    yard.ok(&["qa"]);
    let (card, _) = yard.ok(&["train"]);
    for word in [
        "Report card",
        "rollout",
        "qa",
        "credit",
        "train",
        "held-out tasks",
        "next:",
    ] {
        assert!(card.contains(word), "the card lacks '{word}':\n{card}");
    }
    let (json, _) = yard.ok(&["report", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    for policy in ["base", "candidate"] {
        for key in ["value", "lo", "hi", "n"] {
            assert!(
                json[policy]["success"][key].is_number(),
                "{policy}.success.{key} in {json}"
            );
        }
        assert_eq!(json[policy]["success"]["n"], 14);
    }

    let counted = yard.rows("SELECT count(*) AS n, count(DISTINCT episode_id) AS d FROM episodes WHERE purpose = 'train'");
    assert_eq!(
        (&counted[0]["n"], &counted[0]["d"]),
        (&Value::from(112), &Value::from(112))
    );
    let leaked = yard.rows("SELECT count(*) AS n FROM raw.advantages a JOIN episodes e ON a.episode_id = e.episode_id WHERE e.purpose <> 'train'");
    assert_eq!(leaked[0]["n"], 0, "evaluation must not enter credit");

    let runs = yard.rows("SELECT count(*) AS n FROM runs")[0]["n"].clone();
    for verb in ["rollout", "qa", "train"] {
        let (_, err) = yard.ok(&[verb]);
        assert!(err.contains("nothing to redo"), "{verb}: {err}");
    }
    assert_eq!(
        yard.rows("SELECT count(*) AS n FROM runs")[0]["n"],
        runs,
        "a second run left records"
    );

    // Another QA setting runs again from qa on, and not the rollout.
    let (_, err) = yard.ok(&["--set", "qa.block_above=0.9", "qa"]);
    assert!(err.contains("rules over"), "{err}");
    let (_, err) = yard.ok(&["--set", "qa.block_above=0.9", "rollout"]);
    assert!(err.contains("nothing to redo"), "{err}");
}

#[test]
fn kills_lose_and_double_nothing() {
    let yard = Yard::new(&SMALL);
    // Named points first: in the middle of a journal record, between the tables of a commit, before and after the last one.
    for point in [
        "journal_write:40",
        "between_tables",
        "before_episodes",
        "after_episodes",
    ] {
        let output = yard
            .command(&["rollout"])
            .env("DRILLYARD_CRASH_AT", point)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{point} was passed alive");
    }
    let (_, err) = yard.ok(&["rollout"]);
    let rows = yard.rows("SELECT count(*) AS n, count(DISTINCT episode_id) AS d FROM episodes");
    assert_eq!(
        (&rows[0]["n"], &rows[0]["d"]),
        (&Value::from(56), &Value::from(56)),
        "{err}"
    );
    let steps = yard.rows(
        "SELECT count(*) AS n, count(DISTINCT episode_id || ' ' || step_index) AS d FROM steps",
    );
    assert_eq!(steps[0]["n"], steps[0]["d"]);
}

#[test]
fn kill_nine_at_random_moments() {
    let yard = Yard::new(&["tasks.train=56", "tasks.samples=4"]);
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let mut state = seed;
    for _ in 0..5 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let mut child = yard
            .command(&["rollout"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(200 + (state >> 33) % 2000));
        let _ = child.kill();
        let _ = child.wait();
    }
    yard.ok(&["rollout"]);
    let rows = yard.rows("SELECT count(*) AS n, count(DISTINCT episode_id) AS d FROM episodes");
    assert_eq!(
        (&rows[0]["n"], &rows[0]["d"]),
        (&Value::from(224), &Value::from(224))
    );
    std::thread::sleep(Duration::from_millis(500));
    let marker = yard.dir.path().display().to_string();
    let left: BTreeSet<String> = processes()
        .into_iter()
        .filter(|line| line.contains(&marker))
        .collect();
    assert!(left.is_empty(), "processes left: {left:?}");
}

/// Command lines of all processes.
fn processes() -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    entries
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .map(|bytes| String::from_utf8_lossy(&bytes).replace('\0', " "))
        .collect()
}

#[test]
fn imported_trajectories_are_judged_and_credited() {
    let yard = Yard::new(&[]);
    let pipeline = ["--pipeline", "pipelines/imported.toml"];
    let with = |verb: &'static str| [pipeline[0], pipeline[1], verb];
    let (_, err) = yard.ok(&with("import"));
    assert!(err.contains("episodes from"), "{err}");
    yard.ok(&with("qa"));
    yard.ok(&with("credit"));
    let reasons = yard.rows("SELECT count(*) AS n FROM latest_scores WHERE tier IS NOT NULL");
    assert!(reasons[0]["n"].as_i64().unwrap() > 0);
    let tokens = yard.rows("SELECT count(*) AS n FROM tokens");
    assert_eq!(tokens[0]["n"], 0, "imported episodes carry no token ids");
    let (_, err) = yard.ok(&with("import"));
    assert!(err.contains("nothing to redo"), "{err}");
}

#[test]
fn bad_input_ends_with_its_code_and_a_way_out() {
    let yard = Yard::new(&SMALL);
    yard.fails(
        &["--set", "train.learning_rate=1", "rollout"],
        2,
        &["train", "learning_rate"],
    );
    yard.fails(
        &["--set", "tasks.set=nope", "rollout"],
        20,
        &["nope", "wrangle"],
    );
    yard.fails(
        &["--pipeline", "pipelines/none.toml", "rollout"],
        20,
        &["none.toml"],
    );
    yard.fails(&["qa"], 20, &["make rollout"]);
    yard.fails(&["sql", "SELECT 1 FROM nowhere"], 2, &["nowhere"]);
    yard.fails(&["import", "no/such/file"], 20, &["no/such/file"]);
    let endpoint = [
        "--set",
        "policy.kind=openai",
        "--set",
        "policy.base_url=http://127.0.0.1:9/v1",
        "--set",
        "policy.model=m",
    ];
    let arguments: Vec<&str> = endpoint.into_iter().chain(["rollout"]).collect();
    yard.fails(&arguments, 30, &["127.0.0.1:9"]);
    let episodes = yard.rows("SELECT count(*) AS n FROM episodes");
    assert_eq!(episodes[0]["n"], 0, "nothing half-written");
}

#[test]
fn a_yard_that_cannot_be_written_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_drillyard"))
        .current_dir(root())
        .args([
            "--set",
            &format!("yard={}/yard", file.path().display()),
            "rollout",
        ])
        .output()
        .unwrap();
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(21), "{err}");
    assert!(err.contains(&file.path().display().to_string()), "{err}");
}
