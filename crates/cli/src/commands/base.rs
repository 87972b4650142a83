//! `drillyard base`: the embedded base model, from nothing: scripted-expert episodes in real sandboxes, a tokenizer of their structure,
//! fresh weights, imitation, and a look at what came out.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Stdio;

use camino::Utf8Path;
use drillyard_lake::{Filter, Lake, LakeError};
use drillyard_schema::table::MessageRow;
use drillyard_schema::{Message, Role, RunId, Split};
use drillyard_stage::exit::{ENVIRONMENT, INPUT, OK};
use drillyard_stage::{Failure, PolicyKind};
use serde_json::json;
use tokio::process::Command;

use super::loop_;
use crate::context::{Context, output, write_atomically};
use crate::endpoint::torch_program;
use crate::stages::{CreditStage, EvalStage, PolicySpec, RolloutStage, TrainStage, tasks, toolset};

/// Conversations the tokenizer's vocabulary is learned from.
const VOCABULARY_EPISODES: usize = 1500;
/// Where the model goes.
const TARGET: &str = "datasets/base";
/// Files of a checkpoint that belong into the tree.
const FILES: [&str; 5] = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// Makes the base model again.
pub(crate) async fn run(context: &Context) -> Result<u8, Failure> {
    let pipeline = &context.pipeline;
    let expert = PolicySpec::of(pipeline, "expert", None, None)?;
    let stage = RolloutStage::new(context, expert, 0, None)?;
    let run = stage.run_identity().clone();
    context.runner.run(&stage, &run.run_id).await?;
    context.set_current(&run)?;
    let qa = loop_::judged(context, &run).await?;
    let credit = context
        .runner
        .run(
            &CreditStage::new(context, run.clone(), &qa, false),
            &run.run_id,
        )
        .await?;

    let start = context.dir("checkpoints")?.join("base-start");
    if !start.join("model.safetensors").exists() {
        fresh_weights(context, &run, &start).await?;
    }
    let train = TrainStage::new(context, run.clone(), &credit, &qa, start.as_str())?;
    context.runner.run(&train, &run.run_id).await?;
    let checkpoint = train.checkpoint()?;
    fs_err::create_dir_all(TARGET).map_err(|e| output(Utf8Path::new(TARGET), &e))?;
    for name in FILES {
        let content =
            fs_err::read(checkpoint.join(name)).map_err(|e| Failure::io(checkpoint, &e))?;
        write_atomically(&Utf8Path::new(TARGET).join(name), &content)?;
    }

    // What the loop needs to be able to learn: neither hopeless nor finished, and mixed within groups.
    let mut measured = pipeline.clone();
    measured.policy.kind = PolicyKind::Checkpoint;
    TARGET.clone_into(&mut measured.policy.model);
    let measured = Context::of(measured, context.ui.clone()).await?;
    let base = PolicySpec::of(&measured.pipeline, "base", Some(TARGET), Some(1.0))?;
    let eval = EvalStage::validation(&measured, vec![base], 100, 8)?;
    measured.runner.run(&eval, &run.run_id).await?;
    let results = eval.measured().await?;
    let mut text = String::from("the base model on validation tasks, 8 episodes each\n");
    if let Some(one) = results.first() {
        let mixed = one
            .outcomes
            .values()
            .filter(|runs| runs.iter().any(|s| *s) && runs.iter().any(|s| !*s))
            .count();
        let s = one.figures.success;
        let _ = writeln!(
            text,
            "  success   {:.1} % [{:.1}, {:.1}]   (wanted: 35 to 55)",
            s.value * 100.0,
            s.lo * 100.0,
            s.hi * 100.0
        );
        let _ = writeln!(
            text,
            "  mixed     {:.1} % of groups        (wanted: 60 and more)",
            mixed as f64 * 100.0 / one.outcomes.len().max(1) as f64
        );
        let _ = writeln!(
            text,
            "  pass@8    {:.1} %                 (wanted: 90 and more)",
            one.figures.pass_at.get(&8).copied().unwrap_or(0.0) * 100.0
        );
    }
    context
        .ui
        .text(&text)
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}

/// Draws new weights in `start`, beside a tokenizer of the structure of the run's conversations.
pub(crate) async fn fresh_weights(
    context: &Context,
    run: &crate::context::Run,
    start: &Utf8Path,
) -> Result<(), Failure> {
    let text = conversations(&context.lake, &run.run_id, VOCABULARY_EPISODES).await?;
    let dir = context.dir("checkpoints")?;
    let (texts, tools) = (dir.join("base-texts.jsonl"), dir.join("base-tools.json"));
    write_atomically(&texts, text.as_bytes())?;
    let sample = tasks(&context.pipeline, Split::Train, 1, 0)?;
    write_atomically(
        &tools,
        &serde_json::to_vec(&toolset(&sample)?.specs).unwrap_or_default(),
    )?;
    torch(&[
        "tokenizer",
        "--texts",
        texts.as_str(),
        "--tools",
        tools.as_str(),
        "--out",
        start.as_str(),
    ])
    .await?;
    torch(&[
        "init",
        "--out",
        start.as_str(),
        "--seed",
        &context.pipeline.seed.to_string(),
    ])
    .await
}

/// The messages of a run's first `limit` episodes, one JSON line a conversation, as the trainer reads them.
pub(crate) async fn conversations(
    lake: &Lake,
    run: &RunId,
    limit: usize,
) -> Result<String, Failure> {
    let unreadable = |e: LakeError| Failure::from_error(INPUT, &e);
    let snapshot = lake.snapshot().await.map_err(unreadable)?;
    let rows: Vec<MessageRow> = snapshot.read(&Filter::run(run)).await.map_err(unreadable)?;
    let mut conversations: BTreeMap<String, BTreeMap<i32, Message>> = BTreeMap::new();
    for row in rows {
        let role = match row.role.as_str() {
            "system" => Role::System,
            "user" => Role::User,
            "tool" => Role::Tool,
            _ => Role::Assistant,
        };
        let message = Message {
            tool_call_id: row.tool_call_id,
            name: row.name,
            ..Message::text(role, row.content.unwrap_or_default())
        };
        conversations
            .entry(row.episode_id.0)
            .or_default()
            .insert(row.message_index, message);
    }
    let mut text = String::new();
    for messages in conversations.into_values().take(limit) {
        let messages: Vec<Message> = messages.into_values().collect();
        text.push_str(&json!({ "messages": messages }).to_string());
        text.push('\n');
    }
    Ok(text)
}

async fn torch(arguments: &[&str]) -> Result<(), Failure> {
    let program = torch_program()?;
    let status = Command::new(&program)
        .args(arguments)
        .stdout(Stdio::null())
        .status()
        .await
        .map_err(|e| Failure::io(&program, &e))?;
    if status.success() {
        Ok(())
    } else {
        Err(Failure::new(
            ENVIRONMENT,
            format!("{program} {} ended with {status}", arguments.join(" ")),
        ))
    }
}
