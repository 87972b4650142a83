//! `drillyard-torch`: what needs libtorch, as one program that the front door calls.
//!
//! `train` runs a training configuration and prints its figures as JSON, `serve` answers the chat API for a checkpoint, `tokenizer`
//! and `init` make the embedded base model's vocabulary and first weights, `info` describes a checkpoint. Standard output is data,
//! standard error is talk; exit codes are those of every Drillyard program.

mod base;
mod info;
mod serve;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use drillyard_stage::{Failure, Ui, exit};

#[derive(Parser)]
#[command(
    name = "drillyard-torch",
    version,
    about = "Train and serve checkpoints"
)]
struct Args {
    /// Say only what needs attention.
    #[arg(long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a checkpoint as a configuration says; prints the figures as JSON.
    Train(train::Args),
    /// Serve a checkpoint over the OpenAI chat API.
    Serve(serve::Args),
    /// Build the base model's tokenizer and chat template from conversations.
    Tokenizer(base::TokenizerArgs),
    /// Draw fresh weights beside a tokenizer.
    Init(base::InitArgs),
    /// Describe a checkpoint as JSON.
    Info(info::Args),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let ui = Ui::new(args.quiet);
    let done = match args.command {
        Command::Train(args) => train::run(&args, &ui),
        Command::Serve(args) => serve::run(&args, &ui),
        Command::Tokenizer(args) => base::tokenizer(&args, &ui),
        Command::Init(args) => base::init(&args, &ui),
        Command::Info(args) => info::run(&args, &ui),
    };
    match done {
        Ok(()) => ExitCode::from(exit::OK),
        Err(failure) => {
            ui.error(&failure.message, failure.hint.as_deref());
            ExitCode::from(failure.code)
        }
    }
}

/// A runtime for reading the lake and answering requests.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::from_error(exit::ENVIRONMENT, &error))
}

/// Prints a value as one line of JSON.
fn print_json(ui: &Ui, value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value)
        .map_err(|error| Failure::from_error(exit::INTERNAL, &error))?;
    ui.data(&format!("{text}\n"))
        .map_err(|error| Failure::io("standard output", &error))
}
