//! A pipeline file: everything a run needs to know, in stage order.

use camino::{Utf8Path, Utf8PathBuf};
use serde::{Deserialize, Serialize};

use crate::exit::{INPUT, USAGE};
use crate::{Failure, FaultsConfig};

/// A pipeline: which tasks, which policy, which rewards, which training, which gates. One TOML file, read top to bottom in stage order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipeline {
    /// Short name; part of run ids.
    pub name: String,
    /// Seed of everything that is drawn.
    #[serde(default = "defaults::seed")]
    pub seed: u64,
    /// Folder of all run state, relative to the working directory.
    #[serde(default = "defaults::yard")]
    pub yard: Utf8PathBuf,
    /// What is asked.
    #[serde(default)]
    pub tasks: TasksConfig,
    /// Who answers.
    #[serde(default)]
    pub policy: PolicyConfig,
    /// How episodes are run.
    #[serde(default)]
    pub rollout: RolloutConfig,
    /// Where they run.
    #[serde(default)]
    pub sandbox: SandboxSettings,
    /// Faults injected on purpose.
    #[serde(default)]
    pub faults: FaultsConfig,
    /// Where recorded trajectories come from, for pipelines that import instead of rolling out.
    #[serde(default)]
    pub import: ImportConfig,
    /// How they are judged.
    #[serde(default)]
    pub qa: QaConfig,
    /// How outcomes become credit.
    #[serde(default)]
    pub credit: CreditConfig,
    /// How the policy learns.
    #[serde(default)]
    pub train: TrainConfig,
    /// How it is measured.
    #[serde(default)]
    pub eval: EvalConfig,
}

/// What is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TasksConfig {
    /// Task set: `wrangle` or `text2sql`.
    pub set: String,
    /// Number of training tasks.
    pub train: usize,
    /// Episodes per task.
    pub samples: u32,
    /// Only these families; empty means all.
    pub families: Vec<String>,
}

impl Default for TasksConfig {
    fn default() -> Self {
        Self {
            set: "wrangle".to_owned(),
            train: 400,
            samples: 8,
            families: Vec::new(),
        }
    }
}

/// What answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// A checkpoint folder, served by Drillyard on loopback.
    Checkpoint,
    /// An OpenAI-compatible endpoint.
    Openai,
    /// The task set's scripted expert.
    Expert,
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Which kind of policy.
    pub kind: PolicyKind,
    /// Checkpoint folder in Hugging Face layout, or the model's name at the endpoint.
    pub model: String,
    /// Endpoint, such as `http://127.0.0.1:8000/v1`.
    pub base_url: Option<String>,
    /// Environment variable that holds the endpoint's key.
    pub api_key_env: Option<String>,
    /// Whether the endpoint is asked for native tool calls; otherwise calls are parsed out of the text.
    pub native_tools: bool,
    /// Sampling temperature.
    pub temperature: f64,
    /// Tokens generated per turn at most.
    pub max_tokens: u32,
    /// The scripted expert's share of episodes with its family's systematic mistake.
    pub mistake_rate: f64,
    /// Threads of the embedded server.
    pub threads: usize,
    /// Seconds that one answer of an endpoint may take, the wait for its queue included.
    pub timeout_s: f64,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            kind: PolicyKind::Checkpoint,
            model: "datasets/base".to_owned(),
            base_url: None,
            api_key_env: None,
            native_tools: false,
            temperature: 1.0,
            max_tokens: 96,
            mistake_rate: 0.55,
            threads: 2,
            timeout_s: 300.0,
        }
    }
}

/// How episodes are run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutConfig {
    /// Episodes in flight.
    pub concurrency: usize,
    /// Model turns per episode at most.
    pub max_steps: u32,
    /// Bytes of a tool's output shown to the model at most.
    pub observation_bytes: usize,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            concurrency: 64,
            max_steps: 6,
            observation_bytes: 4096,
        }
    }
}

/// Where episodes run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxSettings {
    /// `local`, or `docker` for containers of the engine that DOCKER_HOST names.
    pub backend: String,
    /// Root file system: `host` for the host's own programs, or an image's name or digest (`drillyard image list`).
    pub image: String,
    /// Hosts that tools may reach, such as `pypi.org:443`; none by default.
    pub network: Vec<String>,
    /// Folder in which answers to plain HTTP GETs are kept, so that later episodes get the same; none when empty.
    pub network_cache: Utf8PathBuf,
    /// Limits without which nothing is run, by their names in `drillyard limits`; `all` for every one.
    pub require_limits: Vec<String>,
    /// How many times over memory may be promised to sandboxes, from 1 to 2; what they are measured to use decides.
    pub oversubscription: f64,
    /// What a sandbox may use.
    pub limits: LimitsConfig,
}

impl Default for SandboxSettings {
    fn default() -> Self {
        Self {
            backend: "local".to_owned(),
            image: "host".to_owned(),
            network: Vec::new(),
            network_cache: Utf8PathBuf::new(),
            require_limits: Vec::new(),
            oversubscription: 2.0,
            limits: LimitsConfig::default(),
        }
    }
}

/// What a sandbox may use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Seconds a tool call may take.
    pub call_s: f64,
    /// Seconds an episode may take.
    pub episode_s: f64,
    /// Processor cores.
    pub cpus: f64,
    /// Memory.
    pub memory_mib: u64,
    /// Private disk (work directory and /tmp).
    pub disk_mib: u64,
    /// Files on it.
    pub files: u64,
    /// Disk traffic a second, reading and writing each; 0 for no limit.
    pub io_mib_s: u64,
    /// Processes.
    pub processes: u64,
    /// Output of one call kept.
    pub output_kib: u64,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            call_s: 30.0,
            episode_s: 600.0,
            cpus: 2.0,
            memory_mib: 4096,
            disk_mib: 10_240,
            files: 100_000,
            io_mib_s: 0,
            processes: 256,
            output_kib: 1024,
        }
    }
}

/// Where recorded trajectories come from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImportConfig {
    /// File or folder; empty for pipelines that roll out.
    pub path: Utf8PathBuf,
    /// `intercode` or `tau_bench`; found by content when empty.
    pub format: String,
}

/// How episodes are judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QaConfig {
    /// Folders of rule files.
    pub rules: Vec<Utf8PathBuf>,
    /// The share of episodes that may have findings of blocking rules before the run stops.
    pub block_above: f64,
}

impl Default for QaConfig {
    fn default() -> Self {
        Self {
            rules: vec!["sql/qa".into()],
            block_above: 0.5,
        }
    }
}

/// A scheme that composes raw reward components into rewards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardScheme {
    /// λ1·completion + λ2·step + λ3·efficiency − λ4·violation.
    Weighted,
    /// +1 for success, partial credit in between, −0.5 for failure, small step rewards.
    Signed,
    /// Outcome and call format only.
    Outcome,
}

/// How outcomes become credit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CreditConfig {
    /// How components are composed.
    pub scheme: RewardScheme,
    /// Discount per step.
    pub gamma: f64,
    /// Divide advantages by the group's standard deviation.
    pub normalise: bool,
    /// Pairs per task at most.
    pub pairs_per_task: usize,
    /// Negative control: permute whole outcomes within each task before anything else.
    pub control: bool,
}

impl Default for CreditConfig {
    fn default() -> Self {
        Self {
            scheme: RewardScheme::Signed,
            gamma: 0.99,
            normalise: true,
            pairs_per_task: 4,
            control: false,
        }
    }
}

/// How the policy learns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Cross-entropy on every episode's own tokens.
    Imitation,
    /// Cross-entropy on the successes only.
    RejectionSampling,
    /// Offline GRPO with a contrastive and a format term.
    Grpo,
    /// Cross-entropy on successes plus a preference term on pairs: what works without behaviour log-probabilities.
    ImitationPairs,
}

/// How the policy learns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// The algorithm.
    pub method: Method,
    /// Checkpoint to start from; empty means the policy's own, `fresh` draws new weights.
    pub init: String,
    /// Passes over the data.
    pub epochs: u32,
    /// Tokens per batch.
    pub batch_tokens: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Share of steps over which the rate rises.
    pub warmup: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Gradient norm is clipped to this.
    pub max_grad_norm: f64,
    /// Ratios below 1 − this are clipped.
    pub clip_low: f64,
    /// Ratios above 1 + this are clipped.
    pub clip_high: f64,
    /// Weight of the KL term to the reference.
    pub kl: f64,
    /// Weight of the contrastive term between success and failure representations.
    pub contrastive: f64,
    /// Weight of the supervised term on action format.
    pub format: f64,
    /// Validate every so many steps; 0 never.
    pub validate_every: u32,
    /// Tasks of a validation: during training, and where nights decide about the champion.
    pub validation_tasks: usize,
    /// Provenance gate: smallest effective sample size, as a share of tokens.
    pub min_ess: f64,
    /// Provenance gate: largest mean KL between the behaviour policy and today's weights.
    pub max_kl: f64,
    /// Threads.
    pub threads: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            method: Method::Grpo,
            init: String::new(),
            epochs: 2,
            batch_tokens: 8192,
            lr: 3e-4,
            warmup: 0.05,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            clip_low: 0.2,
            clip_high: 0.28,
            kl: 0.01,
            contrastive: 0.02,
            format: 0.02,
            validate_every: 0,
            validation_tasks: 64,
            min_ess: 0.5,
            max_kl: 0.1,
            threads: 2,
        }
    }
}

/// How it is measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Held-out tasks of trained families.
    pub tasks: usize,
    /// Tasks of each family never trained on.
    pub unseen_tasks: usize,
    /// Episodes per task.
    pub samples: u32,
    /// Sampling temperature; the same for both policies.
    pub temperature: f64,
    /// Seed of tasks and sampling; the same for both policies.
    pub seed: u64,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            tasks: 400,
            unseen_tasks: 20,
            samples: 1,
            temperature: 1.0,
            seed: 1_000_003,
        }
    }
}

mod defaults {
    pub(super) fn seed() -> u64 {
        7
    }

    pub(super) fn yard() -> camino::Utf8PathBuf {
        "yard".into()
    }
}

impl Pipeline {
    /// Reads `path` and applies `overrides` such as `train.lr=1e-4`.
    ///
    /// # Errors
    /// A missing file, broken TOML, an unknown key or a bad value, each with its place and the way out.
    pub fn load(path: &Utf8Path, overrides: &[String]) -> Result<Self, Failure> {
        let text = fs_err::read_to_string(path).map_err(|e| {
            Failure::new(INPUT, format!("pipeline {path}: {}", e.kind())).hint("pipelines/ holds the ones that come with Drillyard; name one with PIPELINE=pipelines/NAME.toml")
        })?;
        Self::parse(&text, path.as_str(), overrides)
    }

    /// Reads a pipeline from text; `origin` names it in errors.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Self, Failure> {
        let mut table: toml::Table = toml::from_str(text).map_err(|e: toml::de::Error| {
            Failure::new(USAGE, format!("{origin}: {}", e.to_string().trim_end()))
        })?;
        for text in overrides {
            apply(&mut table, text)?;
        }
        sections(&table, &default_table(), "")
            .map_err(|why| Failure::new(USAGE, format!("{origin}: {why}")))?;
        let pipeline: Self =
            serde_path_to_error::deserialize(toml::Value::Table(table)).map_err(|e| {
                let path = e.path().to_string();
                let inner = e.into_inner().to_string();
                Failure::new(USAGE, format!("{origin}: {path}: {}", inner.trim_end()))
                    .hint("every key is described in pipelines/README.md")
            })?;
        pipeline.check(origin)?;
        Ok(pipeline)
    }

    fn check(&self, origin: &str) -> Result<(), Failure> {
        let wrong =
            |key: &str, why: String| Err(Failure::new(USAGE, format!("{origin}: {key}: {why}")));
        let name_ok = !self.name.is_empty()
            && self
                .name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        if !name_ok {
            return wrong(
                "name",
                format!("'{}' must be letters, digits, '-' or '_'", self.name),
            );
        }
        if self.yard.as_str().is_empty() {
            return wrong(
                "yard",
                "name the folder that takes all run state".to_owned(),
            );
        }
        for (key, value, least, most) in self.ranges() {
            // The comparison also refuses what is not a number.
            if !(least..=most).contains(&value) {
                return wrong(key, format!("{value} must lie between {least} and {most}"));
            }
        }
        if self.policy.kind == PolicyKind::Openai && self.policy.base_url.is_none() {
            return wrong(
                "policy.base_url",
                "is needed for kind = \"openai\", such as http://127.0.0.1:8000/v1".to_owned(),
            );
        }
        Ok(())
    }

    /// Every number with its key, and the least and the most it may be.
    fn ranges(&self) -> Vec<(&'static str, f64, f64, f64)> {
        const MILLION: f64 = 1e6;
        /// The least of what must be above 0.
        const TINY: f64 = 1e-12;
        let count = |n: usize| n as f64;
        let (tasks, policy, rollout) = (&self.tasks, &self.policy, &self.rollout);
        let (limits, faults, credit) = (&self.sandbox.limits, &self.faults, &self.credit);
        let (train, eval) = (&self.train, &self.eval);
        vec![
            ("tasks.train", count(tasks.train), 1.0, 10.0 * MILLION),
            ("tasks.samples", tasks.samples.into(), 1.0, 10_000.0),
            ("policy.temperature", policy.temperature, 0.0, 100.0),
            ("policy.max_tokens", policy.max_tokens.into(), 1.0, MILLION),
            ("policy.mistake_rate", policy.mistake_rate, 0.0, 1.0),
            ("policy.threads", count(policy.threads), 1.0, 1024.0),
            ("policy.timeout_s", policy.timeout_s, 0.1, 86_400.0),
            (
                "rollout.concurrency",
                count(rollout.concurrency),
                1.0,
                4096.0,
            ),
            (
                "rollout.max_steps",
                rollout.max_steps.into(),
                1.0,
                100_000.0,
            ),
            (
                "rollout.observation_bytes",
                count(rollout.observation_bytes),
                64.0,
                64.0 * MILLION,
            ),
            ("sandbox.limits.call_s", limits.call_s, 0.001, 86_400.0),
            ("sandbox.limits.episode_s", limits.episode_s, 0.001, MILLION),
            ("sandbox.limits.cpus", limits.cpus, 0.01, 1024.0),
            (
                "sandbox.limits.memory_mib",
                limits.memory_mib as f64,
                16.0,
                16.0 * MILLION,
            ),
            (
                "sandbox.limits.disk_mib",
                limits.disk_mib as f64,
                1.0,
                100.0 * MILLION,
            ),
            (
                "sandbox.limits.files",
                limits.files as f64,
                16.0,
                100.0 * MILLION,
            ),
            (
                "sandbox.limits.io_mib_s",
                limits.io_mib_s as f64,
                0.0,
                MILLION,
            ),
            (
                "sandbox.oversubscription",
                self.sandbox.oversubscription,
                1.0,
                2.0,
            ),
            (
                "sandbox.limits.processes",
                limits.processes as f64,
                4.0,
                4.0 * MILLION,
            ),
            (
                "sandbox.limits.output_kib",
                limits.output_kib as f64,
                1.0,
                4.0 * MILLION,
            ),
            ("faults.slow", faults.slow.rate, 0.0, 1.0),
            (
                "faults.permission_denied",
                faults.permission_denied.rate,
                0.0,
                1.0,
            ),
            (
                "faults.network_failure",
                faults.network_failure.rate,
                0.0,
                1.0,
            ),
            (
                "faults.concurrent_change",
                faults.concurrent_change.rate,
                0.0,
                1.0,
            ),
            (
                "faults.truncated_output",
                faults.truncated_output.rate,
                0.0,
                1.0,
            ),
            ("faults.disk_full", faults.disk_full.rate, 0.0, 1.0),
            ("qa.block_above", self.qa.block_above, 0.0, 1.0),
            ("credit.gamma", credit.gamma, 0.0, 1.0),
            (
                "credit.pairs_per_task",
                count(credit.pairs_per_task),
                0.0,
                MILLION,
            ),
            ("train.epochs", train.epochs.into(), 1.0, MILLION),
            (
                "train.batch_tokens",
                count(train.batch_tokens),
                1.0,
                1000.0 * MILLION,
            ),
            ("train.lr", train.lr, TINY, 10.0),
            ("train.warmup", train.warmup, 0.0, 1.0),
            ("train.weight_decay", train.weight_decay, 0.0, 10.0),
            ("train.max_grad_norm", train.max_grad_norm, 0.0, MILLION),
            ("train.clip_low", train.clip_low, 0.0, 1.0),
            ("train.clip_high", train.clip_high, 0.0, 100.0),
            ("train.kl", train.kl, 0.0, 100.0),
            ("train.contrastive", train.contrastive, 0.0, 100.0),
            ("train.format", train.format, 0.0, 100.0),
            (
                "train.validation_tasks",
                count(train.validation_tasks),
                1.0,
                MILLION,
            ),
            ("train.min_ess", train.min_ess, 0.0, 1.0),
            ("train.max_kl", train.max_kl, 0.0, 100.0),
            ("train.threads", count(train.threads), 1.0, 1024.0),
            ("eval.tasks", count(eval.tasks), 1.0, MILLION),
            ("eval.unseen_tasks", count(eval.unseen_tasks), 0.0, MILLION),
            ("eval.samples", eval.samples.into(), 1.0, 10_000.0),
            ("eval.temperature", eval.temperature, 0.0, 100.0),
        ]
    }

    /// The pipeline as JSON, as run records keep it.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// A folder of the yard.
    pub fn dir(&self, name: &str) -> Utf8PathBuf {
        self.yard.join(name)
    }
}

/// A pipeline of defaults, as TOML: it tells what is a section.
fn default_table() -> toml::Table {
    toml::from_str::<Pipeline>("name = \"default\"")
        .ok()
        .and_then(|pipeline| toml::Table::try_from(pipeline).ok())
        .unwrap_or_default()
}

/// What is a section must be a table: an array would be taken for its fields in order.
fn sections(given: &toml::Table, known: &toml::Table, parent: &str) -> Result<(), String> {
    for (key, value) in given {
        if let Some(toml::Value::Table(known)) = known.get(key) {
            let Some(value) = value.as_table() else {
                return Err(format!(
                    "{parent}{key}: is a section, not {}; set its keys, such as {parent}{key}.{}",
                    value.type_str(),
                    known.keys().next().map_or("KEY", String::as_str)
                ));
            };
            sections(value, known, &format!("{parent}{key}."))?;
        }
    }
    Ok(())
}

/// Applies one `a.b=value` override; the value is TOML, or else text.
fn apply(table: &mut toml::Table, text: &str) -> Result<(), Failure> {
    let Some((path, value)) = text.split_once('=') else {
        return Err(Failure::new(
            USAGE,
            format!("--set {text}: expected key=value"),
        ));
    };
    if !value.is_empty()
        && value.bytes().all(|b| b.is_ascii_digit())
        && value.parse::<i64>().is_err()
    {
        return Err(Failure::new(
            USAGE,
            format!("--set {text}: whole numbers go up to {}", i64::MAX),
        ));
    }
    let value = toml::from_str::<toml::Table>(&format!("v = {value}"))
        .ok()
        .and_then(|mut t| t.remove("v"))
        .unwrap_or_else(|| toml::Value::String(value.to_owned()));
    let keys: Vec<&str> = path.trim().split('.').collect();
    let Some((last, parents)) = keys.split_last() else {
        return Ok(());
    };
    let mut here = table;
    for key in parents {
        let entry = here
            .entry((*key).to_owned())
            .or_insert_with(|| toml::Value::Table(toml::Table::new()));
        let toml::Value::Table(next) = entry else {
            return Err(Failure::new(
                USAGE,
                format!("--set {text}: '{key}' is not a section"),
            ));
        };
        here = next;
    }
    here.insert((*last).to_owned(), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_name_their_key() {
        for (key, value) in [
            ("sandbox.limits.call_s", "inf"),
            ("sandbox.limits.call_s", "1e300"),
            ("policy.temperature", "nan"),
            ("eval.temperature", "-1"),
            ("eval.tasks", "9223372036854775807"),
            ("tasks.train", "0"),
            ("tasks.samples", "4294967295"),
            ("rollout.concurrency", "100000000"),
            ("train.kl", "nan"),
            ("train.epochs", "0"),
            ("train.clip_low", "-1"),
            ("sandbox.limits.processes", "0"),
        ] {
            let text = "name = 'p'";
            let failure = Pipeline::parse(text, "p.toml", &[format!("{key}={value}")]).unwrap_err();
            assert_eq!(failure.code, USAGE);
            assert!(failure.message.contains(key), "{}", failure.message);
        }
        let nowhere = Pipeline::parse("name = 'p'", "p.toml", &["yard=".to_owned()]).unwrap_err();
        assert!(nowhere.message.contains("yard"), "{}", nowhere.message);
        Pipeline::parse("name = 'p'", "p.toml", &[]).unwrap();
    }

    #[test]
    fn a_section_is_a_table() {
        for (set, key) in [
            ("tasks=[]", "tasks"),
            ("sandbox.limits=3", "sandbox.limits"),
            ("seed=18446744073709551615", "seed"),
        ] {
            let failure = Pipeline::parse("name = 'p'", "p.toml", &[set.to_owned()]).unwrap_err();
            assert_eq!(failure.code, USAGE);
            assert!(failure.message.contains(key), "{}", failure.message);
        }
    }

    #[test]
    fn an_unknown_key_names_its_path() {
        let failure = Pipeline::parse("name = \"x\"\n[train]\nlearning_rate = 1\n", "p.toml", &[])
            .unwrap_err();
        assert_eq!(failure.code, USAGE);
        assert!(
            failure.message.starts_with("p.toml: train"),
            "{}",
            failure.message
        );
        assert!(
            failure.message.contains("learning_rate"),
            "{}",
            failure.message
        );
    }

    #[test]
    fn a_bad_value_names_its_path() {
        let failure =
            Pipeline::parse("name = \"x\"\n[train]\nlr = \"fast\"\n", "p.toml", &[]).unwrap_err();
        assert!(failure.message.contains("train.lr"), "{}", failure.message);
    }

    #[test]
    fn overrides_beat_the_file() {
        let overrides = [
            "train.lr=0.5".to_owned(),
            "policy.model=elsewhere".to_owned(),
        ];
        let pipeline =
            Pipeline::parse("name = \"x\"\n[train]\nlr = 0.1\n", "p.toml", &overrides).unwrap();
        assert!((pipeline.train.lr - 0.5).abs() < 1e-12);
        assert_eq!(pipeline.policy.model, "elsewhere");
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "name = \"a b\"",
            "name = \"x\"\n[tasks]\nsamples = 0",
            "name = \"x\"\n[policy]\nkind = \"openai\"",
            "name = \"x\"\n[credit]\ngamma = 2.0",
        ] {
            assert_eq!(
                Pipeline::parse(text, "p.toml", &[]).unwrap_err().code,
                USAGE,
                "{text}"
            );
        }
    }
}
