//! The champion's record on disk.

use std::io::Write;

use camino::{Utf8Path, Utf8PathBuf};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why the registry could not be read or written.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// Reading or writing failed.
    #[error("{path}")]
    Io {
        /// The file.
        path: Utf8PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The record is not what this version writes.
    #[error("{path}: {message}; move the file away to start without a champion")]
    Broken {
        /// The file.
        path: Utf8PathBuf,
        /// What is wrong.
        message: String,
    },
}

/// The champion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Champion {
    /// Its checkpoint folder.
    pub path: Utf8PathBuf,
    /// The night it came from, from 1.
    pub night: u32,
    /// Why it was promoted.
    pub reason: String,
    /// The champion before it.
    pub previous: Option<Utf8PathBuf>,
}

/// What becomes of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It becomes champion.
    Promote,
    /// The champion stays.
    Refuse,
}

/// The champion's record of one pipeline.
#[derive(Debug)]
pub struct Registry {
    path: Utf8PathBuf,
    champion: std::sync::Mutex<Option<Champion>>,
}

impl Registry {
    /// Opens the record of `pipeline` in `dir`; there need not be one.
    ///
    /// # Errors
    /// An unreadable or broken record: it is never taken for "no champion".
    pub fn open(dir: &Utf8Path, pipeline: &str) -> Result<Self, RegistryError> {
        let path = dir.join(format!("{pipeline}.json"));
        let champion = match fs_err::read_to_string(&path) {
            Ok(text) => Some(
                serde_json::from_str(&text).map_err(|e| RegistryError::Broken {
                    path: path.clone(),
                    message: e.to_string(),
                })?,
            ),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(source) => return Err(RegistryError::Io { path, source }),
        };
        Ok(Self {
            path,
            champion: std::sync::Mutex::new(champion),
        })
    }

    /// The champion, if one was ever promoted.
    pub fn champion(&self) -> Option<Champion> {
        self.champion
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }

    /// Promotes unless validation falls. Both rates are of the same tasks.
    pub fn decide(&self, champion_success: f64, candidate_success: f64) -> Verdict {
        if candidate_success >= champion_success {
            Verdict::Promote
        } else {
            Verdict::Refuse
        }
    }

    /// Makes the checkpoint in `path` the champion.
    ///
    /// # Errors
    /// When the record can't be written; the old one stands then.
    pub fn promote(&self, path: &Utf8Path, night: u32, reason: &str) -> Result<(), RegistryError> {
        let mut champion = self
            .champion
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let next = Champion {
            path: path.to_owned(),
            night,
            reason: reason.to_owned(),
            previous: champion.as_ref().map(|c| c.path.clone()),
        };
        let temporary = self.path.with_extension("tmp");
        let write = || -> std::io::Result<()> {
            let mut file = fs_err::File::create(&temporary)?;
            file.write_all(&serde_json::to_vec_pretty(&next)?)?;
            file.sync_all()?;
            fs_err::rename(&temporary, &self.path)
        };
        write().map_err(|source| RegistryError::Io {
            path: self.path.clone(),
            source,
        })?;
        *champion = Some(next);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir() -> (tempfile::TempDir, Utf8PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
        (dir, path)
    }

    #[test]
    fn the_champion_moves_and_is_remembered() {
        let (_keep, dir) = dir();
        let registry = Registry::open(&dir, "p").unwrap();
        assert_eq!(registry.champion(), None);
        registry.promote("a".into(), 1, "first").unwrap();
        registry.promote("b".into(), 2, "better").unwrap();
        let again = Registry::open(&dir, "p").unwrap().champion().unwrap();
        assert_eq!(
            (again.path.as_str(), again.night, again.previous.as_deref()),
            ("b", 2, Some(Utf8Path::new("a")))
        );
    }

    #[test]
    fn validation_must_not_fall() {
        let (_keep, dir) = dir();
        let registry = Registry::open(&dir, "p").unwrap();
        assert_eq!(registry.decide(0.5, 0.49), Verdict::Refuse);
        assert_eq!(registry.decide(0.5, 0.5), Verdict::Promote);
    }

    #[test]
    fn a_broken_record_is_an_error_not_a_fresh_start() {
        let (_keep, dir) = dir();
        std::fs::write(dir.join("p.json"), "{").unwrap();
        assert!(matches!(
            Registry::open(&dir, "p"),
            Err(RegistryError::Broken { .. })
        ));
    }
}
