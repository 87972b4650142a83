//! An OpenAI-compatible server for a checkpoint.
//!
//! One [`Engine`] thread owns the model. It batches continuously: whoever asks joins at the next step, new prompts are computed
//! together, and every conversation under way gets one token a step. A conversation's keys and values stay in their slot after a
//! turn, so that its next turn computes only what is new; a beginning that another slot already holds (the same system prompt, the
//! same task) is copied.
//!
//! [`Server`] speaks HTTP: `POST /v1/chat/completions` (also streaming), `GET /v1/models`, `GET /health`, `GET /metrics.json`. Beyond
//! the OpenAI API it takes and gives token ids, so that what is trained on is exactly what was sampled: [`api`] has the fields.
//!
//! Log-probabilities are those of the distribution that was sampled from, `softmax(logits / temperature)` (at temperature 0, where
//! the likeliest token is taken, of `softmax(logits)`). `top_p` cuts the tail when sampling; log-probabilities are those before the cut.
//!
//! The same seed repeats a request run alone; in company, batching changes low bits of logits.

pub mod api;
mod chat;
pub mod engine;
pub mod error;
pub mod metrics;
mod sample;
pub mod server;
mod slots;
mod stream;

pub use engine::{Engine, EngineOptions, Finish, GenerateRequest, Generated};
pub use error::ServeError;
pub use server::{Listening, ServeOptions, Server, run, stdin_closed};
