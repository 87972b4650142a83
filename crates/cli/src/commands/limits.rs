//! `drillyard limits`: which sandbox limits hold on this host, and how.

use drillyard_sandbox::Pool;
use drillyard_stage::Failure;
use drillyard_stage::exit::OK;

use crate::context::Context;
use crate::stages::{require, sandbox_config, sandbox_failure};

/// Starts the sandbox backend as a rollout would and prints what it can enforce.
pub(crate) async fn run(context: &Context) -> Result<u8, Failure> {
    let pool = Pool::start(sandbox_config(&context.pipeline)?)
        .await
        .map_err(|e| sandbox_failure(&e))?;
    context
        .ui
        .data(&format!("{}\n", pool.limits()))
        .map_err(|e| Failure::io("standard output", &e))?;
    require(&context.pipeline, pool.limits())?;
    Ok(OK)
}
