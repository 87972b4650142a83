//! The report card.

use std::collections::BTreeMap;
use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::evaluation::{Interval, PolicyFigures};

/// One stage's part of the card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageSection {
    /// The stage.
    pub stage: String,
    /// True where nothing had to be done.
    pub up_to_date: bool,
    /// How long it took when it ran.
    pub seconds: f64,
    /// Version of each table read.
    pub read: BTreeMap<String, i64>,
    /// What it wrote.
    pub written: Value,
    /// Its figures.
    pub figures: Value,
}

/// The report card of a run: stage by stage, then the policies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// The pipeline.
    pub pipeline: String,
    /// The rollout or import it is about.
    pub run_id: String,
    /// When the card was made, RFC 3339.
    pub created_at: String,
    /// Drillyard's version.
    pub drillyard_version: String,
    /// Processors and memory.
    pub machine: String,
    /// Stage by stage, in order.
    pub stages: Vec<StageSection>,
    /// The policy that made the episodes, on held-out tasks.
    pub base: Option<PolicyFigures>,
    /// The trained policy, on the same tasks.
    pub candidate: Option<PolicyFigures>,
    /// Candidate minus base over the same tasks.
    pub difference: Option<Interval>,
    /// What to type next.
    pub next: String,
}

impl Card {
    /// The card as JSON.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// The card as text, with deltas to `previous` where there is one.
    pub fn to_text(&self, previous: Option<&Self>) -> String {
        let mut out = String::new();
        let rule = "─".repeat(78);
        let _ = writeln!(
            out,
            "{rule}\nReport card · {} · {}\n{} · Drillyard {} · {}\n{rule}",
            self.pipeline, self.run_id, self.created_at, self.drillyard_version, self.machine
        );
        for section in &self.stages {
            let how = if section.up_to_date {
                "up to date".to_owned()
            } else {
                format!("{:.1} s", section.seconds)
            };
            let _ = writeln!(out, "\n{} ({how})", section.stage);
            if !section.read.is_empty() {
                let read: Vec<String> = section
                    .read
                    .iter()
                    .map(|(table, version)| format!("{table}@{version}"))
                    .collect();
                let _ = writeln!(out, "  read     {}", read.join(" "));
            }
            if !section.written.is_null() {
                let _ = writeln!(out, "  wrote    {}", inline(&section.written));
            }
            let before =
                previous.and_then(|card| card.stages.iter().find(|s| s.stage == section.stage));
            for (name, value) in section.figures.as_object().into_iter().flatten() {
                if !fits(value) {
                    continue;
                }
                let delta = before
                    .and_then(|s| delta(s.figures.get(name), value))
                    .unwrap_or_default();
                let _ = writeln!(
                    out,
                    "  {:<24} {}{delta}",
                    name.replace('_', " "),
                    inline(value)
                );
            }
        }
        self.policies(&mut out, previous);
        if !self.next.is_empty() {
            let _ = writeln!(out, "\nnext: {}", self.next);
        }
        out
    }

    fn policies(&self, out: &mut String, previous: Option<&Self>) {
        let Some(base) = &self.base else { return };
        let _ = writeln!(
            out,
            "\nheld-out tasks, {} episodes each, temperature {}",
            base.episodes, base.temperature
        );
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let candidate = self.candidate.as_ref();
        table.set_header(vec![
            "",
            "base",
            if candidate.is_some() { "candidate" } else { "" },
        ]);
        let mut row = |name: &str, show: &dyn Fn(&PolicyFigures) -> String| {
            table.add_row(vec![
                name.to_owned(),
                show(base),
                candidate.map(show).unwrap_or_default(),
            ]);
        };
        row("success", &|p| percent(Some(&p.success)));
        row("success, families never trained on", &|p| {
            percent(p.unseen.as_ref())
        });
        for k in base.pass_at.keys().filter(|k| **k > 1) {
            row(&format!("pass@{k}"), &|p| {
                p.pass_at
                    .get(k)
                    .map_or_else(String::new, |v| format!("{:.1} %", v * 100.0))
            });
        }
        row("mean steps", &|p| format!("{:.2}", p.mean_steps));
        row("tool-call accuracy", &|p| {
            format!("{:.1} %", p.tool_accuracy * 100.0)
        });
        row("successes per 1,000 tokens", &|p| {
            format!("{:.2}", p.success_per_1k_tokens)
        });
        row("not scored (infrastructure)", &|p| {
            p.infrastructure.to_string()
        });
        let mut faults: Vec<&String> = Vec::new();
        let shown = [Some(base), candidate];
        for (name, _) in shown.into_iter().flatten().flat_map(|p| &p.faults) {
            if !faults.contains(&name) {
                faults.push(name);
            }
        }
        for name in faults {
            let label = name.replace('_', " ");
            let label = if label.starts_with('·') {
                label
            } else {
                format!("{label}, all families")
            };
            row(&label, &|p| {
                let of_name = p.faults.iter().find(|(other, _)| other == name);
                of_name.map_or_else(String::new, |(_, figure)| figure.clone())
            });
        }
        for family in base.families.keys() {
            row(&format!("· {family}"), &|p| {
                p.families.get(family).map_or_else(String::new, |i| {
                    format!("{:.0} % of {}", i.value * 100.0, i.n)
                })
            });
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let _ = writeln!(out, "{table}");
        if let Some(difference) = &self.difference {
            let verdict = if difference.lo > 0.0 {
                "the candidate is better"
            } else if difference.hi < 0.0 {
                "the candidate is worse"
            } else {
                "no difference shown"
            };
            let _ = writeln!(
                out,
                "\ncandidate − base: {:+.1} points [{:+.1}, {:+.1}], paired over {} tasks: {verdict}",
                difference.value * 100.0,
                difference.lo * 100.0,
                difference.hi * 100.0,
                difference.n
            );
            if let Some(before) = previous.and_then(|card| card.difference) {
                let _ = writeln!(out, "last run: {:+.1} points", before.value * 100.0);
            }
        }
    }
}

fn percent(interval: Option<&Interval>) -> String {
    interval.map_or_else(String::new, |i| {
        format!(
            "{:.1} % [{:.1}, {:.1}]",
            i.value * 100.0,
            i.lo * 100.0,
            i.hi * 100.0
        )
    })
}

/// True for what a line of the card can show; the rest is in `--json`.
fn fits(value: &Value) -> bool {
    let flat = value
        .as_object()
        .is_none_or(|map| !map.values().any(Value::is_object));
    let text = if flat { inline(value) } else { String::new() };
    !value.is_null() && (1..=110).contains(&text.chars().count())
}

/// A value on one line: numbers and hashes short, objects as `name value` pairs, long lists counted.
pub fn inline(value: &Value) -> String {
    match value {
        Value::Number(n) => match n.as_f64() {
            Some(f) if n.is_f64() => {
                if f != 0.0 && f.abs() < 0.01 {
                    format!("{f:.5}")
                } else {
                    format!("{f:.3}")
                }
            }
            _ => n.to_string(),
        },
        Value::String(text) if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) => {
            text[..12].to_owned()
        }
        Value::String(text) => text.clone(),
        Value::Array(items) if items.len() > 6 => format!("{} items", items.len()),
        Value::Array(items) => items.iter().map(inline).collect::<Vec<_>>().join("; "),
        Value::Object(map) => map
            .iter()
            .map(|(k, v)| format!("{} {}", k.replace('_', " "), inline(v)))
            .collect::<Vec<_>>()
            .join(" · "),
        other => other.to_string(),
    }
}

fn delta(before: Option<&Value>, now: &Value) -> Option<String> {
    let (before, now) = (before?.as_f64()?, now.as_f64()?);
    let change = now - before;
    (change.abs() > 1e-9 * now.abs().max(1.0)).then(|| {
        if change.fract() == 0.0 {
            format!("  ({change:+})")
        } else {
            format!("  ({change:+.3})")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(success: f64) -> Card {
        let interval = Interval {
            value: success,
            lo: success - 0.05,
            hi: success + 0.05,
            n: 400,
        };
        let policy = PolicyFigures {
            policy: "base".into(),
            revision: "r".into(),
            temperature: 1.0,
            success: interval,
            unseen: None,
            pass_at: BTreeMap::new(),
            mean_steps: 3.0,
            tool_accuracy: 0.9,
            success_per_1k_tokens: 4.0,
            families: BTreeMap::from([("filter".to_owned(), interval)]),
            episodes: 400,
            infrastructure: 0,
            faults: Vec::new(),
        };
        Card {
            pipeline: "quickstart".into(),
            run_id: "quickstart-0".into(),
            created_at: "2026-01-02T03:04:05Z".into(),
            drillyard_version: "0.1.0".into(),
            machine: "2 cores".into(),
            stages: vec![StageSection {
                stage: "rollout".into(),
                up_to_date: false,
                seconds: 12.0,
                read: BTreeMap::new(),
                written: serde_json::json!({ "episodes": 3 }),
                figures: serde_json::json!({ "episodes": 3200, "success": success }),
            }],
            base: Some(policy.clone()),
            candidate: Some(policy),
            difference: Some(Interval {
                value: 0.2,
                lo: 0.1,
                hi: 0.3,
                n: 400,
            }),
            next: "make nights".into(),
        }
    }

    #[test]
    fn the_text_shows_figures_deltas_and_the_next_command() {
        insta::assert_snapshot!(card(0.5).to_text(Some(&card(0.4))));
    }

    #[test]
    fn an_evaluation_with_faults_shows_success_without_and_with_them() {
        let mut card = card(0.5);
        let met = |name: &str, figure: &str| (name.to_owned(), figure.to_owned());
        if let (Some(base), Some(candidate)) = (&mut card.base, &mut card.candidate) {
            base.faults = vec![met("success_without_faults", "60.0 % of 9")];
            candidate.faults = vec![
                met("success_without_faults", "80.0 % of 8"),
                met("·_disk_full", "10.0 % of 2"),
            ];
        }
        let text = card.to_text(None);
        let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap();
        let both = line("success without faults, all families");
        assert!(
            both.contains("60.0 % of 9") && both.contains("80.0 % of 8"),
            "{text}"
        );
        assert!(line("· disk full").contains("10.0 % of 2"), "{text}");
        let kept: Card = serde_json::from_value(card.to_json()).unwrap();
        assert_eq!(kept, card);
    }

    #[test]
    fn what_fits_no_line_is_left_to_the_json() {
        let value = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert!(fits(&value(r#"{"total":400,"mixed":387}"#)));
        assert!(fits(&value("0.5")));
        for text in [r#"{"a":{"b":1}}"#, "null", "[]"] {
            assert!(!fits(&value(text)), "{text}");
        }
        assert!(!fits(&Value::String("x".repeat(200))));
        assert_eq!(inline(&Value::String("ab".repeat(32))), "abababababab");
    }

    #[test]
    fn json_names_success_with_its_interval() {
        let json = card(0.5).to_json();
        for key in ["value", "lo", "hi", "n"] {
            assert!(json["base"]["success"][key].is_number(), "{key}");
            assert!(json["candidate"]["success"][key].is_number(), "{key}");
        }
    }
}
