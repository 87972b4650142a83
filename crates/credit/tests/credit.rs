//! Random lakes against `credit-math`'s plain loops, and what must be refused.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_credit::{
    Baseline, Credit, CreditConfig, CreditError, Outcome, Request, Scale, Scheme, ZeroVariance,
    assign,
};
use drillyard_credit_math as math;
use drillyard_lake::DataFile;
use drillyard_schema::table::{
    AdvantageRow, EpisodeRow, RewardRow, ScoreRow, StepRow, Timestamp, ToolCallRow, VerdictRow,
    to_batch,
};
use drillyard_schema::{Purpose, Row, Table};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;

// ---- A lake of plain values -------------------------------------------------------------------------------------------------

#[derive(Debug, Clone)]
struct Verdict {
    kind: &'static str,
    success: Option<bool>,
    score: Option<f64>,
    at: i64,
}

#[derive(Debug, Clone)]
struct Part {
    step: Option<usize>,
    name: &'static str,
    value: f64,
    version: &'static str,
}

#[derive(Debug, Clone)]
struct Ep {
    id: String,
    group: String,
    task: String,
    purpose: &'static str,
    split: Option<&'static str>,
    infrastructure: bool,
    /// The hashes of each step's calls.
    steps: Vec<Vec<String>>,
    parts: Vec<Part>,
    verdicts: Vec<Verdict>,
    /// Weight and tier from QA.
    score: Option<(f64, &'static str)>,
}

impl Ep {
    fn new(id: &str, task: &str, success: bool) -> Self {
        Self {
            id: id.to_owned(),
            group: format!("group-of-{task}"),
            task: task.to_owned(),
            purpose: "train",
            split: Some("train"),
            infrastructure: false,
            steps: vec![vec!["look".to_owned()], vec![format!("act-{id}")]],
            parts: vec![Part {
                step: None,
                name: "outcome",
                value: f64::from(u8::from(success)),
                version: "1",
            }],
            verdicts: Vec::new(),
            score: Some((1.0, if success { "positive" } else { "negative" })),
        }
    }
}

const DAY: &str = "2026-01-02";
const RUN: &str = "run-0";
const QA: &str = "qa-0";

type Files = BTreeMap<Table, Vec<DataFile>>;

fn write<R: Row>(folder: &Utf8Path, files: &mut Files, purpose: &str, rows: &[R]) {
    if rows.is_empty() {
        return;
    }
    let list = files.entry(R::TABLE).or_default();
    let path = folder.join(format!("{}-{}.parquet", R::TABLE.name(), list.len()));
    // As Delta does it: partition columns are not in the file.
    let batch = to_batch(rows).unwrap();
    let kept: Vec<usize> = (0..batch.num_columns())
        .filter(|i| {
            let schema = batch.schema();
            !R::TABLE
                .partition_columns()
                .contains(&schema.field(*i).name().as_str())
        })
        .collect();
    let batch = batch.project(&kept).unwrap();
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .build();
    let file = fs_err::File::create(&path).unwrap().into_parts().0;
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    list.push(DataFile {
        bytes: fs_err::metadata(&path).unwrap().len() as i64,
        path,
        partition: vec![
            ("run_date".to_owned(), DAY.to_owned()),
            ("purpose".to_owned(), purpose.to_owned()),
        ],
        rows: rows.len() as i64,
    });
}

fn episode_row(ep: &Ep) -> EpisodeRow {
    EpisodeRow {
        run_date: DAY.into(),
        purpose: ep.purpose.into(),
        run_id: RUN.into(),
        episode_id: ep.id.as_str().into(),
        group_id: ep.group.as_str().into(),
        task_id: ep.task.as_str().into(),
        task_set: "wrangle".into(),
        family: "filter".into(),
        split: ep.split.map(str::to_owned),
        status: if ep.infrastructure {
            "infrastructure"
        } else {
            "finished"
        }
        .into(),
        end_reason: if ep.infrastructure {
            "sandbox_fault"
        } else {
            "submitted"
        }
        .into(),
        infrastructure_cause: None,
        policy: "base".into(),
        policy_revision: "0".into(),
        sample_index: 0,
        attempt: 0,
        temperature: 1.0,
        n_steps: ep.steps.len() as i32,
        n_tool_calls: 0,
        n_parse_errors: 0,
        n_repaired: 0,
        prompt_tokens: 0,
        generated_tokens: 0,
        wall_us: 0,
        model_us: 0,
        tool_us: 0,
        cpu_us: None,
        peak_memory_bytes: None,
        started_at: Timestamp(0),
        ended_at: Timestamp(0),
        parent_episode_id: None,
        claimed_success: None,
        claim: None,
        prompt_hash: String::new(),
        sampling: "{}".into(),
        toolset_version: "1".into(),
        toolset_hash: String::new(),
        parser_version: "1".into(),
        sandbox_image: String::new(),
        drillyard_version: "0".into(),
        limits: None,
        artifacts: vec![],
        n_injected_faults: 0,
        n_state_lost: 0,
        imported_from: None,
        evaluation_set: false,
        extras: None,
    }
}

fn step_rows(ep: &Ep) -> Vec<StepRow> {
    (0..ep.steps.len())
        .map(|i| StepRow {
            run_date: DAY.into(),
            purpose: ep.purpose.into(),
            run_id: RUN.into(),
            episode_id: ep.id.as_str().into(),
            step_index: i as i32,
            role: "agent".into(),
            history_hash: String::new(),
            raw_text: String::new(),
            reasoning: None,
            finish_reason: None,
            parse_status: "ok".into(),
            parse_error: None,
            n_calls: ep.steps[i].len() as i32,
            milestone: None,
            temperature: 1.0,
            prompt_tokens: None,
            generated_tokens: None,
            generation_us: 0,
            started_at: Timestamp(0),
            extras: None,
        })
        .collect()
}

fn call_rows(ep: &Ep) -> Vec<ToolCallRow> {
    let mut rows = Vec::new();
    for (step, calls) in ep.steps.iter().enumerate() {
        for (index, hash) in calls.iter().enumerate() {
            rows.push(ToolCallRow {
                run_date: DAY.into(),
                purpose: ep.purpose.into(),
                run_id: RUN.into(),
                episode_id: ep.id.as_str().into(),
                step_index: step as i32,
                call_index: index as i32,
                call_id: String::new(),
                tool: "execute_shell".into(),
                arguments: "{}".into(),
                call_hash: hash.clone(),
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
                wall_us: 0,
                cpu_us: None,
                peak_memory_bytes: None,
                read_bytes: None,
                written_bytes: None,
                files_changed: vec![],
                fault_injected: None,
                state_lost: false,
                started_at: Timestamp(0),
                extras: None,
            });
        }
    }
    rows
}

fn other_rows(ep: &Ep) -> (Vec<RewardRow>, Vec<VerdictRow>, Vec<ScoreRow>) {
    let rewards = ep.parts.iter().map(|p| RewardRow {
        run_date: DAY.into(),
        purpose: ep.purpose.into(),
        run_id: RUN.into(),
        episode_id: ep.id.as_str().into(),
        step_index: p.step.map(|s| s as i32),
        scheme: "wrangle".into(),
        scheme_version: p.version.into(),
        component: p.name.into(),
        value: p.value,
    });
    let verdicts = ep.verdicts.iter().map(|v| VerdictRow {
        run_date: DAY.into(),
        purpose: ep.purpose.into(),
        run_id: RUN.into(),
        episode_id: ep.id.as_str().into(),
        kind: v.kind.into(),
        verifier: "v".into(),
        verifier_version: "1".into(),
        success: v.success,
        score: v.score,
        detail: None,
        decided_at: Timestamp(v.at),
    });
    let score = |stage: &str, weight: f64, tier: &str| ScoreRow {
        run_date: DAY.into(),
        purpose: ep.purpose.into(),
        run_id: RUN.into(),
        stage_run: stage.into(),
        episode_id: ep.id.as_str().into(),
        quality: weight,
        tier: Some(tier.to_owned()),
        weight,
        fail_reason: None,
        n_findings: 0,
    };
    // An earlier QA execution scored everything otherwise; it must not count.
    let scores = ep.score.iter().flat_map(|(weight, tier)| {
        [
            score(QA, *weight, tier),
            score("qa-earlier", 0.123, "graded"),
        ]
    });
    (rewards.collect(), verdicts.collect(), scores.collect())
}

/// Each purpose's episodes in up to two files of each table, steps and calls backwards: nothing may depend on the order of rows.
fn lake(folder: &Utf8Path, episodes: &[Ep]) -> Files {
    let mut files = Files::new();
    let purposes: BTreeSet<_> = episodes.iter().map(|e| e.purpose).collect();
    for purpose in purposes {
        let of_purpose: Vec<_> = episodes.iter().filter(|e| e.purpose == purpose).collect();
        for chunk in of_purpose.chunks(of_purpose.len().div_ceil(2)) {
            write(
                folder,
                &mut files,
                purpose,
                &chunk.iter().map(|e| episode_row(e)).collect::<Vec<_>>(),
            );
            write(
                folder,
                &mut files,
                purpose,
                &chunk
                    .iter()
                    .flat_map(|e| step_rows(e))
                    .rev()
                    .collect::<Vec<_>>(),
            );
            write(
                folder,
                &mut files,
                purpose,
                &chunk
                    .iter()
                    .flat_map(|e| call_rows(e))
                    .rev()
                    .collect::<Vec<_>>(),
            );
            let other: Vec<_> = chunk.iter().map(|e| other_rows(e)).collect();
            let (mut rewards, mut verdicts, mut scores) = (vec![], vec![], vec![]);
            for (r, v, s) in other {
                rewards.extend(r);
                verdicts.extend(v);
                scores.extend(s);
            }
            write(folder, &mut files, purpose, &rewards);
            write(folder, &mut files, purpose, &verdicts);
            write(folder, &mut files, purpose, &scores);
        }
    }
    files
}

fn in_folder<T>(work: impl FnOnce(&Utf8Path) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    work(Utf8Path::from_path(folder.path()).unwrap())
}

fn request() -> Request {
    Request::new(RUN.into(), Some(QA.into()), "credit-0".into())
}

fn credit(episodes: &[Ep], config: &CreditConfig) -> Result<Credit, CreditError> {
    in_folder(|folder| assign(&lake(folder, episodes), &request(), config))
}

// ---- Random lakes -----------------------------------------------------------------------------------------------------------

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

fn random_lake(seed: u64) -> Vec<Ep> {
    let mut r = Random(seed);
    let mut episodes = Vec::new();
    for task in 0..=r.below(4) {
        for group in 0..=r.below(2) {
            // Some groups agree on everything, so that groups without variance are common.
            let alike = r.chance(30).then(|| r.pick(&[0.0, 1.0]));
            for sample in 0..=r.below(6) {
                episodes.push(random_episode(&mut r, task, group, sample, alike));
            }
        }
    }
    // Evaluation episodes of the same run lie in the same lake and must not be seen.
    for i in 0..r.below(4) {
        let mut ep = Ep::new(&format!("held-{i}"), "task-0", r.chance(50));
        ep.purpose = "held_out";
        ep.split = Some("held_out");
        ep.group.clone_from(&episodes[0].group);
        episodes.push(ep);
    }
    for i in (1..episodes.len()).rev() {
        episodes.swap(i, r.below(i + 1));
    }
    episodes
}

fn random_episode(
    r: &mut Random,
    task: usize,
    group: usize,
    sample: usize,
    alike: Option<f64>,
) -> Ep {
    let n_steps = r.below(5);
    let mut ep = Ep::new(
        &format!("e-{task}-{group}-{sample}"),
        &format!("task-{task}"),
        false,
    );
    ep.group = format!("group-{task}-{group}");
    ep.purpose = if r.chance(20) { "import" } else { "train" };
    ep.infrastructure = r.chance(20);
    ep.steps = (0..n_steps)
        .map(|_| {
            (0..r.below(3))
                .map(|_| r.pick(&["a", "b"]).to_owned())
                .collect()
        })
        .collect();
    ep.parts.clear();
    if alike.is_some() || r.chance(70) {
        let value = alike.unwrap_or_else(|| r.pick(&[0.0, 0.0, 1.0, 1.0, 0.25, 0.6]));
        ep.parts.push(Part {
            step: None,
            name: "outcome",
            value,
            version: "2",
        });
        if r.chance(30) {
            ep.parts.push(Part {
                step: None,
                name: "outcome",
                value: 0.77,
                version: "1",
            });
        }
    }
    if alike.is_none() {
        for _ in 0..r.below(6) {
            ep.parts.push(Part {
                step: r.chance(80).then(|| r.below(6)),
                name: r.pick(&[
                    "format",
                    "milestone",
                    "novelty",
                    "repeat",
                    "violation",
                    "turn_reward",
                ]),
                value: r.pick(&[-1.0, 0.5, 1.0, 2.0]),
                version: "2",
            });
        }
    }
    for _ in 0..r.below(3) {
        ep.verdicts.push(Verdict {
            kind: r.pick(&["recorded", "verified", "re_verified", "judge"]),
            success: r.chance(80).then(|| r.chance(50)),
            score: r.chance(50).then(|| r.pick(&[0.0, 0.5, 1.0])),
            at: ep.verdicts.len() as i64,
        });
    }
    ep.score =
        (r.chance(80)).then(|| (r.pick(&[0.3, 0.7, 1.0]), r.pick(&["positive", "negative"])));
    ep
}

// ---- The oracle: plain loops ------------------------------------------------------------------------------------------------

fn learnable(episodes: &[Ep]) -> Vec<&Ep> {
    episodes
        .iter()
        .filter(|e| e.purpose == "train" || e.purpose == "import")
        .collect()
}

fn verdict(ep: &Ep) -> Option<&Verdict> {
    let rank = |v: &Verdict| {
        ["judge", "recorded", "verified", "re_verified"]
            .iter()
            .position(|k| *k == v.kind)
    };
    ep.verdicts
        .iter()
        .filter(|v| v.success.is_some() || v.score.is_some())
        .max_by_key(|v| (rank(v), v.at))
}

fn outcome_and_success(ep: &Ep) -> (Option<f64>, Option<bool>) {
    let newest = ep.parts.iter().map(|p| p.version).max();
    let recorded: Vec<f64> = ep
        .parts
        .iter()
        .filter(|p| p.name == "outcome" && Some(p.version) == newest)
        .map(|p| p.value)
        .collect();
    let verdict = verdict(ep);
    let outcome = if recorded.is_empty() {
        verdict.and_then(|v| v.score.or(v.success.map(|s| f64::from(u8::from(s)))))
    } else {
        Some(recorded.iter().sum())
    };
    let success = verdict
        .and_then(|v| v.success)
        .or(outcome.map(|o| o >= 1.0));
    (outcome, success)
}

fn math_scheme(scheme: &Scheme) -> math::Scheme<'_> {
    math::Scheme {
        outcome: match scheme.outcome {
            Outcome::Linear { weight } => math::Outcome::Linear { weight },
            Outcome::Graded {
                success,
                partial,
                failure,
            } => math::Outcome::Graded {
                success,
                partial,
                failure,
            },
        },
        terms: scheme
            .terms
            .iter()
            .map(|(component, term)| math::StepTerm {
                component,
                weight: term.weight,
                mean_over_steps: term.mean_over_steps,
            })
            .collect(),
        efficiency: scheme.efficiency,
        max_steps: scheme.max_steps,
    }
}

fn composed(ep: &Ep, scheme: &Scheme) -> Option<math::Composed> {
    let newest = ep.parts.iter().map(|p| p.version).max();
    let mut components: Vec<_> = ep
        .parts
        .iter()
        .filter(|p| Some(p.version) == newest && p.name != "outcome")
        .map(|p| math::Component {
            step: p.step,
            name: p.name,
            value: p.value,
        })
        .collect();
    components.push(math::Component {
        step: None,
        name: "outcome",
        value: outcome_and_success(ep).0?,
    });
    math::compose(&math_scheme(scheme), &components, ep.steps.len())
}

fn options(config: &CreditConfig) -> math::GroupOptions {
    let eps = config.advantage.eps;
    math::GroupOptions {
        baseline: match config.advantage.baseline {
            Baseline::GroupMean => math::Baseline::GroupMean,
            Baseline::LeaveOneOut => math::Baseline::LeaveOneOut,
        },
        scale: match config.advantage.scale {
            Scale::None => math::Scale::None,
            Scale::Deviation => math::Scale::Deviation { eps },
            Scale::Mean => math::Scale::Mean { eps },
        },
    }
}

fn weight(ep: &Ep) -> f64 {
    match ep.score {
        _ if ep.infrastructure => 0.0,
        Some((weight, _)) => weight,
        None => 1.0,
    }
}

#[track_caller]
fn close(a: f64, b: f64, what: &str) {
    assert!(
        (a - b).abs() <= 1e-9 * (1.0 + b.abs()),
        "{what}: {a} against {b}"
    );
}

fn check_advantages(got: &[AdvantageRow], episodes: &[&Ep], config: &CreditConfig) {
    let scheme = config.resolve().unwrap();
    assert_eq!(got.len(), episodes.len());
    let got: BTreeMap<_, _> = got.iter().map(|r| (r.episode_id.as_str(), r)).collect();
    let mut groups: BTreeMap<&str, Vec<&Ep>> = BTreeMap::new();
    for ep in episodes {
        groups.entry(&ep.group).or_default().push(ep);
    }
    for members in groups.values() {
        let rewards: Vec<Option<f64>> = members
            .iter()
            .map(|e| {
                if e.infrastructure {
                    None
                } else {
                    composed(e, &scheme).map(|c| c.total)
                }
            })
            .collect();
        let stats = math::group_stats(&rewards);
        let advantages = math::group_advantages(&rewards, options(config));
        let infrastructure = members.iter().filter(|e| e.infrastructure).count();
        for ((ep, reward), advantage) in members.iter().zip(&rewards).zip(advantages) {
            let row = got[ep.id.as_str()];
            assert_eq!(row.scored, reward.is_some(), "{}", ep.id);
            assert_eq!(row.zero_variance, stats.zero_variance, "{}", ep.id);
            assert_eq!(
                (row.n_total, row.n_scored, row.n_infrastructure),
                (
                    stats.total as i32,
                    stats.scored as i32,
                    infrastructure as i32
                )
            );
            assert_eq!(row.advantage.is_some(), advantage.is_some(), "{}", ep.id);
            assert_eq!(row.baseline.is_some(), stats.mean.is_some());
            assert_eq!(row.deviation.is_some(), stats.deviation.is_some());
            close(
                row.advantage.unwrap_or(0.0),
                advantage.unwrap_or(0.0),
                "advantage",
            );
            close(
                row.baseline.unwrap_or(0.0),
                stats.mean.unwrap_or(0.0),
                "baseline",
            );
            close(
                row.deviation.unwrap_or(0.0),
                stats.deviation.unwrap_or(0.0),
                "deviation",
            );
            close(row.weight, weight(ep), "weight");
            if let Some(reward) = reward {
                close(row.reward, *reward, "reward");
            }
            assert_eq!(
                (row.purpose.as_str(), row.run_date.as_str()),
                (ep.purpose, DAY)
            );
        }
    }
}

fn check_returns(credit: &Credit, episodes: &[&Ep], config: &CreditConfig) {
    let scheme = config.resolve().unwrap();
    let mut expected = BTreeMap::new();
    for ep in episodes.iter().filter(|e| !e.infrastructure) {
        let Some(composed) = composed(ep, &scheme) else {
            continue;
        };
        let discounted = math::discounted_returns(&composed.steps, config.gamma);
        for (step, values) in composed.steps.into_iter().zip(discounted).enumerate() {
            expected.insert((ep.id.clone(), step as i32), values);
        }
    }
    assert_eq!(credit.returns.len(), expected.len());
    for row in &credit.returns {
        let (reward, discounted) = expected[&(row.episode_id.to_string(), row.step_index)];
        close(row.reward, reward, "step reward");
        close(row.discounted_return, discounted, "return");
    }
}

fn check_pairs(credit: &Credit, episodes: &[&Ep], config: &CreditConfig) {
    let scheme = config.resolve().unwrap();
    let mut tasks: BTreeMap<&str, Vec<&Ep>> = BTreeMap::new();
    for ep in episodes.iter().filter(|e| !e.infrastructure) {
        tasks.entry(&ep.task).or_default().push(ep);
    }
    let mut expected = BTreeMap::new();
    for members in tasks.values() {
        let arm = |success: bool| {
            let mut arm: Vec<(&Ep, f64)> = members
                .iter()
                .filter(|e| outcome_and_success(e).1 == Some(success))
                .filter_map(|e| Some((*e, composed(e, &scheme)?.total)))
                .collect();
            arm.sort_by(|(a, _), (b, _)| weight(b).total_cmp(&weight(a)).then(a.id.cmp(&b.id)));
            arm
        };
        let (chosen, rejected) = (arm(true), arm(false));
        if chosen.is_empty() || rejected.is_empty() {
            continue;
        }
        let rounds = chosen
            .len()
            .max(rejected.len())
            .min(config.pairs.max_per_task as usize);
        for round in 0..rounds {
            let (c, c_reward) = chosen[round % chosen.len()];
            let (l, l_reward) = rejected[round % rejected.len()];
            if c_reward - l_reward <= config.pairs.min_margin {
                continue;
            }
            let differs =
                (0..c.steps.len().max(l.steps.len())).find(|i| c.steps.get(*i) != l.steps.get(*i));
            expected.insert(
                (c.id.clone(), l.id.clone()),
                (
                    differs.unwrap_or(c.steps.len()) as i32,
                    c_reward - l_reward,
                    weight(c).min(weight(l)),
                ),
            );
        }
    }
    assert_eq!(credit.pairs.len(), expected.len());
    for row in &credit.pairs {
        let key = (
            row.chosen_episode_id.to_string(),
            row.rejected_episode_id.to_string(),
        );
        let (divergence, margin, weight) = expected[&key];
        assert_eq!(row.divergence_step, divergence, "{key:?}");
        close(row.margin, margin, "margin");
        close(row.weight, weight, "pair weight");
    }
}

fn check_summary(credit: &Credit, episodes: &[&Ep]) {
    let s = &credit.summary;
    assert_eq!(s.episodes, episodes.len());
    assert_eq!(
        s.infrastructure,
        episodes.iter().filter(|e| e.infrastructure).count()
    );
    assert_eq!(s.episodes, s.scored + s.infrastructure + s.unjudged);
    assert_eq!(s.groups, s.groups_with_variance + s.zero_variance.len());
    assert_eq!(
        s.zero_variance.len(),
        s.zero_variance_right + s.zero_variance_wrong + s.zero_variance_other
    );
    let mut successes: BTreeMap<&str, BTreeSet<bool>> = BTreeMap::new();
    for ep in episodes
        .iter()
        .filter(|e| !e.infrastructure && outcome_and_success(e).0.is_some())
    {
        successes
            .entry(&ep.group)
            .or_default()
            .insert(outcome_and_success(ep).1 == Some(true));
    }
    assert_eq!(
        s.groups_mixed,
        successes.values().filter(|o| o.len() == 2).count()
    );
    assert_eq!(s.pairs, credit.pairs.len());
}

fn configs() -> Vec<CreditConfig> {
    let mut configs: Vec<_> = Scheme::PRESETS
        .iter()
        .map(|name| CreditConfig {
            scheme: (*name).to_owned(),
            max_steps: 4,
            ..CreditConfig::default()
        })
        .collect();
    configs[1].advantage.baseline = Baseline::LeaveOneOut;
    configs[1].advantage.scale = Scale::None;
    configs[1].pairs.max_per_task = 2;
    configs[1].gamma = 1.0;
    configs[2].gamma = 0.5;
    configs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_equal_plain_loops(seed in any::<u64>()) {
        let episodes = random_lake(seed);
        let learnable = learnable(&episodes);
        in_folder(|folder| {
            let files = lake(folder, &episodes);
            for config in configs().into_iter().skip(seed as usize % 2).step_by(2) {
                let credit = assign(&files, &request(), &config).unwrap();
                check_advantages(&credit.advantages, &learnable, &config);
                check_returns(&credit, &learnable, &config);
                check_pairs(&credit, &learnable, &config);
                check_summary(&credit, &learnable);
                assert!(credit.control_scores.is_empty());
            }
        });
    }

    #[test]
    fn the_control_moves_whole_outcomes_within_tasks(seed in any::<u64>(), control in any::<u64>()) {
        let episodes = random_lake(seed);
        in_folder(|folder| {
            let files = lake(folder, &episodes);
            for base in configs().into_iter().skip(seed as usize % 3).take(1) {
                let config = CreditConfig { control: Some(control), ..base.clone() };
                let plain = assign(&files, &request(), &base).unwrap();
                let moved = assign(&files, &request(), &config).unwrap();
                let again = assign(&files, &request(), &config).unwrap();
                assert!(moved == again, "the seed decides, to the last bit");

                // The same outcomes, task by task: reward, weight, whether scored.
                let outcomes = |credit: &Credit| {
                    let mut all: Vec<_> = credit.advantages.iter().map(|r| {
                        let round = |x: f64| (x * 1e9).round() as i64;
                        (r.task_id.to_string(), round(r.reward), round(r.weight), r.scored)
                    }).collect();
                    all.sort();
                    all
                };
                assert_eq!(outcomes(&plain), outcomes(&moved));
                assert_eq!(plain.summary.successes, moved.summary.successes);
                assert_eq!(plain.summary.infrastructure, moved.summary.infrastructure);

                // A step's rewards still add up to its episode's.
                let mut sums: BTreeMap<_, f64> = BTreeMap::new();
                for row in &moved.returns {
                    *sums.entry(&row.episode_id).or_default() += row.reward;
                }
                for row in moved.advantages.iter().filter(|r| r.scored) {
                    if let Some(sum) = sums.get(&row.episode_id) {
                        close(*sum, row.reward, "steps of a moved outcome");
                    }
                }

                // Tiers and weights move along, and credit's rows agree with them.
                let learnable = learnable(&episodes);
                let tiers = |rows: Vec<(String, Option<String>)>| { let mut rows = rows; rows.sort(); rows };
                let task_of: BTreeMap<_, _> = learnable.iter().map(|e| (e.id.as_str(), e.task.clone())).collect();
                assert_eq!(
                    tiers(moved.control_scores.iter().map(|r| (task_of[r.episode_id.as_str()].clone(), r.tier.clone())).collect()),
                    tiers(learnable.iter().filter_map(|e| Some((e.task.clone(), Some(e.score?.1.to_owned())))).collect()),
                );
                let weights: BTreeMap<_, _> = moved.control_scores.iter().map(|r| (&r.episode_id, r.weight)).collect();
                for row in moved.advantages.iter().filter(|r| r.scored) {
                    close(row.weight, weights.get(&row.episode_id).copied().unwrap_or(1.0), "moved weight");
                }
            }
        });
    }
}

/// The same through a real Delta table: what `append` wrote is what credit reads.
#[test]
fn a_lakes_own_snapshot_gives_the_same_credit() {
    let episodes: Vec<Ep> = random_lake(7);
    let config = CreditConfig::default();
    in_folder(|folder| {
        let by_hand = assign(&lake(folder, &episodes), &request(), &config).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        let snapshot = runtime.block_on(async {
            let lake = drillyard_lake::Lake::open(&folder.join("lake"))
                .await
                .unwrap();
            let others: Vec<_> = episodes.iter().map(other_rows).collect();
            lake.append(&episodes.iter().map(episode_row).collect::<Vec<_>>(), None)
                .await
                .unwrap();
            lake.append(
                &episodes.iter().flat_map(step_rows).collect::<Vec<_>>(),
                None,
            )
            .await
            .unwrap();
            lake.append(
                &episodes.iter().flat_map(call_rows).collect::<Vec<_>>(),
                None,
            )
            .await
            .unwrap();
            lake.append(
                &others.iter().flat_map(|o| o.0.clone()).collect::<Vec<_>>(),
                None,
            )
            .await
            .unwrap();
            lake.append(
                &others.iter().flat_map(|o| o.1.clone()).collect::<Vec<_>>(),
                None,
            )
            .await
            .unwrap();
            lake.append(
                &others.iter().flat_map(|o| o.2.clone()).collect::<Vec<_>>(),
                None,
            )
            .await
            .unwrap();
            lake.snapshot().await.unwrap()
        });
        let credit = assign(&snapshot, &request(), &config).unwrap();
        assert!(credit == by_hand);
        assert!(!credit.advantages.is_empty());

        // The rows it gives can be appended as they are.
        runtime.block_on(async {
            let lake = drillyard_lake::Lake::open(&folder.join("lake"))
                .await
                .unwrap();
            assert!(
                lake.append(&credit.advantages, None)
                    .await
                    .unwrap()
                    .is_some()
            );
            assert!(lake.append(&credit.returns, None).await.unwrap().is_some());
        });
    });
}

// ---- Small lakes by hand ----------------------------------------------------------------------------------------------------

#[test]
fn presets_are_those_of_the_oracle() {
    let sorted = |mut scheme: math::Scheme<'static>| {
        scheme.terms.sort_by_key(|t| t.component);
        scheme
    };
    for (name, oracle) in [
        ("weighted", math::Scheme::weighted(7)),
        ("graded", math::Scheme::graded()),
        ("outcome_format", math::Scheme::outcome_and_format()),
    ] {
        assert_eq!(
            math_scheme(&Scheme::preset(name, 7).unwrap()),
            sorted(oracle)
        );
    }
}

/// The published case of a masked group member: rewards 1, 1, 0, 0, the second ended by infrastructure.
#[test]
fn infrastructure_leaves_the_baseline() {
    let mut episodes: Vec<_> = [true, true, false, false]
        .into_iter()
        .enumerate()
        .map(|(i, success)| Ep::new(&format!("e{i}"), "t", success))
        .collect();
    episodes[1].infrastructure = true;
    let mut config = CreditConfig {
        scheme: "outcome_format".into(),
        ..CreditConfig::default()
    };
    let advantages = |config: &CreditConfig| -> Vec<Option<f64>> {
        credit(&episodes, config)
            .unwrap()
            .advantages
            .iter()
            .map(|r| r.advantage)
            .collect()
    };
    let expect = |got: Vec<Option<f64>>, expected: [f64; 3]| {
        assert_eq!(got[1], None);
        for (got, expected) in got.into_iter().flatten().zip(expected) {
            assert!((got - expected).abs() < 5e-4, "{got} against {expected}");
        }
    };
    expect(advantages(&config), [1.155, -0.577, -0.577]);
    config.advantage.scale = Scale::None;
    expect(advantages(&config), [0.667, -0.333, -0.333]);
    config.advantage.baseline = Baseline::LeaveOneOut;
    expect(advantages(&config), [1.0, -0.5, -0.5]);
}

#[test]
fn groups_that_teach_nothing_are_named_with_the_reason() {
    let mut episodes = vec![
        Ep::new("a0", "easy", true),
        Ep::new("a1", "easy", true),
        Ep::new("b0", "hard", false),
        Ep::new("b1", "hard", false),
        Ep::new("c0", "alone", true),
        Ep::new("c1", "alone", true),
        Ep::new("d0", "mixed", true),
        Ep::new("d1", "mixed", false),
    ];
    episodes[5].infrastructure = true;
    let summary = credit(&episodes, &CreditConfig::default()).unwrap().summary;
    let named: Vec<_> = summary
        .zero_variance
        .iter()
        .map(|g| (g.task_id.as_str(), g.why))
        .collect();
    assert_eq!(
        named,
        [
            ("alone", ZeroVariance::TooFew),
            ("easy", ZeroVariance::AllRight),
            ("hard", ZeroVariance::AllWrong),
        ]
    );
    assert_eq!(
        (
            summary.groups,
            summary.groups_mixed,
            summary.groups_with_variance
        ),
        (4, 1, 1)
    );
    let alone = &summary.zero_variance[0];
    assert_eq!((alone.total, alone.scored, alone.infrastructure), (2, 1, 1));
    assert_eq!((summary.pairs, summary.tasks_with_pairs), (1, 1));
}

#[test]
fn a_pair_parts_where_the_calls_first_differ() {
    let mut episodes = vec![Ep::new("won", "t", true), Ep::new("lost", "t", false)];
    let pair = |episodes: &[Ep]| {
        let credit = credit(episodes, &CreditConfig::default()).unwrap();
        assert_eq!(credit.pairs.len(), 1);
        (
            credit.pairs[0].divergence_step,
            credit.summary.pairs_identical,
        )
    };
    assert_eq!(pair(&episodes), (1, 0));
    episodes[1].steps = episodes[0].steps.clone();
    assert_eq!(pair(&episodes), (2, 1), "the same calls to the end");
    episodes[1].steps.push(vec![]);
    assert_eq!(pair(&episodes), (2, 0), "one went on, if only to talk");
    episodes[1].steps[0].push("look again".into());
    assert_eq!(pair(&episodes), (0, 0));
}

#[test]
fn without_qa_every_scored_episode_weighs_one() {
    let episodes = [Ep::new("a", "t", true), Ep::new("b", "t", false)];
    in_folder(|folder| {
        let files = lake(folder, &episodes);
        let credit = assign(
            &files,
            &Request::new(RUN.into(), None, "c".into()),
            &CreditConfig::default(),
        )
        .unwrap();
        assert!(
            credit
                .advantages
                .iter()
                .all(|r| (r.weight - 1.0).abs() < 1e-12)
        );
        assert_eq!(credit.summary.without_qa, 2);
    });
}

#[test]
fn evaluation_never_leaks_into_credit() {
    let refuse = |episodes: &[Ep], request: Request| {
        in_folder(|folder| {
            assign(&lake(folder, episodes), &request, &CreditConfig::default()).unwrap_err()
        })
    };
    let mut held = Ep::new("h", "t", true);
    held.purpose = "held_out";
    held.split = Some("held_out");
    let error = refuse(std::slice::from_ref(&held), request());
    assert!(
        matches!(error, CreditError::EvaluationRun { .. }),
        "{error}"
    );

    let asked = Request {
        purposes: vec![Purpose::HeldOut],
        ..request()
    };
    let error = refuse(std::slice::from_ref(&held), asked);
    assert!(matches!(error, CreditError::Purpose { .. }), "{error}");

    held.purpose = "train";
    let error = refuse(&[held, Ep::new("a", "t", true)], request());
    assert!(
        matches!(error, CreditError::EvaluationEpisode { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("held_out"), "{error}");
}

#[test]
fn unreadable_input_is_named() {
    let episodes = [Ep::new("a", "t", true), Ep::new("b", "t", false)];
    in_folder(|folder| {
        let files = lake(folder, &episodes);
        let broken = files[&Table::Rewards][0].path.clone();
        fs_err::write(&broken, b"PAR1 this is no Parquet file PAR1").unwrap();
        let error = assign(&files, &request(), &CreditConfig::default()).unwrap_err();
        assert!(error.to_string().contains(broken.as_str()), "{error}");
        fs_err::remove_file(&broken).unwrap();
        let error = assign(&files, &request(), &CreditConfig::default()).unwrap_err();
        assert!(error.to_string().contains(broken.as_str()), "{error}");
    });
    let nothing = assign(&Files::new(), &request(), &CreditConfig::default()).unwrap_err();
    assert!(
        matches!(nothing, CreditError::NoEpisodes { .. }),
        "{nothing}"
    );
    let twice = credit(
        &[Ep::new("a", "t", true), Ep::new("a", "t", true)],
        &CreditConfig::default(),
    )
    .unwrap_err();
    assert!(matches!(twice, CreditError::Twice { .. }), "{twice}");
    let missing = Files::from([(
        Table::Episodes,
        vec![DataFile {
            path: Utf8PathBuf::from("/nonexistent/a.parquet"),
            partition: vec![
                ("purpose".into(), "train".into()),
                ("run_date".into(), DAY.into()),
            ],
            rows: 1,
            bytes: 1,
        }],
    )]);
    let error = assign(&missing, &request(), &CreditConfig::default()).unwrap_err();
    assert!(
        error.to_string().contains("/nonexistent/a.parquet"),
        "{error}"
    );
}

#[test]
fn settings_are_checked() {
    let parse = |text: &str| serde_json::from_str::<CreditConfig>(text);
    assert_eq!(parse("{}").unwrap(), CreditConfig::default());
    assert!(
        parse(r#"{"gama": 1}"#)
            .unwrap_err()
            .to_string()
            .contains("gama")
    );
    for bad in [
        r#"{"gamma": 0.2}"#,
        r#"{"scheme": "best"}"#,
        r#"{"scheme": "custom"}"#,
        r#"{"custom": {"outcome": {"kind": "linear", "weight": 1}}}"#,
        r#"{"max_steps": 0}"#,
    ] {
        assert!(parse(bad).unwrap().check().is_err(), "{bad}");
    }
    let custom = r#"{"scheme": "custom", "custom": {"outcome": {"kind": "linear", "weight": 2}, "terms": {"turn_reward": {"weight": 0.1}}}}"#;
    assert!(parse(custom).unwrap().check().is_ok());
}
