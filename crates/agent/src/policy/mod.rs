//! Who answers: the one trait behind which endpoints, scripts and recordings look alike.

mod expert;
mod openai;
mod replay;

use std::sync::Arc;
use std::time::Duration;

use drillyard_schema::{Message, Task, ToolCall, ToolSpec};
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};

pub use expert::ExpertClient;
pub use openai::{OpenAiClient, OpenAiConfig, Retries};
pub use replay::{Recording, ReplayClient, ReplayTurn};

/// How tools reach the model and calls come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolProtocol {
    /// The chat template renders the `tools` list, the reply is raw text that Drillyard parses: its own server, and servers asked
    /// not to parse. Token ids stay exact.
    Template,
    /// The API's own tool calls: `tools` goes out, `tool_calls` comes back.
    Native,
    /// The server knows nothing of tools: the system prompt describes them, the reply is raw text, results go out as user messages.
    Text,
}

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Nucleus mass; 1 keeps the whole distribution.
    pub top_p: f64,
    /// Tokens generated per turn at most.
    pub max_tokens: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            max_tokens: 512,
        }
    }
}

/// The ids of exactly what was sent and sampled for the first messages of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prior<'a> {
    /// Context and generation of the step before.
    pub token_ids: &'a [i32],
    /// How many messages they cover.
    pub messages: usize,
}

/// One model turn that is asked for.
#[derive(Debug, Clone, Copy)]
pub struct TurnRequest<'a> {
    /// The task, for policies that are scripts.
    pub task: &'a Task,
    /// Which sample of the group.
    pub sample_index: u32,
    /// Seed of the whole episode, for policies that are scripts.
    pub episode_seed: u64,
    /// From 0.
    pub step: u32,
    /// The conversation so far.
    pub messages: &'a [Message],
    /// The tools on offer.
    pub tools: &'a [ToolSpec],
    /// What the first messages are in token ids, where that is known.
    pub prior: Option<Prior<'a>>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Seed of this turn.
    pub seed: u64,
}

/// One model turn as it came back.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TurnReply {
    /// The text as generated; where the server parsed calls out of it, put together again from content and calls.
    pub text: String,
    /// The text is put together again, not as generated.
    pub rebuilt: bool,
    /// The content beside the calls, where the server parsed calls.
    pub content: Option<String>,
    /// The calls the server parsed; empty where parsing is ours.
    pub calls: Vec<ToolCall>,
    /// Reasoning kept apart.
    pub reasoning: Option<String>,
    /// `stop`, `length`, `tool_calls`, or the server's own.
    pub finish_reason: Option<String>,
    /// The whole context in token ids; empty where unknown.
    pub prompt_token_ids: Vec<i32>,
    /// The generated ids, end of turn included when sampled; empty where unknown.
    pub token_ids: Vec<i32>,
    /// Log-probabilities (nats) of the generated ids under the distribution they were drawn from; empty where unknown.
    pub logprobs: Vec<f32>,
    /// Context tokens, as the server counts them.
    pub prompt_tokens: Option<i32>,
    /// Generated tokens, as the server counts them.
    pub generated_tokens: Option<i32>,
    /// The model's name as the server gives it.
    pub model: Option<String>,
    /// Hash of the weights, where the server gives one.
    pub weights_hash: Option<String>,
    /// Hash of the tokenizer, where the server gives one.
    pub tokenizer_hash: Option<String>,
    /// Hash of the chat template, where the server gives one.
    pub template_hash: Option<String>,
    /// How often the request was repeated before it succeeded.
    pub retries: u32,
    /// What was odd about the reply.
    pub notes: Vec<String>,
}

impl TurnReply {
    /// A reply of plain text, as scripts give it.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            finish_reason: Some("stop".to_owned()),
            ..Self::default()
        }
    }

    /// True when `max_tokens` cut the reply.
    pub fn is_cut(&self) -> bool {
        self.finish_reason.as_deref() == Some("length")
    }
}

/// Why there is no turn.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// Nobody listens.
    #[error(
        "no connection to {url}: {reason}; is the server running, and is policy.base_url right?"
    )]
    Connect {
        /// Where.
        url: String,
        /// What the network said.
        reason: String,
    },
    /// The endpoint refused or failed.
    #[error("{url} answered {status}: {message}")]
    Status {
        /// Where.
        url: String,
        /// The HTTP status.
        status: u16,
        /// What the endpoint said, shortened.
        message: String,
        /// How long it asked to wait.
        retry_after: Option<Duration>,
    },
    /// The reply did not come in time.
    #[error("{url} gave no whole reply within {} s", after.as_secs())]
    Slow {
        /// Where.
        url: String,
        /// How long was waited.
        after: Duration,
    },
    /// The reply broke off, or is not what the chat API promises.
    #[error("{url} gave an unusable reply: {reason}")]
    Garbled {
        /// Where.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The conversation no longer fits the model's context window.
    #[error("the context window is full: {message}")]
    ContextFull {
        /// What the endpoint said.
        message: String,
    },
    /// The endpoint serves other weights than the episodes are filed under.
    #[error("{url} serves weights {found}, the run is filed under {expected}; start a new run")]
    OtherWeights {
        /// Where.
        url: String,
        /// What the run says.
        expected: String,
        /// What the reply says.
        found: String,
    },
    /// A recording lacks the episode.
    #[error("the recording has no episode for task {task}, sample {sample_index}")]
    NotRecorded {
        /// The task.
        task: String,
        /// The sample.
        sample_index: u32,
    },
    /// The settings make no sense.
    #[error("{0}")]
    Config(String),
}

impl PolicyError {
    /// Whether asking again can help.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Slow { .. } | Self::Garbled { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500..=599),
            Self::ContextFull { .. }
            | Self::OtherWeights { .. }
            | Self::NotRecorded { .. }
            | Self::Config(_) => false,
        }
    }
}

/// Something that takes model turns.
pub trait PolicyClient: Send + Sync {
    /// How tools reach it.
    fn protocol(&self) -> ToolProtocol;

    /// Takes one turn. Retries are the client's own affair: an error is final.
    fn turn<'a>(
        &'a self,
        request: TurnRequest<'a>,
    ) -> BoxFuture<'a, Result<TurnReply, PolicyError>>;

    /// Asks once, before a run starts, whether anybody is there.
    fn probe(&self) -> BoxFuture<'_, Result<(), PolicyError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Which distribution the log-probabilities are of: `sampling` (what was drawn from) or `model` (untempered).
    fn logprobs_of(&self, _sampling: Sampling) -> &'static str {
        "sampling"
    }
}

/// A policy: a client and the name and revision that its episodes are filed under.
#[derive(Clone)]
pub struct Policy {
    /// The name, as the pipeline calls it.
    pub name: String,
    /// Hash of the weights, or the model's name where weights are out of sight.
    pub revision: String,
    /// Who answers.
    pub client: Arc<dyn PolicyClient>,
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policy")
            .field("name", &self.name)
            .field("revision", &self.revision)
            .finish_non_exhaustive()
    }
}

impl Policy {
    /// A policy of any client.
    pub fn new(
        name: impl Into<String>,
        revision: impl Into<String>,
        client: Arc<dyn PolicyClient>,
    ) -> Self {
        Self {
            name: name.into(),
            revision: revision.into(),
            client,
        }
    }

    /// The scripted expert of the tasks' own sets, wrong in a share of episodes.
    pub fn expert(mistake_rate: f64) -> Self {
        Self::new(
            "expert",
            format!("mistake rate {mistake_rate}"),
            Arc::new(ExpertClient::new(mistake_rate)),
        )
    }

    /// An endpoint that speaks the OpenAI chat API.
    ///
    /// # Errors
    /// An address that is neither `http://…` nor `https://…`.
    pub fn openai(name: impl Into<String>, config: OpenAiConfig) -> Result<Self, PolicyError> {
        let revision = config
            .weights_hash
            .clone()
            .unwrap_or_else(|| config.model.clone());
        Ok(Self::new(
            name,
            revision,
            Arc::new(OpenAiClient::new(config)?),
        ))
    }

    /// Name and revision in one: what ids are derived from.
    pub fn id(&self) -> String {
        format!("{}@{}", self.name, self.revision)
    }
}
