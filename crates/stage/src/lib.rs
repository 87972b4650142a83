//! What all stages share: how a run is described, shown, recorded, and ended.
//!
//! - [`Pipeline`]: one TOML file under `pipelines/`, read in layers (defaults, file, `--set a.b=c`); an unknown key or a bad value is an
//!   error that names its path.
//! - [`StageRunner`]: runs a [`Stage`] unless a succeeded execution with the same fingerprint is on record, and records what it read and wrote.
//! - [`Ui`]: standard error is talk (progress bars, notes), standard output is data; nothing else prints. What a terminal would act on is
//!   escaped there.
//! - [`exit`]: the documented exit codes.
//!
//! It knows no stage: what a stage does lives in the crate of that stage, and the order of stages in the front door.

pub mod exit;
mod faults;
mod pipeline;
mod record;
mod ui;

pub use exit::Failure;
pub use faults::{FaultRate, FaultsConfig};
pub use pipeline::{
    CreditConfig, EvalConfig, ImportConfig, LimitsConfig, Method, Pipeline, PolicyConfig,
    PolicyKind, QaConfig, RewardScheme, RolloutConfig, SandboxSettings, TasksConfig, TrainConfig,
};
pub use record::{Outcome, Record, Stage, StageRunner, fingerprint, hash_files};
pub use ui::{Bar, Ui, visible, visible_line};
