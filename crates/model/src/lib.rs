//! The Llama family: configuration and weights in Hugging Face layout, the forward pass for training, and the same forward pass
//! with a key-value cache for serving.
//!
//! - [`config`]: `config.json`, read field by field, so that a checkpoint this crate cannot run says which field stands in the way.
//! - [`weights`]: `model.safetensors` read, written atomically, and hashed. Parameters carry Hugging Face's names.
//! - [`llama`]: the parameters of one model and its training forward pass: ids `[B, T]` to hidden states `[B, T, D]`, to logits only
//!   where they are asked for.
//! - [`decoder`]: a copy of the weights fused for speed, with a preallocated cache of fixed slots: prefill several rows of different
//!   length, then decode all of them one token at a time.
//!
//! Both passes compute what `transformers`' `LlamaForCausalLM` computes, in f32: the tests hold golden logits of that library.
//! This crate knows nothing of text, sampling, requests or losses.

pub mod config;
pub mod decoder;
pub mod error;
pub mod init;
mod llama;
pub mod weights;

pub use config::LlamaConfig;
pub use decoder::{DecodeRow, Decoder, PrefillRow};
pub use error::ModelError;
pub use llama::Llama;
