//! What credit came to, for the report card.

use std::collections::{BTreeMap, BTreeSet};

use drillyard_schema::table::{AdvantageRow, PairRow};
use drillyard_schema::{GroupId, TaskId};
use serde::{Deserialize, Serialize};

use crate::episodes::Episode;

/// Figures over all episodes that credit read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Episodes read.
    pub episodes: usize,
    /// Of these scored.
    pub scored: usize,
    /// Of these ended by infrastructure.
    pub infrastructure: usize,
    /// Of these neither: nobody judged them.
    pub unjudged: usize,
    /// Of these on tasks of public evaluation sets (imports only).
    pub evaluation_set: usize,
    /// Successes among the scored.
    pub successes: usize,
    /// Mean composed reward of the scored; null if there are none.
    pub mean_reward: Option<f64>,
    /// Mean steps of the scored; null if there are none.
    pub mean_steps_scored: Option<f64>,
    /// Mean steps of those that infrastructure ended: if they are longer, dropping them favours short answers.
    pub mean_steps_infrastructure: Option<f64>,
    /// Groups.
    pub groups: usize,
    /// Groups with both successes and failures.
    pub groups_mixed: usize,
    /// Groups whose rewards differ: what the policy loss learns from.
    pub groups_with_variance: usize,
    /// Groups whose rewards do not, of which each member succeeded.
    pub zero_variance_right: usize,
    /// Groups whose rewards do not, of which no member succeeded.
    pub zero_variance_wrong: usize,
    /// Groups without variance for another reason: one scored member or none, or a scheme that is blind to the difference.
    pub zero_variance_other: usize,
    /// The groups without variance, by name.
    pub zero_variance: Vec<ZeroVarianceGroup>,
    /// Pairs.
    pub pairs: usize,
    /// Pairs whose calls never differ.
    pub pairs_identical: usize,
    /// Tasks that have pairs.
    pub tasks_with_pairs: usize,
    /// Episodes without a score from QA, taken with weight 1.
    pub without_qa: usize,
    /// The negative control's seed, if it is one.
    pub control: Option<u64>,
    /// Episodes that carry another's outcome (control only).
    pub outcomes_moved: usize,
}

/// Why a group teaches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroVariance {
    /// Each scored member succeeded: too easy.
    AllRight,
    /// None did: too hard.
    AllWrong,
    /// Fewer than two scored members.
    TooFew,
    /// Successes and failures that the scheme rewards alike.
    Other,
}

/// A group without variance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ZeroVarianceGroup {
    /// The group.
    pub group_id: GroupId,
    /// Its task.
    pub task_id: TaskId,
    /// Episodes.
    pub total: i32,
    /// Of these scored.
    pub scored: i32,
    /// Of these ended by infrastructure.
    pub infrastructure: i32,
    /// The one reward; null without a scored member.
    pub reward: Option<f64>,
    /// Why.
    pub why: ZeroVariance,
}

/// What the rows do not hold.
pub struct Besides<'a> {
    pub episodes: &'a [Episode],
    /// Success of each episode, by id.
    pub success: &'a BTreeMap<String, Option<bool>>,
    pub pairs_identical: usize,
    pub without_qa: usize,
    pub control: Option<u64>,
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, n) = values.fold((0.0, 0usize), |(sum, n), v| (sum + v, n + 1));
    (n > 0).then(|| sum / n as f64)
}

/// Counts the rows.
pub fn summarise(advantages: &[AdvantageRow], pairs: &[PairRow], besides: &Besides<'_>) -> Summary {
    let steps: BTreeMap<&str, f64> = besides
        .episodes
        .iter()
        .map(|e| (e.episode_id.as_str(), e.n_steps as f64))
        .collect();
    let succeeded = |row: &AdvantageRow| {
        besides
            .success
            .get(row.episode_id.as_str())
            .copied()
            .flatten()
            == Some(true)
    };
    let scored = || advantages.iter().filter(|r| r.scored);
    let infrastructure = besides.episodes.iter().filter(|e| e.infrastructure).count();
    let mut groups: BTreeMap<&GroupId, Vec<&AdvantageRow>> = BTreeMap::new();
    for row in advantages {
        groups.entry(&row.group_id).or_default().push(row);
    }
    let mut summary = Summary {
        episodes: advantages.len(),
        scored: scored().count(),
        infrastructure,
        unjudged: advantages.len() - infrastructure - scored().count(),
        evaluation_set: besides.episodes.iter().filter(|e| e.evaluation_set).count(),
        successes: scored().filter(|r| succeeded(r)).count(),
        mean_reward: mean(scored().map(|r| r.reward)),
        mean_steps_scored: mean(scored().filter_map(|r| steps.get(r.episode_id.as_str()).copied())),
        mean_steps_infrastructure: mean(
            besides
                .episodes
                .iter()
                .filter(|e| e.infrastructure)
                .map(|e| e.n_steps as f64),
        ),
        groups: groups.len(),
        groups_mixed: 0,
        groups_with_variance: 0,
        zero_variance_right: 0,
        zero_variance_wrong: 0,
        zero_variance_other: 0,
        zero_variance: Vec::new(),
        pairs: pairs.len(),
        pairs_identical: besides.pairs_identical,
        tasks_with_pairs: pairs
            .iter()
            .map(|p| &p.task_id)
            .collect::<BTreeSet<_>>()
            .len(),
        without_qa: besides.without_qa,
        control: besides.control,
        outcomes_moved: besides
            .episodes
            .iter()
            .enumerate()
            .filter(|(index, e)| e.source != *index)
            .count(),
    };
    for members in groups.values() {
        let judged: Vec<bool> = members
            .iter()
            .filter(|r| r.scored)
            .map(|r| succeeded(r))
            .collect();
        let right = judged.iter().filter(|s| **s).count();
        let mixed = right > 0 && right < judged.len();
        summary.groups_mixed += usize::from(mixed);
        let first = members[0];
        if !first.zero_variance {
            summary.groups_with_variance += 1;
            continue;
        }
        let why = match judged.len() {
            0 | 1 => ZeroVariance::TooFew,
            n if right == n => ZeroVariance::AllRight,
            _ if right == 0 => ZeroVariance::AllWrong,
            _ => ZeroVariance::Other,
        };
        match why {
            ZeroVariance::AllRight => summary.zero_variance_right += 1,
            ZeroVariance::AllWrong => summary.zero_variance_wrong += 1,
            ZeroVariance::TooFew | ZeroVariance::Other => summary.zero_variance_other += 1,
        }
        summary.zero_variance.push(ZeroVarianceGroup {
            group_id: first.group_id.clone(),
            task_id: first.task_id.clone(),
            total: first.n_total,
            scored: first.n_scored,
            infrastructure: first.n_infrastructure,
            reward: first.baseline,
            why,
        });
    }
    summary
}
