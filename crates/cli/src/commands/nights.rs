//! `drillyard nights N`: night after night from the champion, which moves only if validation does not fall.

use std::fmt::Write as _;

use drillyard_release::{Registry, Verdict};
use drillyard_report::evaluation::paired_difference;
use drillyard_schema::table::{ReleaseRow, Timestamp};
use drillyard_stage::Failure;
use drillyard_stage::exit::{OK, OUTPUT};
use serde_json::json;

use super::loop_;
use crate::context::{Context, write_atomically};
use crate::stages::{CreditStage, EvalStage, PolicySpec, RolloutStage, TrainStage, revision_of};

/// Runs `n` nights and evaluates the champion on held-out tasks once, at the end.
pub(crate) async fn run(context: &Context, n: u32) -> Result<u8, Failure> {
    let pipeline = &context.pipeline;
    let registry = Registry::open(&context.dir("releases")?, &pipeline.name)
        .map_err(|e| Failure::from_error(OUTPUT, &e))?;
    let mut text = String::new();
    let mut current = None;
    let first = registry.champion().map_or(1, |champion| champion.night + 1);
    for night in first..first + n {
        let champion = registry
            .champion()
            .map_or_else(|| pipeline.policy.model.clone(), |c| c.path.to_string());
        context.ui.note(format!("night {night} from {champion}"));
        let policy = PolicySpec::of(pipeline, "champion", Some(&champion), None)?;
        let stage = RolloutStage::new(context, policy, u64::from(night - 1), None)?;
        let run = stage.run_identity().clone();
        context.runner.run(&stage, &run.run_id).await?;
        let qa = loop_::judged(context, &run).await?;
        let credit = context
            .runner
            .run(
                &CreditStage::new(context, run.clone(), &qa, false),
                &run.run_id,
            )
            .await?;
        let train = TrainStage::new(context, run.clone(), &credit, &qa, &champion)?;
        let trained = context.runner.run(&train, &run.run_id).await?;
        let candidate = train.checkpoint()?.to_owned();

        let temperature = Some(pipeline.eval.temperature);
        let policies = vec![
            PolicySpec::of(pipeline, "champion", Some(&champion), temperature)?,
            PolicySpec::of(pipeline, "candidate", Some(candidate.as_str()), temperature)?,
        ];
        let validation =
            EvalStage::validation(context, policies, pipeline.train.validation_tasks, 1)?;
        context.runner.run(&validation, &run.run_id).await?;
        let measured = validation.measured().await?;
        let (Some(before), Some(after)) = (measured.first(), measured.last()) else {
            continue;
        };
        let verdict = registry.decide(before.figures.success.value, after.figures.success.value);
        let reason = format!(
            "validation {:.1} % against {:.1} %",
            after.figures.success.value * 100.0,
            before.figures.success.value * 100.0
        );
        let moved = verdict == Verdict::Promote;
        if moved {
            registry
                .promote(&candidate, night, &reason)
                .map_err(|e| Failure::from_error(OUTPUT, &e))?;
        }
        let row = ReleaseRow {
            release_id: revision_of(&candidate)?,
            stage_run: Some(trained.row.stage_run.clone()),
            status: if moved { "champion" } else { "refused" }.to_owned(),
            path: candidate.to_string(),
            previous: Some(revision_of(champion.as_str().into())?),
            reason: reason.clone(),
            at: Timestamp(chrono::Utc::now().timestamp_micros()),
        };
        context
            .lake
            .append(&[row], None)
            .await
            .map_err(|e| Failure::from_error(OUTPUT, &e))?;
        let gain = paired_difference(&before.outcomes, &after.outcomes);
        let _ = writeln!(
            text,
            "night {night}: {reason}{} → {}",
            gain.map_or_else(String::new, |d| format!(
                " ({:+.1} points [{:+.1}, {:+.1}])",
                d.value * 100.0,
                d.lo * 100.0,
                d.hi * 100.0
            )),
            if moved {
                "champion moved"
            } else {
                "refused, champion stays"
            }
        );
        current = Some(run);
    }
    let champion = registry
        .champion()
        .map_or_else(|| pipeline.policy.model.clone(), |c| c.path.to_string());
    if let Some(run) = current {
        let temperature = Some(pipeline.eval.temperature);
        let policies = vec![
            PolicySpec::of(pipeline, "base", None, temperature)?,
            PolicySpec::of(pipeline, "champion", Some(&champion), temperature)?,
        ];
        let eval = EvalStage::held_out(context, policies)?;
        context.runner.run(&eval, &run.run_id).await?;
        let measured = eval.measured().await?;
        let mut figures = Vec::new();
        for one in &measured {
            let s = one.figures.success;
            let _ = writeln!(
                text,
                "held out, {:<9} {:.1} % [{:.1}, {:.1}] of {}",
                one.figures.policy,
                s.value * 100.0,
                s.lo * 100.0,
                s.hi * 100.0,
                s.n
            );
            figures.push(&one.figures);
        }
        let path = context
            .dir("reports")?
            .join(format!("{}-nights.json", pipeline.name));
        write_atomically(
            &path,
            format!("{:#}\n", json!({ "nights": n, "policies": figures })).as_bytes(),
        )?;
    }
    let _ = writeln!(text, "champion: {champion}");
    context
        .ui
        .text(&text)
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}
