//! Advice from curves: what the numbers of a run say about it, in words, with the knob to turn.

use drillyard_schema::table::TrainMetricRow;
use serde::{Deserialize, Serialize};

use crate::metrics::curve;

/// One piece of advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// A short name: `sparse_reward`, `kl_zero`, `kl_runaway`, `clipped`, `over_fit`, `stalled`, `detours`, `entropy_collapse`.
    pub code: String,
    /// What was seen and what to try.
    pub message: String,
}

/// What a validation pass measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Share of episodes that succeeded.
    pub success: f64,
    /// Mean number of steps an episode took.
    pub mean_steps: f64,
    /// Share of tool calls that ran without error.
    pub tool_accuracy: f64,
}

/// What is known of the groups behind the advantages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// Groups with scored episodes.
    pub total: usize,
    /// Groups whose rewards are all equal: they teach nothing.
    pub zero_variance: usize,
}

/// Above this share of zero-variance groups the reward is called sparse.
const SPARSE: f64 = 0.6;
/// Nats a token below which the policy is called unmoved.
const KL_ZERO: f64 = 1e-5;
/// Nats a token above which it is called running away.
const KL_RUNAWAY: f64 = 0.2;
/// Share of clipped tokens above which updates are called too large.
const CLIPPED: f64 = 0.3;
/// Changes of success below this are noise.
const NOISE: f64 = 0.02;

/// Reads the curves. `validations` are (step, result), ascending.
pub fn advise(
    rows: &[TrainMetricRow],
    validations: &[(u64, Validation)],
    groups: Groups,
) -> Vec<Advice> {
    let mut advice = Vec::new();
    let mut say = |code: &str, message: String| {
        advice.push(Advice {
            code: code.to_owned(),
            message,
        });
    };
    let values = |name: &str| -> Vec<f64> { curve(rows, name).map(|(_, value)| value).collect() };

    if groups.total > 0 {
        let share = groups.zero_variance as f64 / groups.total as f64;
        if share > SPARSE {
            say(
                "sparse_reward",
                format!(
                    "{:.0} % of the groups have equal rewards and teach nothing: choose tasks of 30–70 % success, sample more attempts a task, or add step rewards",
                    100.0 * share
                ),
            );
        }
    }

    let kl = values("kl");
    if kl.len() >= 5 {
        let last = tail_mean(&kl);
        if last < KL_ZERO {
            say(
                "kl_zero",
                format!(
                    "the policy has not moved from its reference (kl {last:.1e}): raise the learning rate, or check that advantages are not all zero"
                ),
            );
        } else if last > KL_RUNAWAY && last > 2.0 * kl[kl.len() / 2] {
            say(
                "kl_runaway",
                format!(
                    "the policy runs away from its reference (kl {last:.3} and rising): raise kl, lower the learning rate, or train fewer epochs on the same episodes"
                ),
            );
        }
    }

    let clipped = values("clip_share");
    if clipped.len() >= 5 && tail_mean(&clipped) > CLIPPED {
        say(
            "clipped",
            format!(
                "{:.0} % of the tokens are clipped: the updates are larger than the clip allows; lower the learning rate or roll out more often",
                100.0 * tail_mean(&clipped)
            ),
        );
    }

    let entropy = values("entropy");
    if entropy.len() >= 5 && !kl.is_empty() {
        let (first, last) = (entropy[0], tail_mean(&entropy));
        if first > 0.0 && last < 0.2 * first {
            say(
                "entropy_collapse",
                format!(
                    "entropy fell from {first:.3} to {last:.3} nats: the policy stops exploring; raise clip_high or kl, or stop earlier"
                ),
            );
        }
    }

    let (loss, held_out) = (values("loss"), values("loss_holdout"));
    if held_out.len() >= 2 && loss.len() >= 2 {
        let best = held_out.iter().copied().fold(f64::INFINITY, f64::min);
        let last = held_out[held_out.len() - 1];
        if last > 1.05 * best && tail_mean(&loss) < loss[0] {
            say(
                "over_fit",
                format!(
                    "the loss on kept-back episodes rose from {best:.4} to {last:.4} while training went on: train fewer epochs or on more episodes"
                ),
            );
        }
    }

    if let (Some((_, first)), Some((_, last))) = (validations.first(), validations.last())
        && validations.len() >= 2
    {
        let best = validations
            .iter()
            .map(|(_, v)| v.success)
            .fold(f64::NEG_INFINITY, f64::max);
        let reward_rises = loss.len() >= 2 && tail_mean(&loss) < loss[0];
        if last.success < best - NOISE && reward_rises {
            say(
                "over_fit",
                format!(
                    "success on validation tasks fell from {:.1} % to {:.1} % while the training loss still falls: stop at the best checkpoint, or train fewer epochs",
                    100.0 * best,
                    100.0 * last.success
                ),
            );
        } else if (last.success - first.success).abs() < NOISE && validations.len() >= 3 {
            say(
                "stalled",
                format!(
                    "success on validation tasks stays at {:.1} %: more or easier tasks, a larger learning rate, or imitation first",
                    100.0 * last.success
                ),
            );
        }
        if last.mean_steps > 1.2 * first.mean_steps && last.success < first.success + NOISE {
            say(
                "detours",
                format!(
                    "episodes grew from {:.1} to {:.1} steps without more success: raise the weight of the efficiency reward or lower the step limit",
                    first.mean_steps, last.mean_steps
                ),
            );
        }
        if last.tool_accuracy < first.tool_accuracy - 0.05 {
            say(
                "tool_errors",
                format!(
                    "tool accuracy fell from {:.1} % to {:.1} %: raise format_weight",
                    100.0 * first.tool_accuracy,
                    100.0 * last.tool_accuracy
                ),
            );
        }
    }
    advice
}

/// The mean of the last fifth, at least one value.
fn tail_mean(values: &[f64]) -> f64 {
    let take = (values.len() / 5).max(1);
    values[values.len() - take..].iter().sum::<f64>() / take as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Recorder;

    fn rows(curves: &[(&str, &[f64])]) -> Vec<TrainMetricRow> {
        let mut recorder = Recorder::new("t".into(), vec![]);
        for (name, values) in curves {
            for (step, value) in values.iter().enumerate() {
                recorder.push(step as u64 + 1, 0, name, *value);
            }
        }
        recorder.into_rows()
    }

    fn codes(
        curves: &[(&str, &[f64])],
        validations: &[(u64, Validation)],
        groups: Groups,
    ) -> Vec<String> {
        advise(&rows(curves), validations, groups)
            .into_iter()
            .map(|advice| advice.code)
            .collect()
    }

    fn at(step: u64, success: f64, mean_steps: f64) -> (u64, Validation) {
        (
            step,
            Validation {
                success,
                mean_steps,
                tool_accuracy: 0.9,
            },
        )
    }

    #[test]
    fn a_sound_run_needs_no_advice() {
        let curves: &[(&str, &[f64])] = &[
            ("kl", &[0.0, 0.001, 0.002, 0.004, 0.006]),
            ("clip_share", &[0.0, 0.01, 0.02, 0.02, 0.03]),
            ("entropy", &[0.5, 0.48, 0.45, 0.44, 0.43]),
            ("loss", &[0.0, -0.01, -0.02, -0.03, -0.04]),
        ];
        let validations = [at(0, 0.3, 3.0), at(50, 0.4, 3.0)];
        let groups = Groups {
            total: 100,
            zero_variance: 20,
        };
        assert!(codes(curves, &validations, groups).is_empty());
    }

    #[test]
    fn each_trouble_is_named() {
        let groups = Groups {
            total: 100,
            zero_variance: 80,
        };
        assert_eq!(codes(&[], &[], groups), ["sparse_reward"]);
        let none = Groups::default();
        assert_eq!(codes(&[("kl", &[1e-9; 6])], &[], none), ["kl_zero"]);
        assert_eq!(
            codes(&[("kl", &[0.01, 0.05, 0.1, 0.3, 0.9])], &[], none),
            ["kl_runaway"]
        );
        assert_eq!(codes(&[("clip_share", &[0.5; 5])], &[], none), ["clipped"]);
        assert_eq!(
            codes(
                &[("kl", &[0.01; 5]), ("entropy", &[1.0, 0.5, 0.3, 0.2, 0.1])],
                &[],
                none
            ),
            ["entropy_collapse"]
        );
        let falling: &[(&str, &[f64])] = &[("loss", &[1.0, 0.5, 0.2])];
        assert_eq!(
            codes(
                falling,
                &[at(0, 0.3, 3.0), at(1, 0.5, 3.0), at(2, 0.4, 3.0)],
                none
            ),
            ["over_fit"]
        );
        assert_eq!(
            codes(
                &[
                    ("loss", &[1.0, 0.5, 0.2]),
                    ("loss_holdout", &[1.0, 0.8, 0.9])
                ],
                &[],
                none
            ),
            ["over_fit"]
        );
        assert_eq!(
            codes(
                &[],
                &[at(0, 0.3, 3.0), at(1, 0.3, 3.0), at(2, 0.3, 5.0)],
                none
            ),
            ["stalled", "detours"]
        );
    }
}
