//! The chat API's request and the fields Drillyard adds.
//!
//! Added to the request: `return_token_ids` (give ids back), `prior_token_ids` with `prior_messages` (the ids of exactly what was
//! sent and sampled for the first messages; only the others are rendered), `parse_tool_calls` (false leaves calls in the text), and
//! `top_p`, `temperature`, `seed` as usual. Added to the response: `prompt_token_ids`, `choices[0].token_ids`, `system_fingerprint`
//! (the hash of the weights), `drillyard.tokenizer_hash`, `drillyard.template_hash`.

use drillyard_schema::{Message, Role, ToolCall, ToolSpec};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::ServeError;

/// A request of `POST /v1/chat/completions`. Fields it does not list are ignored.
#[derive(Debug, Clone, Deserialize)]
pub struct ChatRequest {
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// The tools on offer.
    #[serde(default)]
    pub tools: Option<Vec<Value>>,
    /// Most tokens to generate; as many as fit by default.
    #[serde(default)]
    pub max_tokens: Option<i64>,
    /// The newer name of `max_tokens`.
    #[serde(default)]
    pub max_completion_tokens: Option<i64>,
    /// 0 takes the likeliest token. Default 1.
    #[serde(default)]
    pub temperature: Option<f64>,
    /// Share of probability that is drawn from. Default 1.
    #[serde(default)]
    pub top_p: Option<f64>,
    /// Makes a request repeatable where it runs alone.
    #[serde(default)]
    pub seed: Option<i64>,
    /// Texts that end the answer; they are not part of it.
    #[serde(default)]
    pub stop: Option<StopTexts>,
    /// Answers wanted; only 1 is possible.
    #[serde(default)]
    pub n: Option<i64>,
    /// Send the answer piece by piece.
    #[serde(default)]
    pub stream: Option<bool>,
    /// With `include_usage`, a streamed answer ends with its token counts.
    #[serde(default)]
    pub stream_options: Option<StreamOptions>,
    /// Give each token's log-probability.
    #[serde(default)]
    pub logprobs: Option<bool>,
    /// Alternatives for each token; only 0 is possible.
    #[serde(default)]
    pub top_logprobs: Option<i64>,
    /// Give the ids of the prompt and of the answer.
    #[serde(default)]
    pub return_token_ids: Option<bool>,
    /// Whether calls are taken out of the text; true by default where there are tools.
    #[serde(default)]
    pub parse_tool_calls: Option<bool>,
    /// The ids of exactly what was sent and sampled for the first `prior_messages` messages.
    #[serde(default)]
    pub prior_token_ids: Option<Vec<i32>>,
    /// How many messages `prior_token_ids` stands for; the last of them is the assistant's.
    #[serde(default)]
    pub prior_messages: Option<usize>,
}

/// One text or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum StopTexts {
    /// One text.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// Options of a streamed answer.
#[derive(Debug, Clone, Deserialize)]
pub struct StreamOptions {
    /// End with the token counts.
    #[serde(default)]
    pub include_usage: bool,
}

/// A message as clients send it: content may come in parts.
#[derive(Debug, Clone, Deserialize)]
pub struct ChatMessage {
    role: String,
    #[serde(default)]
    content: Value,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
}

impl ChatMessage {
    fn message(self, index: usize) -> Result<Message, ServeError> {
        let role = match self.role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" | "function" => Role::Tool,
            other => {
                return Err(ServeError::param(
                    "messages",
                    format!(
                        "messages[{index}].role: '{other}' is none of system, developer, user, assistant, tool"
                    ),
                ));
            }
        };
        Ok(Message {
            role,
            content: content(self.content, index)?,
            tool_calls: self.tool_calls.unwrap_or_default(),
            tool_call_id: self.tool_call_id,
            name: self.name,
            reasoning_content: self.reasoning_content,
        })
    }
}

fn content(value: Value, index: usize) -> Result<Option<String>, ServeError> {
    let wrong = |what: &str| {
        ServeError::param(
            "messages",
            format!(
                "messages[{index}].content: {what}; text, or parts of type 'text', are understood"
            ),
        )
    };
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text)),
        Value::Array(parts) => {
            let mut text = String::new();
            for part in parts {
                let piece = part["text"].as_str().filter(|_| part["type"] == "text");
                text.push_str(
                    piece.ok_or_else(|| wrong(&format!("a part of type {}", part["type"])))?,
                );
            }
            Ok(Some(text))
        }
        _ => Err(wrong("neither text nor a list of parts")),
    }
}

impl ChatRequest {
    /// Reads a request; errors name the field.
    pub fn parse(body: &[u8]) -> Result<Self, ServeError> {
        let request: Self = serde_json::from_slice(body).map_err(|error| ServeError::Request {
            param: None,
            message: format!("the request can't be read: {error}"),
        })?;
        let range = |name: &'static str, value: Option<f64>, low: f64, high: f64| match value {
            Some(value) if !(low..=high).contains(&value) => Err(ServeError::param(
                name,
                format!("{name} must be between {low} and {high}, got {value}"),
            )),
            _ => Ok(()),
        };
        range("temperature", request.temperature, 0.0, 100.0)?;
        range("top_p", request.top_p, 0.0, 1.0)?;
        if request.messages.is_empty() {
            return Err(ServeError::param("messages", "messages must not be empty"));
        }
        if request.n.is_some_and(|n| n != 1) {
            return Err(ServeError::param(
                "n",
                "only one answer is given at a time: n must be 1",
            ));
        }
        if request.top_logprobs.is_some_and(|n| n != 0) {
            return Err(ServeError::param(
                "top_logprobs",
                "alternatives are not given: top_logprobs must be 0",
            ));
        }
        if request.limit().is_some_and(|n| n < 1) {
            return Err(ServeError::param(
                "max_tokens",
                "max_tokens must be at least 1",
            ));
        }
        if request.prior_token_ids.is_some() != request.prior_messages.is_some() {
            return Err(ServeError::param(
                "prior_messages",
                "prior_token_ids and prior_messages must be given together",
            ));
        }
        Ok(request)
    }

    /// Most tokens to generate.
    pub(crate) fn limit(&self) -> Option<i64> {
        self.max_completion_tokens.or(self.max_tokens)
    }

    /// The conversation in Drillyard's own type.
    pub(crate) fn take_messages(&mut self) -> Result<Vec<Message>, ServeError> {
        std::mem::take(&mut self.messages)
            .into_iter()
            .enumerate()
            .map(|(index, message)| message.message(index))
            .collect()
    }

    /// The tools in Drillyard's own type.
    pub(crate) fn take_tools(&mut self) -> Result<Vec<ToolSpec>, ServeError> {
        let tools = self.tools.take().unwrap_or_default();
        tools
            .into_iter()
            .enumerate()
            .map(|(index, tool)| {
                let function = &tool["function"];
                let name = function["name"].as_str().ok_or_else(|| {
                    ServeError::param("tools", format!("tools[{index}].function.name is missing"))
                })?;
                let parameters = match &function["parameters"] {
                    Value::Null => json!({"type": "object", "properties": {}}),
                    given => given.clone(),
                };
                Ok(ToolSpec {
                    name: name.to_owned(),
                    description: function["description"]
                        .as_str()
                        .unwrap_or_default()
                        .to_owned(),
                    parameters,
                })
            })
            .collect()
    }

    /// The texts that end the answer.
    pub(crate) fn take_stop(&mut self) -> Vec<String> {
        let texts = match self.stop.take() {
            None => Vec::new(),
            Some(StopTexts::One(text)) => vec![text],
            Some(StopTexts::Many(texts)) => texts,
        };
        texts.into_iter().filter(|text| !text.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_comes_as_text_or_in_parts() {
        let body = br#"{"model": "m", "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "t", "arguments": "{}"}}]}
        ], "tools": [{"type": "function", "function": {"name": "t"}}], "stop": "x", "unknown": 1}"#;
        let mut request = ChatRequest::parse(body).unwrap();
        let messages = request.take_messages().unwrap();
        assert_eq!(messages[0], Message::text(Role::System, "ab"));
        assert_eq!(
            (messages[1].content.as_deref(), messages[1].tool_calls.len()),
            (None, 1)
        );
        assert_eq!(request.take_tools().unwrap()[0].name, "t");
        assert_eq!(request.take_stop(), ["x"]);
    }

    #[test]
    fn errors_name_the_field() {
        for (body, field) in [
            (r#"{"messages": []}"#, "messages"),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "temperature": -1}"#,
                "temperature",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "top_p": 1.5}"#,
                "top_p",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "n": 2}"#,
                "n",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}"#,
                "max_tokens",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "prior_messages": 1}"#,
                "prior_messages",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}"#,
                "top_logprobs",
            ),
        ] {
            let error = ChatRequest::parse(body.as_bytes()).unwrap_err();
            assert_eq!(error.field(), Some(field), "{body}: {error}");
        }
        assert!(
            ChatRequest::parse(b"{")
                .unwrap_err()
                .to_string()
                .contains("can't be read")
        );
        for body in [
            r#"{"messages": [{"role": "wizard", "content": "a"}]}"#,
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#,
            r#"{"messages": [{"role": "user", "content": 7}]}"#,
        ] {
            let error = ChatRequest::parse(body.as_bytes())
                .unwrap()
                .take_messages()
                .unwrap_err();
            assert!(error.to_string().starts_with("messages[0]."), "{error}");
        }
    }
}
