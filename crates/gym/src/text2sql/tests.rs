//! The promises of the task set, for every question.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

const SPLITS: [Split; 3] = [Split::Train, Split::Validation, Split::HeldOut];

fn everything() -> Vec<Task> {
    SPLITS
        .iter()
        .flat_map(|&split| Text2Sql.generate(split, 1_000, 1))
        .collect()
}

#[test]
fn there_are_enough_questions_in_each_grade_and_splits_share_none() {
    let tasks = everything();
    assert_eq!(tasks.len(), questions::all().unwrap().len());
    assert!(tasks.len() >= 120, "{}", tasks.len());
    for family in FAMILIES {
        assert!(
            tasks
                .iter()
                .filter(|task| task.family == family.name)
                .count()
                >= 40
        );
        for split in SPLITS {
            let own = |task: &&Task| task.family == family.name && task.split == split;
            assert!(
                tasks.iter().filter(own).count() >= 8,
                "{} {split}",
                family.name
            );
        }
    }
    let unique = |key: fn(&Task) -> String| tasks.iter().map(key).collect::<BTreeSet<_>>().len();
    assert_eq!(unique(|task| task.task_id.to_string()), tasks.len());
    assert_eq!(unique(|task| task.instruction.clone()), tasks.len());
    assert_eq!(unique(|task| task.verifier["sql"].to_string()), tasks.len());
}

#[test]
fn every_reference_gives_rows_and_verifies() {
    for task in everything() {
        let sql = task.verifier["sql"].as_str().unwrap();
        let rows = checker::run(sql).unwrap().unwrap();
        assert!(!rows.rows.is_empty(), "{sql}");
        assert!(rows.rows.len() < 2_000, "{sql}");
        assert!(
            rows.rows
                .iter()
                .flatten()
                .any(|cell| *cell != checker::Cell::Null),
            "{sql}"
        );
        let verified = Text2Sql.verify(&task, &BTreeMap::new(), Some(sql));
        assert!(verified.success, "{sql}: {}", verified.detail);
        assert_eq!(verified.milestones, ["answer_runs", "content_right"]);
    }
}

#[test]
fn every_mistake_runs_and_is_wrong() {
    for task in everything() {
        let sql = task.verifier["mistake"].as_str().unwrap();
        let verified = Text2Sql.verify(&task, &BTreeMap::new(), Some(sql));
        assert_eq!(verified.fault, None);
        assert_eq!(
            verified.milestones,
            ["answer_runs"],
            "{sql}: {}",
            verified.detail
        );
        assert!(!verified.success, "{sql}: {}", task.instruction);
        assert!((0.0..1.0).contains(&verified.score), "{sql}");
    }
}

#[test]
fn right_answers_do_not_depend_on_the_order_of_a_scan() {
    // SQLite can scan tables backwards: rows left to chance by a LIMIT or a tie come out otherwise then.
    let bytes = database::bytes().unwrap();
    let mut backwards = rusqlite::Connection::open_in_memory().unwrap();
    backwards
        .deserialize_read_exact("main", &*bytes, bytes.len(), true)
        .unwrap();
    backwards
        .pragma_update(None, "reverse_unordered_selects", true)
        .unwrap();
    for question in questions::all().unwrap() {
        let wanted = checker::run(&question.sql).unwrap().unwrap();
        let got = checker::rows(&backwards, &question.sql).unwrap();
        let compared = checker::compare_rows(&wanted, &got, question.ordered);
        assert!(compared.success, "{}: {}", question.id, compared.detail);
    }
}

#[test]
fn order_counts_exactly_where_the_reference_sorts() {
    for question in questions::all().unwrap() {
        let last = question.sql.rfind("ORDER BY");
        let sorts = last.is_some_and(|at| !question.sql[at..].contains(')'));
        assert_eq!(question.ordered, sorts, "{}", question.id);
    }
}

#[test]
fn generation_repeats_and_takes_turns() {
    let tasks = Text2Sql.generate(Split::Train, 9, 4);
    assert_eq!(tasks, Text2Sql.generate(Split::Train, 9, 4));
    assert_eq!(tasks[..5], Text2Sql.generate(Split::Train, 5, 4)[..]);
    assert_ne!(tasks, Text2Sql.generate(Split::Train, 9, 5));
    let families: Vec<&str> = tasks.iter().map(|task| task.family.as_str()).collect();
    assert_eq!(families[..4], ["one_table", "joins", "nested", "one_table"]);
}

#[test]
fn the_expert_submits_the_query_it_ran() {
    let task = &Text2Sql.generate(Split::Train, 1, 1)[0];
    for (rate, key) in [(0.0, "sql"), (1.0, "mistake")] {
        let turns = Text2Sql.expert(task, 3, rate);
        let sql = task.verifier[key].as_str().unwrap();
        assert_eq!(turns.len(), 3);
        assert_eq!(
            turns[2],
            ExpertTurn::call("submit", &json!({ "answer": sql }))
        );
        assert!(turns[1].text.contains("execute_sql"));
    }
}

#[test]
fn a_claim_is_not_an_answer_and_a_damaged_verifier_is_a_fault() {
    let mut task = Text2Sql.generate(Split::HeldOut, 1, 1).remove(0);
    for claim in [None, Some(""), Some("done, trust me")] {
        let verified = Text2Sql.verify(&task, &BTreeMap::new(), claim);
        assert!(!verified.success && verified.fault.is_none());
    }
    task.verifier = json!({});
    assert!(
        Text2Sql
            .verify(&task, &BTreeMap::new(), None)
            .fault
            .is_some()
    );
}

#[test]
fn the_database_is_laid_out_as_an_asset() {
    let task = &Text2Sql.generate(Split::Train, 1, 1)[0];
    let files = Text2Sql.setup_files(task).unwrap();
    assert_eq!(files[0].0, crate::tools::DEFAULT_DATABASE);
    assert!(files[0].1.starts_with(b"SQLite format 3\0"));
    assert!(Text2Sql.asset("other.db").is_err());
}
