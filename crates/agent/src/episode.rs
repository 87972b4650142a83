//! One episode: from the first message to the rows that go to the lake.
//!
//! The loop does not know whether it runs for the first time or again after a crash. Every model turn and every tool call is asked
//! of the past first, that is of what the journal holds of this episode; only where the past is silent does it happen. So a resumed
//! episode comes by the same code to the same rows.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use camino::Utf8Path;
use drillyard_gym::{TaskSet, ToolAction, Toolset, Verification, call_milestone, observation};
use drillyard_lake::{EpisodeBundle, LakeError};
use drillyard_render::parse_turn;
use drillyard_sandbox::{Call, CallResult, Sandbox, SandboxError, Setup};
use drillyard_schema::ids::derive_id;
use drillyard_schema::table::{Artifact, EpisodeRow, FileChange, TaskRow, Timestamp, ToolCallRow};
use drillyard_schema::{
    CallOutcome, DRILLYARD_VERSION, EndReason, EpisodeId, GroupId, Message, ParseStatus, Role,
    Task, ToolCall, ToolSpec,
};
use serde_json::{Value, json};

use crate::artifacts::{self, Lasting};
use crate::calls::{self, Called, Injected, within};
use crate::error::AgentError;
use crate::files::Files;
use crate::options::Point;
use crate::pack::{self, PACK, Pack};
use crate::past::{CHANGES_INCOMPLETE, LoggedCall, LoggedTurn, Past, PastCall};
use crate::policy::{PolicyError, Prior, TurnReply, TurnRequest};
use crate::prompt;
use crate::rows::{Rows, StepFacts};
use crate::shared::{Shared, end_of};
use crate::spans;
use crate::tokens::{Sequence, TokenHashes};

/// Output kept in a row; the whole is an artifact when it is longer.
pub(crate) const ROW_OUTPUT_BYTES: usize = 64 << 10;
/// Output files larger than this are not verified.
const OUTPUT_FILE_BYTES: u64 = 16 << 20;
/// Calls of one turn beyond this are not run.
const CALLS_PER_TURN: usize = 16;
/// A verifier that takes longer has failed.
const VERIFY_TIMEOUT: Duration = Duration::from_mins(2);
/// The agent is warned once this share of the episode's time is used.
const WARN_AT: f64 = 0.8;

/// An episode to run: everything that is decided before it starts.
#[derive(Clone)]
pub(crate) struct Plan {
    pub task: Arc<Task>,
    pub set: Arc<dyn TaskSet>,
    pub toolset: Arc<Toolset>,
    pub tools: Arc<[ToolSpec]>,
    pub sample_index: u32,
    pub attempt: u32,
    pub episode_id: EpisodeId,
    pub group_id: GroupId,
    /// The same for all attempts at a sample and for every run with the same seed.
    pub seed: u64,
    /// The episode it leaves, for a branch.
    pub parent: Option<EpisodeId>,
}

/// How an episode's worker ended.
pub(crate) enum Finish {
    /// The episode ended; these are its rows.
    Ended(Box<EpisodeBundle>),
    /// It was left for another execution.
    Suspended,
}

/// Why the loop stopped.
pub(crate) enum Halt {
    End(EndReason, Option<String>),
    Suspend,
    Fail(AgentError),
}

impl From<AgentError> for Halt {
    fn from(error: AgentError) -> Self {
        Self::Fail(error)
    }
}

impl From<LakeError> for Halt {
    fn from(error: LakeError) -> Self {
        Self::Fail(error.into())
    }
}

/// What a turn came to.
struct Reading {
    calls: Vec<ToolCall>,
    status: ParseStatus,
    error: Option<String>,
    reasoning: Option<String>,
}

/// An episode under way.
pub(crate) struct Episode<'a> {
    shared: &'a Shared,
    plan: &'a Plan,
    past: Past,
    resumed: bool,
    rows: Rows,
    messages: Vec<Message>,
    sequence: Sequence,
    sandbox: Option<Sandbox>,
    files: Files,
    outputs: Vec<String>,
    clock: Duration,
    warned: bool,
    started_at: i64,
    submitted: bool,
    answer: Option<String>,
    milestones: BTreeSet<String>,
    verifier_failed: bool,
    seen_calls: HashMap<String, u32>,
    file_changes: u32,
    artifacts: Vec<Artifact>,
    pack: Pack,
    unknown_outcomes: u32,
    state_lost: u32,
    system_text: String,
}

/// Microseconds since 1970.
pub(crate) fn now_us() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as i64)
}

fn micros(duration: Duration) -> i64 {
    duration.as_micros() as i64
}

impl<'a> Episode<'a> {
    /// An episode that begins, or goes on where `past` ends.
    pub fn new(shared: &'a Shared, plan: &'a Plan, past: Past) -> Result<Self, AgentError> {
        let options = &shared.options;
        let task = &plan.task;
        let protocol = options.policy.client.protocol();
        let template = options
            .system_prompt
            .as_deref()
            .unwrap_or_else(|| drillyard_gym::system_prompt(&task.task_set));
        let files = Files::new(plan.set.setup_files(task)?);
        Ok(Self {
            shared,
            plan,
            resumed: past.is_resumed(),
            rows: Rows::new(
                options.run_date.clone(),
                options.purpose,
                options.run_id.clone(),
                plan.episode_id.clone(),
                (task.task_set.clone(), task.task_set_version.clone()),
            ),
            messages: Vec::new(),
            sequence: Sequence::default(),
            sandbox: None,
            files,
            outputs: plan.set.outputs(task),
            clock: Duration::ZERO,
            warned: false,
            started_at: past.started_at.unwrap_or_else(now_us),
            submitted: false,
            answer: None,
            milestones: BTreeSet::new(),
            verifier_failed: false,
            seen_calls: HashMap::new(),
            file_changes: 0,
            artifacts: Vec::new(),
            pack: if options.artifacts_dir.is_some() {
                Pack::Empty
            } else {
                Pack::Off
            },
            unknown_outcomes: 0,
            state_lost: 0,
            system_text: prompt::system_text(template, &plan.tools, protocol),
            past,
        })
    }

    /// Runs it to its end.
    pub async fn run(mut self) -> Result<Finish, AgentError> {
        let (reason, cause) = match self.steps().await {
            Ok(()) => (EndReason::StepLimit, None),
            Err(Halt::End(reason, cause)) => (reason, cause),
            Err(Halt::Suspend) => return Ok(Finish::Suspended),
            Err(Halt::Fail(error)) => return Err(error),
        };
        let (reason, cause) = self.verify(reason, cause).await?;
        if let Some(sandbox) = self.sandbox.take() {
            sandbox.close().await;
        }
        self.keep_changes().await?;
        self.hold(Point::Verified).await;
        Ok(Finish::Ended(Box::new(self.bundle(reason, cause))))
    }

    async fn steps(&mut self) -> Result<(), Halt> {
        if !self.resumed {
            self.shared
                .log_start(&self.plan.episode_id, self.started_at)?;
        }
        self.hold(Point::Started).await;
        self.open_conversation();
        let options = &self.shared.options;
        let (mut unreadable, mut idle) = (0, 0);
        for step in 0..options.max_steps {
            if options.branch.as_ref().is_some_and(|b| b.step == step) {
                self.files.rebase();
            }
            let turn = self.turn(step).await?;
            let reading = read_turn(&turn.reply, step, options.sampling.max_tokens);
            self.take_in(step, &turn, &reading);
            if reading.status == ParseStatus::Error {
                unreadable += 1;
                if unreadable >= options.parse_limit {
                    return Err(Halt::End(EndReason::ParseLimit, None));
                }
                let error = reading.error.unwrap_or_default();
                let text = if turn.reply.is_cut() {
                    prompt::cut_text(options.sampling.max_tokens)
                } else {
                    prompt::parse_error_text(&error)
                };
                self.say(Message::text(Role::User, text), Some(step));
                continue;
            }
            unreadable = 0;
            if reading.calls.is_empty() {
                idle += 1;
                if idle >= options.idle_limit {
                    return Err(Halt::End(EndReason::GaveUp, None));
                }
                self.say(Message::text(Role::User, prompt::NO_CALL_TEXT), Some(step));
                continue;
            }
            idle = 0;
            for (index, call) in reading.calls.iter().enumerate() {
                self.call(step, index, call).await?;
            }
            if self.submitted {
                return Err(Halt::End(EndReason::Submitted, None));
            }
        }
        Ok(())
    }

    fn open_conversation(&mut self) {
        let tools: Vec<Value> = self.plan.tools.iter().map(ToolSpec::to_openai).collect();
        let system = Message::text(Role::System, self.system_text.clone());
        // The tools on offer are part of what was sent, so the conversation can be rendered again from its messages alone.
        self.rows
            .message(&system, None, Some(json!({ "tools": tools }).to_string()));
        self.messages.push(system);
        self.say(
            Message::text(Role::User, self.plan.task.instruction.clone()),
            None,
        );
    }

    fn say(&mut self, message: Message, step: Option<u32>) {
        self.rows.message(&message, step, None);
        self.messages.push(message);
    }

    /// Holds a test's episode at a point of its choice.
    async fn hold(&mut self, point: Point) {
        self.shared.hold(point, &self.plan.episode_id).await;
    }

    /// Whether the episode may go on.
    fn check_open(&self) -> Result<(), Halt> {
        if self.shared.stop.is_stopped() {
            return Err(Halt::Suspend);
        }
        if self.clock >= self.shared.options.episode_timeout {
            return Err(Halt::End(EndReason::EpisodeTimeout, None));
        }
        Ok(())
    }

    fn time_left(&self) -> Duration {
        self.shared
            .options
            .episode_timeout
            .saturating_sub(self.clock)
    }

    // ---- model turns

    async fn turn(&mut self, step: u32) -> Result<LoggedTurn, Halt> {
        if let Some(turn) = self.past.take_turn(step)? {
            self.clock += Duration::from_micros(turn.generation_us.max(0) as u64);
            return Ok(turn);
        }
        self.check_open()?;
        let shared = self.shared;
        let options = &shared.options;
        let left = self.time_left();
        let (started_at, begun) = (now_us(), Instant::now());
        let reply = loop {
            let ours = self.sequence.hashes.as_ref();
            let same = ours.and_then(|hashes| shared.same_tokens(hashes));
            if same == Some(false) {
                self.sequence.forget();
            }
            let prior = self.sequence.prior();
            let continues = prior.is_some() && self.sequence.hashes.is_some();
            if let (Some((ids, _)), Some(limit)) = (prior, options.max_context_tokens)
                && ids.len() >= limit as usize
            {
                return Err(Halt::End(EndReason::ContextLimit, None));
            }
            let request = TurnRequest {
                task: &self.plan.task,
                sample_index: self.plan.sample_index,
                episode_seed: self.plan.seed,
                step,
                messages: &self.messages,
                tools: &self.plan.tools,
                prior: prior.map(|(token_ids, messages)| Prior {
                    token_ids,
                    messages,
                }),
                sampling: options.sampling,
                seed: seed_of(&[&self.plan.seed.to_string(), &step.to_string()]),
            };
            let asked = tokio::time::timeout(
                left.saturating_sub(begun.elapsed()),
                options.policy.client.turn(request),
            );
            let answer = tokio::select! {
                biased;
                () = shared.stop.stopped() => return Err(Halt::Suspend),
                answer = asked => answer,
            };
            // What another tokenizer's ids are continued with is nothing to go on with: asked again with the words alone.
            match answer {
                Ok(Ok(reply)) => {
                    if !continues || !self.sequence.is_foreign_to(&reply) {
                        break reply;
                    }
                }
                Ok(Err(PolicyError::Status { status: 400, .. })) if continues && same.is_none() => {
                }
                Ok(Err(error)) => return Err(shared.endpoint_fault(error)),
                // A single turn that eats most of an episode's time is the endpoint's doing.
                Err(_) if left * 2 > options.episode_timeout => {
                    return Err(Halt::End(
                        EndReason::EndpointFault,
                        Some(format!("no reply within {} s", left.as_secs())),
                    ));
                }
                Err(_) => return Err(Halt::End(EndReason::EpisodeTimeout, None)),
            }
            self.sequence.forget();
        };
        let took = begun.elapsed();
        shared.endpoint_works(&reply);
        self.clock += took;
        let turn = LoggedTurn {
            started_at,
            generation_us: micros(took),
            reply,
        };
        self.hold(Point::TurnDone).await;
        self.shared.log_turn(&self.plan.episode_id, step, &turn)?;
        self.hold(Point::TurnLogged).await;
        Ok(turn)
    }

    /// Takes a turn into the conversation and the rows.
    fn take_in(&mut self, step: u32, turn: &LoggedTurn, reading: &Reading) {
        let reply = &turn.reply;
        self.rows.step(StepFacts {
            step,
            history_hash: prompt::history_hash(&self.messages),
            parse_status: reading.status,
            parse_error: reading.error.clone(),
            reasoning: reading.reasoning.clone(),
            n_calls: reading.calls.len(),
            temperature: self.shared.options.sampling.temperature,
            generation_us: turn.generation_us,
            started_at: turn.started_at,
            reply,
        });
        let message = if reply.rebuilt {
            Message {
                content: reply.content.clone(),
                tool_calls: reply.calls.clone(),
                ..Message::text(Role::Assistant, "")
            }
        } else {
            Message::text(Role::Assistant, reply.text.clone())
        };
        self.say(message, Some(step));
        if self.sequence.is_foreign_to(reply) {
            self.sequence.forget();
        }
        let added = self.sequence.advance(
            &reply.prompt_token_ids,
            &reply.token_ids,
            self.messages.len(),
        );
        self.sequence.hashes = TokenHashes::of(reply);
        if let Some(added) = added {
            let spans = spans::loss_spans(self.shared.options.tokenizer.as_deref(), reply);
            self.rows.token(step, added, reply, spans);
        }
        let clean = match reading.status {
            ParseStatus::Ok | ParseStatus::None => 1.0,
            ParseStatus::Repaired => 0.0,
            ParseStatus::Error => -1.0,
        };
        self.rows.reward(Some(step), "format", clean);
    }

    // ---- tool calls

    async fn call(&mut self, step: u32, index: usize, call: &ToolCall) -> Result<(), Halt> {
        let tool = call.function.name.as_str();
        let arguments = read_arguments(&call.function.arguments);
        let hashed = match &arguments {
            Ok(arguments) => prompt::call_hash(tool, arguments),
            Err(_) => prompt::call_hash(tool, &Value::String(call.function.arguments.clone())),
        };
        let mut row = self.blank_row(step, index, call, hashed);
        let action = if self.submitted {
            Err("the task had been submitted before this call; it was not run".to_owned())
        } else if index >= CALLS_PER_TURN {
            Err(format!(
                "more than {CALLS_PER_TURN} calls in one turn; this one was not run"
            ))
        } else {
            arguments.and_then(|arguments| {
                self.plan.toolset.check(tool, &arguments)?;
                let action = self.plan.toolset.to_call(tool, &arguments)?;
                Ok((arguments, action))
            })
        };
        match action {
            Err(reason) => {
                let text = format!("error: {reason}");
                row.schema_ok = false;
                row.schema_error = Some(reason);
                row.outcome = CallOutcome::Rejected.to_string();
                row.stderr.clone_from(&text);
                row.stderr_bytes = text.len() as i64;
                self.note_call(step, row, None);
                self.answer_call(step, call, text);
            }
            Ok((_, ToolAction::Submit { answer })) => {
                row.outcome = CallOutcome::Ok.to_string();
                self.submitted = true;
                self.answer = answer;
                self.note_call(step, row, None);
            }
            Ok((arguments, ToolAction::Sandbox(action))) => {
                self.sandbox_call(step, index, call, &arguments, action, row)
                    .await?;
            }
        }
        Ok(())
    }

    async fn sandbox_call(
        &mut self,
        step: u32,
        index: usize,
        call: &ToolCall,
        arguments: &Value,
        action: Call,
        mut row: ToolCallRow,
    ) -> Result<(), Halt> {
        let logged = match self.past.take_call(step, index)? {
            PastCall::Result(logged) => {
                self.clock += Duration::from_micros(logged.row.wall_us.max(0) as u64);
                self.warned |= self.clock >= self.shared.options.episode_timeout.mul_f64(WARN_AT);
                let mut logged = *logged;
                // What a branch takes over was logged under its parent's name.
                logged.row.run_date.clone_from(&row.run_date);
                logged.row.run_id.clone_from(&row.run_id);
                logged.row.episode_id.clone_from(&row.episode_id);
                logged
            }
            PastCall::IntentOnly => {
                self.unknown_outcomes += 1;
                row.outcome = CallOutcome::OutcomeUnknown.to_string();
                self.note_call(step, row, Some(arguments));
                self.answer_call(step, call, prompt::OUTCOME_UNKNOWN_TEXT.to_owned());
                return Ok(());
            }
            PastCall::Silent => self.run_call(step, index, call, action, row).await?,
        };
        if logged.row.outcome == CallOutcome::SandboxFault.as_str() {
            let end = end_of_fault(&logged.row);
            self.rows.tool_calls.push(logged.row);
            return Err(end);
        }
        self.pack.add(step, index, &logged);
        let changed_output = self.apply(&logged);
        self.artifacts.extend(logged.artifacts);
        self.note_call(step, logged.row, Some(arguments));
        if changed_output {
            self.check_milestones(step).await;
        }
        self.answer_call(step, call, logged.observation);
        Ok(())
    }

    /// Runs a call: intent, call, result, each in the journal before what follows it. A sandbox's fault is a result too, or the call's
    /// outcome would be unknown to whoever resumes the episode.
    async fn run_call(
        &mut self,
        step: u32,
        index: usize,
        call: &ToolCall,
        action: Call,
        mut row: ToolCallRow,
    ) -> Result<LoggedCall, Halt> {
        self.check_open()?;
        let no_room = self.lease().await?;
        let shared = self.shared;
        let id = &self.plan.episode_id;
        shared.log_intent(id, step, index)?;
        self.hold(Point::IntentLogged).await;
        let tool = call.function.name.as_str();
        let injected = shared
            .options
            .faults
            .draw(self.plan.seed, step, index as u32, tool)
            .map(|fault| Injected::settle(fault, &self.files, shared.pool.configured()));
        let delay = injected.as_ref().and_then(|fault| fault.delay_us);
        let left = self
            .time_left()
            .saturating_sub(Duration::from_micros(delay.unwrap_or_default()))
            .max(Duration::from_millis(1));
        let action = within(action, shared.options.call_timeout, left);
        row.started_at = Timestamp(now_us());
        let called = match (no_room, &mut self.sandbox) {
            (Some(message), _) => Ok(Called::plain(calls::no_room(tool, &message))),
            (None, Some(sandbox)) => {
                calls::run(sandbox, tool, action, injected, &self.files, true).await
            }
            (None, None) => Err(SandboxError::Lost {
                cause: "there was none".to_owned(),
            }),
        };
        let called = match called {
            Ok(called) => called,
            Err(error) => {
                let logged = faulted(row, &error);
                shared.log_result(id, step, index, &logged)?;
                self.hold(Point::ResultLogged).await;
                shared.sandbox_fault(&error);
                return Ok(logged);
            }
        };
        shared.sandbox_works();
        let result = called.result;
        self.clock += result.wall;
        let shown = called.seen.as_ref().unwrap_or(&result);
        let seen = observation(tool, shown, shared.options.observation_bytes);
        let mut text = seen.text;
        if !self.warned && self.clock >= shared.options.episode_timeout.mul_f64(WARN_AT) {
            self.warned = true;
            let (used, all) = (
                self.clock.as_secs(),
                shared.options.episode_timeout.as_secs(),
            );
            let _ = write!(
                text,
                "\n[warning: {used} s of this episode's {all} s are used; finish soon]"
            );
        }
        for warning in &result.warnings {
            let _ = write!(text, "\n[warning: {warning}]");
        }
        let sandbox_ended = self.sandbox.as_ref().is_some_and(Sandbox::is_lost);
        fill_row(&mut row, &result, seen.truncated || called.seen.is_some());
        let mut extras = serde_json::Map::new();
        if let Some(injected) = &called.injected {
            row.fault_injected = injected.took_place().then(|| injected.kind.to_string());
            extras.insert("fault".to_owned(), json!(injected));
        }
        if sandbox_ended {
            self.sandbox = None;
            extras.insert("sandbox_ended".to_owned(), true.into());
            text.push_str(
                "\n[the sandbox ended with this call; the files are as they were before it",
            );
            // Where the fault ended it, the agent has not lost them, and the episode can't go on.
            if let Some(what) = self.files.lost()
                && !calls::says_nothing(&row)
            {
                let _ = write!(text, ", except that it took {what} along");
            }
            text.push(']');
        }
        note_sandbox(&mut extras, &result);
        row.extras = (!extras.is_empty()).then(|| Value::Object(extras).to_string());
        let artifacts = keep_outputs(
            shared.options.artifacts_dir.as_deref(),
            step,
            index,
            &result,
        )
        .await?;
        self.hold(Point::CallDone).await;
        let logged = LoggedCall {
            row,
            observation: text,
            artifacts,
            files: calls::all_changes(called.others, result.files_changed),
            sandbox_ended,
        };
        shared.log_result(id, step, index, &logged)?;
        self.hold(Point::ResultLogged).await;
        Ok(logged)
    }

    /// A sandbox laid out with the files as they are now, if there is none yet. What it says is why the files that the agent left don't
    /// fit one.
    async fn lease(&mut self) -> Result<Option<String>, Halt> {
        if self.sandbox.is_some() {
            return Ok(None);
        }
        if let Some(what) = self.files.lost() {
            return Err(self.lost(&what));
        }
        let setup = Setup {
            files: self.files.setup().to_vec(),
            ..Setup::default()
        };
        let leased = match self.shared.options.branch.as_ref() {
            Some(branch) => self.shared.pool.branch(&branch.snapshot).await,
            None => self.shared.pool.lease(&setup).await,
        };
        let mut sandbox = leased.map_err(|error| self.fault(&error))?;
        let changes = self.files.changes();
        if !changes.is_empty() {
            match sandbox.apply(&changes).await {
                Ok(()) => {}
                Err(error) if !error.is_infrastructure() => return Ok(Some(error.to_string())),
                Err(error) => return Err(self.fault(&error)),
            }
        }
        self.sandbox = Some(sandbox);
        Ok(None)
    }

    /// The end that an error of the sandbox brings.
    fn fault(&self, error: &SandboxError) -> Halt {
        let (reason, cause) = self.shared.sandbox_fault(error);
        Halt::End(reason, Some(cause))
    }

    /// The end of an episode whose files can't be brought back.
    fn lost(&mut self, what: &str) -> Halt {
        let lost = self.rows.tool_calls.iter().filter(|row| row.state_lost);
        self.state_lost = lost.count() as u32;
        Halt::End(
            EndReason::Interrupted,
            Some(format!(
                "{what} could not be kept in the journal, so the files can't be restored"
            )),
        )
    }

    /// What all calls changed, with contents.
    async fn keep_changes(&mut self) -> Result<(), AgentError> {
        if let Some(dir) = &self.shared.options.artifacts_dir
            && let Some(content) = std::mem::take(&mut self.pack).finish()
        {
            // A pack has a hash to tell that it is gone, and the calls can be run again: no episode waits for the disk.
            let kept = artifacts::keep_aside(dir, PACK.to_owned(), content, Lasting::Soon).await?;
            self.artifacts.push(kept);
        }
        Ok(())
    }

    /// Takes over what a call changed. True if one of the outputs did.
    fn apply(&mut self, logged: &LoggedCall) -> bool {
        if logged.sandbox_ended {
            if !calls::says_nothing(&logged.row) {
                self.files.forget_lost();
            }
            return false;
        }
        self.files.change(&logged.files, logged.is_incomplete());
        self.file_changes += u32::from(!logged.files.is_empty());
        logged
            .files
            .iter()
            .any(|file| self.outputs.contains(&file.path))
    }

    /// A call's row, and the reward components that it brings.
    fn note_call(&mut self, step: u32, row: ToolCallRow, arguments: Option<&Value>) {
        if calls::says_nothing(&row) {
            // After it everything may be looked at or tried again.
            self.seen_calls.clear();
        } else {
            self.penalties(step, &row);
        }
        if let Some(arguments) = arguments
            && row.outcome == CallOutcome::Ok.as_str()
            && let Some(name) = call_milestone(&self.plan.task, &row.tool, arguments)
        {
            self.reach(step, &name);
        }
        self.rows.tool_calls.push(row);
    }

    fn penalties(&mut self, step: u32, row: &ToolCallRow) {
        // Doing the same again is a repetition only while no file has changed since.
        let before = self
            .file_changes
            .saturating_sub(u32::from(!row.files_changed.is_empty()));
        let earlier = self
            .seen_calls
            .insert(row.call_hash.clone(), self.file_changes);
        if earlier.is_some_and(|changes| changes == before) {
            self.rows.reward(Some(step), "repeat", 1.0);
        }
        let limits = [
            CallOutcome::Timeout,
            CallOutcome::Memory,
            CallOutcome::Processes,
            CallOutcome::Disk,
            CallOutcome::OutputLimit,
        ];
        if !row.schema_ok || limits.iter().any(|limit| limit.as_str() == row.outcome) {
            self.rows.reward(Some(step), "violation", 1.0);
        }
    }

    fn answer_call(&mut self, step: u32, call: &ToolCall, text: String) {
        let message = Message::tool(call.id.clone(), call.function.name.clone(), text);
        self.say(message, Some(step));
    }

    fn blank_row(
        &self,
        step: u32,
        index: usize,
        call: &ToolCall,
        call_hash: String,
    ) -> ToolCallRow {
        ToolCallRow {
            run_date: self.rows.run_date.clone(),
            purpose: self.rows.purpose.to_string(),
            run_id: self.rows.run_id.clone(),
            episode_id: self.rows.episode_id.clone(),
            step_index: step as i32,
            call_index: index as i32,
            call_id: call.id.clone(),
            tool: call.function.name.clone(),
            arguments: call.function.arguments.clone(),
            call_hash,
            schema_ok: true,
            schema_error: None,
            outcome: String::new(),
            exit_code: None,
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
            files_changed: Vec::new(),
            fault_injected: None,
            state_lost: false,
            started_at: Timestamp(now_us()),
            extras: None,
        }
    }

    // ---- judgement

    fn reach(&mut self, step: u32, name: &str) {
        if self.milestones.insert(name.to_owned()) {
            let all = self.plan.task.milestones.len().max(1);
            self.rows.milestone(step, name, 1.0 / all as f64);
        }
    }

    /// Milestones that the files show right now, so that they count for the step that reached them.
    async fn check_milestones(&mut self, step: u32) {
        let task = &self.plan.task;
        let all = task.milestones.iter();
        if self.verifier_failed || all.into_iter().all(|m| self.milestones.contains(&m.name)) {
            return;
        }
        let (set, task) = (self.plan.set.clone(), task.clone());
        match judge(set, task, self.known_outputs(), None).await {
            Ok(verification) => {
                for name in verification.milestones {
                    self.reach(step, &name);
                }
            }
            // What becomes of the episode is for the last look to say; there is no point in asking before it.
            Err(_) => self.verifier_failed = true,
        }
    }

    /// The outputs as far as set-up and logged changes tell them.
    fn known_outputs(&self) -> BTreeMap<String, Vec<u8>> {
        self.outputs
            .iter()
            .filter_map(|path| Some((path.clone(), self.files.content(path)?.to_vec())))
            .collect()
    }

    /// The outputs as they lie in the sandbox; without one nothing has changed since the log.
    async fn read_outputs(&mut self) -> Result<BTreeMap<String, Vec<u8>>, Halt> {
        if self.sandbox.is_none() && self.shared.options.branch.is_some() {
            self.lease().await?;
        }
        let Some(sandbox) = &mut self.sandbox else {
            return match self.files.lost() {
                Some(what) => Err(self.lost(&what)),
                None => Ok(self.known_outputs()),
            };
        };
        let mut files = BTreeMap::new();
        for path in &self.outputs {
            let read = Call::ReadFile {
                path: path.clone(),
                max_bytes: OUTPUT_FILE_BYTES,
            };
            match sandbox.call(read).await {
                Ok(result) if outcome_of(&result) == CallOutcome::Ok => {
                    files.insert(path.clone(), result.stdout);
                }
                Ok(_) => {}
                Err(error) => return Err(self.fault(&error)),
            }
        }
        Ok(files)
    }

    /// Checks what the episode left behind, unless infrastructure ended it. The end may become an infrastructure one.
    async fn verify(
        &mut self,
        reason: EndReason,
        cause: Option<String>,
    ) -> Result<(EndReason, Option<String>), AgentError> {
        if reason.is_infrastructure() {
            return Ok((reason, cause));
        }
        let files = match self.read_outputs().await {
            Ok(files) => files,
            Err(Halt::End(reason, cause)) => return Ok((reason, cause)),
            Err(Halt::Fail(error)) => return Err(error),
            Err(Halt::Suspend) => {
                return Ok((
                    EndReason::SandboxFault,
                    Some("the sandbox failed".to_owned()),
                ));
            }
        };
        let (set, task) = (self.plan.set.clone(), self.plan.task.clone());
        let verification = match judge(set, task, files, self.answer.clone()).await {
            Ok(verification) => verification,
            Err(fault) => return Ok((EndReason::VerifierFault, Some(fault))),
        };
        let last = self
            .rows
            .steps
            .last()
            .map_or(0, |row| row.step_index.max(0) as u32);
        for name in &verification.milestones {
            self.reach(last, name);
        }
        self.rows.verdict(
            verification.success,
            verification.score,
            verification.detail,
            now_us(),
        );
        self.score(verification.success, verification.score);
        Ok((reason, cause))
    }

    /// Reward components of the whole episode.
    fn score(&mut self, success: bool, score: f64) {
        self.rows
            .reward(None, "outcome", f64::from(u8::from(success)));
        self.rows.reward(None, "partial", score);
        let used = self.rows.steps.len() as f64 / f64::from(self.shared.options.max_steps.max(1));
        self.rows.reward(None, "efficiency", 1.0 - used);
    }

    fn bundle(mut self, reason: EndReason, cause: Option<String>) -> EpisodeBundle {
        let infrastructure = reason.is_infrastructure();
        if infrastructure {
            self.rows.rewards.clear();
            self.rows.verdicts.clear();
        }
        let task = self.task_row();
        let episode = self.episode_row(reason, cause, infrastructure);
        EpisodeBundle {
            task,
            episode,
            messages: self.rows.messages,
            steps: self.rows.steps,
            tool_calls: self.rows.tool_calls,
            tokens: self.rows.tokens,
            verdicts: self.rows.verdicts,
            rewards: self.rows.rewards,
        }
    }

    fn task_row(&self) -> TaskRow {
        let task = &self.plan.task;
        TaskRow {
            run_date: self.rows.run_date.clone(),
            purpose: self.rows.purpose.to_string(),
            run_id: self.rows.run_id.clone(),
            task_id: task.task_id.clone(),
            task_set: task.task_set.clone(),
            task_set_version: task.task_set_version.clone(),
            family: task.family.clone(),
            difficulty: Some(i32::from(task.difficulty)),
            split: Some(task.split.to_string()),
            unseen_family: task.unseen_family,
            instruction: task.instruction.clone(),
            verifier: Some(task.verifier.to_string()),
            milestones: serde_json::to_string(&task.milestones).ok(),
            evaluation_set: false,
            source: task.source.clone(),
            licence: task.licence.clone(),
        }
    }

    fn episode_row(
        &mut self,
        reason: EndReason,
        cause: Option<String>,
        infrastructure: bool,
    ) -> EpisodeRow {
        let options = &self.shared.options;
        let (steps, calls) = (&self.rows.steps, &self.rows.tool_calls);
        let with_status = |status: ParseStatus| {
            steps
                .iter()
                .filter(|row| row.parse_status == status.as_str())
                .count() as i32
        };
        let ended_at = now_us();
        let mut extras = serde_json::Map::new();
        if self.resumed {
            extras.insert("resumed".to_owned(), true.into());
        }
        if self.unknown_outcomes > 0 {
            extras.insert("outcome_unknown".to_owned(), self.unknown_outcomes.into());
        }
        if let Some(branch) = &options.branch {
            extras.insert("branched_at".to_owned(), branch.step.into());
        }
        let sampling = json!({
            "temperature": options.sampling.temperature,
            "top_p": options.sampling.top_p,
            "max_tokens": options.sampling.max_tokens,
            "seed": self.plan.seed,
            "logprobs_of": options.policy.client.logprobs_of(options.sampling),
        });
        EpisodeRow {
            run_date: self.rows.run_date.clone(),
            purpose: self.rows.purpose.to_string(),
            run_id: self.rows.run_id.clone(),
            episode_id: self.rows.episode_id.clone(),
            group_id: self.plan.group_id.clone(),
            task_id: self.plan.task.task_id.clone(),
            task_set: self.plan.task.task_set.clone(),
            family: self.plan.task.family.clone(),
            split: Some(self.plan.task.split.to_string()),
            status: if infrastructure {
                "infrastructure"
            } else {
                "finished"
            }
            .to_owned(),
            end_reason: reason.to_string(),
            infrastructure_cause: if infrastructure {
                Some(cause.unwrap_or_else(|| reason.to_string()))
            } else {
                None
            },
            policy: options.policy.name.clone(),
            policy_revision: options.policy.revision.clone(),
            sample_index: self.plan.sample_index as i32,
            attempt: self.plan.attempt as i32,
            temperature: options.sampling.temperature,
            n_steps: steps.len() as i32,
            n_tool_calls: calls.len() as i32,
            n_parse_errors: with_status(ParseStatus::Error),
            n_repaired: with_status(ParseStatus::Repaired),
            prompt_tokens: steps
                .iter()
                .filter_map(|row| row.prompt_tokens)
                .map(i64::from)
                .sum(),
            generated_tokens: steps
                .iter()
                .filter_map(|row| row.generated_tokens)
                .map(i64::from)
                .sum(),
            wall_us: ended_at - self.started_at,
            model_us: steps.iter().map(|row| row.generation_us).sum(),
            tool_us: calls.iter().map(|row| row.wall_us).sum(),
            cpu_us: calls
                .iter()
                .filter_map(|row| row.cpu_us)
                .reduce(|a, b| a + b),
            peak_memory_bytes: calls.iter().filter_map(|row| row.peak_memory_bytes).max(),
            started_at: Timestamp(self.started_at),
            ended_at: Timestamp(ended_at),
            parent_episode_id: self.plan.parent.clone(),
            claimed_success: self
                .submitted
                .then(|| claims_success(self.answer.as_deref())),
            claim: self.answer.take(),
            prompt_hash: derive_id(&["prompt", &self.system_text], 32),
            sampling: sampling.to_string(),
            toolset_version: self.plan.toolset.version.to_owned(),
            toolset_hash: self.plan.toolset.hash.clone(),
            parser_version: drillyard_render::PARSER_VERSION.to_owned(),
            sandbox_image: self.shared.sandbox_image.clone(),
            drillyard_version: DRILLYARD_VERSION.to_owned(),
            limits: self.shared.limits.clone(),
            artifacts: std::mem::take(&mut self.artifacts),
            n_injected_faults: calls
                .iter()
                .filter(|row| row.fault_injected.is_some())
                .count() as i32,
            n_state_lost: self.state_lost as i32,
            imported_from: None,
            evaluation_set: false,
            extras: (!extras.is_empty()).then(|| Value::Object(extras).to_string()),
        }
    }
}

/// Whole outputs that do not fit a row.
async fn keep_outputs(
    dir: Option<&Utf8Path>,
    step: u32,
    index: usize,
    result: &CallResult,
) -> Result<Vec<Artifact>, AgentError> {
    let Some(dir) = dir else {
        return Ok(Vec::new());
    };
    let mut kept = Vec::new();
    for (name, bytes) in [("stdout", &result.stdout), ("stderr", &result.stderr)] {
        if bytes.len() > ROW_OUTPUT_BYTES {
            let name = format!("step {step} call {index} {name}");
            kept.push(artifacts::keep_aside(dir, name, bytes.clone(), Lasting::Synced).await?);
        }
    }
    Ok(kept)
}

/// What a sandbox tells of a call and no column holds. The keys are documented with the table.
fn note_sandbox(extras: &mut serde_json::Map<String, Value>, result: &CallResult) {
    let mut note = |key: &str, value: Value| {
        extras.insert(key.to_owned(), value);
    };
    note("why", result.reason().as_str().into());
    if !matches!(
        result.outcome,
        drillyard_sandbox::CallOutcome::Ok | drillyard_sandbox::CallOutcome::Error
    ) {
        note("why_text", result.why().into());
    }
    // What was never run used nothing.
    if result.cpu.is_some() {
        note("user_us", micros(result.user).into());
        note("system_us", micros(result.system).into());
        note("oom_kills", result.oom_kills.into());
        note("survivors", result.survivors.into());
    }
    for (key, value) in [
        ("peak_process_memory_bytes", result.peak_process_memory),
        ("io_read_bytes", result.read_chars),
        ("io_written_bytes", result.written_chars),
        ("processes", result.processes),
        ("peak_processes", result.peak_processes),
    ] {
        if let Some(value) = value {
            note(key, value.into());
        }
    }
    if result.changes_incomplete {
        note(CHANGES_INCOMPLETE, true.into());
    }
    if !result.warnings.is_empty() {
        note("limit_warnings", json!(result.warnings));
    }
    if !result.network.is_empty() {
        note("network", json!(result.network));
    }
    if let Some(why) = &result.unusable {
        note("unusable", why.as_str().into());
    }
}

/// What the verifier says of these files; an error where it fails, which tells nothing of them.
async fn judge(
    set: Arc<dyn TaskSet>,
    task: Arc<Task>,
    files: BTreeMap<String, Vec<u8>>,
    answer: Option<String>,
) -> Result<Verification, String> {
    let verifying =
        tokio::task::spawn_blocking(move || set.verify(&task, &files, answer.as_deref()));
    let verification = match tokio::time::timeout(VERIFY_TIMEOUT, verifying).await {
        Ok(Ok(verification)) => verification,
        Ok(Err(panic)) => return Err(format!("the verifier panicked: {panic}")),
        Err(_) => {
            let seconds = VERIFY_TIMEOUT.as_secs();
            return Err(format!("the verifier took more than {seconds} s"));
        }
    };
    match verification.fault {
        Some(fault) => Err(fault),
        None => Ok(verification),
    }
}

/// The result of a call that the sandbox failed.
fn faulted(mut row: ToolCallRow, error: &SandboxError) -> LoggedCall {
    row.outcome = CallOutcome::SandboxFault.to_string();
    let extras = json!({
        "why": CallOutcome::SandboxFault.as_str(),
        "end_reason": end_of(error).as_str(),
        "cause": error.to_string(),
    });
    row.extras = Some(extras.to_string());
    LoggedCall {
        row,
        observation: String::new(),
        artifacts: Vec::new(),
        files: Vec::new(),
        sandbox_ended: true,
    }
}

/// The end that such a call brings.
fn end_of_fault(row: &ToolCallRow) -> Halt {
    let extras: Value = row
        .extras
        .as_deref()
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    let reason = extras["end_reason"].as_str().unwrap_or_default();
    Halt::End(
        reason.parse().unwrap_or(EndReason::SandboxFault),
        extras["cause"].as_str().map(str::to_owned),
    )
}

/// A seed from parts.
pub(crate) fn seed_of(parts: &[&str]) -> u64 {
    u64::from_str_radix(&derive_id(parts, 16), 16).unwrap_or_default()
}

/// What the model said, as calls or as the reason why there are none.
fn read_turn(reply: &TurnReply, step: u32, max_tokens: u32) -> Reading {
    if reply.rebuilt {
        return Reading {
            calls: reply.calls.clone(),
            status: ParseStatus::Ok,
            error: None,
            reasoning: reply.reasoning.clone(),
        };
    }
    let parsed = parse_turn(&reply.text);
    let reasoning = reply.reasoning.clone().or(parsed.reasoning);
    // What a cut reply would have become is not ours to guess: only a call that was complete before the cut counts.
    if reply.is_cut() && parsed.status != ParseStatus::Ok {
        return Reading {
            calls: Vec::new(),
            status: ParseStatus::Error,
            error: Some(format!("the reply was cut at max_tokens ({max_tokens})")),
            reasoning,
        };
    }
    let mut calls = parsed.calls;
    for (index, call) in calls.iter_mut().enumerate() {
        call.id = format!("call_{step}_{index}");
    }
    if parsed.status == ParseStatus::Error {
        calls.clear();
    }
    Reading {
        calls,
        status: parsed.status,
        error: parsed.error,
        reasoning,
    }
}

pub(crate) fn read_arguments(text: &str) -> Result<Value, String> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(json!({}));
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(Value::Object(map)),
        Ok(_) => Err("the arguments are not a JSON object".to_owned()),
        Err(error) => Err(format!("the arguments are not valid JSON: {error}")),
    }
}

/// The beginning of an output as text; the rest is an artifact or gone, and its size is in the row.
fn row_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(ROW_OUTPUT_BYTES)]).into_owned()
}

/// Whether the words of a submission claim success. Submitting is a claim unless the words say otherwise.
fn claims_success(answer: Option<&str>) -> bool {
    let answer = answer.unwrap_or_default().to_lowercase();
    ![
        "could not",
        "cannot",
        "can't",
        "unable to",
        "i failed",
        "failed to",
        "gave up",
    ]
    .iter()
    .any(|words| answer.contains(words))
}

/// The sandbox's outcome as the lake's label.
fn outcome_of(result: &CallResult) -> CallOutcome {
    result
        .outcome
        .as_str()
        .parse()
        .unwrap_or(CallOutcome::Error)
}

pub(crate) fn fill_row(row: &mut ToolCallRow, result: &CallResult, truncated: bool) {
    row.outcome = outcome_of(result).to_string();
    row.exit_code = result.exit_code;
    row.signal = result.signal;
    row.stdout = row_text(&result.stdout);
    row.stderr = row_text(&result.stderr);
    row.stdout_bytes = result.stdout_bytes as i64;
    row.stderr_bytes = result.stderr_bytes as i64;
    row.truncated = truncated;
    row.wall_us = micros(result.wall);
    row.cpu_us = result.cpu.map(micros);
    row.peak_memory_bytes = result.peak_memory.map(|bytes| bytes as i64);
    row.read_bytes = result.read_bytes.map(|bytes| bytes as i64);
    row.written_bytes = result.written_bytes.map(|bytes| bytes as i64);
    row.state_lost = result.state_lost;
    row.files_changed = result
        .files_changed
        .iter()
        .map(|file| FileChange {
            path: file.path.clone(),
            change: pack::label(file.change).to_owned(),
            before_hash: file.before_hash.clone(),
            after_hash: file.after_hash.clone(),
            size_bytes: file.size as i64,
        })
        .collect();
}

#[cfg(test)]
mod tests {
    use drillyard_gym::{ExpertTurn, Family, GymError, task_set};
    use drillyard_schema::Split;

    use super::*;

    /// Verifies nothing.
    struct Broken(Option<&'static str>);

    impl TaskSet for Broken {
        fn name(&self) -> &'static str {
            "broken"
        }

        fn version(&self) -> &'static str {
            "1"
        }

        fn families(&self) -> &[Family] {
            &[]
        }

        fn generate(&self, _: Split, _: usize, _: u64) -> Vec<Task> {
            Vec::new()
        }

        fn asset(&self, name: &str) -> Result<Arc<[u8]>, GymError> {
            panic!("{name}")
        }

        fn outputs(&self, _: &Task) -> Vec<String> {
            Vec::new()
        }

        fn verify(&self, _: &Task, _: &BTreeMap<String, Vec<u8>>, _: Option<&str>) -> Verification {
            let fault = self.0.expect("a verifier with a defect");
            Verification {
                success: false,
                score: 0.0,
                detail: String::new(),
                milestones: vec!["looked".to_owned()],
                fault: Some(fault.to_owned()),
            }
        }

        fn expert(&self, _: &Task, _: u64, _: f64) -> Vec<ExpertTurn> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn a_verifier_that_fails_says_nothing_and_ends_nothing() {
        let set = task_set("wrangle").unwrap();
        let task = Arc::new(set.generate(Split::Train, 1, 1).pop().unwrap());
        for (broken, part) in [
            (Broken(None), "panicked"),
            (Broken(Some("no database")), "no database"),
        ] {
            let judged = judge(Arc::new(broken), task.clone(), BTreeMap::new(), None).await;
            assert!(judged.unwrap_err().contains(part));
        }
        assert!(judge(set, task, BTreeMap::new(), None).await.is_ok());
    }
}
