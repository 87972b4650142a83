//! Imports of the small hand-written files in `fixtures/`, of damaged copies of them, and of public files where they are present.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_interop::{
    Format, ImportOptions, Imported, InteropError, export, import, write_problems,
};
use drillyard_lake::EpisodeBundle;
use drillyard_schema::table::Timestamp;

fn fixtures() -> Utf8PathBuf {
    Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn options() -> ImportOptions {
    ImportOptions {
        run_id: "imported-0".into(),
        run_date: "2026-01-02".to_owned(),
        imported_at: Timestamp(1_767_312_000_000_000),
        format: None,
        policy: None,
    }
}

fn read(path: &Utf8Path) -> (Vec<EpisodeBundle>, Imported) {
    let mut imported = import(path, options()).unwrap();
    let bundles = imported.by_ref().collect();
    (bundles, imported)
}

fn fixture(name: &str) -> (Vec<EpisodeBundle>, Imported) {
    read(&fixtures().join(name))
}

fn rewards(bundle: &EpisodeBundle, component: &str) -> Vec<f64> {
    bundle
        .rewards
        .iter()
        .filter(|r| r.component == component)
        .map(|r| r.value)
        .collect()
}

#[test]
fn intercode_sql_turns_become_steps_and_calls() {
    let (bundles, imported) = fixture("ic_sql_multiturn_small-model_5_turns.json");
    assert_eq!(bundles.len(), 3);
    assert!(imported.problems().is_empty());

    let first = &bundles[0];
    assert_eq!(first.episode.policy, "small-model");
    assert_eq!(first.episode.purpose, "import");
    assert!(first.episode.evaluation_set && first.task.evaluation_set);
    assert_eq!(first.task.task_set, "intercode_sql");
    assert_eq!(first.task.family, "dev_spider");
    assert_eq!(first.task.difficulty, Some(1));
    assert_eq!((first.episode.n_steps, first.episode.n_tool_calls), (3, 3));
    let outcomes: Vec<_> = first
        .tool_calls
        .iter()
        .map(|c| c.outcome.as_str())
        .collect();
    assert_eq!(outcomes, ["error", "ok", "ok"]);
    assert_eq!(
        first.tool_calls[0].arguments,
        r#"{"query":"SELECT COUNT(*) FROM lamp"}"#
    );
    assert!(
        first.tool_calls[0]
            .stderr
            .starts_with("Error executing query")
    );
    let roles: Vec<_> = first.messages.iter().map(|m| m.role.as_str()).collect();
    assert_eq!(
        roles,
        [
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "assistant",
            "tool"
        ]
    );
    assert_eq!(first.verdicts[0].kind, "recorded");
    assert_eq!(first.verdicts[0].success, Some(true));
    assert!(first.tokens.is_empty(), "no log-probabilities are made up");
}

#[test]
fn intercode_rewards_are_the_largest_with_the_last_kept() {
    let (bundles, _) = fixture("ic_sql_multiturn_small-model_5_turns.json");
    let second = &bundles[1];
    assert_eq!(rewards(second, "outcome"), [0.5]);
    assert_eq!(rewards(second, "last_reward"), [0.33]);
    assert_eq!(rewards(second, "turn_reward"), [0.0, 0.33, 0.5, 0.33, 0.33]);
    assert_eq!(second.verdicts[0].success, Some(false));
    assert_eq!(second.episode.end_reason, "step_limit");

    let statuses: Vec<_> = second
        .steps
        .iter()
        .map(|s| s.parse_status.as_str())
        .collect();
    assert_eq!(statuses, ["error", "repaired", "ok", "ok", "ok"]);
    assert_eq!(second.steps[0].n_calls, 0);
    let hashes: Vec<_> = second
        .tool_calls
        .iter()
        .map(|c| c.call_hash.as_str())
        .collect();
    assert_eq!(hashes[2], hashes[3], "the same query again");
    assert_eq!(hashes[0], hashes[2], "also within a fence");
    assert_ne!(hashes[1], hashes[2]);
}

#[test]
fn thoughts_are_reasoning_and_another_policy_revision() {
    let (bundles, _) = fixture("ic_sql_multiturn_small-model_5_turns.json");
    assert!(
        bundles[2].steps[0]
            .reasoning
            .as_deref()
            .unwrap()
            .contains("lumen")
    );
    assert_eq!(bundles[2].episode.policy_revision, "react");
    assert_eq!(bundles[0].episode.policy_revision, "multiturn");
}

#[test]
fn a_withheld_reply_is_infrastructure() {
    let (bundles, imported) = fixture("ic_bash_multiturn_other-model_4_turns.json");
    assert_eq!(bundles.len(), 2);
    let blocked = &bundles[0].episode;
    assert_eq!(blocked.status, "infrastructure");
    assert_eq!(blocked.end_reason, "endpoint_fault");
    assert!(blocked.infrastructure_cause.is_some());
    assert_eq!((blocked.n_steps, blocked.n_tool_calls), (2, 1));
    let submitted = &bundles[1];
    assert_eq!(submitted.episode.end_reason, "submitted");
    assert!(
        submitted
            .episode
            .extras
            .as_deref()
            .unwrap()
            .contains("answer_similarity")
    );

    let problem = &imported.problems()[0];
    assert_eq!(problem.record.as_deref(), Some("2"));
    assert!(
        problem.reason.contains("3 actions and 2 rewards"),
        "{problem:?}"
    );
}

#[test]
fn tau_bench_trials_form_a_group() {
    let (bundles, imported) = fixture("tiny-model-airline.json");
    assert_eq!(bundles.len(), 4);
    assert_eq!(imported.files()[0].records, 5);
    let (won, lost) = (&bundles[0], &bundles[1]);
    assert_eq!(won.episode.group_id, lost.episode.group_id);
    assert_ne!(won.episode.episode_id, lost.episode.episode_id);
    assert_ne!(won.episode.group_id, bundles[2].episode.group_id);
    assert_eq!(
        (won.episode.sample_index, lost.episode.sample_index),
        (0, 1)
    );
    assert_eq!(won.episode.policy, "tiny-model");
    assert_eq!(won.task.family, "airline");
    assert_eq!(rewards(won, "outcome"), [1.0]);
    assert_eq!(rewards(won, "r_actions"), [1.0]);
    assert_eq!(rewards(lost, "r_outputs"), [0.0]);
    assert_eq!(
        won.episode.n_steps, 4,
        "one step for each assistant message"
    );
    assert_eq!(won.tool_calls.len(), 2);
    let steps: Vec<_> = won.messages.iter().map(|m| m.step_index).collect();
    assert_eq!(
        steps,
        [
            None,
            None,
            Some(0),
            Some(0),
            Some(1),
            None,
            Some(2),
            Some(2),
            Some(3),
            None
        ]
    );
    assert_eq!(lost.tool_calls[0].outcome, "error");
    assert_eq!(bundles[2].task.difficulty, Some(3));
}

#[test]
fn tau_bench_ends_are_told_apart() {
    let (bundles, imported) = fixture("tiny-model-airline.json");
    let cut_off = &bundles[2];
    assert_eq!(cut_off.episode.end_reason, "step_limit");
    assert_eq!(cut_off.tool_calls[0].outcome, "outcome_unknown");
    assert!(
        !cut_off.tool_calls[0].schema_ok,
        "its arguments are cut off"
    );
    let failed = &bundles[3];
    assert_eq!(failed.episode.status, "infrastructure");
    assert_eq!(
        failed.episode.infrastructure_cause.as_deref(),
        Some("rate limit exceeded")
    );
    assert!(failed.verdicts.is_empty(), "infrastructure is not judged");
    assert_eq!(imported.problems().len(), 1);
    assert_eq!(imported.problems()[0].record.as_deref(), Some("4"));
}

#[test]
fn exporting_an_import_gives_the_file_back() {
    let file = fixtures().join("tiny-model-airline.json");
    let (bundles, _) = read(&file);
    let recorded: serde_json::Value =
        serde_json::from_slice(&fs_err::read(&file).unwrap()).unwrap();
    let good = &recorded.as_array().unwrap()[..4];
    let exported = export::tau_bench(&bundles).unwrap();
    assert_eq!(exported.as_array().unwrap(), good);

    let folder = tempfile::tempdir().unwrap();
    let copy = Utf8Path::from_path(folder.path())
        .unwrap()
        .join("tiny-model-airline.json");
    fs_err::write(&copy, exported.to_string()).unwrap();
    let (again, _) = read(&copy);
    for (before, after) in bundles.iter().zip(&again) {
        assert_eq!(before.messages, after.messages);
        assert_eq!(before.tool_calls, after.tool_calls);
        assert_eq!(before.episode.episode_id, after.episode.episode_id);
    }
}

#[test]
fn a_folder_is_read_whole_and_copies_are_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let folder = Utf8Path::from_path(folder.path()).unwrap();
    fs_err::create_dir(folder.join("deeper")).unwrap();
    for name in [
        "ic_sql_multiturn_small-model_5_turns.json",
        "tiny-model-airline.json",
    ] {
        fs_err::copy(fixtures().join(name), folder.join("deeper").join(name)).unwrap();
    }
    let copy = folder.join("ic_sql_multiturn_small-model_5_turns_copy.json");
    fs_err::copy(
        fixtures().join("ic_sql_multiturn_small-model_5_turns.json"),
        copy,
    )
    .unwrap();
    fs_err::write(folder.join("other.json"), "{\"a\": 1}").unwrap();
    fs_err::write(folder.join("LICENSE.md"), "text").unwrap();

    let (bundles, imported) = read(folder);
    assert_eq!(bundles.len(), 3 + 4);
    let ids: BTreeSet<_> = bundles.iter().map(|b| &b.episode.episode_id).collect();
    assert_eq!(ids.len(), bundles.len());
    let copies = imported
        .problems()
        .iter()
        .filter(|p| p.reason.contains("same policy"))
        .count();
    assert_eq!(copies, 3);
    assert!(
        imported
            .problems()
            .iter()
            .any(|p| p.record.is_none() && p.file.ends_with("other.json"))
    );

    let mut lines = Vec::new();
    write_problems(imported.problems(), &mut lines).unwrap();
    let lines = String::from_utf8(lines).unwrap();
    assert_eq!(lines.lines().count(), imported.problems().len());
    for line in lines.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(value["file"].is_string() && value["reason"].is_string());
    }
}

/// Cuts a file at every 97th byte: nothing panics, no whole record before the cut is lost, and the cut is told.
#[test]
fn a_file_cut_off_anywhere_keeps_what_was_whole() {
    for name in [
        "ic_sql_multiturn_small-model_5_turns.json",
        "tiny-model-airline.json",
    ] {
        let bytes = fs_err::read(fixtures().join(name)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let copy = Utf8Path::from_path(folder.path()).unwrap().join(name);
        let (whole, _) = fixture(name);
        let mut most = 0;
        for end in (0..bytes.len() - 2).step_by(97).chain([bytes.len() - 2]) {
            fs_err::write(&copy, &bytes[..end]).unwrap();
            let opts = ImportOptions {
                format: Some(if name.starts_with("ic_") {
                    Format::InterCode
                } else {
                    Format::TauBench
                }),
                ..options()
            };
            let mut imported = import(&copy, opts).unwrap();
            let bundles: Vec<_> = imported.by_ref().collect();
            assert!(!imported.problems().is_empty(), "cut at {end}");
            assert!(bundles.len() >= most, "cut at {end}");
            most = bundles.len();
            for (got, expected) in bundles.iter().zip(&whole) {
                assert_eq!(got.messages, expected.messages);
            }
        }
        assert_eq!(most, whole.len());
    }
}

#[test]
fn one_damaged_byte_costs_at_most_its_own_record() {
    let name = "ic_sql_multiturn_small-model_5_turns.json";
    let bytes = fs_err::read(fixtures().join(name)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let copy = Utf8Path::from_path(folder.path()).unwrap().join(name);
    let (whole, _) = fixture(name);
    for at in (5..bytes.len() - 5).step_by(31) {
        for damage in *b"}\"[\xff" {
            let mut damaged = bytes.clone();
            damaged[at] = damage;
            fs_err::write(&copy, &damaged).unwrap();
            let opts = ImportOptions {
                format: Some(Format::InterCode),
                ..options()
            };
            let kept = import(&copy, opts).unwrap().count();
            assert!(
                kept >= whole.len() - 1,
                "byte {at} as {damage:?}: {kept} kept"
            );
        }
    }
}

#[test]
fn what_cannot_be_read_at_all_says_why() {
    let missing = import(Utf8Path::new("/nonexistent/file.json"), options()).unwrap_err();
    assert!(matches!(missing, InteropError::Read { .. }), "{missing}");
    let folder = tempfile::tempdir().unwrap();
    let folder = Utf8Path::from_path(folder.path()).unwrap();
    assert!(matches!(
        import(folder, options()).unwrap_err(),
        InteropError::Empty { .. }
    ));
    let file = folder.join("a.json");
    fs_err::write(&file, "[1, 2]").unwrap();
    let unknown = import(&file, options()).unwrap_err().to_string();
    assert!(unknown.contains("intercode, tau_bench"), "{unknown}");
    let forced = ImportOptions {
        format: Some("tau_bench".parse().unwrap()),
        ..options()
    };
    let mut imported = import(&file, forced).unwrap();
    assert_eq!(imported.by_ref().count(), 0);
    assert_eq!(imported.problems().len(), 2);
}

#[test]
fn the_policy_may_be_named_by_the_caller() {
    let named = ImportOptions {
        policy: Some("mine".to_owned()),
        ..options()
    };
    let file = fixtures().join("tiny-model-airline.json");
    assert!(
        import(&file, named)
            .unwrap()
            .all(|b| b.episode.policy == "mine")
    );
}

struct Figures {
    episodes: usize,
    success: f64,
    mean_reward: f64,
    mean_turns: f64,
    last_differs: usize,
}

#[expect(clippy::float_cmp, reason = "both are read as they were written")]
fn figures(path: &Utf8Path) -> (Vec<EpisodeBundle>, Figures) {
    let (bundles, imported) = read(path);
    assert!(
        imported.problems().is_empty(),
        "{path}: {:?}",
        imported.problems()
    );
    let n = bundles.len() as f64;
    let figures = Figures {
        episodes: bundles.len(),
        success: bundles
            .iter()
            .filter(|b| rewards(b, "outcome")[0] >= 1.0)
            .count() as f64
            / n,
        mean_reward: bundles
            .iter()
            .map(|b| rewards(b, "outcome")[0])
            .sum::<f64>()
            / n,
        mean_turns: bundles
            .iter()
            .map(|b| f64::from(b.episode.n_steps))
            .sum::<f64>()
            / n,
        last_differs: bundles
            .iter()
            .filter(|b| {
                rewards(b, "last_reward")
                    .first()
                    .is_some_and(|l| *l != rewards(b, "outcome")[0])
            })
            .count(),
    };
    (bundles, figures)
}

/// Figures of the public files as they were counted independently from the JSON itself (the sets lie there in part: 520 of the
/// 1034 Spider questions, 25 of tau-bench's 50 airline tasks).
#[test]
fn public_files_import_with_their_known_figures() {
    let Some(corpus) = std::env::var("DRILLYARD_CORPUS")
        .ok()
        .map(Utf8PathBuf::from)
    else {
        println!(
            "skipped: set DRILLYARD_CORPUS to a folder with intercode/ and tau_bench/ to import public files"
        );
        return;
    };
    let close = |a: f64, b: f64| (a - b).abs() < 5e-4;

    for (file, episodes, success, reward, last_differs) in [
        (
            "sql/gpt-4/ic_sql_multiturn_gpt-4_10_turns.json",
            520,
            0.75,
            0.7651,
            5,
        ),
        (
            "sql/text-davinci-003/ic_sql_multiturn_text-davinci-003_10_turns.json",
            520,
            0.1692,
            0.1709,
            1,
        ),
        (
            "bash/gpt-4/ic_bash_multiturn_gpt-4_10_turns_fs_1.json",
            60,
            0.4167,
            0.8228,
            8,
        ),
        (
            "bash/gpt-4/ic_bash_multiturn_gpt-4_10_turns_fs_3.json",
            60,
            0.5167,
            0.8585,
            8,
        ),
        (
            "bash/chat-bison-001/ic_bash_multiturn_chat-bison-001_10_turns_fs_1.json",
            58,
            0.1379,
            0.6988,
            43,
        ),
        (
            "bash/chat-bison-001/ic_bash_multiturn_chat-bison-001_10_turns_fs_3.json",
            60,
            0.1833,
            0.7422,
            39,
        ),
    ] {
        let (_, got) = figures(&corpus.join("intercode").join(file));
        println!(
            "{file}: {} episodes, success {:.4}, mean reward {:.4}, mean turns {:.2}",
            got.episodes, got.success, got.mean_reward, got.mean_turns
        );
        assert_eq!(
            (got.episodes, got.last_differs),
            (episodes, last_differs),
            "{file}"
        );
        assert!(
            close(got.success, success) && close(got.mean_reward, reward),
            "{file}"
        );
    }

    let (bundles, got) = figures(&corpus.join("tau_bench/gpt-4o-airline.json"));
    let mut groups: BTreeMap<_, BTreeSet<bool>> = BTreeMap::new();
    for bundle in &bundles {
        let success = bundle.verdicts[0].success.unwrap();
        groups
            .entry(&bundle.episode.group_id)
            .or_default()
            .insert(success);
    }
    let mixed = groups
        .values()
        .filter(|outcomes| outcomes.len() == 2)
        .count();
    let calls: usize = bundles.iter().map(|b| b.tool_calls.len()).sum();
    println!(
        "tau-bench: {} episodes, mean reward {:.3}, {mixed} of {} groups mixed, {calls} calls",
        got.episodes,
        got.mean_reward,
        groups.len()
    );
    assert_eq!(
        (got.episodes, groups.len(), mixed, calls),
        (100, 25, 11, 621)
    );
    assert!(close(got.mean_reward, 0.31));

    let recorded: serde_json::Value = serde_json::from_slice(
        &fs_err::read(corpus.join("tau_bench/gpt-4o-airline.json")).unwrap(),
    )
    .unwrap();
    assert_eq!(
        export::tau_bench(&bundles).unwrap(),
        recorded,
        "exported as it was"
    );

    let (all, _) = figures(&corpus.join("intercode"));
    assert_eq!(all.len(), 520 + 520 + 60 + 60 + 58 + 60);
}
