//! Episodes made up from a seed: rows that agree across tables, without a sandbox or a model.

use camino::Utf8Path;
use drillyard_lake::{EpisodeBundle, Lake, LakeError};
use drillyard_schema::ids::derive_id;
use drillyard_schema::table::{
    EpisodeRow, FileChange, LossSpan, MessageRow, RewardRow, StepRow, TaskRow, Timestamp, TokenRow,
    ToolCallRow, VerdictRow,
};
use drillyard_schema::{
    CallOutcome, DRILLYARD_VERSION, EndReason, EpisodeId, GroupId, ParseStatus, Purpose, RunId,
    Split, TaskId, VerdictKind,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::json;

/// The first moment of the synthetic age: 2026-01-02 00:00 UTC.
const EPOCH_US: i64 = 1_767_312_000_000_000;
const FAMILIES: [&str; 4] = ["filter", "join", "count", "reshape"];
const TOOLSET: &str = "synthetic-toolset";

/// What synthetic episodes are like. Shares are from 0 to 1.
#[derive(Debug, Clone)]
pub struct SyntheticOptions {
    /// The run they belong to.
    pub run_id: RunId,
    /// Its day.
    pub run_date: String,
    /// What it was for.
    pub purpose: Purpose,
    /// The policy's name.
    pub policy: String,
    /// Hash of its weights.
    pub policy_revision: String,
    /// Tasks of a run.
    pub tasks: usize,
    /// Episodes per task.
    pub samples: u32,
    /// Share of scored episodes that succeed; it varies by task around this.
    pub success: f64,
    /// Share of episodes that infrastructure ended.
    pub infrastructure: f64,
    /// Share of turns that do not parse.
    pub parse_errors: f64,
    /// Share of calls that fail.
    pub call_errors: f64,
    /// Write token rows with log-probabilities.
    pub tokens: bool,
    /// Token ids are below this.
    pub vocabulary: i32,
}

impl Default for SyntheticOptions {
    fn default() -> Self {
        Self {
            run_id: RunId::from("synthetic"),
            run_date: "2026-01-02".to_owned(),
            purpose: Purpose::Train,
            policy: "synthetic".to_owned(),
            policy_revision: "0".to_owned(),
            tasks: 6,
            samples: 8,
            success: 0.5,
            infrastructure: 0.05,
            parse_errors: 0.05,
            call_errors: 0.1,
            tokens: true,
            vocabulary: 512,
        }
    }
}

struct Dice(ChaCha8Rng);

impl Dice {
    fn new(parts: &[&str]) -> Self {
        let seed = u64::from_str_radix(&derive_id(parts, 16), 16).unwrap_or_default();
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    fn below(&mut self, n: u64) -> i64 {
        (self.0.next_u64() % n.max(1)) as i64
    }
}

/// One episode: sample `seed % samples` of task `seed / samples`. The same seed and options give the same rows.
pub fn synthetic_bundle(seed: u64, options: &SyntheticOptions) -> EpisodeBundle {
    let samples = u64::from(options.samples.max(1));
    let (task_index, sample) = (seed / samples, (seed % samples) as u32);
    let family = FAMILIES[(task_index % FAMILIES.len() as u64) as usize];
    let task_id = TaskId::derive("synthetic", "1", family, task_index);
    let policy = format!("{}@{}", options.policy, options.policy_revision);
    let episode_id = EpisodeId::derive(&options.run_id, &policy, &task_id, sample, 0);
    let mut dice = Dice::new(&["synthetic", episode_id.as_str()]);
    let ease = Dice::new(&["ease", task_id.as_str()]).unit();
    let infrastructure = dice.chance(options.infrastructure);
    let success = !infrastructure && dice.chance((options.success * 2.0 * ease).clamp(0.0, 1.0));
    let mut maker = Maker {
        options,
        task_id,
        family,
        episode_id,
        policy,
        sample,
        dice,
        clock: EPOCH_US + seed as i64 * 1_000_000,
        sequence: Vec::new(),
        bundle_parts: Parts::default(),
    };
    maker.episode(infrastructure, success)
}

/// All episodes of a run: `tasks × samples`, in order.
pub fn synthetic_run(seed: u64, options: &SyntheticOptions) -> Vec<EpisodeBundle> {
    let count = options.tasks as u64 * u64::from(options.samples);
    (0..count)
        .map(|index| synthetic_bundle(seed * count + index, options))
        .collect()
}

/// Appends bundles to a lake in the order that a writer commits them.
///
/// # Errors
/// When the lake can't be written.
pub async fn write_bundles(lake: &Lake, bundles: &[EpisodeBundle]) -> Result<(), LakeError> {
    let mut tasks: Vec<TaskRow> = bundles.iter().map(|b| b.task.clone()).collect();
    tasks.dedup_by(|a, b| a.task_id == b.task_id && a.run_id == b.run_id);
    lake.append(&tasks, None).await?;
    lake.append(&gather(bundles, |b| &b.tokens), None).await?;
    lake.append(&gather(bundles, |b| &b.tool_calls), None)
        .await?;
    lake.append(&gather(bundles, |b| &b.steps), None).await?;
    lake.append(&gather(bundles, |b| &b.messages), None).await?;
    lake.append(&gather(bundles, |b| &b.rewards), None).await?;
    lake.append(&gather(bundles, |b| &b.verdicts), None).await?;
    let episodes: Vec<EpisodeRow> = bundles.iter().map(|b| b.episode.clone()).collect();
    lake.append(&episodes, None).await?;
    Ok(())
}

fn gather<R: Clone>(bundles: &[EpisodeBundle], rows: impl Fn(&EpisodeBundle) -> &Vec<R>) -> Vec<R> {
    bundles
        .iter()
        .flat_map(|b| rows(b).iter().cloned())
        .collect()
}

/// A lake under `root` with one synthetic run in it.
///
/// # Errors
/// When the lake can't be written.
pub async fn synthetic_lake(
    root: &Utf8Path,
    seed: u64,
    options: &SyntheticOptions,
) -> Result<Lake, LakeError> {
    let lake = Lake::open(root).await?;
    write_bundles(&lake, &synthetic_run(seed, options)).await?;
    Ok(lake)
}

#[derive(Default)]
struct Parts {
    messages: Vec<MessageRow>,
    steps: Vec<StepRow>,
    tool_calls: Vec<ToolCallRow>,
    tokens: Vec<TokenRow>,
    rewards: Vec<RewardRow>,
}

struct Maker<'a> {
    options: &'a SyntheticOptions,
    task_id: TaskId,
    family: &'static str,
    episode_id: EpisodeId,
    policy: String,
    sample: u32,
    dice: Dice,
    clock: i64,
    sequence: Vec<i32>,
    bundle_parts: Parts,
}

impl Maker<'_> {
    fn episode(&mut self, infrastructure: bool, success: bool) -> EpisodeBundle {
        let started = self.clock;
        self.message("system", None, "Do the task with the tools.", None);
        let instruction = self.instruction();
        self.message("user", None, &instruction, None);
        let n_steps = if infrastructure {
            1
        } else {
            2 + self.dice.below(4) as i32
        };
        let mut clean = 0;
        for index in 0..n_steps {
            let last = index + 1 == n_steps;
            let broken = !last && self.dice.chance(self.options.parse_errors);
            clean += i32::from(!broken);
            self.step(index, last && !infrastructure, broken, infrastructure);
        }
        let end_reason = if infrastructure {
            EndReason::SandboxFault
        } else {
            EndReason::Submitted
        };
        let mut verdicts = Vec::new();
        if !infrastructure {
            let score = if success {
                1.0
            } else {
                (self.dice.unit() * 0.8 * 100.0).round() / 100.0
            };
            verdicts.push(VerdictRow {
                run_date: self.options.run_date.clone(),
                purpose: self.options.purpose.to_string(),
                run_id: self.options.run_id.clone(),
                episode_id: self.episode_id.clone(),
                kind: VerdictKind::Verified.to_string(),
                verifier: "synthetic".to_owned(),
                verifier_version: "1".to_owned(),
                success: Some(success),
                score: Some(score),
                detail: Some(if success { "right" } else { "wrong content" }.to_owned()),
                decided_at: Timestamp(self.clock),
            });
            self.reward(None, "outcome", f64::from(u8::from(success)));
            self.reward(None, "partial", score);
            self.reward(None, "format", f64::from(clean) / f64::from(n_steps));
            self.reward(None, "efficiency", 1.0 - f64::from(n_steps) / 8.0);
        }
        let parts = std::mem::take(&mut self.bundle_parts);
        EpisodeBundle {
            task: self.task_row(instruction),
            episode: self.episode_row(&parts, end_reason, infrastructure, started),
            messages: parts.messages,
            steps: parts.steps,
            tool_calls: parts.tool_calls,
            tokens: parts.tokens,
            verdicts,
            rewards: parts.rewards,
        }
    }

    fn instruction(&self) -> String {
        format!(
            "{} the rows of {}.csv",
            self.family,
            &derive_id(&[self.task_id.as_str()], 4)
        )
    }

    fn step(&mut self, index: i32, submit: bool, broken: bool, infrastructure: bool) {
        let failed = self.dice.chance(self.options.call_errors);
        let (tool, arguments) = if submit {
            ("submit", "{}".to_owned())
        } else {
            let command = format!("head -n {} {}.csv", 1 + self.dice.below(4), &self.family);
            ("execute_shell", json!({ "command": command }).to_string())
        };
        let raw_text = if broken {
            format!("<tool_call>{{\"name\":\"{tool}\"</tool_call>")
        } else {
            format!("<tool_call>{{\"name\":\"{tool}\",\"arguments\":{arguments}}}</tool_call>")
        };
        let started_at = self.clock;
        let generation_us = 20_000 + self.dice.below(80_000);
        self.clock += generation_us;
        let history_hash = derive_id(
            &[self.episode_id.as_str(), "history", &index.to_string()],
            32,
        );
        let (prompt_tokens, generated_tokens) = self.tokens(index, &raw_text);
        self.bundle_parts.steps.push(StepRow {
            run_date: self.options.run_date.clone(),
            purpose: self.options.purpose.to_string(),
            run_id: self.options.run_id.clone(),
            episode_id: self.episode_id.clone(),
            step_index: index,
            role: "agent".to_owned(),
            history_hash,
            raw_text: raw_text.clone(),
            reasoning: None,
            finish_reason: Some("stop".to_owned()),
            parse_status: if broken {
                ParseStatus::Error
            } else {
                ParseStatus::Ok
            }
            .to_string(),
            parse_error: broken.then(|| "arguments are missing".to_owned()),
            n_calls: i32::from(!broken),
            milestone: (index == 0 && !broken && !failed && !infrastructure)
                .then(|| "looked".to_owned()),
            temperature: 1.0,
            prompt_tokens: Some(prompt_tokens),
            generated_tokens: Some(generated_tokens),
            generation_us,
            started_at: Timestamp(started_at),
            extras: None,
        });
        self.message("assistant", Some(index), &raw_text, None);
        if index == 0 && !broken && !failed && !infrastructure {
            self.reward(Some(index), "milestone", 1.0);
        }
        if broken {
            self.message("user", Some(index), "the call does not parse", None);
            return;
        }
        let outcome = if infrastructure {
            CallOutcome::SandboxFault
        } else if failed && !submit {
            CallOutcome::Error
        } else {
            CallOutcome::Ok
        };
        self.call(index, tool, &arguments, outcome);
    }

    fn call(&mut self, index: i32, tool: &str, arguments: &str, outcome: CallOutcome) {
        let wall_us = 1_000 + self.dice.below(20_000);
        let started_at = self.clock;
        self.clock += wall_us;
        let stdout = if outcome == CallOutcome::Ok {
            "a,b\n1,2"
        } else {
            ""
        };
        let stderr = if outcome == CallOutcome::Error {
            "no such file"
        } else {
            ""
        };
        let call_id = format!("call_{index}_0");
        let wrote = outcome == CallOutcome::Ok && tool == "execute_shell" && self.dice.chance(0.5);
        self.bundle_parts.tool_calls.push(ToolCallRow {
            run_date: self.options.run_date.clone(),
            purpose: self.options.purpose.to_string(),
            run_id: self.options.run_id.clone(),
            episode_id: self.episode_id.clone(),
            step_index: index,
            call_index: 0,
            call_id: call_id.clone(),
            tool: tool.to_owned(),
            arguments: arguments.to_owned(),
            call_hash: derive_id(&["call", tool, arguments], 32),
            schema_ok: true,
            schema_error: None,
            outcome: outcome.to_string(),
            exit_code: Some(i32::from(outcome != CallOutcome::Ok)),
            signal: None,
            stdout: stdout.to_owned(),
            stderr: stderr.to_owned(),
            stdout_bytes: stdout.len() as i64,
            stderr_bytes: stderr.len() as i64,
            truncated: false,
            wall_us,
            cpu_us: Some(wall_us / 2),
            peak_memory_bytes: Some(4 << 20),
            read_bytes: None,
            written_bytes: None,
            files_changed: if wrote {
                vec![FileChange {
                    path: "out.csv".to_owned(),
                    change: "created".to_owned(),
                    before_hash: None,
                    after_hash: Some(derive_id(&[arguments], 64)),
                    size_bytes: 42,
                }]
            } else {
                Vec::new()
            },
            fault_injected: None,
            state_lost: false,
            started_at: Timestamp(started_at),
            extras: None,
        });
        let observation = match outcome {
            CallOutcome::Ok => stdout.to_owned(),
            _ => format!("{stderr}\n[exit 1]"),
        };
        self.message("tool", Some(index), &observation, Some((tool, &call_id)));
    }

    fn tokens(&mut self, index: i32, raw_text: &str) -> (i32, i32) {
        let vocabulary = u64::from(self.options.vocabulary.max(8).unsigned_abs());
        let kept_prefix = self.sequence.len() as i32;
        let fresh = if index == 0 { 40 } else { 12 } + self.dice.below(8);
        let mut draw =
            |n: i64| -> Vec<i32> { (0..n).map(|_| self.dice.below(vocabulary) as i32).collect() };
        let context_ids = draw(fresh);
        let generated_ids = draw(raw_text.len() as i64 / 3 + 2);
        let logprobs: Vec<f32> = generated_ids
            .iter()
            .map(|_| -(self.dice.unit() as f32) * 0.5)
            .collect();
        self.sequence.extend(&context_ids);
        let prompt_tokens = self.sequence.len() as i32;
        self.sequence.extend(&generated_ids);
        let n = generated_ids.len() as i32;
        if self.options.tokens {
            self.bundle_parts.tokens.push(TokenRow {
                run_date: self.options.run_date.clone(),
                purpose: self.options.purpose.to_string(),
                run_id: self.options.run_id.clone(),
                episode_id: self.episode_id.clone(),
                step_index: index,
                kept_prefix,
                context_ids,
                generated_ids,
                logprobs,
                loss_spans: vec![
                    LossSpan {
                        start: 0,
                        end: 4,
                        kind: "action_format".to_owned(),
                    },
                    LossSpan {
                        start: 4,
                        end: n - 1,
                        kind: "action".to_owned(),
                    },
                    LossSpan {
                        start: n - 1,
                        end: n,
                        kind: "action_format".to_owned(),
                    },
                ],
                tokenizer_hash: "synthetic-tokenizer".to_owned(),
                template_hash: "synthetic-template".to_owned(),
            });
        }
        (prompt_tokens, n)
    }

    fn message(
        &mut self,
        role: &str,
        step_index: Option<i32>,
        content: &str,
        call: Option<(&str, &str)>,
    ) {
        let message_index = self.bundle_parts.messages.len() as i32;
        self.bundle_parts.messages.push(MessageRow {
            run_date: self.options.run_date.clone(),
            purpose: self.options.purpose.to_string(),
            run_id: self.options.run_id.clone(),
            episode_id: self.episode_id.clone(),
            message_index,
            step_index,
            role: role.to_owned(),
            name: call.map(|(tool, _)| tool.to_owned()),
            content: Some(content.to_owned()),
            tool_calls: None,
            tool_call_id: call.map(|(_, id)| id.to_owned()),
            extras: None,
        });
    }

    fn reward(&mut self, step_index: Option<i32>, component: &str, value: f64) {
        self.bundle_parts.rewards.push(RewardRow {
            run_date: self.options.run_date.clone(),
            purpose: self.options.purpose.to_string(),
            run_id: self.options.run_id.clone(),
            episode_id: self.episode_id.clone(),
            step_index,
            scheme: "synthetic".to_owned(),
            scheme_version: "1".to_owned(),
            component: component.to_owned(),
            value,
        });
    }

    fn split(&self) -> Split {
        match self.options.purpose {
            Purpose::Validation => Split::Validation,
            Purpose::HeldOut => Split::HeldOut,
            _ => Split::Train,
        }
    }

    fn task_row(&self, instruction: String) -> TaskRow {
        TaskRow {
            run_date: self.options.run_date.clone(),
            purpose: self.options.purpose.to_string(),
            run_id: self.options.run_id.clone(),
            task_id: self.task_id.clone(),
            task_set: "synthetic".to_owned(),
            task_set_version: "1".to_owned(),
            family: self.family.to_owned(),
            difficulty: Some(1),
            split: Some(self.split().to_string()),
            unseen_family: false,
            instruction,
            verifier: Some("{}".to_owned()),
            milestones: Some("[]".to_owned()),
            evaluation_set: false,
            source: "made up from a seed".to_owned(),
            licence: "Apache-2.0".to_owned(),
        }
    }

    fn episode_row(
        &self,
        parts: &Parts,
        end_reason: EndReason,
        infrastructure: bool,
        started: i64,
    ) -> EpisodeRow {
        let sum = |values: &mut dyn Iterator<Item = i64>| values.sum::<i64>();
        let errors = parts
            .steps
            .iter()
            .filter(|s| s.parse_status == "error")
            .count();
        EpisodeRow {
            run_date: self.options.run_date.clone(),
            purpose: self.options.purpose.to_string(),
            run_id: self.options.run_id.clone(),
            episode_id: self.episode_id.clone(),
            group_id: GroupId::derive(
                &self.options.run_id,
                &self.policy,
                "{}",
                TOOLSET,
                &self.task_id,
            ),
            task_id: self.task_id.clone(),
            task_set: "synthetic".to_owned(),
            family: self.family.to_owned(),
            split: Some(self.split().to_string()),
            status: if infrastructure {
                "infrastructure"
            } else {
                "finished"
            }
            .to_owned(),
            end_reason: end_reason.to_string(),
            infrastructure_cause: infrastructure.then(|| "the sandbox died".to_owned()),
            policy: self.options.policy.clone(),
            policy_revision: self.options.policy_revision.clone(),
            sample_index: self.sample as i32,
            attempt: 0,
            temperature: 1.0,
            n_steps: parts.steps.len() as i32,
            n_tool_calls: parts.tool_calls.len() as i32,
            n_parse_errors: errors as i32,
            n_repaired: 0,
            prompt_tokens: sum(&mut parts
                .steps
                .iter()
                .map(|s| i64::from(s.prompt_tokens.unwrap_or(0)))),
            generated_tokens: sum(&mut parts
                .steps
                .iter()
                .map(|s| i64::from(s.generated_tokens.unwrap_or(0)))),
            wall_us: self.clock - started,
            model_us: sum(&mut parts.steps.iter().map(|s| s.generation_us)),
            tool_us: sum(&mut parts.tool_calls.iter().map(|c| c.wall_us)),
            cpu_us: Some(sum(&mut parts.tool_calls.iter().filter_map(|c| c.cpu_us))),
            peak_memory_bytes: Some(4 << 20),
            started_at: Timestamp(started),
            ended_at: Timestamp(self.clock),
            parent_episode_id: None,
            claimed_success: (!infrastructure).then_some(true),
            claim: None,
            prompt_hash: derive_id(&["prompt"], 32),
            sampling:
                json!({ "temperature": 1.0, "top_p": 1.0, "max_tokens": 96, "seed": self.sample })
                    .to_string(),
            toolset_version: "1".to_owned(),
            toolset_hash: TOOLSET.to_owned(),
            parser_version: "1".to_owned(),
            sandbox_image: "none".to_owned(),
            drillyard_version: DRILLYARD_VERSION.to_owned(),
            limits: None,
            artifacts: Vec::new(),
            n_injected_faults: 0,
            n_state_lost: 0,
            imported_from: None,
            evaluation_set: false,
            extras: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_rows() {
        let options = SyntheticOptions::default();
        let (a, b) = (synthetic_bundle(3, &options), synthetic_bundle(3, &options));
        assert_eq!(a.episode, b.episode);
        assert_eq!(a.tokens, b.tokens);
        assert_ne!(
            a.episode.episode_id,
            synthetic_bundle(4, &options).episode.episode_id
        );
    }

    #[test]
    fn a_run_has_groups_of_samples_with_both_outcomes() {
        let options = SyntheticOptions {
            tasks: 20,
            ..SyntheticOptions::default()
        };
        let run = synthetic_run(0, &options);
        let ids: BTreeSet<_> = run.iter().map(|b| b.episode.episode_id.clone()).collect();
        let groups: BTreeSet<_> = run.iter().map(|b| b.episode.group_id.clone()).collect();
        assert_eq!((ids.len(), groups.len()), (160, 20));
        let wins = run
            .iter()
            .filter(|b| b.verdicts.iter().any(|v| v.success == Some(true)))
            .count();
        assert!((40..120).contains(&wins), "{wins}");
        assert!(
            run.iter()
                .any(|b| b.episode.status == "infrastructure" && b.verdicts.is_empty())
        );
    }

    #[test]
    fn token_rows_rebuild_a_growing_sequence() {
        let bundle = synthetic_bundle(
            1,
            &SyntheticOptions {
                infrastructure: 0.0,
                ..SyntheticOptions::default()
            },
        );
        let mut length = 0;
        for (row, step) in bundle.tokens.iter().zip(&bundle.steps) {
            assert_eq!(row.kept_prefix, length);
            assert_eq!(row.logprobs.len(), row.generated_ids.len());
            assert_eq!(
                step.prompt_tokens,
                Some(length + row.context_ids.len() as i32)
            );
            length += (row.context_ids.len() + row.generated_ids.len()) as i32;
        }
    }
}
