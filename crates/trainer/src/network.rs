//! What training needs of a model, and nothing more: hidden states, logits where they are asked for, parameters by name.

use std::collections::BTreeMap;

use camino::Utf8Path;
use drillyard_model::Llama;
use tch::{Device, Kind, Tensor};

use crate::batch::Batch;
use crate::error::TrainError;
use crate::losses::token_logprobs;
use crate::sequence::Sequence;

/// A causal language model.
pub trait Network {
    /// Final hidden states (after the last norm) of ids `[B, T]` padded on the right: `[B, T, D]`.
    fn hidden(&self, ids: &Tensor) -> Result<Tensor, TrainError>;

    /// Logits `[N, V]` of hidden states `[N, D]`.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor, TrainError>;

    /// The trainable parameters under their Hugging Face names. The tensors are references: updating them in place trains the model.
    fn parameters(&self) -> Vec<(String, Tensor)>;

    /// Writes the parameters and whatever else makes a checkpoint into an existing folder.
    fn save(&self, dir: &Utf8Path) -> Result<(), TrainError>;

    /// Sets the parameters to those of a checkpoint that [`Network::save`] wrote.
    fn restore(&self, dir: &Utf8Path) -> Result<(), TrainError>;

    /// Where the parameters lie.
    fn device(&self) -> Device {
        Device::Cpu
    }
}

impl Network for Llama {
    fn hidden(&self, ids: &Tensor) -> Result<Tensor, TrainError> {
        Ok(Self::hidden(self, ids)?)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor, TrainError> {
        Ok(Self::logits(self, hidden)?)
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        self.named_parameters()
    }

    fn save(&self, dir: &Utf8Path) -> Result<(), TrainError> {
        Ok(Self::save(self, dir)?)
    }

    fn restore(&self, dir: &Utf8Path) -> Result<(), TrainError> {
        let saved = Self::load(dir, Llama::device(self))?.named_parameters();
        copy_parameters(&self.named_parameters(), saved, dir)
    }

    fn device(&self) -> Device {
        Self::device(self)
    }
}

/// Copies values by name into existing parameters.
pub(crate) fn copy_parameters(
    parameters: &[(String, Tensor)],
    saved: Vec<(String, Tensor)>,
    from: &Utf8Path,
) -> Result<(), TrainError> {
    let saved: BTreeMap<String, Tensor> = saved.into_iter().collect();
    for (name, tensor) in parameters {
        let value = saved
            .get(name)
            .filter(|value| value.size() == tensor.size())
            .ok_or_else(|| TrainError::Input {
                path: from.to_owned(),
                message: format!("lacks parameter {name} in the model's shape"),
            })?;
        tch::no_grad(|| tensor.shallow_clone().copy_(value));
    }
    Ok(())
}

/// What a pass yields at the own tokens of a batch.
#[derive(Debug)]
pub struct Forward {
    /// Hidden states the tokens are predicted from, `[N, D]`.
    pub hidden: Tensor,
    /// Logits divided by the sampling temperature, `[N, V]`.
    pub logits: Tensor,
    /// Log-probabilities of the own tokens under those logits, `[N]`.
    pub logp: Tensor,
}

/// Runs the model over a batch. Logits are computed at own tokens only.
pub fn forward(network: &dyn Network, batch: &Batch) -> Result<Forward, TrainError> {
    let hidden = network.hidden(&batch.ids)?;
    let width = hidden.size()[2];
    let hidden = hidden.view([-1, width]).index_select(0, &batch.select);
    let mut logits = network.logits(&hidden)?;
    if let Some(temperature) = &batch.temperature {
        logits /= temperature;
    }
    let logp = token_logprobs(&logits, &batch.targets);
    Ok(Forward {
        hidden,
        logits,
        logp,
    })
}

/// Log-probabilities (nats) of each sequence's own tokens at their sampling temperatures, without gradient.
///
/// `progress` is called with the number of sequences done.
pub fn logprobs(
    network: &dyn Network,
    sequences: &[&Sequence],
    micro_tokens: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Vec<f32>>, TrainError> {
    let mut result = vec![Vec::new(); sequences.len()];
    let mut done = 0;
    for members in passes_by_length(sequences, micro_tokens) {
        let batch = batch_of(network, sequences, &members);
        let logp = tch::no_grad(|| forward(network, &batch))?.logp;
        let flat = to_vec(&logp, batch.n_own());
        for (k, &i) in members.iter().enumerate() {
            result[i] = flat[batch.offsets[k]..batch.offsets[k + 1]].to_vec();
        }
        done += members.len();
        progress(done);
    }
    Ok(result)
}

/// How well a network predicts the own tokens of sequences it is not trained on.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Holdout {
    /// Mean negative log-likelihood, nats a token.
    pub loss: f64,
    /// Share of own tokens that are the likeliest.
    pub token_accuracy: f64,
    /// Share of turns all of whose tokens are the likeliest, the ones before being given.
    pub exact_turns: f64,
}

/// Measures [`Holdout`].
pub fn holdout(
    network: &dyn Network,
    sequences: &[&Sequence],
    micro_tokens: usize,
) -> Result<Holdout, TrainError> {
    let (mut loss, mut tokens, mut right) = (0.0, 0usize, 0usize);
    let (mut turns, mut exact) = (0usize, 0usize);
    for members in passes_by_length(sequences, micro_tokens) {
        let batch = batch_of(network, sequences, &members);
        let forward = tch::no_grad(|| forward(network, &batch))?;
        let hits = forward.logits.argmax(-1, false).eq_tensor(&batch.targets);
        let hits = to_vec(&hits, batch.n_own());
        loss -= forward.logp.sum(Kind::Double).double_value(&[]);
        tokens += batch.n_own();
        right += hits.iter().filter(|&&hit| hit > 0.5).count();
        for (k, &i) in members.iter().enumerate() {
            let mut at = batch.offsets[k];
            for turn in &sequences[i].turns {
                turns += 1;
                exact += usize::from(hits[at..at + turn.len()].iter().all(|&hit| hit > 0.5));
                at += turn.len();
            }
        }
    }
    Ok(Holdout {
        loss: loss / tokens.max(1) as f64,
        token_accuracy: right as f64 / tokens.max(1) as f64,
        exact_turns: exact as f64 / turns.max(1) as f64,
    })
}

/// Sequences with own tokens, by length, cut into passes.
fn passes_by_length(sequences: &[&Sequence], micro_tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..sequences.len())
        .filter(|&i| sequences[i].own_len() > 0)
        .collect();
    order.sort_by_key(|&i| sequences[i].ids.len());
    let mut passes: Vec<Vec<usize>> = Vec::new();
    for i in order {
        match passes.last_mut() {
            Some(pass) if (pass.len() + 1) * sequences[i].ids.len() <= micro_tokens => pass.push(i),
            _ => passes.push(vec![i]),
        }
    }
    passes
}

fn batch_of(network: &dyn Network, sequences: &[&Sequence], members: &[usize]) -> Batch {
    let members: Vec<&Sequence> = members.iter().map(|&i| sequences[i]).collect();
    Batch::new(&members, &vec![0.0; members.len()], network.device())
}

fn to_vec(tensor: &Tensor, len: usize) -> Vec<f32> {
    let mut flat = vec![0f32; len];
    tensor
        .to_kind(Kind::Float)
        .to_device(Device::Cpu)
        .copy_data(&mut flat, len);
    flat
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sequence::tests::sequence;

    /// The smallest network that can learn a next-token table: an embedding and an output matrix.
    pub struct Bigram {
        pub embedding: Tensor,
        pub output: Tensor,
    }

    impl Bigram {
        pub fn new(vocabulary: i64, width: i64, seed: u64) -> Self {
            // No global generator: tests run side by side.
            let draw = |rows: i64, columns: i64, salt: u64| {
                use rand::{Rng, RngExt, SeedableRng};
                fn uniform(rng: &mut impl Rng) -> f32 {
                    rng.random_range(-0.5f32..0.5)
                }
                let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed ^ salt);
                let values: Vec<f32> = (0..rows * columns).map(|_| uniform(&mut rng)).collect();
                Tensor::from_slice(&values)
                    .view([rows, columns])
                    .set_requires_grad(true)
            };
            Self {
                embedding: draw(vocabulary, width, 1),
                output: draw(vocabulary, width, 2),
            }
        }
    }

    impl Network for Bigram {
        fn hidden(&self, ids: &Tensor) -> Result<Tensor, TrainError> {
            Ok(Tensor::embedding(&self.embedding, ids, -1, false, false))
        }

        fn logits(&self, hidden: &Tensor) -> Result<Tensor, TrainError> {
            Ok(hidden.matmul(&self.output.tr()))
        }

        fn save(&self, dir: &Utf8Path) -> Result<(), TrainError> {
            let path = dir.join("model.safetensors");
            Ok(Tensor::write_safetensors(
                &self.parameters(),
                path.as_std_path(),
            )?)
        }

        fn restore(&self, dir: &Utf8Path) -> Result<(), TrainError> {
            let saved = Tensor::read_safetensors(dir.join("model.safetensors").as_std_path())?;
            copy_parameters(&self.parameters(), saved, dir)
        }

        fn parameters(&self) -> Vec<(String, Tensor)> {
            vec![
                ("embedding".into(), self.embedding.shallow_clone()),
                ("output".into(), self.output.shallow_clone()),
            ]
        }
    }

    #[test]
    fn logprobs_come_back_in_order_and_tempered() {
        let network = Bigram::new(12, 4, 3);
        let mut hot = sequence("b", 4, 2);
        hot.turns[0].temperature = 2.0;
        let sequences = [sequence("a", 9, 3), hot, sequence("c", 6, 1)];
        let refs: Vec<&Sequence> = sequences.iter().collect();
        let result = logprobs(&network, &refs, 10, &mut |_| {}).unwrap();
        let table = network.logits(&network.embedding).unwrap();
        for (sequence, logps) in sequences.iter().zip(&result) {
            assert_eq!(logps.len(), sequence.own_len());
            for (position, logp) in sequence.own_positions().zip(logps) {
                let from = i64::from(sequence.ids[position as usize - 1]);
                let to = i64::from(sequence.ids[position as usize]);
                let temperature = f64::from(sequence.turns[0].temperature);
                let expected = (table.get(from) / temperature)
                    .log_softmax(-1, Kind::Float)
                    .double_value(&[to]);
                assert!((f64::from(*logp) - expected).abs() < 1e-5);
            }
        }
    }
}
