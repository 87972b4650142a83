//! The parameters of one model, and the forward pass used for training.

use std::collections::BTreeMap;

use camino::Utf8Path;
use tch::{Device, Kind, Tensor};

use crate::config::{EMBEDDING, FINAL_NORM, OUTPUT, layer_parameter};
use crate::{LlamaConfig, ModelError, init, weights};

/// The file a configuration is written to.
pub const CONFIG_FILE: &str = "config.json";

/// One layer's parameters; shapes as in Hugging Face's checkpoints (`[out, in]`).
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) input_norm: Tensor,
    pub(crate) post_attention_norm: Tensor,
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) o: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) down: Tensor,
}

/// A Llama model: f32 parameters on one device.
#[derive(Debug)]
pub struct Llama {
    config: LlamaConfig,
    pub(crate) embedding: Tensor,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Tensor,
    pub(crate) output: Tensor,
    rotary: Rotary,
}

impl Llama {
    /// Reads `config.json` and the weights of a checkpoint folder in Hugging Face layout.
    pub fn load(dir: &Utf8Path, device: Device) -> Result<Self, ModelError> {
        let config = LlamaConfig::load(&dir.join(CONFIG_FILE))?;
        Self::from_parameters(config, weights::load(dir, device)?)
    }

    /// Draws fresh weights: normal with standard deviation `initializer_range`, norms at one. The same seed gives the same weights
    /// on every machine.
    pub fn init(config: LlamaConfig, seed: u64, device: Device) -> Result<Self, ModelError> {
        let parameters = init::plain(&config, seed, device)?;
        Self::from_parameters(config, parameters)
    }

    /// As [`Llama::init`], with an induction circuit in the first two layers: the model starts able to continue a sequence that
    /// stood in its context before. Small models otherwise spend most of their training on finding that circuit (Olsson et al. 2022,
    /// "In-context Learning and Induction Heads"; starting attention near what training would make of it: Trockman and Kolter 2023,
    /// "Mimetic Initialization of Self-Attention Layers").
    ///
    /// # Errors
    /// A configuration with fewer than two layers, or whose heads are narrower than 8, not divisible by 4, or as wide as the model.
    pub fn init_copying(
        config: LlamaConfig,
        seed: u64,
        device: Device,
    ) -> Result<Self, ModelError> {
        let parameters = init::copying(&config, seed, device)?;
        Self::from_parameters(config, parameters)
    }

    /// A model of given parameters. Every name of [`LlamaConfig::parameter_shapes`] must be there with its shape; names that other
    /// exporters add (rotary tables, a tied output projection) are left out, any other name is an error.
    pub fn from_parameters(
        config: LlamaConfig,
        mut parameters: BTreeMap<String, Tensor>,
    ) -> Result<Self, ModelError> {
        let shapes: BTreeMap<_, _> = config.parameter_shapes().into_iter().collect();
        parameters.retain(|name, _| {
            !(name.ends_with("rotary_emb.inv_freq")
                || (name == OUTPUT && config.tie_word_embeddings))
        });
        if let Some(name) = parameters.keys().find(|name| !shapes.contains_key(*name)) {
            return Err(ModelError::Parameter {
                name: name.clone(),
                message: "does not belong to a model of this configuration".into(),
            });
        }
        let mut take = |name: &str| -> Result<Tensor, ModelError> {
            let error = |message| ModelError::Parameter {
                name: name.to_owned(),
                message,
            };
            let tensor = parameters
                .remove(name)
                .ok_or_else(|| error("is missing from the weights".into()))?;
            let expected = &shapes[name];
            if tensor.size() != *expected {
                return Err(error(format!(
                    "has shape {:?}, the configuration asks for {expected:?}",
                    tensor.size()
                )));
            }
            Ok(tensor)
        };
        let embedding = take(EMBEDDING)?;
        let output = if config.tie_word_embeddings {
            embedding.shallow_clone()
        } else {
            take(OUTPUT)?
        };
        let layers = (0..config.num_hidden_layers)
            .map(|layer| {
                let mut part = |name: &str| take(&layer_parameter(layer, name));
                Ok(Layer {
                    input_norm: part("input_layernorm")?,
                    post_attention_norm: part("post_attention_layernorm")?,
                    q: part("self_attn.q_proj")?,
                    k: part("self_attn.k_proj")?,
                    v: part("self_attn.v_proj")?,
                    o: part("self_attn.o_proj")?,
                    gate: part("mlp.gate_proj")?,
                    up: part("mlp.up_proj")?,
                    down: part("mlp.down_proj")?,
                })
            })
            .collect::<Result<_, ModelError>>()?;
        let final_norm = take(FINAL_NORM)?;
        let rotary = Rotary::new(&config, config.max_position_embeddings, embedding.device());
        Ok(Self {
            config,
            embedding,
            layers,
            final_norm,
            output,
            rotary,
        })
    }

    /// Writes `config.json` and `model.safetensors` into `dir` (made if absent), each atomically. Tokenizer and chat template are
    /// not this crate's.
    pub fn save(&self, dir: &Utf8Path) -> Result<(), ModelError> {
        fs_err::create_dir_all(dir)?;
        let config = format!("{:#}\n", self.config.to_json());
        weights::write_atomically(&dir.join(CONFIG_FILE), config.as_bytes())?;
        let parameters = self.named_parameters();
        weights::save(dir, parameters.iter().map(|(n, t)| (n.as_str(), t)))
    }

    /// The model's shape.
    pub const fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Where the parameters lie.
    pub fn device(&self) -> Device {
        self.embedding.device()
    }

    /// Every parameter with its Hugging Face name, sorted by name. The tensors share storage and gradient with the model: an
    /// optimiser may write to them in place (under `tch::no_grad`).
    pub fn named_parameters(&self) -> Vec<(String, Tensor)> {
        let mut all = vec![
            (EMBEDDING.to_owned(), self.embedding.shallow_clone()),
            (FINAL_NORM.to_owned(), self.final_norm.shallow_clone()),
        ];
        if !self.config.tie_word_embeddings {
            all.push((OUTPUT.to_owned(), self.output.shallow_clone()));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            for (name, tensor) in [
                ("input_layernorm", &layer.input_norm),
                ("post_attention_layernorm", &layer.post_attention_norm),
                ("self_attn.q_proj", &layer.q),
                ("self_attn.k_proj", &layer.k),
                ("self_attn.v_proj", &layer.v),
                ("self_attn.o_proj", &layer.o),
                ("mlp.gate_proj", &layer.gate),
                ("mlp.up_proj", &layer.up),
                ("mlp.down_proj", &layer.down),
            ] {
                all.push((layer_parameter(index as i64, name), tensor.shallow_clone()));
            }
        }
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Turns gradients on or off for every parameter.
    pub fn set_trainable(&self, trainable: bool) {
        for (_, tensor) in self.named_parameters() {
            drop(tensor.set_requires_grad(trainable));
        }
    }

    /// A copy with storage of its own: the frozen reference of a policy, or the weights as they were.
    pub fn duplicate(&self) -> Result<Self, ModelError> {
        let parameters = tch::no_grad(|| {
            self.named_parameters()
                .into_iter()
                .map(|(name, tensor)| (name, tensor.detach().copy()))
                .collect()
        });
        Self::from_parameters(self.config.clone(), parameters)
    }

    /// BLAKE3 over names, shapes and values; see [`weights::hash`].
    pub fn weights_hash(&self) -> Result<String, ModelError> {
        let parameters = self.named_parameters();
        weights::hash(parameters.iter().map(|(n, t)| (n.as_str(), t)))
    }

    /// Hidden states after the last norm: ids `[B, T]` (int64; rows filled up on the right with any valid id) to `[B, T, D]`.
    /// Attention is causal, so what follows a row's end never reaches it; what stands at filled-up positions means nothing.
    pub fn hidden(&self, ids: &Tensor) -> Result<Tensor, ModelError> {
        let (batch, time) = ids.size2()?;
        if time > self.config.max_position_embeddings {
            return Err(ModelError::Input(format!(
                "a sequence of {time} tokens is longer than max_position_embeddings ({})",
                self.config.max_position_embeddings
            )));
        }
        let config = &self.config;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let width = config.head_dim;
        let cos = self.rotary.cos.narrow(0, 0, time);
        let sin = self.rotary.sin.narrow(0, 0, time);
        let split = |x: Tensor, n: i64| x.view([batch, time, n, width]).transpose(1, 2);
        let mut x = Tensor::f_embedding(&self.embedding, ids, -1, false, false)?;
        for layer in &self.layers {
            let normed = self.norm(&x, &layer.input_norm);
            let q = rotate(&split(linear(&normed, &layer.q), heads), &cos, &sin);
            let k = rotate(&split(linear(&normed, &layer.k), kv_heads), &cos, &sin);
            let v = split(linear(&normed, &layer.v), kv_heads);
            let attended = Tensor::f_scaled_dot_product_attention(
                &q,
                &repeat_heads(&k, heads / kv_heads),
                &repeat_heads(&v, heads / kv_heads),
                None::<Tensor>,
                0.0,
                true,
                None,
                false,
            )?;
            let attended = attended
                .transpose(1, 2)
                .reshape([batch, time, heads * width]);
            x = &x + linear(&attended, &layer.o);
            let normed = self.norm(&x, &layer.post_attention_norm);
            let inner = linear(&normed, &layer.gate).silu() * linear(&normed, &layer.up);
            x = &x + linear(&inner, &layer.down);
        }
        Ok(self.norm(&x, &self.final_norm))
    }

    /// Logits of hidden states: `[…, D]` to `[…, V]`. Select the positions a loss needs first: the vocabulary is the widest layer.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, ModelError> {
        Ok(hidden.f_linear(&self.output, None::<Tensor>)?)
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        x.rms_norm(
            self.config.hidden_size,
            Some(weight),
            self.config.rms_norm_eps,
        )
    }
}

pub(crate) fn linear(x: &Tensor, weight: &Tensor) -> Tensor {
    x.linear(weight, None::<Tensor>)
}

/// Key or value heads `[B, KV, T, W]`, each repeated for the query heads that share it.
fn repeat_heads(x: &Tensor, times: i64) -> Tensor {
    if times == 1 {
        return x.shallow_clone();
    }
    let (b, kv, t, w) = x.size4().unwrap_or_default();
    x.unsqueeze(2)
        .expand([b, kv, times, t, w], false)
        .reshape([b, kv * times, t, w])
}

/// Tables of the rotary position embedding.
#[derive(Debug)]
pub(crate) struct Rotary {
    /// `[positions, head_dim]`.
    pub(crate) cos: Tensor,
    /// `[positions, head_dim]`, the first half negated: see [`rotate`].
    pub(crate) sin: Tensor,
}

impl Rotary {
    pub(crate) fn new(config: &LlamaConfig, positions: i64, device: Device) -> Self {
        let half = config.head_dim / 2;
        let f32s = (Kind::Float, Device::Cpu);
        // As transformers computes it: everything in f32.
        let exponents = Tensor::arange(half, f32s) * 2.0 / config.head_dim as f64;
        let frequencies =
            (Tensor::full([half], config.rope_theta, f32s).pow(&exponents)).reciprocal();
        let angles = Tensor::arange(positions, f32s).outer(&frequencies);
        let (cos, sin) = (angles.cos(), angles.sin());
        Self {
            cos: Tensor::cat(&[&cos, &cos], 1).to_device(device),
            sin: Tensor::cat(&[&-&sin, &sin], 1).to_device(device),
        }
    }
}

/// Rotates heads `[…, W]` by their positions: `x·cos + rotate_half(x)·sin`, where `rotate_half` gives (−second half, first half).
/// The sign is folded into the table, so that the two halves need only swap places.
pub(crate) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let width = x.size().last().copied().unwrap_or_default();
    x * cos + x.roll(width / 2, -1) * sin
}
