//! The provenance gate: may a policy gradient run on these episodes?
//!
//! An importance-weighted loss is only as good as its denominator. Before the first step the gate asks: are behaviour
//! log-probabilities there; which policy sampled the episodes, and how long ago in training steps from checkpoint to checkpoint;
//! and, recomputing log-probabilities of a sample under today's weights, how far apart are the two policies: effective sample size
//! of the sequence weights, KL divergence, share of tokens the clip would mask before anything was learned. Below the thresholds it
//! refuses, says why, and names what still works.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::sequence::Sequence;

/// Thresholds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GateConfig {
    /// Smallest share of episodes that must have behaviour log-probabilities.
    pub min_logprob_share: f64,
    /// Smallest effective sample size of the sequence importance weights, as a share of the sample.
    pub min_effective_sample_share: f64,
    /// Largest mean KL divergence from the behaviour policy to today's, in nats a token.
    pub max_kl: f64,
    /// Largest share of tokens whose ratio is outside the clip before the first step.
    pub max_masked_share: f64,
    /// Most checkpoints between the behaviour policy and today's; episodes of unknown policies count as older than any.
    pub max_staleness: u32,
    /// Sequences whose log-probabilities are recomputed.
    pub sample: usize,
}

impl Default for GateConfig {
    fn default() -> Self {
        Self {
            min_logprob_share: 0.95,
            min_effective_sample_share: 0.3,
            max_kl: 0.1,
            max_masked_share: 0.2,
            max_staleness: 2,
            sample: 256,
        }
    }
}

/// Where the episodes come from, counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Scored episodes that could take part.
    pub episodes: usize,
    /// Of these with token ids and a log-probability for every own token.
    pub with_logprobs: usize,
    /// Of these with token ids but no log-probabilities.
    pub tokens_only: usize,
    /// Episodes by the revision of the policy that sampled them.
    pub revisions: BTreeMap<String, usize>,
    /// Episodes sampled greedily: their log-probabilities are no sampling distribution, and they are left out.
    pub greedy: usize,
    /// The revision training starts from.
    pub current: String,
    /// The revisions the current one was trained from, the nearest first.
    pub lineage: Vec<String>,
}

impl Provenance {
    /// Checkpoints between a revision and the current one: 0 is the current one itself; unknown where it is no ancestor.
    pub fn staleness(&self, revision: &str) -> Option<u32> {
        if revision == self.current {
            return Some(0);
        }
        self.lineage
            .iter()
            .position(|ancestor| ancestor == revision)
            .map(|distance| distance as u32 + 1)
    }
}

/// How far today's policy is from the one that sampled, on a sample of sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Drift {
    /// Sequences compared.
    pub sequences: usize,
    /// Own tokens compared.
    pub tokens: usize,
    /// Effective sample size of the sequence weights, as a share: `(Σw)² / (n Σw²)` with `w = exp(Σ(logp - behaviour))`.
    pub effective_sample_share: f64,
    /// Mean of k3 = `r - 1 - log r` over tokens: an estimate of KL(behaviour ‖ current), in nats.
    pub kl: f64,
    /// Share of tokens whose ratio is outside the clip.
    pub masked_share: f64,
    /// Largest absolute difference of log-probabilities.
    pub max_difference: f64,
}

/// Compares recomputed log-probabilities with the behaviour's, sequence by sequence.
pub fn drift(pairs: &[(&[f32], &[f32])], clip_low: f64, clip_high: f64) -> Drift {
    let mut drift = Drift {
        sequences: pairs.len(),
        ..Drift::default()
    };
    let (mut kl, mut masked) = (0.0, 0usize);
    let mut log_weights = Vec::with_capacity(pairs.len());
    for (current, behaviour) in pairs {
        let mut sum = 0.0;
        for (&c, &b) in current.iter().zip(*behaviour) {
            let d = (f64::from(c) - f64::from(b)).clamp(-20.0, 20.0);
            let ratio = d.exp();
            sum += d;
            kl += ratio - 1.0 - d;
            masked += usize::from(ratio > 1.0 + clip_high || ratio < 1.0 - clip_low);
            drift.max_difference = drift.max_difference.max(d.abs());
            drift.tokens += 1;
        }
        log_weights.push(sum);
    }
    // Weights relative to the largest: the shift cancels and nothing overflows.
    let largest = log_weights
        .iter()
        .copied()
        .fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut squares) = (0.0, 0.0);
    for log_weight in log_weights {
        let weight = (log_weight - largest).exp();
        sum += weight;
        squares += weight * weight;
    }
    if squares > 0.0 {
        drift.effective_sample_share = sum * sum / (squares * pairs.len() as f64);
    }
    if drift.tokens > 0 {
        drift.kl = kl / drift.tokens as f64;
        drift.masked_share = masked as f64 / drift.tokens as f64;
    }
    drift
}

/// What the gate found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GateReport {
    /// Whether the policy gradient may run.
    pub passed: bool,
    /// Why not.
    pub reasons: Vec<String>,
    /// What works on this data all the same.
    pub still_works: Vec<String>,
    /// What is worth knowing either way.
    pub notes: Vec<String>,
    /// Where the episodes come from.
    pub provenance: Provenance,
    /// How far off they are; absent if there was nothing to compare.
    pub drift: Option<Drift>,
    /// Largest staleness among the episodes; absent where a policy is unknown.
    pub staleness: Option<u32>,
    /// Log-probabilities were missing, and recomputing them under the weights that sampled is exact.
    pub recompute_missing: bool,
}

impl fmt::Display for GateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.provenance;
        writeln!(
            f,
            "provenance gate: {}",
            if self.passed { "passed" } else { "refused" }
        )?;
        writeln!(
            f,
            "  log-probabilities for {} of {} episodes; {} policy revision(s), staleness {}",
            p.with_logprobs,
            p.episodes,
            p.revisions.len(),
            self.staleness
                .map_or_else(|| "unknown".to_owned(), |s| s.to_string()),
        )?;
        if let Some(d) = &self.drift {
            writeln!(
                f,
                "  sample of {} episodes, {} tokens: effective sample size {:.0} %, kl {:.5}, masked {:.1} %, largest difference {:.4}",
                d.sequences,
                d.tokens,
                100.0 * d.effective_sample_share,
                d.kl,
                100.0 * d.masked_share,
                d.max_difference,
            )?;
        }
        for reason in &self.reasons {
            writeln!(f, "  refused: {reason}")?;
        }
        for note in &self.notes {
            writeln!(f, "  note: {note}")?;
        }
        if !self.still_works.is_empty() {
            writeln!(f, "  still works: {}", self.still_works.join("; "))?;
        }
        Ok(())
    }
}

/// Judges provenance and, where there was something to compare, drift.
pub fn judge(provenance: Provenance, drift: Option<Drift>, config: &GateConfig) -> GateReport {
    let mut reasons = Vec::new();
    let mut notes = Vec::new();
    let staleness = provenance
        .revisions
        .keys()
        .map(|revision| provenance.staleness(revision))
        .collect::<Option<Vec<u32>>>()
        .map(|all| all.into_iter().max().unwrap_or(0));

    let usable = provenance.episodes.max(1) as f64;
    let mut recompute_missing = false;
    if provenance.episodes == 0 {
        reasons.push("no scored episode could take part".to_owned());
    } else if provenance.with_logprobs as f64 / usable < config.min_logprob_share {
        let have_tokens = provenance.with_logprobs + provenance.tokens_only;
        if staleness == Some(0) && have_tokens as f64 / usable >= config.min_logprob_share {
            recompute_missing = true;
            notes.push(format!(
                "{} episodes carry no log-probabilities; the weights that sampled them are those training starts from, so they are recomputed",
                provenance.tokens_only
            ));
        } else {
            reasons.push(format!(
                "behaviour log-probabilities are there for {} of {} episodes, {:.0} % are required; sample from an endpoint that returns token ids and log-probabilities",
                provenance.with_logprobs,
                provenance.episodes,
                100.0 * config.min_logprob_share
            ));
        }
    }
    if reasons.is_empty() {
        match staleness {
            None => {
                let unknown: Vec<&str> = provenance
                    .revisions
                    .keys()
                    .filter(|revision| provenance.staleness(revision).is_none())
                    .map(String::as_str)
                    .collect();
                reasons.push(format!(
                    "policy revision {} is neither the one training starts from ({}) nor one of its ancestors",
                    unknown.join(", "),
                    provenance.current
                ));
            }
            Some(staleness) if staleness > config.max_staleness => reasons.push(format!(
                "the oldest episodes were sampled {staleness} checkpoints ago, at most {} are allowed; roll out again with the current policy",
                config.max_staleness
            )),
            Some(_) => {}
        }
    }
    if let Some(d) = &drift {
        if !d.kl.is_finite() || d.kl > config.max_kl {
            reasons.push(format!(
                "the policy has moved {:.4} nats a token from the one that sampled, at most {} are allowed",
                d.kl, config.max_kl
            ));
        }
        if d.effective_sample_share < config.min_effective_sample_share {
            reasons.push(format!(
                "the effective sample size is {:.0} % of the sample, {:.0} % are required",
                100.0 * d.effective_sample_share,
                100.0 * config.min_effective_sample_share
            ));
        }
        if d.masked_share > config.max_masked_share {
            reasons.push(format!(
                "{:.0} % of the tokens lie outside the clip before the first step, at most {:.0} % are allowed",
                100.0 * d.masked_share,
                100.0 * config.max_masked_share
            ));
        }
        if staleness == Some(0) && d.max_difference > 0.01 {
            notes.push(format!(
                "the sampler's and the trainer's log-probabilities of one policy differ by up to {:.4} nats: engine, precision or template differ",
                d.max_difference
            ));
        }
    }
    if provenance.greedy > 0 {
        notes.push(format!(
            "{} episodes were sampled greedily and are left out",
            provenance.greedy
        ));
    }
    let passed = reasons.is_empty();
    let still_works = if passed {
        Vec::new()
    } else {
        vec![
            "imitation of successes (in a pipeline: train.method = \"rejection_sampling\")"
                .to_owned(),
            "pairs of success and failure (in a pipeline: train.method = \"imitation_pairs\")"
                .to_owned(),
        ]
    };
    GateReport {
        passed,
        reasons,
        still_works,
        notes,
        provenance,
        drift,
        staleness,
        recompute_missing,
    }
}

/// Up to `count` sequences spread evenly over the data: which ones depends on the data alone.
pub fn sample<'a>(sequences: &'a [Sequence], count: usize) -> Vec<&'a Sequence> {
    let with: Vec<&'a Sequence> = sequences
        .iter()
        .filter(|s| s.own_len() > 0 && s.behaviour.len() == s.own_len())
        .collect();
    let take = count.min(with.len());
    (0..take).map(|k| with[k * with.len() / take]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provenance() -> Provenance {
        Provenance {
            episodes: 100,
            with_logprobs: 100,
            tokens_only: 0,
            revisions: BTreeMap::from([("now".to_owned(), 100)]),
            greedy: 0,
            current: "now".to_owned(),
            lineage: vec!["parent".to_owned(), "grandparent".to_owned()],
        }
    }

    fn verdict(provenance: Provenance, drift: Option<Drift>) -> GateReport {
        judge(provenance, drift, &GateConfig::default())
    }

    #[test]
    fn fresh_episodes_pass() {
        let same: Vec<f32> = vec![-0.5, -1.5];
        let d = drift(&[(&same, &same), (&same, &same)], 0.2, 0.2);
        assert!((d.effective_sample_share - 1.0).abs() < 1e-12);
        assert!(d.kl.abs() < 1e-12 && d.masked_share.abs() < 1e-12);
        let report = verdict(provenance(), Some(d));
        assert!(report.passed, "{report}");
        assert_eq!(report.staleness, Some(0));
        assert!(report.still_works.is_empty());
    }

    #[test]
    fn drift_is_that_of_the_definitions() {
        let (a, b) = ([-1.0f32, -2.0], [-1.5f32, -2.0]);
        let d = drift(&[(&a, &b), (&b, &b)], 0.2, 0.2);
        let w = [0.5f64.exp(), 1.0];
        let ess = (w[0] + w[1]).powi(2) / (2.0 * (w[0] * w[0] + w[1] * w[1]));
        assert!((d.effective_sample_share - ess).abs() < 1e-9);
        assert!((d.kl - (0.5f64.exp() - 1.0 - 0.5) / 4.0).abs() < 1e-9);
        assert!((d.masked_share - 0.25).abs() < 1e-12);
        assert!((d.max_difference - 0.5).abs() < 1e-9);
    }

    #[test]
    fn missing_logprobs_refuse_and_name_what_works() {
        let report = verdict(
            Provenance {
                with_logprobs: 0,
                revisions: BTreeMap::from([("gpt-9".to_owned(), 100)]),
                ..provenance()
            },
            None,
        );
        assert!(!report.passed);
        assert!(report.reasons[0].contains("log-probabilities are there for 0 of 100"));
        assert!(report.to_string().contains("still works: imitation"));
    }

    #[test]
    fn missing_logprobs_of_the_current_weights_are_recomputed() {
        let report = verdict(
            Provenance {
                with_logprobs: 0,
                tokens_only: 100,
                ..provenance()
            },
            None,
        );
        assert!(report.passed && report.recompute_missing, "{report}");
    }

    #[test]
    fn stale_and_foreign_policies_are_refused() {
        let with = |revision: &str| Provenance {
            revisions: BTreeMap::from([(revision.to_owned(), 100)]),
            ..provenance()
        };
        assert_eq!(verdict(with("grandparent"), None).staleness, Some(2));
        assert!(verdict(with("grandparent"), None).passed);
        let mut old = with("old");
        old.lineage.push("old".to_owned());
        assert!(verdict(old, None).reasons[0].contains("3 checkpoints ago"));
        assert!(verdict(with("stranger"), None).reasons[0].contains("stranger"));
    }

    #[test]
    fn far_policies_are_refused() {
        let far = Drift {
            sequences: 10,
            tokens: 100,
            effective_sample_share: 0.05,
            kl: 0.5,
            masked_share: 0.6,
            max_difference: 3.0,
        };
        let report = verdict(provenance(), Some(far));
        assert_eq!(report.reasons.len(), 3, "{report}");
        let broken = Drift {
            kl: f64::NAN,
            effective_sample_share: 1.0,
            ..Drift::default()
        };
        assert!(!verdict(provenance(), Some(broken)).passed);
    }
}
