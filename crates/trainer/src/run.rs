//! A whole training run for one configuration: load, gate, train, write the checkpoint.

use std::collections::BTreeMap;

use camino::Utf8PathBuf;
use drillyard_model::Llama;
use drillyard_schema::table::TrainMetricRow;
use serde::{Deserialize, Serialize};
use tch::Device;

use crate::advice::{Advice, Groups, Validation};
use crate::assemble::{self, Texts};
use crate::checkpoint::{Origin, Store, read_origin};
use crate::config::{Method, TrainConfig};
use crate::error::TrainError;
use crate::gate::{Drift, GateReport, drift, judge, sample};
use crate::load;
use crate::network::logprobs;
use crate::sequence::Sequence;
use crate::train::{Dataset, Hooks, fit};

/// Largest difference (nats) between sampler and trainer at which stored log-probabilities also serve as the reference's.
const SAME_LOGPROBS: f64 = 5e-3;

/// How a run ended.
#[derive(Debug)]
pub enum Ending {
    /// With a checkpoint.
    Trained(Box<Figures>),
    /// At the provenance gate.
    Refused(Box<GateReport>),
}

/// The figures of a run, as the report card shows them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The method.
    pub method: Method,
    /// The checkpoint's folder.
    pub output: Utf8PathBuf,
    /// Hash of its weights.
    pub revision: String,
    /// Hash of the weights training started from.
    pub parent_revision: String,
    /// Sequences trained on.
    pub sequences: usize,
    /// Pairs at hand.
    pub pairs: usize,
    /// The groups behind the advantages.
    pub groups: Groups,
    /// Optimiser steps.
    pub steps: u64,
    /// Tokens trained on, padding not counted.
    pub tokens: u64,
    /// Seconds of training.
    pub seconds: f64,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// Loss of the first recorded steps.
    pub loss_first: Option<f64>,
    /// Loss of the last recorded steps.
    pub loss_last: Option<f64>,
    /// KL divergence to the reference at the end, nats a token.
    pub kl: Option<f64>,
    /// Share of clipped tokens at the end.
    pub clip_share: Option<f64>,
    /// The last value of every metric.
    pub last: BTreeMap<String, f64>,
    /// What the provenance gate found; absent where there is none to pass.
    pub gate: Option<GateReport>,
    /// Validation results by step.
    pub validations: Vec<(u64, Validation)>,
    /// Advice from the curves.
    pub advice: Vec<Advice>,
    /// What is worth telling about how the data was selected.
    pub notes: Vec<String>,
    /// The step the run was resumed from, if it was.
    pub resumed_from: Option<u64>,
    /// The curves, as rows of the lake.
    #[serde(skip)]
    pub rows: Vec<TrainMetricRow>,
}

/// Runs a configuration. Blocks the thread while training; only reading the lake is asynchronous.
pub async fn run(config: &TrainConfig, hooks: &mut dyn Hooks) -> Result<Ending, TrainError> {
    config.check()?;
    tch::set_num_threads(i32::try_from(config.threads).unwrap_or(1));
    let device = Device::cuda_if_available();
    let network = Llama::load(&config.init, device)?;
    let parent_revision = network.weights_hash()?;
    let origin = read_origin(&config.init)?;
    let max_length =
        (network.config().max_position_embeddings as usize).min(config.hyper.max_length);
    let mut config = config.clone();
    config.hyper.max_length = max_length;
    let config = &config;

    let (mut data, gate) = match config.method {
        Method::Imitation => (imitation_data(config, &network, hooks).await?, None),
        Method::Grpo => {
            match grpo_data(config, &network, &parent_revision, &origin, hooks).await? {
                (Some(data), report) => (data, Some(report)),
                (None, report) => return Ok(Ending::Refused(Box::new(report))),
            }
        }
    };
    for note in &data.notes {
        hooks.note(note);
    }
    data.check()?;
    let notes = std::mem::take(&mut data.notes);
    let store = Store::new(&config.output, &config.init);
    let outcome = fit(config, &network, &data, Some(&store), hooks)?;

    let revision = network.weights_hash()?;
    let mut lineage = vec![parent_revision.clone()];
    lineage.extend(origin.lineage);
    store.finish(
        &network,
        &Origin {
            revision: revision.clone(),
            lineage,
            method: match config.method {
                Method::Imitation => "imitation",
                Method::Grpo => "grpo",
            }
            .to_owned(),
            steps: outcome.steps,
            fingerprint: config.fingerprint()?,
        },
    )?;
    Ok(Ending::Trained(Box::new(Figures {
        method: config.method,
        output: config.output.clone(),
        revision,
        parent_revision,
        sequences: data.train.len(),
        pairs: data.pairs.len(),
        groups: data.groups,
        steps: outcome.steps,
        tokens: outcome.tokens,
        seconds: outcome.seconds,
        tokens_per_second: outcome.tokens_per_second,
        loss_first: outcome.loss_first,
        loss_last: outcome.loss_last,
        kl: outcome.last.get("kl").copied(),
        clip_share: outcome.last.get("clip_share").copied(),
        last: outcome.last,
        gate,
        validations: outcome.validations,
        advice: outcome.advice,
        notes,
        resumed_from: outcome.resumed_from,
        rows: outcome.rows,
    })))
}

async fn imitation_data(
    config: &TrainConfig,
    network: &Llama,
    hooks: &mut dyn Hooks,
) -> Result<Dataset, TrainError> {
    let texts = Texts::load(&config.init)?;
    let hyper = &config.hyper;
    let mut data = if let Some(path) = &config.conversations {
        let tools = config.toolsets.get("*").map_or(&[][..], Vec::as_slice);
        load::conversations(
            path,
            &texts,
            tools,
            hyper.max_length,
            config.threads as usize,
        )?
    } else if let Some(source) = &config.lake {
        let rows = load::rows(config, source).await?;
        assemble::imitation(&rows, config, &texts)?
    } else {
        Dataset::default()
    };
    if data.train.is_empty() && data.pairs.is_empty() {
        return Err(TrainError::NoData(format!(
            "no episode was selected ({:?})",
            hyper.select
        )));
    }
    check_vocabulary(&data, network)?;
    if hyper.holdout_share > 0.0 {
        data.keep_back(hyper.holdout_share);
    }
    if !data.pairs.is_empty() {
        let members: std::collections::BTreeSet<usize> = data
            .pairs
            .iter()
            .flat_map(|pair| [pair.chosen, pair.rejected])
            .collect();
        let members: Vec<usize> = members.into_iter().collect();
        hooks.note("computing the reference's log-probabilities of the pairs");
        fill_reference(config, network, &mut data, &members)?;
    }
    Ok(data)
}

/// The data set of GRPO if the gate lets it pass, and the gate's report.
async fn grpo_data(
    config: &TrainConfig,
    network: &Llama,
    revision: &str,
    origin: &Origin,
    hooks: &mut dyn Hooks,
) -> Result<(Option<Dataset>, GateReport), TrainError> {
    let hyper = &config.hyper;
    let source = config
        .lake
        .as_ref()
        .ok_or_else(|| TrainError::config("lake", "grpo needs a lake"))?;
    let rows = load::rows(config, source).await?;
    let (mut data, provenance) = assemble::grpo(&rows, config, revision, &origin.lineage)?;
    drop(rows);
    if provenance.episodes == 0 {
        return Err(TrainError::NoData(format!(
            "of {} groups {} have equal rewards throughout, and no scored episode is left to compare",
            data.groups.total, data.groups.zero_variance
        )));
    }
    check_vocabulary(&data, network)?;

    let measured = measure_drift(config, network, &data)?;
    let report = judge(provenance, measured, &config.gate);
    hooks.note(report.to_string().trim_end());
    if !report.passed {
        return Ok((None, report));
    }
    if report.recompute_missing {
        let missing: Vec<usize> = (0..data.sequences.len())
            .filter(|&i| data.sequences[i].behaviour.is_empty())
            .collect();
        let members: Vec<&Sequence> = missing.iter().map(|&i| &data.sequences[i]).collect();
        let computed = logprobs(network, &members, hyper.micro_tokens, &mut |_| {})?;
        for (i, logps) in missing.into_iter().zip(computed) {
            data.sequences[i].behaviour = logps;
        }
    }
    let sequences = &data.sequences;
    let before = data.train.len();
    data.train.retain(|&i| !sequences[i].behaviour.is_empty());
    if data.train.len() < before {
        data.notes.push(format!(
            "{} left out: no behaviour log-probabilities",
            before - data.train.len()
        ));
    }

    if hyper.kl > 0.0 {
        // Stored log-probabilities are the reference's where the same weights sampled and the two engines agree.
        let agree = measured.is_some_and(|d| d.max_difference <= SAME_LOGPROBS);
        let is_init = config.reference_dir() == &config.init;
        let sampled_by_init = report.staleness == Some(0);
        if agree && is_init && sampled_by_init {
            for sequence in &mut data.sequences {
                sequence.reference = sequence.behaviour.clone();
            }
        } else {
            hooks.note("computing the reference's log-probabilities");
            let members = data.train.clone();
            fill_reference(config, network, &mut data, &members)?;
        }
    }
    Ok((Some(data), report))
}

fn measure_drift(
    config: &TrainConfig,
    network: &Llama,
    data: &Dataset,
) -> Result<Option<Drift>, TrainError> {
    let chosen = sample(&data.sequences, config.gate.sample);
    if chosen.is_empty() {
        return Ok(None);
    }
    let hyper = &config.hyper;
    let current = logprobs(network, &chosen, hyper.micro_tokens, &mut |_| {})?;
    let pairs: Vec<(&[f32], &[f32])> = current
        .iter()
        .zip(&chosen)
        .map(|(current, sequence)| (current.as_slice(), sequence.behaviour.as_slice()))
        .collect();
    Ok(Some(drift(&pairs, hyper.clip_low, hyper.clip_high)))
}

/// Computes the reference's log-probabilities of some sequences.
fn fill_reference(
    config: &TrainConfig,
    network: &Llama,
    data: &mut Dataset,
    members: &[usize],
) -> Result<(), TrainError> {
    let other;
    let reference: &Llama = if config.reference_dir() == &config.init {
        network
    } else {
        other = Llama::load(config.reference_dir(), network.device())?;
        &other
    };
    let sequences: Vec<&Sequence> = members.iter().map(|&i| &data.sequences[i]).collect();
    let computed = logprobs(
        reference,
        &sequences,
        config.hyper.micro_tokens,
        &mut |_| {},
    )?;
    for (&i, logps) in members.iter().zip(computed) {
        data.sequences[i].reference = logps;
    }
    Ok(())
}

fn check_vocabulary(data: &Dataset, network: &Llama) -> Result<(), TrainError> {
    let size = network.config().vocab_size;
    for sequence in &data.sequences {
        if let Some(id) = sequence
            .ids
            .iter()
            .find(|&&id| id < 0 || i64::from(id) >= size)
        {
            return Err(TrainError::Row {
                episode: sequence.episode.to_string(),
                message: format!(
                    "token id {id} is outside the model's vocabulary of {size}; the episode was sampled from another tokenizer"
                ),
            });
        }
    }
    Ok(())
}
