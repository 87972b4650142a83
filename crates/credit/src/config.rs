//! The settings of credit, as pipelines write them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::CreditError;

/// How credit is assigned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CreditConfig {
    /// Name of the reward scheme: `weighted`, `graded`, `outcome_format`, or `custom`.
    pub scheme: String,
    /// The scheme itself, where `scheme` is `custom`.
    pub custom: Option<Scheme>,
    /// The number of steps at which efficiency is 0 (`weighted` only).
    pub max_steps: u32,
    /// Discount of later rewards, from 0.5 to 1; 0.95 to 0.99 is usual.
    pub gamma: f64,
    /// How rewards become advantages.
    pub advantage: AdvantageConfig,
    /// How pairs are made.
    pub pairs: PairConfig,
    /// Negative control: permute whole outcomes within each task with this seed.
    pub control: Option<u64>,
}

impl Default for CreditConfig {
    fn default() -> Self {
        Self {
            scheme: "graded".to_owned(),
            custom: None,
            max_steps: 10,
            gamma: 0.97,
            advantage: AdvantageConfig::default(),
            pairs: PairConfig::default(),
            control: None,
        }
    }
}

impl CreditConfig {
    /// The scheme meant.
    pub fn resolve(&self) -> Result<Scheme, CreditError> {
        let error = |name, reason: String| CreditError::Config { name, reason };
        match (self.scheme.as_str(), &self.custom) {
            ("custom", Some(custom)) => Ok(custom.clone()),
            ("custom", None) => Err(error(
                "scheme",
                "'custom' needs a [credit.custom] table".to_owned(),
            )),
            (_, Some(_)) => Err(error(
                "custom",
                format!(
                    "is given, but scheme is '{}'; set scheme = \"custom\"",
                    self.scheme
                ),
            )),
            (name, None) => Scheme::preset(name, self.max_steps).ok_or_else(|| {
                let known = Scheme::PRESETS.join(", ");
                error("scheme", format!("'{name}' is none of {known}, custom"))
            }),
        }
    }

    /// Refuses settings that make no sense.
    pub fn check(&self) -> Result<(), CreditError> {
        let error = |name, reason: &str| {
            Err(CreditError::Config {
                name,
                reason: reason.to_owned(),
            })
        };
        if !(0.5..=1.0).contains(&self.gamma) {
            return error("gamma", "must be from 0.5 to 1");
        }
        if !(self.advantage.eps >= 0.0 && self.advantage.eps.is_finite()) {
            return error("advantage.eps", "must be 0 or a small positive number");
        }
        if !self.pairs.min_margin.is_finite() {
            return error("pairs.min_margin", "must be a number");
        }
        if self.max_steps == 0 {
            return error("max_steps", "must be at least 1");
        }
        let scheme = self.resolve()?;
        let weights = scheme.terms.values().map(|t| t.weight);
        if !weights.chain([scheme.efficiency]).all(f64::is_finite) {
            return error("custom", "weights must be finite numbers");
        }
        Ok(())
    }
}

/// How raw components become rewards. The raw values' meaning is documented in `credit-math`'s `reward` module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scheme {
    /// What the outcome is worth.
    pub outcome: Outcome,
    /// What each other component is worth; unnamed ones count nothing.
    #[serde(default)]
    pub terms: BTreeMap<String, Term>,
    /// Weight of `1 - steps / max_steps`, which successful episodes earn.
    #[serde(default)]
    pub efficiency: f64,
    /// The number of steps at which efficiency is 0.
    #[serde(default = "one")]
    pub max_steps: u32,
}

fn one() -> u32 {
    1
}

impl Scheme {
    /// Names that [`preset`](Self::preset) knows.
    pub const PRESETS: &'static [&'static str] = &["weighted", "graded", "outcome_format"];

    /// - `weighted`: 0.5 completion + 0.3 milestones + 0.1 efficiency - 0.1 violations;
    /// - `graded`: +1, partial or -0.5 at the end, and 1 to 5 % of that along the way for format, milestones and novelty, against
    ///   repeats and violations;
    /// - `outcome_format`: the outcome, and 5 % for well-formed calls.
    pub fn preset(name: &str, max_steps: u32) -> Option<Self> {
        let terms = |terms: &[(&str, f64, bool)]| {
            terms
                .iter()
                .map(|(name, weight, mean_over_steps)| {
                    let term = Term {
                        weight: *weight,
                        mean_over_steps: *mean_over_steps,
                    };
                    ((*name).to_owned(), term)
                })
                .collect()
        };
        match name {
            "weighted" => Some(Self {
                outcome: Outcome::Linear { weight: 0.5 },
                terms: terms(&[("milestone", 0.3, false), ("violation", -0.1, true)]),
                efficiency: 0.1,
                max_steps,
            }),
            "graded" => Some(Self {
                outcome: Outcome::Graded {
                    success: 1.0,
                    partial: 0.5,
                    failure: -0.5,
                },
                terms: terms(&[
                    ("format", 0.02, true),
                    ("milestone", 0.05, false),
                    ("novelty", 0.01, false),
                    ("repeat", -0.02, false),
                    ("violation", -0.05, false),
                ]),
                efficiency: 0.0,
                max_steps: 1,
            }),
            "outcome_format" => Some(Self {
                outcome: Outcome::Linear { weight: 1.0 },
                terms: terms(&[("format", 0.05, true)]),
                efficiency: 0.0,
                max_steps: 1,
            }),
            _ => None,
        }
    }
}

/// What the outcome is worth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Outcome {
    /// The raw value times a weight.
    Linear {
        /// The weight.
        weight: f64,
    },
    /// Fixed rewards for success (raw 1) and failure (raw 0); partial success earns its raw value times `partial`.
    Graded {
        /// For success.
        success: f64,
        /// Times the raw value, for what lies between.
        partial: f64,
        /// For failure.
        failure: f64,
    },
}

/// What a component other than the outcome is worth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Term {
    /// Reward for a raw value of 1; negative for a penalty.
    pub weight: f64,
    /// Divide by the number of steps, so that a longer episode earns no more of it.
    #[serde(default)]
    pub mean_over_steps: bool,
}

/// How rewards become advantages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdvantageConfig {
    /// What is taken off a reward.
    pub baseline: Baseline,
    /// What the difference is divided by.
    pub scale: Scale,
    /// Added to the divisor.
    pub eps: f64,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self {
            baseline: Baseline::GroupMean,
            scale: Scale::Deviation,
            eps: 1e-6,
        }
    }
}

/// What is taken off a reward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// The group's mean (GRPO).
    GroupMean,
    /// The mean of the other members (RLOO).
    LeaveOneOut,
}

/// What the difference is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// Nothing (Dr.GRPO).
    None,
    /// The group's deviation, ddof 1 (GRPO).
    Deviation,
    /// The group's mean (MaxRL).
    Mean,
}

/// How pairs are made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PairConfig {
    /// At most so many for a task; 0 for none.
    pub max_per_task: u32,
    /// The chosen episode's reward exceeds the rejected one's by more than this.
    pub min_margin: f64,
}

impl Default for PairConfig {
    fn default() -> Self {
        Self {
            max_per_task: 4,
            min_margin: 1e-6,
        }
    }
}
