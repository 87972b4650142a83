//! Episodes back into the formats they came from, so that what was imported can be handed on unchanged.

use drillyard_lake::EpisodeBundle;
use drillyard_schema::table::MessageRow;
use serde_json::{Map, Value, json};

use crate::{Format, InteropError};

/// Messages in the shape of the chat API, as tau-bench's `traj` has them: import(export(x)) = x for messages.
pub fn chat_messages(messages: &[MessageRow]) -> Result<Vec<Value>, String> {
    messages.iter().map(chat_message).collect()
}

fn chat_message(row: &MessageRow) -> Result<Value, String> {
    let parse = |text: &str| -> Result<Value, String> {
        serde_json::from_str(text).map_err(|e| format!("message {}: {e}", row.message_index))
    };
    let mut message = Map::new();
    message.insert("role".to_owned(), json!(row.role));
    message.insert("content".to_owned(), json!(row.content));
    if let Some(name) = &row.name {
        message.insert("name".to_owned(), json!(name));
    }
    if let Some(id) = &row.tool_call_id {
        message.insert("tool_call_id".to_owned(), json!(id));
    }
    if let Some(calls) = &row.tool_calls {
        message.insert("tool_calls".to_owned(), parse(calls)?);
    }
    if let Some(extras) = &row.extras
        && let Value::Object(extras) = parse(extras)?
    {
        message.extend(extras);
    }
    Ok(Value::Object(message))
}

/// Episodes that were imported from tau-bench, as one of its files.
pub fn tau_bench(bundles: &[EpisodeBundle]) -> Result<Value, InteropError> {
    bundles
        .iter()
        .map(|bundle| {
            tau_bench_episode(bundle).map_err(|reason| InteropError::Export {
                episode: bundle.episode.episode_id.clone(),
                format: Format::TauBench,
                reason,
            })
        })
        .collect::<Result<Vec<_>, _>>()
        .map(Value::Array)
}

fn tau_bench_episode(bundle: &EpisodeBundle) -> Result<Value, String> {
    let parse = |text: &Option<String>, what: &str| -> Result<Value, String> {
        let text = text.as_deref().ok_or_else(|| format!("it has no {what}"))?;
        serde_json::from_str(text).map_err(|e| format!("its {what} cannot be read: {e}"))
    };
    let extras = parse(&bundle.episode.extras, "extras")?;
    let Value::Object(rest) = extras["info"].clone() else {
        return Err("its extras hold no info".to_owned());
    };
    let mut info = Map::new();
    if bundle.task.verifier.is_some() {
        info.insert("task".to_owned(), parse(&bundle.task.verifier, "verifier")?);
    }
    info.extend(rest);
    let reward = bundle
        .rewards
        .iter()
        .find(|r| r.component == "outcome" && r.step_index.is_none())
        .ok_or("it has no outcome")?
        .value;
    Ok(json!({
        "task_id": extras["task_id"],
        "reward": reward,
        "info": info,
        "traj": chat_messages(&bundle.messages)?,
        "trial": bundle.episode.sample_index,
    }))
}
