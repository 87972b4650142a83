//! `drillyard image`: root file systems for sandboxes, kept by content under the yard.

use std::fmt::Write as _;

use camino::Utf8Path;
use drillyard_sandbox::{Recipe, SandboxError, StoredImage};
use drillyard_stage::exit::{ENVIRONMENT, INPUT, OK};
use drillyard_stage::{Failure, Ui};

use crate::args::ImageCommand;
use crate::context::Context;
use crate::stages::{image_store, sandbox_config, sandbox_failure, sandboxes};

/// Lists, brings in, builds, checks or removes images.
pub(crate) async fn run(context: &Context, command: &ImageCommand) -> Result<u8, Failure> {
    let store = image_store(&context.pipeline)?;
    let ui = &context.ui;
    let text = match command {
        ImageCommand::List => list(
            &store.list().map_err(failure)?,
            &store.broken().map_err(failure)?,
        ),
        ImageCommand::Import { path, name } => {
            ui.note(format!("{:>10} {path}", "image"));
            let (path, name) = (path.clone(), name.clone());
            let image = blocking(move || store.import(&path, name.as_deref())).await?;
            told("imported", &image)
        }
        ImageCommand::Build { recipe } => {
            let recipe = read_recipe(recipe)?;
            let required = &context.pipeline.sandbox.require_limits;
            if !required.is_empty() {
                drop(sandboxes(context).await?);
            }
            let mut said = progress(ui);
            let image = store
                .build(&recipe, &sandbox_config(&context.pipeline)?, &mut said)
                .await
                .map_err(failure)?;
            told("built", &image)
        }
        ImageCommand::Verify { image } => {
            let found = store.find(image).map_err(failure)?;
            let digest = found.digest.clone();
            blocking(move || store.verify(&digest)).await?;
            told("unchanged", &found)
        }
        ImageCommand::Remove { image } => {
            let digest = store.digest_of(image).map_err(failure)?;
            // One that can't be read has no name.
            let name = store.find(&digest).map(|i| format!("{} ", i.name));
            let removed = digest.clone();
            blocking(move || store.remove(&removed)).await?;
            format!("removed {}({digest})\n", name.unwrap_or_default())
        }
    };
    ui.text(&text)
        .map_err(|e| Failure::io("standard output", &e))?;
    Ok(OK)
}

fn read_recipe(path: &Utf8Path) -> Result<Recipe, Failure> {
    let text = fs_err::read_to_string(path).map_err(|e| Failure::io(path, &e))?;
    Recipe::parse(&text).map_err(|e| Failure::new(INPUT, format!("{path}: {e}")))
}

fn progress(ui: &Ui) -> impl FnMut(&str) + Send {
    let ui = ui.clone();
    move |step| ui.note(format!("{:>10} {step}", "image"))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SandboxError> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Failure::new(ENVIRONMENT, e))?
        .map_err(failure)
}

#[expect(clippy::needless_pass_by_value, reason = "what map_err hands over")]
fn failure(error: SandboxError) -> Failure {
    sandbox_failure(&error)
}

fn told(what: &str, image: &StoredImage) -> String {
    format!(
        "{what} {} from {}: {} files, {} MiB{}\n{}\nuse it with sandbox.image = \"{}\"\n",
        image.name,
        image.source,
        image.entries,
        image.bytes >> 20,
        if image.left_out > 0 {
            format!(", {} devices, pipes and sockets left out", image.left_out)
        } else {
            String::new()
        },
        image.digest,
        image.digest.chars().take(12).collect::<String>()
    )
}

fn list(images: &[StoredImage], broken: &[(String, SandboxError)]) -> String {
    if images.is_empty() && broken.is_empty() {
        return "no images; bring one in with `drillyard image import PATH`, or build one from a recipe\n"
            .to_owned();
    }
    let mut text = String::new();
    for image in images {
        let _ = writeln!(
            text,
            "{}  {:>6} MiB  {:<14}  {}  {}",
            image.digest.chars().take(12).collect::<String>(),
            image.bytes >> 20,
            image.source,
            image.name,
            image.system
        );
    }
    for (digest, error) in broken {
        let short: String = digest.chars().take(12).collect();
        let _ = writeln!(
            text,
            "{short}  cannot be read: {error}; drop it with `drillyard image remove {short}`"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use drillyard_stage::exit::{OUTPUT, REFUSED, USAGE};
    use std::io::{Error, ErrorKind};

    #[test]
    fn each_kind_of_error_has_the_code_the_readme_gives_it() {
        let text = || String::from("x");
        let image = SandboxError::Image {
            subject: text(),
            message: text(),
        };
        let setup = SandboxError::Setup {
            command: text(),
            outcome: "error",
            said: text(),
        };
        let config = SandboxError::Config {
            field: "cpus",
            message: text(),
        };
        let unable = SandboxError::Unable {
            step: text(),
            message: text(),
            remedy: text(),
        };
        for (error, code) in [
            (image, INPUT),
            (setup, INPUT),
            (config, USAGE),
            (SandboxError::LimitsDoNotHold { limits: text() }, REFUSED),
            (Error::from(ErrorKind::StorageFull).into(), OUTPUT),
            (Error::from(ErrorKind::QuotaExceeded).into(), OUTPUT),
            (Error::from(ErrorKind::PermissionDenied).into(), OUTPUT),
            (Error::from(ErrorKind::ReadOnlyFilesystem).into(), OUTPUT),
            (Error::from(ErrorKind::NotFound).into(), ENVIRONMENT),
            (SandboxError::Tool { message: text() }, ENVIRONMENT),
            (SandboxError::NoHelper { looked: text() }, ENVIRONMENT),
            (SandboxError::NoEngine { tried: text() }, ENVIRONMENT),
            (unable, ENVIRONMENT),
        ] {
            let said = error.to_string();
            assert_eq!(failure(error).code, code, "{said}");
        }
    }
}
