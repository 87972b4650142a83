//! The stages, each thin: it names what decides its result, calls the crate that does the work, and reports figures.

mod credit;
mod drill;
mod eval;
mod faults;
mod qa;
mod rollout;
mod train;

pub(crate) use credit::CreditStage;
pub(crate) use drill::{
    Drill, PolicySpec, Served, agent_failure, deciding, image_store, model_dir, named_task_set,
    require, revision_of, sandbox_config, sandbox_failure, tasks, toolset,
};
pub(crate) use eval::EvalStage;
pub(crate) use faults::decides;
pub(crate) use qa::{QaStage, query_failure};
pub(crate) use rollout::RolloutStage;
pub(crate) use train::TrainStage;
