//! `drillyard-torch info`.

use camino::Utf8PathBuf;
use drillyard_model::Llama;
use drillyard_render::{ChatTemplate, Tokenizer};
use drillyard_stage::{Failure, Ui, exit};
use drillyard_trainer::checkpoint::read_origin;
use serde_json::json;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checkpoint's folder.
    dir: Utf8PathBuf,
}

pub(crate) fn run(args: &Args, ui: &Ui) -> Result<(), Failure> {
    let model = |error: drillyard_model::ModelError| Failure::from_error(exit::INPUT, &error);
    let render = |error: drillyard_render::RenderError| Failure::from_error(exit::INPUT, &error);
    let network = Llama::load(&args.dir, tch::Device::Cpu).map_err(model)?;
    let tokenizer = Tokenizer::load(&args.dir).map_err(render)?;
    let template = ChatTemplate::load(&args.dir).map_err(render)?;
    let origin =
        read_origin(&args.dir).map_err(|error| Failure::from_error(exit::INPUT, &error))?;
    crate::print_json(
        ui,
        &json!({
            "dir": args.dir,
            "parameters": network.config().parameter_count(),
            "weights_hash": network.weights_hash().map_err(model)?,
            "tokenizer_hash": tokenizer.hash(),
            "template_hash": template.hash(),
            "vocab_size": tokenizer.vocab_size(),
            "config": network.config().to_json(),
            "origin": origin,
        }),
    )
}
