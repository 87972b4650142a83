//! Many episodes at once: the work list, the workers, and what came of them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drillyard_gym::{TaskSet, Toolset, task_set};
use drillyard_lake::{EpisodeBundle, Filter, Lake};
use drillyard_sandbox::Pool;
use drillyard_schema::ids::derive_id;
use drillyard_schema::table::EpisodeRow;
use drillyard_schema::{EndReason, EpisodeId, GroupId, Task};
use serde_json::json;
use tokio::task::JoinSet;

use crate::episode::{Episode, Finish, Plan, seed_of};
use crate::error::AgentError;
use crate::options::{Point, RolloutOptions, RolloutSummary};
use crate::past::Past;
use crate::progress::{Progress, ProgressState};
use crate::shared::Shared;

/// How often the progress is shown.
const SHOW_EVERY: Duration = Duration::from_millis(250);

/// Runs every episode that the options ask for and the lake does not hold yet, and hands their rows to the lake.
///
/// Start it again after a crash, a kill or a stop, with the same options: what had ended is not run again, what was under way goes on
/// from the journal. Two processes must not run the same shard of the same run at once.
///
/// # Errors
/// When the policy, the sandbox, the lake or the journal can't be used at all. Faults that concern one episode end that episode
/// only, and are counted in the summary.
pub async fn rollout(
    options: RolloutOptions,
    lake: &Lake,
    pool: &Pool,
    progress: &dyn Progress,
) -> Result<RolloutSummary, AgentError> {
    check(&options)?;
    let begun = Instant::now();
    let (shared, recovered) = Shared::open(options, lake, pool).await?;
    let shared = Arc::new(shared);
    let done = episodes_in_lake(&shared, lake, &recovered.finished).await?;
    let mut work = WorkList::new(&shared.options, &done)?;
    let mut tally = Tally {
        summary: RolloutSummary {
            total: work.total,
            earlier: work.total - work.queue.len(),
            ..RolloutSummary::default()
        },
        begun,
    };
    let mut past = recovered.unfinished;
    let outcome = if work.queue.is_empty() {
        Ok(())
    } else {
        match shared.options.policy.client.probe().await {
            Ok(()) => run_all(&shared, &mut work, &mut past, &mut tally, progress).await,
            Err(error) => Err(AgentError::Policy(error)),
        }
    };
    progress.update(&tally.state(&shared));
    // Whatever went wrong, what had ended goes to the lake.
    let closed = match Arc::into_inner(shared) {
        Some(shared) => shared.close().await,
        None => Err(AgentError::Worker("it is still running".to_owned())),
    };
    outcome?;
    tally.summary.commits = closed?;
    tally.summary.left = tally.summary.total - tally.summary.earlier - tally.summary.done;
    tally.summary.wall_s = begun.elapsed().as_secs_f64();
    Ok(tally.summary)
}

fn check(options: &RolloutOptions) -> Result<(), AgentError> {
    let wrong = |text: String| Err(AgentError::Options(text));
    if options.samples == 0 || options.concurrency == 0 || options.max_steps == 0 {
        return wrong("samples, concurrency and max_steps must be at least 1".to_owned());
    }
    if options.shard.index >= options.shard.count {
        let (index, count) = (options.shard.index, options.shard.count);
        return wrong(format!("shard {index} of {count}: shards count from 0"));
    }
    if let Some(branch) = &options.branch {
        let task = &branch.task.task_id;
        if options.tasks.len() != 1 || options.tasks[0].task_id != *task {
            return wrong(format!(
                "a branch of {} is about task {task} and no other",
                branch.parent
            ));
        }
        if branch.step >= options.max_steps {
            let (step, most) = (branch.step, options.max_steps);
            return wrong(format!(
                "a branch at step {step} needs max_steps above it, not {most}"
            ));
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    for task in &options.tasks {
        if !seen.insert(&task.task_id) {
            return wrong(format!("task {} is listed twice", task.task_id));
        }
    }
    Ok(())
}

/// The episodes that need not be run: for each whether infrastructure ended it.
async fn episodes_in_lake(
    shared: &Shared,
    lake: &Lake,
    recovered: &[EpisodeRow],
) -> Result<HashMap<EpisodeId, bool>, AgentError> {
    let filter = Filter {
        run_id: Some(shared.options.run_id.clone()),
        purposes: vec![shared.options.purpose],
        stage_run: None,
    };
    let rows = lake.snapshot().await?.read::<EpisodeRow>(&filter).await?;
    Ok(rows
        .iter()
        .chain(recovered)
        .map(|row| (row.episode_id.clone(), row.status == "infrastructure"))
        .collect())
}

/// What is to be done.
struct WorkList {
    total: usize,
    queue: VecDeque<Plan>,
}

impl WorkList {
    fn new(options: &RolloutOptions, done: &HashMap<EpisodeId, bool>) -> Result<Self, AgentError> {
        let policy = options.policy.id();
        let sampling = json!({
            "temperature": options.sampling.temperature,
            "top_p": options.sampling.top_p,
            "max_tokens": options.sampling.max_tokens,
        })
        .to_string();
        let mut toolsets: BTreeMap<Vec<String>, Arc<Toolset>> = BTreeMap::new();
        let (mut total, mut queue) = (0, VecDeque::new());
        for (index, task) in options.tasks.iter().enumerate() {
            if index as u64 % u64::from(options.shard.count) != u64::from(options.shard.index) {
                continue;
            }
            let set = find_set(task)?;
            let toolset = if let Some(toolset) = toolsets.get(&task.tools) {
                toolset.clone()
            } else {
                let toolset = Arc::new(Toolset::named(&task.tools)?);
                toolsets.insert(task.tools.clone(), toolset.clone());
                toolset
            };
            let task = Arc::new(task.clone());
            for sample in 0..options.samples {
                total += 1;
                let sample_text = sample.to_string();
                let id = |attempt| episode_id(options, &policy, &task, sample, attempt);
                // The first attempt that is not in the lake, unless one that was scored is.
                let Some(attempt) = (0..options.attempts.max(1))
                    .find(|attempt| done.get(&id(*attempt)) != Some(&true))
                    .filter(|attempt| !done.contains_key(&id(*attempt)))
                else {
                    continue;
                };
                let seed = options.seed.to_string();
                let leaves = leaves(options);
                let mut seeds = vec!["episode", &seed, task.task_id.as_str(), &sample_text];
                seeds.extend(leaves.iter().map(String::as_str));
                queue.push_back(Plan {
                    task: task.clone(),
                    set: set.clone(),
                    toolset: toolset.clone(),
                    tools: toolset.specs.clone(),
                    sample_index: sample,
                    attempt,
                    episode_id: id(attempt),
                    group_id: group_id(options, &policy, &sampling, &toolset, &task),
                    seed: seed_of(&seeds),
                    parent: options.branch.as_ref().map(|branch| branch.parent.clone()),
                });
            }
        }
        Ok(Self { total, queue })
    }

    /// The same sample once more, if it has attempts left.
    fn again(&mut self, options: &RolloutOptions, mut plan: Plan) -> bool {
        if plan.attempt + 1 >= options.attempts {
            return false;
        }
        plan.attempt += 1;
        plan.episode_id = episode_id(
            options,
            &options.policy.id(),
            &plan.task,
            plan.sample_index,
            plan.attempt,
        );
        self.queue.push_back(plan);
        true
    }
}

/// What tells branches of one place from those of others, and from episodes that are none.
fn leaves(options: &RolloutOptions) -> Vec<String> {
    options.branch.as_ref().map_or_else(Vec::new, |branch| {
        vec![
            "branch".to_owned(),
            branch.parent.to_string(),
            branch.step.to_string(),
        ]
    })
}

fn episode_id(
    options: &RolloutOptions,
    policy: &str,
    task: &Task,
    sample: u32,
    attempt: u32,
) -> EpisodeId {
    let plain = EpisodeId::derive(&options.run_id, policy, &task.task_id, sample, attempt);
    let leaves = leaves(options);
    if leaves.is_empty() {
        return plain;
    }
    let parts: Vec<&str> = std::iter::once(plain.as_str())
        .chain(leaves.iter().map(String::as_str))
        .collect();
    EpisodeId(derive_id(&parts, 32))
}

/// A branch's siblings are those that left the same episode at the same step: only their returns compare.
fn group_id(
    options: &RolloutOptions,
    policy: &str,
    sampling: &str,
    toolset: &Toolset,
    task: &Task,
) -> GroupId {
    let plain = GroupId::derive(
        &options.run_id,
        policy,
        sampling,
        &toolset.hash,
        &task.task_id,
    );
    let Some(branch) = &options.branch else {
        return plain;
    };
    let leaves = leaves(options);
    let parts: Vec<&str> = [plain.as_str(), branch.group_id.as_str()]
        .into_iter()
        .chain(leaves.iter().map(String::as_str))
        .collect();
    GroupId(derive_id(&parts, 32))
}

pub(crate) fn find_set(task: &Task) -> Result<Arc<dyn TaskSet>, AgentError> {
    task_set(&task.task_set).ok_or_else(|| {
        let known = drillyard_gym::TASK_SETS.join(", ");
        AgentError::Options(format!(
            "task {}: there is no task set '{}'; the sets are: {known}",
            task.task_id, task.task_set
        ))
    })
}

/// What is left of an episode once its rows are with the writer.
struct Ended {
    reason: EndReason,
    cause: Option<String>,
    family: String,
    success: Option<bool>,
    tool_calls: u64,
}

impl Ended {
    fn of(bundle: &EpisodeBundle) -> Self {
        let episode = &bundle.episode;
        Self {
            reason: episode.end_reason.parse().unwrap_or(EndReason::Other),
            cause: episode.infrastructure_cause.clone(),
            family: episode.family.clone(),
            success: bundle.verdicts.last().and_then(|verdict| verdict.success),
            tool_calls: bundle.tool_calls.len() as u64,
        }
    }
}

struct Tally {
    summary: RolloutSummary,
    begun: Instant,
}

impl Tally {
    fn add(&mut self, ended: &Ended, last_attempt: bool) {
        let summary = &mut self.summary;
        summary.done += usize::from(last_attempt);
        summary.tool_calls += ended.tool_calls;
        *summary
            .end_reasons
            .entry(ended.reason.to_string())
            .or_default() += 1;
        if ended.reason.is_infrastructure() {
            summary.infrastructure += 1;
            if let Some(cause) = &ended.cause {
                let causes = &mut summary.causes;
                causes
                    .entry(ended.reason.to_string())
                    .or_insert_with(|| cause.clone());
            }
        }
        if let Some(success) = ended.success {
            summary.scored += 1;
            summary.successes += usize::from(success);
            let (scored, successes) = summary.families.entry(ended.family.clone()).or_default();
            *scored += 1;
            *successes += usize::from(success);
        }
    }

    fn state(&mut self, shared: &Shared) -> ProgressState {
        let (steps, tokens) = shared.work_done();
        let summary = &mut self.summary;
        summary.steps = steps;
        summary.generated_tokens = tokens;
        ProgressState {
            total: summary.total,
            earlier: summary.earlier,
            done: summary.done,
            scored: summary.scored,
            successes: summary.successes,
            infrastructure: summary.infrastructure,
            steps,
            generated_tokens: tokens,
            elapsed: self.begun.elapsed(),
        }
    }
}

async fn run_all(
    shared: &Arc<Shared>,
    work: &mut WorkList,
    past: &mut BTreeMap<EpisodeId, Past>,
    tally: &mut Tally,
    progress: &dyn Progress,
) -> Result<(), AgentError> {
    let mut workers: JoinSet<(Plan, Result<Option<Ended>, AgentError>)> = JoinSet::new();
    let mut failure = None;
    let mut show = tokio::time::interval(SHOW_EVERY);
    let asked_to_stop = shared.options.stop.clone();
    loop {
        while workers.len() < shared.options.concurrency && !shared.stop.is_stopped() {
            let Some(plan) = work.queue.pop_front() else {
                break;
            };
            let past = past.remove(&plan.episode_id).unwrap_or_default();
            tally.summary.resumed += usize::from(past.is_resumed());
            let past = match &shared.options.branch {
                Some(branch) => past.after(&branch.events),
                None => past,
            };
            let shared = shared.clone();
            workers.spawn(async move {
                let outcome = one(&shared, &plan, past).await;
                (plan, outcome)
            });
        }
        tokio::select! {
            joined = workers.join_next() => match joined {
                None => break,
                Some(Ok((plan, Ok(Some(ended))))) => {
                    let again = ended.reason.is_infrastructure() && work.again(&shared.options, plan);
                    tally.add(&ended, !again);
                }
                // Left for another execution.
                Some(Ok((_, Ok(None)))) => {}
                Some(Ok((_, Err(error)))) => {
                    failure.get_or_insert(error);
                    shared.stop.stop();
                }
                Some(Err(error)) => {
                    failure.get_or_insert(AgentError::Worker(error.to_string()));
                    shared.stop.stop();
                }
            },
            () = asked_to_stop.stopped(), if !shared.stop.is_stopped() => shared.stop.stop(),
            _ = show.tick() => progress.update(&tally.state(shared)),
        }
    }
    match shared.take_abort().or(failure) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

async fn one(shared: &Shared, plan: &Plan, past: Past) -> Result<Option<Ended>, AgentError> {
    match Episode::new(shared, plan, past)?.run().await? {
        Finish::Suspended => Ok(None),
        Finish::Ended(bundle) => {
            let ended = Ended::of(&bundle);
            shared.submit(*bundle).await?;
            shared.hold(Point::Submitted, &plan.episode_id).await;
            Ok(Some(ended))
        }
    }
}
