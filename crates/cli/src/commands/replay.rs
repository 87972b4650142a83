//! `drillyard replay` and `drillyard branch`: a recorded episode's calls again, and new episodes from the middle of it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use drillyard_agent::Recorded;
use drillyard_lake::{Filter, Snapshot};
use drillyard_schema::table::{
    EpisodeRow, MessageRow, Row, RunRow, StepRow, TaskRow, TokenRow, ToolCallRow,
};
use drillyard_schema::{EpisodeId, Split, Task};
use drillyard_stage::exit::{DIFFERS, INPUT, OK, USAGE};
use drillyard_stage::{Failure, Pipeline, Record};

use crate::args::{BranchArgs, ReplayArgs};
use crate::context::Context;
use crate::stages::{
    BranchStage, agent_failure, as_json, as_recorded, as_text, clocks, named_task_set,
};

/// Nights of a pipeline that are searched for an episode's task.
const NIGHTS: u64 = 365;

/// Replays one episode.
pub(crate) async fn replay(context: &Context, args: &ReplayArgs) -> Result<u8, Failure> {
    let (recorded, recorded_under) = find(context, &args.episode).await?;
    let pool = as_recorded(context, &recorded_under).await?;
    let replay = drillyard_agent::replay(&recorded, clocks(&recorded_under), &pool, args.until)
        .await
        .map_err(|e| agent_failure(&e))?;
    let written = if args.json {
        context.ui.data(&format!("{:#}\n", as_json(&replay)))
    } else {
        context.ui.text(&as_text(&recorded.episode, &replay))
    };
    written.map_err(|e| Failure::io("standard output", &e))?;
    Ok(if replay.is_same() { OK } else { DIFFERS })
}

/// Makes new episodes from a step of one.
pub(crate) async fn branch(context: &Context, args: &BranchArgs) -> Result<u8, Failure> {
    let (recorded, recorded_under) = find(context, &args.episode).await?;
    let pipeline = &context.pipeline;
    if args.at >= pipeline.rollout.max_steps {
        return Err(Failure::new(
            USAGE,
            format!(
                "a branch at step {} needs rollout.max_steps above it, not {}",
                args.at, pipeline.rollout.max_steps
            ),
        ));
    }
    let time = Duration::from_secs_f64(pipeline.sandbox.limits.episode_s);
    drillyard_agent::can_be_left(&recorded, args.at, time).map_err(|e| agent_failure(&e))?;
    let stage = BranchStage::new(context, &recorded, &recorded_under, args.at, args.n)?;
    let run = stage.run_identity().clone();
    let record = context.runner.run(&stage, &run.run_id).await?;
    context
        .ui
        .text(&told(&recorded.episode, args.at, &record))
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}

/// What a branch ends with.
fn told(parent: &EpisodeRow, at: u32, record: &Record) -> String {
    let figure = |name: &str| record.figures[name].as_u64().unwrap_or_default();
    let episodes = figure("episodes");
    let mut text = format!(
        "{episodes} episodes from step {at} of {}\n",
        parent.episode_id
    );
    let earlier = if record.skipped {
        episodes
    } else {
        figure("earlier")
    };
    if earlier > 0 {
        let _ = writeln!(text, "  {earlier} of them were in the lake already");
    }
    if let Some(rate) = record.figures["success"].as_f64() {
        let _ = writeln!(
            text,
            "  {:.1} % success of {} scored",
            rate * 100.0,
            figure("scored")
        );
    }
    let run = &record.row.run_id;
    let _ = writeln!(text, "  run {run}; qa judges it, training leaves it alone");
    let _ = writeln!(
        text,
        "next: drillyard sql \"SELECT episode_id, end_reason, success FROM episode_outcomes WHERE run_id = '{run}'\""
    );
    text
}

/// The episode of this id, or whose id begins so, and the settings it was recorded under.
async fn find(context: &Context, id: &str) -> Result<(Recorded, Pipeline), Failure> {
    let unreadable = |e: drillyard_lake::LakeError| Failure::from_error(INPUT, &e);
    let snapshot = context.lake.snapshot().await.map_err(unreadable)?;
    let all: Vec<EpisodeRow> = snapshot
        .read(&Filter::default())
        .await
        .map_err(unreadable)?;
    let begins = |row: &&EpisodeRow| !id.is_empty() && row.episode_id.as_str().starts_with(id);
    let ids: BTreeSet<&EpisodeId> = all
        .iter()
        .filter(begins)
        .map(|row| &row.episode_id)
        .collect();
    if ids.len() > 1 {
        return Err(
            Failure::new(USAGE, format!("{} episodes begin with '{id}'", ids.len()))
                .hint("give more of the id"),
        );
    }
    let Some(episode) = all.iter().find(begins) else {
        return Err(Failure::new(INPUT, format!("there is no episode '{id}'")).hint(
            "drillyard sql \"SELECT episode_id, family, success FROM episode_outcomes\" lists them",
        ));
    };
    if episode.imported_from.is_some() {
        return Err(Failure::new(
            INPUT,
            format!(
                "episode {} was recorded by another harness; its sandbox can't be made again",
                episode.episode_id
            ),
        ));
    }
    let settings = recorded_under(context, &lineage(&all, episode)).await?;
    let filter = Filter::run(&episode.run_id);
    let tasks: Vec<TaskRow> = snapshot.read(&filter).await.map_err(unreadable)?;
    let task = tasks
        .into_iter()
        .find(|row| row.task_id == episode.task_id)
        .ok_or_else(|| {
            Failure::new(
                INPUT,
                format!("task {} is not in the lake", episode.task_id),
            )
        })?;
    // A branch is about its parent's task, whatever the seed of its own run.
    let mut pipelines: Vec<&Pipeline> = settings.iter().collect();
    pipelines.push(&context.pipeline);
    let task = generated_again(&task, &pipelines)?;
    let mut recorded = Recorded {
        task,
        steps: of_episode(&snapshot, episode, |row: &StepRow| &row.episode_id).await?,
        messages: of_episode(&snapshot, episode, |row: &MessageRow| &row.episode_id).await?,
        tool_calls: of_episode(&snapshot, episode, |row: &ToolCallRow| &row.episode_id).await?,
        tokens: of_episode(&snapshot, episode, |row: &TokenRow| &row.episode_id).await?,
        episode: episode.clone(),
    };
    recorded.steps.sort_by_key(|row| row.step_index);
    recorded
        .tool_calls
        .sort_by_key(|row| (row.step_index, row.call_index));
    let pipeline = pipelines[0].clone();
    Ok((recorded, pipeline))
}

/// An episode, the one it left, the one that left, and so on, as far as the lake holds them.
fn lineage<'a>(all: &'a [EpisodeRow], episode: &'a EpisodeRow) -> Vec<&'a EpisodeRow> {
    let mut line = vec![episode];
    while let Some(parent) = line.last().and_then(|row| row.parent_episode_id.as_ref())
        && let Some(row) = all.iter().find(|row| row.episode_id == *parent)
        && line.iter().all(|known| known.episode_id != row.episode_id)
    {
        line.push(row);
    }
    line
}

async fn of_episode<R: Row>(
    snapshot: &Snapshot,
    episode: &EpisodeRow,
    id: impl Fn(&R) -> &EpisodeId,
) -> Result<Vec<R>, Failure> {
    let mut rows: Vec<R> = snapshot
        .read(&Filter::run(&episode.run_id))
        .await
        .map_err(|e| Failure::from_error(INPUT, &e))?;
    rows.retain(|row| *id(row) == episode.episode_id);
    Ok(rows)
}

/// What the lake knows of the settings an episode was run under.
enum Settings {
    Recorded(Box<Pipeline>),
    /// There is a record, and this Drillyard can't read it.
    Unreadable(String),
    Absent,
}

fn settings_of(history: &[RunRow], episode: &EpisodeRow) -> Settings {
    let of_run = |row: &&RunRow| row.run_id == episode.run_id;
    // Evaluations are recorded with the rollout whose policy they measure: theirs is the execution that the episode falls into.
    let meanwhile = |row: &&RunRow| {
        let named = episode.run_id.as_str().strip_prefix(row.pipeline.as_str());
        named.is_some_and(|rest| rest.starts_with('-'))
            && row.started_at <= episode.started_at
            && episode.ended_at <= row.ended_at
    };
    let row = history
        .iter()
        .find(of_run)
        .or_else(|| history.iter().find(meanwhile));
    match row.map(|row| serde_json::from_str(&row.config)) {
        Some(Ok(pipeline)) => Settings::Recorded(Box::new(pipeline)),
        Some(Err(error)) => Settings::Unreadable(error.to_string()),
        None => Settings::Absent,
    }
}

/// The settings of an episode's run and of those it descends from, as far as stages recorded them; the first are those to replay it
/// under. Where its own are missing that is said.
async fn recorded_under(
    context: &Context,
    lineage: &[&EpisodeRow],
) -> Result<Vec<Pipeline>, Failure> {
    let history = context.runner.history().await?;
    let mut found = Vec::new();
    let mut missing = None;
    for (generation, row) in lineage.iter().enumerate() {
        let lacks = match settings_of(&history, row) {
            Settings::Recorded(pipeline) => {
                found.push(*pipeline);
                continue;
            }
            Settings::Unreadable(why) => format!(
                "the settings recorded of run {} can't be read by this Drillyard ({why})",
                row.run_id
            ),
            Settings::Absent => format!("run {} has no record of its settings", row.run_id),
        };
        if generation == 0 {
            missing = Some(lacks);
        }
    }
    if let Some(lacks) = missing {
        let taken = if found.is_empty() {
            format!("those of pipeline {} are taken", context.pipeline.name)
        } else {
            "those of the episode it left are taken".to_owned()
        };
        context.ui.warn(format!("{lacks}; {taken}"));
    }
    Ok(found)
}

/// The task of a row, as its set generates it from a pipeline's seeds.
fn generated_again(row: &TaskRow, pipelines: &[&Pipeline]) -> Result<Task, Failure> {
    let set = named_task_set(&row.task_set)?;
    if set.version() != row.task_set_version {
        return Err(Failure::new(
            INPUT,
            format!(
                "task {} is of {} version {}; this Drillyard generates version {}",
                row.task_id,
                row.task_set,
                row.task_set_version,
                set.version()
            ),
        )
        .hint("use the Drillyard that recorded it: SELECT drillyard_version FROM raw.episodes"));
    }
    let split: Split = row
        .split
        .as_deref()
        .unwrap_or_default()
        .parse()
        .map_err(|why| Failure::new(INPUT, format!("task {}: {why}", row.task_id)))?;
    let families = set.families().len();
    for pipeline in pipelines {
        let eval = &pipeline.eval;
        let (n, nights) = if split == Split::Train {
            (pipeline.tasks.train, NIGHTS)
        } else {
            let most = eval.tasks.max(pipeline.train.validation_tasks);
            ((most + eval.unseen_tasks * families) * 2, 1)
        };
        for night in 0..nights {
            let seed = if split == Split::Train {
                pipeline.seed.wrapping_add(night.wrapping_mul(0x9E37_79B9))
            } else {
                eval.seed
            };
            let tasks = set.generate(split, n, seed);
            let found = tasks.into_iter().find(|task| task.task_id == row.task_id);
            if let Some(task) = found.filter(|task| task.instruction == row.instruction) {
                return Ok(task);
            }
        }
    }
    Err(Failure::new(
        INPUT,
        format!(
            "task {} is not among those that the pipeline's seeds give",
            row.task_id
        ),
    )
    .hint("name the pipeline that recorded it with --pipeline, and the settings with --set"))
}

#[cfg(test)]
mod tests {
    use drillyard_schema::table::Timestamp;
    use drillyard_testkit::{SyntheticOptions, synthetic_bundle};

    use super::*;

    fn row(task: &Task) -> TaskRow {
        TaskRow {
            run_date: "2026-01-02".to_owned(),
            purpose: "train".to_owned(),
            run_id: "r".into(),
            task_id: task.task_id.clone(),
            task_set: task.task_set.clone(),
            task_set_version: task.task_set_version.clone(),
            family: task.family.clone(),
            difficulty: None,
            split: Some(task.split.to_string()),
            unseen_family: task.unseen_family,
            instruction: task.instruction.clone(),
            verifier: None,
            milestones: None,
            evaluation_set: false,
            source: String::new(),
            licence: String::new(),
        }
    }

    #[test]
    fn a_task_is_generated_again_from_its_row() {
        let text = "name = 'p'\n[tasks]\ntrain = 20\n[eval]\ntasks = 20\nunseen_tasks = 2\n";
        let pipeline = Pipeline::parse(text, "p.toml", &[]).unwrap();
        let set = named_task_set("wrangle").unwrap();
        let third_night = pipeline.seed.wrapping_add(2 * 0x9E37_79B9);
        for (split, n, seed) in [
            (Split::Train, 20, pipeline.seed),
            (Split::Train, 20, third_night),
            (Split::HeldOut, 24, pipeline.eval.seed),
        ] {
            let task = set.generate(split, n, seed).pop().unwrap();
            assert_eq!(generated_again(&row(&task), &[&pipeline]).unwrap(), task);
        }
        let other = set.generate(Split::Train, 1, 99).pop().unwrap();
        let failure = generated_again(&row(&other), &[&pipeline]).unwrap_err();
        assert_eq!(failure.code, INPUT);
        let mut old = row(&other);
        old.task_set_version = "0".to_owned();
        let failure = generated_again(&old, &[&pipeline]).unwrap_err();
        assert!(failure.message.contains("version 0"), "{}", failure.message);
    }

    fn record(run: &str, config: &str) -> RunRow {
        RunRow {
            stage_run: "s".into(),
            run_id: run.into(),
            pipeline: "p".to_owned(),
            stage: "rollout".to_owned(),
            stage_version: 1,
            status: "succeeded".to_owned(),
            fingerprint: String::new(),
            config: config.to_owned(),
            inputs: String::new(),
            outputs: String::new(),
            figures: String::new(),
            drillyard_version: String::new(),
            started_at: Timestamp(10),
            ended_at: Timestamp(20),
        }
    }

    #[test]
    fn settings_that_can_not_be_read_are_not_absent_ones() {
        let pipeline = Pipeline::parse("name = 'p'\nseed = 3\n", "p.toml", &[]).unwrap();
        let readable = pipeline.to_json().to_string();
        let of = |history: &[RunRow], run: &str| {
            let episode = EpisodeRow {
                run_id: run.into(),
                started_at: Timestamp(12),
                ended_at: Timestamp(15),
                ..synthetic_bundle(1, &SyntheticOptions::default()).episode
            };
            settings_of(history, &episode)
        };
        let history = [
            record("p-1", &readable),
            record("p-2", "{\"name\":\"p\",\"of_another_version\":1}"),
        ];
        assert!(matches!(of(&history, "p-1"), Settings::Recorded(p) if p.seed == 3));
        let Settings::Unreadable(why) = of(&history, "p-2") else {
            panic!("it was read");
        };
        assert!(why.contains("of_another_version"), "{why}");
        // An evaluation falls into the execution that it was part of.
        assert!(matches!(
            of(&history[..1], "p-held_out-9"),
            Settings::Recorded(_)
        ));
        assert!(matches!(
            of(&history[..1], "q-held_out-9"),
            Settings::Absent
        ));
        assert!(matches!(of(&[], "p-1"), Settings::Absent));
    }
}
