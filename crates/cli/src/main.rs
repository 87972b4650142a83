//! `drillyard`: the front door. Every verb is a file under `commands/`; every stage a file under `stages/`; both are thin, since what
//! they do lives in the crate of that concern.

mod args;
mod commands;
mod context;
mod endpoint;
mod stages;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use drillyard_stage::{Ui, exit};

use crate::args::{Args, Command};
use crate::context::Context;

fn main() -> ExitCode {
    let args = Args::parse_from(settings_first(std::env::args_os().collect()));
    let ui = Ui::new(args.quiet);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            ui.error(&format!("the async runtime did not start: {error}"), None);
            return ExitCode::from(exit::ENVIRONMENT);
        }
    };
    match runtime.block_on(dispatch(args, ui.clone())) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            ui.error(&failure.message, failure.hint.as_deref());
            ExitCode::from(failure.code)
        }
    }
}

/// Moves `--set KEY=VALUE` before the verb: of a repeatable option that may stand on either side, clap keeps one side only.
fn settings_first(args: Vec<OsString>) -> Vec<OsString> {
    let mut args = args.into_iter();
    let mut first: Vec<OsString> = args.next().into_iter().collect();
    let mut rest = Vec::new();
    while let Some(arg) = args.next() {
        let text = arg.to_string_lossy();
        if text == "--" {
            rest.push(arg);
            break;
        }
        if text == "--set" {
            first.push(arg);
            first.extend(args.next());
        } else if text.starts_with("--set=") {
            first.push(arg);
        } else {
            rest.push(arg);
        }
    }
    first.extend(rest);
    first.extend(args);
    first
}

async fn dispatch(args: Args, ui: Ui) -> Result<u8, drillyard_stage::Failure> {
    if let Command::Sql(sql) = &args.command {
        return commands::sql::run(&args, sql, &ui).await;
    }
    let context = Context::open(&args, ui).await?;
    match args.command {
        Command::Rollout(shard) => commands::loop_::rollout(&context, shard).await,
        Command::Import { path } => commands::import::run(&context, path.as_deref()).await,
        Command::Qa => commands::loop_::qa(&context).await,
        Command::Credit => commands::loop_::credit(&context).await,
        Command::Train => commands::loop_::train(&context).await,
        Command::Eval => commands::loop_::eval(&context).await,
        Command::Report { json } => commands::report::run(&context, json),
        Command::Replay(replay) => commands::replay::replay(&context, &replay).await,
        Command::Branch(branch) => commands::replay::branch(&context, &branch).await,
        Command::Nights { n } => Box::pin(commands::nights::run(&context, n)).await,
        Command::Control => commands::control::run(&context).await,
        Command::Base => Box::pin(commands::base::run(&context)).await,
        Command::Limits => commands::limits::run(&context).await,
        Command::Image { command } => commands::image::run(&context, &command).await,
        Command::Bench => commands::bench::run(&context).await,
        Command::Sql(_) => Ok(exit::OK),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_count_on_either_side_of_the_verb() {
        let given = [
            "d",
            "--set",
            "a=1",
            "qa",
            "--set",
            "b=2",
            "-q",
            "--set=c=3",
            "--",
            "--set",
        ];
        let args = settings_first(given.map(OsString::from).into());
        assert_eq!(
            args,
            [
                "d",
                "--set",
                "a=1",
                "--set",
                "b=2",
                "--set=c=3",
                "qa",
                "-q",
                "--",
                "--set"
            ]
        );
        let parsed = Args::parse_from(&args[..8]);
        assert_eq!(parsed.overrides, ["a=1", "b=2", "c=3"]);
    }
}
