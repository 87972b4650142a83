//! A model's turn to tool calls.
//!
//! The form asked for is `<tool_call>{"name":…,"arguments":{…}}</tool_call>`, with text before it if the model likes. What models
//! write instead is understood too and marked as repaired: calls in code fences, bare objects among prose, other names for the two
//! fields, damaged JSON, a missing closing tag. A turn that tries to call a tool and can't be understood is an error whose text is
//! meant for the model. A turn without any attempt is just text.

use std::ops::Range;

use drillyard_schema::{ParseStatus, ToolCall};
use serde_json::Value;

use crate::json;

/// Raised whenever the same text could parse differently; stored with every episode.
pub const PARSER_VERSION: &str = "1";

pub(crate) const OPEN: &str = "<tool_call>";
pub(crate) const CLOSE: &str = "</tool_call>";
const THINK_OPEN: &str = "<think>";
const THINK_CLOSE: &str = "</think>";
/// How many opening braces among prose are tried as the start of a call.
const MAX_TRIES: usize = 64;

/// What a turn says.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedTurn {
    /// The text outside calls and reasoning; none where there is only white space.
    pub content: Option<String>,
    /// What stood between `<think>` and `</think>`.
    pub reasoning: Option<String>,
    /// The calls, numbered `call_0`, `call_1`, …; those that could be read, also where others could not.
    pub calls: Vec<ToolCall>,
    /// Whether the turn parsed as it stood.
    pub status: ParseStatus,
    /// What was repaired, or why it could not be parsed, in words the model can act on.
    pub error: Option<String>,
}

/// Parses a turn. Never fails: what can't be understood is a status.
pub fn parse_turn(text: &str) -> ParsedTurn {
    let (reasoning, body) = split_reasoning(text);
    let regions = regions(body);
    let mut content = String::new();
    let mut from = 0;
    for region in &regions {
        content.push_str(&body[from..region.range.start]);
        from = region.range.end;
    }
    content.push_str(&body[from..]);
    let content = content.trim();
    let mut calls = Vec::new();
    let (mut repaired, mut failed) = (Vec::new(), Vec::new());
    for region in regions {
        for call in region.calls {
            let id = format!("call_{}", calls.len());
            calls.push(ToolCall::new(id, call.name, call.arguments));
        }
        repaired.extend(region.repaired);
        failed.extend(region.error);
    }
    let (status, notes) = match (calls.is_empty(), repaired.is_empty(), failed.is_empty()) {
        (_, _, false) => (ParseStatus::Error, failed),
        (false, false, true) => (ParseStatus::Repaired, repaired),
        (false, true, true) => (ParseStatus::Ok, Vec::new()),
        (true, _, true) => (ParseStatus::None, Vec::new()),
    };
    ParsedTurn {
        content: (!content.is_empty()).then(|| content.to_owned()),
        reasoning,
        calls,
        status,
        error: (!notes.is_empty()).then(|| notes.join("; ")),
    }
}

/// A stretch of a turn that is, or was meant to be, one or more calls.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) range: Range<usize>,
    /// Where in the turn the JSON lies that parsed strictly; empty where it had to be repaired.
    pub(crate) strict: Vec<Range<usize>>,
    calls: Vec<Call>,
    repaired: Vec<String>,
    error: Option<String>,
}

#[derive(Debug)]
struct Call {
    name: String,
    arguments: String,
}

/// The stretches of a text (reasoning left out) that are calls, in order.
pub(crate) fn regions(body: &str) -> Vec<Region> {
    if body.contains(OPEN) {
        return tagged(body);
    }
    let fenced = fenced(body);
    if fenced.is_empty() {
        bare(body)
    } else {
        fenced
    }
}

/// The reasoning at the start of a turn, and what follows it.
pub(crate) fn split_reasoning(text: &str) -> (Option<String>, &str) {
    let start = text.trim_start();
    let opened = start.strip_prefix(THINK_OPEN);
    let inner = opened.unwrap_or(start);
    let (reasoning, body) = match (opened, inner.find(THINK_CLOSE)) {
        // Some templates open the reasoning in the prompt.
        (_, Some(end)) => (&inner[..end], &inner[end + THINK_CLOSE.len()..]),
        (Some(_), None) => (inner, &inner[inner.len()..]),
        (None, None) => return (None, text),
    };
    let reasoning = reasoning.trim();
    ((!reasoning.is_empty()).then(|| reasoning.to_owned()), body)
}

fn tagged(body: &str) -> Vec<Region> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(offset) = body[at..].find(OPEN) {
        let start = at + offset;
        let inner = start + OPEN.len();
        let region = one_tagged(body, start, inner);
        at = region.range.end;
        found.push(region);
    }
    found
}

fn one_tagged(body: &str, start: usize, inner: usize) -> Region {
    let mut region = Region {
        range: start..inner,
        strict: Vec::new(),
        calls: Vec::new(),
        repaired: Vec::new(),
        error: None,
    };
    // A closing tag inside a string argument doesn't close: read JSON first.
    let mut at = inner;
    let mut values = Vec::new();
    while let Some((value, length)) = json::prefix(&body[at..]) {
        values.push((value, at..at + length));
        at += length;
        if body[at..].trim_start().starts_with(CLOSE) {
            break;
        }
    }
    let rest = body[at..].trim_start();
    if !values.is_empty() && (rest.starts_with(CLOSE) || rest.is_empty()) {
        if rest.is_empty() {
            region.range.end = body.len();
            region.repaired.push(format!("{CLOSE} was missing"));
        } else {
            region.range.end = body.len() - rest.len() + CLOSE.len();
        }
        if values.len() > 1 {
            region
                .repaired
                .push(format!("several calls between one {OPEN} and {CLOSE}"));
        }
        for (value, range) in values {
            region.strict.push(range.clone());
            region.take(&value, Some(&body[range]));
        }
        return region;
    }
    let tail = &body[inner..];
    let close = tail.find(CLOSE);
    let reopened = tail.find(OPEN);
    let length = match (close, reopened) {
        (Some(close), Some(reopened)) => close.min(reopened),
        (one, other) => one.or(other).unwrap_or(tail.len()),
    };
    region.range.end = inner + length;
    if close == Some(length) {
        region.range.end += CLOSE.len();
    } else {
        region.repaired.push(format!("{CLOSE} was missing"));
    }
    let text = &tail[..length];
    if let Some((value, _)) = json::repair(text) {
        region.repaired.push("the call's JSON was damaged".into());
        region.take(&value, None);
    } else {
        let reason = match serde_json::from_str::<Value>(text.trim()) {
            Err(error) => error.to_string(),
            Ok(_) => "it is not an object".to_owned(),
        };
        region.error = Some(format!(
            "the text after {OPEN} is not valid JSON ({reason}); write {OPEN}{{\"name\":\"TOOL\",\"arguments\":{{…}}}}{CLOSE}"
        ));
    }
    region
}

/// Calls in ``` fences.
fn fenced(body: &str) -> Vec<Region> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(offset) = body[at..].find("```") {
        let start = at + offset;
        let inner = start + 3;
        let label = body[inner..]
            .find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '-'))
            .unwrap_or(body.len() - inner);
        let text_start = inner + label;
        let (text_end, end) = match body[text_start..].find("```") {
            Some(length) => (text_start + length, text_start + length + 3),
            None => (body.len(), body.len()),
        };
        at = end;
        let text = &body[text_start..text_end];
        if let Some(region) = untagged(
            text,
            text_start,
            start..end,
            "the call stood in a code fence",
        ) {
            found.push(region);
        }
    }
    found
}

/// Bare objects among prose.
fn bare(body: &str) -> Vec<Region> {
    let mut found = Vec::new();
    let mut at = 0;
    let mut last_call = 0;
    for _ in 0..MAX_TRIES {
        let Some(offset) = body[at..].find('{') else {
            break;
        };
        let start = at + offset;
        match json::prefix(&body[start..]) {
            Some((value, length)) if looks_like_call(&value) => {
                let range = start..start + length;
                if let Some(region) = untagged(
                    &body[range.clone()],
                    start,
                    range.clone(),
                    "the call stood without tags",
                ) {
                    found.push(region);
                }
                at = range.end;
                last_call = at;
            }
            Some((_, length)) => at = start + length,
            None => at = start + 1,
        }
    }
    if !found.is_empty() {
        return found;
    }
    // Nothing parses as it stands; the first object that names a tool and its arguments may be damaged.
    let mut at = last_call;
    for _ in 0..MAX_TRIES {
        let Some(offset) = body[at..].find('{') else {
            break;
        };
        let start = at + offset;
        if let Some((value, length)) = json::repair(&body[start..])
            && looks_like_call(&value)
        {
            let range = start..start + length;
            found.extend(untagged(
                &body[range.clone()],
                start,
                range,
                "the call stood without tags",
            ));
            return found;
        }
        at = start + 1;
    }
    found
}

/// A call without tags, if the text is one.
fn untagged(text: &str, offset: usize, range: Range<usize>, note: &str) -> Option<Region> {
    let mut region = Region {
        range,
        strict: Vec::new(),
        calls: Vec::new(),
        repaired: vec![note.to_owned()],
        error: None,
    };
    if let Some((value, length)) = json::prefix(text)
        && text[length..].trim().is_empty()
    {
        let items = value.as_array();
        if !items.map_or_else(
            || looks_like_call(&value),
            |items| !items.is_empty() && items.iter().all(looks_like_call),
        ) {
            return None;
        }
        if let Some(items) = items {
            for item in items {
                region.take(item, None);
            }
        } else {
            region.strict.push(offset..offset + length);
            region.take(&value, Some(text));
        }
        return Some(region);
    }
    let (value, _) = json::repair(text)?;
    if !looks_like_call(&value) {
        return None;
    }
    region.repaired.push("the call's JSON was damaged".into());
    region.take(&value, None);
    Some(region)
}

const NAME_KEYS: [&str; 3] = ["name", "tool", "tool_name"];
const ARGUMENT_KEYS: [&str; 4] = ["arguments", "parameters", "args", "input"];

/// Without tags only an object with both a name and arguments is taken for a call.
fn looks_like_call(value: &Value) -> bool {
    let value = value
        .get("function")
        .filter(|f| f.is_object())
        .unwrap_or(value);
    NAME_KEYS.iter().any(|key| value[*key].is_string())
        && ARGUMENT_KEYS
            .iter()
            .any(|key| value[*key].is_object() || value[*key].is_string())
}

impl Region {
    /// Takes a call out of a JSON value; `text` is the value's text where its arguments may be taken verbatim.
    fn take(&mut self, value: &Value, text: Option<&str>) {
        if let (Value::Array(items), true) = (value, self.calls.is_empty()) {
            self.repaired.push("the calls stood in a list".into());
            for item in items {
                self.take_one(item, None);
            }
            return;
        }
        self.take_one(value, text);
    }

    fn take_one(&mut self, value: &Value, text: Option<&str>) {
        let inner = value.get("function").filter(|f| f.is_object());
        if inner.is_some() {
            self.repaired
                .push("name and arguments stood inside \"function\"".into());
        }
        let (value, text) = match inner {
            Some(inner) => (inner, None),
            None => (value, text),
        };
        let Some((name_key, name)) = NAME_KEYS
            .iter()
            .find_map(|key| Some((*key, value.get(key)?.as_str()?)))
        else {
            self.error = Some(format!(
                "the call has no \"name\"; write {OPEN}{{\"name\":\"TOOL\",\"arguments\":{{…}}}}{CLOSE}"
            ));
            return;
        };
        if name_key != "name" {
            self.repaired
                .push(format!("\"{name_key}\" stood for \"name\""));
        }
        let arguments = match ARGUMENT_KEYS.iter().find(|key| value.get(key).is_some()) {
            None => {
                self.repaired.push("the call has no \"arguments\"".into());
                "{}".to_owned()
            }
            Some(key) => {
                if *key != "arguments" {
                    self.repaired
                        .push(format!("\"{key}\" stood for \"arguments\""));
                }
                self.arguments(&value[*key], key, text)
            }
        };
        self.calls.push(Call {
            name: name.to_owned(),
            arguments,
        });
    }

    fn arguments(&mut self, value: &Value, key: &str, text: Option<&str>) -> String {
        if let Some(inner) = value.as_str()
            && serde_json::from_str::<Value>(inner).is_ok_and(|v| v.is_object())
        {
            self.repaired.push("the arguments stood in a string".into());
            return inner.to_owned();
        }
        let verbatim = text.and_then(|text| {
            let member = json::members(text).into_iter().rfind(|m| m.key == key)?;
            Some(text[member.value].to_owned())
        });
        verbatim.unwrap_or_else(|| value.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (ParseStatus, Vec<(String, String)>, Option<String>) {
        let turn = parse_turn(text);
        let calls = turn
            .calls
            .into_iter()
            .map(|call| (call.function.name, call.function.arguments))
            .collect();
        (turn.status, calls, turn.content)
    }

    fn one(name: &str, arguments: &str) -> Vec<(String, String)> {
        vec![(name.to_owned(), arguments.to_owned())]
    }

    #[test]
    fn the_asked_form_is_ok() {
        let call = r#"<tool_call>{"name":"execute_shell","arguments":{"command":"head -n 2 kafo.csv"}}</tool_call>"#;
        let expected = one("execute_shell", r#"{"command":"head -n 2 kafo.csv"}"#);
        assert_eq!(parsed(call), (ParseStatus::Ok, expected.clone(), None));
        assert_eq!(
            parsed(&format!("I look first.\n{call}")),
            (ParseStatus::Ok, expected, Some("I look first.".into()))
        );
        let spaced =
            "<tool_call>\n{\"name\": \"submit\", \"arguments\": {\"a\":  1.50}}\n</tool_call>";
        assert_eq!(
            parsed(spaced),
            (ParseStatus::Ok, one("submit", "{\"a\":  1.50}"), None)
        );
    }

    #[test]
    fn several_calls_keep_their_order() {
        let text = r#"<tool_call>{"name":"a","arguments":{}}</tool_call> and <tool_call>{"name":"b","arguments":{}}</tool_call>"#;
        let turn = parse_turn(text);
        assert_eq!(turn.status, ParseStatus::Ok);
        let ids: Vec<_> = turn
            .calls
            .iter()
            .map(|c| (c.id.as_str(), c.function.name.as_str()))
            .collect();
        assert_eq!(ids, [("call_0", "a"), ("call_1", "b")]);
    }

    #[test]
    fn a_closing_tag_inside_an_argument_does_not_close() {
        let text = r#"<tool_call>{"name":"w","arguments":{"content":"</tool_call>"}}</tool_call>"#;
        assert_eq!(
            parsed(text),
            (
                ParseStatus::Ok,
                one("w", r#"{"content":"</tool_call>"}"#),
                None
            )
        );
    }

    #[test]
    fn other_forms_are_repaired() {
        for text in [
            "```json\n{\"name\":\"t\",\"arguments\":{\"x\":1}}\n```",
            "Sure!\n```\n{\"tool\":\"t\",\"args\":{\"x\":1}}\n```\nDone.",
            r#"I call {"name":"t","arguments":{"x":1}} now"#,
            r#"<tool_call>{"name":"t","arguments":{"x":1}}"#,
            r#"<tool_call>{"name":"t","arguments":{"x":1}</tool_call>"#,
            r"<tool_call>{'name':'t','arguments':{'x':1}}</tool_call>",
            r#"<tool_call>{"name":"t","arguments":"{\"x\":1}"}</tool_call>"#,
            r#"<tool_call>[{"name":"t","arguments":{"x":1}}]</tool_call>"#,
            r#"{"type":"function","function":{"name":"t","arguments":{"x":1}}}"#,
            r#"Let me see: {"name":"t","parameters":{"x":1,}}"#,
        ] {
            let (status, calls, _) = parsed(text);
            assert_eq!(
                (status, calls),
                (ParseStatus::Repaired, one("t", r#"{"x":1}"#)),
                "{text}"
            );
            assert!(
                parse_turn(text).error.is_some(),
                "{text}: says nothing of the repair"
            );
        }
    }

    #[test]
    fn hopeless_calls_tell_the_model_what_to_write() {
        for text in [
            "<tool_call>ls -l</tool_call>",
            "<tool_call>",
            r#"<tool_call>{"arguments":{}}</tool_call>"#,
            "<tool_call>7</tool_call>",
        ] {
            let turn = parse_turn(text);
            assert_eq!(turn.status, ParseStatus::Error, "{text}");
            assert!(
                turn.error.unwrap().contains("<tool_call>{\"name\""),
                "{text}"
            );
        }
    }

    #[test]
    fn text_without_calls_is_text() {
        for text in [
            "",
            "All done.",
            r#"The row is {"name":"kafo","size":3}."#,
            "```sh\nls\n```",
            "a { b",
        ] {
            let turn = parse_turn(text);
            assert_eq!(
                (turn.status, turn.calls.len()),
                (ParseStatus::None, 0),
                "{text}"
            );
        }
    }

    #[test]
    fn reasoning_is_kept_apart() {
        let turn = parse_turn(
            "<think>\nIs {\"name\":\"t\",\"arguments\":{}} right?\n</think>\n\n<tool_call>{\"name\":\"u\",\"arguments\":{}}</tool_call>",
        );
        assert_eq!(
            turn.reasoning.as_deref(),
            Some("Is {\"name\":\"t\",\"arguments\":{}} right?")
        );
        assert_eq!((turn.calls.len(), turn.status), (1, ParseStatus::Ok));
        assert_eq!(parse_turn("hm</think>yes").reasoning.as_deref(), Some("hm"));
        assert_eq!(parse_turn("<think>never ends").content, None);
    }
}
