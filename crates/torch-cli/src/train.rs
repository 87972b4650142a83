//! `drillyard-torch train`.
//!
//! With `--validate` the front door measures on validation tasks while training waits: the checkpoint is served on loopback, a line
//! `{"event":"validate","step":…,"listening":…,"model":…,"weights_hash":…}` goes to standard output, and a line
//! `{"success":…,"mean_steps":…,"tool_accuracy":…}` (or `null`) is read from standard input. The last line of standard output is
//! the figures.

use std::sync::mpsc::{Receiver, channel};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_lake::{Lake, Txn};
use drillyard_serve::{EngineOptions, ServeOptions, Server};
use drillyard_stage::{Bar, Failure, Ui, exit};
use drillyard_trainer::{
    Ending, Figures, Hooks, StepReport, TrainConfig, TrainError, Validation, run as train,
};
use serde_json::{Value, json};
use tokio::runtime::{Handle, Runtime};

/// Conversations served at once while validating.
const MAX_BATCH: usize = 64;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The configuration, a JSON file.
    #[arg(long)]
    config: Utf8PathBuf,
    /// Replace a value of the configuration, such as `hyper.epochs=1`; may be repeated.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    sets: Vec<String>,
    /// Let the front door measure checkpoints on validation tasks.
    #[arg(long)]
    validate: bool,
    /// End when standard input is closed, so that training never outlives whoever started it; it resumes from its last state.
    #[arg(long)]
    exit_with_parent: bool,
    /// Also write the curves to this JSON-lines file.
    #[arg(long)]
    metrics: Option<Utf8PathBuf>,
    /// Print the resolved configuration and stop.
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(args: &Args, ui: &Ui) -> Result<(), Failure> {
    let config = read_config(args)?;
    if args.dry_run {
        return crate::print_json(ui, &config);
    }
    let runtime = crate::runtime()?;
    let mut hooks = Terminal {
        ui: ui.clone(),
        bar: None,
        validator: None,
    };
    if args.validate || args.exit_with_parent {
        let answers = read_input(args.exit_with_parent);
        hooks.validator = args.validate.then(|| Validator {
            handle: runtime.handle().clone(),
            threads: config.threads as usize,
            answers,
        });
    }
    let ending = runtime
        .block_on(train(&config, &mut hooks))
        .map_err(|error| failure(&error))?;
    match ending {
        Ending::Refused(report) => {
            crate::print_json(ui, &json!({ "gate": report }))?;
            Err(Failure::new(
                exit::REFUSED,
                format!("the provenance gate refused: {}", report.reasons.join("; ")),
            )
            .hint(format!("still works: {}", report.still_works.join("; "))))
        }
        Ending::Trained(figures) => {
            if let Some(bar) = hooks.bar.take() {
                bar.finish(format!(
                    "{} steps, {} tokens, {:.0} tokens/s",
                    figures.steps, figures.tokens, figures.tokens_per_second
                ));
            }
            for advice in &figures.advice {
                ui.warn(&advice.message);
            }
            if let Some(path) = &args.metrics {
                write_metrics(path, &figures)?;
            }
            let version = record(&runtime, &config, &figures)?;
            let mut value = serde_json::to_value(&*figures)
                .map_err(|error| Failure::from_error(exit::INTERNAL, &error))?;
            if let Some(version) = version {
                value["train_metrics_version"] = version.into();
            }
            crate::print_json(ui, &value)
        }
    }
}

/// Reads the file, applies the replacements, and checks the result.
fn read_config(args: &Args) -> Result<TrainConfig, Failure> {
    let usage = |message: String| Failure::new(exit::USAGE, message);
    let text =
        fs_err::read_to_string(&args.config).map_err(|error| Failure::io(&args.config, &error))?;
    let mut value: Value =
        serde_json::from_str(&text).map_err(|error| usage(format!("{}: {error}", args.config)))?;
    for set in &args.sets {
        let (path, new) = set
            .split_once('=')
            .ok_or_else(|| usage(format!("--set {set}: expected path=value")))?;
        // Text that is no JSON is taken as a string, so that names need no quotes.
        let new = serde_json::from_str(new).unwrap_or_else(|_| Value::String(new.to_owned()));
        let mut slot = &mut value;
        for key in path.split('.') {
            if slot.is_null() {
                *slot = json!({});
            }
            slot = slot
                .as_object_mut()
                .ok_or_else(|| usage(format!("--set {set}: {key} is inside a plain value")))?
                .entry(key)
                .or_insert(Value::Null);
        }
        *slot = new;
    }
    let config: TrainConfig = serde_json::from_value(value)
        .map_err(|error| usage(format!("{}: {error}", args.config)))?;
    config.check().map_err(|error| failure(&error))?;
    Ok(config)
}

fn write_metrics(path: &Utf8Path, figures: &Figures) -> Result<(), Failure> {
    let mut text = String::new();
    for row in &figures.rows {
        let line = serde_json::to_string(row)
            .map_err(|error| Failure::from_error(exit::INTERNAL, &error))?;
        text.push_str(&line);
        text.push('\n');
    }
    fs_err::write(path, text).map_err(|error| Failure::io(path, &error))
}

/// Appends the curves to the lake the episodes came from; returns the table's new version.
fn record(
    runtime: &Runtime,
    config: &TrainConfig,
    figures: &Figures,
) -> Result<Option<i64>, Failure> {
    let Some(source) = &config.lake else {
        return Ok(None);
    };
    let txn = Txn {
        app: format!("train-{}", config.stage_run),
        version: 1,
    };
    runtime
        .block_on(async {
            let lake = Lake::open(&source.root).await?;
            lake.append(&figures.rows, Some(txn)).await
        })
        .map_err(|error| failure(&error.into()))
}

/// Shows progress on the terminal, and has checkpoints measured.
struct Terminal {
    ui: Ui,
    bar: Option<Bar>,
    validator: Option<Validator>,
}

impl Hooks for Terminal {
    fn on_steps(&mut self, report: &StepReport) {
        let ui = &self.ui;
        let bar = self
            .bar
            .get_or_insert_with(|| ui.bar("train", report.total));
        let mut parts: Vec<String> = [
            ("loss", "loss"),
            ("kl", "kl"),
            ("clip", "clip_share"),
            ("entropy", "entropy"),
            ("grad", "grad_norm"),
        ]
        .iter()
        .filter_map(|(name, key)| Some(format!("{name} {:.4}", report.values.get(key)?)))
        .collect();
        if let Some(value) = report.values.get("tokens_per_second") {
            parts.push(format!("{value:.0} tokens/s"));
        }
        bar.set(report.step, parts.join(" "));
    }

    fn note(&mut self, text: &str) {
        self.ui.note(text);
    }

    fn validate(&mut self, step: u64, dir: &Utf8Path) -> Result<Option<Validation>, TrainError> {
        match &self.validator {
            Some(validator) => validator.measure(&self.ui, step, dir),
            None => Ok(None),
        }
    }
}

/// Reads standard input in the background, line by line.
fn read_input(exit_at_end: bool) -> Receiver<String> {
    let (send, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if send.send(line).is_err() && !exit_at_end {
                return;
            }
        }
        if exit_at_end {
            // SAFETY: `_exit` only ends the process. Threads of libtorch are at work, so nothing may be torn down under them; the state on
            // disk is made for kills.
            unsafe { libc::_exit(exit::INTERRUPTED.into()) };
        }
    });
    lines
}

/// Serves a checkpoint and waits for what the front door measured on it.
struct Validator {
    handle: Handle,
    threads: usize,
    answers: Receiver<String>,
}

impl Validator {
    fn measure(
        &self,
        ui: &Ui,
        step: u64,
        dir: &Utf8Path,
    ) -> Result<Option<Validation>, TrainError> {
        let failed = |message: String| TrainError::Validation(message);
        let options = ServeOptions {
            name: Some("validation".to_owned()),
            engine: EngineOptions {
                max_batch: MAX_BATCH,
                threads: self.threads,
                ..EngineOptions::default()
            },
            ..ServeOptions::new(dir)
        };
        let (started, listening) = std::sync::mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        // The training thread is inside the runtime's `block_on`: the server gets a task of its own.
        let server = self.handle.spawn(async move {
            // Nobody waits for the address any more only if training has failed meanwhile.
            let server = match Server::bind(&options).await {
                Ok(server) => server,
                Err(error) => return drop(started.send(Err(error.to_string()))),
            };
            drop(started.send(Ok(server.listening().clone())));
            let ended = server
                .run(async {
                    drop(stopped.await);
                })
                .await;
            if let Err(error) = ended {
                drop(started.send(Err(error.to_string())));
            }
        });
        let ready = listening
            .recv()
            .map_err(|error| error.to_string())
            .flatten()
            .map_err(|why| failed(format!("{dir} could not be served: {why}")))?;
        let event = json!({
            "event": "validate",
            "step": step,
            "listening": ready.listening,
            "model": ready.model,
            "weights_hash": ready.weights_hash,
        });
        ui.data(&format!("{event}\n"))?;
        let line = self.answers.recv();
        // The server may have ended by itself already: then the front door got no answers from it.
        if let Ok(Err(why)) = listening.try_recv() {
            ui.warn(format!(
                "serving the weights of step {step} ended early: {why}"
            ));
        }
        let _ = stop.send(());
        server.abort();
        let line = line.map_err(|_| failed("standard input ended before a result came".into()))?;
        serde_json::from_str(&line).map_err(|error| failed(format!("'{line}': {error}")))
    }
}

/// The exit code of an error.
fn failure(error: &TrainError) -> Failure {
    let code = match error {
        TrainError::Config { .. } => exit::USAGE,
        TrainError::NoData(_) => exit::NOTHING_TO_DO,
        TrainError::Io(io) => return Failure::io("training", io),
        TrainError::Lake(lake) if lake.is_output() => exit::OUTPUT,
        TrainError::Input { .. }
        | TrainError::Row { .. }
        | TrainError::Lake(_)
        | TrainError::Model(_)
        | TrainError::Render(_)
        | TrainError::Json(_) => exit::INPUT,
        TrainError::Torch(_) | TrainError::Validation(_) => exit::ENVIRONMENT,
        TrainError::NotFinite { .. } => exit::INTERNAL,
    };
    Failure::from_error(code, error)
}
