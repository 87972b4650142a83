//! Checkpoints on disk: folders in Hugging Face layout that are there whole or not at all.
//!
//! ```text
//! out/                     the trained checkpoint: config.json, model.safetensors, the tokenizer's and template's files, drillyard.json
//! out.partial/step-00000500/   a resumable state: the same files, and trainer/optimizer.safetensors, trainer/state.json
//! ```
//!
//! A folder is written under another name, every file and the folder flushed to disk, then renamed. `drillyard.json` says which
//! weights the checkpoint descends from, so that the provenance gate can tell a parent from a stranger.

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_schema::table::TrainMetricRow;
use serde::{Deserialize, Serialize};

use crate::advice::Validation;
use crate::error::TrainError;
use crate::network::Network;
use crate::optim::AdamW;

/// The file in which a checkpoint tells where it comes from.
pub const ORIGIN_FILE: &str = "drillyard.json";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const STATE_FILE: &str = "state.json";

/// Files of a checkpoint that training takes over unchanged.
const COMPANIONS: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
];

/// Where a checkpoint comes from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// Hash of its weights.
    pub revision: String,
    /// Revisions it was trained from, the nearest first.
    pub lineage: Vec<String>,
    /// How it was trained.
    pub method: String,
    /// Optimiser steps.
    pub steps: u64,
    /// Fingerprint of the configuration.
    pub fingerprint: String,
}

/// Reads a checkpoint's origin; one without the file has no known ancestors.
pub fn read_origin(dir: &Utf8Path) -> Result<Origin, TrainError> {
    let path = dir.join(ORIGIN_FILE);
    match fs_err::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| TrainError::Input {
            path,
            message: error.to_string(),
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Origin::default()),
        Err(error) => Err(error.into()),
    }
}

/// Everything besides weights and moments that a resumed run needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of this format.
    pub format: u32,
    /// Fingerprint of the configuration and of the data.
    pub fingerprint: String,
    /// Optimiser steps done: the position in the order of the data, which seed and epoch decide. No other random numbers are drawn.
    pub step: u64,
    /// Updates the optimiser made.
    pub optimizer_steps: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Seconds spent.
    pub seconds: f64,
    /// Curves so far.
    pub rows: Vec<TrainMetricRow>,
    /// Validation results so far.
    pub validations: Vec<(u64, Validation)>,
}

/// The version of [`State`] written and read.
pub const STATE_FORMAT: u32 = 1;

/// Writes and finds checkpoints of one run.
#[derive(Debug, Clone)]
pub struct Store {
    output: Utf8PathBuf,
    companions_from: Utf8PathBuf,
}

impl Store {
    /// Checkpoints go to `output`; tokenizer and template files are taken from `companions_from`.
    pub fn new(output: &Utf8Path, companions_from: &Utf8Path) -> Self {
        Self {
            output: output.to_owned(),
            companions_from: companions_from.to_owned(),
        }
    }

    fn partial(&self) -> Utf8PathBuf {
        Utf8PathBuf::from(format!("{}.partial", self.output))
    }

    /// Saves a state to resume from; earlier ones are removed after it is safe. Returns its folder.
    pub fn save_state(
        &self,
        network: &dyn Network,
        optimizer: &AdamW,
        state: &State,
    ) -> Result<Utf8PathBuf, TrainError> {
        let partial = self.partial();
        fs_err::create_dir_all(&partial)?;
        let target = partial.join(format!("step-{:08}", state.step));
        self.write_dir(&target, network, |dir| {
            let trainer = dir.join("trainer");
            fs_err::create_dir(&trainer)?;
            optimizer.save(&trainer.join(OPTIMIZER_FILE))?;
            write_json(&trainer.join(STATE_FILE), state)
        })?;
        for (step, dir) in self.states()? {
            if step != state.step {
                fs_err::remove_dir_all(&dir)?;
            }
        }
        Ok(target)
    }

    /// The latest state of a run with this fingerprint, loaded into network and optimiser.
    pub fn load_state(
        &self,
        network: &dyn Network,
        optimizer: &mut AdamW,
        fingerprint: &str,
    ) -> Result<Option<State>, TrainError> {
        let Some((_, dir)) = self.states()?.pop() else {
            return Ok(None);
        };
        let path = dir.join("trainer").join(STATE_FILE);
        let state: State =
            serde_json::from_str(&fs_err::read_to_string(&path)?).map_err(|error| {
                TrainError::Input {
                    path: path.clone(),
                    message: format!("{error}; remove {} to start afresh", self.partial()),
                }
            })?;
        if state.format != STATE_FORMAT || state.fingerprint != fingerprint {
            return Ok(None);
        }
        network.restore(&dir)?;
        optimizer.load(
            &dir.join("trainer").join(OPTIMIZER_FILE),
            state.optimizer_steps,
        )?;
        Ok(Some(state))
    }

    /// Writes the finished checkpoint, replacing an earlier one, and removes the resumable states.
    pub fn finish(&self, network: &dyn Network, origin: &Origin) -> Result<(), TrainError> {
        self.write_dir(&self.output, network, |dir| {
            write_json(&dir.join(ORIGIN_FILE), origin)
        })?;
        let partial = self.partial();
        if partial.exists() {
            fs_err::remove_dir_all(partial)?;
        }
        Ok(())
    }

    /// Complete states by step, ascending.
    fn states(&self) -> Result<Vec<(u64, Utf8PathBuf)>, TrainError> {
        let mut states = Vec::new();
        let partial = self.partial();
        if partial.exists() {
            for entry in partial.read_dir_utf8()? {
                let entry = entry?;
                if let Some(step) = entry
                    .file_name()
                    .strip_prefix("step-")
                    .and_then(|step| step.parse().ok())
                {
                    states.push((step, entry.into_path()));
                }
            }
        }
        states.sort();
        Ok(states)
    }

    fn write_dir(
        &self,
        target: &Utf8Path,
        network: &dyn Network,
        more: impl FnOnce(&Utf8Path) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let parent = match target.parent() {
            Some(parent) if !parent.as_str().is_empty() => parent,
            _ => Utf8Path::new("."),
        };
        fs_err::create_dir_all(parent)?;
        let name = target.file_name().unwrap_or("checkpoint");
        let temporary = parent.join(format!(".{name}.writing"));
        let replaced = parent.join(format!(".{name}.replaced"));
        for leftover in [&temporary, &replaced] {
            if leftover.exists() {
                fs_err::remove_dir_all(leftover)?;
            }
        }
        let written = (|| {
            fs_err::create_dir(&temporary)?;
            network.save(&temporary)?;
            drillyard_lake::crash_point("mid_checkpoint");
            for companion in COMPANIONS {
                let source = self.companions_from.join(companion);
                if source.exists() {
                    fs_err::copy(&source, temporary.join(companion))?;
                }
            }
            more(&temporary)?;
            sync_tree(&temporary)
        })();
        if let Err(error) = written {
            // What matters to the caller is why writing failed, not that the remains could not be removed as well.
            drop(fs_err::remove_dir_all(&temporary));
            return Err(error);
        }
        if target.exists() {
            fs_err::rename(target, &replaced)?;
        }
        fs_err::rename(&temporary, target)?;
        fs_err::File::open(parent)?.sync_all()?;
        if replaced.exists() {
            fs_err::remove_dir_all(&replaced)?;
        }
        Ok(())
    }
}

fn write_json(path: &Utf8Path, value: &impl Serialize) -> Result<(), TrainError> {
    fs_err::write(path, serde_json::to_vec_pretty(value)?)?;
    Ok(())
}

fn sync_tree(dir: &Utf8Path) -> Result<(), TrainError> {
    for entry in dir.read_dir_utf8()? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_tree(entry.path())?;
        } else {
            fs_err::File::open(entry.path())?.sync_all()?;
        }
    }
    fs_err::File::open(dir)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Hyper;
    use crate::network::tests::Bigram;
    use crate::optim::AdamWParams;

    fn folder() -> (tempfile::TempDir, Utf8PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
        (dir, path)
    }

    fn state(step: u64) -> State {
        State {
            format: STATE_FORMAT,
            fingerprint: "f".into(),
            step,
            optimizer_steps: step,
            tokens: 0,
            seconds: 0.0,
            rows: vec![],
            validations: vec![],
        }
    }

    #[test]
    fn the_latest_state_is_found_and_the_output_replaces_it() {
        let (_guard, root) = folder();
        let init = root.join("init");
        fs_err::create_dir(&init).unwrap();
        fs_err::write(init.join("tokenizer.json"), "{}").unwrap();
        let store = Store::new(&root.join("out"), &init);
        let network = Bigram::new(5, 3, 1);
        let params = AdamWParams::from(&Hyper::default());
        let mut optimizer = AdamW::new(network.parameters(), params);
        store.save_state(&network, &optimizer, &state(5)).unwrap();
        store.save_state(&network, &optimizer, &state(10)).unwrap();

        let other = Bigram::new(5, 3, 2);
        let loaded = store.load_state(&other, &mut optimizer, "f").unwrap();
        assert_eq!(loaded, Some(state(10)));
        assert_eq!(other.embedding, network.embedding);
        assert_eq!(store.load_state(&other, &mut optimizer, "g").unwrap(), None);

        let origin = Origin {
            revision: "r".into(),
            lineage: vec!["p".into()],
            ..Origin::default()
        };
        store.finish(&network, &origin).unwrap();
        store.finish(&network, &origin).unwrap();
        assert_eq!(read_origin(&root.join("out")).unwrap(), origin);
        assert!(root.join("out/tokenizer.json").exists());
        let names: Vec<String> = root
            .read_dir_utf8()
            .unwrap()
            .map(|e| e.unwrap().file_name().to_owned())
            .collect();
        assert_eq!(names.len(), 2, "only init and out remain: {names:?}");
    }

    #[test]
    fn a_failed_write_leaves_the_old_checkpoint_and_no_remains() {
        let (_guard, root) = folder();
        let store = Store::new(&root.join("out"), &root);
        let network = Bigram::new(5, 3, 1);
        store.finish(&network, &Origin::default()).unwrap();
        let failed = store.write_dir(&root.join("out"), &network, |_| {
            Err(TrainError::NoData("on purpose".into()))
        });
        assert!(failed.is_err());
        assert!(root.join("out/model.safetensors").exists());
        assert_eq!(root.read_dir_utf8().unwrap().count(), 1);
    }
}
