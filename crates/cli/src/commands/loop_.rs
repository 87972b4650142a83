//! The loop: rollout, qa, credit, train, eval. Each verb brings what comes before it up to date where that is cheap, and never runs
//! episodes behind the user's back.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use drillyard_schema::RunId;
use drillyard_stage::exit::{INPUT, NOTHING_TO_DO, OK, QA_BLOCKED};
use drillyard_stage::{Failure, PolicyKind, Record};

use super::report;
use crate::args::ShardArgs;
use crate::context::{Context, Run};
use crate::stages::{CreditStage, EvalStage, PolicySpec, QaStage, RolloutStage, TrainStage};

/// Runs episodes.
pub(crate) async fn rollout(context: &Context, shard: ShardArgs) -> Result<u8, Failure> {
    let name = match context.pipeline.policy.kind {
        PolicyKind::Checkpoint => "base",
        PolicyKind::Openai => "endpoint",
        PolicyKind::Expert => "expert",
    };
    let policy = PolicySpec::of(&context.pipeline, name, None, None)?;
    let stage = RolloutStage::new(context, policy, 0, shard.shard)?;
    let run = stage.run_identity().clone();
    let record = context.runner.run(&stage, &run.run_id).await?;
    context.set_current(&run)?;
    summary(context, &record, "qa")?;
    Ok(OK)
}

/// Judges the current episodes, and those that branches of this pipeline made. A pipeline that names recorded trajectories brings them up
/// to date first.
pub(crate) async fn qa(context: &Context) -> Result<u8, Failure> {
    if !context.pipeline.import.path.as_str().is_empty() {
        super::import::run(context, None).await?;
    }
    let run = context.current()?;
    let record = judged(context, &run).await?;
    judge_branches(context).await?;
    summary(context, &record, "train")?;
    Ok(OK)
}

/// Judges every branch run of the pipeline. Nothing is trained on them, so what a blocking rule finds in one is told and blocks nothing.
async fn judge_branches(context: &Context) -> Result<(), Failure> {
    let history = context.runner.history().await?;
    let runs: BTreeSet<&RunId> = history
        .iter()
        .filter(|row| row.stage == "branch" && row.pipeline == context.pipeline.name)
        .map(|row| &row.run_id)
        .collect();
    for run_id in runs {
        let Some(branched) = context.runner.latest("branch", run_id).await? else {
            continue;
        };
        let run_date = branched.written()["run_date"].as_str().map(str::to_owned);
        let run = Run {
            run_id: run_id.clone(),
            run_date: run_date.unwrap_or_default(),
        };
        let stage = QaStage::new(context, run, &branched)?;
        match context.runner.run(&stage, run_id).await {
            Err(failure) if failure.code == QA_BLOCKED => {
                context.ui.warn(format!("run {run_id}: {failure}"));
            }
            judged => {
                judged?;
            }
        }
    }
    Ok(())
}

/// Assigns credit.
pub(crate) async fn credit(context: &Context) -> Result<u8, Failure> {
    let run = context.current()?;
    let qa = judged(context, &run).await?;
    let record = context
        .runner
        .run(
            &CreditStage::new(context, run.clone(), &qa, false),
            &run.run_id,
        )
        .await?;
    summary(context, &record, "train")?;
    Ok(OK)
}

/// Credit, training, evaluation, report card.
pub(crate) async fn train(context: &Context) -> Result<u8, Failure> {
    let run = context.current()?;
    let source = source(context, &run).await?;
    let qa = judged(context, &run).await?;
    let credit = context
        .runner
        .run(
            &CreditStage::new(context, run.clone(), &qa, false),
            &run.run_id,
        )
        .await?;
    let init = start_of(context, &run).await?;
    let stage = TrainStage::new(context, run.clone(), &credit, &qa, init.as_str())?;
    let trained = context.runner.run(&stage, &run.run_id).await?;
    let mut records = vec![source, qa, credit, trained];
    let next = if source_is_import(&records) {
        format!(
            "drillyard --pipeline PIPELINE sql \"SELECT * FROM fail_reasons_by_family\"   # pipeline {}",
            context.pipeline.name
        )
    } else {
        records.push(evaluated(context, &run, &init, stage.checkpoint()?.as_str()).await?);
        "drillyard sql \"SELECT * FROM fail_reasons LIMIT 5\"   # or make control: the same training on permuted outcomes".to_owned()
    };
    let records: Vec<&Record> = records.iter().collect();
    report::finish(context, &run, &records, &next)?;
    Ok(OK)
}

/// Evaluates base and candidate.
pub(crate) async fn eval(context: &Context) -> Result<u8, Failure> {
    let run = context.current()?;
    let trained = context
        .runner
        .latest("train", &run.run_id)
        .await?
        .ok_or_else(|| {
            Failure::new(INPUT, "there is no candidate to evaluate")
                .hint("run `make train`; it evaluates as well")
        })?;
    let checkpoint = trained.written()["checkpoint"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let init = start_of(context, &run).await?;
    let evaluated = evaluated(context, &run, &init, &checkpoint).await?;
    // The card of the run: what came before is told again, as it stands.
    let mut records = vec![source(context, &run).await?];
    for stage in ["qa", "credit"] {
        records.extend(context.runner.latest(stage, &run.run_id).await?);
    }
    records.extend([trained, evaluated]);
    let records: Vec<&Record> = records.iter().collect();
    report::finish(context, &run, &records, "make control")?;
    Ok(OK)
}

fn source_is_import(records: &[Record]) -> bool {
    records.first().is_some_and(|r| r.row.stage == "import")
}

/// The rollout or import that brought the episodes.
pub(crate) async fn source(context: &Context, run: &Run) -> Result<Record, Failure> {
    for stage in ["rollout", "import"] {
        if let Some(record) = context.runner.latest(stage, &run.run_id).await? {
            return Ok(record);
        }
    }
    Err(
        Failure::new(NOTHING_TO_DO, format!("run {} never ended", run.run_id))
            .hint("run `make rollout` again; it goes on where it stopped"),
    )
}

/// QA of a run, up to date.
pub(crate) async fn judged(context: &Context, run: &Run) -> Result<Record, Failure> {
    let source = source(context, run).await?;
    context
        .runner
        .run(&QaStage::new(context, run.clone(), &source)?, &run.run_id)
        .await
}

/// The checkpoint that training starts from: the pipeline's `train.init`, or the policy's own. `fresh` draws new weights, with a
/// tokenizer made of the run's own conversations.
pub(crate) async fn start_of(context: &Context, run: &Run) -> Result<String, Failure> {
    let pipeline = &context.pipeline;
    match pipeline.train.init.as_str() {
        "" => Ok(pipeline.policy.model.clone()),
        "fresh" => {
            let start = context
                .dir("checkpoints")?
                .join(format!("fresh-{}", run.run_id));
            if !start.join("model.safetensors").exists() {
                super::base::fresh_weights(context, run, &start).await?;
            }
            Ok(start.into_string())
        }
        init => Ok(init.to_owned()),
    }
}

/// The held-out evaluation of what made the episodes and of a candidate. A script can't be compared with a model, so where an expert
/// made the episodes, the base is the checkpoint that training started from.
pub(crate) async fn evaluated(
    context: &Context,
    run: &Run,
    init: &str,
    candidate: &str,
) -> Result<Record, Failure> {
    let temperature = Some(context.pipeline.eval.temperature);
    let base = if context.pipeline.policy.kind == PolicyKind::Expert {
        Some(init)
    } else {
        None
    };
    let base = PolicySpec::of(&context.pipeline, "base", base, temperature)?;
    let candidate = PolicySpec::of(&context.pipeline, "candidate", Some(candidate), temperature)?;
    let stage = EvalStage::held_out(context, vec![base, candidate])?;
    context.runner.run(&stage, &run.run_id).await
}

/// What a single verb ends with.
fn summary(context: &Context, record: &Record, next: &str) -> Result<(), Failure> {
    let section = report::section(record);
    let mut text = format!(
        "{} {}\n",
        section.stage,
        if section.up_to_date {
            "was up to date"
        } else {
            "is done"
        }
    );
    for (name, value) in section.figures.as_object().into_iter().flatten() {
        let _ = writeln!(
            text,
            "  {:<24} {}",
            name.replace('_', " "),
            drillyard_report::inline(value)
        );
    }
    let _ = writeln!(text, "next: make {next}");
    context
        .ui
        .text(&text)
        .map_err(|e| Failure::io("standard output", &e))
}
