//! The tokenizer and chat template of the embedded base model.
//!
//! The vocabulary is small and made for one purpose: a model that copies names it has never seen. Every name of two syllables is
//! exactly two tokens wherever it stands, every digit is a token of its own, and only words and runs of punctuation that many
//! conversations share are merged further. A word keeps the space or the underscore behind it, so the token before a name says what
//! the name is for (`of `, `raw_`): a head that looks up what followed the same token earlier can copy it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use camino::Utf8Path;
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::template::{TEMPLATE_FILE, TOKENIZER_CONFIG_FILE};
use crate::tokenizer::{TOKENIZER_FILE, byte_char};
use crate::{ChatTemplate, RenderError, Tokenizer};

/// The source of the base model's chat template.
pub const BASE_TEMPLATE: &str = include_str!("base.jinja");
/// The token that fills up short rows; its id is 0.
pub const PAD: &str = "<|pad|>";
/// The token that ends every message.
pub const END: &str = "<|end|>";
/// Control tokens in order of their ids, from 0.
const CONTROL: [&str; 6] = [
    PAD,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    END,
];
/// Tokens of their own that decoded text shows.
const TAGS: [&str; 2] = ["<tool_call>", "</tool_call>"];
/// Pieces that are merged within, never across.
const PIECES: &str = r"[A-Za-z]+[ _]?|[0-9]|\s|[^A-Za-z0-9\s]+ ?";

/// What the tokenizer is built from.
#[derive(Debug, Clone)]
pub struct BaseTokenizerOptions<'a> {
    /// The syllables names are made of: one consonant and one vowel each.
    pub syllables: &'a [String],
    /// Rendered conversations, see [`ChatTemplate::base`].
    pub texts: &'a [String],
    /// How large the vocabulary may become.
    pub vocab_size: usize,
    /// A piece is merged only if this share of the texts has it (and at least two do): random names stay below.
    pub min_share: f64,
    /// The longest sequence the model is meant for, noted in `tokenizer_config.json`.
    pub max_len: usize,
}

/// The files of a tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseTokenizer {
    /// Content of `tokenizer.json`.
    pub tokenizer: String,
    /// Content of `tokenizer_config.json`.
    pub tokenizer_config: String,
    /// Content of `chat_template.jinja`.
    pub chat_template: String,
}

impl BaseTokenizer {
    /// Writes the three files into a checkpoint folder (made if absent).
    pub fn write(&self, dir: &Utf8Path) -> Result<(), RenderError> {
        fs_err::create_dir_all(dir)?;
        fs_err::write(dir.join(TOKENIZER_FILE), &self.tokenizer)?;
        fs_err::write(dir.join(TOKENIZER_CONFIG_FILE), &self.tokenizer_config)?;
        fs_err::write(dir.join(TEMPLATE_FILE), &self.chat_template)?;
        Ok(())
    }

    /// The tokenizer itself.
    pub fn load(&self) -> Result<Tokenizer, RenderError> {
        Tokenizer::from_bytes(self.tokenizer.as_bytes())
    }
}

impl ChatTemplate {
    /// The base model's template: it needs no tokenizer, so conversations can be rendered to build one.
    pub fn base() -> Result<Self, RenderError> {
        Self::new(BASE_TEMPLATE, &base_config(0))
    }
}

fn base_config(max_len: usize) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": false,
    })
}

/// Builds the base model's tokenizer: bytes, then the syllables, then merges learnt from what the texts share.
pub fn build_base_tokenizer(
    options: &BaseTokenizerOptions<'_>,
) -> Result<BaseTokenizer, RenderError> {
    let mut tokens: Vec<String> = CONTROL
        .iter()
        .chain(&TAGS)
        .map(|t| (*t).to_owned())
        .collect();
    tokens.extend((0..=255).map(|byte| byte_char(byte).to_string()));
    let mut merges: Vec<(String, String)> = Vec::new();
    let mut syllables = BTreeSet::new();
    for syllable in options.syllables {
        let mut letters = syllable.chars();
        match (letters.next(), letters.next(), letters.next()) {
            (Some(c), Some(v), None)
                if c.is_ascii_lowercase() && v.is_ascii_lowercase() && c != v =>
            {
                syllables.insert(syllable.clone());
                merges.push((c.to_string(), v.to_string()));
                tokens.push(syllable.clone());
            }
            _ => {
                return Err(RenderError::Tokenizer(format!(
                    "'{syllable}' is not a syllable of two different lower-case letters"
                )));
            }
        }
    }
    if tokens.len() > options.vocab_size {
        return Err(RenderError::Tokenizer(format!(
            "a vocabulary of {} is too small: bytes, control tokens and syllables are {}",
            options.vocab_size,
            tokens.len()
        )));
    }
    let mut words: Vec<(Vec<String>, usize)> = shared_pieces(options)?
        .into_iter()
        .map(|(piece, count)| (symbols(&piece, &syllables), count))
        .collect();
    let mut known: BTreeSet<String> = tokens.iter().cloned().collect();
    while tokens.len() < options.vocab_size {
        let mut pairs: HashMap<(&str, &str), usize> = HashMap::new();
        for (word, count) in &words {
            for pair in word.windows(2) {
                *pairs.entry((&pair[0], &pair[1])).or_default() += count;
            }
        }
        // Two syllables never become one token: they could be a name. Nor do a syllable and what ends a word: it could end a name.
        let ends = [byte_char(b' ').to_string(), byte_char(b'_').to_string()];
        let best = pairs
            .into_iter()
            .filter(|((a, b), _)| {
                !(syllables.contains(*a)
                    && (syllables.contains(*b) || ends.iter().any(|end| end == b)))
            })
            .max_by(|(a, m), (b, n)| m.cmp(n).then_with(|| b.cmp(a)));
        let Some(((a, b), _)) = best else {
            break;
        };
        let (a, b) = (a.to_owned(), b.to_owned());
        let merged = format!("{a}{b}");
        for (word, _) in &mut words {
            merge(word, &a, &b, &merged);
        }
        merges.push((a, b));
        if known.insert(merged.clone()) {
            tokens.push(merged);
        }
    }
    let vocab: Map<String, Value> = tokens
        .iter()
        .cloned()
        .zip((0..).map(|id: usize| json!(id)))
        .collect();
    let added: Vec<Value> = CONTROL
        .iter()
        .map(|token| (token, true))
        .chain(TAGS.iter().map(|token| (token, false)))
        .enumerate()
        .map(|(id, (content, special))| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            })
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": false},
            byte_level,
        ]},
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab,
            "merges": merges.iter().map(|(a, b)| json!([a, b])).collect::<Vec<_>>(),
        },
    });
    let files = BaseTokenizer {
        tokenizer: format!("{tokenizer:#}\n"),
        tokenizer_config: format!("{:#}\n", base_config(options.max_len)),
        chat_template: BASE_TEMPLATE.to_owned(),
    };
    let built = files.load()?;
    for a in &syllables {
        for b in &syllables {
            let name = format!("{a}{b}");
            let count = built.encode(&name)?.len();
            if count != 2 {
                return Err(RenderError::Tokenizer(format!(
                    "the name '{name}' is {count} tokens, not 2"
                )));
            }
        }
    }
    Ok(files)
}

/// The pieces that enough texts share, and how often each occurs.
fn shared_pieces(
    options: &BaseTokenizerOptions<'_>,
) -> Result<BTreeMap<String, usize>, RenderError> {
    let cut = Regex::new(PIECES).map_err(|error| RenderError::Tokenizer(error.to_string()))?;
    let mut pieces: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for text in options.texts {
        let mut seen = BTreeSet::new();
        for stretch in without_control(text) {
            for piece in cut.find_iter(stretch).map(|found| found.as_str()) {
                let entry = pieces.entry(piece.to_owned()).or_default();
                entry.0 += 1;
                entry.1 += usize::from(seen.insert(piece));
            }
        }
    }
    let needed = (options.min_share * options.texts.len() as f64).max(2.0);
    pieces.retain(|_, (_, texts)| *texts as f64 >= needed);
    Ok(pieces
        .into_iter()
        .map(|(piece, (count, _))| (piece, count))
        .collect())
}

/// The stretches of a text between control tokens and tags.
fn without_control(text: &str) -> Vec<&str> {
    let mut stretches = vec![text];
    for token in CONTROL.iter().chain(&TAGS) {
        stretches = stretches.into_iter().flat_map(|s| s.split(token)).collect();
    }
    stretches
}

/// A piece as byte characters, its syllables joined.
fn symbols(piece: &str, syllables: &BTreeSet<String>) -> Vec<String> {
    let mut symbols: Vec<String> = Vec::new();
    for byte in piece.bytes() {
        let symbol = byte_char(byte).to_string();
        if let Some(last) = symbols.last_mut()
            && syllables.contains(&format!("{last}{symbol}"))
        {
            last.push_str(&symbol);
        } else {
            symbols.push(symbol);
        }
    }
    symbols
}

fn merge(word: &mut Vec<String>, a: &str, b: &str, merged: &str) {
    let mut at = 0;
    while at + 1 < word.len() {
        if word[at] == a && word[at + 1] == b {
            merged.clone_into(&mut word[at]);
            word.remove(at + 1);
        }
        at += 1;
    }
}
