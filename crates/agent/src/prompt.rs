//! The first two messages, the words that go back to the model when a turn was of no use, and hashes over what it was shown.

use std::fmt::Write as _;

use drillyard_schema::ids::derive_id;
use drillyard_schema::{Message, ToolSpec};
use serde_json::Value;

use crate::policy::ToolProtocol;

/// The system prompt. `template` may hold `{tools}`, which the text protocol fills in; without it the description goes to the end.
pub(crate) fn system_text(template: &str, tools: &[ToolSpec], protocol: ToolProtocol) -> String {
    if protocol != ToolProtocol::Text {
        return template.replace("{tools}", "").trim_end().to_owned();
    }
    let described = describe(tools);
    if template.contains("{tools}") {
        template.replace("{tools}", &described)
    } else {
        format!("{template}\n\n{described}")
    }
}

fn describe(tools: &[ToolSpec]) -> String {
    let mut text = String::from(
        "To call a tool, write the call as JSON between tags, for example \
         <tool_call>{\"name\":\"list_dir\",\"arguments\":{\"path\":\".\"}}</tool_call>, and stop there: the result is the next message. The tools:",
    );
    for tool in tools {
        let _ = write!(
            text,
            "\n- {}: {} Arguments (JSON Schema): {}",
            tool.name, tool.description, tool.parameters
        );
    }
    text
}

/// What a model is told whose call could not be read.
pub(crate) fn parse_error_text(error: &str) -> String {
    format!(
        "error: the tool call could not be read: {error}. Write it again as <tool_call>{{\"name\":…,\"arguments\":{{…}}}}</tool_call>."
    )
}

/// What a model is told whose reply was cut.
pub(crate) fn cut_text(max_tokens: u32) -> String {
    format!(
        "error: the reply was cut after {max_tokens} tokens, before a tool call was complete. Be shorter."
    )
}

/// What a model is told that called nothing.
pub(crate) const NO_CALL_TEXT: &str =
    "error: no tool was called. Call a tool, or call submit if the task is done.";

/// What a model is told of a call whose result was lost.
pub(crate) const OUTCOME_UNKNOWN_TEXT: &str = "[outcome unknown: the run was interrupted during this call. Its effects may be missing; check before going on.]";

/// The hash over a conversation; equal for equal messages.
pub(crate) fn history_hash(messages: &[Message]) -> String {
    let parts: Vec<String> = messages
        .iter()
        .map(|message| serde_json::to_string(message).unwrap_or_default())
        .collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    derive_id(&parts, 32)
}

/// The hash over a tool and its arguments; equal for calls that mean the same, whatever the order of keys.
pub(crate) fn call_hash(tool: &str, arguments: &Value) -> String {
    derive_id(&["call", tool, &canonical(arguments)], 32)
}

/// JSON with sorted keys and no spaces.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by(|a, b| a.0.cmp(b.0));
            let entries: Vec<String> = entries
                .into_iter()
                .map(|(key, value)| format!("{}:{}", Value::String(key.clone()), canonical(value)))
                .collect();
            format!("{{{}}}", entries.join(","))
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(canonical).collect();
            format!("[{}]", items.join(","))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use drillyard_schema::Role;
    use serde_json::json;

    use super::*;

    fn tool() -> ToolSpec {
        ToolSpec {
            name: "list_dir".to_owned(),
            description: "Lists a folder.".to_owned(),
            parameters: json!({ "type": "object" }),
        }
    }

    #[test]
    fn only_the_text_protocol_describes_the_tools() {
        assert_eq!(
            system_text("Do it. {tools}", &[tool()], ToolProtocol::Template),
            "Do it."
        );
        let text = system_text("Do it.", &[tool()], ToolProtocol::Text);
        assert!(text.starts_with("Do it.\n\nTo call a tool"));
        assert!(text.contains("- list_dir: Lists a folder."));
    }

    #[test]
    fn calls_that_mean_the_same_hash_the_same() {
        let a = call_hash("t", &json!({ "a": 1, "b": { "c": [1, 2], "d": null } }));
        let b = call_hash("t", &json!({ "b": { "d": null, "c": [1, 2] }, "a": 1 }));
        assert_eq!(a, b);
        assert_ne!(a, call_hash("u", &json!({})));
    }

    #[test]
    fn history_hashes_follow_the_messages() {
        let one = [Message::text(Role::User, "a")];
        let two = [
            Message::text(Role::User, "a"),
            Message::text(Role::User, "b"),
        ];
        assert_eq!(history_hash(&one), history_hash(&two[..1]));
        assert_ne!(history_hash(&one), history_hash(&two));
    }
}
