//! Answers piece by piece: text as it comes, calls whole at the end.

use std::convert::Infallible;
use std::sync::Arc;

use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, StreamExt};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use crate::ServeError;
use crate::chat::{Prepared, Shape};
use crate::engine::Generated;
use crate::server::{Served, error_body};

/// Where calls begin; text from there on is not sent.
const CALL: &str = "<tool_call>";

struct State {
    served: Arc<Served>,
    shape: Shape,
    tokens: mpsc::UnboundedReceiver<(i32, f32)>,
    done: Option<oneshot::Receiver<Result<Generated, ServeError>>>,
    ids: Vec<i32>,
    sent: usize,
}

/// Starts generating and answers with server-sent events.
pub(crate) fn respond(served: Arc<Served>, prepared: Prepared) -> Result<Response, ServeError> {
    let (sender, tokens) = mpsc::unbounded_channel();
    let stop_when = prepared.shape.stop_when(&served.tokenizer);
    let done = served
        .engine
        .submit(prepared.generate, stop_when, Some(sender))?;
    let state = State {
        shape: prepared.shape,
        tokens,
        done: Some(done),
        ids: Vec::new(),
        sent: 0,
        served,
    };
    let first = state.chunk(&json!({"role": "assistant", "content": ""}), None);
    let rest = stream::unfold(state, |mut state| async move {
        let events = state.next().await?;
        Some((stream::iter(events), state))
    });
    let events = stream::once(async move { first }).chain(rest.flatten());
    Ok(
        Sse::new(events.map(|data| Ok::<_, Infallible>(Event::default().data(data))))
            .into_response(),
    )
}

impl State {
    /// The next events; none after the last.
    async fn next(&mut self) -> Option<Vec<String>> {
        self.done.as_ref()?;
        if let Some((id, _)) = self.tokens.recv().await {
            self.ids.push(id);
            // More may have come meanwhile.
            while let Ok((id, _)) = self.tokens.try_recv() {
                self.ids.push(id);
            }
            let text = self.new_text();
            return Some(if text.is_empty() {
                Vec::new()
            } else {
                vec![self.chunk(&json!({"content": text}), None)]
            });
        }
        let generated = match self.done.take()?.await {
            Ok(Ok(generated)) => generated,
            Ok(Err(error)) => return Some(vec![error_body(&error).to_string()]),
            Err(_) => return Some(vec![error_body(&ServeError::Stopped).to_string()]),
        };
        Some(match self.last(&generated) {
            Ok(events) => events,
            Err(error) => vec![error_body(&error).to_string()],
        })
    }

    /// Text that can be sent: no half characters, nothing that is or may become the start of a call, an end-of-turn token or a stop text.
    fn new_text(&mut self) -> String {
        let ids = match self.ids.split_last() {
            Some((last, rest)) if self.served.stop_ids.contains(last) => rest,
            _ => &self.ids[..],
        };
        let (text, _) = self.served.tokenizer.pieces(ids);
        let mut end = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        let call = self.shape.parse.then_some(CALL);
        for mark in self.shape.stop.iter().map(String::as_str).chain(call) {
            let begins = text.find(mark).or_else(|| {
                let from = text.len().saturating_sub(mark.len() - 1);
                (from..text.len())
                    .find(|at| text.is_char_boundary(*at) && mark.starts_with(&text[*at..]))
            });
            end = end.min(begins.unwrap_or(end));
        }
        if end <= self.sent {
            return String::new();
        }
        let fresh = text[self.sent..end].to_owned();
        self.sent = end;
        fresh
    }

    fn last(&mut self, generated: &Generated) -> Result<Vec<String>, ServeError> {
        let turn = self.shape.message(&self.served, generated)?;
        let mut events = Vec::new();
        // What was held back and turned out to be text.
        if turn.calls.is_empty()
            && let Some(rest) = turn
                .content
                .as_deref()
                .and_then(|text| text.get(self.sent..))
            && !rest.is_empty()
        {
            events.push(self.chunk(&json!({"content": rest}), None));
        }
        if !turn.calls.is_empty() {
            let calls: Vec<Value> = turn
                .calls
                .iter()
                .enumerate()
                .map(|(index, call)| json!({"index": index, "id": call.id, "type": call.kind, "function": call.function}))
                .collect();
            events.push(self.chunk(&json!({"tool_calls": calls}), None));
        }
        events.push(self.chunk(&json!({}), Some((turn.finish, generated))));
        if self.shape.include_usage {
            let mut chunk = self.shape.frame(
                &self.served,
                "chat.completion.chunk",
                &generated.weights_hash,
            );
            chunk.insert("choices".into(), json!([]));
            chunk.insert("usage".into(), self.shape.usage(generated));
            events.push(Value::Object(chunk).to_string());
        }
        events.push("[DONE]".to_owned());
        Ok(events)
    }

    fn chunk(&self, delta: &Value, end: Option<(&str, &Generated)>) -> String {
        let hash = end.map_or_else(
            || self.served.engine.weights_hash(),
            |(_, g)| Arc::clone(&g.weights_hash),
        );
        let mut chunk = self
            .shape
            .frame(&self.served, "chat.completion.chunk", &hash);
        let mut choice =
            json!({"index": 0, "delta": delta, "finish_reason": end.map(|(finish, _)| finish)});
        if let (Some((_, generated)), true) = (end, self.shape.token_ids) {
            choice["token_ids"] = json!(generated.ids);
            chunk.insert("prompt_token_ids".into(), json!(self.shape.prompt));
        }
        chunk.insert("choices".into(), json!([choice]));
        Value::Object(chunk).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::tests::{generated, served, shape};

    /// The events of an answer whose tokens come one by one.
    async fn events(text: &str, parse: bool, stop: &[&str]) -> Vec<Value> {
        let served = Arc::new(served());
        let answer = generated(&served, text);
        let (sender, tokens) = mpsc::unbounded_channel();
        let (done, receiver) = oneshot::channel();
        let mut state = State {
            shape: shape(parse, stop),
            tokens,
            done: Some(receiver),
            ids: Vec::new(),
            sent: 0,
            served,
        };
        let mut events = Vec::new();
        for id in &answer.ids {
            sender.send((*id, 0.0)).unwrap();
            events.extend(state.next().await.unwrap());
        }
        drop(sender);
        done.send(Ok(answer)).unwrap();
        events.extend(state.next().await.unwrap());
        assert!(state.next().await.is_none());
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        events
            .iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }

    fn content(events: &[Value]) -> String {
        let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
        deltas
            .filter_map(|delta| delta["content"].as_str())
            .collect()
    }

    #[tokio::test]
    async fn calls_are_sent_whole_and_never_as_text() {
        let text =
            "Now <b> ☃ <tool_call>{\"name\":\"t\",\"arguments\":{\"x\":1}}</tool_call><|end|>";
        let events = events(text, true, &[]).await;
        assert_eq!(content(&events), "Now <b> ☃ ");
        let calls: Vec<&Value> = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"].get("tool_calls"))
            .collect();
        assert_eq!(calls.len(), 1);
        assert_eq!(
            calls[0][0]["function"],
            json!({"name": "t", "arguments": "{\"x\":1}"})
        );
        assert_eq!(
            events.last().unwrap()["choices"][0]["finish_reason"],
            "tool_calls"
        );
    }

    #[tokio::test]
    async fn text_held_back_is_sent_in_the_end() {
        assert_eq!(content(&events("a <tool", true, &[]).await), "a <tool");
        assert_eq!(
            content(&events("a <tool_call>oops", true, &[]).await),
            "a <tool_call>oops"
        );
        assert_eq!(
            content(&events("one STOP two", false, &["STOP"]).await),
            "one "
        );
        assert_eq!(
            content(&events("one STO", false, &["STOP"]).await),
            "one STO"
        );
    }
}
