//! The rows of one episode while it grows.

use drillyard_schema::table::{
    LossSpan, MessageRow, RewardRow, StepRow, Timestamp, TokenRow, ToolCallRow, VerdictRow,
};
use drillyard_schema::{EpisodeId, Message, ParseStatus, Purpose, RunId, VerdictKind};

use crate::policy::TurnReply;
use crate::tokens::Added;

/// What every row of an episode begins with, and the rows so far.
#[derive(Debug)]
pub(crate) struct Rows {
    pub run_date: String,
    pub purpose: Purpose,
    pub run_id: RunId,
    pub episode_id: EpisodeId,
    pub messages: Vec<MessageRow>,
    pub steps: Vec<StepRow>,
    pub tool_calls: Vec<ToolCallRow>,
    pub tokens: Vec<TokenRow>,
    pub verdicts: Vec<VerdictRow>,
    pub rewards: Vec<RewardRow>,
    scheme: (String, String),
}

/// What a turn was, apart from the reply itself.
#[derive(Debug)]
pub(crate) struct StepFacts<'a> {
    pub step: u32,
    pub history_hash: String,
    pub parse_status: ParseStatus,
    pub parse_error: Option<String>,
    pub reasoning: Option<String>,
    pub n_calls: usize,
    pub temperature: f64,
    pub generation_us: i64,
    pub started_at: i64,
    pub reply: &'a TurnReply,
}

impl Rows {
    /// No rows yet. `scheme` names who emits the rewards, and its version.
    pub fn new(
        run_date: String,
        purpose: Purpose,
        run_id: RunId,
        episode_id: EpisodeId,
        scheme: (String, String),
    ) -> Self {
        Self {
            run_date,
            purpose,
            run_id,
            episode_id,
            messages: Vec::new(),
            steps: Vec::new(),
            tool_calls: Vec::new(),
            tokens: Vec::new(),
            verdicts: Vec::new(),
            rewards: Vec::new(),
            scheme,
        }
    }

    pub fn message(&mut self, message: &Message, step: Option<u32>, extras: Option<String>) {
        let tool_calls = (!message.tool_calls.is_empty())
            .then(|| serde_json::to_string(&message.tool_calls).unwrap_or_default());
        self.messages.push(MessageRow {
            run_date: self.run_date.clone(),
            purpose: self.purpose.to_string(),
            run_id: self.run_id.clone(),
            episode_id: self.episode_id.clone(),
            message_index: self.messages.len() as i32,
            step_index: step.map(|step| step as i32),
            role: message.role.as_str().to_owned(),
            name: message.name.clone(),
            content: message.content.clone(),
            tool_calls,
            tool_call_id: message.tool_call_id.clone(),
            extras,
        });
    }

    pub fn step(&mut self, facts: StepFacts<'_>) {
        let reply = facts.reply;
        let mut extras = serde_json::Map::new();
        if reply.rebuilt {
            extras.insert(
                "raw_text".to_owned(),
                "rebuilt from the server's calls".into(),
            );
        }
        if reply.retries > 0 {
            extras.insert("retries".to_owned(), reply.retries.into());
        }
        if !reply.notes.is_empty() {
            extras.insert("notes".to_owned(), reply.notes.clone().into());
        }
        self.steps.push(StepRow {
            run_date: self.run_date.clone(),
            purpose: self.purpose.to_string(),
            run_id: self.run_id.clone(),
            episode_id: self.episode_id.clone(),
            step_index: facts.step as i32,
            role: "agent".to_owned(),
            history_hash: facts.history_hash,
            raw_text: reply.text.clone(),
            reasoning: facts.reasoning,
            finish_reason: reply.finish_reason.clone(),
            parse_status: facts.parse_status.to_string(),
            parse_error: facts.parse_error,
            n_calls: facts.n_calls as i32,
            milestone: None,
            temperature: facts.temperature,
            prompt_tokens: reply.prompt_tokens,
            generated_tokens: reply.generated_tokens,
            generation_us: facts.generation_us,
            started_at: Timestamp(facts.started_at),
            extras: (!extras.is_empty()).then(|| serde_json::Value::Object(extras).to_string()),
        });
    }

    pub fn token(&mut self, step: u32, added: Added, reply: &TurnReply, loss_spans: Vec<LossSpan>) {
        self.tokens.push(TokenRow {
            run_date: self.run_date.clone(),
            purpose: self.purpose.to_string(),
            run_id: self.run_id.clone(),
            episode_id: self.episode_id.clone(),
            step_index: step as i32,
            kept_prefix: added.kept_prefix,
            context_ids: added.context_ids,
            generated_ids: reply.token_ids.clone(),
            logprobs: reply.logprobs.clone(),
            loss_spans,
            tokenizer_hash: reply.tokenizer_hash.clone().unwrap_or_default(),
            template_hash: reply.template_hash.clone().unwrap_or_default(),
        });
    }

    /// A raw reward component; `step` is none for the whole episode.
    pub fn reward(&mut self, step: Option<u32>, component: &str, value: f64) {
        self.rewards.push(RewardRow {
            run_date: self.run_date.clone(),
            purpose: self.purpose.to_string(),
            run_id: self.run_id.clone(),
            episode_id: self.episode_id.clone(),
            step_index: step.map(|step| step as i32),
            scheme: self.scheme.0.clone(),
            scheme_version: self.scheme.1.clone(),
            component: component.to_owned(),
            value,
        });
    }

    /// A milestone that was first reached at `step`: noted there, and worth its `share` of all milestones.
    pub fn milestone(&mut self, step: u32, name: &str, share: f64) {
        if let Some(row) = self
            .steps
            .iter_mut()
            .find(|row| row.step_index == step as i32)
        {
            row.milestone = Some(match row.milestone.take() {
                Some(before) => format!("{before},{name}"),
                None => name.to_owned(),
            });
        }
        self.reward(Some(step), "milestone", share);
    }

    pub fn verdict(&mut self, success: bool, score: f64, detail: String, decided_at: i64) {
        self.verdicts.push(VerdictRow {
            run_date: self.run_date.clone(),
            purpose: self.purpose.to_string(),
            run_id: self.run_id.clone(),
            episode_id: self.episode_id.clone(),
            kind: VerdictKind::Verified.to_string(),
            verifier: self.scheme.0.clone(),
            verifier_version: self.scheme.1.clone(),
            success: Some(success),
            score: Some(score),
            detail: Some(detail),
            decided_at: Timestamp(decided_at),
        });
    }
}
