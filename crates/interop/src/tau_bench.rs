//! tau-bench historical trajectories: `[{task_id, reward, info, traj, trial}, …]`.
//!
//! `traj` is the conversation in chat API messages between agent, simulated user and tools; `trial` counts the attempts at a
//! task. What the format is like, and what is made of it:
//! - Each assistant message is a step. The last message is the user's or a tool's, never the assistant's: roles decide what the
//!   model wrote, not positions.
//! - Arguments are JSON texts; assistant content is null beside calls; the tools' schemas are not in the file.
//! - The reward is of the whole episode: `outcome`. Its parts are kept as `r_actions` and `r_outputs` where recorded.
//! - An episode that ran into the harness's error handling has an empty `traj` and `info.error`: infrastructure, not scored.
//! - `info.reward_info` is null where the conversation was cut off at the step limit.
//!
//! The tasks are a public evaluation set, and are marked so.

use camino::Utf8Path;
use drillyard_lake::EpisodeBundle;
use drillyard_schema::ids::derive_id;
use drillyard_schema::{CallOutcome, EndReason, ParseStatus};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::ImportOptions;
use crate::record::{Builder, Call, PolicyFacts, Spoken, TaskFacts, Turn};

const SCHEME: &str = "tau_bench";

#[derive(Deserialize)]
struct Recorded {
    task_id: u64,
    reward: f64,
    info: Map<String, Value>,
    traj: Vec<Map<String, Value>>,
    #[serde(default)]
    trial: i32,
}

/// One record as an episode.
pub fn episode(
    value: Value,
    file: &Utf8Path,
    options: &ImportOptions,
) -> Result<EpisodeBundle, String> {
    let mut record: Recorded =
        serde_json::from_value(value).map_err(|e| format!("not a tau-bench episode: {e}"))?;
    if record.trial < 0 {
        return Err(format!("trial {} is negative", record.trial));
    }
    let messages: Vec<Spoken> = std::mem::take(&mut record.traj)
        .into_iter()
        .enumerate()
        .map(|(i, m)| spoken(m).map_err(|e| format!("message {i}: {e}")))
        .collect::<Result<_, _>>()?;
    let system = messages
        .iter()
        .find(|m| m.role == "system")
        .and_then(|m| m.content.as_deref())
        .unwrap_or_default();
    let task = record.info.get("task").cloned().unwrap_or(Value::Null);
    let family = domain(system, file);
    let policy = options.policy.clone().unwrap_or_else(|| policy_name(file));
    let mut episode = Builder::new(
        TaskFacts {
            task_set: "tau_bench",
            task_set_version: "1",
            index: record.task_id,
            difficulty: difficulty(&task),
            instruction: task["instruction"].as_str().unwrap_or_default().to_owned(),
            verifier: (!task.is_null()).then(|| task.clone()),
            evaluation_set: true,
            source: "tau-bench (github.com/sierra-research/tau-bench)",
            licence: "MIT",
            family: family.clone(),
        },
        PolicyFacts {
            policy,
            revision: "recorded".to_owned(),
            sample: record.trial,
            prompt_hash: derive_id(&["prompt", system], 16),
            toolset_version: format!("tau-bench-{family}"),
        },
        file,
        options,
    );

    let end = end_reason(&record, &messages);
    converse(&mut episode, messages);
    episode.reward(SCHEME, None, "outcome", record.reward);
    let parts = record
        .info
        .get("reward_info")
        .and_then(|r| r["info"].as_object());
    if let Some(parts) = parts {
        for name in ["r_actions", "r_outputs"] {
            let value = parts.get(name).and_then(|v| {
                v.as_f64()
                    .or_else(|| v.as_bool().map(|b| f64::from(u8::from(b))))
            });
            if let Some(value) = value {
                episode.reward(SCHEME, None, name, value);
            }
        }
    }
    let (end, cause) = end;
    if cause.is_none() {
        episode.verdict(SCHEME, record.reward, None);
    }
    let mut extras = Map::new();
    extras.insert("task_id".to_owned(), json!(record.task_id));
    record.info.remove("task");
    extras.insert("info".to_owned(), Value::Object(record.info));
    Ok(episode.finish(end, cause, extras))
}

/// A message's fields in their columns; what has none goes to `extras`, so that nothing is lost.
fn spoken(mut message: Map<String, Value>) -> Result<Spoken, String> {
    let mut take_text = |field: &str| match message.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(format!("{field} is not text")),
    };
    let spoken = Spoken {
        role: take_text("role")?.ok_or("no role")?,
        name: take_text("name")?,
        content: take_text("content")?,
        tool_call_id: take_text("tool_call_id")?,
        tool_calls: match message.remove("tool_calls") {
            None | Some(Value::Null) => None,
            Some(calls @ Value::Array(_)) => Some(calls),
            Some(_) => return Err("tool_calls is not a list".to_owned()),
        },
        extras: message,
    };
    for call in spoken.calls() {
        if call["function"]["name"].as_str().is_none() {
            return Err("a tool call without a function name".to_owned());
        }
    }
    Ok(spoken)
}

impl Spoken {
    fn calls(&self) -> &[Value] {
        self.tool_calls
            .as_ref()
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }
}

fn converse(episode: &mut Builder, messages: Vec<Spoken>) {
    let results: Vec<Option<(String, String)>> = messages
        .iter()
        .map(|m| {
            (m.role == "tool").then(|| {
                (
                    m.tool_call_id.clone().unwrap_or_default(),
                    m.content.clone().unwrap_or_default(),
                )
            })
        })
        .collect();
    let mut step = None;
    for (index, message) in messages.into_iter().enumerate() {
        if message.role == "assistant" {
            let text = message.content.clone().unwrap_or_default();
            let talks_only = message.calls().is_empty();
            step = Some(episode.step(Turn {
                raw_text: text,
                reasoning: None,
                parse: if talks_only {
                    ParseStatus::None
                } else {
                    ParseStatus::Ok
                },
                parse_error: None,
            }));
            for call in message.calls() {
                let id = call["id"].as_str().unwrap_or_default();
                // The result stands after the call; ids may come again later in a conversation.
                let result = results[index + 1..]
                    .iter()
                    .flatten()
                    .find(|(answers, _)| answers == id)
                    .map(|(_, content)| content.clone());
                episode.call(recorded_call(call, id, result));
            }
        }
        let of_step = step.filter(|_| message.role == "assistant" || message.role == "tool");
        episode.message(of_step, message);
    }
}

fn recorded_call(call: &Value, id: &str, result: Option<String>) -> Call {
    let arguments = match &call["function"]["arguments"] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    let schema_error = match serde_json::from_str::<Value>(&arguments) {
        Ok(Value::Object(_)) => None,
        Ok(_) => Some("the arguments are no JSON object".to_owned()),
        Err(error) => Some(format!("the arguments are not valid JSON: {error}")),
    };
    Call {
        id: id.to_owned(),
        tool: call["function"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
        arguments,
        schema_error,
        outcome: match &result {
            None => CallOutcome::OutcomeUnknown,
            Some(text) if text.starts_with("Error") => CallOutcome::Error,
            Some(_) => CallOutcome::Ok,
        },
        output: result.unwrap_or_default(),
    }
}

fn end_reason(record: &Recorded, messages: &[Spoken]) -> (EndReason, Option<String>) {
    if let Some(error) = record.info.get("error").filter(|e| !e.is_null()) {
        let text = error
            .as_str()
            .map_or_else(|| error.to_string(), str::to_owned);
        return (EndReason::EndpointFault, Some(text));
    }
    let cut_off = record.info.get("reward_info").is_some_and(Value::is_null);
    if cut_off && messages.iter().any(|m| m.role == "assistant") {
        return (EndReason::StepLimit, None);
    }
    (EndReason::Other, None)
}

/// Graded by the number of actions that solving the task takes.
fn difficulty(task: &Value) -> Option<i32> {
    Some(match task["actions"].as_array()?.len() {
        0 | 1 => 1,
        2 | 3 => 2,
        _ => 3,
    })
}

/// Airline or retail: the system prompt says so in its first line.
fn domain(system: &str, file: &Utf8Path) -> String {
    let first = system.lines().next().unwrap_or_default().to_lowercase();
    let name = file.file_stem().unwrap_or_default().to_lowercase();
    ["airline", "retail"]
        .into_iter()
        .find(|d| first.contains(d))
        .or_else(|| ["airline", "retail"].into_iter().find(|d| name.contains(d)))
        .unwrap_or("unknown")
        .to_owned()
}

/// The model in `MODEL-DOMAIN.json`.
fn policy_name(file: &Utf8Path) -> String {
    let stem = file.file_stem().unwrap_or_default();
    ["-airline", "-retail"]
        .into_iter()
        .find_map(|domain| stem.strip_suffix(domain))
        .unwrap_or(stem)
        .to_owned()
}
