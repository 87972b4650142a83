//! From a chat request to ids, and from generated ids to a chat message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use drillyard_render::{ChatTemplate, Tokenizer, continuation_ids, parse_turn, render_ids};
use drillyard_schema::{ParseStatus, ToolCall};
use serde_json::{Map, Value, json};

use crate::api::ChatRequest;
use crate::engine::{Engine, Finish, GenerateRequest, Generated, StopWhen};
use crate::{ServeError, server::Served};

/// A request, rendered and ready for the engine, and what its answer must look like.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) generate: GenerateRequest,
    pub(crate) shape: Shape,
}

/// What an answer must look like.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) parse: bool,
    pub(crate) token_ids: bool,
    pub(crate) logprobs: bool,
    pub(crate) include_usage: bool,
    pub(crate) stop: Vec<String>,
    pub(crate) prompt: Vec<i32>,
}

/// Renders a request.
pub(crate) fn prepare(served: &Served, mut request: ChatRequest) -> Result<Prepared, ServeError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (tokenizer, template) = (&served.tokenizer, &served.template);
    let messages = request.take_messages()?;
    let tools = request.take_tools()?;
    let prompt = match (request.prior_token_ids.take(), request.prior_messages) {
        (Some(mut prior), Some(n)) => {
            let vocab_size = served.vocab_size;
            if let Some(id) = prior
                .iter()
                .find(|id| !(0..vocab_size).contains(&i64::from(**id)))
            {
                return Err(ServeError::param(
                    "prior_token_ids",
                    format!("id {id} is outside the vocabulary of {vocab_size}"),
                ));
            }
            let rest = continuation_ids(tokenizer, template, &messages, &tools, n, &prior)?;
            prior.extend(rest);
            prior
        }
        _ => render_ids(tokenizer, template, &messages, &tools, true)?,
    };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH);
    let shape = Shape {
        id: format!("chatcmpl-{}", NEXT.fetch_add(1, Ordering::Relaxed)),
        created: seconds.map_or(0, |elapsed| elapsed.as_secs()),
        parse: request.parse_tool_calls.unwrap_or(!tools.is_empty()),
        token_ids: request.return_token_ids.unwrap_or(false),
        logprobs: request.logprobs.unwrap_or(false),
        include_usage: request
            .stream_options
            .as_ref()
            .is_some_and(|o| o.include_usage),
        stop: request.take_stop(),
        prompt: prompt.clone(),
    };
    let generate = GenerateRequest {
        prompt,
        max_tokens: request.limit().map_or(usize::MAX, |n| n as usize),
        temperature: request.temperature.unwrap_or(1.0),
        top_p: request.top_p.unwrap_or(1.0),
        seed: request.seed.map(|seed| seed as u64),
    };
    Ok(Prepared { generate, shape })
}

impl Shape {
    /// The condition that ends generation at a stop text, if there are stop texts.
    pub(crate) fn stop_when(&self, tokenizer: &Arc<Tokenizer>) -> Option<StopWhen> {
        if self.stop.is_empty() {
            return None;
        }
        let (stop, tokenizer) = (self.stop.clone(), Arc::clone(tokenizer));
        Some(Box::new(move |ids| {
            let (text, _) = tokenizer.pieces(ids);
            stop.iter().any(|end| text.contains(end.as_str()))
        }))
    }

    /// Generated ids as text: without the end-of-turn token, up to a stop text.
    fn text(&self, served: &Served, generated: &Generated) -> Result<String, ServeError> {
        let ids = match generated.ids.split_last() {
            Some((last, rest))
                if generated.finish == Finish::Stop && served.stop_ids.contains(last) =>
            {
                rest
            }
            _ => &generated.ids,
        };
        let mut text = served.tokenizer.decode(ids)?;
        if let Some(end) = self
            .stop
            .iter()
            .filter_map(|stop| text.find(stop.as_str()))
            .min()
        {
            text.truncate(end);
        }
        Ok(text)
    }

    /// A message in the API's form, and why it ended.
    pub(crate) fn message(
        &self,
        served: &Served,
        generated: &Generated,
    ) -> Result<Turn, ServeError> {
        let text = self.text(served, generated)?;
        let finish = match generated.finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
        };
        let parsed = self.parse.then(|| parse_turn(&text));
        let Some(parsed) =
            parsed.filter(|turn| matches!(turn.status, ParseStatus::Ok | ParseStatus::Repaired))
        else {
            return Ok(Turn {
                content: Some(text),
                reasoning: None,
                calls: Vec::new(),
                finish,
            });
        };
        let calls = parsed
            .calls
            .into_iter()
            .enumerate()
            .map(|(i, call)| ToolCall {
                id: format!("call_{}_{i}", self.id.trim_start_matches("chatcmpl-")),
                ..call
            })
            .collect();
        Ok(Turn {
            content: parsed.content,
            reasoning: parsed.reasoning,
            calls,
            finish: if finish == "stop" {
                "tool_calls"
            } else {
                finish
            },
        })
    }

    /// The response to a request that was not streamed.
    pub(crate) fn response(
        &self,
        served: &Served,
        generated: &Generated,
    ) -> Result<Value, ServeError> {
        let turn = self.message(served, generated)?;
        let mut message = Map::new();
        message.insert("role".into(), json!("assistant"));
        message.insert("content".into(), json!(turn.content));
        if let Some(reasoning) = turn.reasoning {
            message.insert("reasoning_content".into(), json!(reasoning));
        }
        if !turn.calls.is_empty() {
            message.insert("tool_calls".into(), json!(turn.calls));
        }
        let mut choice = Map::new();
        choice.insert("index".into(), json!(0));
        choice.insert("message".into(), message.into());
        choice.insert("finish_reason".into(), json!(turn.finish));
        choice.insert(
            "logprobs".into(),
            if self.logprobs {
                logprobs(&served.tokenizer, generated)
            } else {
                Value::Null
            },
        );
        if self.token_ids {
            choice.insert("token_ids".into(), json!(generated.ids));
        }
        let mut response = self.frame(served, "chat.completion", &generated.weights_hash);
        response.insert("choices".into(), json!([choice]));
        response.insert("usage".into(), self.usage(generated));
        if self.token_ids {
            response.insert("prompt_token_ids".into(), json!(self.prompt));
        }
        Ok(response.into())
    }

    /// What responses and chunks share.
    pub(crate) fn frame(
        &self,
        served: &Served,
        object: &str,
        weights_hash: &str,
    ) -> Map<String, Value> {
        let mut frame = Map::new();
        frame.insert("id".into(), json!(self.id));
        frame.insert("object".into(), json!(object));
        frame.insert("created".into(), json!(self.created));
        frame.insert("model".into(), json!(served.name));
        frame.insert("system_fingerprint".into(), json!(weights_hash));
        frame.insert(
            "drillyard".into(),
            json!({"tokenizer_hash": served.tokenizer.hash(), "template_hash": served.template.hash()}),
        );
        frame
    }

    pub(crate) fn usage(&self, generated: &Generated) -> Value {
        json!({
            "prompt_tokens": self.prompt.len(),
            "completion_tokens": generated.ids.len(),
            "total_tokens": self.prompt.len() + generated.ids.len(),
            "prompt_tokens_details": {"cached_tokens": generated.cached_tokens},
        })
    }
}

/// Each token's text and log-probability, in the API's form.
fn logprobs(tokenizer: &Tokenizer, generated: &Generated) -> Value {
    let (text, ends) = tokenizer.pieces(&generated.ids);
    let mut start = 0;
    let content: Vec<Value> = ends
        .into_iter()
        .zip(&generated.logprobs)
        .map(|(end, logprob)| {
            let token = &text[start..end];
            start = end;
            json!({"token": token, "logprob": logprob, "bytes": null, "top_logprobs": []})
        })
        .collect();
    json!({"content": content})
}

/// An answer as a message.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) content: Option<String>,
    pub(crate) reasoning: Option<String>,
    pub(crate) calls: Vec<ToolCall>,
    pub(crate) finish: &'static str,
}

/// What the server and the engine share of one model.
pub(crate) fn served(
    engine: Engine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    name: String,
    vocab_size: i64,
    stop_ids: Vec<i32>,
) -> Result<Served, ServeError> {
    // A model may have more rows than its tokenizer has tokens (padding for speed), not fewer.
    if tokenizer.vocab_size() as i64 > vocab_size {
        return Err(ServeError::Vocabulary {
            tokens: tokenizer.vocab_size(),
            vocab_size,
        });
    }
    Ok(Served {
        engine,
        tokenizer: Arc::new(tokenizer),
        template,
        name,
        vocab_size,
        stop_ids,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use drillyard_model::{Llama, LlamaConfig};
    use drillyard_render::{BaseTokenizerOptions, build_base_tokenizer};

    use super::*;
    use crate::EngineOptions;

    /// A served model that is never asked.
    pub(crate) fn served() -> Served {
        let files = build_base_tokenizer(&BaseTokenizerOptions {
            syllables: &["ka".to_owned()],
            texts: &[],
            vocab_size: 270,
            min_share: 0.0,
            max_len: 64,
        })
        .unwrap();
        let config = json!({
            "vocab_size": 270, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
            "max_position_embeddings": 64,
        });
        let config = LlamaConfig::from_json(&config).unwrap();
        let model = Llama::init(config, 0, tch::Device::Cpu).unwrap();
        let engine = Engine::start(&model, &[], EngineOptions::default()).unwrap();
        let tokenizer = files.load().unwrap();
        let end = tokenizer.id("<|end|>").unwrap();
        super::served(
            engine,
            tokenizer,
            ChatTemplate::base().unwrap(),
            "m".into(),
            270,
            vec![end],
        )
        .unwrap()
    }

    pub(crate) fn shape(parse: bool, stop: &[&str]) -> Shape {
        Shape {
            id: "chatcmpl-9".into(),
            created: 0,
            parse,
            token_ids: true,
            logprobs: true,
            include_usage: false,
            stop: stop.iter().map(|s| (*s).to_owned()).collect(),
            prompt: vec![1, 2],
        }
    }

    /// An answer of the tokens of `text`; the end-of-turn token, where it ends with one, ended it.
    pub(crate) fn generated(served: &Served, text: &str) -> Generated {
        let ids = served.tokenizer.encode(text).unwrap();
        Generated {
            logprobs: vec![-0.5; ids.len()],
            ids,
            finish: Finish::Stop,
            cached_tokens: 0,
            weights_hash: "w".into(),
        }
    }

    #[tokio::test]
    async fn ordinary_clients_get_calls_ours_the_raw_text() {
        let served = served();
        let call = "<tool_call>{\"name\":\"t\",\"arguments\":{\"x\":1}}</tool_call>";
        let answer = generated(&served, &format!("Now. {call}<|end|>"));
        let parsed = shape(true, &[]).response(&served, &answer).unwrap();
        let choice = &parsed["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!(choice["message"]["content"], "Now.");
        let calls = json!([{"id": "call_9_0", "type": "function", "function": {"name": "t", "arguments": "{\"x\":1}"}}]);
        assert_eq!(choice["message"]["tool_calls"], calls);
        let raw = shape(false, &[]).response(&served, &answer).unwrap();
        let choice = &raw["choices"][0];
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["message"]["content"], format!("Now. {call}"));
        assert!(choice["message"].get("tool_calls").is_none());
        assert_eq!(
            choice["token_ids"].as_array().unwrap().len(),
            answer.ids.len()
        );
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let text: String = tokens
            .iter()
            .map(|t| t["token"].as_str().unwrap())
            .collect();
        assert_eq!(text, format!("Now. {call}<|end|>"));
        assert_eq!(raw["prompt_token_ids"], json!([1, 2]));
    }

    #[tokio::test]
    async fn a_call_that_cannot_be_read_stays_text() {
        let served = served();
        let answer = generated(&served, "<tool_call>ls<|end|>");
        let response = shape(true, &[]).response(&served, &answer).unwrap();
        assert_eq!(
            response["choices"][0]["message"]["content"],
            "<tool_call>ls"
        );
        assert_eq!(response["choices"][0]["finish_reason"], "stop");
    }
}
