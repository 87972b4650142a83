//! Whole runs through the command line, in real sandboxes. Where the host allows no sandbox they say so and test the refusal instead.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use drillyard_testkit::{Answer, FakeEndpoint};
use serde_json::{Value, json};

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

    /// Runs a command that dies at a named point.
    fn dies(&self, arguments: &[&str], point: &str) {
        let output = self
            .command(arguments)
            .env("DRILLYARD_CRASH_AT", point)
            .output()
            .unwrap();
        let (_, err) = texts(&output);
        // The process itself aborts at the point, or says that the trainer did.
        assert!(
            output.status.signal() == Some(6) || err.contains("signal: 6"),
            "{point} was passed alive: {}\n{err}",
            output.status
        );
    }

    /// Checks that the lake has this many episodes and steps of theirs, each once.
    fn holds_each_episode_once(&self, count: u64, said: &str) {
        let rows = self.rows("SELECT count(*) AS n, count(DISTINCT episode_id) AS d FROM episodes");
        let count = Value::from(count);
        assert_eq!((&rows[0]["n"], &rows[0]["d"]), (&count, &count), "{said}");
        let steps = self.rows(
            "SELECT count(*) AS n, count(DISTINCT episode_id || ' ' || step_index) AS d FROM steps",
        );
        assert_eq!(steps[0]["n"], steps[0]["d"]);
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

/// A yard with one episode of a fake endpoint, and its id.
fn one_episode(endpoint: &FakeEndpoint) -> (Yard, String) {
    let url = format!("policy.base_url={}", endpoint.base_url());
    let yard = Yard::new(&[
        "policy.kind=openai",
        &url,
        "policy.model=fake",
        "tasks.train=1",
        "tasks.samples=1",
    ]);
    yard.ok(&["rollout"]);
    let id = yard.rows("SELECT episode_id FROM episodes")[0]["episode_id"]
        .as_str()
        .unwrap()
        .to_owned();
    (yard, id)
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
fn kills_at_named_points_lose_and_double_nothing() {
    let yard = Yard::new(&SMALL);
    // Mid-way in a journal record, in a call, between the tables of a commit, around the last one, and when all is in.
    for point in [
        "journal_write:40",
        "mid_call:9",
        "between_tables",
        "before_episodes",
        "after_episodes",
        "after_batch",
    ] {
        yard.dies(&["--set", "policy.kind=expert", "rollout"], point);
    }
    let (_, err) = yard.ok(&["--set", "policy.kind=expert", "rollout"]);
    yard.holds_each_episode_once(56, &err);

    let train = [
        "--set",
        "policy.kind=expert",
        "--set",
        "train.method=rejection_sampling",
        "--set",
        "train.epochs=1",
        "--set",
        "eval.tasks=14",
        "--set",
        "eval.unseen_tasks=0",
    ];
    let verb = |verb: &'static str| -> Vec<&str> { train.iter().copied().chain([verb]).collect() };
    yard.ok(&verb("qa"));
    // Training ends with whoever started it.
    let mut child = yard
        .command(&verb("train"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let marker = yard.dir.path().display().to_string();
    let trainers = || {
        let mut all = processes();
        all.retain(|line| line.contains("drillyard-torch train") && line.contains(&marker));
        all
    };
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while trainers().is_empty() && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!trainers().is_empty(), "no trainer was seen");
    let _ = child.kill();
    let _ = child.wait();
    while !trainers().is_empty() && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(trainers().is_empty(), "still there: {:?}", trainers());

    // A checkpoint that was being written is not there; training goes on and ends.
    yard.dies(&verb("train"), "mid_checkpoint");
    yard.ok(&verb("train"));
    let checkpoints = std::fs::read_dir(yard.dir.path().join("yard/checkpoints")).unwrap();
    let half: Vec<String> = checkpoints
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".writing") || name.ends_with(".partial"))
        .collect();
    assert!(half.is_empty(), "left behind: {half:?}");
}

#[test]
fn kill_nine_at_random_moments() {
    let yard = Yard::new(&["tasks.train=28", "tasks.samples=4"]);
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
        std::thread::sleep(Duration::from_millis(200 + (state >> 33) % 3000));
        let _ = child.kill();
        let _ = child.wait();
    }
    let (_, err) = yard.ok(&["rollout"]);
    yard.holds_each_episode_once(112, &err);
    // Whatever belonged to a killed run ends by itself: the server watches its standard input, sandboxes go with their helper.
    let marker = yard.dir.path().display().to_string();
    let mine = || -> BTreeSet<String> {
        processes()
            .into_iter()
            .filter(|line| line.contains(&marker))
            .collect()
    };
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while !mine().is_empty() && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(mine().is_empty(), "processes left: {:?}", mine());
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(&marker), "mounts left: {mounts}");
}

#[test]
fn a_full_disk_is_named_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().display();
    let program = env!("CARGO_BIN_EXE_drillyard");
    let run = format!(
        "{program} --set yard={disk}/yard --set policy.kind=expert --set tasks.train=28 --set tasks.samples=4"
    );
    let script = format!(
        "mount -t tmpfs -o size=200k tmpfs {disk} || exit 99
         {run} rollout; echo full: $?
         mount -o remount,size=200m {disk}
         {run} rollout || exit 98
         {run} sql --format json 'SELECT count(*) AS n, count(DISTINCT episode_id) AS d FROM episodes'"
    );
    let ways: [&[&str]; 2] = [&["--mount"], &["--user", "--map-root-user", "--mount"]];
    for way in ways {
        let output = Command::new("unshare")
            .current_dir(root())
            .args(way)
            .args(["sh", "-c", &script])
            .output()
            .unwrap();
        let (out, err) = texts(&output);
        if matches!(output.status.code(), Some(99 | 1)) && !out.contains("full:") {
            continue;
        }
        assert!(output.status.success(), "{out}\n{err}");
        assert!(out.contains("full: 21"), "{out}\n{err}");
        assert!(
            err.to_lowercase().contains("no space") || err.contains("full"),
            "{err}"
        );
        let last = out.lines().last().unwrap_or_default();
        let counted: Value = serde_json::from_str(last).unwrap();
        assert_eq!(
            (&counted["n"], &counted["d"]),
            (&Value::from(112), &Value::from(112))
        );
        return;
    }
    eprintln!("SKIPPED a full disk: this host permits neither mounting nor user namespaces");
}

#[test]
fn a_damaged_data_file_is_named() {
    let yard = Yard::new(&SMALL);
    yard.ok(&["--set", "policy.kind=expert", "rollout"]);
    let mut folders = vec![yard.dir.path().join("yard/lake/episodes")];
    let mut data = None;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "parquet")
                && !path.display().to_string().contains("_delta_log")
            {
                data = Some(path);
            }
        }
    }
    let data = data.unwrap();
    std::fs::write(&data, b"not Parquet any more").unwrap();
    let name = data.file_name().unwrap().to_str().unwrap();
    yard.fails(
        &["sql", "SELECT count(*) FROM episodes WHERE n_steps > 0"],
        20,
        &[name],
    );
    yard.fails(&["--set", "policy.kind=expert", "qa"], 20, &[name]);
}

/// What the embedded base has to bring: names it never saw are copied, and what is left to learn are decisions.
#[test]
fn the_embedded_base_copies_names_it_never_saw() {
    let yard = Yard::new(&[
        "tasks.train=14",
        "tasks.samples=1",
        "eval.tasks=140",
        "eval.unseen_tasks=0",
    ]);
    yard.ok(&["rollout"]);
    yard.ok(&[
        "--set",
        "train.method=rejection_sampling",
        "--set",
        "train.epochs=1",
        "train",
    ]);
    let rows = yard.rows(
        "SELECT t.instruction, c.arguments FROM raw.tool_calls c JOIN raw.episodes e ON c.episode_id = e.episode_id
         JOIN raw.tasks t ON t.task_id = e.task_id AND t.run_id = e.run_id
         WHERE e.purpose = 'held_out' AND e.policy = 'base' AND c.tool = 'execute_shell'",
    );
    let unseen = drillyard_gym::grammar().held_out();
    let (mut copied, mut all) = (0, 0);
    for row in &rows {
        let (asked, typed) = (
            row["instruction"].as_str().unwrap(),
            row["arguments"].as_str().unwrap(),
        );
        for role in ["raw_", "ref_", "out_"] {
            for (at, _) in asked.match_indices(role).take(1) {
                let name = &asked[at + role.len()..at + role.len() + 4];
                let Some(found) = typed
                    .find(role)
                    .filter(|_| unseen.iter().any(|n| n == name))
                else {
                    continue;
                };
                all += 1;
                copied += usize::from(typed[found + role.len()..].starts_with(name));
            }
        }
    }
    assert!(all > 100, "only {all} unseen names");
    let share = copied as f64 / f64::from(all);
    assert!(share >= 0.98, "{copied} of {all} unseen names were copied");
}

#[test]
fn training_is_measured_on_validation_tasks() {
    let yard = Yard::new(&[
        "tasks.train=28",
        "tasks.samples=4",
        "train.epochs=1",
        "train.validate_every=2",
        "train.validation_tasks=14",
        "eval.tasks=14",
        "eval.unseen_tasks=0",
    ]);
    yard.ok(&["rollout"]);
    let (_, err) = yard.ok(&["train"]);
    let curves = yard.rows(
        "SELECT name, count(*) AS n FROM train_metrics WHERE name LIKE 'validation_%' GROUP BY name ORDER BY name",
    );
    let names: Vec<&str> = curves
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "validation_mean_steps",
            "validation_success",
            "validation_tool_accuracy"
        ],
        "{err}"
    );
    assert!(
        curves.iter().all(|row| row["n"].as_i64().unwrap() >= 2),
        "{curves:?}"
    );
}

#[test]
fn nights_follow_the_champion_and_the_control_stands_beside() {
    let yard = Yard::new(&[
        "tasks.train=28",
        "tasks.samples=4",
        "train.epochs=1",
        "eval.tasks=14",
        "eval.unseen_tasks=0",
        "train.validation_tasks=14",
    ]);
    let (out, _) = yard.ok(&["nights", "2"]);
    for word in [
        "night 1: validation",
        "night 2: validation",
        "held out, champion",
        "champion: ",
    ] {
        assert!(out.contains(word), "no '{word}' in:\n{out}");
    }
    let releases = yard.rows("SELECT status FROM releases");
    assert_eq!(releases.len(), 2);
    yard.ok(&["rollout"]);
    yard.ok(&["train"]);
    let (out, _) = yard.ok(&["control"]);
    for word in ["negative control", "control − base", "upper bound"] {
        assert!(out.contains(word), "no '{word}' in:\n{out}");
    }
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
fn faults_are_recorded_and_told_and_come_again() {
    let faults = [
        "policy.kind=expert",
        "policy.mistake_rate=0",
        "faults.permission_denied=0.3",
        "faults.truncated_output={ rate = 0.3, tools = [\"execute_shell\"] }",
    ];
    let settings: Vec<&str> = SMALL.into_iter().chain(faults).collect();
    let yard = Yard::new(&settings);
    let (out, _) = yard.ok(&["rollout"]);
    for word in [
        "success without faults",
        "success with faults",
        "permission denied",
        "truncated output",
    ] {
        assert!(out.contains(word), "the figures lack '{word}':\n{out}");
    }
    let met = "SELECT e.task_id, e.sample_index, c.step_index, c.fault_injected FROM tool_calls c JOIN episodes e ON c.episode_id = e.episode_id
        WHERE c.fault_injected IS NOT NULL ORDER BY e.task_id, e.sample_index, c.step_index";
    let schedule = yard.rows(met);
    assert!(schedule.len() > 20, "{} faults", schedule.len());
    let counted = yard.rows(
        "SELECT count(*) AS n, sum(n_injected_faults) AS faults, count(*) FILTER (WHERE status = 'infrastructure') AS infrastructure FROM episodes",
    );
    assert_eq!(
        (&counted[0]["faults"], &counted[0]["infrastructure"]),
        (&Value::from(schedule.len()), &Value::from(0))
    );
    let (out, _) = yard.ok(&[
        "sql",
        "--format",
        "json",
        "-f",
        "sql/metrics/injected_faults.sql",
    ]);
    let kinds: Vec<Value> = out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |kind: &str| {
        let row = kinds.iter().find(|row| row["fault"] == kind).unwrap();
        row["success"].as_f64().unwrap()
    };
    // A script that can't try again fails where its one command was refused.
    assert!(
        (of("none") - 1.0).abs() < 1e-9 && of("permission_denied") < 0.9,
        "{out}"
    );

    // Killed and resumed elsewhere, the same calls meet the same faults.
    let other = Yard::new(&settings);
    other.dies(&["rollout"], "mid_call:30");
    other.ok(&["rollout"]);
    let known = |rows: Vec<Value>| -> BTreeSet<String> {
        rows.into_iter().map(|row| row.to_string()).collect()
    };
    let unknown =
        other.rows("SELECT count(*) AS n FROM tool_calls WHERE outcome = 'outcome_unknown'");
    let (whole, resumed) = (known(schedule), known(other.rows(met)));
    assert!(resumed.is_subset(&whole));
    // What was under way when it died has no result, and so no fault.
    assert!((whole.len() - resumed.len()) as i64 <= unknown[0]["n"].as_i64().unwrap());
    // Without faults it is another run.
    let (out, _) = yard.ok(&[
        "--set",
        "faults.permission_denied=0",
        "--set",
        "faults.truncated_output=0",
        "rollout",
    ]);
    assert!(!out.contains("faults"), "{out}");
    assert_eq!(
        yard.rows("SELECT count(DISTINCT run_id) AS n FROM episodes")[0]["n"],
        2
    );
}

#[test]
fn episodes_are_replayed_and_branched() {
    let yard = Yard::new(&[
        "policy.kind=expert",
        "tasks.train=14",
        "tasks.samples=1",
        "faults.truncated_output=0.5",
    ]);
    yard.ok(&["rollout"]);
    let ids: Vec<String> = yard
        .rows("SELECT episode_id FROM episodes ORDER BY episode_id")
        .iter()
        .map(|row| row["episode_id"].as_str().unwrap().to_owned())
        .collect();
    // With other settings on the command line: those of the record count.
    for id in &ids[..4] {
        let (out, _) = yard.ok(&["--set", "tasks.train=1", "--set", "seed=3", "replay", id]);
        assert!(
            out.contains("2 the same") && out.contains(" 0 different"),
            "{out}"
        );
    }
    let (out, _) = yard.ok(&["replay", &ids[0][..12], "--until", "0", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (
            &json["same"],
            &json["episode_id"],
            json["calls"].as_array().unwrap().len()
        ),
        (&Value::from(true), &Value::from(ids[0].as_str()), 1)
    );
    yard.fails(&["replay", "nothing"], 20, &["nothing", "episode_outcomes"]);
    yard.fails(&["branch", &ids[0], "--at", "7"], 2, &["rollout.max_steps"]);
    // What was submitted is over, and nothing lies behind its end.
    yard.fails(
        &["branch", &ids[0], "--at", "3"],
        12,
        &["submitted", "hint: leave it at step 2"],
    );
    yard.fails(&["branch", &ids[0], "--at", "4"], 12, &["it has 3 steps"]);
    let episodes = yard.rows("SELECT count(*) AS n FROM episodes");
    assert_eq!(episodes[0]["n"], 14, "a refused branch made episodes");

    let (out, _) = yard.ok(&["branch", &ids[0], "--at", "1", "--n", "3"]);
    assert!(out.contains("3 episodes from step 1"), "{out}");
    let branched = yard.rows(
        "SELECT parent_episode_id AS parent, count(*) AS n, count(DISTINCT group_id) AS groups, min(n_steps) AS steps FROM episodes
         WHERE parent_episode_id IS NOT NULL GROUP BY parent_episode_id",
    );
    assert_eq!(branched.len(), 1);
    let row = &branched[0];
    assert_eq!(row["parent"], Value::from(ids[0].as_str()));
    assert_eq!(
        (&row["n"], &row["groups"], &row["steps"]),
        (&Value::from(3), &Value::from(1), &Value::from(3))
    );
    let shared = yard.rows(
        "SELECT count(*) AS n FROM episodes p JOIN episodes b ON p.group_id = b.group_id WHERE p.parent_episode_id IS NULL AND b.parent_episode_id IS NOT NULL",
    );
    assert_eq!(shared[0]["n"], 0, "a branch is in its parent's group");
    let (out, err) = yard.ok(&["branch", &ids[0], "--at", "1", "--n", "3"]);
    assert!(out.contains("3 of them were in the lake already"), "{out}");
    assert!(err.contains("nothing to redo"), "{err}");
    let (out, _) = yard.ok(&["branch", &ids[0], "--at", "1", "--n", "4"]);
    assert!(out.contains("3 of them were in the lake already"), "{out}");
}

/// A branch run has a record like any other: its settings are known, and its parent's are where the task came from.
#[test]
fn a_branch_is_replayed_without_the_settings_it_was_made_with() {
    let yard = Yard::new(&["policy.kind=expert", "tasks.train=2", "tasks.samples=1"]);
    yard.ok(&["--set", "seed=3", "rollout"]);
    let parent = yard.rows("SELECT episode_id FROM episodes")[0]["episode_id"].clone();
    let parent = parent.as_str().unwrap();
    yard.ok(&["branch", parent, "--at", "1", "--n", "1"]);
    let branched = "SELECT episode_id FROM episodes WHERE parent_episode_id IS NOT NULL";
    let first = yard.rows(branched)[0]["episode_id"].clone();
    let (out, err) = yard.ok(&["replay", first.as_str().unwrap()]);
    assert!(out.contains(" 0 different"), "{out}");
    assert!(!err.contains("no record"), "{err}");
    let records = yard.rows("SELECT status, pipeline FROM runs WHERE stage = 'branch'");
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!(records[0]["status"], "succeeded");
    // A branch of the branch still is about the first one's task.
    yard.ok(&["branch", first.as_str().unwrap(), "--at", "2", "--n", "1"]);
    let second = format!(
        "SELECT episode_id FROM episodes WHERE parent_episode_id = {}",
        first.to_string().replace('"', "'")
    );
    let second = yard.rows(&second)[0]["episode_id"].clone();
    yard.ok(&["replay", second.as_str().unwrap()]);
}

/// Branches are judged like other episodes; what is learnt from is the rollout alone.
#[test]
fn branches_are_judged_and_not_learnt_from() {
    let yard = Yard::new(&["policy.kind=expert", "tasks.train=6", "tasks.samples=4"]);
    yard.ok(&["rollout"]);
    let groups =
        "SELECT episode_id, group_id, n_total, baseline FROM latest_advantages ORDER BY episode_id";
    yard.ok(&["credit"]);
    let before = yard.rows(groups);
    assert!(!before.is_empty());
    let failed = yard.rows("SELECT episode_id FROM episode_outcomes WHERE NOT success LIMIT 1");
    let parent = failed[0]["episode_id"].as_str().unwrap();
    yard.ok(&["branch", parent, "--at", "1", "--n", "5"]);
    let judged = "SELECT count(*) AS n, count(s.quality) AS scored FROM episodes e
        LEFT JOIN latest_scores s ON e.episode_id = s.episode_id WHERE e.parent_episode_id IS NOT NULL";
    assert_eq!(yard.rows(judged)[0]["scored"], 0);
    let (_, err) = yard.ok(&["qa"]);
    assert!(err.contains("5 episodes"), "{err}");
    let row = &yard.rows(judged)[0];
    assert_eq!(
        (&row["n"], &row["scored"]),
        (&Value::from(5), &Value::from(5))
    );
    // Branches of more than one place, and QA with another setting: all of them again.
    yard.ok(&["branch", parent, "--at", "0", "--n", "2"]);
    yard.ok(&["--set", "qa.block_above=0.9", "qa"]);
    let row = &yard.rows(judged)[0];
    assert_eq!(
        (&row["n"], &row["scored"]),
        (&Value::from(7), &Value::from(7))
    );

    let (_, err) = yard.ok(&["--set", "qa.block_above=0.9", "credit"]);
    assert!(err.contains("groups:"), "{err}");
    let mixed = yard.rows(
        "SELECT count(*) AS n FROM raw.advantages a JOIN episodes e ON a.episode_id = e.episode_id WHERE e.parent_episode_id IS NOT NULL",
    );
    assert_eq!(mixed[0]["n"], 0, "credit took branches in");
    let paired = yard.rows(
        "SELECT count(*) AS n FROM raw.pairs p JOIN episodes e ON p.chosen_episode_id = e.episode_id OR p.rejected_episode_id = e.episode_id WHERE e.parent_episode_id IS NOT NULL",
    );
    assert_eq!(paired[0]["n"], 0, "pairs have branches");
    assert_eq!(yard.rows(groups), before, "a baseline has moved");
    let (_, err) = yard.ok(&["rollout"]);
    assert!(err.contains("nothing to redo"), "{err}");
}

/// What a model wrote is shown to people, and tells their terminal nothing.
#[test]
fn what_a_model_wrote_gives_a_terminal_no_orders() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let nasty = "printf '\u{9b}2J\u{202e}'; date +%N > 'a\u{1b}[2Jb'";
    let endpoint = runtime
        .block_on(FakeEndpoint::start(move |request| match request.turn {
            0 => Answer::call("execute_shell", &json!({ "command": nasty })),
            _ => Answer::call("submit", &json!({ "answer": "\u{1b}]0;done\u{7}" })),
        }))
        .unwrap();
    let (yard, id) = one_episode(&endpoint);
    let output = yard.run(&["replay", &id]);
    assert_eq!(output.status.code(), Some(13));
    let (told, _) = yard.ok(&["sql", "SELECT arguments, stdout FROM tool_calls"]);
    for text in [texts(&output).0, texts(&output).1, told] {
        let orders = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!text.contains(orders), "{text:?}");
        assert!(text.is_empty() || text.contains("\\u{"), "{text}");
    }
    // Programs get it as it is.
    let (csv, _) = yard.ok(&["sql", "--format", "csv", "SELECT stdout FROM tool_calls"]);
    assert!(csv.contains('\u{202e}'), "{csv}");
}

/// With faults in evaluations the card shows what they cost each policy.
#[test]
fn the_card_shows_what_faults_cost_in_the_evaluation() {
    let yard = Yard::new(&[
        "policy.kind=expert",
        "tasks.train=14",
        "tasks.samples=4",
        "train.method=rejection_sampling",
        "train.epochs=1",
        "eval.tasks=14",
        "eval.unseen_tasks=1",
        "faults.permission_denied=0.3",
        "faults.in_evaluation=true",
    ]);
    yard.ok(&["rollout"]);
    yard.ok(&["qa"]);
    let (card, _) = yard.ok(&["train"]);
    let of_policies = card.split("held-out tasks,").nth(1).unwrap();
    for line in [
        "success without faults",
        "success with faults",
        "· permission denied",
    ] {
        let line = of_policies.lines().find(|text| text.contains(line));
        let figures = line.unwrap_or_default().matches(" of ").count();
        assert_eq!(figures, 2, "base and candidate:\n{card}");
    }
}

/// An episode whose second call prints what is drawn anew each time.
#[test]
fn a_replay_that_differs_says_where() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let endpoint = runtime
        .block_on(FakeEndpoint::start(|request| match request.turn {
            0 => Answer::call("execute_shell", &json!({ "command": "date; ls -l" })),
            1 => Answer::call(
                "execute_shell",
                &json!({ "command": "head -c 8 /dev/urandom | od -An -tx1 | tee drawn" }),
            ),
            _ => Answer::call("submit", &json!({})),
        }))
        .unwrap();
    let (yard, id) = one_episode(&endpoint);
    yard.ok(&["replay", &id, "--until", "0"]);
    let output = yard.run(&["replay", &id]);
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(13), "{out}\n{err}");
    for word in [
        "step 1 call 0 execute_shell",
        "DIFFERS",
        "stdout: recorded",
        "file drawn: recorded created",
        "1 different",
    ] {
        assert!(out.contains(word), "no '{word}' in:\n{out}");
    }
    let (out, _) = yard.ok(&["branch", &id, "--at", "1", "--n", "2"]);
    assert!(out.contains("2 episodes from step 1"), "{out}");
    // What was kept of its files brings back what no second run would.
    let (out, err) = yard.ok(&["branch", &id, "--at", "2", "--n", "2"]);
    assert!(out.contains("2 episodes from step 2"), "{out}");
    assert!(!err.contains("run again"), "{err}");
    std::fs::remove_dir_all(yard.dir.path().join("yard/artifacts")).unwrap();
    yard.fails(
        &["branch", &id, "--at", "2", "--n", "3"],
        12,
        &["run again", "step 2", "earlier step"],
    );
}

/// An episode that a fixed endpoint made, replayed in a yard of which something has changed.
#[test]
fn a_record_opens_no_door_that_is_shut_today() {
    let yard = Yard::new(&["policy.kind=expert", "tasks.train=1", "tasks.samples=1"]);
    let reach = "sandbox.network=[\"example.org:443\"]";
    yard.ok(&["--set", reach, "rollout"]);
    let id = yard.rows("SELECT episode_id FROM episodes")[0]["episode_id"].clone();
    let id = id.as_str().unwrap();
    let (_, err) = yard.ok(&["replay", id]);
    assert!(err.contains("could reach example.org:443"), "{err}");
    let (_, err) = yard.ok(&["--set", reach, "replay", id]);
    assert!(!err.contains("could reach"), "{err}");
    let wider = "sandbox.network=[\"*.example.org:443\", \"example.org\"]";
    let (_, err) = yard.ok(&["--set", wider, "replay", id]);
    assert!(!err.contains("could reach"), "{err}");
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
        &["--set", "faults.slow=2", "rollout"],
        2,
        &["faults.slow", "between 0 and 1"],
    );
    yard.fails(
        &[
            "--set",
            "faults.slow={ rate = 1, tools = [\"sleep\"] }",
            "rollout",
        ],
        2,
        &["faults.slow.tools", "sleep", "execute_shell"],
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
fn limits_that_do_not_hold_are_refused_where_they_must() {
    // One that is not set holds nowhere. Whether one on disk traffic does where it is set is the host's to say.
    let yard = Yard::new(&["tasks.train=2", "tasks.samples=1", "policy.kind=expert"]);
    let unset = ["--set", "sandbox.require_limits=[\"files\", \"io rate\"]"];
    let unknown = ["--set", "sandbox.require_limits=[\"disc\"]"];
    let all = ["--require-limits", "--set", "sandbox.limits.io_mib_s=1"];
    let (limits, _) = yard.ok(&["--set", all[2], "limits"]);
    let io_rate = limits.lines().find(|line| line.contains("io rate"));
    let io_is_limited = !io_rate.unwrap().contains("DOESN'T");
    if io_is_limited {
        eprintln!("SKIPPED a part: this host limits disk traffic too");
    }
    let are_refused = |verb: &[&str]| {
        let with = |options: &[&'static str]| -> Vec<String> {
            let all = options.iter().chain(verb);
            all.map(|word| (*word).to_owned()).collect()
        };
        let mut cases = vec![
            (with(&unset), 12, ["io rate", "way out"]),
            (with(&unknown), 2, ["disc", "processes"]),
        ];
        if !io_is_limited {
            cases.push((with(&all), 12, ["io rate", "way out"]));
        }
        for (arguments, code, words) in &cases {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            yard.fails(&arguments, *code, words);
        }
    };
    for verb in ["rollout", "limits", "bench"] {
        are_refused(&[verb]);
    }
    let count = || yard.rows("SELECT count(*) AS n FROM episodes")[0]["n"].clone();
    assert_eq!(count(), 0, "nothing was run");
    yard.ok(&[
        "--set",
        "sandbox.require_limits=[\"wall time\", \"files\"]",
        "--set",
        all[2],
        "rollout",
    ]);
    // Recorded calls are calls too, and what follows a branch as well.
    let id = yard.rows("SELECT episode_id FROM episodes")[0]["episode_id"].clone();
    let id = id.as_str().unwrap();
    let before = count();
    if !io_is_limited {
        let without = ["--set", "sandbox.limits.io_mib_s=0"];
        let refused = ["io rate", "way out"];
        yard.fails(
            &[&without[..], &["--require-limits", "replay", id]].concat(),
            12,
            &refused,
        );
        are_refused(&["branch", id, "--at", "1", "--n", "1"]);
    }
    yard.fails(&[&unknown[..], &["replay", id]].concat(), 2, &["disc"]);
    yard.fails(
        &[&unknown[..], &["branch", id, "--at", "1"]].concat(),
        2,
        &["disc"],
    );
    assert_eq!(count(), before, "something was run");
    yard.ok(&["replay", id]);
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
