//! Recorded calls, run again: to see whether they still give the same, and to leave an episode at a step for a branch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use drillyard_gym::{ToolAction, Toolset};
use drillyard_sandbox::{CallResult, Pool, Sandbox, Setup, Snapshot};
use drillyard_schema::table::{EpisodeRow, FileChange, MessageRow, StepRow, TokenRow, ToolCallRow};
use drillyard_schema::{CallOutcome, EndReason, EpisodeId, GroupId, Task};
use serde::Serialize;
use serde_json::Value;

use crate::calls::{self, Injected, within};
use crate::episode::{ROW_OUTPUT_BYTES, fill_row, now_us, read_arguments};
use crate::error::AgentError;
use crate::files::Files;
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
    /// It was not run: it had not been run, or what came of it was never known.
    NotRun,
}

/// One thing about a call that is not the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `outcome`, `exit_code`, `signal`, `stdout`, `stderr`, `file PATH`, or `call` where it can't be run at all.
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

/// Replays an episode up to step `at`, not included, and takes what is there for new episodes to go on from. There is no branch where
/// a replayed call differs: the state that the model saw could not be brought back.
///
/// # Errors
/// As [`replay`], or a step that the episode does not have.
pub async fn branch(
    recorded: &Recorded,
    clocks: Clocks,
    pool: &Pool,
    at: u32,
) -> Result<(Replay, Option<Branch>), AgentError> {
    let steps = recorded.steps.len();
    let failed = recorded
        .tool_calls
        .iter()
        .any(|row| row.outcome == CallOutcome::SandboxFault.as_str() && row.step_index < at as i32);
    let over = recorded.episode.end_reason == EndReason::Submitted.as_str();
    if failed || at as usize > steps || at as usize == steps && over {
        return Err(AgentError::Options(format!(
            "episode {} has {steps} steps, counted from 0; it can't be left at step {at}",
            recorded.episode.episode_id
        )));
    }
    let mut run = Run::new(recorded, clocks, pool)?;
    run.calls(|step| step < at).await?;
    if !run.replay.is_same() {
        return Ok((run.replay, None));
    }
    let snapshot = run.lease().await?.snapshot().await?;
    if let Some(sandbox) = run.sandbox.take() {
        sandbox.close().await;
    }
    let parent = &recorded.episode.episode_id;
    let point = Branch {
        parent: parent.clone(),
        step: at,
        task: recorded.task.clone(),
        group_id: recorded.episode.group_id.clone(),
        events: Arc::new(run.events(at)?),
        snapshot,
    };
    Ok((run.replay, Some(point)))
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
        Ok(Self {
            recorded,
            clocks,
            pool,
            toolset: Toolset::named(&task.tools)?,
            files: Files::new(find_set(task)?.setup_files(task)?),
            sandbox: None,
            replay: Replay {
                episode_id: recorded.episode.episode_id.clone(),
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

    /// The sandbox, with the files as they are now.
    async fn lease(&mut self) -> Result<&mut Sandbox, AgentError> {
        if let Some(sandbox) = self.sandbox.take() {
            return Ok(self.sandbox.insert(sandbox));
        }
        let setup = Setup {
            files: self.files.setup().to_vec(),
            ..Setup::default()
        };
        let mut sandbox = self.pool.lease(&setup).await?;
        let changes = self.files.changes();
        if !changes.is_empty() {
            sandbox.apply(&changes).await?;
        }
        Ok(self.sandbox.insert(sandbox))
    }

    /// What the episode's clock said when this call started.
    fn clock(&self, row: &ToolCallRow) -> Duration {
        let turns = self
            .recorded
            .steps
            .iter()
            .filter(|step| step.step_index <= row.step_index)
            .map(|step| step.generation_us);
        let before = |call: &&ToolCallRow| {
            (call.step_index, call.call_index) < (row.step_index, row.call_index)
        };
        let calls = self.recorded.tool_calls.iter().filter(before);
        let spent: i64 = turns.chain(calls.map(|call| call.wall_us)).sum();
        Duration::from_micros(spent.max(0) as u64)
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
        let action = read_arguments(&row.arguments)
            .and_then(|arguments| self.toolset.to_call(&row.tool, &arguments));
        match action {
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
                let left = self.clocks.episode.saturating_sub(self.clock(row));
                let action = within(action, self.clocks.call, left.max(Duration::from_millis(1)));
                let injected = injected(row);
                let begun = now_us();
                self.lease().await?;
                let Some(sandbox) = &mut self.sandbox else {
                    return Err(AgentError::Worker("no sandbox".to_owned()));
                };
                let called =
                    calls::run(sandbox, &row.tool, action, injected, &self.files, false).await?;
                let windows = (
                    Window {
                        from_us: self.recorded.episode.started_at.0,
                        to_us: row.started_at.0 + row.wall_us,
                    },
                    Window {
                        from_us: begun,
                        to_us: now_us(),
                    },
                );
                (replayed.sameness, replayed.differences) =
                    compare(&self.recorded.episode, row, &called.result, &windows);
                let sandbox_ended = sandbox.is_lost();
                if sandbox_ended {
                    self.sandbox = None;
                }
                let logged = LoggedCall {
                    row: row.clone(),
                    observation: self.observation(row),
                    artifacts: self.artifacts(row),
                    files: calls::all_changes(called.others, called.result.files_changed),
                    sandbox_ended,
                };
                if !sandbox_ended {
                    self.files.change(&logged.files, called.result.state_lost);
                }
                self.logged.insert((row.step_index, row.call_index), logged);
            }
        }
        self.replay.calls.push(replayed);
        Ok(())
    }

    /// What the model was shown of a call.
    fn observation(&self, row: &ToolCallRow) -> String {
        let of_call = |message: &&MessageRow| {
            message.step_index == Some(row.step_index)
                && message.role == "tool"
                && message.tool_call_id.as_deref() == Some(row.call_id.as_str())
        };
        let message = self.recorded.messages.iter().find(of_call);
        message
            .and_then(|message| message.content.clone())
            .unwrap_or_default()
    }

    fn artifacts(&self, row: &ToolCallRow) -> Vec<drillyard_schema::table::Artifact> {
        let name = format!("step {} call {} ", row.step_index, row.call_index);
        let mut all = self.recorded.episode.artifacts.clone();
        all.retain(|artifact| artifact.path.starts_with(&name));
        all
    }

    /// The steps before `at` as a journal would hold them.
    fn events(&self, at: u32) -> Result<Vec<PastEvent>, AgentError> {
        let recorded = self.recorded;
        let recording = Recording::from_rows(
            std::slice::from_ref(&recorded.episode),
            &recorded.steps,
            &recorded.tokens,
        );
        let turns = recording.turns(
            &recorded.episode.task_id,
            recorded.episode.sample_index.max(0) as u32,
        );
        let mut events = Vec::new();
        for (step, reply) in recorded.steps.iter().zip(turns).take(at as usize) {
            events.push(PastEvent::Turn(
                step.step_index.max(0) as u32,
                Box::new(LoggedTurn {
                    started_at: step.started_at.0,
                    generation_us: step.generation_us,
                    reply: self.reply(step, reply.clone())?,
                }),
            ));
            for row in &recorded.tool_calls {
                if row.step_index != step.step_index {
                    continue;
                }
                let place = (step.step_index as u32, row.call_index as usize);
                if let Some(logged) = self.logged.get(&(row.step_index, row.call_index)) {
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
        let message = self.recorded.messages.iter().find(|message| {
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
                self.recorded.episode.episode_id, step.step_index
            ))
        })?;
        Ok(reply)
    }
}

/// The fault of a recorded call, as it was carried out.
fn injected(row: &ToolCallRow) -> Option<Injected> {
    let extras: Value = serde_json::from_str(row.extras.as_deref()?).ok()?;
    serde_json::from_value(extras.get("fault")?.clone()).ok()
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
