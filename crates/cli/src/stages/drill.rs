//! Running episodes of one policy: what rollout and evaluation share.

use std::collections::BTreeMap;
use std::env;
use std::sync::Arc;
use std::time::Duration;

use crate::context::{Context, Run, absolute, output};
use crate::endpoint::Endpoint;
use camino::{Utf8Path, Utf8PathBuf};
use drillyard_agent::{
    Branch, OpenAiConfig, Policy, RolloutOptions, RolloutSummary, Sampling, Shard, Stop,
    ToolProtocol, rollout,
};
use drillyard_gym::{TaskSet, Toolset, task_set};
use drillyard_render::Tokenizer;
use drillyard_sandbox::{
    AllowList, Image, ImageStore, Limits, LimitsReport, Network, Pool, SandboxConfig,
};
use drillyard_schema::{Purpose, Split, Task};
use drillyard_stage::exit::{ENVIRONMENT, INPUT, INTERRUPTED, OUTPUT, REFUSED, USAGE};
use drillyard_stage::{Failure, Pipeline, PolicyConfig, PolicyKind, SandboxSettings};
use serde::Deserialize;

use super::faults::fault_plan;

/// A policy as a run knows it before anything is started.
#[derive(Debug, Clone)]
pub(crate) struct PolicySpec {
    /// What reports call it.
    pub name: String,
    /// The pipeline's settings, with this policy's model and temperature.
    pub config: PolicyConfig,
    /// Hash of the checkpoint, or the endpoint's address and model.
    pub revision: String,
    /// Where the checkpoint is served already.
    pub served: Option<Served>,
}

/// A checkpoint that another process serves.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Served {
    /// Where it listens, such as `127.0.0.1:40123`.
    pub listening: String,
    /// The model's name there.
    pub model: String,
    /// Hash of the weights.
    pub weights_hash: String,
}

/// Hash over the files that decide what a checkpoint says.
pub(crate) fn revision_of(model: &Utf8Path) -> Result<String, Failure> {
    let mut hasher = blake3::Hasher::new();
    for name in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    ] {
        let path = model.join(name);
        let content = fs_err::read(&path).map_err(|e| {
            Failure::new(INPUT, format!("{path}: {}", e.kind())).hint("a checkpoint folder holds config.json, model.safetensors, tokenizer.json and chat_template.jinja; datasets/base is the embedded one")
        })?;
        hasher.update(name.as_bytes());
        hasher.update(&(content.len() as u64).to_le_bytes());
        hasher.update(&content);
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

impl PolicySpec {
    /// The pipeline's policy, by `name`; a checkpoint `model` and a `temperature` replace its own.
    pub(crate) fn of(
        pipeline: &Pipeline,
        name: &str,
        model: Option<&str>,
        temperature: Option<f64>,
    ) -> Result<Self, Failure> {
        let mut config = pipeline.policy.clone();
        if let Some(model) = model {
            model.clone_into(&mut config.model);
            config.kind = PolicyKind::Checkpoint;
        }
        if let Some(temperature) = temperature {
            config.temperature = temperature;
        }
        let revision = match config.kind {
            PolicyKind::Checkpoint => revision_of(Utf8Path::new(&config.model))?,
            PolicyKind::Openai => format!(
                "{} at {}",
                config.model,
                config.base_url.as_deref().unwrap_or_default()
            ),
            PolicyKind::Expert => format!("expert, mistake rate {}", config.mistake_rate),
        };
        Ok(Self {
            name: name.to_owned(),
            config,
            revision,
            served: None,
        })
    }

    /// A checkpoint that `served` answers for; `dir` holds the same tokenizer and template.
    pub(crate) fn served(
        pipeline: &Pipeline,
        name: &str,
        dir: &Utf8Path,
        served: Served,
        temperature: f64,
    ) -> Self {
        let mut config = pipeline.policy.clone();
        dir.as_str().clone_into(&mut config.model);
        config.kind = PolicyKind::Checkpoint;
        config.temperature = temperature;
        Self {
            name: name.to_owned(),
            config,
            revision: served.weights_hash.clone(),
            served: Some(served),
        }
    }

    /// Starts what has to run for the policy to answer.
    async fn start(
        &self,
        context: &Context,
        max_batch: usize,
    ) -> Result<(Policy, Option<Endpoint>), Failure> {
        let wrong = |e: drillyard_agent::PolicyError| Failure::from_error(USAGE, &e);
        match self.config.kind {
            PolicyKind::Expert => Ok((Policy::expert(self.config.mistake_rate), None)),
            PolicyKind::Openai => {
                let base_url = self.config.base_url.clone().unwrap_or_default();
                let protocol = if self.config.native_tools {
                    ToolProtocol::Native
                } else {
                    ToolProtocol::Text
                };
                let api_key = match &self.config.api_key_env {
                    Some(variable) => Some(env::var(variable).map_err(|_| {
                        Failure::new(
                            USAGE,
                            format!("policy.api_key_env: the environment has no {variable}"),
                        )
                        .hint(format!(
                            "export {variable}=…, or remove the key from the pipeline"
                        ))
                    })?),
                    None => None,
                };
                context.ui.note(format!(
                    "{:>10} {} at {base_url}",
                    "policy", self.config.model
                ));
                let config = OpenAiConfig {
                    api_key,
                    timeout: Duration::from_secs_f64(self.config.timeout_s),
                    ..OpenAiConfig::plain(base_url, self.config.model.clone(), protocol)
                };
                Ok((
                    Policy::openai(self.name.clone(), config).map_err(wrong)?,
                    None,
                ))
            }
            PolicyKind::Checkpoint => {
                let (served, endpoint) = if let Some(served) = &self.served {
                    (served.clone(), None)
                } else {
                    let endpoint = Endpoint::start(
                        Utf8Path::new(&self.config.model),
                        self.config.threads,
                        max_batch,
                        &context.ui,
                    )
                    .await?;
                    (endpoint.served.clone(), Some(endpoint))
                };
                let config =
                    OpenAiConfig::drillyard(&served.listening, served.model, served.weights_hash);
                Ok((
                    Policy::openai(self.name.clone(), config).map_err(wrong)?,
                    endpoint,
                ))
            }
        }
    }
}

/// Episodes of one policy on a list of tasks.
pub(crate) struct Drill<'a> {
    /// The front door's context.
    pub context: &'a Context,
    /// The run the episodes belong to.
    pub run: Run,
    /// What they are for.
    pub purpose: Purpose,
    /// What is asked.
    pub tasks: Vec<Task>,
    /// Episodes per task.
    pub samples: u32,
    /// Who answers.
    pub policy: PolicySpec,
    /// Seed of the episodes.
    pub seed: u64,
    /// The part of the work done here.
    pub shard: Option<(u32, u32)>,
    /// What the progress bar is called.
    pub label: String,
}

impl Drill<'_> {
    /// Runs every episode that the lake does not hold yet.
    ///
    /// # Errors
    /// A policy, sandbox or lake that can't be used, or a stop by the user.
    pub(crate) async fn execute(&self) -> Result<RolloutSummary, Failure> {
        let pool = sandboxes(self.context).await?;
        self.execute_in(pool, None).await
    }

    /// The same in sandboxes of `pool`, every episode leaving a recorded one where `branch` names it.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub(crate) async fn execute_in(
        &self,
        pool: Pool,
        branch: Option<Branch>,
    ) -> Result<RolloutSummary, Failure> {
        let pipeline = &self.context.pipeline;
        let (policy, endpoint) = self
            .policy
            .start(self.context, pipeline.rollout.concurrency)
            .await?;
        let tokenizer = match self.policy.config.kind {
            PolicyKind::Checkpoint => {
                let dir = Utf8Path::new(&self.policy.config.model);
                Some(Arc::new(
                    Tokenizer::load(dir).map_err(|e| Failure::from_error(INPUT, &e))?,
                ))
            }
            _ => None,
        };
        let stop = Stop::new();
        let _listening = stop.on_ctrl_c();
        let (index, count) = self.shard.or_else(shard_of_environment).unwrap_or((0, 1));
        let options = RolloutOptions {
            samples: self.samples,
            sampling: Sampling {
                temperature: self.policy.config.temperature,
                top_p: 1.0,
                max_tokens: self.policy.config.max_tokens,
            },
            seed: self.seed,
            concurrency: pipeline.rollout.concurrency,
            max_steps: pipeline.rollout.max_steps,
            observation_bytes: pipeline.rollout.observation_bytes,
            call_timeout: Duration::from_secs_f64(pipeline.sandbox.limits.call_s),
            episode_timeout: Duration::from_secs_f64(pipeline.sandbox.limits.episode_s),
            tokenizer,
            shard: Shard { index, count },
            artifacts_dir: Some(self.context.dir("artifacts")?),
            faults: fault_plan(pipeline, self.purpose)?,
            branch,
            stop: stop.clone(),
            ..RolloutOptions::new(
                self.run.run_id.clone(),
                self.run.run_date.clone(),
                self.purpose,
                self.tasks.clone(),
                policy,
                self.context.dir("journal")?,
            )
        };
        let bar = self.context.ui.bar(
            &self.label,
            self.tasks.len() as u64 * u64::from(self.samples),
        );
        let result = rollout(options, &self.context.lake, &pool, &bar).await;
        if let Some(endpoint) = endpoint {
            endpoint.stop().await;
        }
        drop(pool);
        let summary = result.map_err(|e| agent_failure(&e))?;
        bar.finish(format!(
            "{} episodes · {} · {:.1} episodes/s · {:.0} tokens/s{}",
            summary.done,
            summary.success_rate().map_or_else(
                || "nothing scored".to_owned(),
                |rate| format!("{:.1} % success", rate * 100.0)
            ),
            summary.done as f64 / summary.wall_s.max(1e-3),
            summary.generated_tokens as f64 / summary.wall_s.max(1e-3),
            if summary.earlier > 0 {
                format!(" · {} were in the lake already", summary.earlier)
            } else {
                String::new()
            },
        ));
        for (reason, cause) in &summary.causes {
            self.context.ui.warn(format!("{reason}: {cause}"));
        }
        if !summary.is_complete() {
            return Err(Failure::new(
                INTERRUPTED,
                format!("stopped with {} episodes left", summary.left),
            )
            .hint("run the same command again to go on where this stopped"));
        }
        Ok(summary)
    }
}

/// Starts the sandboxes of the pipeline, says which limits hold, and refuses where one that is required does not.
///
/// # Errors
/// As [`started`].
pub(crate) async fn sandboxes(context: &Context) -> Result<Pool, Failure> {
    let pipeline = &context.pipeline;
    let required = &pipeline.sandbox.require_limits;
    started(sandbox_config(pipeline)?, required, |limits| {
        context.limits_once(limits);
        Ok(())
    })
    .await
}

/// Starts sandboxes and refuses where a limit that is required does not hold. There is no other way to them, so that a requirement
/// holds for every verb; `show` is told which limits hold before that.
///
/// # Errors
/// A host that forbids isolation, an engine that does not answer, a required limit that does not hold and its way out.
pub(crate) async fn started(
    config: SandboxConfig,
    required: &[String],
    show: impl FnOnce(&LimitsReport) -> Result<(), Failure>,
) -> Result<Pool, Failure> {
    let pool = Pool::start(config).await.map_err(|e| sandbox_failure(&e))?;
    show(pool.limits())?;
    let required: Vec<&str> = required.iter().map(String::as_str).collect();
    let held = pool.limits().require(&required);
    held.map_err(|e| sandbox_failure(&e))?;
    Ok(pool)
}

/// What the sandboxes' errors are to the front door.
pub(crate) fn sandbox_failure(error: &drillyard_sandbox::SandboxError) -> Failure {
    use drillyard_sandbox::SandboxError;
    let code = match error {
        SandboxError::Config { .. } => USAGE,
        SandboxError::LimitsDoNotHold { .. } => REFUSED,
        // An image that is named, its source, a recipe or its commands.
        SandboxError::Image { .. } | SandboxError::Setup { .. } => INPUT,
        _ if error.is_full_or_forbidden() => OUTPUT,
        _ => ENVIRONMENT,
    };
    Failure::from_error(code, error)
}

/// The images of the yard.
///
/// # Errors
/// A folder that can't be made or read.
pub(crate) fn image_store(pipeline: &Pipeline) -> Result<ImageStore, Failure> {
    let dir = absolute(&pipeline.yard)?;
    fs_err::create_dir_all(&dir).map_err(|e| output(&dir, &e))?;
    ImageStore::open(dir).map_err(|e| sandbox_failure(&e))
}

/// The settings of the sandboxes as the sandbox crate takes them.
pub(crate) fn sandbox_config(pipeline: &Pipeline) -> Result<SandboxConfig, Failure> {
    let settings = &pipeline.sandbox;
    if !["local", "docker"].contains(&settings.backend.as_str()) {
        return Err(Failure::new(
            USAGE,
            format!("sandbox.backend: '{}' is not known", settings.backend),
        )
        .hint("the backends are \"local\" and \"docker\""));
    }
    let limits = &settings.limits;
    let network = if settings.network.is_empty() {
        Network::None
    } else {
        let mut list =
            AllowList::parse(&settings.network).map_err(|e| Failure::from_error(USAGE, &e))?;
        if !settings.network_cache.as_str().is_empty() {
            list.cache = Some(absolute(&settings.network_cache)?);
        }
        Network::Allow(list)
    };
    Ok(SandboxConfig {
        backend: settings.backend.clone(),
        image: if settings.image == "host" {
            Image::Host
        } else {
            image_store(pipeline)?
                .find(&settings.image)
                .map_err(|e| sandbox_failure(&e).hint("`drillyard image list` shows those there are, `drillyard image import PATH` brings one in"))?
                .image()
        },
        cache_dir: Some(absolute(&pipeline.yard)?.join("cache")),
        network,
        oversubscription: settings.oversubscription,
        limits: Limits {
            call_timeout: Duration::from_secs_f64(limits.call_s),
            episode_timeout: Duration::from_secs_f64(limits.episode_s),
            memory_bytes: limits.memory_mib << 20,
            disk_bytes: limits.disk_mib << 20,
            files: limits.files,
            io_bytes_per_s: (limits.io_mib_s > 0).then_some(limits.io_mib_s << 20),
            pids: limits.processes,
            output_bytes: limits.output_kib << 10,
            cpus: limits.cpus,
            ..Limits::default()
        },
        ..SandboxConfig::default()
    })
}

/// This process's part when an array job runs many: Slurm's and Kubernetes' own variables.
fn shard_of_environment() -> Option<(u32, u32)> {
    let number = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    let pairs = [
        ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
        ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
    ];
    pairs
        .into_iter()
        .find_map(|(index, count)| Some((number(index)?, number(count)?)))
        .filter(|(index, count)| index < count)
}

pub(crate) fn agent_failure(error: &drillyard_agent::AgentError) -> Failure {
    use drillyard_agent::AgentError;
    match error {
        AgentError::Policy(_) => Failure::from_error(ENVIRONMENT, error)
            .hint("start the endpoint, or check policy.base_url in the pipeline"),
        AgentError::Lake(lake) if !lake.is_output() => Failure::from_error(INPUT, error),
        AgentError::Lake(_) | AgentError::Artifact { .. } => Failure::from_error(OUTPUT, error),
        AgentError::Options(_) => Failure::from_error(USAGE, error),
        AgentError::CannotLeave { way_out, .. } => {
            Failure::from_error(REFUSED, error).hint(way_out)
        }
        AgentError::Sandbox(sandbox) => Failure {
            code: sandbox_failure(sandbox).code,
            ..Failure::from_error(ENVIRONMENT, error)
        },
        _ => Failure::from_error(ENVIRONMENT, error),
    }
}

/// The task set that the pipeline names.
pub(crate) fn named_task_set(name: &str) -> Result<Arc<dyn TaskSet>, Failure> {
    task_set(name).ok_or_else(|| {
        Failure::new(INPUT, format!("tasks.set: there is no task set '{name}'"))
            .hint(format!("one of: {}", drillyard_gym::TASK_SETS.join(", ")))
    })
}

/// The tools that tasks of a set offer.
pub(crate) fn toolset(tasks: &[Task]) -> Result<Toolset, Failure> {
    let names = tasks.first().map(|t| t.tools.clone()).unwrap_or_default();
    Toolset::named(&names).map_err(|e| Failure::from_error(USAGE, &e))
}

/// `n` tasks of a split, restricted to the pipeline's families.
pub(crate) fn tasks(
    pipeline: &Pipeline,
    split: Split,
    n: usize,
    seed: u64,
) -> Result<Vec<Task>, Failure> {
    let set = named_task_set(&pipeline.tasks.set)?;
    if let Some(unknown) = pipeline
        .tasks
        .families
        .iter()
        .find(|f| !set.families().iter().any(|known| known.name == f.as_str()))
    {
        let known: Vec<&str> = set.families().iter().map(|f| f.name).collect();
        return Err(Failure::new(
            USAGE,
            format!(
                "tasks.families: {} has no family '{unknown}'",
                pipeline.tasks.set
            ),
        )
        .hint(format!("one of: {}", known.join(", "))));
    }
    let wanted = |task: &Task| {
        pipeline.tasks.families.is_empty() || pipeline.tasks.families.contains(&task.family)
    };
    let mut tasks = set.generate(split, n, seed);
    tasks.retain(wanted);
    Ok(tasks)
}

/// Everything that decides which episodes a drill produces, as a run id is derived from it.
pub(crate) fn deciding(
    pipeline: &Pipeline,
    policy: &PolicySpec,
    more: &BTreeMap<&str, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    let set = named_task_set(&pipeline.tasks.set)?;
    let json = |value: serde_json::Result<String>| value.unwrap_or_default();
    let mut parts: BTreeMap<String, String> = BTreeMap::from([
        (
            "task_set".to_owned(),
            format!("{}@{}", set.name(), set.version()),
        ),
        ("families".to_owned(), pipeline.tasks.families.join(",")),
        (
            "toolset".to_owned(),
            toolset(&set.generate(Split::Train, 1, 0))?.hash,
        ),
        ("policy".to_owned(), policy.revision.clone()),
        (
            "temperature".to_owned(),
            policy.config.temperature.to_string(),
        ),
        (
            "max_tokens".to_owned(),
            policy.config.max_tokens.to_string(),
        ),
        (
            "rollout".to_owned(),
            json(serde_json::to_string(&drillyard_stage::RolloutConfig {
                concurrency: 1,
                ..pipeline.rollout.clone()
            })),
        ),
        (
            "sandbox".to_owned(),
            json(serde_json::to_string(&SandboxSettings {
                // What a host must grant, and how full it may get, decides no episode.
                require_limits: Vec::new(),
                oversubscription: 1.0,
                ..pipeline.sandbox.clone()
            })),
        ),
        (
            "agent".to_owned(),
            drillyard_schema::DRILLYARD_VERSION.to_owned(),
        ),
    ]);
    parts.extend(
        more.iter()
            .map(|(key, value)| ((*key).to_owned(), value.clone())),
    );
    Ok(parts)
}

/// The folder of a checkpoint, from the root, so that other processes find it.
pub(crate) fn model_dir(model: &str) -> Result<Utf8PathBuf, Failure> {
    absolute(Utf8Path::new(model))
}
