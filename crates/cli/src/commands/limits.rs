//! `drillyard limits`: which sandbox limits hold on this host, and how.

use drillyard_stage::Failure;
use drillyard_stage::exit::OK;

use crate::context::Context;
use crate::stages::{sandbox_config, started};

/// Starts the sandbox backend as a rollout would and prints what it can enforce.
pub(crate) async fn run(context: &Context) -> Result<u8, Failure> {
    let pipeline = &context.pipeline;
    let required = &pipeline.sandbox.require_limits;
    started(sandbox_config(pipeline)?, required, |limits| {
        context
            .ui
            .text(&format!("{limits}\n"))
            .map_err(|e| Failure::io("standard output", &e))
    })
    .await?;
    Ok(OK)
}
