//! Files and folders in, episodes and problems out.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_lake::EpisodeBundle;
use drillyard_schema::table::Timestamp;
use drillyard_schema::{EpisodeId, RunId};
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

use crate::{intercode, records, tau_bench};

/// Why nothing could be imported at all.
#[derive(Debug, Error)]
pub enum InteropError {
    /// A file or folder could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file or folder.
        path: Utf8PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A folder without a single JSON file.
    #[error("{path} holds no .json file")]
    Empty {
        /// The folder.
        path: Utf8PathBuf,
    },
    /// The content is of no known format.
    #[error("{path} is of no known format; known are: {known}; if it is one of them, name it with --format", known = Format::names())]
    UnknownFormat {
        /// The file.
        path: Utf8PathBuf,
    },
    /// The problem list could not be written.
    #[error("cannot write the problem list: {0}")]
    Write(std::io::Error),
    /// An episode that cannot be written in the format asked for.
    #[error("episode {episode} cannot be exported as {format}: {reason}")]
    Export {
        /// The episode.
        episode: EpisodeId,
        /// The format.
        format: Format,
        /// Why not.
        reason: String,
    },
}

/// A recorded format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    /// InterCode's result files.
    InterCode,
    /// tau-bench's historical trajectories.
    TauBench,
}

impl Format {
    /// Every format.
    pub const ALL: &'static [Self] = &[Self::InterCode, Self::TauBench];

    /// The name used on the command line and in the lake.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InterCode => "intercode",
            Self::TauBench => "tau_bench",
        }
    }

    fn names() -> String {
        let names: Vec<_> = Self::ALL.iter().map(|f| f.name()).collect();
        names.join(", ")
    }

    /// The first field of each record as the harness writes it.
    const fn marker(self) -> &'static str {
        match self {
            Self::InterCode => "environment",
            Self::TauBench => "task_id",
        }
    }

    /// Tells the format by content: the outer bracket, and a field that no other format has. Also for files that are damaged.
    pub fn detect(bytes: &[u8]) -> Option<Self> {
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        let first = text.iter().find(|b| !b.is_ascii_whitespace())?;
        let holds = |field: &[u8]| text.windows(field.len()).any(|w| w == field);
        match first {
            b'{' if holds(b"\"turn_history\"") => Some(Self::InterCode),
            b'[' if holds(b"\"traj\"") => Some(Self::TauBench),
            _ => None,
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .iter()
            .copied()
            .find(|f| f.name() == text)
            .ok_or_else(|| format!("unknown format '{text}'; one of: {}", Self::names()))
    }
}

/// What the caller decides about an import.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The run the episodes become part of.
    pub run_id: RunId,
    /// Day of the run, `YYYY-MM-DD`.
    pub run_date: String,
    /// When it was imported: stands in for times the source does not hold.
    pub imported_at: Timestamp,
    /// The format, where it shall not be told by content.
    pub format: Option<Format>,
    /// The policy that acted, where it shall not be told by file name.
    pub policy: Option<String>,
}

/// A record that was set aside, or a file that was skipped (`record` is `None` then).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file.
    pub file: Utf8PathBuf,
    /// Key or index of the record.
    pub record: Option<String>,
    /// What is wrong with it.
    pub reason: String,
}

/// What came of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImportedFile {
    /// The file.
    pub file: Utf8PathBuf,
    /// Its format's name.
    pub format: &'static str,
    /// Records it holds, good and bad.
    pub records: usize,
    /// Episodes imported from it.
    pub episodes: usize,
}

/// An import under way: yields episodes, a file at a time. [`files`](Self::files) and [`problems`](Self::problems) are complete
/// once the iterator is at its end.
#[derive(Debug)]
pub struct Imported {
    options: ImportOptions,
    waiting: VecDeque<Utf8PathBuf>,
    ready: VecDeque<EpisodeBundle>,
    first: Option<(Utf8PathBuf, Vec<u8>)>,
    seen: BTreeMap<EpisodeId, String>,
    files: Vec<ImportedFile>,
    problems: Vec<Problem>,
}

/// Opens a file, or every `.json` file below a folder in the order of their paths.
///
/// A single file must be readable and of a known format; in a folder, files that are not become [`Problem`]s.
pub fn import(path: &Utf8Path, options: ImportOptions) -> Result<Imported, InteropError> {
    let read_error = |source| InteropError::Read {
        path: path.to_owned(),
        source,
    };
    let mut imported = Imported {
        options,
        waiting: VecDeque::new(),
        ready: VecDeque::new(),
        first: None,
        seen: BTreeMap::new(),
        files: Vec::new(),
        problems: Vec::new(),
    };
    if fs_err::metadata(path).map_err(read_error)?.is_dir() {
        let mut files = Vec::new();
        json_files(path, &mut files)?;
        files.sort();
        imported.waiting = files.into();
        if imported.waiting.is_empty() {
            return Err(InteropError::Empty {
                path: path.to_owned(),
            });
        }
    } else {
        let bytes = fs_err::read(path).map_err(read_error)?;
        if imported
            .options
            .format
            .or_else(|| Format::detect(&bytes))
            .is_none()
        {
            return Err(InteropError::UnknownFormat {
                path: path.to_owned(),
            });
        }
        imported.first = Some((path.to_owned(), bytes));
    }
    Ok(imported)
}

fn json_files(folder: &Utf8Path, found: &mut Vec<Utf8PathBuf>) -> Result<(), InteropError> {
    let error = |source| InteropError::Read {
        path: folder.to_owned(),
        source,
    };
    for entry in folder.read_dir_utf8().map_err(error)? {
        let entry = entry.map_err(error)?;
        let kind = entry.file_type().map_err(error)?;
        if kind.is_dir() {
            json_files(entry.path(), found)?;
        } else if kind.is_file() && entry.path().extension() == Some("json") {
            found.push(entry.into_path());
        }
    }
    Ok(())
}

impl Imported {
    /// What came of each file so far.
    pub fn files(&self) -> &[ImportedFile] {
        &self.files
    }

    /// What was set aside so far.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    fn problem(&mut self, file: &Utf8Path, record: Option<String>, reason: String) {
        self.problems.push(Problem {
            file: file.to_owned(),
            record,
            reason,
        });
    }

    /// Reads one more file into `ready`; false when there is none left.
    fn advance(&mut self) -> bool {
        let (file, bytes) = if let Some(first) = self.first.take() {
            first
        } else if let Some(file) = self.waiting.pop_front() {
            match fs_err::read(&file) {
                Ok(bytes) => (file, bytes),
                Err(error) => {
                    self.problem(&file, None, error.to_string());
                    return true;
                }
            }
        } else {
            return false;
        };
        let Some(format) = self.options.format.or_else(|| Format::detect(&bytes)) else {
            let reason = match serde_json::from_slice::<serde::de::IgnoredAny>(&bytes) {
                Ok(_) => format!("of no known format (known are: {})", Format::names()),
                Err(error) => format!(
                    "no JSON of a known format: {error} (known are: {})",
                    Format::names()
                ),
            };
            self.problem(&file, None, reason);
            return true;
        };
        let records = records::split(&bytes, format.marker());
        let mut counts = ImportedFile {
            file: file.clone(),
            format: format.name(),
            records: records.len(),
            episodes: 0,
        };
        for record in records {
            let converted = record
                .value
                .and_then(|value| self.convert(format, &file, &record.key, value))
                .and_then(|bundle| self.unseen(&file, &record.key, bundle));
            match converted {
                Ok(bundle) => {
                    counts.episodes += 1;
                    self.ready.push_back(bundle);
                }
                Err(reason) => self.problem(&file, Some(record.key), reason),
            }
        }
        self.files.push(counts);
        true
    }

    fn convert(
        &self,
        format: Format,
        file: &Utf8Path,
        key: &str,
        value: Value,
    ) -> Result<EpisodeBundle, String> {
        match format {
            Format::InterCode => intercode::episode(value, key, file, &self.options),
            Format::TauBench => tau_bench::episode(value, file, &self.options),
        }
    }

    /// The same episode a second time (a copied file, say) would double every count.
    fn unseen(
        &mut self,
        file: &Utf8Path,
        key: &str,
        bundle: EpisodeBundle,
    ) -> Result<EpisodeBundle, String> {
        let place = format!("{file} record {key}");
        match self.seen.entry(bundle.episode.episode_id.clone()) {
            std::collections::btree_map::Entry::Occupied(first) => {
                Err(format!("same policy, task and sample as {}", first.get()))
            }
            std::collections::btree_map::Entry::Vacant(slot) => {
                slot.insert(place);
                Ok(bundle)
            }
        }
    }
}

impl Iterator for Imported {
    type Item = EpisodeBundle;

    fn next(&mut self) -> Option<EpisodeBundle> {
        loop {
            if let Some(bundle) = self.ready.pop_front() {
                return Some(bundle);
            }
            if !self.advance() {
                return None;
            }
        }
    }
}

/// Writes problems as JSON lines: `{"file", "record", "reason"}`.
pub fn write_problems(problems: &[Problem], mut out: impl Write) -> Result<(), InteropError> {
    for problem in problems {
        let line = serde_json::to_string(problem).map_err(|e| InteropError::Write(e.into()))?;
        writeln!(out, "{line}").map_err(InteropError::Write)?;
    }
    out.flush().map_err(InteropError::Write)
}
