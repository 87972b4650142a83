//! Training: from episodes in the lake to a better checkpoint.
//!
//! The way of the data: rows become [`Sequence`]s (token ids with the model's own stretches marked, [`assemble`] and [`load`]),
//! sequences are packed into [`batch`]es by a budget of tokens, a [`Network`] gives log-probabilities at own tokens, pure functions
//! in [`losses`] turn them into a number to minimise, and [`train::fit`] runs optimiser steps, records curves, saves resumable
//! states and measures on validation tasks.
//!
//! Two methods: imitation (all, successes only, or one tier), and offline GRPO on stored token ids and behaviour
//! log-probabilities, which has to pass the provenance [`gate`] first. [`run`] puts it all together for one configuration.
//!
//! What it does not do: generate text (that is the server's), compose rewards or advantages (that is credit's), decide which
//! checkpoint is served (that is the release's).

pub mod advice;
pub mod assemble;
pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod error;
pub mod gate;
pub mod load;
pub mod losses;
pub mod metrics;
pub mod network;
pub mod optim;
pub mod run;
pub mod sequence;
pub mod train;

pub use advice::{Advice, Validation};
pub use assemble::Conversation;
pub use config::{Hyper, LakeSource, Method, Schedule, Select, TrainConfig};
pub use error::TrainError;
pub use gate::{GateConfig, GateReport};
pub use network::Network;
pub use run::{Ending, Figures, run};
pub use sequence::{Sequence, Turn};
pub use train::{Dataset, Hooks, NoHooks, Outcome, StepReport, fit};
