//! What a rollout says of itself while it runs.

use std::fmt::Write as _;
use std::time::Duration;

use drillyard_stage::Bar;

/// How far a rollout is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProgressState {
    /// Episodes asked for.
    pub total: usize,
    /// Of these, in the lake from an earlier execution.
    pub earlier: usize,
    /// Of these, ended now.
    pub done: usize,
    /// Of those ended now, scored.
    pub scored: usize,
    /// Of the scored, successful.
    pub successes: usize,
    /// Episodes that infrastructure ended (retried ones included).
    pub infrastructure: usize,
    /// Model turns taken.
    pub steps: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Since the start.
    pub elapsed: Duration,
}

impl ProgressState {
    /// Successes among the scored; none while nothing is scored.
    pub fn success_rate(&self) -> Option<f64> {
        (self.scored > 0).then(|| self.successes as f64 / self.scored as f64)
    }

    fn per_second(&self, count: f64) -> f64 {
        count / self.elapsed.as_secs_f64().max(1e-3)
    }

    /// Episodes ended per second.
    pub fn episodes_per_s(&self) -> f64 {
        self.per_second(self.done as f64)
    }

    /// Model turns per second.
    pub fn steps_per_s(&self) -> f64 {
        self.per_second(self.steps as f64)
    }

    /// Time to the end at the present pace; none while nothing has ended.
    pub fn eta(&self) -> Option<Duration> {
        let left = self.total.saturating_sub(self.earlier + self.done);
        let pace = self.episodes_per_s();
        (pace > 0.0).then(|| Duration::from_secs_f64(left as f64 / pace))
    }

    /// The figures in one line.
    pub fn line(&self) -> String {
        let mut line = String::new();
        if let Some(rate) = self.success_rate() {
            let _ = write!(line, "{:.0} % success · ", rate * 100.0);
        }
        let _ = write!(
            line,
            "{:.1} episodes/s · {:.0} steps/s",
            self.episodes_per_s(),
            self.steps_per_s()
        );
        if self.infrastructure > 0 {
            let _ = write!(line, " · {} infrastructure", self.infrastructure);
        }
        if let Some(eta) = self.eta() {
            let _ = write!(line, " · {} s left", eta.as_secs());
        }
        line
    }
}

/// Something that shows how far a rollout is.
pub trait Progress: Send + Sync {
    /// Called several times a second at most, and after the last episode.
    fn update(&self, state: &ProgressState);
}

/// Shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn update(&self, _state: &ProgressState) {}
}

impl Progress for Bar {
    fn update(&self, state: &ProgressState) {
        self.set_total(state.total as u64);
        self.set((state.earlier + state.done) as u64, state.line());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_this_execution() {
        let state = ProgressState {
            total: 100,
            earlier: 40,
            done: 20,
            scored: 16,
            successes: 4,
            infrastructure: 4,
            steps: 60,
            generated_tokens: 0,
            elapsed: Duration::from_secs(10),
        };
        assert_eq!(state.success_rate(), Some(0.25));
        assert_eq!(state.eta(), Some(Duration::from_secs(20)));
        assert_eq!(
            state.line(),
            "25 % success · 2.0 episodes/s · 6 steps/s · 4 infrastructure · 20 s left"
        );
    }

    #[test]
    fn an_empty_state_divides_by_nothing() {
        let state = ProgressState::default();
        assert_eq!(state.success_rate(), None);
        assert_eq!(state.eta(), None);
    }
}
