//! `drillyard report`: the last report card, and how cards are put together.

use camino::Utf8PathBuf;
use drillyard_report::evaluation::{Interval, PolicyFigures};
use drillyard_report::{Card, StageSection};
use drillyard_schema::DRILLYARD_VERSION;
use drillyard_stage::exit::{INPUT, OK};
use drillyard_stage::{Failure, Record};

use crate::context::{Context, Run, write_atomically};

/// Prints the last card.
pub(crate) fn run(context: &Context, json: bool) -> Result<u8, Failure> {
    let path = card_path(context)?;
    let card = read(&path).ok_or_else(|| {
        Failure::new(
            INPUT,
            format!("pipeline {} has no report card yet", context.pipeline.name),
        )
        .hint("run `make rollout qa train` first")
    })?;
    let ui = &context.ui;
    let written = if json {
        ui.data(&format!("{:#}\n", card.to_json()))
    } else {
        ui.text(&card.to_text(None))
    };
    written.map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}

fn card_path(context: &Context) -> Result<Utf8PathBuf, Failure> {
    Ok(context
        .dir("reports")?
        .join(format!("{}.json", context.pipeline.name)))
}

fn read(path: &Utf8PathBuf) -> Option<Card> {
    serde_json::from_str(&fs_err::read_to_string(path).ok()?).ok()
}

/// A stage's part of the card.
pub(crate) fn section(record: &Record) -> StageSection {
    StageSection {
        stage: record.row.stage.clone(),
        up_to_date: record.skipped,
        seconds: (record.row.ended_at.0 - record.row.started_at.0) as f64 / 1e6,
        read: serde_json::from_str(&record.row.inputs).unwrap_or_default(),
        written: record.written(),
        figures: record.figures.clone(),
    }
}

/// Puts the card together, keeps it as JSON and text, and prints it.
pub(crate) fn finish(
    context: &Context,
    run: &Run,
    records: &[&Record],
    next: &str,
) -> Result<(), Failure> {
    let eval = records.iter().find(|r| r.row.stage == "eval");
    let policies: Vec<PolicyFigures> = eval
        .and_then(|r| serde_json::from_value(r.figures["policies"].clone()).ok())
        .unwrap_or_default();
    let difference: Option<Interval> = eval
        .and_then(|r| serde_json::from_value(r.figures["difference"].clone()).ok())
        .flatten();
    let mut policies = policies.into_iter();
    let card = Card {
        pipeline: context.pipeline.name.clone(),
        run_id: run.run_id.to_string(),
        created_at: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        drillyard_version: DRILLYARD_VERSION.to_owned(),
        machine: machine(),
        // The policies have a table of their own.
        stages: records
            .iter()
            .filter(|r| r.row.stage != "eval")
            .map(|r| section(r))
            .collect(),
        base: policies.next(),
        candidate: policies.next(),
        difference,
        next: next.to_owned(),
    };
    let path = card_path(context)?;
    let previous =
        read(&path).filter(|p| p.run_id != card.run_id || p.created_at != card.created_at);
    let text = card.to_text(previous.as_ref());
    write_atomically(&path, format!("{:#}\n", card.to_json()).as_bytes())?;
    write_atomically(&path.with_extension("txt"), text.as_bytes())?;
    context
        .ui
        .text(&text)
        .map_err(|e| Failure::io("standard output", &e))
}

fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let memory = fs_err::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let kib: u64 = text
                .lines()
                .next()?
                .split_whitespace()
                .nth(1)?
                .parse()
                .ok()?;
            Some(format!(", {} GiB", kib >> 20))
        });
    format!("{cores} cores{}", memory.unwrap_or_default())
}
