//! Controlled faults: which call meets which one.
//!
//! Everything here is a pure function of a seed and a call's place, so a schedule comes again on resume, on replay and in a second run
//! with the same seed. Whoever runs the calls carries the faults out; they are part of what an agent drills on, never a fault of the
//! sandbox.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::{CallOutcome, CallResult};

/// A kind of fault. The text of each is the lake's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The call takes one to two seconds longer.
    Slow,
    /// The call is refused for want of permission.
    PermissionDenied,
    /// The connection to the tool breaks before anything is done.
    NetworkFailure,
    /// Somebody else changes a file of the work directory just before the call.
    ConcurrentChange,
    /// Only the beginning of the output arrives.
    TruncatedOutput,
    /// The disk is full during the call.
    DiskFull,
}

impl FaultKind {
    /// Every kind, in the order in which they are drawn.
    pub const ALL: [Self; 6] = [
        Self::Slow,
        Self::PermissionDenied,
        Self::NetworkFailure,
        Self::ConcurrentChange,
        Self::TruncatedOutput,
        Self::DiskFull,
    ];

    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::PermissionDenied => "permission_denied",
            Self::NetworkFailure => "network_failure",
            Self::ConcurrentChange => "concurrent_change",
            Self::TruncatedOutput => "truncated_output",
            Self::DiskFull => "disk_full",
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for FaultKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| format!("there is no fault '{text}'"))
    }
}

/// How often calls of which tools meet a kind of fault.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FaultRule {
    /// The kind.
    pub kind: FaultKind,
    /// The share of those calls, 0 to 1.
    pub rate: f64,
    /// Names of the tools.
    pub tools: Vec<String>,
}

/// Which faults are injected, and how often. A call meets one at most.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultPlan {
    rules: Vec<FaultRule>,
}

/// A fault that a call is to meet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// The kind.
    pub kind: FaultKind,
    /// A number from 0 to below 1 for whatever else has to be decided: how long, which file, how much.
    pub share: f64,
}

impl Fault {
    /// How much longer a slow call takes: one to two seconds.
    pub fn delay(&self) -> Duration {
        Duration::from_millis(1000 + (self.share * 1000.0) as u64)
    }

    /// One of `n` things; none of no things.
    pub fn pick(&self, n: usize) -> Option<usize> {
        (n > 0).then(|| ((self.share * n as f64) as usize).min(n - 1))
    }

    /// How many of `len` bytes of output arrive: between a fifth and four fifths.
    pub fn kept(&self, len: usize) -> usize {
        (len as f64 * (0.2 + 0.6 * self.share)) as usize
    }
}

impl FaultPlan {
    /// A plan of these rules; those of rate 0 are left out.
    ///
    /// # Errors
    /// A rate that is none, or rates of one tool that are more than 1 together: a call meets one fault at most.
    pub fn new(rules: impl IntoIterator<Item = FaultRule>) -> Result<Self, String> {
        let mut rules: Vec<FaultRule> = rules.into_iter().collect();
        if let Some(wrong) = rules.iter().find(|r| !(0.0..=1.0).contains(&r.rate)) {
            return Err(format!(
                "{}: {} must lie between 0 and 1",
                wrong.kind, wrong.rate
            ));
        }
        rules.retain(|rule| rule.rate > 0.0 && !rule.tools.is_empty());
        rules.sort_by_key(|rule| rule.kind);
        for tool in rules.iter().flat_map(|rule| &rule.tools) {
            let sum: f64 = rules
                .iter()
                .filter(|rule| rule.tools.contains(tool))
                .map(|rule| rule.rate)
                .sum();
            if sum > 1.0 + 1e-9 {
                return Err(format!(
                    "the rates for {tool} come to {sum:.3}; a call meets one fault at most, so they may come to 1"
                ));
            }
        }
        Ok(Self { rules })
    }

    /// True where no call meets a fault.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The fault that a call meets, if any: `seed` is the episode's, `step` and `call` are the call's place in it. The same arguments
    /// give the same answer, whatever other calls there were.
    pub fn draw(&self, seed: u64, step: u32, call: u32, tool: &str) -> Option<Fault> {
        if self.is_empty() {
            return None;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"fault");
        hasher.update(&seed.to_le_bytes());
        hasher.update(&step.to_le_bytes());
        hasher.update(&call.to_le_bytes());
        let mut draws = ChaCha8Rng::from_seed(*hasher.finalize().as_bytes());
        // 53 bits: every value of the quotient is exact.
        let mut unit = || (draws.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let (chance, share) = (unit(), unit());
        let mut reached = 0.0;
        self.rules
            .iter()
            .filter(|rule| rule.tools.iter().any(|name| name == tool))
            .find(|rule| {
                reached += rule.rate;
                chance < reached
            })
            .map(|rule| Fault {
                kind: rule.kind,
                share,
            })
    }
}

impl CallResult {
    /// The result of a call that a fault kept from running: nothing was done.
    pub fn refused(outcome: CallOutcome, exit_code: i32, stderr: &str) -> Self {
        Self {
            outcome,
            exit_code: Some(exit_code),
            stderr: stderr.as_bytes().to_vec(),
            stderr_bytes: stderr.len() as u64,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(kind: FaultKind, rate: f64, tools: &[&str]) -> FaultRule {
        FaultRule {
            kind,
            rate,
            tools: tools.iter().map(|&tool| tool.to_owned()).collect(),
        }
    }

    #[test]
    fn the_same_place_meets_the_same_fault_and_places_are_independent() {
        let plan = FaultPlan::new([rule(FaultKind::Slow, 0.5, &["a"])]).unwrap();
        let schedule = |seed| -> Vec<bool> {
            (0..200)
                .map(|step| plan.draw(seed, step, 0, "a").is_some())
                .collect()
        };
        assert_eq!(schedule(1), schedule(1));
        assert_ne!(schedule(1), schedule(2));
        let by_call: Vec<bool> = (0..200)
            .map(|call| plan.draw(1, 0, call, "a").is_some())
            .collect();
        assert_ne!(by_call, schedule(1));
    }

    #[test]
    fn rates_hold_and_only_for_the_tools_named() {
        let plan = FaultPlan::new([
            rule(FaultKind::DiskFull, 0.1, &["a"]),
            rule(FaultKind::Slow, 0.2, &["a", "b"]),
        ])
        .unwrap();
        let mut counts = std::collections::BTreeMap::new();
        for step in 0..20_000 {
            for tool in ["a", "b", "c"] {
                if let Some(fault) = plan.draw(9, step, 1, tool) {
                    *counts.entry((tool, fault.kind)).or_insert(0) += 1;
                }
            }
        }
        // Three standard deviations of 20,000 draws are 170 at most.
        let near = |tool, kind, rate: f64| {
            let counted = f64::from(counts.get(&(tool, kind)).copied().unwrap_or(0));
            assert!(
                (counted - rate * 20_000.0).abs() < 170.0,
                "{tool} {kind}: {counted}"
            );
        };
        near("a", FaultKind::Slow, 0.2);
        near("a", FaultKind::DiskFull, 0.1);
        near("b", FaultKind::Slow, 0.2);
        assert_eq!(counts.len(), 3, "{counts:?}");
    }

    #[test]
    fn rates_that_make_no_sense_are_refused() {
        for rate in [-0.1, 1.1, f64::NAN] {
            let error = FaultPlan::new([rule(FaultKind::Slow, rate, &["a"])]).unwrap_err();
            assert!(error.starts_with("slow: "), "{error}");
        }
        let together = [
            rule(FaultKind::Slow, 0.7, &["a"]),
            rule(FaultKind::DiskFull, 0.7, &["a"]),
        ];
        assert!(FaultPlan::new(together).unwrap_err().contains("for a"));
        let apart = [
            rule(FaultKind::Slow, 0.7, &["a"]),
            rule(FaultKind::DiskFull, 0.7, &["b"]),
        ];
        assert!(!FaultPlan::new(apart).unwrap().is_empty());
        assert!(
            FaultPlan::new([rule(FaultKind::Slow, 0.0, &["a"])])
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn what_is_left_to_decide_stays_within_bounds() {
        for share in [0.0, 0.5, 0.999_999_999] {
            let fault = Fault {
                kind: FaultKind::Slow,
                share,
            };
            assert!((1000..=2000).contains(&fault.delay().as_millis()));
            assert!(fault.pick(3).unwrap() < 3);
            assert_eq!(fault.pick(0), None);
            assert!((20..=80).contains(&fault.kept(100)));
        }
    }

    #[test]
    fn labels_come_back() {
        for kind in FaultKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
        }
    }
}
