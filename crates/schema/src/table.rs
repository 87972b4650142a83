//! The tables of the lake: one row type each, its Arrow schema with a version, and the conversions to and from record batches.
//!
//! Key columns come first, since Delta keeps statistics of the first 32 columns. Times are UTC microseconds (`_at`), durations
//! microseconds (`_us`), sizes bytes (`_bytes`). List items are named `element`, as Delta requires. What no engine filters on and
//! what differs from source to source is JSON text in `extras`.
//!
//! Changing a table: adding a nullable column at the end keeps the version (old files read as null); anything else raises it, and
//! `lake` refuses files of a newer version than it knows.

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::ids::{EpisodeId, GroupId, RunId, StageRunId, TaskId};

/// Why rows and record batches could not be converted.
#[derive(Debug, Error)]
#[error("table {table}: {message}")]
pub struct TableError {
    /// The table concerned.
    pub table: &'static str,
    /// What the conversion said.
    pub message: String,
}

/// A point in time: microseconds since 1970-01-01 UTC.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

/// A Rust type that is a column.
pub trait Column {
    /// Its Arrow type.
    fn data_type() -> DataType;
    /// Whether it may be null.
    const NULLABLE: bool = false;

    /// The column as a field.
    fn field(name: &str) -> Field {
        Field::new(name, Self::data_type(), Self::NULLABLE)
    }
}

macro_rules! columns {
    ($($ty:ty => $data_type:expr),* $(,)?) => {
        $(impl Column for $ty {
            fn data_type() -> DataType { $data_type }
        })*
    };
}

columns! {
    String => DataType::Utf8,
    bool => DataType::Boolean,
    i32 => DataType::Int32,
    i64 => DataType::Int64,
    f32 => DataType::Float32,
    f64 => DataType::Float64,
    Timestamp => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
    EpisodeId => DataType::Utf8,
    GroupId => DataType::Utf8,
    RunId => DataType::Utf8,
    StageRunId => DataType::Utf8,
    TaskId => DataType::Utf8,
}

impl<T: Column> Column for Option<T> {
    fn data_type() -> DataType {
        T::data_type()
    }
    const NULLABLE: bool = true;
}

impl<T: Column> Column for Vec<T> {
    fn data_type() -> DataType {
        DataType::List(Arc::new(Field::new("element", T::data_type(), T::NULLABLE)))
    }
}

/// A row of a table.
pub trait Row: Serialize + DeserializeOwned + Clone + Send + Sync + 'static {
    /// The table it belongs to.
    const TABLE: Table;

    /// The columns, in order.
    fn fields() -> Vec<Field>;
}

macro_rules! structs {
    ($($(#[$meta:meta])* $name:ident { $($(#[$fmeta:meta])* $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
            pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }

            impl Column for $name {
                fn data_type() -> DataType {
                    DataType::Struct(vec![$(<$ty as Column>::field(stringify!($field))),*].into())
                }
            }
        )*
    };
}

macro_rules! tables {
    ($(
        $(#[$meta:meta])*
        $table:ident($text:literal, version $version:literal, $partitioning:ident, sorted by [$($sort:literal),*]) =
        $name:ident { $($(#[$fmeta:meta])* $field:ident: $ty:ty,)* }
    )*) => {
        /// The tables of the lake.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Table { $($(#[$meta])* $table,)* }

        impl Table {
            /// Every table.
            pub const ALL: &'static [Self] = &[$(Self::$table,)*];

            /// The table's name in SQL and its folder's name in the lake.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$table => $text,)* }
            }

            /// The version of the row schema. A reader refuses a newer one.
            pub const fn version(self) -> i32 {
                match self { $(Self::$table => $version,)* }
            }

            /// The columns its files are partitioned by.
            pub const fn partition_columns(self) -> &'static [&'static str] {
                match self { $(Self::$table => partitioning!($partitioning),)* }
            }

            /// The columns its files are sorted by.
            pub const fn sort_columns(self) -> &'static [&'static str] {
                match self { $(Self::$table => &[$($sort),*],)* }
            }

            /// The Arrow schema, partition columns included.
            pub fn schema(self) -> SchemaRef {
                match self { $(Self::$table => Arc::new(Schema::new($name::fields())),)* }
            }
        }

        $(
            $(#[$meta])*
            #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
            pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }

            impl Row for $name {
                const TABLE: Table = Table::$table;

                fn fields() -> Vec<Field> {
                    vec![$(<$ty as Column>::field(stringify!($field))),*]
                }
            }
        )*
    };
}

macro_rules! partitioning {
    (by_day_and_purpose) => {
        &["run_date", "purpose"]
    };
    (whole) => {
        &[]
    };
}

structs! {
    /// A file that a call changed.
    FileChange {
        /// Path relative to the work directory; bytes that are not UTF-8 are replaced.
        path: String,
        /// `created`, `modified` or `deleted`.
        change: String,
        /// BLAKE3 of the content before, where it was known.
        before_hash: Option<String>,
        /// BLAKE3 of the content after; absent when deleted.
        after_hash: Option<String>,
        /// Size after.
        size_bytes: i64,
    }
    /// Something too large for a row, kept beside the lake by content.
    Artifact {
        /// What it is: `step 2 call 0 stdout` (or `stderr`), whole; `file changes`, a pack of what each call changed, with contents.
        path: String,
        /// Where it is kept.
        uri: String,
        /// BLAKE3 of the content.
        blake3: String,
        /// Its size.
        size_bytes: i64,
    }
    /// A half-open range of an episode step's generated tokens that a loss treats alike.
    LossSpan {
        /// First token.
        start: i32,
        /// One past the last token.
        end: i32,
        /// `action_format` (call syntax), `action` (arguments) or `text`.
        kind: String,
    }
}

tables! {
    /// What was asked: one row per task and run that used it.
    Tasks("tasks", version 1, by_day_and_purpose, sorted by ["task_id"]) = TaskRow {
        /// Day of the run, `YYYY-MM-DD`.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run that used the task.
        run_id: RunId,
        /// The task.
        task_id: TaskId,
        /// Task set.
        task_set: String,
        /// Version of the task set.
        task_set_version: String,
        /// Kind of task within the set.
        family: String,
        /// 1 to 3 as graded by the author; null where unknown.
        difficulty: Option<i32>,
        /// See [`crate::Split`]; null for imported tasks.
        split: Option<String>,
        /// A family that no training split contains.
        unseen_family: bool,
        /// What the agent is told.
        instruction: String,
        /// JSON: how the result is checked.
        verifier: Option<String>,
        /// JSON list of milestones.
        milestones: Option<String>,
        /// True for tasks of public evaluation sets, which must not enter anyone's training data unnoticed.
        evaluation_set: bool,
        /// Where the task comes from.
        source: String,
        /// Its licence.
        licence: String,
    }

    /// One attempt at a task. A row here is what makes the episode's rows in the other tables visible.
    Episodes("episodes", version 1, by_day_and_purpose, sorted by ["episode_id"]) = EpisodeRow {
        /// Day of the run, `YYYY-MM-DD`.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The episode.
        episode_id: EpisodeId,
        /// Its group.
        group_id: GroupId,
        /// Its task.
        task_id: TaskId,
        /// Task set.
        task_set: String,
        /// Kind of task within the set.
        family: String,
        /// See [`crate::Split`]; null for imported episodes.
        split: Option<String>,
        /// `finished`, or `infrastructure` where something other than the agent ended it.
        status: String,
        /// See [`crate::EndReason`].
        end_reason: String,
        /// What failed, for infrastructure ends.
        infrastructure_cause: Option<String>,
        /// Policy name as the pipeline calls it.
        policy: String,
        /// Hash of the policy's weights, or the served model's name where weights are out of sight.
        policy_revision: String,
        /// Which sample of the group.
        sample_index: i32,
        /// Which attempt at the sample; rises when an infrastructure fault made it start afresh.
        attempt: i32,
        /// Sampling temperature.
        temperature: f64,
        /// Steps taken.
        n_steps: i32,
        /// Tool calls made.
        n_tool_calls: i32,
        /// Turns that could not be parsed.
        n_parse_errors: i32,
        /// Turns that were parsed after a repair.
        n_repaired: i32,
        /// Context tokens over all steps, as sent.
        prompt_tokens: i64,
        /// Tokens generated.
        generated_tokens: i64,
        /// Whole episode.
        wall_us: i64,
        /// Waiting for the model.
        model_us: i64,
        /// Running tools.
        tool_us: i64,
        /// Processor time of tools.
        cpu_us: Option<i64>,
        /// Highest memory use of a tool call.
        peak_memory_bytes: Option<i64>,
        /// When it started.
        started_at: Timestamp,
        /// When it ended.
        ended_at: Timestamp,
        /// The episode this one was branched from.
        parent_episode_id: Option<EpisodeId>,
        /// What the agent said of its own success, if it said anything.
        claimed_success: Option<bool>,
        /// The words it submitted.
        claim: Option<String>,
        /// Hash of the rendered system prompt.
        prompt_hash: String,
        /// JSON: temperature, top_p, max_tokens, seed.
        sampling: String,
        /// Version of the toolset.
        toolset_version: String,
        /// Hash over the tools' schemas.
        toolset_hash: String,
        /// Version of the action parser.
        parser_version: String,
        /// The sandbox image, by name and digest.
        sandbox_image: String,
        /// Drillyard's version.
        drillyard_version: String,
        /// JSON: which limits held and how.
        limits: Option<String>,
        /// Things kept beside the lake.
        artifacts: Vec<Artifact>,
        /// Faults injected on purpose.
        n_injected_faults: i32,
        /// Number of logged calls whose file state could not be restored on resume.
        n_state_lost: i32,
        /// The file it was imported from.
        imported_from: Option<String>,
        /// From a public evaluation set.
        evaluation_set: bool,
        /// JSON: what the source had and no column holds.
        extras: Option<String>,
    }

    /// Every message as it stood in the conversation.
    Messages("messages", version 1, by_day_and_purpose, sorted by ["episode_id", "message_index"]) = MessageRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The episode.
        episode_id: EpisodeId,
        /// Position in the conversation, from 0.
        message_index: i32,
        /// The step that produced it, or whose call it answers; null before the first step.
        step_index: Option<i32>,
        /// `system`, `user`, `assistant`, `tool`, or the source's own.
        role: String,
        /// Speaker or tool.
        name: Option<String>,
        /// The text.
        content: Option<String>,
        /// JSON list of calls, as the chat API has them.
        tool_calls: Option<String>,
        /// Which call it answers.
        tool_call_id: Option<String>,
        /// JSON: what the source had and no column holds.
        extras: Option<String>,
    }

    /// One model turn.
    Steps("steps", version 1, by_day_and_purpose, sorted by ["episode_id", "step_index"]) = StepRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The episode.
        episode_id: EpisodeId,
        /// From 0.
        step_index: i32,
        /// The role that acted; `agent` outside teams.
        role: String,
        /// Hash of the messages before it.
        history_hash: String,
        /// The text as generated, before parsing.
        raw_text: String,
        /// Reasoning kept apart, where the server separates it.
        reasoning: Option<String>,
        /// `stop`, `length`, `tool_calls`, or the server's own.
        finish_reason: Option<String>,
        /// See [`crate::ParseStatus`].
        parse_status: String,
        /// What was wrong, or what was repaired.
        parse_error: Option<String>,
        /// Number of calls parsed.
        n_calls: i32,
        /// Milestone first reached at this step.
        milestone: Option<String>,
        /// Sampling temperature of this step.
        temperature: f64,
        /// Context tokens as sent.
        prompt_tokens: Option<i32>,
        /// Tokens generated.
        generated_tokens: Option<i32>,
        /// Time from request to the whole reply.
        generation_us: i64,
        /// When the request was sent.
        started_at: Timestamp,
        /// JSON: what the source had and no column holds.
        extras: Option<String>,
    }

    /// One tool call; a turn may have several.
    ToolCalls("tool_calls", version 1, by_day_and_purpose, sorted by ["episode_id", "step_index", "call_index"]) = ToolCallRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The episode.
        episode_id: EpisodeId,
        /// The step.
        step_index: i32,
        /// Position within the step.
        call_index: i32,
        /// Ties result to call.
        call_id: String,
        /// The tool.
        tool: String,
        /// The arguments, JSON text.
        arguments: String,
        /// Hash of tool and normalised arguments: equal for equal calls.
        call_hash: String,
        /// Whether the arguments fit the tool's schema.
        schema_ok: bool,
        /// Why not.
        schema_error: Option<String>,
        /// See [`crate::CallOutcome`].
        outcome: String,
        /// Exit code of the process.
        exit_code: Option<i32>,
        /// Signal that ended the process.
        signal: Option<i32>,
        /// Standard output up to the row limit; whole as an artifact when longer.
        stdout: String,
        /// Standard error, likewise.
        stderr: String,
        /// Whole size of standard output.
        stdout_bytes: i64,
        /// Whole size of standard error.
        stderr_bytes: i64,
        /// What the model was shown was cut.
        truncated: bool,
        /// Wall time.
        wall_us: i64,
        /// User and system time.
        cpu_us: Option<i64>,
        /// Highest memory use.
        peak_memory_bytes: Option<i64>,
        /// Bytes read from storage.
        read_bytes: Option<i64>,
        /// Bytes written to storage.
        written_bytes: Option<i64>,
        /// Files that differ after the call.
        files_changed: Vec<FileChange>,
        /// Fault injected on purpose.
        fault_injected: Option<String>,
        /// The changed files' content was too large to log, so a resume can't restore it.
        state_lost: bool,
        /// When it started.
        started_at: Timestamp,
        /// JSON: what the source had and no column holds. Of a call that was run, `why` it ended: `finished` (exit code or signal tell
        /// how), `soft_timeout` (all its processes ended when asked to), `hard_timeout` (some had to be killed), `memory`, `pids`,
        /// `disk`, `output` (a limit), `killed` (a signal that no limit explains) or `sandbox_fault` (then also `end_reason` and
        /// `cause`); `why_text`, the same in words; processor time `user_us` and `system_us`; `processes` (started, threads
        /// included), `peak_processes` (at once, since the sandbox was made), `peak_process_memory_bytes` (of the largest one),
        /// `oom_kills` (processes), `survivors` (true where some were alive when the first one ended); `io_read_bytes` and
        /// `io_written_bytes` (through files, pipes and sockets of any kind); `limit_warnings`, `network`, `unusable`,
        /// `sandbox_ended`; `changes_incomplete` (true where more may have changed than `files_changed` tells); `fault`, how an
        /// injected fault was carried out. A figure that this host does not count is left out.
        extras: Option<String>,
    }

    /// Token ids of one step: the heavy part, which QA and SQL never read and the trainer does.
    Tokens("tokens", version 1, by_day_and_purpose, sorted by ["episode_id", "step_index"]) = TokenRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The episode.
        episode_id: EpisodeId,
        /// The step.
        step_index: i32,
        /// How many ids of the previous step's context and generation this step's context keeps.
        kept_prefix: i32,
        /// The ids added to the context after that prefix.
        context_ids: Vec<i32>,
        /// The ids generated, end-of-turn included when sampled.
        generated_ids: Vec<i32>,
        /// Behaviour log-probabilities (nats) of the generated ids under the sampling distribution's policy; empty where unknown.
        logprobs: Vec<f32>,
        /// How losses treat ranges of the generated ids.
        loss_spans: Vec<LossSpan>,
        /// Hash of the tokenizer.
        tokenizer_hash: String,
        /// Hash of the chat template.
        template_hash: String,
    }

    /// Whether an episode succeeded, by whom. Append-only.
    Verdicts("verdicts", version 1, by_day_and_purpose, sorted by ["episode_id"]) = VerdictRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The episode.
        episode_id: EpisodeId,
        /// See [`crate::VerdictKind`].
        kind: String,
        /// What decided: a verifier's name, a harness, a judge.
        verifier: String,
        /// Its version.
        verifier_version: String,
        /// Succeeded or not; null where it could not decide.
        success: Option<bool>,
        /// Partial credit from 0 to 1, where there is one.
        score: Option<f64>,
        /// Why, in words.
        detail: Option<String>,
        /// When.
        decided_at: Timestamp,
    }

    /// Raw reward components, as environments emit them; only credit composes them. Append-only.
    Rewards("rewards", version 1, by_day_and_purpose, sorted by ["episode_id", "step_index"]) = RewardRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The episode.
        episode_id: EpisodeId,
        /// The step it belongs to; null for the whole episode.
        step_index: Option<i32>,
        /// Who emits it: a task set or a harness.
        scheme: String,
        /// The scheme's version.
        scheme_version: String,
        /// `outcome`, `format`, `milestone`, `repeat`, `violation`, or the source's own.
        component: String,
        /// The raw value, without weights.
        value: f64,
    }

    /// One hit of one rule.
    Findings("findings", version 1, by_day_and_purpose, sorted by ["episode_id"]) = FindingRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The QA execution that found it.
        stage_run: StageRunId,
        /// The episode.
        episode_id: EpisodeId,
        /// The step, where the rule is about one.
        step_index: Option<i32>,
        /// The rule's id.
        rule: String,
        /// The rule's version.
        rule_version: i32,
        /// `format`, `logic`, `result` or `efficiency`.
        category: String,
        /// `block` or `warn`.
        severity: String,
        /// What was seen, in words.
        detail: String,
    }

    /// What QA makes of an episode.
    Scores("scores", version 1, by_day_and_purpose, sorted by ["episode_id"]) = ScoreRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The QA execution.
        stage_run: StageRunId,
        /// The episode.
        episode_id: EpisodeId,
        /// 0 to 1.
        quality: f64,
        /// See [`crate::Tier`]; null for infrastructure episodes.
        tier: Option<String>,
        /// Sampling weight, 0 only for infrastructure episodes.
        weight: f64,
        /// See [`crate::FailReason`]; null for successes.
        fail_reason: Option<String>,
        /// Number of findings.
        n_findings: i32,
    }

    /// Reward and discounted return of each step.
    Returns("returns", version 1, by_day_and_purpose, sorted by ["episode_id", "step_index"]) = ReturnRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The credit execution.
        stage_run: StageRunId,
        /// The episode.
        episode_id: EpisodeId,
        /// The step.
        step_index: i32,
        /// The composed reward of the step.
        reward: f64,
        /// Sum over later steps k of gamma^(k-t) times reward.
        discounted_return: f64,
    }

    /// The group-relative advantage of each scored episode.
    Advantages("advantages", version 1, by_day_and_purpose, sorted by ["group_id", "episode_id"]) = AdvantageRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The credit execution.
        stage_run: StageRunId,
        /// The group.
        group_id: GroupId,
        /// The episode.
        episode_id: EpisodeId,
        /// The task.
        task_id: TaskId,
        /// The composed reward of the whole episode.
        reward: f64,
        /// The group's mean over scored episodes.
        baseline: Option<f64>,
        /// The group's standard deviation (ddof 1) over scored episodes.
        deviation: Option<f64>,
        /// The advantage; null where the episode is not scored.
        advantage: Option<f64>,
        /// Sampling weight from QA.
        weight: f64,
        /// Whether it counts (infrastructure failures don't).
        scored: bool,
        /// The group's rewards are all equal: nothing to learn from the comparison.
        zero_variance: bool,
        /// Episodes in the group.
        n_total: i32,
        /// Of these scored.
        n_scored: i32,
        /// Of these ended by infrastructure.
        n_infrastructure: i32,
    }

    /// A success and a failure of the same task.
    Pairs("pairs", version 1, by_day_and_purpose, sorted by ["task_id"]) = PairRow {
        /// Day of the run.
        run_date: String,
        /// See [`crate::Purpose`].
        purpose: String,
        /// The run.
        run_id: RunId,
        /// The credit execution.
        stage_run: StageRunId,
        /// The task both attempted.
        task_id: TaskId,
        /// The better episode.
        chosen_episode_id: EpisodeId,
        /// The worse episode.
        rejected_episode_id: EpisodeId,
        /// The first step at which their calls differ.
        divergence_step: i32,
        /// Reward of the chosen minus that of the rejected.
        margin: f64,
        /// The smaller of both weights.
        weight: f64,
    }

    /// Training curves, long form.
    TrainMetrics("train_metrics", version 1, whole, sorted by ["stage_run", "step"]) = TrainMetricRow {
        /// The training execution.
        stage_run: StageRunId,
        /// Optimiser step, from 1; 0 is before training.
        step: i64,
        /// Which pass over the data.
        epoch: i32,
        /// What is measured: `loss`, `loss_policy`, `kl`, `clip_share`, `entropy`, `grad_norm`, `tokens_per_second`, …
        name: String,
        /// The value.
        value: f64,
        /// When.
        at: Timestamp,
    }

    /// Evaluation results, long form.
    Evals("evals", version 1, whole, sorted by ["stage_run", "metric"]) = EvalRow {
        /// The evaluation execution.
        stage_run: StageRunId,
        /// Policy name.
        policy: String,
        /// Hash of its weights.
        policy_revision: String,
        /// Task set.
        task_set: String,
        /// See [`crate::Split`].
        split: String,
        /// Family, or null over all families that training contains.
        family: Option<String>,
        /// What is measured: `success`, `pass_at_8`, `mean_steps`, `tool_accuracy`, `success_per_1k_tokens`, `difference`, …
        metric: String,
        /// The value.
        value: f64,
        /// Lower 95 % bound, where there is an interval.
        lo: Option<f64>,
        /// Upper 95 % bound.
        hi: Option<f64>,
        /// Number of tasks behind it.
        n: i64,
        /// When.
        at: Timestamp,
    }

    /// Policies that were put forward, and what became of them.
    Releases("releases", version 1, whole, sorted by ["at"]) = ReleaseRow {
        /// Hash of the artifact.
        release_id: String,
        /// The training execution it came from; null for a base model.
        stage_run: Option<StageRunId>,
        /// `candidate`, `champion`, `refused`, `rolled_back`.
        status: String,
        /// The checkpoint's folder.
        path: String,
        /// The champion before it.
        previous: Option<String>,
        /// Why, in words.
        reason: String,
        /// When.
        at: Timestamp,
    }

    /// One execution of one stage.
    Runs("runs", version 1, whole, sorted by ["started_at"]) = RunRow {
        /// The execution.
        stage_run: StageRunId,
        /// The rollout or import it belongs to.
        run_id: RunId,
        /// The pipeline.
        pipeline: String,
        /// The stage.
        stage: String,
        /// The stage's version.
        stage_version: i32,
        /// `succeeded` or `failed`.
        status: String,
        /// Hash of everything that decides the result.
        fingerprint: String,
        /// JSON: the resolved configuration.
        config: String,
        /// JSON: version of each table read.
        inputs: String,
        /// JSON: version of each table written, files written.
        outputs: String,
        /// JSON: figures for the report card.
        figures: String,
        /// Drillyard's version.
        drillyard_version: String,
        /// When it started.
        started_at: Timestamp,
        /// When it ended.
        ended_at: Timestamp,
    }
}

/// Rows as one record batch with the table's schema.
pub fn to_batch<R: Row>(rows: &[R]) -> Result<RecordBatch, TableError> {
    let fields: Vec<_> = R::fields().into_iter().map(Arc::new).collect();
    let batch =
        serde_arrow::to_record_batch(&fields, &rows).map_err(|e| table_error(R::TABLE, &e))?;
    RecordBatch::try_new(R::TABLE.schema(), batch.columns().to_vec())
        .map_err(|e| table_error(R::TABLE, &e))
}

/// Rows of a record batch. Columns the batch lacks must be nullable; columns it has and the row type lacks are ignored.
pub fn from_batch<R: Row>(batch: &RecordBatch) -> Result<Vec<R>, TableError> {
    serde_arrow::from_record_batch(batch).map_err(|e| table_error(R::TABLE, &e))
}

fn table_error(table: Table, error: &dyn std::fmt::Display) -> TableError {
    TableError {
        table: table.name(),
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token_row() -> TokenRow {
        TokenRow {
            run_date: "2026-01-02".into(),
            purpose: "train".into(),
            run_id: "r".into(),
            episode_id: "e".into(),
            step_index: 0,
            kept_prefix: 3,
            context_ids: vec![1, 2],
            generated_ids: vec![],
            logprobs: vec![-0.5],
            loss_spans: vec![LossSpan {
                start: 0,
                end: 1,
                kind: "action".into(),
            }],
            tokenizer_hash: "t".into(),
            template_hash: "h".into(),
        }
    }

    #[test]
    fn rows_survive_the_round_trip() {
        let rows = vec![
            token_row(),
            TokenRow {
                step_index: 1,
                loss_spans: vec![],
                ..token_row()
            },
        ];
        let batch = to_batch(&rows).unwrap();
        assert_eq!(batch.schema(), Table::Tokens.schema());
        assert_eq!(from_batch::<TokenRow>(&batch).unwrap(), rows);
    }

    #[test]
    fn timestamps_and_nulls_survive_the_round_trip() {
        let rows = vec![VerdictRow {
            run_date: "2026-01-02".into(),
            purpose: "train".into(),
            run_id: "r".into(),
            episode_id: "e".into(),
            kind: "verified".into(),
            verifier: "wrangle".into(),
            verifier_version: "1".into(),
            success: None,
            score: Some(0.5),
            detail: None,
            decided_at: Timestamp(1_767_312_000_000_001),
        }];
        let batch = to_batch(&rows).unwrap();
        assert_eq!(from_batch::<VerdictRow>(&batch).unwrap(), rows);
    }

    #[test]
    fn no_rows_make_an_empty_batch_of_the_right_schema() {
        let batch = to_batch::<ToolCallRow>(&[]).unwrap();
        assert_eq!(batch.num_rows(), 0);
        assert_eq!(batch.schema(), Table::ToolCalls.schema());
    }

    #[test]
    fn partition_and_sort_columns_exist() {
        for table in Table::ALL {
            let schema = table.schema();
            for column in table.partition_columns().iter().chain(table.sort_columns()) {
                assert!(
                    schema.field_with_name(column).is_ok(),
                    "{} lacks {column}",
                    table.name()
                );
            }
        }
    }
}
