//! Training: the offline trainer as a child process, so that the front door needs no libtorch.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_lake::Filter;
use drillyard_schema::table::EpisodeRow;
use drillyard_schema::{Split, StageRunId};
use drillyard_stage::exit::{ENVIRONMENT, INPUT, INTERRUPTED, NOTHING_TO_DO};
use drillyard_stage::{Failure, Method, Outcome, Record, Stage};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command};

use super::drill::{PolicySpec, Served, model_dir, revision_of, tasks, toolset};
use super::eval::EvalStage;
use crate::context::{Context, Run, write_atomically};
use crate::endpoint::torch_program;

/// What the trainer asks of the front door, one JSON object a line.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Request {
    /// Measure the weights it serves.
    Validate {
        step: u64,
        #[serde(flatten)]
        served: Served,
    },
}

/// Trains on one run's episodes.
pub(crate) struct TrainStage<'a> {
    context: &'a Context,
    run: Run,
    credit: StageRunId,
    scores: StageRunId,
    init: Utf8PathBuf,
    revision: String,
    output: Utf8PathBuf,
}

impl<'a> TrainStage<'a> {
    /// Training on `run` with the credit and scores given, from the checkpoint `init`.
    pub(crate) fn new(
        context: &'a Context,
        run: Run,
        credit: &Record,
        qa: &Record,
        init: &str,
    ) -> Result<Self, Failure> {
        let init = model_dir(init)?;
        let revision = revision_of(&init)?;
        let mut stage = Self {
            context,
            run,
            credit: credit.row.stage_run.clone(),
            // The control's exchanged tiers and weights bear credit's stamp.
            scores: if credit.figures["control"] == true {
                credit.row.stage_run.clone()
            } else {
                qa.row.stage_run.clone()
            },
            init,
            revision,
            output: Utf8PathBuf::new(),
        };
        let name = drillyard_stage::fingerprint(Self::NAME, Self::VERSION, &stage.inputs());
        stage.output = context.dir("checkpoints")?.join(&name[..16]);
        Ok(stage)
    }

    /// Where the trained checkpoint lies.
    pub(crate) fn checkpoint(&self) -> Result<&Utf8Path, Failure> {
        if self.output.join("model.safetensors").exists() {
            Ok(&self.output)
        } else {
            Err(
                Failure::new(INPUT, format!("{}: the checkpoint is gone", self.output))
                    .hint("run `make train` again"),
            )
        }
    }

    /// Reads what the trainer says: a request to measure its weights is answered, the last line are its figures.
    async fn attend(
        &self,
        mut stdin: ChildStdin,
        stdout: ChildStdout,
        program: &Utf8Path,
    ) -> Result<String, Failure> {
        let broken = |e: std::io::Error| Failure::io(program, &e);
        let mut lines = BufReader::new(stdout).lines();
        let mut last = String::new();
        while let Some(line) = lines.next_line().await.map_err(broken)? {
            let value: Value = serde_json::from_str(&line).unwrap_or_default();
            if value.get("event").is_some() {
                let request: Request = serde_json::from_value(value).map_err(|e| {
                    Failure::new(ENVIRONMENT, format!("{program} asks '{line}': {e}"))
                        .hint("drillyard and drillyard-torch are of different versions; build both")
                })?;
                let answer = format!("{}\n", self.measure(request).await?);
                // A trainer that died meanwhile says so by its exit status.
                let _ = stdin.write_all(answer.as_bytes()).await;
            } else {
                last = line;
            }
        }
        Ok(last)
    }

    /// Measures the weights that the trainer serves on validation tasks.
    async fn measure(&self, request: Request) -> Result<Value, Failure> {
        let Request::Validate { step, served } = request;
        let pipeline = &self.context.pipeline;
        let policy = PolicySpec::served(
            pipeline,
            &format!("step {step}"),
            &self.init,
            served,
            pipeline.eval.temperature,
        );
        let stage = EvalStage::validation(
            self.context,
            vec![policy],
            pipeline.train.validation_tasks,
            1,
        )?;
        self.context.runner.run(&stage, &self.run.run_id).await?;
        let measured = match stage.measured().await {
            // Every episode ended by infrastructure: there is no figure, and training goes on.
            Err(failure) if failure.code == NOTHING_TO_DO => return Ok(Value::Null),
            measured => measured?,
        };
        Ok(measured.first().map_or(Value::Null, |one| {
            json!({
                "success": one.figures.success.value,
                "mean_steps": one.figures.mean_steps,
                "tool_accuracy": one.figures.tool_accuracy,
            })
        }))
    }

    fn config(
        &self,
        stage_run: &StageRunId,
        versions: &BTreeMap<String, i64>,
    ) -> Result<Value, Failure> {
        let train = &self.context.pipeline.train;
        let grpo = train.method == Method::Grpo;
        let select = if train.method == Method::Imitation {
            "all"
        } else {
            "successes"
        };
        let toolset = toolset(&tasks(&self.context.pipeline, Split::Train, 1, 0)?)?;
        Ok(json!({
            "method": if grpo { "grpo" } else { "imitation" },
            "init": self.init,
            "output": self.output,
            "lake": {
                "root": self.context.lake.root(),
                "versions": versions,
                "run_ids": [self.run.run_id],
                "credit": self.credit,
                "scores": self.scores,
            },
            "toolsets": { "*": toolset.specs },
            "stage_run": stage_run,
            "seed": self.context.pipeline.seed,
            "threads": train.threads,
            "hyper": {
                "epochs": train.epochs,
                "batch_tokens": train.batch_tokens,
                "micro_tokens": train.batch_tokens,
                "learning_rate": train.lr,
                "warmup_share": train.warmup,
                "weight_decay": train.weight_decay,
                "grad_clip": train.max_grad_norm,
                "clip_low": train.clip_low,
                "clip_high": train.clip_high,
                "kl": if grpo { train.kl } else { 0.0 },
                "contrastive_weight": if grpo { train.contrastive } else { 0.0 },
                "format_weight": if grpo { train.format } else { 0.0 },
                "preference_weight": if train.method == Method::ImitationPairs { 0.5 } else { 0.0 },
                "select": select,
                "validate_every": train.validate_every,
            },
            "gate": { "min_effective_sample_share": train.min_ess, "max_kl": train.max_kl },
        }))
    }
}

impl Stage for TrainStage<'_> {
    const NAME: &'static str = "train";
    const VERSION: i32 = 1;

    fn inputs(&self) -> BTreeMap<String, String> {
        let config = serde_json::to_string(&self.context.pipeline.train).unwrap_or_default();
        BTreeMap::from([
            ("run".to_owned(), self.run.run_id.to_string()),
            ("credit".to_owned(), self.credit.to_string()),
            ("scores".to_owned(), self.scores.to_string()),
            ("init".to_owned(), self.revision.clone()),
            ("config".to_owned(), config),
            ("seed".to_owned(), self.context.pipeline.seed.to_string()),
        ])
    }

    fn is_intact(&self, _record: &Record) -> bool {
        self.checkpoint().is_ok()
    }

    async fn run(&self, stage_run: &StageRunId) -> Result<Outcome, Failure> {
        let snapshot = self
            .context
            .lake
            .snapshot()
            .await
            .map_err(|e| Failure::from_error(INPUT, &e))?;
        let filter = Filter {
            run_id: Some(self.run.run_id.clone()),
            ..Filter::default()
        };
        let episodes: Vec<EpisodeRow> = snapshot
            .read(&filter)
            .await
            .map_err(|e| Failure::from_error(INPUT, &e))?;
        let evaluation_sets = episodes.iter().filter(|e| e.evaluation_set).count();
        if evaluation_sets > 0 {
            self.context.ui.warn(format!("{evaluation_sets} of {} episodes come from public evaluation sets; a model trained on them can't be measured on those sets", episodes.len()));
        }
        let config = self.config(stage_run, snapshot.versions())?;
        let path = self
            .context
            .dir("checkpoints")?
            .join(format!("{stage_run}.json"));
        write_atomically(&path, format!("{config:#}\n").as_bytes())?;

        let program = torch_program()?;
        let validate = self.context.pipeline.train.validate_every > 0;
        let mut child = Command::new(&program)
            .args(["train", "--exit-with-parent", "--config", path.as_str()])
            .args(validate.then_some("--validate"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| Failure::new(ENVIRONMENT, format!("{program}: {e}")))?;
        let text = match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => self.attend(stdin, stdout, &program).await?,
            _ => String::new(),
        };
        let status = child.wait().await.map_err(|e| Failure::io(&program, &e))?;
        if matches!(status.signal(), Some(libc::SIGINT | libc::SIGTERM)) {
            return Err(Failure::new(INTERRUPTED, "training was interrupted")
                .hint("the same command goes on from its last saved state"));
        }
        if !status.success() {
            let code = status
                .code()
                .and_then(|c| u8::try_from(c).ok())
                .unwrap_or(ENVIRONMENT);
            return Err(Failure::new(
                code,
                format!("training ended with {status}; its own words are above"),
            ));
        }
        let mut figures: Value = serde_json::from_str(&text)
            .map_err(|e| Failure::new(ENVIRONMENT, format!("{program} gave no figures: {e}")))?;
        if let Some(share) = figures
            .pointer("/gate/drift/effective_sample_share")
            .cloned()
        {
            figures["effective_sample_share"] = share;
        }
        let written = json!({ "checkpoint": self.output });
        Ok(Outcome {
            read: snapshot.versions().clone(),
            written,
            figures,
        })
    }
}
