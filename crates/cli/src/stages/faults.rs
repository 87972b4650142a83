//! Controlled faults: the pipeline's settings as the sandbox crate takes them, and what the report card says of them.

use drillyard_gym::tools::TOOL_NAMES;
use drillyard_lake::Lake;
use drillyard_query::{Session, SessionOptions};
use drillyard_sandbox::{FaultKind, FaultPlan, FaultRule};
use drillyard_schema::{Purpose, RunId};
use drillyard_stage::exit::{INPUT, USAGE};
use drillyard_stage::{Failure, FaultsConfig, Pipeline};
use serde::Deserialize;

use super::qa::query_failure;

/// The faults that episodes of this purpose meet.
pub(crate) fn fault_plan(pipeline: &Pipeline, purpose: Purpose) -> Result<FaultPlan, Failure> {
    let faults = &pipeline.faults;
    let evaluates = matches!(purpose, Purpose::Validation | Purpose::HeldOut);
    if evaluates && !faults.in_evaluation {
        return Ok(FaultPlan::default());
    }
    let wrong = |why: String| Failure::new(USAGE, format!("faults.{why}"));
    let mut rules = Vec::new();
    for (name, setting) in faults.kinds() {
        let kind: FaultKind = name.parse().map_err(wrong)?;
        let tools = if setting.tools.is_empty() {
            sensible(kind)
        } else {
            setting.tools.iter().map(String::as_str).collect()
        };
        let all = sensible(FaultKind::Slow);
        if let Some(unknown) = tools.iter().find(|tool| !all.contains(tool)) {
            return Err(wrong(format!(
                "{name}.tools: no call of '{unknown}' can meet a fault"
            ))
            .hint(format!("the tools are: {}", all.join(", "))));
        }
        rules.push(FaultRule {
            kind,
            rate: setting.rate,
            tools: tools.into_iter().map(str::to_owned).collect(),
        });
    }
    FaultPlan::new(rules).map_err(|why| Failure::new(USAGE, format!("faults: {why}")))
}

/// The tools that a kind makes sense for.
fn sensible(kind: FaultKind) -> Vec<&'static str> {
    let without: &[&str] = match kind {
        FaultKind::TruncatedOutput => &["submit", "write_file"],
        FaultKind::DiskFull => &["submit", "read_file", "list_dir"],
        _ => &["submit"],
    };
    let mut tools = TOOL_NAMES.to_vec();
    tools.retain(|tool| !without.contains(tool));
    tools
}

/// What decides about faults, where there are any; runs without them keep their ids.
pub(crate) fn decides(faults: &FaultsConfig, evaluates: bool) -> Option<(&'static str, String)> {
    let on = faults.are_on() && (!evaluates || faults.in_evaluation);
    on.then(|| ("faults", serde_json::to_string(faults).unwrap_or_default()))
}

/// One row of `sql/metrics/injected_faults.sql`, as far as the card shows it.
#[derive(Deserialize)]
struct Met {
    fault: String,
    scored: i64,
    success: Option<f64>,
    lo: Option<f64>,
    hi: Option<f64>,
}

/// Success without and with each kind of fault in a run, one figure each, by name.
pub(crate) async fn figures(lake: &Lake, run: &RunId) -> Result<Vec<(String, String)>, Failure> {
    let snapshot = lake
        .snapshot()
        .await
        .map_err(|e| Failure::from_error(INPUT, &e))?;
    let options = SessionOptions {
        run: Some(run.clone()),
        ..SessionOptions::default()
    };
    let session = Session::open(&snapshot, options)
        .await
        .map_err(|e| query_failure(&e))?;
    let answer = session
        .ask("injected_faults")
        .await
        .map_err(|e| query_failure(&e))?;
    let met: Vec<Met> = answer.rows().map_err(|e| query_failure(&e))?;
    let percent =
        |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |v| format!("{:.1}", v * 100.0));
    let figure = |row: &Met| {
        format!(
            "{} % [{}, {}] of {}",
            percent(row.success),
            percent(row.lo),
            percent(row.hi),
            row.scored
        )
    };
    Ok(met
        .iter()
        .map(|row| {
            let name = match row.fault.as_str() {
                "none" => "success_without_faults".to_owned(),
                "any" => "success_with_faults".to_owned(),
                kind => format!("·_{kind}"),
            };
            (name, figure(row))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str, purpose: Purpose) -> Result<FaultPlan, Failure> {
        let text = format!("name = 'p'\n[faults]\n{text}");
        fault_plan(&Pipeline::parse(&text, "p.toml", &[]).unwrap(), purpose)
    }

    #[test]
    fn evaluations_are_free_of_faults_unless_asked() {
        for (text, expected) in [
            ("slow = 0.5", [true, false, false]),
            ("slow = 0.5\nin_evaluation = true", [true, true, true]),
            ("in_evaluation = true", [false, false, false]),
        ] {
            let purposes = [Purpose::Train, Purpose::Validation, Purpose::HeldOut];
            let on = purposes.map(|purpose| !plan(text, purpose).unwrap().is_empty());
            assert_eq!(on, expected, "{text}");
        }
    }

    #[test]
    fn tools_are_those_a_kind_makes_sense_for() {
        let full = plan("disk_full = 1", Purpose::Train).unwrap();
        assert!(full.draw(1, 0, 0, "write_file").is_some());
        assert!(full.draw(1, 0, 0, "read_file").is_none());
        let named = "slow = { rate = 1, tools = [\"read_file\"] }";
        let named = plan(named, Purpose::Train).unwrap();
        assert!(named.draw(1, 0, 0, "read_file").is_some());
        assert!(named.draw(1, 0, 0, "write_file").is_none());
    }

    #[test]
    fn mistakes_are_told() {
        for (text, words) in [
            (
                "slow = { rate = 1, tools = [\"submit\"] }",
                "faults.slow.tools",
            ),
            ("slow = 0.6\ndisk_full = 0.6", "for execute_shell"),
        ] {
            let failure = plan(text, Purpose::Train).unwrap_err();
            assert_eq!(failure.code, USAGE);
            assert!(failure.message.contains(words), "{}", failure.message);
        }
    }
}
