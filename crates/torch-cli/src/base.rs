//! `drillyard-torch tokenizer` and `init`: the embedded base model before its first training step, with a circuit for copying.

use std::io::BufRead;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_model::{Llama, LlamaConfig};
use drillyard_render::{BaseTokenizerOptions, ChatTemplate, Tokenizer, build_base_tokenizer};
use drillyard_schema::ToolSpec;
use drillyard_stage::{Failure, Ui, exit};
use drillyard_trainer::Conversation;
use serde_json::json;

/// What the names of the wrangle tasks are made of.
const CONSONANTS: &str = "bcdfghjklmnprstvwz";
const VOWELS: &str = "aeiou";

#[derive(clap::Args)]
pub(crate) struct TokenizerArgs {
    /// Conversations to learn the vocabulary from: JSON lines of `{"messages": […], "tools": […]}`.
    #[arg(long)]
    texts: Utf8PathBuf,
    /// The tools of conversations that name none: a JSON file with a list of name, description and parameters.
    #[arg(long)]
    tools: Option<Utf8PathBuf>,
    /// The checkpoint folder to write tokenizer.json, tokenizer_config.json and chat_template.jinja to.
    #[arg(long)]
    out: Utf8PathBuf,
    /// How large the vocabulary may become.
    #[arg(long, default_value_t = 640)]
    vocab_size: usize,
    /// A piece is merged only if this share of the conversations has it, which keeps random names out.
    #[arg(long, default_value_t = 0.02)]
    min_share: f64,
    /// The longest sequence the model is meant for.
    #[arg(long, default_value_t = 1024)]
    max_len: usize,
}

#[derive(clap::Args)]
pub(crate) struct InitArgs {
    /// The checkpoint folder that holds the tokenizer; config.json and model.safetensors are written to it.
    #[arg(long)]
    out: Utf8PathBuf,
    /// Decides the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 128)]
    hidden_size: i64,
    /// Width of the feed-forward layer.
    #[arg(long, default_value_t = 384)]
    intermediate_size: i64,
    /// Number of layers.
    #[arg(long, default_value_t = 4)]
    layers: i64,
    /// Number of query heads.
    #[arg(long, default_value_t = 4)]
    heads: i64,
    /// Number of key and value heads.
    #[arg(long, default_value_t = 2)]
    kv_heads: i64,
    /// The longest sequence the model is meant for.
    #[arg(long, default_value_t = 1024)]
    max_len: i64,
}

pub(crate) fn tokenizer(args: &TokenizerArgs, ui: &Ui) -> Result<(), Failure> {
    let default_tools: Vec<ToolSpec> = match &args.tools {
        Some(path) => read_json(path)?,
        None => Vec::new(),
    };
    let render = |error: drillyard_render::RenderError| Failure::from_error(exit::INPUT, &error);
    let template = ChatTemplate::base().map_err(render)?;
    let file = fs_err::File::open(&args.texts).map_err(|e| Failure::io(&args.texts, &e))?;
    let mut texts = Vec::new();
    for (number, line) in std::io::BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|error| Failure::io(&args.texts, &error))?;
        if line.trim().is_empty() {
            continue;
        }
        let conversation: Conversation = serde_json::from_str(&line).map_err(|error| {
            Failure::new(
                exit::INPUT,
                format!("{} line {}: {error}", args.texts, number + 1),
            )
        })?;
        let tools = conversation.tools.as_deref().unwrap_or(&default_tools);
        texts.push(
            template
                .render(&conversation.messages, tools, false)
                .map_err(render)?,
        );
    }
    let syllables: Vec<String> = CONSONANTS
        .chars()
        .flat_map(|consonant| {
            VOWELS
                .chars()
                .map(move |vowel| format!("{consonant}{vowel}"))
        })
        .collect();
    let built = build_base_tokenizer(&BaseTokenizerOptions {
        syllables: &syllables,
        texts: &texts,
        vocab_size: args.vocab_size,
        min_share: args.min_share,
        max_len: args.max_len,
    })
    .map_err(render)?;
    built.write(&args.out).map_err(render)?;
    let tokenizer = built.load().map_err(render)?;
    let tokens: usize = texts
        .iter()
        .map(|text| tokenizer.encode(text).map(|ids| ids.len()))
        .sum::<Result<usize, _>>()
        .map_err(render)?;
    crate::print_json(
        ui,
        &json!({
            "out": args.out,
            "vocab_size": tokenizer.vocab_size(),
            "tokenizer_hash": tokenizer.hash(),
            "conversations": texts.len(),
            "mean_tokens": tokens as f64 / texts.len().max(1) as f64,
        }),
    )
}

pub(crate) fn init(args: &InitArgs, ui: &Ui) -> Result<(), Failure> {
    let render = |error: drillyard_render::RenderError| Failure::from_error(exit::INPUT, &error);
    let model = |error: drillyard_model::ModelError| Failure::from_error(exit::INPUT, &error);
    let tokenizer = Tokenizer::load(&args.out).map_err(render)?;
    let template = ChatTemplate::load(&args.out).map_err(render)?;
    let eos = template.eos_token().and_then(|eos| tokenizer.id(eos));
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": tokenizer.vocab_size(),
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden_size / args.heads.max(1),
        "max_position_embeddings": args.max_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true,
        "initializer_range": 0.02,
        "eos_token_id": eos,
        "pad_token_id": 0,
    });
    let config = LlamaConfig::from_json(&config).map_err(model)?;
    let network = Llama::init_copying(config, args.seed, tch::Device::Cpu).map_err(model)?;
    network.save(&args.out).map_err(model)?;
    crate::print_json(
        ui,
        &json!({
            "out": args.out,
            "parameters": network.config().parameter_count(),
            "weights_hash": network.weights_hash().map_err(model)?,
        }),
    )
}

/// Reads a JSON file.
fn read_json<T: serde::de::DeserializeOwned>(path: &Utf8Path) -> Result<T, Failure> {
    let text = fs_err::read_to_string(path).map_err(|error| Failure::io(path, &error))?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::new(exit::INPUT, format!("{path}: {error}")))
}
