//! `drillyard control`: the negative control. Whole outcomes are permuted within each task before credit, everything else is equal; what
//! is gained then is not learned from outcomes. Beside it stands the base at its best temperature, so that mere sharpening is visible.

use std::fmt::Write as _;

use drillyard_report::evaluation::paired_difference;
use drillyard_stage::Failure;
use drillyard_stage::exit::OK;
use serde_json::json;

use super::loop_;
use crate::context::{Context, write_atomically};
use crate::stages::{CreditStage, EvalStage, PolicySpec, TrainStage};

/// Temperatures among which the base's best is chosen on validation tasks.
const TEMPERATURES: [f64; 4] = [0.25, 0.5, 0.75, 1.0];

/// Trains on permuted outcomes and evaluates beside the base.
pub(crate) async fn run(context: &Context) -> Result<u8, Failure> {
    let run = context.current()?;
    let qa = loop_::judged(context, &run).await?;
    let credit = context
        .runner
        .run(
            &CreditStage::new(context, run.clone(), &qa, true),
            &run.run_id,
        )
        .await?;
    let init = loop_::start_of(context, &run).await?;
    let stage = TrainStage::new(context, run.clone(), &credit, &qa, &init)?;
    context.runner.run(&stage, &run.run_id).await?;
    let pipeline = &context.pipeline;
    let temperature = Some(pipeline.eval.temperature);
    let base = PolicySpec::of(pipeline, "base", Some(&init), temperature)?;
    let control = PolicySpec::of(
        pipeline,
        "control",
        Some(stage.checkpoint()?.as_str()),
        temperature,
    )?;

    let mut best = (pipeline.eval.temperature, f64::NEG_INFINITY);
    for temperature in TEMPERATURES {
        let policy = PolicySpec::of(
            pipeline,
            &format!("base at {temperature}"),
            Some(&init),
            Some(temperature),
        )?;
        let stage =
            EvalStage::validation(context, vec![policy], pipeline.train.validation_tasks, 1)?;
        context.runner.run(&stage, &run.run_id).await?;
        let success = stage
            .measured()
            .await?
            .first()
            .map_or(0.0, |m| m.figures.success.value);
        if success > best.1 {
            best = (temperature, success);
        }
    }
    let sharp = PolicySpec::of(
        pipeline,
        &format!("base at {}", best.0),
        Some(&init),
        Some(best.0),
    )?;
    let eval = EvalStage::held_out(context, vec![base, sharp, control])?;
    context.runner.run(&eval, &run.run_id).await?;
    let measured = eval.measured().await?;
    let mut text =
        String::from("negative control: the same training on outcomes permuted within each task\n");
    let mut policies = Vec::new();
    for one in &measured {
        let s = one.figures.success;
        let _ = writeln!(
            text,
            "  {:<16} {:.1} % [{:.1}, {:.1}] of {}",
            one.figures.policy,
            s.value * 100.0,
            s.lo * 100.0,
            s.hi * 100.0,
            s.n
        );
        policies.push(&one.figures);
    }
    let difference = measured
        .first()
        .zip(measured.last())
        .and_then(|(base, control)| paired_difference(&base.outcomes, &control.outcomes));
    if let Some(d) = difference {
        let verdict = if d.hi < 0.05 {
            "below 5 points, as it must be"
        } else {
            "NOT below 5 points: the gain is not all learned from outcomes"
        };
        let _ = writeln!(
            text,
            "  control − base   {:+.1} points [{:+.1}, {:+.1}]; upper bound {verdict}",
            d.value * 100.0,
            d.lo * 100.0,
            d.hi * 100.0
        );
    }
    text.push_str("next: make report\n");
    let path = context
        .dir("reports")?
        .join(format!("{}-control.json", pipeline.name));
    write_atomically(
        &path,
        format!(
            "{:#}\n",
            json!({ "policies": policies, "control_minus_base": difference })
        )
        .as_bytes(),
    )?;
    context
        .ui
        .text(&text)
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}
