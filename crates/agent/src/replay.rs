//! Recorded calls, run again: to see whether they still give the same, and to leave an episode at a step for a branch.
//!
//! A branch needs the files as they were at its step. Where the episode's changes were kept with their contents, [`restore`] writes
//! them, and no call is run twice; elsewhere [`branch`] runs the calls again and makes no branch unless they come to the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use camino::Utf8Path;
use drillyard_gym::{ToolAction, Toolset};
use drillyard_sandbox::{CallResult, Change, Kind, Pool, Sandbox, Setup, Snapshot};
use drillyard_schema::table::{
    Artifact, EpisodeRow, FileChange, MessageRow, StepRow, TokenRow, ToolCallRow,
};
use drillyard_schema::{CallOutcome, DRILLYARD_VERSION, EndReason, EpisodeId, GroupId, Task};
use serde::Serialize;
use serde_json::Value;

use crate::calls::{self, Called, Injected, within};
use crate::episode::{ROW_OUTPUT_BYTES, fill_row, now_us, read_arguments};
use crate::error::AgentError;
use crate::files::Files;
use crate::pack::{Missing, changes_before};
use crate::past::{LoggedCall, LoggedTurn, PastEvent};
use crate::policy::{Recording, TurnReply};
use crate::rollout::find_set;
use crate::times::{Window, equal_but_for_times};

/// An episode as the lake holds it, with its task.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// The task, as its set generates it.
    pub task: Task,
    /// The episode.
    pub episode: EpisodeRow,
    /// Its turns, in order.
    pub steps: Vec<StepRow>,
    /// Its conversation, in order.
    pub messages: Vec<MessageRow>,
    /// Its calls, in order.
    pub tool_calls: Vec<ToolCallRow>,
    /// Its token ids.
    pub tokens: Vec<TokenRow>,
}

/// The clocks that calls are replayed under: those they were recorded under.
#[derive(Debug, Clone, Copy)]
pub struct Clocks {
    /// Of a call that names none.
    pub call: Duration,
    /// Of the episode.
    pub episode: Duration,
}

/// What a replayed call comes to, beside the recorded one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sameness {
    /// The same.
    Same,
    /// The same, but that each prints the time it ran at.
    SameButTimes,
    /// Not the same.
    Differs,
    /// It was not run: it had not been run, what came of it was never known, or it can't be run as it was.
    NotRun,
}

/// One thing about a call that is not the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `outcome`, `exit_code`, `signal`, `stdout`, `stderr`, `file PATH`, or `call` where it can't be run at all; of the ground `image`,
    /// `toolset`, `parser` or `drillyard`.
    pub what: String,
    /// As recorded: the value, or size and BLAKE3 of an output or content.
    pub recorded: String,
    /// As replayed.
    pub replayed: String,
    /// The first lines that are not the same, of outputs that are in the lake.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lines: Option<(String, String)>,
}

/// A replayed call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplayedCall {
    /// The step.
    pub step: i32,
    /// Position within the step.
    pub call: i32,
    /// The tool.
    pub tool: String,
    /// Its arguments, as the model wrote them.
    pub arguments: String,
    /// The fault that was injected, then and now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// How it compares.
    pub sameness: Sameness,
    /// Why it was not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What is not the same.
    pub differences: Vec<Difference>,
}

/// A replayed episode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Replay {
    /// The episode.
    pub episode_id: EpisodeId,
    /// What it stood on and is another now: a reason for calls to differ, and no difference by itself.
    pub ground: Vec<Difference>,
    /// Its calls, in order.
    pub calls: Vec<ReplayedCall>,
}

impl Replay {
    /// How many calls came to this.
    pub fn count(&self, sameness: Sameness) -> usize {
        self.calls
            .iter()
            .filter(|call| call.sameness == sameness)
            .count()
    }

    /// Whether no call differs.
    pub fn is_same(&self) -> bool {
        self.count(Sameness::Differs) == 0
    }
}

/// Where new episodes leave a recorded one. Clones share the files.
#[derive(Debug, Clone)]
pub struct Branch {
    /// The episode they leave.
    pub parent: EpisodeId,
    /// The step at which they do: the first one that is theirs.
    pub step: u32,
    pub(crate) task: Task,
    pub(crate) group_id: GroupId,
    pub(crate) events: Arc<Vec<PastEvent>>,
    pub(crate) snapshot: Snapshot,
}

/// Runs the recorded calls of an episode, up to and with the step `until`, in a fresh sandbox of `pool` with the same set-up, faults as
/// they were recorded, and tells call by call what is not the same.
///
/// # Errors
/// A task that can't be set up, or a sandbox that fails.
pub async fn replay(
    recorded: &Recorded,
    clocks: Clocks,
    pool: &Pool,
    until: Option<u32>,
) -> Result<Replay, AgentError> {
    let mut run = Run::new(recorded, clocks, pool)?;
    run.calls(|step| until.is_none_or(|last| step <= last))
        .await?;
    if let Some(sandbox) = run.sandbox.take() {
        sandbox.close().await;
    }
    Ok(run.replay)
}

/// What a recorded episode stood on and is another in `pool`, or in this Drillyard.
///
/// # Errors
/// A tool that is no longer there.
pub fn ground(recorded: &Recorded, pool: &Pool) -> Result<Vec<Difference>, AgentError> {
    let (episode, image) = (&recorded.episode, pool.image());
    let toolset = Toolset::named(&recorded.task.tools)?;
    let stands = [
        (
            "image",
            &episode.sandbox_image,
            format!("{}@{}", image.name, image.digest),
        ),
        ("toolset", &episode.toolset_hash, toolset.hash),
        (
            "parser",
            &episode.parser_version,
            drillyard_render::PARSER_VERSION.to_owned(),
        ),
        (
            "drillyard",
            &episode.drillyard_version,
            DRILLYARD_VERSION.to_owned(),
        ),
    ];
    Ok(stands
        .into_iter()
        .filter(|(_, then, now)| *then != now)
        .map(|(what, then, now)| Difference {
            what: what.to_owned(),
            recorded: then.clone(),
            replayed: now,
            lines: None,
        })
        .collect())
}

/// Why nothing follows the last step of an episode that ended so; none where the end came from outside and the model could go on.
const fn over(reason: EndReason) -> Option<&'static str> {
    match reason {
        EndReason::StepLimit
        | EndReason::SandboxFault
        | EndReason::EndpointFault
        | EndReason::HostFault
        | EndReason::Interrupted => None,
        EndReason::Submitted => Some("its last step submitted it"),
        EndReason::GaveUp => Some("it had given up: its last turns made no call"),
        EndReason::ParseLimit => Some("its last turns could not be read, one too many in a row"),
        EndReason::EpisodeTimeout => Some("its time was used up"),
        EndReason::ContextLimit => Some("its context was full"),
        EndReason::VerifierFault => Some("it was over, and only its verifier failed"),
        EndReason::Other => Some("it was over"),
    }
}

/// Whether new episodes of so much time can go on from step `at`, as far as the record tells.
///
/// # Errors
/// [`AgentError::CannotLeave`], with the cause and the way out.
pub fn can_be_left(recorded: &Recorded, at: u32, time: Duration) -> Result<(), AgentError> {
    let steps = recorded.steps.len() as u32;
    let refuse = |why: String, way_out: String| {
        Err(AgentError::CannotLeave {
            episode: recorded.episode.episode_id.clone(),
            step: at,
            why,
            way_out,
        })
    };
    let reason = recorded
        .episode
        .end_reason
        .parse()
        .unwrap_or(EndReason::Other);
    let over = over(reason);
    let last = match over {
        Some(_) => steps.checked_sub(1),
        None => Some(steps),
    };
    let earlier = last.map_or_else(
        || "it has no step to be left at".to_owned(),
        |last| format!("leave it at step {last} or before"),
    );
    if at > steps {
        return refuse(format!("it has {steps} steps, counted from 0"), earlier);
    }
    let failed = recorded
        .before(at)
        .find(|row| row.outcome == CallOutcome::SandboxFault.as_str());
    if let Some(row) = failed {
        let (step, call) = (row.step_index, row.call_index);
        return refuse(
            format!(
                "the sandbox failed in call {call} of step {step}, and what came of it is not known"
            ),
            format!("leave it at step {step} or before"),
        );
    }
    if at == steps
        && let Some(why) = over
    {
        return refuse(format!("{why} ({reason}), and nothing follows"), earlier);
    }
    let used = recorded.clock(at as i32, None);
    if used >= time {
        return refuse(
            format!(
                "the steps before it took {:.1} s, and a new episode has {:.1} s",
                used.as_secs_f64(),
                time.as_secs_f64()
            ),
            "give episodes more time (sandbox.limits.episode_s), or leave it at an earlier step"
                .to_owned(),
        );
    }
    Ok(())
}

/// Takes the files as they were before step `at` from what was kept of the episode's changes in `store`, for new episodes to go on from.
/// Nothing is run. What is missing comes back where they were not kept; [`branch`] is the way then.
///
/// # Errors
/// A step it can't be left at, a task that can't be set up, or a sandbox that fails.
pub async fn restore(
    recorded: &Recorded,
    pool: &Pool,
    at: u32,
    store: &Utf8Path,
) -> Result<Result<Branch, Missing>, AgentError> {
    can_be_left(recorded, at, Duration::MAX)?;
    let task = &recorded.task;
    let toolset = Toolset::named(&task.tools)?;
    recorded.fits(&toolset, at)?;
    let (episode, rows) = (recorded.episode.clone(), recorded.tool_calls.clone());
    let store = store.to_owned();
    let read = tokio::task::spawn_blocking(move || changes_before(&episode, &rows, at, &store));
    let changes = match read.await.map_err(|e| AgentError::Worker(e.to_string()))? {
        Ok(changes) => changes,
        Err(missing) => return Ok(Err(missing)),
    };
    let mut changes: BTreeMap<_, _> = changes
        .into_iter()
        .map(|one| ((one.step, one.call), one))
        .collect();
    let mut files = Files::new(find_set(task)?.setup_files(task)?);
    let mut logged = BTreeMap::new();
    for row in recorded.before(at).filter(|row| was_run(row)) {
        let place = (row.step_index, row.call_index);
        let (Ok(ToolAction::Sandbox(_)), Some(one)) =
            (action(&toolset, row), changes.remove(&place))
        else {
            continue;
        };
        if !one.sandbox_ended {
            files.change(&one.files, one.incomplete);
        } else if !calls::says_nothing(row) {
            files.forget_lost();
        }
        logged.insert(
            place,
            LoggedCall {
                row: row.clone(),
                observation: recorded.observation(row),
                artifacts: recorded.artifacts(row),
                files: one.files,
                sandbox_ended: one.sandbox_ended,
            },
        );
    }
    let mut sandbox = match laid_out(pool, &files).await? {
        Ok(sandbox) => sandbox,
        Err(message) => return Err(recorded.does_not_fit(at, &message)),
    };
    let snapshot = sandbox.snapshot().await?;
    sandbox.close().await;
    if let Some(path) = unlike(&snapshot, &files) {
        let message = format!("'{path}' is not as it was recorded");
        return Err(recorded.does_not_fit(at, &message));
    }
    Ok(Ok(recorded.point(at, &logged, snapshot)?))
}

/// Replays an episode up to step `at`, not included, and takes what is there for new episodes to go on from. There is no branch where
/// a replayed call differs: the state that the model saw could not be brought back.
///
/// # Errors
/// As [`replay`], or a step that the episode can't be left at.
pub async fn branch(
    recorded: &Recorded,
    clocks: Clocks,
    pool: &Pool,
    at: u32,
) -> Result<(Replay, Option<Branch>), AgentError> {
    can_be_left(recorded, at, Duration::MAX)?;
    let mut run = Run::new(recorded, clocks, pool)?;
    recorded.fits(&run.toolset, at)?;
    if let Some(row) = recorded.before(at).find(|row| injected(row).is_err()) {
        let (step, call) = (row.step_index, row.call_index);
        return Err(AgentError::CannotLeave {
            episode: recorded.episode.episode_id.clone(),
            step: at,
            why: format!(
                "the record does not tell how the fault of call {call} of step {step} was carried out, so it can't be run again"
            ),
            way_out: format!("leave it at step {step} or before"),
        });
    }
    run.calls(|step| step < at).await?;
    if !run.replay.is_same() {
        return Ok((run.replay, None));
    }
    let no_room = run.lease().await?.unwrap_or_default();
    let Some(mut sandbox) = run.sandbox.take() else {
        return Err(recorded.does_not_fit(at, &no_room));
    };
    let snapshot = sandbox.snapshot().await?;
    sandbox.close().await;
    let point = recorded.point(at, &run.logged, snapshot)?;
    Ok((run.replay, Some(point)))
}

/// A sandbox with the set-up and everything that changed since, or why the files as they are don't fit one.
async fn laid_out(pool: &Pool, files: &Files) -> Result<Result<Sandbox, String>, AgentError> {
    let setup = Setup {
        files: files.setup().to_vec(),
        ..Setup::default()
    };
    let mut sandbox = pool.lease(&setup).await?;
    let changes = files.changes();
    if !changes.is_empty() {
        match sandbox.apply(&changes).await {
            Ok(()) => {}
            Err(error) if !error.is_infrastructure() => return Ok(Err(error.to_string())),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Ok(sandbox))
}

/// The first changed file that is not in the snapshot as it should be.
fn unlike(snapshot: &Snapshot, files: &Files) -> Option<String> {
    let there: BTreeMap<&str, &[u8]> = snapshot.files().collect();
    let fits = |path: &str, hash: Option<&str>, content: Option<&[u8]>| {
        there.get(path).is_some_and(|found| match hash {
            Some(hash) => blake3::hash(found).to_hex().as_str() == hash,
            None => content == Some(*found),
        })
    };
    files
        .changes()
        .into_iter()
        .find(|file| match (file.change, file.kind) {
            (Change::Deleted, _) => there.contains_key(file.path.as_str()),
            (_, Kind::File) => !fits(
                &file.path,
                file.after_hash.as_deref(),
                file.content.as_deref(),
            ),
            _ => false,
        })
        .map(|file| file.path)
}

/// Whether the record has a result of the call's own: it was run, and what came of it is known.
fn was_run(row: &ToolCallRow) -> bool {
    let never = [
        CallOutcome::Rejected,
        CallOutcome::OutcomeUnknown,
        CallOutcome::SandboxFault,
    ];
    never.iter().all(|outcome| outcome.as_str() != row.outcome)
}

/// What a recorded call is to today's tools.
fn action(toolset: &Toolset, row: &ToolCallRow) -> Result<ToolAction, String> {
    read_arguments(&row.arguments).and_then(|arguments| toolset.to_call(&row.tool, &arguments))
}

/// A replay under way.
struct Run<'a> {
    recorded: &'a Recorded,
    clocks: Clocks,
    pool: &'a Pool,
    toolset: Toolset,
    files: Files,
    sandbox: Option<Sandbox>,
    replay: Replay,
    /// What ran, as a journal would hold it.
    logged: BTreeMap<(i32, i32), LoggedCall>,
}

impl<'a> Run<'a> {
    fn new(recorded: &'a Recorded, clocks: Clocks, pool: &'a Pool) -> Result<Self, AgentError> {
        let task = &recorded.task;
        let ground = ground(recorded, pool)?;
        Ok(Self {
            recorded,
            clocks,
            pool,
            toolset: Toolset::named(&task.tools)?,
            files: Files::new(find_set(task)?.setup_files(task)?),
            sandbox: None,
            replay: Replay {
                episode_id: recorded.episode.episode_id.clone(),
                ground,
                calls: Vec::new(),
            },
            logged: BTreeMap::new(),
        })
    }

    async fn calls(&mut self, wanted: impl Fn(u32) -> bool) -> Result<(), AgentError> {
        let recorded = self.recorded;
        for row in &recorded.tool_calls {
            if wanted(row.step_index.max(0) as u32) {
                self.call(row).await?;
            }
        }
        Ok(())
    }

    /// A sandbox with the files as they are now, if there is none yet. What it says is why they don't fit one.
    async fn lease(&mut self) -> Result<Option<String>, AgentError> {
        if self.sandbox.is_some() {
            return Ok(None);
        }
        match laid_out(self.pool, &self.files).await? {
            Ok(sandbox) => self.sandbox = Some(sandbox),
            Err(message) => return Ok(Some(message)),
        }
        Ok(None)
    }

    async fn call(&mut self, row: &ToolCallRow) -> Result<(), AgentError> {
        let mut replayed = ReplayedCall {
            step: row.step_index,
            call: row.call_index,
            tool: row.tool.clone(),
            arguments: row.arguments.clone(),
            fault: row.fault_injected.clone(),
            sameness: Sameness::NotRun,
            why: None,
            differences: Vec::new(),
        };
        let why = match row.outcome.parse() {
            Ok(CallOutcome::Rejected) => Some("it was rejected and had not been run"),
            Ok(CallOutcome::OutcomeUnknown) => Some("what came of it was never known"),
            Ok(CallOutcome::SandboxFault) => Some("the sandbox had failed"),
            _ if injected(row).is_err() => {
                Some("the record does not tell how its fault was carried out")
            }
            _ => None,
        };
        if let Some(why) = why {
            replayed.why = Some(why.to_owned());
            self.replay.calls.push(replayed);
            return Ok(());
        }
        if self.sandbox.is_none()
            && let Some(lost) = self.files.lost()
        {
            replayed.sameness = Sameness::Differs;
            replayed.differences.push(Difference {
                what: "call".to_owned(),
                recorded: row.outcome.clone(),
                replayed: format!("not run: the sandbox ended, and {lost} went with it"),
                lines: None,
            });
            self.replay.calls.push(replayed);
            return Ok(());
        }
        match action(&self.toolset, row) {
            Ok(ToolAction::Submit { .. }) => {
                replayed.why = Some("it ended the episode".to_owned());
            }
            Err(reason) => {
                replayed.sameness = Sameness::Differs;
                replayed.differences.push(Difference {
                    what: "call".to_owned(),
                    recorded: row.outcome.clone(),
                    replayed: format!("rejected: {reason}"),
                    lines: None,
                });
            }
            Ok(ToolAction::Sandbox(action)) => {
                let spent = self.recorded.clock(row.step_index, Some(row.call_index));
                let left = self.clocks.episode.saturating_sub(spent);
                let action = within(action, self.clocks.call, left.max(Duration::from_millis(1)));
                let injected = injected(row).unwrap_or_default();
                let begun = now_us();
                let no_room = self.lease().await?.unwrap_or_default();
                let called = match &mut self.sandbox {
                    Some(sandbox) => {
                        calls::run(sandbox, &row.tool, action, injected, &self.files, false).await?
                    }
                    None => Called::plain(calls::no_room(&row.tool, &no_room)),
                };
                let windows = (
                    Window {
                        from_us: self.recorded.began_us(),
                        to_us: row.started_at.0 + row.wall_us,
                    },
                    Window {
                        from_us: begun,
                        to_us: now_us(),
                    },
                );
                (replayed.sameness, replayed.differences) =
                    compare(&self.recorded.episode, row, &called.result, &windows);
                let sandbox_ended = self.sandbox.as_ref().is_some_and(Sandbox::is_lost);
                let incomplete = called.result.changes_incomplete;
                if sandbox_ended {
                    self.sandbox = None;
                }
                let logged = LoggedCall {
                    row: row.clone(),
                    observation: self.recorded.observation(row),
                    artifacts: self.recorded.artifacts(row),
                    files: calls::all_changes(called.others, called.result.files_changed),
                    sandbox_ended,
                };
                if !sandbox_ended {
                    self.files.change(&logged.files, incomplete);
                } else if !calls::says_nothing(row) {
                    self.files.forget_lost();
                }
                self.logged.insert((row.step_index, row.call_index), logged);
            }
        }
        self.replay.calls.push(replayed);
        Ok(())
    }
}

impl Recorded {
    /// The calls of the steps before `at`.
    fn before(&self, at: u32) -> impl Iterator<Item = &ToolCallRow> {
        self.tool_calls
            .iter()
            .filter(move |row| row.step_index < at as i32)
    }

    /// When the first thing that is recorded of it happened. What a branch took over is older than the branch.
    fn began_us(&self) -> i64 {
        let first = self.steps.iter().map(|step| step.started_at.0).min();
        let own = self.episode.started_at.0;
        first.map_or(own, |first| first.min(own))
    }

    /// Refuses where today's tools take a call before step `at` for something else than it was, so that the steps taken over could not
    /// be followed.
    fn fits(&self, toolset: &Toolset, at: u32) -> Result<(), AgentError> {
        let changed = toolset.hash != self.episode.toolset_hash;
        let misfit = self.before(at).find_map(|row| {
            let why = match (
                row.outcome == CallOutcome::Rejected.as_str(),
                action(toolset, row),
            ) {
                (true, Ok(_)) if changed => "was rejected and would be run now".to_owned(),
                (false, Err(reason)) => format!("would be rejected now ({reason})"),
                _ => return None,
            };
            Some((row, why))
        });
        let Some((row, why)) = misfit else {
            return Ok(());
        };
        let (step, call) = (row.step_index, row.call_index);
        Err(AgentError::CannotLeave {
            episode: self.episode.episode_id.clone(),
            step: at,
            why: format!("the tools have changed: call {call} of step {step} {why}"),
            way_out: format!(
                "leave it at step {step} or before, or use Drillyard {}",
                self.episode.drillyard_version
            ),
        })
    }

    /// What the episode's clock said before a call of a step, its turn included, or before the step.
    fn clock(&self, step: i32, call: Option<i32>) -> Duration {
        let turns = self
            .steps
            .iter()
            .filter(|one| one.step_index < step || call.is_some() && one.step_index == step)
            .map(|one| one.generation_us);
        let calls = self
            .tool_calls
            .iter()
            .filter(|one| (one.step_index, one.call_index) < (step, call.unwrap_or(0)))
            .map(|one| one.wall_us);
        let spent: i64 = turns.chain(calls).sum();
        Duration::from_micros(spent.max(0) as u64)
    }

    /// The refusal where the files of a step can't be laid out.
    fn does_not_fit(&self, at: u32, message: &str) -> AgentError {
        AgentError::CannotLeave {
            episode: self.episode.episode_id.clone(),
            step: at,
            why: format!("its files can't be brought back: {message}"),
            way_out: "leave it at an earlier step".to_owned(),
        }
    }

    /// Where new episodes leave it.
    fn point(
        &self,
        at: u32,
        logged: &BTreeMap<(i32, i32), LoggedCall>,
        snapshot: Snapshot,
    ) -> Result<Branch, AgentError> {
        Ok(Branch {
            parent: self.episode.episode_id.clone(),
            step: at,
            task: self.task.clone(),
            group_id: self.episode.group_id.clone(),
            events: Arc::new(self.events(at, logged)?),
            snapshot,
        })
    }

    /// What the model was shown of a call.
    fn observation(&self, row: &ToolCallRow) -> String {
        let of_call = |message: &&MessageRow| {
            message.step_index == Some(row.step_index)
                && message.role == "tool"
                && message.tool_call_id.as_deref() == Some(row.call_id.as_str())
        };
        let message = self.messages.iter().find(of_call);
        message
            .and_then(|message| message.content.clone())
            .unwrap_or_default()
    }

    fn artifacts(&self, row: &ToolCallRow) -> Vec<Artifact> {
        let name = format!("step {} call {} ", row.step_index, row.call_index);
        let mut all = self.episode.artifacts.clone();
        all.retain(|artifact| artifact.path.starts_with(&name));
        all
    }

    /// The steps before `at` as a journal would hold them.
    fn events(
        &self,
        at: u32,
        logged: &BTreeMap<(i32, i32), LoggedCall>,
    ) -> Result<Vec<PastEvent>, AgentError> {
        let recording = Recording::from_rows(
            std::slice::from_ref(&self.episode),
            &self.steps,
            &self.tokens,
        );
        let turns = recording.turns(
            &self.episode.task_id,
            self.episode.sample_index.max(0) as u32,
        );
        let mut events = Vec::new();
        for (step, reply) in self.steps.iter().zip(turns).take(at as usize) {
            events.push(PastEvent::Turn(
                step.step_index.max(0) as u32,
                Box::new(LoggedTurn {
                    started_at: step.started_at.0,
                    generation_us: step.generation_us,
                    reply: self.reply(step, reply.clone())?,
                }),
            ));
            for row in &self.tool_calls {
                if row.step_index != step.step_index {
                    continue;
                }
                let place = (step.step_index as u32, row.call_index as usize);
                if let Some(logged) = logged.get(&(row.step_index, row.call_index)) {
                    events.push(PastEvent::Intent(place.0, place.1));
                    events.push(PastEvent::Result(
                        place.0,
                        place.1,
                        Box::new(logged.clone()),
                    ));
                } else if row.outcome == CallOutcome::OutcomeUnknown.as_str() {
                    events.push(PastEvent::Intent(place.0, place.1));
                }
            }
        }
        Ok(events)
    }

    /// A turn whose calls the server had parsed has them in the conversation, not in the text.
    fn reply(&self, step: &StepRow, mut reply: TurnReply) -> Result<TurnReply, AgentError> {
        let extras: Value = step
            .extras
            .as_deref()
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        if extras.get("raw_text").is_none() {
            return Ok(reply);
        }
        let message = self.messages.iter().find(|message| {
            message.step_index == Some(step.step_index) && message.role == "assistant"
        });
        let calls = message.and_then(|message| {
            let text = message.tool_calls.as_deref().unwrap_or("[]");
            serde_json::from_str(text).ok()
        });
        reply.rebuilt = true;
        reply.content = message.and_then(|message| message.content.clone());
        reply.calls = calls.ok_or_else(|| {
            AgentError::Options(format!(
                "episode {}: the conversation lacks the calls of step {}",
                self.episode.episode_id, step.step_index
            ))
        })?;
        Ok(reply)
    }
}

/// A record that names a fault and does not tell how it was carried out.
#[derive(Debug)]
struct UnknownFault;

/// The fault of a recorded call, as it was carried out, if it met one.
fn injected(row: &ToolCallRow) -> Result<Option<Injected>, UnknownFault> {
    let Some(kind) = &row.fault_injected else {
        return Ok(None);
    };
    let read = || -> Option<Injected> {
        let extras: Value = serde_json::from_str(row.extras.as_deref()?).ok()?;
        serde_json::from_value(extras.get("fault")?.clone()).ok()
    };
    match read() {
        Some(fault) if fault.kind.to_string() == *kind => Ok(Some(fault)),
        _ => Err(UnknownFault),
    }
}

/// Size and BLAKE3 of an output or content.
fn print(bytes: i64, hash: &str) -> String {
    format!("{bytes} bytes {hash}")
}

fn compare(
    episode: &EpisodeRow,
    row: &ToolCallRow,
    result: &CallResult,
    windows: &(Window, Window),
) -> (Sameness, Vec<Difference>) {
    let mut now = row.clone();
    fill_row(&mut now, result, row.truncated);
    let mut differences = Vec::new();
    let mut plain = |what: &str, recorded: String, replayed: String| {
        if recorded != replayed {
            differences.push(Difference {
                what: what.to_owned(),
                recorded,
                replayed,
                lines: None,
            });
        }
    };
    let number = |value: Option<i32>| value.map_or_else(|| "none".to_owned(), |n| n.to_string());
    plain("outcome", row.outcome.clone(), now.outcome.clone());
    plain("exit_code", number(row.exit_code), number(now.exit_code));
    plain("signal", number(row.signal), number(now.signal));
    let mut times_only = false;
    for (what, (then, then_bytes), (today, today_bytes), whole) in [
        (
            "stdout",
            (&row.stdout, row.stdout_bytes),
            (&now.stdout, now.stdout_bytes),
            &result.stdout,
        ),
        (
            "stderr",
            (&row.stderr, row.stderr_bytes),
            (&now.stderr, now.stderr_bytes),
            &result.stderr,
        ),
    ] {
        // Of an output longer than a row the artifact tells the whole; without one its size and beginning have to do.
        let name = format!("step {} call {} {what}", row.step_index, row.call_index);
        let artifact = episode.artifacts.iter().find(|kept| kept.path == name);
        let long = whole.len() > ROW_OUTPUT_BYTES;
        let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
        let (recorded, replayed) = match artifact {
            Some(kept) => (
                print(then_bytes, &kept.blake3),
                print(today_bytes, &blake3::hash(whole).to_hex()),
            ),
            None => (
                print(then_bytes, &hash(then)),
                print(today_bytes, &hash(today)),
            ),
        };
        if recorded == replayed {
            continue;
        }
        if !long && artifact.is_none() && equal_but_for_times(then, today, windows) {
            times_only = true;
            continue;
        }
        let lines = then
            .lines()
            .chain(std::iter::repeat(""))
            .zip(today.lines().chain(std::iter::repeat("")))
            .take(then.lines().count().max(today.lines().count()))
            .find(|(a, b)| a != b)
            .map(|(a, b)| (a.to_owned(), b.to_owned()));
        differences.push(Difference {
            what: what.to_owned(),
            recorded,
            replayed,
            lines,
        });
    }
    differences.extend(file_differences(&row.files_changed, &now.files_changed));
    let sameness = match (differences.is_empty(), times_only) {
        (false, _) => Sameness::Differs,
        (true, true) => Sameness::SameButTimes,
        (true, false) => Sameness::Same,
    };
    (sameness, differences)
}

fn file_differences(recorded: &[FileChange], replayed: &[FileChange]) -> Vec<Difference> {
    let say = |change: Option<&&FileChange>| match change {
        None => "unchanged".to_owned(),
        Some(change) => match &change.after_hash {
            Some(hash) => format!("{}, {}", change.change, print(change.size_bytes, hash)),
            None => change.change.clone(),
        },
    };
    let by_path = |changes: &'_ [FileChange]| -> BTreeMap<String, usize> {
        changes
            .iter()
            .enumerate()
            .map(|(index, change)| (change.path.clone(), index))
            .collect()
    };
    let (then, today) = (by_path(recorded), by_path(replayed));
    let mut paths: Vec<&String> = then.keys().chain(today.keys()).collect();
    paths.sort();
    paths.dedup();
    paths
        .into_iter()
        .filter_map(|path| {
            let a = say(then.get(path).map(|index| &recorded[*index]).as_ref());
            let b = say(today.get(path).map(|index| &replayed[*index]).as_ref());
            (a != b).then(|| Difference {
                what: format!("file {path}"),
                recorded: a,
                replayed: b,
                lines: None,
            })
        })
        .collect()
}
