//! `drillyard limits`: which sandbox limits hold on this host, and how.

use drillyard_sandbox::Pool;
use drillyard_stage::Failure;
use drillyard_stage::exit::{ENVIRONMENT, OK};

use crate::context::Context;
use crate::stages::sandbox_config;

/// Starts the sandbox backend as a rollout would and prints what it can enforce.
pub(crate) async fn run(context: &Context) -> Result<u8, Failure> {
    let pool = Pool::start(sandbox_config(&context.pipeline)?)
        .await
        .map_err(|e| Failure::from_error(ENVIRONMENT, &e))?;
    context
        .ui
        .data(&format!("{}\n", pool.limits()))
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}
