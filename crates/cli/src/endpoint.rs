//! The embedded server as a child process: starts `drillyard-torch serve` on loopback and ends with its handle.

use std::env;
use std::process::Stdio;
use std::time::Duration;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_stage::exit::{ENVIRONMENT, INPUT};
use drillyard_stage::{Failure, Ui};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use crate::stages::Served;

/// How long the server may take to load a checkpoint.
const START_TIMEOUT: Duration = Duration::from_mins(2);

/// A served checkpoint. The server ends when this is dropped, also when the program is killed: it watches its standard input.
pub(crate) struct Endpoint {
    /// Where it listens, and what.
    pub served: Served,
    stdin: Option<ChildStdin>,
    child: Child,
}

/// The program that trains and serves: beside this one, as both are built together.
pub(crate) fn torch_program() -> Result<Utf8PathBuf, Failure> {
    let here = env::current_exe().map_err(|e| {
        Failure::new(
            ENVIRONMENT,
            format!("the running program can't be located: {e}"),
        )
    })?;
    let path = Utf8PathBuf::try_from(here.with_file_name("drillyard-torch"))
        .map_err(|e| Failure::new(ENVIRONMENT, e))?;
    if path.exists() {
        Ok(path)
    } else {
        Err(Failure::new(
            ENVIRONMENT,
            format!("{path} is missing; it trains and serves checkpoints and needs libtorch"),
        )
        .hint("run `make build`, or point the pipeline's policy at an endpoint: kind = \"openai\""))
    }
}

impl Endpoint {
    /// Serves the checkpoint in `model`.
    ///
    /// # Errors
    /// A missing checkpoint, a missing program, or a server that does not come up.
    pub(crate) async fn start(
        model: &Utf8Path,
        threads: usize,
        max_batch: usize,
        ui: &Ui,
    ) -> Result<Self, Failure> {
        if !model.join("config.json").exists() {
            return Err(Failure::new(
                INPUT,
                format!("{model}: no config.json; not a checkpoint folder"),
            )
            .hint("datasets/base is the embedded one; `make base` makes it again"));
        }
        let program = torch_program()?;
        let mut child = Command::new(&program)
            .args([
                "serve",
                "--model",
                model.as_str(),
                "--port",
                "0",
                "--exit-with-parent",
            ])
            .args([
                "--threads",
                &threads.to_string(),
                "--max-batch",
                &max_batch.to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| Failure::new(ENVIRONMENT, format!("{program}: {e}")))?;
        let stdin = child.stdin.take();
        let stdout = child
            .stdout
            .take()
            .ok_or_else(|| Failure::new(ENVIRONMENT, "the server has no standard output"))?;
        let mut lines = BufReader::new(stdout).lines();
        let line = tokio::time::timeout(START_TIMEOUT, lines.next_line()).await;
        let line = match line {
            Ok(Ok(Some(line))) => line,
            Ok(_) => {
                // It ends when this is closed, if it has not yet.
                drop(stdin);
                let status = child.wait().await.map_err(|e| Failure::io(&program, &e))?;
                let code = status.code().and_then(|code| u8::try_from(code).ok());
                return Err(Failure::new(
                    code.unwrap_or(ENVIRONMENT),
                    format!(
                        "the embedded server ended while loading {model} ({status}); its own words are above"
                    ),
                ));
            }
            Err(_) => {
                return Err(Failure::new(
                    ENVIRONMENT,
                    format!(
                        "the embedded server did not load {model} in {} s",
                        START_TIMEOUT.as_secs()
                    ),
                ));
            }
        };
        let served: Served = serde_json::from_str(&line).map_err(|e| {
            Failure::new(
                ENVIRONMENT,
                format!("the embedded server said '{line}': {e}"),
            )
        })?;
        ui.note(format!(
            "{:>10} {model} on {} ({})",
            "serve",
            served.listening,
            &served.weights_hash.chars().take(12).collect::<String>()
        ));
        // Whatever else the server prints is drained, so that it never blocks on a full pipe.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Self {
            served,
            stdin,
            child,
        })
    }

    /// Ends the server and waits for it.
    pub(crate) async fn stop(mut self) {
        drop(self.stdin.take());
        if tokio::time::timeout(Duration::from_secs(5), self.child.wait())
            .await
            .is_err()
        {
            let _ = self.child.kill().await;
        }
    }
}
