//! `drillyard-torch serve`.

use std::net::IpAddr;

use camino::Utf8PathBuf;
use drillyard_serve::{EngineOptions, ServeOptions, run as serve, stdin_closed};
use drillyard_stage::{Failure, Ui, exit};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checkpoint's folder.
    #[arg(long)]
    model: Utf8PathBuf,
    /// The name clients see; the folder's by default.
    #[arg(long)]
    name: Option<String>,
    /// Where to listen. There is no authentication: leave it on loopback unless others are meant to reach it.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Threads for each operation of the model.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Conversations generated for at once.
    #[arg(long, default_value_t = 64)]
    max_batch: usize,
    /// Longest conversation in tokens.
    #[arg(long, default_value_t = 4096)]
    max_len: usize,
    /// Seeds requests that bring no seed of their own.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End when standard input ends.
    #[arg(long)]
    exit_with_parent: bool,
}

pub(crate) fn run(args: &Args, ui: &Ui) -> Result<(), Failure> {
    let options = ServeOptions {
        name: args.name.clone(),
        host: args.host,
        port: args.port,
        engine: EngineOptions {
            max_batch: args.max_batch,
            max_len: args.max_len,
            threads: args.threads,
            seed: args.seed,
            ..EngineOptions::default()
        },
        ..ServeOptions::new(args.model.clone())
    };
    let with_parent = args.exit_with_parent;
    let shutdown = async move {
        let interrupted = async {
            // Without a signal handler the server still ends with its process.
            drop(tokio::signal::ctrl_c().await);
        };
        if with_parent {
            tokio::select! {
                () = stdin_closed() => {}
                () = interrupted => {}
            }
        } else {
            interrupted.await;
        }
    };
    let talk = ui.clone();
    let ready = move |listening: &drillyard_serve::Listening| {
        if let Err(failure) = crate::print_json(&talk, listening) {
            talk.error(&failure.message, None);
        }
    };
    crate::runtime()?
        .block_on(serve(&options, ready, shutdown))
        .map_err(|error| Failure::from_error(exit::INPUT, &error))
}
