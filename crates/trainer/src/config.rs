//! What decides a training run: method, data, hyperparameters. Unknown keys are errors; the resolved form is written beside the
//! checkpoint, and its fingerprint decides whether a half-finished run may be resumed.

use std::collections::BTreeMap;

use camino::Utf8PathBuf;
use drillyard_schema::{Purpose, RunId, StageRunId, ToolSpec};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::gate::GateConfig;
use crate::losses::{Aggregation, ContrastiveKind};

/// How the policy is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Likelihood of the model's own tokens: of all episodes, of successes only (rejection sampling), or of one tier.
    Imitation,
    /// Offline group-relative policy gradient on stored token ids and behaviour log-probabilities.
    Grpo,
}

/// Which episodes imitation learns from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Select {
    /// All that infrastructure did not end.
    All,
    /// Those whose verdict is success: rejection sampling.
    #[default]
    Successes,
    /// Those of the positive tier.
    Positive,
    /// Those of the positive and the graded tier: progressive training.
    PositiveAndGraded,
}

/// How the learning rate moves after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Half a cosine down to `final_share` of the peak.
    #[default]
    Cosine,
    /// Stays at the peak.
    Constant,
}

/// Where the episodes lie.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LakeSource {
    /// The lake's folder.
    pub root: Utf8PathBuf,
    /// The version of each table to read; the latest of all when empty.
    #[serde(default)]
    pub versions: BTreeMap<String, i64>,
    /// The rollouts or imports to read; all when empty.
    #[serde(default)]
    pub run_ids: Vec<RunId>,
    /// What the episodes were collected for. Evaluation never leaks in: only train and import are taken.
    #[serde(default = "train_and_import")]
    pub purposes: Vec<Purpose>,
    /// The credit execution whose advantages and pairs count.
    #[serde(default)]
    pub credit: Option<StageRunId>,
    /// The QA execution whose scores count.
    #[serde(default)]
    pub scores: Option<StageRunId>,
}

fn train_and_import() -> Vec<Purpose> {
    vec![Purpose::Train, Purpose::Import]
}

/// A training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The method.
    pub method: Method,
    /// The checkpoint to start from, in Hugging Face layout.
    pub init: Utf8PathBuf,
    /// The checkpoint the KL term (and the preference term) is relative to; `init` when absent.
    #[serde(default)]
    pub reference: Option<Utf8PathBuf>,
    /// Where the trained checkpoint goes. A half-finished run lies beside it under the same name with `.partial` appended.
    pub output: Utf8PathBuf,
    /// Episodes from a lake.
    #[serde(default)]
    pub lake: Option<LakeSource>,
    /// Conversations from a JSON-lines file: `{"messages": [...], "tools": [...], "weight": 1.0}` a line; imitation only.
    #[serde(default)]
    pub conversations: Option<Utf8PathBuf>,
    /// The tools offered, by toolset hash, for rendering conversations of the lake; the key `*` stands for every other hash.
    #[serde(default)]
    pub toolsets: BTreeMap<String, Vec<ToolSpec>>,
    /// The execution that the metrics are recorded under.
    #[serde(default = "unnamed")]
    pub stage_run: StageRunId,
    /// Decides the order of the data.
    #[serde(default)]
    pub seed: u64,
    /// Threads libtorch computes with.
    #[serde(default = "two")]
    pub threads: u32,
    /// Continue a half-finished run of the same configuration.
    #[serde(default = "yes")]
    pub resume: bool,
    /// Everything tunable.
    #[serde(default)]
    pub hyper: Hyper,
    /// Thresholds of the provenance gate.
    #[serde(default)]
    pub gate: GateConfig,
}

fn unnamed() -> StageRunId {
    StageRunId("train".to_owned())
}

fn two() -> u32 {
    2
}

fn yes() -> bool {
    true
}

/// Everything tunable. The defaults suit the small embedded base model; for models of billions of parameters take a learning rate
/// of 1e-6 to 5e-6 and batches of 32k to 128k tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hyper {
    /// Passes over the data.
    pub epochs: u32,
    /// Stop after so many optimiser steps, whatever the epochs say.
    pub max_steps: Option<u64>,
    /// Tokens of an optimiser step, padding included.
    pub batch_tokens: usize,
    /// Tokens of one forward and backward pass; gradients add up over the passes of a step. Bounds memory.
    pub micro_tokens: usize,
    /// Longer sequences are left out, and counted.
    pub max_length: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// What follows warm-up.
    pub schedule: Schedule,
    /// Share of the steps over which the learning rate rises linearly.
    pub warmup_share: f64,
    /// Where the cosine ends, as a share of the peak.
    pub final_share: f64,
    /// Decoupled weight decay; norms and other vectors are exempt.
    pub weight_decay: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the root of the squared gradient's mean.
    pub epsilon: f64,
    /// Largest norm of the whole gradient; 0 leaves it alone.
    pub grad_clip: f64,
    /// How per-token losses become one number.
    pub aggregation: Aggregation,
    /// The ratio to the behaviour policy counts no lower than 1 minus this.
    pub clip_low: f64,
    /// The ratio to the behaviour policy counts no higher than 1 plus this.
    pub clip_high: f64,
    /// For negative advantages the loss counts no higher than this times the advantage; off when absent.
    pub dual_clip: Option<f64>,
    /// Weight of the k3 estimate of the KL divergence to the reference.
    pub kl: f64,
    /// Weight of the supervised term on call syntax.
    pub format_weight: f64,
    /// Weight of the contrastive term.
    pub contrastive_weight: f64,
    /// Which contrastive term.
    pub contrastive: ContrastiveKind,
    /// Temperature of InfoNCE.
    pub contrastive_temperature: f64,
    /// Margin of the margin term, in cosine distance.
    pub contrastive_margin: f64,
    /// Weight of the preference term on pairs (imitation only).
    pub preference_weight: f64,
    /// How sharply the preference term counts log-ratios.
    pub preference_beta: f64,
    /// Which episodes imitation learns from.
    pub select: Select,
    /// Let a batch hold episodes of different toolset, prompt, template or parser versions.
    pub allow_mixed: bool,
    /// Share of the imitation sequences kept back to measure the loss on.
    pub holdout_share: f64,
    /// Measure on validation tasks every so many steps; 0 never.
    pub validate_every: u64,
    /// Save a resumable state every so many steps; 0 never.
    pub checkpoint_every: u64,
    /// Record metrics every so many steps.
    pub log_every: u64,
}

impl Default for Hyper {
    fn default() -> Self {
        Self {
            epochs: 3,
            max_steps: None,
            batch_tokens: 8192,
            micro_tokens: 8192,
            max_length: 2048,
            learning_rate: 3e-4,
            schedule: Schedule::Cosine,
            warmup_share: 0.03,
            final_share: 0.1,
            weight_decay: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            grad_clip: 1.0,
            aggregation: Aggregation::TokenMean,
            clip_low: 0.2,
            clip_high: 0.2,
            dual_clip: None,
            kl: 0.01,
            format_weight: 0.0,
            contrastive_weight: 0.0,
            contrastive: ContrastiveKind::InfoNce,
            contrastive_temperature: 0.1,
            contrastive_margin: 0.2,
            preference_weight: 0.0,
            preference_beta: 0.1,
            select: Select::Successes,
            allow_mixed: false,
            holdout_share: 0.0,
            validate_every: 0,
            checkpoint_every: 500,
            log_every: 10,
        }
    }
}

impl TrainConfig {
    /// The checkpoint that losses are relative to.
    pub fn reference_dir(&self) -> &Utf8PathBuf {
        self.reference.as_ref().unwrap_or(&self.init)
    }

    /// What contradicts itself, if anything.
    pub fn check(&self) -> Result<(), TrainError> {
        let hyper = &self.hyper;
        if self.lake.is_none() && self.conversations.is_none() {
            return Err(TrainError::config(
                "lake",
                "name a lake or a file of conversations to train on",
            ));
        }
        if self.lake.is_some() && self.conversations.is_some() {
            return Err(TrainError::config(
                "conversations",
                "name either a lake or a file of conversations, not both",
            ));
        }
        if self.method == Method::Grpo && self.lake.is_none() {
            return Err(TrainError::config(
                "lake",
                "grpo needs token ids and advantages, which only a lake holds; imitation works on conversations",
            ));
        }
        if let Some(lake) = &self.lake {
            if let Some(purpose) = lake
                .purposes
                .iter()
                .find(|purpose| !train_and_import().contains(purpose))
            {
                return Err(TrainError::config(
                    "lake.purposes",
                    format!(
                        "{purpose} episodes measure training and must not enter it; train and import may"
                    ),
                ));
            }
            if (self.method == Method::Grpo || hyper.preference_weight > 0.0)
                && lake.credit.is_none()
            {
                return Err(TrainError::config(
                    "lake.credit",
                    "name the credit execution whose advantages and pairs count",
                ));
            }
        }
        if self.method == Method::Grpo && hyper.preference_weight > 0.0 {
            return Err(TrainError::config(
                "hyper.preference_weight",
                "the preference term belongs to imitation; grpo compares episodes by itself",
            ));
        }
        if self.method == Method::Imitation
            && (hyper.contrastive_weight > 0.0 || hyper.format_weight > 0.0)
        {
            return Err(TrainError::config(
                "hyper.contrastive_weight",
                "the contrastive and format terms belong to grpo; imitation already learns every own token",
            ));
        }
        let positive = [
            ("hyper.learning_rate", hyper.learning_rate),
            ("hyper.epsilon", hyper.epsilon),
            (
                "hyper.contrastive_temperature",
                hyper.contrastive_temperature,
            ),
            ("hyper.preference_beta", hyper.preference_beta),
            ("hyper.batch_tokens", hyper.batch_tokens as f64),
            ("hyper.micro_tokens", hyper.micro_tokens as f64),
            ("hyper.epochs", f64::from(hyper.epochs)),
            ("hyper.log_every", hyper.log_every as f64),
            ("threads", f64::from(self.threads)),
        ];
        for (field, value) in positive {
            if !(value.is_finite() && value > 0.0) {
                return Err(TrainError::config(
                    field,
                    format!("{value} must be above 0"),
                ));
            }
        }
        let shares = [
            ("hyper.warmup_share", hyper.warmup_share),
            ("hyper.final_share", hyper.final_share),
            ("hyper.holdout_share", hyper.holdout_share),
            ("hyper.beta1", hyper.beta1),
            ("hyper.beta2", hyper.beta2),
            ("hyper.clip_low", hyper.clip_low),
        ];
        for (field, value) in shares {
            if !(0.0..=1.0).contains(&value) {
                return Err(TrainError::config(
                    field,
                    format!("{value} must lie between 0 and 1"),
                ));
            }
        }
        let not_negative = [
            ("hyper.kl", hyper.kl),
            ("hyper.clip_high", hyper.clip_high),
            ("hyper.weight_decay", hyper.weight_decay),
            ("hyper.grad_clip", hyper.grad_clip),
            ("hyper.format_weight", hyper.format_weight),
            ("hyper.contrastive_weight", hyper.contrastive_weight),
            ("hyper.preference_weight", hyper.preference_weight),
        ];
        for (field, value) in not_negative {
            if !(value.is_finite() && value >= 0.0) {
                return Err(TrainError::config(
                    field,
                    format!("{value} must not be negative"),
                ));
            }
        }
        if hyper.dual_clip.is_some_and(|clip| clip <= 1.0) {
            return Err(TrainError::config(
                "hyper.dual_clip",
                "the dual clip must be above 1",
            ));
        }
        Ok(())
    }

    /// A hash of everything that decides the trained weights, given the same inputs: what a resumed run must agree on.
    pub fn fingerprint(&self) -> Result<String, TrainError> {
        let deciding = Self {
            output: Utf8PathBuf::new(),
            resume: true,
            stage_run: unnamed(),
            hyper: Hyper {
                checkpoint_every: 0,
                log_every: 1,
                validate_every: 0,
                ..self.hyper.clone()
            },
            ..self.clone()
        };
        Ok(blake3::hash(serde_json::to_string(&deciding)?.as_bytes())
            .to_hex()
            .to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> Result<TrainConfig, String> {
        let config: TrainConfig = serde_json::from_str(json).map_err(|e| e.to_string())?;
        config.check().map_err(|e| e.to_string())?;
        Ok(config)
    }

    #[test]
    fn a_small_configuration_is_enough() {
        let config = config(
            r#"{"method":"imitation","init":"base","output":"out","conversations":"c.jsonl","hyper":{"epochs":1}}"#,
        )
        .unwrap();
        assert_eq!(config.hyper.batch_tokens, 8192);
        assert_eq!(config.reference_dir(), "base");
    }

    #[test]
    fn mistakes_are_named() {
        let unknown = config(
            r#"{"method":"imitation","init":"b","output":"o","conversations":"c","hyper":{"learning_rte":1}}"#,
        );
        assert!(unknown.unwrap_err().contains("learning_rte"));
        let no_lake = config(r#"{"method":"grpo","init":"b","output":"o","conversations":"c"}"#);
        assert!(no_lake.unwrap_err().contains("grpo needs token ids"));
        let leak = config(
            r#"{"method":"grpo","init":"b","output":"o","lake":{"root":"l","purposes":["held_out"],"credit":"c"}}"#,
        );
        assert!(leak.unwrap_err().contains("held_out"));
        let negative = config(
            r#"{"method":"imitation","init":"b","output":"o","conversations":"c","hyper":{"kl":-1}}"#,
        );
        assert!(negative.unwrap_err().contains("hyper.kl"));
    }

    #[test]
    fn the_fingerprint_ignores_what_decides_nothing() {
        let text = r#"{"method":"imitation","init":"b","output":"o","conversations":"c"}"#;
        let first = config(text).unwrap();
        let mut second = first.clone();
        second.output = "elsewhere".into();
        second.hyper.checkpoint_every = 7;
        assert_eq!(first.fingerprint().unwrap(), second.fingerprint().unwrap());
        second.seed = 1;
        assert_ne!(first.fingerprint().unwrap(), second.fingerprint().unwrap());
    }
}
