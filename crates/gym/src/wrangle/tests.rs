//! The promises of the task set, checked over random seeds: the right command verifies, the mistake runs and does not.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::names::grammar;

const SPLITS: [Split; 3] = [Split::Train, Split::Validation, Split::HeldOut];

/// Lays out the task's files, runs the command as an agent would, and gives back exit code and outputs.
fn run(task: &Task, command: &str) -> (Option<i32>, BTreeMap<String, Vec<u8>>) {
    let dir = tempfile::tempdir().unwrap();
    for (path, content) in Wrangle.setup_files(task).unwrap() {
        fs_err::write(dir.path().join(path), content).unwrap();
    }
    let output = Command::new("sh")
        .args(["-c", command])
        .current_dir(dir.path())
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("LANG", "C.UTF-8")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.is_empty(), "{command}: {stderr}");
    let files = Wrangle
        .outputs(task)
        .into_iter()
        .filter_map(|path| Some((path.clone(), fs_err::read(dir.path().join(path)).ok()?)))
        .collect();
    (output.status.code(), files)
}

fn check(op: Op, split: Split, seed: u64) {
    let (task, _) = instance(op, split, seed);
    let plan = Plan::of(&task).unwrap();
    let (right, mistake) = (commands::right(&plan), commands::mistake(&plan));
    assert!(task.instruction.is_ascii() && right.is_ascii() && mistake.is_ascii());
    assert!(!right.contains(['"', '\\']) && !mistake.contains(['"', '\\']));

    let (code, files) = run(&task, &right);
    let verified = Wrangle.verify(&task, &files, None);
    assert_eq!(code, Some(0), "{right}");
    assert!(verified.success, "{right}: {} {:?}", verified.detail, task);
    assert!((verified.score - 1.0).abs() < f64::EPSILON);
    assert_eq!(
        verified.milestones,
        ["output_exists", "output_parses", "content_right"]
    );

    let (code, files) = run(&task, &mistake);
    let verified = Wrangle.verify(&task, &files, None);
    assert_eq!(code, Some(0), "{mistake}");
    assert!(!verified.success, "{mistake}: {task:?}");
    assert!((0.0..1.0).contains(&verified.score));
    assert_eq!(verified.fault, None);
    assert!(verified.milestones.contains(&"output_exists".to_owned()));
}

macro_rules! commands_do_what_they_claim {
    ($($name:ident $op:ident,)*) => {
        mod commands_do_what_they_claim {
            use super::*;

            $(proptest! {
                #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

                #[test]
                fn $name(seed: u64, split in prop::sample::select(&SPLITS[..])) {
                    check(Op::$op, split, seed);
                }
            })*

            #[test]
            fn every_family_is_checked() {
                assert_eq!([$(Op::$op),*].as_slice(), Op::ALL);
            }
        }
    };
}

commands_do_what_they_claim! {
    filter_above FilterAbove,
    filter_at_most FilterAtMost,
    count_rows CountRows,
    mean Mean,
    largest Largest,
    sort_rows SortRows,
    dedupe Dedupe,
    rename_column RenameColumn,
    join Join,
    convert Convert,
    extract_column ExtractColumn,
    fill_empty FillEmpty,
    sum_for_key SumForKey,
    column_to_line ColumnToLine,
    count_above CountAbove,
    smallest Smallest,
}

#[test]
fn families_are_named_once_and_two_are_never_trained_on() {
    let names: BTreeSet<_> = FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(names.len(), FAMILIES.len());
    assert_eq!(FAMILIES.iter().filter(|family| family.unseen).count(), 2);
    for split in SPLITS {
        let tasks = Wrangle.generate(split, 64, 5);
        let unseen = tasks.iter().filter(|task| task.unseen_family).count();
        assert_eq!(unseen, if split == Split::HeldOut { 8 } else { 0 });
    }
}

#[test]
fn generation_repeats_and_a_shorter_list_is_the_start_of_a_longer_one() {
    for split in SPLITS {
        let tasks = Wrangle.generate(split, 100, 11);
        assert_eq!(tasks, Wrangle.generate(split, 100, 11));
        assert_eq!(tasks[..40], Wrangle.generate(split, 40, 11)[..]);
        assert_ne!(tasks, Wrangle.generate(split, 100, 12));
    }
}

#[test]
fn the_generator_gives_what_it_always_gave() {
    // A change here means other tasks under the same ids: raise the set's version and write the new value down.
    let tasks = Wrangle.generate(Split::Train, 200, 1);
    let text = serde_json::to_string(&tasks).unwrap();
    assert_eq!(
        blake3::hash(text.as_bytes()).to_hex()[..16],
        *"c9b2bc2104e4a1bb"
    );
}

#[test]
fn splits_share_no_instance_and_no_id() {
    let mut contents = BTreeMap::new();
    let mut ids = BTreeSet::new();
    for split in SPLITS {
        for seed in 0..4 {
            for task in Wrangle.generate(split, 800, seed) {
                let files: Vec<(String, String)> = task
                    .setup
                    .iter()
                    .map(|file| (file.path.clone(), format!("{:?}", file.content)))
                    .collect();
                let content = (task.instruction.clone(), files);
                assert_eq!(*contents.entry(content).or_insert(split), split);
                assert!(ids.insert(task.task_id));
            }
        }
    }
}

#[test]
fn the_train_split_never_uses_a_held_out_name() {
    let held_out: BTreeSet<&str> = grammar().held_out().iter().map(String::as_str).collect();
    let names_of = |split: Split| -> (usize, usize) {
        let (mut unseen, mut all) = (0, 0);
        for task in Wrangle.generate(split, 800, 3) {
            let mut text = task.instruction.clone();
            for file in &task.setup {
                let _ = write!(text, " {} {:?}", file.path, file.content);
            }
            // `\n` in the debug text would glue an n to the next word.
            let text = text.replace("\\n", " ");
            for word in text.split(|c: char| !c.is_ascii_lowercase()) {
                unseen += usize::from(held_out.contains(word));
                all += usize::from(
                    held_out.contains(word) || grammar().common().iter().any(|n| n == word),
                );
            }
        }
        (unseen, all)
    };
    assert_eq!(names_of(Split::Train).0, 0);
    let (unseen, all) = names_of(Split::HeldOut);
    let share = unseen as f64 / all as f64;
    assert!((0.4..0.6).contains(&share), "{share}");
}

#[test]
fn no_word_of_the_instructions_can_be_mistaken_for_a_name() {
    let names: BTreeSet<&str> = [grammar().common(), grammar().held_out()]
        .concat()
        .iter()
        .map(|name| &*name.clone().leak())
        .collect();
    for op in Op::ALL {
        for seed in 0..20 {
            let (task, _) = instance(*op, Split::Train, seed);
            let mut own = vec![task.verifier.to_string()];
            own.extend(task.setup.iter().map(|file| format!("{:?}", file.content)));
            for word in task.instruction.split(|c: char| !c.is_ascii_lowercase()) {
                assert!(
                    !names.contains(word) || own.iter().any(|text| text.contains(word)),
                    "{word} in {}",
                    task.instruction
                );
            }
        }
    }
}

#[test]
fn the_expert_looks_acts_and_submits_and_errs_at_the_rate_asked_for() {
    let tasks = Wrangle.generate(Split::Train, 14, 9);
    let mut mistakes = 0;
    for task in &tasks {
        let plan = Plan::of(task).unwrap();
        for seed in 0..100 {
            let turns = Wrangle.expert(task, seed, 0.55);
            assert_eq!(turns, Wrangle.expert(task, seed, 0.55));
            assert_eq!(turns.len(), 3);
            assert!(turns[0].text.contains("head -n 2 "));
            assert_eq!(
                turns[2].text,
                r#"<tool_call>{"name":"submit","arguments":{}}</tool_call>"#
            );
            mistakes += usize::from(turns[1].text.contains(&commands::mistake(&plan)));
        }
        assert!(
            Wrangle.expert(task, 1, 0.0)[1]
                .text
                .contains(&commands::right(&plan))
        );
        assert!(
            Wrangle.expert(task, 1, 1.0)[1]
                .text
                .contains(&commands::mistake(&plan))
        );
    }
    assert!((700..840).contains(&mistakes), "{mistakes} of 1400");
}

#[test]
fn nothing_done_and_a_damaged_verifier_are_told_apart() {
    let (mut task, _) = instance(Op::Mean, Split::Train, 1);
    let nothing = Wrangle.verify(&task, &BTreeMap::new(), Some("I did everything"));
    assert!(!nothing.success && nothing.fault.is_none() && nothing.milestones.is_empty());
    assert!(nothing.score.abs() < f64::EPSILON);
    task.verifier = json!({ "op": "mean" });
    assert!(
        Wrangle
            .verify(&task, &BTreeMap::new(), None)
            .fault
            .is_some()
    );
}

#[test]
fn structure_texts_hold_whole_conversations() {
    let texts = structure_texts(28, 1);
    assert_eq!(texts, structure_texts(28, 1));
    assert_eq!(texts.len(), 28);
    for text in texts {
        assert_eq!(text.matches("<tool_call>").count(), 3, "{text}");
        assert!(text.is_ascii());
    }
}
