//! Builds an episode's rows from what a format's reader takes out of a record.

use camino::Utf8Path;
use drillyard_lake::EpisodeBundle;
use drillyard_schema::ids::derive_id;
use drillyard_schema::table::{
    EpisodeRow, MessageRow, RewardRow, StepRow, TaskRow, ToolCallRow, VerdictRow,
};
use drillyard_schema::{
    CallOutcome, DRILLYARD_VERSION, EndReason, EpisodeId, GroupId, ParseStatus, Purpose, TaskId,
    VerdictKind,
};
use serde_json::{Map, Value};

use crate::ImportOptions;

/// Toolset, parser and image of an imported episode are the other harness's own.
const RECORDED: &str = "recorded";

/// What a record says of its task.
pub struct TaskFacts {
    pub task_set: &'static str,
    pub task_set_version: &'static str,
    pub family: String,
    pub index: u64,
    pub difficulty: Option<i32>,
    pub instruction: String,
    pub verifier: Option<Value>,
    pub evaluation_set: bool,
    pub source: &'static str,
    pub licence: &'static str,
}

/// What a record says of its policy and which attempt it is.
pub struct PolicyFacts {
    pub policy: String,
    /// Sets apart the same model under another prompting strategy.
    pub revision: String,
    pub sample: i32,
    pub prompt_hash: String,
    pub toolset_version: String,
}

/// Gathers the rows of one episode.
pub struct Builder {
    bundle: EpisodeBundle,
    history_hash: String,
}

impl Builder {
    pub fn new(
        task: TaskFacts,
        policy: PolicyFacts,
        file: &Utf8Path,
        options: &ImportOptions,
    ) -> Self {
        let purpose = Purpose::Import.as_str().to_owned();
        let task_id = TaskId::derive(
            task.task_set,
            task.task_set_version,
            &task.family,
            task.index,
        );
        let identity = format!("{}@{}", policy.policy, policy.revision);
        let sample = u32::try_from(policy.sample).unwrap_or(0);
        let episode_id = EpisodeId::derive(&options.run_id, &identity, &task_id, sample, 0);
        let group_id = GroupId::derive(
            &options.run_id,
            &identity,
            RECORDED,
            &policy.toolset_version,
            &task_id,
        );
        let task_row = TaskRow {
            run_date: options.run_date.clone(),
            purpose: purpose.clone(),
            run_id: options.run_id.clone(),
            task_id: task_id.clone(),
            task_set: task.task_set.to_owned(),
            task_set_version: task.task_set_version.to_owned(),
            family: task.family.clone(),
            difficulty: task.difficulty,
            split: None,
            unseen_family: false,
            instruction: task.instruction,
            verifier: task.verifier.map(|v| v.to_string()),
            milestones: None,
            evaluation_set: task.evaluation_set,
            source: task.source.to_owned(),
            licence: task.licence.to_owned(),
        };
        let episode = EpisodeRow {
            run_date: options.run_date.clone(),
            purpose,
            run_id: options.run_id.clone(),
            episode_id,
            group_id,
            task_id,
            task_set: task.task_set.to_owned(),
            family: task.family,
            split: None,
            status: "finished".to_owned(),
            end_reason: EndReason::Other.as_str().to_owned(),
            infrastructure_cause: None,
            policy: policy.policy,
            policy_revision: policy.revision,
            sample_index: policy.sample,
            attempt: 0,
            temperature: 0.0,
            n_steps: 0,
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
            started_at: options.imported_at,
            ended_at: options.imported_at,
            parent_episode_id: None,
            claimed_success: None,
            claim: None,
            prompt_hash: policy.prompt_hash,
            sampling: r#"{"recorded":false}"#.to_owned(),
            toolset_hash: derive_id(&["toolset", &policy.toolset_version], 16),
            toolset_version: policy.toolset_version,
            parser_version: RECORDED.to_owned(),
            sandbox_image: RECORDED.to_owned(),
            drillyard_version: DRILLYARD_VERSION.to_owned(),
            limits: None,
            artifacts: Vec::new(),
            n_injected_faults: 0,
            n_state_lost: 0,
            imported_from: Some(file.to_string()),
            evaluation_set: task.evaluation_set,
            extras: None,
        };
        Self {
            bundle: EpisodeBundle {
                task: task_row,
                episode,
                messages: Vec::new(),
                steps: Vec::new(),
                tool_calls: Vec::new(),
                tokens: Vec::new(),
                verdicts: Vec::new(),
                rewards: Vec::new(),
            },
            history_hash: derive_id(&["history"], 16),
        }
    }

    /// A message, `step` being the turn that produced it or whose call it answers.
    pub fn message(&mut self, step: Option<i32>, message: Spoken) {
        let e = &self.bundle.episode;
        let row = MessageRow {
            run_date: e.run_date.clone(),
            purpose: e.purpose.clone(),
            run_id: e.run_id.clone(),
            episode_id: e.episode_id.clone(),
            message_index: self.bundle.messages.len() as i32,
            step_index: step,
            role: message.role,
            name: message.name,
            content: message.content,
            tool_calls: message.tool_calls.map(|v| v.to_string()),
            tool_call_id: message.tool_call_id,
            extras: (!message.extras.is_empty()).then(|| Value::Object(message.extras).to_string()),
        };
        self.history_hash = derive_id(
            &[
                &self.history_hash,
                &row.role,
                row.content.as_deref().unwrap_or(""),
                row.tool_calls.as_deref().unwrap_or(""),
                row.tool_call_id.as_deref().unwrap_or(""),
            ],
            16,
        );
        self.bundle.messages.push(row);
    }

    /// A model turn; call it before the turn's own message. Returns its index.
    pub fn step(&mut self, turn: Turn) -> i32 {
        let e = &mut self.bundle.episode;
        let step_index = e.n_steps;
        e.n_steps += 1;
        e.n_parse_errors += i32::from(turn.parse == ParseStatus::Error);
        e.n_repaired += i32::from(turn.parse == ParseStatus::Repaired);
        self.bundle.steps.push(StepRow {
            run_date: e.run_date.clone(),
            purpose: e.purpose.clone(),
            run_id: e.run_id.clone(),
            episode_id: e.episode_id.clone(),
            step_index,
            role: "agent".to_owned(),
            history_hash: self.history_hash.clone(),
            raw_text: turn.raw_text,
            reasoning: turn.reasoning,
            finish_reason: None,
            parse_status: turn.parse.as_str().to_owned(),
            parse_error: turn.parse_error,
            n_calls: 0,
            milestone: None,
            temperature: 0.0,
            prompt_tokens: None,
            generated_tokens: None,
            generation_us: 0,
            started_at: e.started_at,
            extras: None,
        });
        step_index
    }

    /// A tool call of the last step.
    pub fn call(&mut self, call: Call) {
        let Some(step) = self.bundle.steps.last_mut() else {
            return;
        };
        let call_index = step.n_calls;
        step.n_calls += 1;
        let e = &mut self.bundle.episode;
        e.n_tool_calls += 1;
        let failed = call.outcome == CallOutcome::Error;
        let bytes = call.output.len() as i64;
        self.bundle.tool_calls.push(ToolCallRow {
            run_date: e.run_date.clone(),
            purpose: e.purpose.clone(),
            run_id: e.run_id.clone(),
            episode_id: e.episode_id.clone(),
            step_index: step.step_index,
            call_index,
            call_id: call.id,
            call_hash: call_hash(&call.tool, &call.arguments),
            tool: call.tool,
            arguments: call.arguments,
            schema_ok: call.schema_error.is_none(),
            schema_error: call.schema_error,
            outcome: call.outcome.as_str().to_owned(),
            exit_code: None,
            signal: None,
            stdout_bytes: if failed { 0 } else { bytes },
            stderr_bytes: if failed { bytes } else { 0 },
            stdout: if failed {
                String::new()
            } else {
                call.output.clone()
            },
            stderr: if failed { call.output } else { String::new() },
            truncated: false,
            wall_us: 0,
            cpu_us: None,
            peak_memory_bytes: None,
            read_bytes: None,
            written_bytes: None,
            files_changed: Vec::new(),
            fault_injected: None,
            state_lost: false,
            started_at: e.started_at,
            extras: None,
        });
    }

    /// A raw reward component as the harness recorded it.
    pub fn reward(&mut self, scheme: &str, step: Option<i32>, component: &str, value: f64) {
        let e = &self.bundle.episode;
        self.bundle.rewards.push(RewardRow {
            run_date: e.run_date.clone(),
            purpose: e.purpose.clone(),
            run_id: e.run_id.clone(),
            episode_id: e.episode_id.clone(),
            step_index: step,
            scheme: scheme.to_owned(),
            scheme_version: "1".to_owned(),
            component: component.to_owned(),
            value,
        });
    }

    /// The verdict the harness recorded.
    pub fn verdict(&mut self, verifier: &str, score: f64, detail: Option<String>) {
        let e = &self.bundle.episode;
        self.bundle.verdicts.push(VerdictRow {
            run_date: e.run_date.clone(),
            purpose: e.purpose.clone(),
            run_id: e.run_id.clone(),
            episode_id: e.episode_id.clone(),
            kind: VerdictKind::Recorded.as_str().to_owned(),
            verifier: verifier.to_owned(),
            verifier_version: "1".to_owned(),
            success: Some(score >= 1.0 - 1e-6),
            score: Some(score),
            detail,
            decided_at: e.ended_at,
        });
    }

    /// How it ended; an infrastructure reason takes `cause` along and makes the episode unscored.
    pub fn finish(
        mut self,
        end: EndReason,
        cause: Option<String>,
        extras: Map<String, Value>,
    ) -> EpisodeBundle {
        let e = &mut self.bundle.episode;
        end.as_str().clone_into(&mut e.end_reason);
        if end.is_infrastructure() {
            "infrastructure".clone_into(&mut e.status);
            e.infrastructure_cause = cause;
        }
        if !extras.is_empty() {
            e.extras = Some(Value::Object(extras).to_string());
        }
        self.bundle
    }
}

/// A message as the source has it.
pub struct Spoken {
    pub role: String,
    pub name: Option<String>,
    pub content: Option<String>,
    pub tool_calls: Option<Value>,
    pub tool_call_id: Option<String>,
    pub extras: Map<String, Value>,
}

impl Spoken {
    pub fn text(role: &str, content: impl Into<String>) -> Self {
        Self {
            role: role.to_owned(),
            name: None,
            content: Some(content.into()),
            tool_calls: None,
            tool_call_id: None,
            extras: Map::new(),
        }
    }
}

/// A model turn as the source has it.
pub struct Turn {
    pub raw_text: String,
    pub reasoning: Option<String>,
    pub parse: ParseStatus,
    pub parse_error: Option<String>,
}

/// A tool call as the source has it.
pub struct Call {
    pub id: String,
    pub tool: String,
    pub arguments: String,
    pub schema_error: Option<String>,
    pub outcome: CallOutcome,
    pub output: String,
}

/// Equal for equal calls, whatever the spacing and order of their arguments.
fn call_hash(tool: &str, arguments: &str) -> String {
    let normal = serde_json::from_str::<Value>(arguments)
        .map_or_else(|_| arguments.trim().to_owned(), |v| sorted(&v).to_string());
    derive_id(&["call", tool, &normal], 16)
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            Value::Object(
                entries
                    .into_iter()
                    .map(|(k, v)| (k.clone(), sorted(v)))
                    .collect(),
            )
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_calls_hash_equally_however_they_are_written() {
        let a = call_hash(
            "t",
            r#"{"a": 1, "b": {"d": 2, "c": [3, {"f": 4, "e": 5}]}}"#,
        );
        assert_eq!(
            a,
            call_hash("t", r#"{"b":{"c":[3,{"e":5,"f":4}],"d":2},"a":1}"#)
        );
        assert_ne!(
            a,
            call_hash("u", r#"{"b":{"c":[3,{"e":5,"f":4}],"d":2},"a":1}"#)
        );
        assert_ne!(
            a,
            call_hash("t", r#"{"b":{"c":[3,{"e":5,"f":4}],"d":2},"a":2}"#)
        );
        assert_eq!(call_hash("t", " not json"), call_hash("t", "not json "));
    }
}
