//! From raw reward components to one reward for each step.
//!
//! Environments emit raw components and never weigh them; a [`Scheme`] does. The rewards of the steps add up to the reward of
//! the episode, so that returns and advantages speak of the same thing.
//!
//! Raw values, as environments emit them:
//! - `outcome`, for the whole episode: 0 to 1, where 1 is success and what lies between is partial success;
//! - `format`, for a step: 1 a well-formed call, -1 none that could be read, 0 a repaired one;
//! - `milestone`, for a step: the share of the task's milestones first reached there; negative for a node that was spoilt;
//! - `repeat` and `violation`, for a step: how often it repeats an earlier call, or breaks a rule;
//! - `novelty`, for a step: 1 for a call that leads somewhere new;
//! - anything else is the source's own and counts only if the scheme names it.
//!
//! Efficiency is not emitted but derived: `1 - steps / max_steps` (at least 0), and only successful episodes earn it. Otherwise
//! giving up at once would be the cheapest way to some reward, and groups without a single success would train haste.

/// One raw component of one episode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Component<'a> {
    /// The step it belongs to; `None` for the whole episode.
    pub step: Option<usize>,
    /// Its name.
    pub name: &'a str,
    /// Its raw value.
    pub value: f64,
}

/// What the outcome is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outcome {
    /// The raw value times a weight.
    Linear {
        /// The weight.
        weight: f64,
    },
    /// Fixed rewards for success (raw 1) and failure (raw 0 or less); partial success earns its raw value times `partial`.
    Graded {
        /// For success.
        success: f64,
        /// Times the raw value, for what lies between.
        partial: f64,
        /// For failure.
        failure: f64,
    },
}

impl Outcome {
    /// The reward for a raw outcome.
    pub fn reward(self, raw: f64) -> f64 {
        match self {
            Self::Linear { weight } => weight * raw,
            Self::Graded { success, .. } if raw >= 1.0 => success,
            Self::Graded { failure, .. } if raw <= 0.0 => failure,
            Self::Graded { partial, .. } => partial * raw,
        }
    }
}

/// What a component other than the outcome is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTerm<'a> {
    /// The component.
    pub component: &'a str,
    /// Reward for a raw value of 1; negative for a penalty.
    pub weight: f64,
    /// Divide by the number of steps, so that a longer episode earns no more of it.
    pub mean_over_steps: bool,
}

/// How components become rewards.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheme<'a> {
    /// What the outcome is worth.
    pub outcome: Outcome,
    /// What the other components are worth; unnamed ones count nothing.
    pub terms: Vec<StepTerm<'a>>,
    /// Weight of the derived efficiency.
    pub efficiency: f64,
    /// The number of steps at which efficiency is 0.
    pub max_steps: u32,
}

const fn term(component: &str, weight: f64, mean_over_steps: bool) -> StepTerm<'_> {
    StepTerm {
        component,
        weight,
        mean_over_steps,
    }
}

impl Scheme<'static> {
    /// 0.5 completion + 0.3 step + 0.1 efficiency - 0.1 violation, where the step part is milestones reached.
    pub fn weighted(max_steps: u32) -> Self {
        Self {
            outcome: Outcome::Linear { weight: 0.5 },
            terms: vec![term("milestone", 0.3, false), term("violation", -0.1, true)],
            efficiency: 0.1,
            max_steps,
        }
    }

    /// +1, partial or -0.5 at the end; a few percent of that along the way for milestones and format, against repeats and
    /// violations.
    pub fn graded() -> Self {
        Self {
            outcome: Outcome::Graded {
                success: 1.0,
                partial: 0.5,
                failure: -0.5,
            },
            terms: vec![
                term("format", 0.02, true),
                term("milestone", 0.05, false),
                term("novelty", 0.01, false),
                term("repeat", -0.02, false),
                term("violation", -0.05, false),
            ],
            efficiency: 0.0,
            max_steps: 1,
        }
    }

    /// Outcome and format, nothing else.
    pub fn outcome_and_format() -> Self {
        Self {
            outcome: Outcome::Linear { weight: 1.0 },
            terms: vec![term("format", 0.05, true)],
            efficiency: 0.0,
            max_steps: 1,
        }
    }
}

/// The rewards of one episode.
#[derive(Debug, Clone, PartialEq)]
pub struct Composed {
    /// Of the whole episode: the sum of the steps' rewards, where there are steps.
    pub total: f64,
    /// Of each step. What belongs to the whole episode, or to a step past the end, falls on the last one.
    pub steps: Vec<f64>,
}

/// Composes the components of one episode of `steps` steps. `None` if it has no `outcome`: an episode that nobody judged has no
/// reward. Several components of the same name add up.
pub fn compose(
    scheme: &Scheme<'_>,
    components: &[Component<'_>],
    steps: usize,
) -> Option<Composed> {
    let mut outcome = None;
    let mut rewards = vec![0.0; steps.max(1)];
    let last = rewards.len() - 1;
    for component in components {
        if component.name == "outcome" {
            *outcome.get_or_insert(0.0) += component.value;
            continue;
        }
        for term in scheme
            .terms
            .iter()
            .filter(|t| t.component == component.name)
        {
            let share = if term.mean_over_steps {
                steps.max(1) as f64
            } else {
                1.0
            };
            rewards[component.step.unwrap_or(last).min(last)] +=
                term.weight * component.value / share;
        }
    }
    let outcome = outcome?;
    rewards[last] += scheme.outcome.reward(outcome);
    if outcome >= 1.0 {
        let spare = 1.0 - steps as f64 / f64::from(scheme.max_steps.max(1));
        rewards[last] += scheme.efficiency * spare.max(0.0);
    }
    let total = rewards.iter().sum();
    rewards.truncate(steps);
    Some(Composed {
        total,
        steps: rewards,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::assert_close;
    use proptest::prelude::*;

    fn at(step: usize, name: &str, value: f64) -> Component<'_> {
        Component {
            step: Some(step),
            name,
            value,
        }
    }

    fn whole(name: &str, value: f64) -> Component<'_> {
        Component {
            step: None,
            name,
            value,
        }
    }

    #[test]
    fn the_weighted_scheme_adds_its_four_parts() {
        let components = [
            whole("outcome", 1.0),
            at(0, "milestone", 0.5),
            at(1, "milestone", 0.5),
            at(1, "violation", 1.0),
        ];
        let composed = compose(&Scheme::weighted(10), &components, 4).unwrap();
        assert_close(
            &composed.steps,
            &[0.15, 0.15 - 0.025, 0.0, 0.5 + 0.06],
            1e-12,
        );
        assert!((composed.total - (0.5 + 0.3 + 0.06 - 0.025)).abs() < 1e-12);
    }

    #[test]
    fn failing_fast_earns_no_efficiency() {
        let failed = compose(&Scheme::weighted(10), &[whole("outcome", 0.0)], 1).unwrap();
        assert!(failed.total.abs() < 1e-12);
    }

    #[test]
    fn the_graded_scheme_ends_in_one_of_three_rewards() {
        let total = |raw| {
            compose(&Scheme::graded(), &[whole("outcome", raw)], 2)
                .unwrap()
                .total
        };
        assert_close(
            &[total(1.0), total(0.4), total(0.0)],
            &[1.0, 0.2, -0.5],
            1e-12,
        );
        let repeats = [
            whole("outcome", 1.0),
            at(1, "repeat", 1.0),
            at(2, "repeat", 1.0),
        ];
        let composed = compose(&Scheme::graded(), &repeats, 3).unwrap();
        assert_close(&composed.steps, &[0.0, -0.02, 0.98], 1e-12);
    }

    #[test]
    fn step_terms_of_the_graded_scheme_are_one_to_five_percent_of_success() {
        for term in Scheme::graded().terms {
            assert!(
                (0.01..=0.05).contains(&term.weight.abs()),
                "{}",
                term.component
            );
        }
    }

    #[test]
    fn a_longer_episode_earns_no_more_for_format() {
        let total = |steps| {
            let mut components = vec![whole("outcome", 1.0)];
            components.extend((0..steps).map(|s| at(s, "format", 1.0)));
            compose(&Scheme::outcome_and_format(), &components, steps)
                .unwrap()
                .total
        };
        assert_close(&[total(1), total(9)], &[1.05, 1.05], 1e-12);
    }

    #[test]
    fn without_an_outcome_there_is_no_reward() {
        assert_eq!(compose(&Scheme::graded(), &[at(0, "format", 1.0)], 1), None);
    }

    #[test]
    fn an_episode_without_steps_still_has_its_outcome() {
        let composed = compose(&Scheme::graded(), &[whole("outcome", 0.0)], 0).unwrap();
        assert_eq!((composed.total, composed.steps.len()), (-0.5, 0));
    }

    proptest! {
        #[test]
        fn step_rewards_add_up_to_the_total(
            steps in 1usize..8,
            raw in 0.0..=1.0f64,
            parts in prop::collection::vec((prop::option::of(0usize..10), 0usize..5, -1.0..1.0f64), 0..20),
        ) {
            let names = ["format", "milestone", "repeat", "violation", "turn_reward"];
            let mut components = vec![whole("outcome", raw)];
            components.extend(parts.iter().map(|(step, name, value)| Component { step: *step, name: names[*name], value: *value }));
            for scheme in [Scheme::weighted(6), Scheme::graded(), Scheme::outcome_and_format()] {
                let composed = compose(&scheme, &components, steps).unwrap();
                prop_assert_eq!(composed.steps.len(), steps);
                prop_assert!((composed.total - composed.steps.iter().sum::<f64>()).abs() < 1e-9);
            }
        }
    }
}
