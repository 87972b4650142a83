//! `drillyard replay` and `drillyard branch`: a recorded episode's calls again, and new episodes from the middle of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use drillyard_agent::{Branch, Clocks, Recorded, Replay, ReplayedCall, Sameness};
use drillyard_lake::{Filter, Snapshot};
use drillyard_sandbox::Pool;
use drillyard_schema::table::{
    EpisodeRow, MessageRow, Row, RunRow, StepRow, TaskRow, TokenRow, ToolCallRow,
};
use drillyard_schema::{EpisodeId, Purpose, Split, Task};
use drillyard_stage::exit::{DIFFERS, ENVIRONMENT, INPUT, OK, REFUSED, USAGE};
use drillyard_stage::{Failure, Pipeline};
use serde_json::{Value, json};

use crate::args::{BranchArgs, ReplayArgs};
use crate::context::Context;
use crate::stages::{
    Drill, PolicySpec, agent_failure, decides, deciding, named_task_set, sandbox_config,
};

/// Nights of a pipeline that are searched for an episode's task.
const NIGHTS: u64 = 365;

/// Replays one episode.
pub(crate) async fn replay(context: &Context, args: &ReplayArgs) -> Result<u8, Failure> {
    let (recorded, pipeline) = find(context, &args.episode).await?;
    let pool = pool(&pipeline).await?;
    let replay = drillyard_agent::replay(&recorded, clocks(&pipeline), &pool, args.until)
        .await
        .map_err(|e| agent_failure(&e))?;
    let text = if args.json {
        format!("{:#}\n", as_json(&replay))
    } else {
        as_text(&recorded.episode, &replay)
    };
    context
        .ui
        .data(&text)
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(if replay.is_same() { OK } else { DIFFERS })
}

/// Makes new episodes from a step of one.
pub(crate) async fn branch(context: &Context, args: &BranchArgs) -> Result<u8, Failure> {
    let (recorded, recorded_under) = find(context, &args.episode).await?;
    let parent = &recorded.episode;
    if args.at >= context.pipeline.rollout.max_steps {
        return Err(Failure::new(
            USAGE,
            format!(
                "a branch at step {} needs rollout.max_steps above it, not {}",
                args.at, context.pipeline.rollout.max_steps
            ),
        ));
    }
    let pool = pool(&recorded_under).await?;
    let (replay, branch) =
        drillyard_agent::branch(&recorded, clocks(&recorded_under), &pool, args.at)
            .await
            .map_err(|e| agent_failure(&e))?;
    drop(pool);
    let Some(branch) = branch else {
        context
            .ui
            .data(&as_text(parent, &replay))
            .map_err(|e| Failure::io("standard output", &e))?;
        return Err(Failure::new(
            REFUSED,
            format!(
                "episode {} can't be left at step {}: a call before it gives something else now, so the state the model saw can't be brought back",
                parent.episode_id, args.at
            ),
        )
        .hint("leave it at an earlier step"));
    };
    let text = go_on(context, &recorded, branch, args).await?;
    context
        .ui
        .data(&text)
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}

/// Runs the new episodes. They belong to a run of their own, so that no group of the parent's run has them among its members.
async fn go_on(
    context: &Context,
    recorded: &Recorded,
    branch: Branch,
    args: &BranchArgs,
) -> Result<String, Failure> {
    let parent = &recorded.episode;
    let pipeline = &context.pipeline;
    let purpose: Purpose = parent
        .purpose
        .parse()
        .map_err(|why| Failure::new(INPUT, format!("episode {}: {why}", parent.episode_id)))?;
    let policy = PolicySpec::of(pipeline, "branch", None, None)?;
    let mut more = BTreeMap::from([
        ("parent", parent.episode_id.to_string()),
        ("at", args.at.to_string()),
        ("seed", pipeline.seed.to_string()),
    ]);
    more.extend(decides(&pipeline.faults, purpose != Purpose::Train));
    let parts = deciding(pipeline, &policy, &more)?;
    let parts: Vec<&str> = parts
        .iter()
        .flat_map(|(key, value)| [key.as_str(), value.as_str()])
        .collect();
    let run = context.run(&format!("{}-branch", pipeline.name), &parts)?;
    let drill = Drill {
        context,
        run: run.clone(),
        purpose,
        tasks: vec![recorded.task.clone()],
        samples: args.n,
        policy,
        seed: pipeline.seed,
        shard: Some((0, 1)),
        label: "branch".to_owned(),
    };
    let summary = drill.execute_from(Some(branch)).await?;
    let mut text = format!(
        "{} episodes from step {} of {}\n",
        summary.earlier + summary.done,
        args.at,
        parent.episode_id
    );
    if summary.earlier > 0 {
        let _ = writeln!(
            text,
            "  {} of them were in the lake already",
            summary.earlier
        );
    }
    if let Some(rate) = summary.success_rate() {
        let _ = writeln!(
            text,
            "  {:.1} % success of {} scored now",
            rate * 100.0,
            summary.scored
        );
    }
    let _ = writeln!(text, "  run {}", run.run_id);
    let _ = writeln!(
        text,
        "next: drillyard sql \"SELECT episode_id, end_reason, success FROM episode_outcomes WHERE run_id = '{}'\"",
        run.run_id
    );
    Ok(text)
}

fn clocks(pipeline: &Pipeline) -> Clocks {
    let limits = &pipeline.sandbox.limits;
    Clocks {
        call: Duration::from_secs_f64(limits.call_s),
        episode: Duration::from_secs_f64(limits.episode_s),
    }
}

async fn pool(pipeline: &Pipeline) -> Result<Pool, Failure> {
    let mut config = sandbox_config(pipeline)?;
    config.pool_size = 1;
    Pool::start(config)
        .await
        .map_err(|e| Failure::from_error(ENVIRONMENT, &e))
}

/// The episode of this id, or whose id begins so, and the settings it was recorded under.
async fn find(context: &Context, id: &str) -> Result<(Recorded, Pipeline), Failure> {
    let unreadable = |e: drillyard_lake::LakeError| Failure::from_error(INPUT, &e);
    let snapshot = context.lake.snapshot().await.map_err(unreadable)?;
    let mut found: Vec<EpisodeRow> = snapshot
        .read(&Filter::default())
        .await
        .map_err(unreadable)?;
    found.retain(|row| !id.is_empty() && row.episode_id.as_str().starts_with(id));
    let ids: BTreeSet<&EpisodeId> = found.iter().map(|row| &row.episode_id).collect();
    if ids.len() > 1 {
        return Err(
            Failure::new(USAGE, format!("{} episodes begin with '{id}'", ids.len()))
                .hint("give more of the id"),
        );
    }
    let Some(episode) = found.pop() else {
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
    let pipeline = recorded_under(context, &episode).await?;
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
    let task = generated_again(&task, &[&pipeline, &context.pipeline])?;
    let recorded = Recorded {
        task,
        steps: of_episode(&snapshot, &episode, |row: &StepRow| &row.episode_id).await?,
        messages: of_episode(&snapshot, &episode, |row: &MessageRow| &row.episode_id).await?,
        tool_calls: of_episode(&snapshot, &episode, |row: &ToolCallRow| &row.episode_id).await?,
        tokens: of_episode(&snapshot, &episode, |row: &TokenRow| &row.episode_id).await?,
        episode,
    };
    Ok((recorded, pipeline))
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

/// The settings of the episode's run: as its stage recorded them, or today's where no record tells.
async fn recorded_under(context: &Context, episode: &EpisodeRow) -> Result<Pipeline, Failure> {
    let history = context.runner.history().await?;
    let of_run = |row: &&RunRow| row.run_id == episode.run_id;
    // Evaluations are recorded with the rollout whose policy they measure: theirs is the execution that the episode falls into.
    let meanwhile = |row: &&RunRow| {
        let named = episode.run_id.as_str().strip_prefix(row.pipeline.as_str());
        named.is_some_and(|rest| rest.starts_with('-'))
            && row.started_at <= episode.started_at
            && episode.ended_at <= row.ended_at
    };
    let found = history
        .iter()
        .find(of_run)
        .or_else(|| history.iter().find(meanwhile))
        .and_then(|row| serde_json::from_str::<Pipeline>(&row.config).ok());
    if found.is_none() {
        context.ui.note(format!(
            "run {} has no record of its settings; those of pipeline {} are taken",
            episode.run_id, context.pipeline.name
        ));
    }
    Ok(found.unwrap_or_else(|| context.pipeline.clone()))
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

fn as_json(replay: &Replay) -> Value {
    let mut value = serde_json::to_value(replay).unwrap_or_default();
    value["same"] = replay.is_same().into();
    value["counts"] = json!({
        "same": replay.count(Sameness::Same),
        "same_but_times": replay.count(Sameness::SameButTimes),
        "differs": replay.count(Sameness::Differs),
        "not_run": replay.count(Sameness::NotRun),
    });
    value
}

fn as_text(episode: &EpisodeRow, replay: &Replay) -> String {
    let mut text = format!(
        "episode {} · {} · {} · recorded {}\n",
        episode.episode_id,
        episode.task_id,
        episode.policy,
        chrono::DateTime::from_timestamp_micros(episode.started_at.0)
            .map_or_else(String::new, |at| at
                .to_rfc3339_opts(chrono::SecondsFormat::Secs, true)),
    );
    for call in &replay.calls {
        line(&mut text, call);
    }
    let _ = writeln!(
        text,
        "{} calls: {} the same, {} the same but for the time, {} not run, {} different",
        replay.calls.len(),
        replay.count(Sameness::Same),
        replay.count(Sameness::SameButTimes),
        replay.count(Sameness::NotRun),
        replay.count(Sameness::Differs),
    );
    text
}

fn line(text: &mut String, call: &ReplayedCall) {
    let says = match call.sameness {
        Sameness::Same => "same".to_owned(),
        Sameness::SameButTimes => "same but for the time".to_owned(),
        Sameness::Differs => "DIFFERS".to_owned(),
        Sameness::NotRun => format!("not run: {}", call.why.as_deref().unwrap_or_default()),
    };
    let fault = call
        .fault
        .as_ref()
        .map_or_else(String::new, |fault| format!(" [{fault}]"));
    let _ = writeln!(
        text,
        "  step {} call {} {} {}{fault}: {says}",
        call.step,
        call.call,
        call.tool,
        short(&call.arguments, 60)
    );
    for difference in &call.differences {
        let _ = writeln!(
            text,
            "    {}: recorded {}, now {}",
            difference.what, difference.recorded, difference.replayed
        );
        if let Some((recorded, replayed)) = &difference.lines {
            let _ = writeln!(text, "      - {}", short(recorded, 100));
            let _ = writeln!(text, "      + {}", short(replayed, 100));
        }
    }
}

/// The beginning of a text, on one line.
fn short(text: &str, most: usize) -> String {
    let line = text.replace(['\n', '\r'], " ");
    if line.chars().count() <= most {
        return line;
    }
    line.chars().take(most).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
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
}
