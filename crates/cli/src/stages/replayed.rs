//! Replays as people and programs read them. What a model wrote is one line here, and says nothing to a terminal.

use std::fmt::Write as _;

use drillyard_agent::{Difference, Replay, ReplayedCall, Sameness};
use drillyard_schema::table::EpisodeRow;
use drillyard_stage::visible_line;
use serde_json::{Value, json};

/// A replay for programs.
pub(crate) fn as_json(replay: &Replay) -> Value {
    let mut value = serde_json::to_value(replay).unwrap_or_default();
    value["same"] = replay.is_same().into();
    value["counts"] = json!({
        "same": replay.count(Sameness::Same),
        "same_but_times": replay.count(Sameness::SameButTimes),
        "differs": replay.count(Sameness::Differs),
        "not_run": replay.count(Sameness::NotRun),
    });
    value
}

/// A replay for people.
pub(crate) fn as_text(episode: &EpisodeRow, replay: &Replay) -> String {
    let mut text = format!(
        "episode {} · {} · {} · recorded {}\n",
        episode.episode_id,
        visible_line(episode.task_id.as_str()),
        visible_line(&episode.policy),
        chrono::DateTime::from_timestamp_micros(episode.started_at.0)
            .map_or_else(String::new, |at| at
                .to_rfc3339_opts(chrono::SecondsFormat::Secs, true)),
    );
    for difference in &replay.ground {
        let _ = writeln!(text, "  another {}", compared(difference));
    }
    for call in &replay.calls {
        line(&mut text, call);
    }
    let _ = writeln!(
        text,
        "{} calls: {} the same, {} the same but for the time, {} not run, {} different",
        replay.calls.len(),
        replay.count(Sameness::Same),
        replay.count(Sameness::SameButTimes),
        replay.count(Sameness::NotRun),
        replay.count(Sameness::Differs),
    );
    text
}

/// A difference on one line.
pub(crate) fn compared(difference: &Difference) -> String {
    format!(
        "{}: recorded {}, now {}",
        visible_line(&difference.what),
        visible_line(&difference.recorded),
        visible_line(&difference.replayed)
    )
}

fn line(text: &mut String, call: &ReplayedCall) {
    let says = match call.sameness {
        Sameness::Same => "same".to_owned(),
        Sameness::SameButTimes => "same but for the time".to_owned(),
        Sameness::Differs => "DIFFERS".to_owned(),
        Sameness::NotRun => {
            let why = call.why.as_deref().unwrap_or_default();
            format!("not run: {}", visible_line(why))
        }
    };
    let fault = call
        .fault
        .as_ref()
        .map_or_else(String::new, |fault| format!(" [{}]", visible_line(fault)));
    let _ = writeln!(
        text,
        "  step {} call {} {} {}{fault}: {says}",
        call.step,
        call.call,
        short(&call.tool, 40),
        short(&call.arguments, 60)
    );
    for difference in &call.differences {
        let _ = writeln!(text, "    {}", compared(difference));
        if let Some((recorded, replayed)) = &difference.lines {
            let _ = writeln!(text, "      - {}", short(recorded, 100));
            let _ = writeln!(text, "      + {}", short(replayed, 100));
        }
    }
}

/// The beginning of a text, on one line.
fn short(text: &str, most: usize) -> String {
    let line = visible_line(text);
    if line.chars().count() <= most {
        return line.into_owned();
    }
    line.chars().take(most).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_wrote_stays_on_its_line() {
        let nasty = "\u{1b}[2Jx\nstep 9: same\r\u{202e}";
        let call = ReplayedCall {
            step: 0,
            call: 0,
            tool: nasty.to_owned(),
            arguments: nasty.to_owned(),
            fault: Some(nasty.to_owned()),
            sameness: Sameness::Differs,
            why: None,
            differences: vec![Difference {
                what: format!("file {nasty}"),
                recorded: nasty.to_owned(),
                replayed: nasty.to_owned(),
                lines: Some((nasty.to_owned(), nasty.to_owned())),
            }],
        };
        let not_run = ReplayedCall {
            sameness: Sameness::NotRun,
            why: Some(nasty.to_owned()),
            differences: Vec::new(),
            ..call.clone()
        };
        let mut text = String::new();
        line(&mut text, &call);
        line(&mut text, &not_run);
        assert_eq!(text.lines().count(), 5, "{text}");
        assert_eq!(drillyard_stage::visible(&text), text);
    }
}
