//! The stages, each thin: it names what decides its result, calls the crate that does the work, and reports figures.

mod branch;
mod credit;
mod drill;
mod eval;
mod faults;
mod qa;
mod replayed;
mod rollout;
mod train;

pub(crate) use branch::{BranchStage, as_recorded, clocks};
pub(crate) use credit::CreditStage;
pub(crate) use drill::{
    PolicySpec, Served, agent_failure, image_store, model_dir, named_task_set, revision_of,
    sandbox_config, sandbox_failure, sandboxes, started, tasks, toolset,
};
pub(crate) use eval::EvalStage;
pub(crate) use qa::{QaStage, query_failure};
pub(crate) use replayed::{as_json, as_text};
pub(crate) use rollout::RolloutStage;
pub(crate) use train::TrainStage;
