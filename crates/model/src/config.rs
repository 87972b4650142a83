//! `config.json` of a Llama-family checkpoint.

use camino::Utf8Path;
use serde_json::{Map, Value, json};

use crate::ModelError;

/// The shape of a Llama model. Field names are Hugging Face's.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Number of token ids.
    pub vocab_size: i64,
    /// Width of the residual stream (D).
    pub hidden_size: i64,
    /// Width of the feed-forward layer.
    pub intermediate_size: i64,
    /// Number of layers.
    pub num_hidden_layers: i64,
    /// Number of query heads (H).
    pub num_attention_heads: i64,
    /// Number of key and value heads; divides the number of query heads.
    pub num_key_value_heads: i64,
    /// Width of a head; `hidden_size / num_attention_heads` unless given.
    pub head_dim: i64,
    /// Longest sequence the model is meant for, in tokens.
    pub max_position_embeddings: i64,
    /// Base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// Added to the mean square in normalisation.
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of freshly drawn weights.
    pub initializer_range: f64,
    /// The token that starts a text, where there is one.
    pub bos_token_id: Option<i64>,
    /// Tokens that end a turn; the first one is the main one.
    pub eos_token_ids: Vec<i64>,
    /// The token that fills up short rows.
    pub pad_token_id: Option<i64>,
}

impl LlamaConfig {
    /// Reads `config.json`.
    pub fn load(path: &Utf8Path) -> Result<Self, ModelError> {
        let text = fs_err::read_to_string(path)?;
        let value = serde_json::from_str(&text).map_err(|source| ModelError::Json {
            path: path.to_owned(),
            source,
        })?;
        Self::from_json(&value)
    }

    /// Takes the fields out of the JSON of a `config.json`, and refuses what the forward pass does not compute.
    pub fn from_json(value: &Value) -> Result<Self, ModelError> {
        let map = value
            .as_object()
            .ok_or_else(|| field_error("(root)", "must be an object"))?;
        let fields = Fields(map);
        fields.must_be("model_type", &json!("llama"))?;
        fields.must_be("hidden_act", &json!("silu"))?;
        fields.must_be("attention_bias", &json!(false))?;
        fields.must_be("mlp_bias", &json!(false))?;
        let hidden_size = fields.positive("hidden_size")?;
        let num_attention_heads = fields.positive("num_attention_heads")?;
        let num_key_value_heads = fields.positive_or("num_key_value_heads", num_attention_heads)?;
        if num_attention_heads % num_key_value_heads != 0 {
            return Err(field_error(
                "num_key_value_heads",
                format!(
                    "{num_key_value_heads} does not divide num_attention_heads ({num_attention_heads})"
                ),
            ));
        }
        let head_dim = match map.get("head_dim") {
            None | Some(Value::Null) if hidden_size % num_attention_heads != 0 => {
                return Err(field_error(
                    "num_attention_heads",
                    format!(
                        "{num_attention_heads} does not divide hidden_size ({hidden_size}), and head_dim is not given"
                    ),
                ));
            }
            _ => fields.positive_or("head_dim", hidden_size / num_attention_heads)?,
        };
        if head_dim % 2 != 0 {
            return Err(field_error(
                "head_dim",
                format!("must be even for rotary embeddings, got {head_dim}"),
            ));
        }
        Ok(Self {
            vocab_size: fields.positive("vocab_size")?,
            hidden_size,
            intermediate_size: fields.positive("intermediate_size")?,
            num_hidden_layers: fields.positive("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            max_position_embeddings: fields.positive("max_position_embeddings")?,
            rope_theta: within("rope_theta", fields.rope_theta()?, 1.0, 1e12)?,
            rms_norm_eps: within(
                "rms_norm_eps",
                fields.number("rms_norm_eps")?.unwrap_or(1e-6),
                1e-30,
                1.0,
            )?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
            bos_token_id: fields.token("bos_token_id")?,
            eos_token_ids: fields.tokens("eos_token_id")?,
            pad_token_id: fields.token("pad_token_id")?,
        })
    }

    /// The JSON that `transformers` reads.
    pub fn to_json(&self) -> Value {
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "attention_bias": false,
            "mlp_bias": false,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
        })
    }

    /// The name and shape of every parameter, sorted by name.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let (d, f) = (self.hidden_size, self.intermediate_size);
        let q = self.num_attention_heads * self.head_dim;
        let kv = self.num_key_value_heads * self.head_dim;
        let mut shapes = vec![
            (EMBEDDING.to_owned(), vec![self.vocab_size, d]),
            (FINAL_NORM.to_owned(), vec![d]),
        ];
        if !self.tie_word_embeddings {
            shapes.push((OUTPUT.to_owned(), vec![self.vocab_size, d]));
        }
        for layer in 0..self.num_hidden_layers {
            let part = |name: &str, shape: Vec<i64>| (layer_parameter(layer, name), shape);
            shapes.extend([
                part("input_layernorm", vec![d]),
                part("post_attention_layernorm", vec![d]),
                part("self_attn.q_proj", vec![q, d]),
                part("self_attn.k_proj", vec![kv, d]),
                part("self_attn.v_proj", vec![kv, d]),
                part("self_attn.o_proj", vec![d, q]),
                part("mlp.gate_proj", vec![f, d]),
                part("mlp.up_proj", vec![f, d]),
                part("mlp.down_proj", vec![d, f]),
            ]);
        }
        shapes.sort();
        shapes
    }

    /// How many numbers the model has.
    pub fn parameter_count(&self) -> i64 {
        self.parameter_shapes()
            .iter()
            .map(|(_, shape)| shape.iter().product::<i64>())
            .sum()
    }
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const FINAL_NORM: &str = "model.norm.weight";
pub(crate) const OUTPUT: &str = "lm_head.weight";

/// Hugging Face's name of a layer's parameter.
pub(crate) fn layer_parameter(layer: i64, name: &str) -> String {
    format!("model.layers.{layer}.{name}.weight")
}

fn field_error(field: &str, message: impl Into<String>) -> ModelError {
    ModelError::Config {
        field: field.to_owned(),
        message: message.into(),
    }
}

fn within(field: &str, value: f64, least: f64, most: f64) -> Result<f64, ModelError> {
    // The comparison also refuses what is not a number.
    if (least..=most).contains(&value) {
        Ok(value)
    } else {
        Err(field_error(
            field,
            format!("must lie between {least:e} and {most:e}, got {value}"),
        ))
    }
}

struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn given(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    fn must_be(&self, field: &str, expected: &Value) -> Result<(), ModelError> {
        match self.given(field) {
            Some(value) if value != expected => Err(field_error(
                field,
                format!("only {expected} is supported, got {value}"),
            )),
            _ => Ok(()),
        }
    }

    fn positive(&self, field: &str) -> Result<i64, ModelError> {
        let value = self
            .given(field)
            .ok_or_else(|| field_error(field, "is missing; it must be a positive whole number"))?;
        value.as_i64().filter(|n| *n > 0).ok_or_else(|| {
            field_error(
                field,
                format!("must be a positive whole number, got {value}"),
            )
        })
    }

    fn positive_or(&self, field: &str, default: i64) -> Result<i64, ModelError> {
        match self.given(field) {
            None => Ok(default),
            Some(_) => self.positive(field),
        }
    }

    fn number(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.given(field)
            .map(|value| {
                value
                    .as_f64()
                    .ok_or_else(|| field_error(field, format!("must be a number, got {value}")))
            })
            .transpose()
    }

    fn flag(&self, field: &str) -> Result<Option<bool>, ModelError> {
        self.given(field)
            .map(|value| {
                value.as_bool().ok_or_else(|| {
                    field_error(field, format!("must be true or false, got {value}"))
                })
            })
            .transpose()
    }

    fn tokens(&self, field: &str) -> Result<Vec<i64>, ModelError> {
        let one = |value: &Value| {
            value
                .as_i64()
                .ok_or_else(|| field_error(field, format!("must be a token id, got {value}")))
        };
        match self.given(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(many)) => many.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    fn token(&self, field: &str) -> Result<Option<i64>, ModelError> {
        Ok(self.tokens(field)?.first().copied())
    }

    /// `rope_theta`, or its place since transformers 5: `rope_parameters.rope_theta`. Only unscaled rotary embeddings are computed.
    fn rope_theta(&self) -> Result<f64, ModelError> {
        for field in ["rope_scaling", "rope_parameters"] {
            let Some(value) = self.given(field) else {
                continue;
            };
            let kind = value
                .get("rope_type")
                .or_else(|| value.get("type"))
                .and_then(Value::as_str);
            if kind.is_some_and(|kind| kind != "default") {
                return Err(field_error(
                    field,
                    format!("only rope_type 'default' is supported, got {value}"),
                ));
            }
            if let Some(theta) = value.get("rope_theta").and_then(Value::as_f64) {
                return Ok(theta);
            }
        }
        Ok(self.number("rope_theta")?.unwrap_or(10_000.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minimal() -> Value {
        json!({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "eos_token_id": [3, 4],
        })
    }

    #[test]
    fn the_round_trip_keeps_everything() {
        let config = LlamaConfig::from_json(&minimal()).unwrap();
        assert_eq!(config.head_dim, 2);
        assert_eq!(config.eos_token_ids, [3, 4]);
        assert_eq!(LlamaConfig::from_json(&config.to_json()).unwrap(), config);
    }

    #[test]
    fn errors_name_the_field() {
        for (field, value) in [
            ("hidden_size", json!(null)),
            ("hidden_size", json!("wide")),
            ("num_key_value_heads", json!(3)),
            ("num_attention_heads", json!(0)),
            ("hidden_act", json!("gelu")),
            ("model_type", json!("mistral")),
            ("attention_bias", json!(true)),
            (
                "rope_scaling",
                json!({"rope_type": "llama3", "factor": 8.0}),
            ),
            ("eos_token_id", json!("<|end|>")),
            ("rms_norm_eps", json!("small")),
            ("tie_word_embeddings", json!(1)),
        ] {
            let mut config = minimal();
            config[field] = value.clone();
            let message = LlamaConfig::from_json(&config).unwrap_err().to_string();
            assert!(
                message.contains(&format!("'{field}'")),
                "{field} = {value}: {message}"
            );
        }
    }

    #[test]
    fn theta_is_found_where_transformers_5_puts_it() {
        let mut config = minimal();
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 500.0});
        assert!((LlamaConfig::from_json(&config).unwrap().rope_theta - 500.0).abs() < 1e-9);
    }
}
