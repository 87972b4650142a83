//! The OpenAI chat API over HTTP, with the extras that keep token ids exact where the server offers them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use drillyard_schema::{Message, Role, ToolCall};
use futures::future::BoxFuture;
use reqwest::{Client, Response, StatusCode, header::RETRY_AFTER};
use serde_json::{Map, Value, json};

use super::{PolicyClient, PolicyError, Sampling, ToolProtocol, TurnReply, TurnRequest};

/// A reply larger than this is refused: no model turn needs it.
const MAX_REPLY_BYTES: usize = 32 << 20;
/// Error bodies are shortened to this before they are shown.
const MAX_ERROR_CHARS: usize = 300;

/// How failed requests are repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retries {
    /// Repetitions after the first try.
    pub times: usize,
    /// The first wait; it doubles each time, with jitter.
    pub first_wait: Duration,
    /// No wait is longer, not even one that `Retry-After` asks for.
    pub longest_wait: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            times: 5,
            first_wait: Duration::from_millis(250),
            longest_wait: Duration::from_mins(1),
        }
    }
}

/// Where an endpoint is and what it can do.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenAiConfig {
    /// Up to and including `/v1`.
    pub base_url: String,
    /// The model's name at the endpoint.
    pub model: String,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// How tools reach the model.
    pub protocol: ToolProtocol,
    /// Ask for token ids and log-probabilities (Drillyard's server, vLLM).
    pub token_ids: bool,
    /// The server is Drillyard's own: it takes prior token ids and leaves the text unparsed.
    pub drillyard: bool,
    /// The hash of the weights that must answer; a reply of other weights is an error.
    pub weights_hash: Option<String>,
    /// How long one request may take.
    pub timeout: Duration,
    /// How failed requests are repeated.
    pub retries: Retries,
}

impl OpenAiConfig {
    /// An endpoint of which nothing but the chat API is known.
    pub fn plain(
        base_url: impl Into<String>,
        model: impl Into<String>,
        protocol: ToolProtocol,
    ) -> Self {
        Self {
            base_url: base_url.into(),
            model: model.into(),
            api_key: None,
            protocol,
            token_ids: false,
            drillyard: false,
            weights_hash: None,
            timeout: Duration::from_mins(5),
            retries: Retries::default(),
        }
    }

    /// Drillyard's own server, listening at `address` (`127.0.0.1:PORT`).
    pub fn drillyard(
        address: &str,
        model: impl Into<String>,
        weights_hash: impl Into<String>,
    ) -> Self {
        Self {
            token_ids: true,
            drillyard: true,
            weights_hash: Some(weights_hash.into()),
            ..Self::plain(
                format!("http://{address}/v1"),
                model,
                ToolProtocol::Template,
            )
        }
    }
}

/// A client of one endpoint; connections are pooled.
#[derive(Debug)]
pub struct OpenAiClient {
    config: OpenAiConfig,
    http: Client,
    url: String,
}

impl OpenAiClient {
    /// A client; nothing is sent yet.
    ///
    /// # Errors
    /// An address that is neither `http://…` nor `https://…`.
    pub fn new(config: OpenAiConfig) -> Result<Self, PolicyError> {
        let base = config.base_url.trim_end_matches('/');
        let Some(host) = base
            .strip_prefix("http://")
            .or_else(|| base.strip_prefix("https://"))
        else {
            return Err(PolicyError::Config(format!(
                "policy.base_url '{base}' must begin with http:// or https://, such as http://127.0.0.1:8000/v1"
            )));
        };
        let mut http = Client::builder()
            .connect_timeout(Duration::from_secs(10))
            .redirect(reqwest::redirect::Policy::none());
        if ["127.", "localhost", "[::1]"]
            .iter()
            .any(|local| host.starts_with(local))
        {
            http = http.no_proxy();
        }
        let http = http
            .build()
            .map_err(|e| PolicyError::Config(format!("http client: {e}")))?;
        let url = base.to_owned();
        Ok(Self { config, http, url })
    }

    fn body(&self, request: TurnRequest<'_>) -> Value {
        let Sampling {
            temperature,
            top_p,
            max_tokens,
        } = request.sampling;
        let config = &self.config;
        let mut body = Map::new();
        body.insert("model".to_owned(), config.model.clone().into());
        body.insert(
            "messages".to_owned(),
            wire_messages(request.messages, config.protocol),
        );
        body.insert("temperature".to_owned(), temperature.into());
        if top_p < 1.0 {
            body.insert("top_p".to_owned(), top_p.into());
        }
        body.insert("max_tokens".to_owned(), max_tokens.into());
        // JSON numbers are doubles for many servers: 53 bits survive.
        body.insert("seed".to_owned(), (request.seed >> 11).into());
        if config.protocol != ToolProtocol::Text && !request.tools.is_empty() {
            let tools: Vec<Value> = request
                .tools
                .iter()
                .map(drillyard_schema::ToolSpec::to_openai)
                .collect();
            body.insert("tools".to_owned(), tools.into());
        }
        if config.token_ids {
            body.insert("return_token_ids".to_owned(), true.into());
            body.insert("logprobs".to_owned(), true.into());
        }
        if config.drillyard {
            body.insert("parse_tool_calls".to_owned(), false.into());
            if let Some(prior) = request.prior {
                body.insert("prior_token_ids".to_owned(), prior.token_ids.into());
                body.insert("prior_messages".to_owned(), prior.messages.into());
            }
        }
        Value::Object(body)
    }

    async fn once(&self, body: &Value) -> Result<TurnReply, PolicyError> {
        let url = format!("{}/chat/completions", self.url);
        let mut request = self.http.post(&url).timeout(self.config.timeout).json(body);
        if let Some(key) = &self.config.api_key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(|e| self.failure(&url, &e))?;
        let bytes = self.checked_body(&url, response).await?;
        let reply: Value = serde_json::from_slice(&bytes).map_err(|e| PolicyError::Garbled {
            url: url.clone(),
            reason: format!("not JSON: {e}"),
        })?;
        let reply = read_reply(&reply).map_err(|reason| PolicyError::Garbled {
            url: url.clone(),
            reason,
        })?;
        if let (Some(expected), Some(found)) = (&self.config.weights_hash, &reply.weights_hash)
            && expected != found
        {
            return Err(PolicyError::OtherWeights {
                url,
                expected: expected.clone(),
                found: found.clone(),
            });
        }
        Ok(reply)
    }

    /// The body of a successful response, or the error that the response is.
    async fn checked_body(
        &self,
        url: &str,
        mut response: Response,
    ) -> Result<Vec<u8>, PolicyError> {
        let status = response.status();
        let retry_after = response
            .headers()
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| text.trim().parse::<f64>().ok())
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let mut bytes = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
                Ok(None) => break,
                // An error's text is welcome, not needed.
                Err(_) if !status.is_success() => break,
                Err(e) => return Err(self.failure(url, &e)),
            }
            if bytes.len() > MAX_REPLY_BYTES {
                return Err(PolicyError::Garbled {
                    url: url.to_owned(),
                    reason: format!("more than {} MiB", MAX_REPLY_BYTES >> 20),
                });
            }
        }
        if status.is_success() {
            return Ok(bytes);
        }
        let message = error_message(&bytes);
        if is_context_full(status, &message) {
            return Err(PolicyError::ContextFull { message });
        }
        Err(PolicyError::Status {
            url: url.to_owned(),
            status: status.as_u16(),
            message,
            retry_after,
        })
    }

    fn failure(&self, url: &str, error: &reqwest::Error) -> PolicyError {
        let url = url.to_owned();
        if error.is_timeout() && !error.is_connect() {
            return PolicyError::Slow {
                url,
                after: self.config.timeout,
            };
        }
        let reason = root_cause(error);
        if error.is_connect() {
            PolicyError::Connect { url, reason }
        } else {
            PolicyError::Garbled {
                url,
                reason: format!("the connection broke: {reason}"),
            }
        }
    }

    async fn turn_with_retries(&self, request: TurnRequest<'_>) -> Result<TurnReply, PolicyError> {
        let body = self.body(request);
        let retries = &self.config.retries;
        let tried = AtomicU32::new(0);
        let backoff = ExponentialBuilder::default()
            .with_min_delay(retries.first_wait)
            .with_max_delay(retries.longest_wait)
            .with_max_times(retries.times)
            .with_jitter();
        let reply = (|| {
            tried.fetch_add(1, Ordering::Relaxed);
            self.once(&body)
        })
        .retry(backoff)
        .when(PolicyError::is_transient)
        .adjust(|error, wait| {
            let asked = match error {
                PolicyError::Status { retry_after, .. } => *retry_after,
                _ => None,
            };
            wait.map(|wait| asked.map_or(wait, |asked| asked.min(retries.longest_wait)))
        })
        .notify(|error, wait| tracing::debug!(%error, ?wait, "model request failed, trying again"))
        .await;
        reply.map(|mut reply| {
            reply.retries = tried.load(Ordering::Relaxed).saturating_sub(1);
            reply
        })
    }

    async fn probe_now(&self) -> Result<(), PolicyError> {
        let url = format!("{}/models", self.url);
        let ask = || async {
            let mut request = self
                .http
                .get(&url)
                .timeout(self.config.timeout.min(Duration::from_secs(30)));
            if let Some(key) = &self.config.api_key {
                request = request.bearer_auth(key);
            }
            let response = request.send().await.map_err(|e| self.failure(&url, &e))?;
            match self.checked_body(&url, response).await {
                // Not every server lists its models; what counts is that one answers and lets us in.
                Err(PolicyError::Status { status, .. }) if !matches!(status, 401 | 403) => Ok(()),
                Err(error) => Err(error),
                Ok(_) => Ok(()),
            }
        };
        let backoff = ExponentialBuilder::default()
            .with_min_delay(self.config.retries.first_wait)
            .with_max_times(self.config.retries.times.min(3));
        // One that takes the connection and says nothing will not say more when asked again.
        ask.retry(backoff)
            .when(|error| error.is_transient() && !matches!(error, PolicyError::Slow { .. }))
            .await
    }
}

impl PolicyClient for OpenAiClient {
    fn protocol(&self) -> ToolProtocol {
        self.config.protocol
    }

    fn turn<'a>(
        &'a self,
        request: TurnRequest<'a>,
    ) -> BoxFuture<'a, Result<TurnReply, PolicyError>> {
        Box::pin(self.turn_with_retries(request))
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), PolicyError>> {
        Box::pin(self.probe_now())
    }

    fn logprobs_of(&self, sampling: Sampling) -> &'static str {
        // Drillyard's server reports the tempered distribution it draws from; others report the model's own.
        let same = (sampling.temperature - 1.0).abs() < 1e-9 && sampling.top_p >= 1.0;
        if self.config.drillyard || same {
            "sampling"
        } else {
            "model"
        }
    }
}

/// The conversation in the API's shape.
fn wire_messages(messages: &[Message], protocol: ToolProtocol) -> Value {
    let mut wire: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        if protocol == ToolProtocol::Text && message.role == Role::Tool {
            let name = message.name.as_deref().unwrap_or("tool");
            let content = message.content.as_deref().unwrap_or_default();
            push_user(&mut wire, &format!("[result of {name}]\n{content}"));
        } else if protocol == ToolProtocol::Text && message.role == Role::User {
            push_user(&mut wire, message.content.as_deref().unwrap_or_default());
        } else {
            wire.push(serde_json::to_value(message).unwrap_or_default());
        }
    }
    Value::Array(wire)
}

/// Adds a user message, or appends to the last one: many templates insist on turns that alternate.
fn push_user(wire: &mut Vec<Value>, text: &str) {
    if let Some(last) = wire.last_mut()
        && last["role"] == "user"
        && let Some(content) = last["content"].as_str()
    {
        last["content"] = format!("{content}\n\n{text}").into();
        return;
    }
    wire.push(json!({ "role": "user", "content": text }));
}

fn read_reply(reply: &Value) -> Result<TurnReply, String> {
    let choice = reply
        .get("choices")
        .and_then(|choices| choices.get(0))
        .ok_or("no choices")?;
    let message = choice.get("message").ok_or("a choice without a message")?;
    let content = read_content(message.get("content").unwrap_or(&Value::Null));
    let calls = read_calls(message.get("tool_calls"))?;
    let string = |value: Option<&Value>| {
        value
            .and_then(Value::as_str)
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
    };
    let mut notes = Vec::new();
    let prompt_token_ids = read_ids(
        reply
            .get("prompt_token_ids")
            .or_else(|| choice.get("prompt_token_ids")),
    );
    let token_ids = read_ids(choice.get("token_ids"));
    let mut logprobs = read_logprobs(choice);
    if !logprobs.is_empty() && logprobs.len() != token_ids.len() {
        if !token_ids.is_empty() {
            notes.push(format!(
                "{} log-probabilities for {} tokens: left out",
                logprobs.len(),
                token_ids.len()
            ));
        }
        logprobs.clear();
    }
    if logprobs
        .iter()
        .any(|value| !value.is_finite() || *value > 1e-3)
    {
        notes.push("log-probabilities above 0 or not finite: left out".to_owned());
        logprobs.clear();
    }
    let usage = |name: &str| {
        reply
            .get("usage")
            .and_then(|usage| usage.get(name))
            .and_then(Value::as_i64)
            .map(|n| n as i32)
    };
    let prompt_tokens = usage("prompt_tokens")
        .or_else(|| (!prompt_token_ids.is_empty()).then_some(prompt_token_ids.len() as i32));
    let generated_tokens = usage("completion_tokens")
        .or_else(|| (!token_ids.is_empty()).then_some(token_ids.len() as i32));
    let own = reply.get("drillyard");
    let rebuilt = !calls.is_empty();
    Ok(TurnReply {
        text: whole_text(content.as_deref(), &calls),
        rebuilt,
        content: if rebuilt { content } else { None },
        calls,
        reasoning: string(message.get("reasoning_content"))
            .or_else(|| string(message.get("reasoning"))),
        finish_reason: string(choice.get("finish_reason")),
        prompt_token_ids,
        token_ids,
        logprobs,
        prompt_tokens,
        generated_tokens,
        model: string(reply.get("model")),
        weights_hash: own.and_then(|_| string(reply.get("system_fingerprint"))),
        tokenizer_hash: string(own.and_then(|own| own.get("tokenizer_hash"))),
        template_hash: string(own.and_then(|own| own.get("template_hash"))),
        retries: 0,
        notes,
    })
}

/// Content as text; some servers send it in parts.
fn read_content(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => Some(
            parts
                .iter()
                .filter_map(|part| part.get("text").and_then(Value::as_str))
                .collect(),
        ),
        _ => None,
    }
}

fn read_calls(calls: Option<&Value>) -> Result<Vec<ToolCall>, String> {
    let Some(Value::Array(calls)) = calls else {
        return Ok(Vec::new());
    };
    calls
        .iter()
        .enumerate()
        .map(|(index, call)| {
            let function = call
                .get("function")
                .ok_or("a tool call without a function")?;
            let name = function
                .get("name")
                .and_then(Value::as_str)
                .ok_or("a tool call without a name")?;
            let arguments = match function.get("arguments") {
                Some(Value::String(text)) => text.clone(),
                None | Some(Value::Null) => "{}".to_owned(),
                Some(other) => other.to_string(),
            };
            let id = call.get("id").and_then(Value::as_str).unwrap_or_default();
            let id = if id.is_empty() {
                format!("call_{index}")
            } else {
                id.to_owned()
            };
            Ok(ToolCall::new(id, name, arguments))
        })
        .collect()
}

fn read_ids(ids: Option<&Value>) -> Vec<i32> {
    let Some(Value::Array(ids)) = ids else {
        return Vec::new();
    };
    let read: Option<Vec<i32>> = ids
        .iter()
        .map(|id| id.as_i64().and_then(|id| i32::try_from(id).ok()))
        .collect();
    read.unwrap_or_default()
}

fn read_logprobs(choice: &Value) -> Vec<f32> {
    let Some(Value::Array(content)) = choice.get("logprobs").and_then(|l| l.get("content")) else {
        return Vec::new();
    };
    let read: Option<Vec<f32>> = content
        .iter()
        .map(|entry| {
            entry
                .get("logprob")
                .and_then(Value::as_f64)
                .map(|p| p as f32)
        })
        .collect();
    read.unwrap_or_default()
}

/// What the model must have written for the server to parse these calls.
fn whole_text(content: Option<&str>, calls: &[ToolCall]) -> String {
    let mut text = content.unwrap_or_default().to_owned();
    for call in calls {
        let name = Value::String(call.function.name.clone());
        let arguments = call.function.arguments.trim();
        let arguments = if arguments.is_empty() {
            "{}"
        } else {
            arguments
        };
        let _ = write!(
            text,
            "<tool_call>{{\"name\":{name},\"arguments\":{arguments}}}</tool_call>"
        );
    }
    text
}

fn error_message(bytes: &[u8]) -> String {
    let text = match serde_json::from_slice::<Value>(bytes) {
        Ok(value) => {
            let inner = value
                .pointer("/error/message")
                .or_else(|| value.get("message"))
                .or_else(|| value.get("detail"))
                .or_else(|| value.get("error"));
            match inner {
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
                None => value.to_string(),
            }
        }
        Err(_) => String::from_utf8_lossy(bytes).into_owned(),
    };
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_ERROR_CHARS)
        .collect();
    let clean = clean.trim();
    if clean.is_empty() {
        "no message".to_owned()
    } else {
        clean.to_owned()
    }
}

/// Endpoints have no common code for a full context; these are the words the common ones use.
fn is_context_full(status: StatusCode, message: &str) -> bool {
    let message = message.to_lowercase();
    matches!(status.as_u16(), 400 | 413 | 422)
        && [
            "context_length_exceeded",
            "context length",
            "context window",
            "maximum context",
            "context size",
        ]
        .iter()
        .any(|words| message.contains(words))
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_schemes_are_refused_with_a_way_out() {
        let config = OpenAiConfig::plain("host:80/v1", "m", ToolProtocol::Native);
        let error = OpenAiClient::new(config).unwrap_err();
        assert!(
            error.to_string().contains("must begin with http://"),
            "{error}"
        );
    }

    #[test]
    fn text_protocol_sends_results_as_user_messages_that_alternate() {
        let messages = [
            Message::text(Role::System, "s"),
            Message::text(Role::User, "u"),
            Message::text(Role::Assistant, "a"),
            Message::tool("c1", "list_dir", "x"),
            Message::tool("c2", "read_file", "y"),
        ];
        let wire = wire_messages(&messages, ToolProtocol::Text);
        let roles: Vec<&str> = wire
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["role"].as_str().unwrap())
            .collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert_eq!(
            wire[3]["content"],
            "[result of list_dir]\nx\n\n[result of read_file]\ny"
        );
    }

    #[test]
    fn token_ids_and_logprobs_are_read_where_they_agree() {
        let reply = json!({
            "prompt_token_ids": [1, 2, 3],
            "choices": [{ "message": { "content": "hi" }, "token_ids": [4, 5],
                "logprobs": { "content": [{ "logprob": -0.5 }, { "logprob": -1.5 }] }, "finish_reason": "stop" }],
            "usage": { "prompt_tokens": 3, "completion_tokens": 2 },
            "model": "m", "system_fingerprint": "w", "drillyard": { "tokenizer_hash": "t", "template_hash": "h" },
        });
        let read = read_reply(&reply).unwrap();
        assert_eq!(read.prompt_token_ids, [1, 2, 3]);
        assert_eq!(read.token_ids, [4, 5]);
        assert_eq!(read.logprobs, [-0.5, -1.5]);
        assert_eq!(read.weights_hash.as_deref(), Some("w"));
        assert_eq!(read.tokenizer_hash.as_deref(), Some("t"));
        let short = json!({
            "choices": [{ "message": { "content": "hi" }, "token_ids": [4, 5],
                "logprobs": { "content": [{ "logprob": -0.5 }] } }],
        });
        let read = read_reply(&short).unwrap();
        assert!(read.logprobs.is_empty());
        assert_eq!(read.notes.len(), 1);
    }

    #[test]
    fn native_calls_are_put_together_again_as_text() {
        let reply = json!({ "choices": [{ "message": { "content": null, "tool_calls": [
            { "id": "x", "function": { "name": "list_dir", "arguments": "{\"path\":\".\"}" } } ] } }] });
        let read = read_reply(&reply).unwrap();
        assert!(read.rebuilt);
        assert_eq!(
            read.text,
            "<tool_call>{\"name\":\"list_dir\",\"arguments\":{\"path\":\".\"}}</tool_call>"
        );
    }

    #[test]
    fn a_full_context_is_told_from_other_bad_requests() {
        assert!(is_context_full(
            StatusCode::BAD_REQUEST,
            "This model's maximum context length is 4096 tokens"
        ));
        assert!(!is_context_full(StatusCode::BAD_REQUEST, "bad schema"));
    }

    #[test]
    fn error_bodies_are_shortened_and_cleaned() {
        assert_eq!(
            error_message(b"{\"error\":{\"message\":\"no\\u0000pe\"}}"),
            "no pe"
        );
        assert_eq!(error_message(b""), "no message");
        assert!(error_message("x".repeat(5000).as_bytes()).len() <= MAX_ERROR_CHARS);
    }
}
