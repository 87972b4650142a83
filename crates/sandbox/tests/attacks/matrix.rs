//! What came out, as a Markdown table.

use std::collections::BTreeMap;
use std::fmt;

use crate::ATTACKS;
use crate::probe::Latency;
use crate::yard::{Attack, Outcome};

#[derive(Default)]
pub struct Matrix {
    targets: Vec<&'static str>,
    skipped: Vec<(&'static str, String)>,
    cells: BTreeMap<(u32, &'static str), Outcome>,
    latencies: Vec<(&'static str, Latency)>,
}

impl Matrix {
    pub fn attacked(&mut self, target: &'static str) {
        self.targets.push(target);
    }

    pub fn skipped(&mut self, target: &'static str, reason: &str) {
        self.skipped.push((target, reason.to_owned()));
    }

    pub fn add(&mut self, attack: &Attack, target: &'static str, outcome: Outcome) {
        self.cells.insert((attack.number, target), outcome);
    }

    pub fn latency(&mut self, target: &'static str, latency: Latency) {
        self.latencies.push((target, latency));
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| # | attack |")?;
        for target in &self.targets {
            write!(f, " {target} |")?;
        }
        write!(f, "\n|--:|---|")?;
        for _ in &self.targets {
            write!(f, "---|")?;
        }
        writeln!(f)?;
        let mut notes: Vec<String> = Vec::new();
        for attack in ATTACKS {
            write!(f, "| {} | {} |", attack.number, attack.name)?;
            for target in &self.targets {
                match self.cells.get(&(attack.number, target)) {
                    None => write!(f, " not run |")?,
                    Some(Outcome::Holds) => write!(f, " holds |")?,
                    Some(Outcome::Fails { .. }) => write!(f, " **FAILS** |")?,
                    Some(Outcome::Said { limit, how, .. }) => {
                        let note = format!("{target}, {limit}: {how}");
                        let number = notes.iter().position(|n| *n == note).unwrap_or_else(|| {
                            notes.push(note);
                            notes.len() - 1
                        });
                        write!(f, " not enforceable here, and said so ({}) |", number + 1)?;
                    }
                }
            }
            writeln!(f)?;
        }
        writeln!(f)?;
        for (number, note) in notes.iter().enumerate() {
            writeln!(f, "({}) {note}", number + 1)?;
        }
        for (target, reason) in &self.skipped {
            writeln!(f, "{target}: not attacked: {reason}")?;
        }
        for (target, latency) in &self.latencies {
            writeln!(
                f,
                "{target}: fork and exec on the host meanwhile (50 ms at p99 is the target): {latency}"
            )?;
        }
        Ok(())
    }
}
