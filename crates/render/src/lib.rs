//! Text, tokens and tool calls: the one place that turns a conversation into the ids a model reads, and the ids a model wrote into
//! calls. The agent, the server and the trainer all go through here, so what is trained on is what was sampled.
//!
//! - [`tokenizer`]: a Hugging Face `tokenizer.json`.
//! - [`template`]: a Hugging Face chat template, in the Jinja dialect those are written in.
//! - [`conversation`]: messages to ids: a whole prompt, what follows ids already in use, or a conversation with the assistant's own
//!   tokens marked.
//! - [`parse`]: a model's turn to calls, tolerant, saying what it repaired.
//! - [`layout`]: which generated tokens are call syntax, which are the model's choice, which are plain text.
//! - [`base`]: the tokenizer and the template of the embedded base model.
//!
//! Text that comes from outside (tool results, users) never turns into control tokens: see [`conversation`].

pub mod base;
pub mod conversation;
pub mod error;
mod json;
pub mod layout;
pub mod parse;
pub mod template;
pub mod tokenizer;

pub use base::{BaseTokenizer, BaseTokenizerOptions, build_base_tokenizer};
pub use conversation::{Masked, continuation_ids, masked, render_ids};
pub use error::RenderError;
pub use layout::spans;
pub use parse::{PARSER_VERSION, ParsedTurn, parse_turn};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
