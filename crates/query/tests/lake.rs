//! Sessions and QA over a lake on disk.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_lake::{Lake, Snapshot};
use drillyard_query::{
    ErrorKind, Kind, Library, QueryOptions, Session, SessionOptions, SqlFile, run_qa,
};
use drillyard_schema::RunId;
use drillyard_schema::table::{
    EpisodeRow, RunRow, ScoreRow, StepRow, Timestamp, ToolCallRow, VerdictRow,
};
use std::sync::Arc;

fn sql_folder() -> Utf8PathBuf {
    Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sql")
}

fn options() -> SessionOptions {
    SessionOptions {
        sql: sql_folder(),
        threads: Some(2),
        ..SessionOptions::default()
    }
}

fn episode(run: &str, date: &str, id: &str, infrastructure: bool) -> EpisodeRow {
    EpisodeRow {
        run_date: date.into(),
        purpose: "train".into(),
        run_id: run.into(),
        episode_id: id.into(),
        group_id: "g".into(),
        task_id: "t".into(),
        task_set: "wrangle".into(),
        family: "filter".into(),
        split: Some("train".into()),
        status: if infrastructure {
            "infrastructure"
        } else {
            "finished"
        }
        .into(),
        end_reason: if infrastructure {
            "sandbox_fault"
        } else {
            "submitted"
        }
        .into(),
        infrastructure_cause: None,
        policy: "p".into(),
        policy_revision: "0".into(),
        sample_index: 0,
        attempt: 0,
        temperature: 1.0,
        n_steps: 1,
        n_tool_calls: 1,
        n_parse_errors: 0,
        n_repaired: 0,
        prompt_tokens: 10,
        generated_tokens: 5,
        wall_us: 1000,
        model_us: 500,
        tool_us: 500,
        cpu_us: None,
        peak_memory_bytes: None,
        started_at: Timestamp(1),
        ended_at: Timestamp(2),
        parent_episode_id: None,
        claimed_success: None,
        claim: None,
        prompt_hash: String::new(),
        sampling: "{}".into(),
        toolset_version: "1".into(),
        toolset_hash: String::new(),
        parser_version: "1".into(),
        sandbox_image: String::new(),
        drillyard_version: String::new(),
        limits: None,
        artifacts: vec![],
        n_injected_faults: 0,
        n_state_lost: 0,
        imported_from: None,
        evaluation_set: false,
        extras: None,
    }
}

fn step(run: &str, date: &str, id: &str, parse_status: &str) -> StepRow {
    StepRow {
        run_date: date.into(),
        purpose: "train".into(),
        run_id: run.into(),
        episode_id: id.into(),
        step_index: 0,
        role: "agent".into(),
        history_hash: String::new(),
        raw_text: "text".into(),
        reasoning: None,
        finish_reason: Some("stop".into()),
        parse_status: parse_status.into(),
        parse_error: None,
        n_calls: 1,
        milestone: None,
        temperature: 1.0,
        prompt_tokens: Some(10),
        generated_tokens: Some(5),
        generation_us: 500,
        started_at: Timestamp(1),
        extras: None,
    }
}

fn call(run: &str, date: &str, id: &str) -> ToolCallRow {
    ToolCallRow {
        run_date: date.into(),
        purpose: "train".into(),
        run_id: run.into(),
        episode_id: id.into(),
        step_index: 0,
        call_index: 0,
        call_id: "c".into(),
        tool: "execute_shell".into(),
        arguments: "{}".into(),
        call_hash: id.into(),
        schema_ok: true,
        schema_error: None,
        outcome: "ok".into(),
        exit_code: Some(0),
        signal: None,
        stdout: String::new(),
        stderr: String::new(),
        stdout_bytes: 0,
        stderr_bytes: 0,
        truncated: false,
        wall_us: 500,
        cpu_us: None,
        peak_memory_bytes: None,
        read_bytes: None,
        written_bytes: None,
        files_changed: vec![],
        fault_injected: None,
        state_lost: false,
        started_at: Timestamp(1),
        extras: None,
    }
}

fn verdict(run: &str, date: &str, id: &str, success: bool) -> VerdictRow {
    VerdictRow {
        run_date: date.into(),
        purpose: "train".into(),
        run_id: run.into(),
        episode_id: id.into(),
        kind: "verified".into(),
        verifier: "wrangle".into(),
        verifier_version: "1".into(),
        success: Some(success),
        score: None,
        detail: None,
        decided_at: Timestamp(3),
    }
}

/// Two runs on two days: in `r1` one clean success, one failure with a parse error, one sandbox fault; in `r2` one success. A step
/// without a committed episode lies beside them.
async fn lake(root: &Utf8Path) -> Snapshot {
    let lake = Lake::open(root).await.unwrap();
    let (r1, d1, r2, d2) = ("r1", "2026-01-01", "r2", "2026-01-02");
    let steps = [
        step(r1, d1, "e1", "ok"),
        step(r1, d1, "e2", "error"),
        step(r2, d2, "e4", "repaired"),
        step(r2, d2, "ghost", "error"),
    ];
    lake.append(&steps, None).await.unwrap();
    let calls = [call(r1, d1, "e1"), call(r1, d1, "e2"), call(r2, d2, "e4")];
    lake.append(&calls, None).await.unwrap();
    let verdicts = [
        verdict(r1, d1, "e1", true),
        verdict(r1, d1, "e2", false),
        verdict(r2, d2, "e4", true),
    ];
    lake.append(&verdicts, None).await.unwrap();
    let episodes = [
        episode(r1, d1, "e1", false),
        episode(r1, d1, "e2", false),
        episode(r1, d1, "e3", true),
        episode(r2, d2, "e4", false),
    ];
    lake.append(&episodes, None).await.unwrap();
    lake.snapshot().await.unwrap()
}

fn folder() -> (tempfile::TempDir, Utf8PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    // A name that a URL would have to escape.
    let path = Utf8PathBuf::from_path_buf(dir.path().join("my yard")).unwrap();
    fs_err::create_dir_all(&path).unwrap();
    (dir, path)
}

fn text(rows: Vec<Vec<Option<String>>>) -> Vec<String> {
    rows.into_iter()
        .map(|row| {
            let cells: Vec<_> = row
                .into_iter()
                .map(|c| c.unwrap_or("NULL".into()))
                .collect();
            cells.join(" ")
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_columns_come_back_and_uncommitted_rows_stay_hidden() {
    let (_guard, root) = folder();
    let session = Session::open(&lake(&root).await, options()).await.unwrap();
    assert_eq!(session.problems(), []);
    let rows = session
        .sql("SELECT run_date, purpose, episode_id FROM steps WHERE run_date > '2026-01-01' ORDER BY episode_id")
        .await
        .unwrap();
    assert_eq!(text(rows.text_rows().unwrap()), ["2026-01-02 train e4"]);
    let rows = session.sql("SELECT count(*) FROM raw.steps").await.unwrap();
    assert_eq!(text(rows.text_rows().unwrap()), ["4"]);
    let rows = session
        .sql("SELECT * FROM episodes ORDER BY episode_id")
        .await
        .unwrap();
    assert_eq!(
        rows.columns()[..4],
        ["run_date", "purpose", "run_id", "episode_id"]
    );
    assert_eq!(rows.num_rows(), 4);
    let rows = session.sql("SELECT * FROM tokens").await.unwrap();
    assert_eq!(
        rows.num_rows(),
        0,
        "a table that does not exist yet is empty"
    );
    assert!(rows.columns().contains(&"loss_spans"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_shows_one_run() {
    let (_guard, root) = folder();
    let session = Session::open(&lake(&root).await, options()).await.unwrap();
    let session = session.scoped_to(&RunId::from("r2")).await.unwrap();
    let rows = session
        .sql("SELECT episode_id, success FROM episode_outcomes")
        .await
        .unwrap();
    assert_eq!(text(rows.text_rows().unwrap()), ["e4 true"]);
    let rows = session.sql("SELECT episode_id FROM steps").await.unwrap();
    assert_eq!(text(rows.text_rows().unwrap()), ["e4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn qa_finds_scores_and_counts() {
    let (_guard, root) = folder();
    let session = Session::open(&lake(&root).await, options()).await.unwrap();
    let rules = session.library().rules();
    let outcome = run_qa(&session, &rules, &"r1".into(), &"qa-1".into())
        .await
        .unwrap();
    assert_eq!(outcome.problems, []);
    assert_eq!(
        (outcome.episodes, outcome.infrastructure, outcome.scored()),
        (3, 1, 2)
    );
    let hits: Vec<_> = outcome
        .findings
        .iter()
        .map(|f| format!("{} {} {:?}", f.rule, f.episode_id, f.step_index))
        .collect();
    assert_eq!(
        hits,
        ["environment_fault e3 None", "parse_error e2 Some(0)"]
    );
    assert!(
        outcome
            .findings
            .iter()
            .all(|f| f.run_date == "2026-01-01" && f.stage_run.as_str() == "qa-1")
    );

    let scores: Vec<_> = outcome
        .scores
        .iter()
        .map(|s| {
            (
                s.episode_id.as_str(),
                s.tier.as_deref(),
                s.weight > 0.0,
                s.fail_reason.as_deref(),
            )
        })
        .collect();
    assert_eq!(
        scores,
        [
            ("e1", Some("positive"), true, None),
            ("e2", Some("negative"), true, Some("wrong_result")),
            ("e3", None, false, Some("environment")),
        ]
    );
    assert_eq!(outcome.rules.len(), rules.len());
    let parse = outcome
        .rules
        .iter()
        .find(|r| r.rule == "parse_error")
        .unwrap();
    assert_eq!((parse.findings, parse.episodes, parse.out_of), (1, 1, 2));
    assert_eq!(parse.samples, ["e2"]);
    // The sandbox fault blocks nothing: that episode is not scored.
    assert_eq!(outcome.blocked, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_fails_is_set_aside() {
    let (_guard, root) = folder();
    let rules = root.join("rules");
    fs_err::create_dir_all(&rules).unwrap();
    let rule = |id: &str, reads: &str, query: &str| {
        let text = format!(
            "-- id: {id}\n-- title: T\n-- kind: qa\n-- category: logic\n-- severity: block\n-- version: 1\n-- penalty: 0.1\n\
             -- grain: episode\n-- reads: {reads}\n-- why: test\n{query}\n"
        );
        fs_err::write(rules.join(format!("{id}.sql")), text).unwrap();
    };
    rule(
        "good",
        "episodes",
        "SELECT episode_id, NULL AS step_index, 'x' AS detail FROM episodes WHERE status = 'finished'",
    );
    rule(
        "column",
        "episodes",
        "SELECT episode_id, 0 AS step_index, no_such AS detail FROM episodes",
    );
    rule(
        "shape",
        "episodes",
        "SELECT episode_id, 0 AS step_index FROM episodes",
    );
    rule(
        "breaks",
        "episodes",
        "SELECT episode_id, 1 / (attempt - attempt) AS step_index, 'x' AS detail FROM episodes",
    );
    rule(
        "stranger",
        "nothing",
        "SELECT 'nobody' AS episode_id, 0 AS step_index, 'x' AS detail",
    );

    let snapshot = lake(&root.join("lake")).await;
    let mut library = Library::load(&sql_folder()).unwrap();
    let rules = library.rules_in(&[rules]).unwrap();
    assert_eq!(rules.len(), 5);
    let session = Session::over(&snapshot, Arc::new(library), options())
        .await
        .unwrap();
    let outcome = run_qa(&session, &rules, &"r1".into(), &"qa-1".into())
        .await
        .unwrap();
    let ran: Vec<_> = outcome.rules.iter().map(|r| r.rule.as_str()).collect();
    assert_eq!(ran, ["good", "stranger"]);
    assert_eq!(outcome.findings.len(), 2);
    assert_eq!(outcome.blocked, 2);
    assert!((outcome.blocked_share() - 1.0).abs() < 1e-9);
    let tiers: Vec<_> = outcome.scores.iter().map(|s| s.tier.as_deref()).collect();
    assert_eq!(tiers, [Some("graded"), Some("negative"), None]);
    let problems: Vec<_> = outcome.problems.iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 4, "{problems:#?}");
    assert!(
        problems
            .iter()
            .any(|p| p.contains("column.sql:11: ") && p.contains("no_such")),
        "{problems:#?}"
    );
    assert!(
        problems.iter().any(|p| p.contains("'detail' is missing")),
        "{problems:#?}"
    );
    assert!(
        problems
            .iter()
            .any(|p| p.to_lowercase().contains("divide by zero")),
        "{problems:#?}"
    );
    assert!(
        problems
            .iter()
            .any(|p| p.contains("1 rows name no episode")),
        "{problems:#?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn latest_scores_reach_the_outcomes() {
    let (_guard, root) = folder();
    lake(&root).await;
    let lake = Lake::open(&root).await.unwrap();
    let score = |stage_run: &str, tier: &str| ScoreRow {
        run_date: "2026-01-01".into(),
        purpose: "train".into(),
        run_id: "r1".into(),
        stage_run: stage_run.into(),
        episode_id: "e1".into(),
        quality: 1.0,
        tier: Some(tier.into()),
        weight: 1.0,
        fail_reason: None,
        n_findings: 0,
    };
    let run = |stage_run: &str, status: &str, at: i64| RunRow {
        stage_run: stage_run.into(),
        run_id: "r1".into(),
        pipeline: "quickstart".into(),
        stage: "qa".into(),
        stage_version: 1,
        status: status.into(),
        fingerprint: String::new(),
        config: "{}".into(),
        inputs: "{}".into(),
        outputs: "{}".into(),
        figures: "{}".into(),
        drillyard_version: String::new(),
        started_at: Timestamp(at),
        ended_at: Timestamp(at + 1),
    };
    let scores = [
        score("qa-1", "negative"),
        score("qa-2", "positive"),
        score("qa-3", "graded"),
    ];
    lake.append(&scores, None).await.unwrap();
    let runs = [
        run("qa-1", "succeeded", 1),
        run("qa-2", "succeeded", 2),
        run("qa-3", "failed", 3),
    ];
    lake.append(&runs, None).await.unwrap();
    let session = Session::open(&lake.snapshot().await.unwrap(), options())
        .await
        .unwrap();
    let rows = session
        .sql("SELECT episode_id, tier FROM episode_outcomes WHERE tier IS NOT NULL")
        .await
        .unwrap();
    assert_eq!(text(rows.text_rows().unwrap()), ["e1 positive"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_place_and_the_way_out() {
    let (_guard, root) = folder();
    let session = Session::open(&lake(&root).await, options()).await.unwrap();

    let error = session.sql("SELECT *\nFROM epsodes").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Query);
    assert!(
        error.to_string().ends_with("table 'epsodes' not found"),
        "{error}"
    );
    assert_eq!(error.hint(), Some("did you mean 'episodes'?"));

    let error = session
        .sql("SELECT episode_id,\n no_such FROM episodes")
        .await
        .unwrap_err();
    assert!(error.to_string().starts_with("query:2: "), "{error}");

    let error = session.sql("SELECT *\nFORM episodes").await.unwrap_err();
    assert_eq!(error.line(), Some(2), "{error}");

    for text in [
        "DROP TABLE episodes",
        "INSERT INTO raw.runs SELECT * FROM raw.runs",
        "COPY (SELECT 1) TO '/tmp/x.csv'",
    ] {
        let error = session.sql(text).await.unwrap_err();
        assert!(error.to_string().contains("read-only"), "{text}: {error}");
    }
    assert!(session.sql("SELECT 1; SELECT 2").await.is_err());
    let both = session
        .script("SELECT 1; SELECT 2", QueryOptions::default())
        .await
        .unwrap();
    assert_eq!(both.len(), 2);
    let error = session.ask("sucess_by_family").await.unwrap_err();
    assert_eq!(error.hint(), Some("did you mean 'success_by_family'?"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_is_named() {
    let (_guard, root) = folder();
    let snapshot = lake(&root).await;
    let file = &snapshot.files(drillyard_schema::Table::Steps)[0];
    fs_err::write(&file.path, "not parquet at all").unwrap();
    let session = Session::open(&snapshot, options()).await.unwrap();
    let error = session.sql("SELECT raw_text FROM steps").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Input, "{error}");
    assert!(error.to_string().contains(file.path.as_str()), "{error}");
    // QA judges nothing rather than half a run.
    let rules = session.library().rules();
    let error = run_qa(&session, &rules, &"r1".into(), &"qa-1".into())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Input, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_limits_and_completions() {
    let (_guard, root) = folder();
    let session = Session::open(&lake(&root).await, options()).await.unwrap();
    let options = QueryOptions {
        params: [(
            "id".to_owned(),
            drillyard_query::ParamValue::Text("e2".into()),
        )]
        .into(),
        ..QueryOptions::default()
    };
    let rows = session
        .sql_with(
            "SELECT episode_id FROM episodes WHERE episode_id >= $id ORDER BY 1",
            options,
        )
        .await
        .unwrap();
    assert_eq!(text(rows.text_rows().unwrap()), ["e2", "e3", "e4"]);
    let options = QueryOptions {
        limit: Some(2),
        ..QueryOptions::default()
    };
    let rows = session
        .sql_with("SELECT * FROM episodes", options)
        .await
        .unwrap();
    assert_eq!((rows.num_rows(), rows.truncated()), (2, true));

    let line = "SELECT * FROM episode_o";
    let (start, found) = drillyard_query::shell::complete(&session, line, line.len());
    assert_eq!((start, found), (14, vec!["episode_outcomes".to_owned()]));
    let line = "SELECT steps.raw";
    let (start, found) = drillyard_query::shell::complete(&session, line, line.len());
    assert_eq!((start, found), (13, vec!["raw_text".to_owned()]));
    let listed = drillyard_query::shell::tables(&session);
    let outcomes = listed
        .iter()
        .find(|t| t.name == "episode_outcomes")
        .unwrap();
    assert_eq!(outcomes.kind, "view");
    assert!(outcomes.columns.contains(&"tier".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_question_runs_over_an_empty_lake_and_a_full_one() {
    let (_guard, root) = folder();
    let empty = Lake::open(&root.join("empty")).await.unwrap();
    for snapshot in [
        empty.snapshot().await.unwrap(),
        lake(&root.join("full")).await,
    ] {
        let session = Session::open(&snapshot, options()).await.unwrap();
        for session in [session.scoped_to(&"r1".into()).await.unwrap(), session] {
            for file in session.library().files() {
                // Scores read what only a QA run registers.
                if file.header.kind != Kind::Score {
                    session.run(file, Some(10)).await.unwrap();
                }
            }
        }
        let rules = session_rules(&snapshot).await;
        let outcome = run_qa(&rules.0, &rules.1, &"r1".into(), &"qa".into())
            .await
            .unwrap();
        assert_eq!(outcome.problems, []);
        assert_eq!(outcome.scores.len(), outcome.episodes);
    }
}

async fn session_rules(snapshot: &Snapshot) -> (Session, Vec<SqlFile>) {
    let session = Session::open(snapshot, options()).await.unwrap();
    let rules = session.library().rules();
    (session, rules)
}

/// The engine relies on the order that files declare: many files, written in an order other than that of their ids, must not confuse it.
#[tokio::test(flavor = "multi_thread")]
async fn many_files_are_judged_as_one() {
    let (_guard, root) = folder();
    let lake = Lake::open(&root).await.unwrap();
    let (files, per_file) = (12, 20);
    for file in (0..files).rev() {
        let ids: Vec<String> = (0..per_file)
            .map(|i| format!("e{:04}", i * files + file))
            .collect();
        let mut steps = Vec::new();
        let mut calls = Vec::new();
        for id in &ids {
            for index in 0..3 {
                let status = if index == 1 { "error" } else { "ok" };
                steps.push(StepRow {
                    step_index: index,
                    ..step("r", "2026-01-01", id, status)
                });
                // The same look twice, then another one.
                let hash = if index < 2 { "same" } else { "other" };
                calls.push(ToolCallRow {
                    step_index: index,
                    call_hash: hash.into(),
                    ..call("r", "2026-01-01", id)
                });
            }
        }
        let verdicts: Vec<_> = ids
            .iter()
            .map(|id| verdict("r", "2026-01-01", id, true))
            .collect();
        let episodes: Vec<_> = ids
            .iter()
            .map(|id| episode("r", "2026-01-01", id, false))
            .collect();
        lake.append(&steps, None).await.unwrap();
        lake.append(&calls, None).await.unwrap();
        lake.append(&verdicts, None).await.unwrap();
        lake.append(&episodes, None).await.unwrap();
    }
    let (session, rules) = session_rules(&lake.snapshot().await.unwrap()).await;
    let numbers = session
        .sql("SELECT call_number, min(step_index), max(step_index), count(*) FROM ordered_calls GROUP BY call_number ORDER BY 1")
        .await
        .unwrap();
    assert_eq!(
        text(numbers.text_rows().unwrap()),
        ["1 0 0 240", "2 1 1 240", "3 2 2 240"]
    );
    let outcome = run_qa(&session, &rules, &"r".into(), &"qa".into())
        .await
        .unwrap();
    assert_eq!(outcome.problems, []);
    let hit: Vec<_> = outcome
        .rules
        .iter()
        .filter(|r| r.findings > 0)
        .map(|r| (r.rule.as_str(), r.findings, r.out_of))
        .collect();
    assert_eq!(hit, [("parse_error", 240, 720), ("useless_look", 240, 720)]);
    assert!(
        outcome
            .scores
            .iter()
            .all(|s| s.tier.as_deref() == Some("positive"))
    );
}
