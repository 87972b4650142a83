//! Figures of a policy over a set of tasks, and of two policies over the same tasks.

use std::collections::{BTreeMap, BTreeSet};

use drillyard_credit_math as math;
use drillyard_schema::EpisodeId;
use drillyard_schema::table::{EpisodeRow, ToolCallRow, VerdictRow};
use serde::{Deserialize, Serialize};

/// A rate or difference with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower bound.
    pub lo: f64,
    /// Upper bound.
    pub hi: f64,
    /// Number of tasks behind it.
    pub n: u64,
}

/// How a policy does on a set of tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyFigures {
    /// The policy's name.
    pub policy: String,
    /// Hash of its weights.
    pub revision: String,
    /// Sampling temperature.
    pub temperature: f64,
    /// Success on the families that training contains: the mean over tasks of each task's success rate.
    pub success: Interval,
    /// Success on families never trained on.
    pub unseen: Option<Interval>,
    /// Unbiased pass@k for each k up to the number of samples (Chen et al. 2021, equation 1).
    pub pass_at: BTreeMap<u32, f64>,
    /// Mean number of steps.
    pub mean_steps: f64,
    /// Share of tool calls that ran and succeeded.
    pub tool_accuracy: f64,
    /// Successes per thousand generated tokens.
    pub success_per_1k_tokens: f64,
    /// Success by family, those never trained on included.
    pub families: BTreeMap<String, Interval>,
    /// Episodes looked at.
    pub episodes: u64,
    /// Of these ended by infrastructure, and so not scored.
    pub infrastructure: u64,
    /// Success without and with faults that were injected, by name, as text; none where the evaluation had none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<(String, String)>,
}

/// Success of each scored episode by task.
pub type Outcomes = BTreeMap<String, Vec<bool>>;

/// The final verdict of each episode: verified over re-verified over recorded; judges don't count.
pub fn final_verdicts(verdicts: &[VerdictRow]) -> BTreeMap<&EpisodeId, bool> {
    let rank = |kind: &str| match kind {
        "verified" => 0,
        "re_verified" => 1,
        "recorded" => 2,
        _ => 3,
    };
    let mut best: BTreeMap<&EpisodeId, (i32, bool)> = BTreeMap::new();
    for verdict in verdicts {
        let Some(success) = verdict.success else {
            continue;
        };
        let rank = rank(&verdict.kind);
        if rank == 3 {
            continue;
        }
        let entry = best.entry(&verdict.episode_id).or_insert((rank, success));
        if rank < entry.0 {
            *entry = (rank, success);
        }
    }
    best.into_iter()
        .map(|(id, (_, success))| (id, success))
        .collect()
}

/// Groups scored episodes by task; infrastructure failures and episodes without a verdict are left out.
pub fn outcomes(
    episodes: &[EpisodeRow],
    verdicts: &[VerdictRow],
    keep: impl Fn(&EpisodeRow) -> bool,
) -> Outcomes {
    let verdicts = final_verdicts(verdicts);
    let mut tasks = Outcomes::new();
    for episode in episodes
        .iter()
        .filter(|e| e.status == "finished" && keep(e))
    {
        if let Some(success) = verdicts.get(&episode.episode_id) {
            tasks
                .entry(episode.task_id.to_string())
                .or_default()
                .push(*success);
        }
    }
    tasks
}

fn rate(runs: &[bool]) -> f64 {
    runs.iter().filter(|s| **s).count() as f64 / runs.len() as f64
}

/// Mean over tasks of the tasks' success rates. Where every task either always or never succeeded (with one episode a task that is so)
/// this is a proportion of tasks and gets Wilson's interval, which has a width at 0 and 1 too; else the normal interval of the mean over
/// tasks.
pub fn success(outcomes: &Outcomes) -> Option<Interval> {
    let rates: Vec<f64> = outcomes.values().map(|runs| rate(runs)).collect();
    if rates.is_empty() {
        return None;
    }
    let n = rates.len() as u64;
    if outcomes
        .values()
        .all(|runs| runs.windows(2).all(|pair| pair[0] == pair[1]))
    {
        let wins = rates.iter().filter(|r| **r > 0.5).count();
        let interval = math::wilson_interval(wins, rates.len())?;
        return Some(Interval {
            value: interval.value,
            lo: interval.lo,
            hi: interval.hi,
            n,
        });
    }
    let (value, lo, hi) = mean_interval(&rates);
    Some(Interval {
        value,
        lo: lo.max(0.0),
        hi: hi.min(1.0),
        n,
    })
}

/// Mean with its normal 95 % interval.
fn mean_interval(values: &[f64]) -> (f64, f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = if values.len() > 1 {
        values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0)
    } else {
        0.0
    };
    let half = 1.96 * (variance / n).sqrt();
    (mean, mean - half, mean + half)
}

/// Mean difference in success rate over the tasks that both attempted, with the paired 95 % interval.
pub fn paired_difference(base: &Outcomes, candidate: &Outcomes) -> Option<Interval> {
    let differences: Vec<f64> = candidate
        .iter()
        .filter_map(|(task, runs)| base.get(task).map(|other| rate(runs) - rate(other)))
        .collect();
    if differences.is_empty() {
        return None;
    }
    let (value, lo, hi) = mean_interval(&differences);
    Some(Interval {
        value,
        lo,
        hi,
        n: differences.len() as u64,
    })
}

/// All figures of one policy. `unseen` holds the families never trained on.
pub fn policy_figures(
    name: &str,
    episodes: &[EpisodeRow],
    verdicts: &[VerdictRow],
    calls: &[ToolCallRow],
    unseen: &BTreeSet<String>,
) -> Option<PolicyFigures> {
    let first = episodes.first()?;
    let seen = outcomes(episodes, verdicts, |e| !unseen.contains(&e.family));
    let apart = outcomes(episodes, verdicts, |e| unseen.contains(&e.family));
    let names: BTreeSet<&String> = episodes.iter().map(|e| &e.family).collect();
    let families = names
        .into_iter()
        .filter_map(|family| {
            success(&outcomes(episodes, verdicts, |e| e.family == *family))
                .map(|interval| (family.clone(), interval))
        })
        .collect();

    let mut pass_at = BTreeMap::new();
    let samples = seen.values().map(Vec::len).min().unwrap_or(0);
    for k in [1, 2, 4, 8].into_iter().filter(|k| *k <= samples) {
        let estimates: Vec<f64> = seen
            .values()
            .filter_map(|runs| math::pass_at_k(runs.len(), runs.iter().filter(|s| **s).count(), k))
            .collect();
        pass_at.insert(
            k as u32,
            estimates.iter().sum::<f64>() / estimates.len() as f64,
        );
    }

    let scored: Vec<&EpisodeRow> = episodes
        .iter()
        .filter(|e| e.status == "finished" && !unseen.contains(&e.family))
        .collect();
    let ids: BTreeSet<&EpisodeId> = scored.iter().map(|e| &e.episode_id).collect();
    let calls: Vec<&ToolCallRow> = calls
        .iter()
        .filter(|c| ids.contains(&c.episode_id))
        .collect();
    let wins: usize = seen.values().flatten().filter(|s| **s).count();
    let tokens: i64 = scored.iter().map(|e| e.generated_tokens).sum();
    Some(PolicyFigures {
        policy: name.to_owned(),
        revision: first.policy_revision.clone(),
        temperature: first.temperature,
        success: success(&seen)?,
        unseen: success(&apart),
        pass_at,
        mean_steps: scored.iter().map(|e| f64::from(e.n_steps)).sum::<f64>()
            / scored.len().max(1) as f64,
        tool_accuracy: calls.iter().filter(|c| c.outcome == "ok").count() as f64
            / calls.len().max(1) as f64,
        success_per_1k_tokens: if tokens > 0 {
            wins as f64 * 1000.0 / tokens as f64
        } else {
            0.0
        },
        families,
        episodes: episodes.len() as u64,
        infrastructure: episodes.iter().filter(|e| e.status != "finished").count() as u64,
        faults: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes_of(rows: &[(&str, &[bool])]) -> Outcomes {
        rows.iter()
            .map(|(task, runs)| ((*task).to_owned(), runs.to_vec()))
            .collect()
    }

    #[test]
    fn one_episode_a_task_is_a_proportion() {
        let interval = success(&outcomes_of(&[
            ("a", &[true]),
            ("b", &[false]),
            ("c", &[true]),
            ("d", &[true]),
        ]))
        .unwrap();
        assert!((interval.value - 0.75).abs() < 1e-12);
        assert!(
            interval.lo > 0.2 && interval.hi < 1.0 && interval.n == 4,
            "{interval:?}"
        );
    }

    #[test]
    fn never_is_an_interval_with_a_width() {
        let never = success(&outcomes_of(&[
            ("a", &[false, false]),
            ("b", &[false, false]),
        ]))
        .unwrap();
        assert!(never.value == 0.0 && never.hi > 0.5, "{never:?}");
    }

    #[test]
    fn the_difference_pairs_tasks_and_ignores_those_only_one_attempted() {
        let base = outcomes_of(&[
            ("a", &[false, false]),
            ("b", &[true, false]),
            ("only", &[true]),
        ]);
        let candidate = outcomes_of(&[("a", &[true, false]), ("b", &[true, true])]);
        let interval = paired_difference(&base, &candidate).unwrap();
        assert!((interval.value - 0.5).abs() < 1e-12);
        assert_eq!(interval.n, 2);
    }

    #[test]
    fn equal_policies_differ_by_nothing() {
        let a = outcomes_of(&[("a", &[true]), ("b", &[false])]);
        let interval = paired_difference(&a, &a).unwrap();
        assert_eq!((interval.value, interval.lo, interval.hi), (0.0, 0.0, 0.0));
    }
}
