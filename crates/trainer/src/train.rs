//! The training loop: one optimiser step after the other over planned batches, with metrics, checkpoints, validation and resume.
//!
//! The loop knows two objectives, imitation and GRPO, and adds the terms the configuration asks for. It draws no random numbers
//! of its own: the order of the data follows from seed and epoch, so a run that was interrupted and resumed ends bit for bit where
//! an uninterrupted one does (same machine, same number of threads).

use std::collections::BTreeMap;
use std::time::Instant;

use camino::Utf8Path;
use drillyard_schema::table::TrainMetricRow;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::advice::{Advice, Groups, Validation, advise};
use crate::batch::{Batch, Packing, Shape, Step, plan};
use crate::checkpoint::{STATE_FORMAT, State, Store};
use crate::config::{Hyper, Method, TrainConfig};
use crate::error::TrainError;
use crate::losses::contrastive::PairIndex;
use crate::losses::{
    Aggregation, LossOutput, coefficients, contrastive, format_term, grpo, imitation, mean_entropy,
    preference,
};
use crate::metrics::{Recorder, curve};
use crate::network::{Forward, Network, forward, holdout};
use crate::optim::{AdamW, AdamWParams, learning_rate};
use crate::sequence::Sequence;

/// Two attempts at one task, as indices into [`Dataset::sequences`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// The better attempt.
    pub chosen: usize,
    /// The worse attempt.
    pub rejected: usize,
    /// The first step at which they differ.
    pub divergence: i32,
    /// A number for the task.
    pub task: u32,
    /// Weight of the pair.
    pub weight: f32,
}

/// What a run trains on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dataset {
    /// All sequences.
    pub sequences: Vec<Sequence>,
    /// Those the main objective learns from.
    pub train: Vec<usize>,
    /// Those kept back to measure on.
    pub holdout: Vec<usize>,
    /// Pairs for the contrastive or the preference term.
    pub pairs: Vec<Pair>,
    /// The groups behind the advantages.
    pub groups: Groups,
    /// What is worth telling about how the data was selected.
    pub notes: Vec<String>,
}

impl Dataset {
    /// Checks every sequence and index.
    pub fn check(&self) -> Result<(), TrainError> {
        for sequence in &self.sequences {
            sequence.check().map_err(|message| TrainError::Row {
                episode: sequence.episode.to_string(),
                message,
            })?;
        }
        let bound = self.sequences.len();
        let pairs = self.pairs.iter().flat_map(|p| [p.chosen, p.rejected]);
        if self
            .train
            .iter()
            .chain(&self.holdout)
            .copied()
            .chain(pairs)
            .any(|index| index >= bound)
        {
            return Err(TrainError::NoData(
                "an index of the data set points past its sequences".into(),
            ));
        }
        Ok(())
    }

    /// Moves a share of the training sequences to the kept-back ones; which ones depends on their episode's id alone.
    pub fn keep_back(&mut self, share: f64) {
        let threshold = (share * 65536.0) as u32;
        let sequences = &self.sequences;
        let (back, train) = std::mem::take(&mut self.train)
            .into_iter()
            .partition(|&index| {
                let hash = blake3::hash(sequences[index].episode.as_str().as_bytes());
                let bytes = hash.as_bytes();
                u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) < threshold
            });
        self.train = train;
        self.holdout = back;
    }

    /// A hash over everything the loop reads: a resumed run must see the same data.
    pub fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for sequence in &self.sequences {
            hasher.update(sequence.episode.as_str().as_bytes());
            hasher.update(&(sequence.ids.len() as u64).to_le_bytes());
            for id in &sequence.ids {
                hasher.update(&id.to_le_bytes());
            }
            for turn in &sequence.turns {
                hasher.update(&turn.start.to_le_bytes());
                hasher.update(&turn.end.to_le_bytes());
            }
            hasher.update(&sequence.advantage.to_le_bytes());
            hasher.update(&sequence.weight.to_le_bytes());
        }
        for list in [&self.train, &self.holdout] {
            for index in list {
                hasher.update(&(*index as u64).to_le_bytes());
            }
            hasher.update(b"|");
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// What one recorded stretch of steps looked like.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// Optimiser steps done.
    pub step: u64,
    /// Of so many.
    pub total: u64,
    /// Which pass over the data, from 0.
    pub epoch: u32,
    /// Means since the last report, by metric.
    pub values: BTreeMap<&'static str, f64>,
}

/// What a run calls while it goes. All methods have empty defaults.
pub trait Hooks {
    /// Some steps are done.
    fn on_steps(&mut self, report: &StepReport) {
        let _ = report;
    }

    /// Something worth saying happened.
    fn note(&mut self, text: &str) {
        let _ = text;
    }

    /// Measures the checkpoint in `dir` on validation tasks; `None` where nothing can be measured. The loop waits meanwhile.
    fn validate(&mut self, step: u64, dir: &Utf8Path) -> Result<Option<Validation>, TrainError> {
        let _ = (step, dir);
        Ok(None)
    }
}

/// Hooks that do nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl Hooks for NoHooks {}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Optimiser steps.
    pub steps: u64,
    /// Tokens trained on, padding not counted.
    pub tokens: u64,
    /// Seconds of training, validation not counted.
    pub seconds: f64,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// Loss of the first recorded steps.
    pub loss_first: Option<f64>,
    /// Loss of the last recorded steps.
    pub loss_last: Option<f64>,
    /// The last value of each metric.
    pub last: BTreeMap<String, f64>,
    /// Validation results by step.
    pub validations: Vec<(u64, Validation)>,
    /// Advice from the curves.
    pub advice: Vec<Advice>,
    /// The step the run was resumed from, if it was.
    pub resumed_from: Option<u64>,
    /// The curves, as rows of the lake.
    #[serde(skip)]
    pub rows: Vec<TrainMetricRow>,
}

/// Trains `network` on `data`. Checkpoints to resume from go to `store`, where there is one; the finished checkpoint is the
/// caller's to write.
pub fn fit(
    config: &TrainConfig,
    network: &dyn Network,
    data: &Dataset,
    store: Option<&Store>,
    hooks: &mut dyn Hooks,
) -> Result<Outcome, TrainError> {
    data.check()?;
    let hyper = &config.hyper;
    let schedule = schedule(config, data)?;
    let total = schedule.steps.len() as u64;
    let parameters = network.parameters();
    for (_, parameter) in &parameters {
        drop(parameter.set_requires_grad(true));
    }
    let mut optimizer = AdamW::new(parameters, AdamWParams::from(hyper));

    let fingerprint = format!("{}:{}", config.fingerprint()?, data.fingerprint());
    let resumed = match store {
        Some(store) if config.resume => store.load_state(network, &mut optimizer, &fingerprint)?,
        _ => None,
    };
    let resumed_from = resumed.as_ref().map(|state| state.step);
    if let Some(step) = resumed_from {
        hooks.note(&format!("resuming after step {step} of {total}"));
    }
    let mut state = resumed.unwrap_or_else(|| State {
        format: STATE_FORMAT,
        fingerprint,
        step: 0,
        optimizer_steps: 0,
        tokens: 0,
        seconds: 0.0,
        rows: Vec::new(),
        validations: Vec::new(),
    });
    let mut recorder = Recorder::new(config.stage_run.clone(), std::mem::take(&mut state.rows));
    let run = Run {
        config,
        network,
        data,
        pairs: data
            .pairs
            .iter()
            .map(|p| (p.chosen, p.rejected, p.divergence, p.task))
            .collect(),
    };

    let mut measuring = std::time::Duration::ZERO;
    let mut started = Instant::now();
    let before = state.seconds;
    if state.step == 0 {
        measure_holdout(network, data, hyper, &mut recorder, 0, 0)?;
        if let Some(store) = store
            && hyper.validate_every > 0
        {
            let dir = store.save_state(network, &optimizer, &state)?;
            measure_tasks(&dir, 0, 0, hooks, &mut recorder, &mut state)?;
        }
        started = Instant::now();
    } else if let Some(store) = store
        && hyper.validate_every > 0
        && (state.step.is_multiple_of(hyper.validate_every) || state.step == total)
        && state
            .validations
            .iter()
            .all(|(step, _)| *step != state.step)
    {
        // Killed between saving this state and measuring it.
        let epoch = schedule.steps[state.step as usize - 1].0;
        let dir = store.save_state(network, &optimizer, &state)?;
        let number = state.step;
        measure_tasks(&dir, number, epoch, hooks, &mut recorder, &mut state)?;
        started = Instant::now();
    }
    while state.step < total {
        let (epoch, step) = &schedule.steps[state.step as usize];
        let pair_step = schedule.pair_step(state.step);
        let lr = learning_rate(hyper, state.step, total);
        let number = state.step + 1;
        let record = number % hyper.log_every == 0 || number == total;
        state.tokens += run.step(
            step,
            pair_step,
            lr,
            number,
            record,
            &mut optimizer,
            &mut recorder,
        )? as u64;
        state.step = number;
        if record {
            let values = recorder.record(number, *epoch);
            hooks.on_steps(&StepReport {
                step: number,
                total,
                epoch: *epoch,
                values,
            });
        }
        let due = |every: u64| every > 0 && number.is_multiple_of(every) && number < total;
        let validate = hyper.validate_every > 0 && (due(hyper.validate_every) || number == total);
        if validate || due(hyper.checkpoint_every) {
            let pause = Instant::now();
            if validate {
                measure_holdout(network, data, hyper, &mut recorder, number, *epoch)?;
            }
            if let Some(store) = store {
                state.seconds = before + started.elapsed().saturating_sub(measuring).as_secs_f64();
                state.optimizer_steps = optimizer.steps();
                state.rows = recorder.rows().to_vec();
                let dir = store.save_state(network, &optimizer, &state)?;
                if validate {
                    measure_tasks(&dir, number, *epoch, hooks, &mut recorder, &mut state)?;
                }
            }
            measuring += pause.elapsed();
            recorder.pause(pause);
        }
    }
    let seconds = before + started.elapsed().saturating_sub(measuring).as_secs_f64();
    if hyper.validate_every == 0 {
        let epoch = hyper.epochs.saturating_sub(1);
        measure_holdout(network, data, hyper, &mut recorder, total, epoch)?;
    }

    let rows = recorder.into_rows();
    let advice = advise(&rows, &state.validations, data.groups);
    let mut last = BTreeMap::new();
    for row in &rows {
        last.insert(row.name.clone(), row.value);
    }
    let loss: Vec<f64> = curve(&rows, "loss").map(|(_, value)| value).collect();
    Ok(Outcome {
        steps: state.step,
        tokens: state.tokens,
        seconds,
        tokens_per_second: state.tokens as f64 / seconds.max(1e-9),
        loss_first: loss.first().copied(),
        loss_last: loss.last().copied(),
        last,
        validations: state.validations,
        advice,
        resumed_from,
        rows,
    })
}

/// Which sequences each step takes.
struct Schedule {
    steps: Vec<(u32, Step)>,
    /// Steps over pairs, each list one pass over them; taken in turn.
    pair_steps: Vec<Step>,
}

impl Schedule {
    fn pair_step(&self, step: u64) -> Option<&Step> {
        let count = self.pair_steps.len() as u64;
        (count > 0).then(|| &self.pair_steps[(step % count) as usize])
    }
}

fn schedule(config: &TrainConfig, data: &Dataset) -> Result<Schedule, TrainError> {
    let hyper = &config.hyper;
    let train: Vec<usize> = data
        .train
        .iter()
        .copied()
        .filter(|&index| data.sequences[index].own_len() > 0)
        .collect();
    if train.is_empty() {
        return Err(TrainError::NoData(
            "no sequence with a token of the model's own was selected".into(),
        ));
    }
    let packing = Packing {
        batch_tokens: hyper.batch_tokens,
        micro_tokens: hyper.micro_tokens,
        allow_mixed: hyper.allow_mixed,
    };
    let mut units: BTreeMap<&str, usize> = BTreeMap::new();
    let shapes: Vec<Shape> = train
        .iter()
        .enumerate()
        .map(|(position, &index)| {
            let sequence = &data.sequences[index];
            let next = train.len() + units.len();
            let unit = match &sequence.group {
                Some(group) if config.method == Method::Grpo => {
                    *units.entry(group.as_str()).or_insert(next)
                }
                _ => position,
            };
            Shape {
                len: sequence.ids.len(),
                unit,
                version: sequence.version,
            }
        })
        .collect();
    let limit = hyper.max_steps.unwrap_or(u64::MAX);
    let mut steps = Vec::new();
    'epochs: for epoch in 0..hyper.epochs {
        for step in plan(&shapes, packing, config.seed, epoch) {
            if steps.len() as u64 >= limit {
                break 'epochs;
            }
            let step: Step = step
                .into_iter()
                .map(|pass| pass.into_iter().map(|position| train[position]).collect())
                .collect();
            steps.push((epoch, step));
        }
    }

    let mut pair_steps = Vec::new();
    if hyper.preference_weight > 0.0 && !data.pairs.is_empty() {
        let shapes: Vec<Shape> = data
            .pairs
            .iter()
            .enumerate()
            .map(|(unit, pair)| Shape {
                // Both arms go through the model together, each as wide as the longer one.
                len: 2 * [pair.chosen, pair.rejected]
                    .map(|index| data.sequences[index].ids.len())
                    .into_iter()
                    .max()
                    .unwrap_or(0),
                unit,
                version: 0,
            })
            .collect();
        pair_steps = plan(&shapes, packing, config.seed ^ 0x7061_6972, 0);
    }
    Ok(Schedule { steps, pair_steps })
}

fn measure_holdout(
    network: &dyn Network,
    data: &Dataset,
    hyper: &Hyper,
    recorder: &mut Recorder,
    step: u64,
    epoch: u32,
) -> Result<(), TrainError> {
    if data.holdout.is_empty() {
        return Ok(());
    }
    let sequences: Vec<&Sequence> = data
        .holdout
        .iter()
        .map(|&index| &data.sequences[index])
        .collect();
    let result = holdout(network, &sequences, hyper.micro_tokens)?;
    recorder.push(step, epoch, "loss_holdout", result.loss);
    recorder.push(step, epoch, "token_accuracy_holdout", result.token_accuracy);
    recorder.push(step, epoch, "exact_turns_holdout", result.exact_turns);
    Ok(())
}

fn measure_tasks(
    dir: &Utf8Path,
    step: u64,
    epoch: u32,
    hooks: &mut dyn Hooks,
    recorder: &mut Recorder,
    state: &mut State,
) -> Result<(), TrainError> {
    if let Some(result) = hooks.validate(step, dir)? {
        recorder.push(step, epoch, "validation_success", result.success);
        recorder.push(step, epoch, "validation_mean_steps", result.mean_steps);
        recorder.push(
            step,
            epoch,
            "validation_tool_accuracy",
            result.tool_accuracy,
        );
        state.validations.push((step, result));
    }
    Ok(())
}

/// What a step needs.
struct Run<'a> {
    config: &'a TrainConfig,
    network: &'a dyn Network,
    data: &'a Dataset,
    pairs: Vec<(usize, usize, i32, u32)>,
}

struct Pass {
    batch: Batch,
    pairs: PairIndex,
}

impl Run<'_> {
    /// One optimiser step; returns the tokens seen.
    #[expect(
        clippy::too_many_arguments,
        reason = "the loop's whole state, used once"
    )]
    fn step(
        &self,
        step: &Step,
        pair_step: Option<&Step>,
        lr: f64,
        number: u64,
        record: bool,
        optimizer: &mut AdamW,
        recorder: &mut Recorder,
    ) -> Result<usize, TrainError> {
        let hyper = &self.config.hyper;
        let passes = self.passes(step);
        let own: f64 = passes.iter().map(|p| p.batch.n_own() as f64).sum();
        let n_format: usize = passes.iter().map(|p| p.batch.n_format).sum();
        let n_pairs: usize = passes.iter().map(|p| p.pairs.len()).sum();
        let mut tokens: usize = passes.iter().map(|p| p.batch.n_tokens).sum();

        optimizer.zero_grad();
        let mut total = 0.0;
        for (index, pass) in passes.iter().enumerate() {
            let forward = forward(self.network, &pass.batch)?;
            let share = pass.batch.n_own() as f64 / own.max(1.0);
            let mut parts = vec![(1.0, self.objective(&pass.batch, &forward)?)];
            if hyper.format_weight > 0.0 && n_format > 0 {
                parts.push((
                    hyper.format_weight,
                    format_term::loss(&format_term::Input {
                        logp: &forward.logp,
                        format: &pass.batch.format,
                        total: n_format as f64,
                    }),
                ));
            }
            if hyper.contrastive_weight > 0.0 && !pass.pairs.is_empty() {
                let params = contrastive::Params {
                    kind: hyper.contrastive,
                    temperature: hyper.contrastive_temperature,
                    margin: hyper.contrastive_margin,
                };
                let unit = contrastive::representations(&forward.hidden, &pass.pairs);
                parts.push((
                    hyper.contrastive_weight,
                    contrastive::loss(&unit, &pass.pairs, &params, n_pairs as f64),
                ));
            }
            total += backward(&parts, share, recorder);
            if record && index + 1 == passes.len() {
                recorder.add("entropy", mean_entropy(&forward.logits), 1.0);
            }
        }
        if let Some(step) = pair_step {
            let (loss, seen) = self.preference(step, recorder)?;
            total += loss;
            tokens += seen;
        }
        if !total.is_finite() {
            return Err(TrainError::NotFinite {
                step: number,
                what: "loss",
            });
        }
        let norm = optimizer.step(lr);
        if !norm.is_finite() {
            return Err(TrainError::NotFinite {
                step: number,
                what: "gradient norm",
            });
        }
        recorder.add("loss", total, 1.0);
        recorder.add("grad_norm", norm, 1.0);
        recorder.add("learning_rate", lr, 1.0);
        recorder.add_step(tokens);
        Ok(tokens)
    }

    fn passes(&self, step: &Step) -> Vec<Pass> {
        let hyper = &self.config.hyper;
        let members: Vec<usize> = step.iter().flatten().copied().collect();
        let lengths: Vec<usize> = members
            .iter()
            .map(|&i| self.data.sequences[i].own_len())
            .collect();
        let weights: Vec<f32> = members
            .iter()
            .map(|&i| self.data.sequences[i].weight)
            .collect();
        let coefficient = coefficients(&lengths, &weights, hyper.aggregation);
        let mut start = 0;
        step.iter()
            .map(|pass| {
                let sequences: Vec<&Sequence> =
                    pass.iter().map(|&i| &self.data.sequences[i]).collect();
                let batch = Batch::new(
                    &sequences,
                    &coefficient[start..start + pass.len()],
                    self.network.device(),
                );
                start += pass.len();
                let pairs = if hyper.contrastive_weight > 0.0 {
                    batch.pair_index(pass, &sequences, &self.pairs)
                } else {
                    PairIndex::default()
                };
                Pass { batch, pairs }
            })
            .collect()
    }

    fn objective(&self, batch: &Batch, forward: &Forward) -> Result<LossOutput, TrainError> {
        let hyper = &self.config.hyper;
        match self.config.method {
            Method::Imitation => Ok(imitation::loss(&imitation::Input {
                logp: &forward.logp,
                coefficient: &batch.coefficient,
            })),
            Method::Grpo => {
                let behaviour = batch.behaviour.as_ref().ok_or_else(|| {
                    TrainError::NoData("a batch lacks behaviour log-probabilities".into())
                })?;
                Ok(grpo::loss(
                    &grpo::Input {
                        logp: &forward.logp,
                        behaviour,
                        reference: batch.reference.as_ref(),
                        advantage: &batch.advantage,
                        coefficient: &batch.coefficient,
                    },
                    &grpo::Params {
                        clip_low: hyper.clip_low,
                        clip_high: hyper.clip_high,
                        dual_clip: hyper.dual_clip,
                        kl: hyper.kl,
                    },
                ))
            }
        }
    }

    /// The preference term over the pairs of a step; gradients add to those there. Returns loss and tokens.
    fn preference(&self, step: &Step, recorder: &mut Recorder) -> Result<(f64, usize), TrainError> {
        let hyper = &self.config.hyper;
        let weight_sum: f32 = step
            .iter()
            .flatten()
            .map(|&pair| self.data.pairs[pair].weight)
            .sum();
        let count: usize = step.iter().map(Vec::len).sum();
        let (mut total, mut tokens) = (0.0, 0);
        for pass in step {
            let sequences: Vec<&Sequence> = pass
                .iter()
                .flat_map(|&pair| {
                    let pair = &self.data.pairs[pair];
                    [pair.chosen, pair.rejected].map(|index| &self.data.sequences[index])
                })
                .collect();
            let weights: Vec<f32> = pass
                .iter()
                .map(|&pair| self.data.pairs[pair].weight / weight_sum)
                .collect();
            let zeros = coefficients(
                &vec![1; sequences.len()],
                &vec![1.0; sequences.len()],
                Aggregation::TokenMean,
            );
            let batch = Batch::new(&sequences, &zeros, self.network.device());
            let arm: Vec<i64> = (0..sequences.len())
                .flat_map(|row| {
                    std::iter::repeat_n(row as i64, batch.offsets[row + 1] - batch.offsets[row])
                })
                .collect();
            let reference = batch.reference.as_ref().ok_or_else(|| {
                TrainError::NoData("a pair lacks reference log-probabilities".into())
            })?;
            let forward = forward(self.network, &batch)?;
            let output = preference::loss(
                &preference::Input {
                    logp: &forward.logp,
                    reference,
                    arm: &Tensor::from_slice(&arm).to_device(self.network.device()),
                    weight: &Tensor::from_slice(&weights).to_device(self.network.device()),
                },
                hyper.preference_beta,
            );
            let share = pass.len() as f64 / count.max(1) as f64;
            total += backward(&[(hyper.preference_weight, output)], share, recorder);
            tokens += batch.n_tokens;
        }
        Ok((total, tokens))
    }
}

/// Backpropagates the weighted sum of the parts and records their metrics. Losses are sums over passes, all else means weighted by
/// the pass's `share`. Returns the weighted sum.
fn backward(parts: &[(f64, LossOutput)], share: f64, recorder: &mut Recorder) -> f64 {
    let mut sum: Option<Tensor> = None;
    for (weight, output) in parts {
        let weighted = &output.loss * *weight;
        sum = Some(match sum {
            Some(sum) => sum + weighted,
            None => weighted,
        });
        for &(name, value) in &output.metrics {
            if name.starts_with("loss") {
                recorder.add_part(name, value);
            } else {
                recorder.add(name, value, share);
            }
        }
    }
    sum.map_or(0.0, |sum| {
        sum.backward();
        sum.to_kind(Kind::Double).double_value(&[])
    })
}

#[cfg(test)]
mod tests {
    use camino::Utf8PathBuf;
    use drillyard_model::{Llama, LlamaConfig};
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use tch::Device;

    use super::*;
    use crate::network::logprobs;
    use crate::network::tests::Bigram;
    use crate::sequence::Turn;
    use crate::sequence::tests::sequence;

    fn llama(seed: u64) -> Llama {
        // Tests run side by side, and these models are too small to share out.
        tch::set_num_threads(1);
        let json = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": true, "initializer_range": 0.05,
        });
        Llama::init(LlamaConfig::from_json(&json).unwrap(), seed, Device::Cpu).unwrap()
    }

    fn config(method: Method, hyper: Hyper) -> TrainConfig {
        let mut config: TrainConfig = serde_json::from_value(serde_json::json!({
            "method": method, "init": "init", "output": "out", "seed": 3,
        }))
        .unwrap();
        config.hyper = hyper;
        config
    }

    /// Sequences `x y z # x y z` whose second half is the model's: it has to copy.
    fn copying(n: usize, seed: u64) -> Dataset {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let sequences: Vec<Sequence> = (0..n)
            .map(|i| {
                let len = rng.random_range(3..6usize);
                let word: Vec<i32> = (0..len).map(|_| rng.random_range(2..16)).collect();
                let ids = [word.as_slice(), &[1], word.as_slice()].concat();
                Sequence {
                    ids,
                    turns: vec![Turn {
                        start: len as u32 + 1,
                        end: 2 * len as u32 + 1,
                        step: 0,
                        temperature: 1.0,
                    }],
                    ..sequence(&format!("copy-{seed}-{i}"), 3, 1)
                }
            })
            .collect();
        Dataset {
            train: (0..n).collect(),
            sequences,
            ..Dataset::default()
        }
    }

    fn hyper() -> Hyper {
        Hyper {
            epochs: 1,
            batch_tokens: 256,
            micro_tokens: 128,
            learning_rate: 3e-3,
            log_every: 1,
            checkpoint_every: 0,
            ..Hyper::default()
        }
    }

    #[test]
    fn a_tiny_model_overfits_a_copy_task() {
        let network = llama(1);
        let mut data = copying(32, 5);
        data.holdout = data.train.clone();
        let hyper = Hyper {
            epochs: 150,
            ..hyper()
        };
        let outcome = fit(
            &config(Method::Imitation, hyper),
            &network,
            &data,
            None,
            &mut NoHooks,
        )
        .unwrap();
        assert!(outcome.loss_first.unwrap() > 2.0);
        assert!(outcome.loss_last.unwrap() < 0.1, "{:?}", outcome.loss_last);
        assert!(outcome.last["exact_turns_holdout"] > 0.95);
        assert!(outcome.last["tokens_per_second"] > 0.0);
    }

    #[test]
    fn passes_add_up_to_the_step() {
        // The same step in one pass and in many: equal up to rounding.
        let data = copying(24, 9);
        let weights = |micro_tokens| {
            let network = llama(2);
            let hyper = Hyper {
                micro_tokens,
                max_steps: Some(3),
                ..hyper()
            };
            fit(
                &config(Method::Imitation, hyper),
                &network,
                &data,
                None,
                &mut NoHooks,
            )
            .unwrap();
            network.parameters()
        };
        for ((name, one), (_, many)) in weights(256).iter().zip(weights(16)) {
            let difference = (one - many).abs().max().double_value(&[]);
            assert!(difference < 1e-4, "{name} differs by {difference}");
        }
    }

    struct Stop(u64);

    impl Hooks for Stop {
        fn on_steps(&mut self, report: &StepReport) {
            // Like a kill: nothing after this step happens.
            assert!(report.step != self.0, "stopped on purpose");
        }
    }

    #[test]
    fn five_steps_and_five_resumed_equal_ten_bit_for_bit() {
        let guard = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(guard.path().to_owned()).unwrap();
        let data = copying(120, 11);
        let hyper = Hyper {
            epochs: 2,
            max_steps: Some(10),
            checkpoint_every: 5,
            ..hyper()
        };
        let config = config(Method::Imitation, hyper);
        let straight = llama(4);
        let through = fit(&config, &straight, &data, None, &mut NoHooks).unwrap();
        assert_eq!((through.steps, through.resumed_from), (10, None));

        let store = Store::new(&root.join("out"), &root);
        let killed =
            std::panic::catch_unwind(|| fit(&config, &llama(4), &data, Some(&store), &mut Stop(7)));
        assert!(killed.is_err(), "the run was to die after step 6");
        // Other weights at the start: everything must come from the saved state.
        let resumed = llama(99);
        let rest = fit(&config, &resumed, &data, Some(&store), &mut NoHooks).unwrap();
        assert_eq!((rest.steps, rest.resumed_from), (10, Some(5)));
        assert_eq!(rest.tokens, through.tokens);
        for ((name, a), (_, b)) in straight.parameters().iter().zip(resumed.parameters()) {
            assert_eq!(*a, b, "{name} differs");
        }
        let losses = |outcome: &Outcome| curve(&outcome.rows, "loss").collect::<Vec<_>>();
        assert_eq!(losses(&through), losses(&rest));

        // Another configuration starts afresh.
        let mut other = config.clone();
        other.seed = 8;
        let fresh = fit(&other, &llama(4), &data, Some(&store), &mut NoHooks).unwrap();
        assert_eq!(fresh.resumed_from, None);
    }

    /// One-token episodes in groups: from context `c` the network picks one of four actions; `reward` says how good it was.
    fn bandit(
        network: &dyn Network,
        groups: usize,
        seed: u64,
        reward: impl Fn(&mut ChaCha8Rng, i32, i32) -> f32,
    ) -> Dataset {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let policy = policy(network);
        let mut sequences = Vec::new();
        for group in 0..groups {
            let context = 4 + (group % 4) as i32;
            let rewards: Vec<(i32, f32)> = (0..8)
                .map(|_| {
                    let action = draw(&mut rng, &policy[(context - 4) as usize]);
                    (action, reward(&mut rng, context, action))
                })
                .collect();
            let mean = rewards.iter().map(|(_, r)| r).sum::<f32>() / 8.0;
            for (k, (action, reward)) in rewards.into_iter().enumerate() {
                sequences.push(Sequence {
                    group: Some(format!("g{group}").into()),
                    ids: vec![context, action],
                    advantage: reward - mean,
                    turns: vec![Turn {
                        start: 1,
                        end: 2,
                        step: 0,
                        temperature: 1.0,
                    }],
                    ..sequence(&format!("b{group}-{k}"), 2, 1)
                });
            }
        }
        let refs: Vec<&Sequence> = sequences.iter().collect();
        let behaviour = logprobs(network, &refs, 512, &mut |_| {}).unwrap();
        for (sequence, logps) in sequences.iter_mut().zip(behaviour) {
            sequence.reference = logps.clone();
            sequence.behaviour = logps;
        }
        Dataset {
            train: (0..sequences.len()).collect(),
            sequences,
            ..Dataset::default()
        }
    }

    /// Probabilities of the four actions in each of the four contexts.
    fn policy(network: &dyn Network) -> Vec<Vec<f64>> {
        let table = tch::no_grad(|| {
            let ids = Tensor::from_slice(&[4i64, 5, 6, 7]).view([4, 1]);
            let hidden = network.hidden(&ids).unwrap().view([4, -1]);
            let logits = network.logits(&hidden).unwrap().narrow(1, 0, 4);
            logits.softmax(-1, Kind::Float)
        });
        (0..4)
            .map(|c| (0..4).map(|a| table.double_value(&[c, a])).collect())
            .collect()
    }

    fn draw(rng: &mut ChaCha8Rng, probabilities: &[f64]) -> i32 {
        let mut left: f64 = rng.random();
        for (action, p) in probabilities.iter().enumerate() {
            left -= p;
            if left < 0.0 {
                return action as i32;
            }
        }
        3
    }

    /// Mean probability of the best action, which is the context minus 4.
    fn skill(network: &dyn Network) -> f64 {
        let policy = policy(network);
        (0..4).map(|c| policy[c][c]).sum::<f64>() / 4.0
    }

    #[test]
    fn grpo_raises_the_rewarded_action_and_shuffled_rewards_do_not() {
        let hyper = Hyper {
            epochs: 3,
            learning_rate: 2e-2,
            batch_tokens: 256,
            micro_tokens: 256,
            log_every: 1,
            checkpoint_every: 0,
            ..Hyper::default()
        };
        // Each round learns from episodes of the policy as it is: within a round the clip bounds how far it can move.
        let trained = |shuffled: bool| {
            let network = Bigram::new(8, 8, 21);
            let before = skill(&network);
            for round in 0..10 {
                let data = bandit(&network, 64, round, |rng, context, action| {
                    let action = if shuffled {
                        // The reward of another draw: nothing the policy did.
                        rng.random_range(0..4)
                    } else {
                        action
                    };
                    f32::from(u8::from(action == context - 4))
                });
                let config = config(Method::Grpo, hyper.clone());
                let outcome = fit(&config, &network, &data, None, &mut NoHooks).unwrap();
                for metric in ["kl", "clip_share", "entropy", "ratio_mean", "grad_norm"] {
                    assert!(outcome.last.contains_key(metric), "{metric} is missing");
                }
            }
            skill(&network) - before
        };
        let (right, shuffled) = (trained(false), trained(true));
        assert!(right > 0.3, "rewards raised it by {right}");
        assert!(
            shuffled.abs() < 0.1,
            "shuffled rewards moved it by {shuffled}"
        );
    }

    #[test]
    fn contrastive_format_and_preference_terms_are_trained_and_recorded() {
        let network = llama(6);
        let mut data = copying(40, 17);
        for (i, sequence) in data.sequences.iter_mut().enumerate() {
            sequence.group = Some(format!("g{}", i / 8).into());
            sequence.advantage = if i % 2 == 0 { 1.0 } else { -1.0 };
            sequence.format = vec![true; sequence.own_len()];
        }
        let refs: Vec<&Sequence> = data.sequences.iter().collect();
        let logps = logprobs(&network, &refs, 512, &mut |_| {}).unwrap();
        for (sequence, logps) in data.sequences.iter_mut().zip(logps) {
            sequence.behaviour = logps.clone();
            sequence.reference = logps;
        }
        data.pairs = (0..20)
            .map(|i| Pair {
                chosen: 2 * i,
                rejected: 2 * i + 1,
                divergence: 0,
                task: (i / 4) as u32,
                weight: 1.0,
            })
            .collect();
        let terms = Hyper {
            epochs: 20,
            contrastive_weight: 1.0,
            format_weight: 1.0,
            ..hyper()
        };
        let outcome = fit(
            &config(Method::Grpo, terms),
            &network,
            &data,
            None,
            &mut NoHooks,
        )
        .unwrap();
        // Means of the first and the last fifth of the curve.
        let first_last = |outcome: &Outcome, name: &str| {
            let values: Vec<f64> = curve(&outcome.rows, name).map(|(_, v)| v).collect();
            let part = values.len() / 5;
            let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
            (mean(&values[..part]), mean(&values[values.len() - part..]))
        };
        for name in ["loss_format", "loss_contrastive"] {
            let (first, last) = first_last(&outcome, name);
            assert!(last < first, "{name} rose from {first} to {last}");
        }
        assert!(outcome.last.contains_key("pair_cosine"));

        let terms = Hyper {
            epochs: 10,
            preference_weight: 1.0,
            ..hyper()
        };
        let outcome = fit(
            &config(Method::Imitation, terms),
            &network,
            &data,
            None,
            &mut NoHooks,
        )
        .unwrap();
        let (_, last) = first_last(&outcome, "loss_preference");
        assert!(last < 0.69, "the chosen arms are not preferred: {last}");
        assert!(outcome.last["preference_accuracy_share"] > 0.6);
    }

    #[test]
    fn a_loss_that_is_no_number_stops_the_run() {
        let network = llama(7);
        let mut data = copying(8, 19);
        for sequence in &mut data.sequences {
            sequence.behaviour = vec![f32::NAN; sequence.own_len()];
            sequence.advantage = 1.0;
        }
        let result = fit(
            &config(Method::Grpo, hyper()),
            &network,
            &data,
            None,
            &mut NoHooks,
        );
        assert!(matches!(result, Err(TrainError::NotFinite { step: 1, .. })));
    }

    struct Measures(Vec<(u64, bool)>);

    impl Hooks for Measures {
        fn validate(
            &mut self,
            step: u64,
            dir: &Utf8Path,
        ) -> Result<Option<Validation>, TrainError> {
            self.0.push((step, dir.join("model.safetensors").exists()));
            Ok(Some(Validation {
                success: 0.1 * step as f64,
                mean_steps: 3.0,
                tool_accuracy: 1.0,
            }))
        }
    }

    #[test]
    fn validation_sees_checkpoints_before_during_and_after() {
        let guard = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(guard.path().to_owned()).unwrap();
        let mut data = copying(60, 23);
        data.keep_back(0.2);
        assert!(!data.holdout.is_empty() && data.train.len() + data.holdout.len() == 60);
        let hyper = Hyper {
            validate_every: 2,
            max_steps: Some(5),
            epochs: 9,
            ..hyper()
        };
        let mut hooks = Measures(vec![]);
        let store = Store::new(&root.join("out"), &root);
        let outcome = fit(
            &config(Method::Imitation, hyper),
            &llama(8),
            &data,
            Some(&store),
            &mut hooks,
        )
        .unwrap();
        assert_eq!(hooks.0, [(0, true), (2, true), (4, true), (5, true)]);
        assert_eq!(outcome.validations.len(), 4);
        assert_eq!(curve(&outcome.rows, "loss_holdout").count(), 4);
    }
}
