//! What the calls of an episode changed, contents included, in one file beside the lake: its files can be brought back to any step
//! without running a call again.
//!
//! A pack is compressed by zstd. Inside is a line that names the format, then for each call that changed something a line of JSON with
//! the changes and the sizes of their contents, and the contents after it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use camino::{Utf8Path, Utf8PathBuf};
use drillyard_sandbox::{Change, ChangedFile, FaultKind};
use drillyard_schema::table::{Artifact, EpisodeRow, ToolCallRow};
use serde::{Deserialize, Serialize};
use zstd::stream::{read::Decoder, write::Encoder};

use crate::artifacts;
use crate::calls::says_nothing;
use crate::files::Files;
use crate::past::{LoggedCall, is_noted};

/// What an episode's pack is called among its artifacts.
pub(crate) const PACK: &str = "file changes";
/// The first line.
const FORMAT: &[u8] = b"drillyard file changes 1\n";
/// An episode that changed more, before compression, has no pack.
const MAX_BYTES: usize = 16 << 20;
/// The fastest: packs are many, and most of them small.
const LEVEL: i32 = 1;

/// What one call changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallChanges {
    /// The step.
    pub step: i32,
    /// Position within the step.
    pub call: i32,
    /// What changed, by the call and by others just before it. A content that was too large to keep is none.
    pub files: Vec<ChangedFile>,
    /// Something else changed too, and it is not known what.
    pub incomplete: bool,
    /// The sandbox ended with the call, so that none of this lasted.
    pub sandbox_ended: bool,
}

/// Why the files can't be brought back from what was recorded.
#[derive(Debug, thiserror::Error)]
pub enum Missing {
    /// No contents were recorded: the episode changed too much, or an earlier version ran it.
    #[error("the contents of the files it changed were not kept")]
    NoPack,
    /// The file is not where it was put.
    #[error("what it changed was kept in {path}, which can't be read")]
    NotFound {
        /// Where it should lie.
        path: Utf8PathBuf,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
    /// The file is not what was put there, or does not fit the episode's rows.
    #[error("what was kept of its files is damaged: {what}")]
    Damaged {
        /// In which way.
        what: String,
    },
    /// A file's last state before the step is not known.
    #[error("{what} could not be kept, so the files can't be restored")]
    Lost {
        /// Of what.
        what: String,
    },
}

fn damaged(what: impl Into<String>) -> Missing {
    Missing::Damaged { what: what.into() }
}

/// One call's line.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    step: i32,
    call: i32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    incomplete: bool,
    /// Contents apart.
    files: Vec<ChangedFile>,
    /// The size of each file's content, where it has one.
    contents: Vec<Option<usize>>,
}

/// A pack while the episode runs. Only what is compressed already is held.
#[derive(Default)]
pub(crate) enum Pack {
    /// Nothing changed so far.
    #[default]
    Empty,
    Open {
        encoder: Encoder<'static, Vec<u8>>,
        bytes: usize,
    },
    /// There will be none.
    Off,
}

impl Pack {
    /// Takes over what a call changed.
    pub fn add(&mut self, step: u32, index: usize, call: &LoggedCall) {
        let incomplete = call.is_incomplete();
        if matches!(self, Self::Off) || call.files.is_empty() && !incomplete {
            return;
        }
        let line = Line {
            step: step as i32,
            call: index as i32,
            incomplete,
            files: call.files.iter().map(without_content).collect(),
            contents: call
                .files
                .iter()
                .map(|file| file.content.as_ref().map(Vec::len))
                .collect(),
        };
        if self.write(&line, &call.files).is_err() {
            *self = Self::Off;
        }
    }

    fn write(&mut self, line: &Line, files: &[ChangedFile]) -> io::Result<()> {
        if matches!(self, Self::Empty) {
            let mut encoder = Encoder::new(Vec::new(), LEVEL)?;
            encoder.write_all(FORMAT)?;
            *self = Self::Open {
                encoder,
                bytes: FORMAT.len(),
            };
        }
        let Self::Open { encoder, bytes } = self else {
            return Ok(());
        };
        let mut head = serde_json::to_vec(line)?;
        head.push(b'\n');
        *bytes += head.len() + line.contents.iter().flatten().sum::<usize>();
        if *bytes > MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        encoder.write_all(&head)?;
        for file in files {
            encoder.write_all(file.content.as_deref().unwrap_or_default())?;
        }
        Ok(())
    }

    /// The file to keep; none where nothing changed, or too much.
    pub fn finish(self) -> Option<Vec<u8>> {
        match self {
            Self::Open { encoder, .. } => encoder.finish().ok(),
            Self::Empty | Self::Off => None,
        }
    }
}

fn without_content(file: &ChangedFile) -> ChangedFile {
    ChangedFile {
        path: file.path.clone(),
        change: file.change,
        kind: file.kind,
        mode: file.mode,
        before_hash: file.before_hash.clone(),
        after_hash: file.after_hash.clone(),
        size: file.size,
        content: None,
    }
}

/// What the calls of an episode changed before step `at`: one entry for each of its rows, in their order. `store` is the yard's folder
/// of artifacts. Where this succeeds, the set-up and these changes in turn, those of ended sandboxes left out, are the files as they were.
///
/// # Errors
/// What is missing, where the files before that step can't be told from what was recorded.
pub fn changes_before(
    episode: &EpisodeRow,
    calls: &[ToolCallRow],
    at: u32,
    store: &Utf8Path,
) -> Result<Vec<CallChanges>, Missing> {
    let rows: Vec<&ToolCallRow> = calls
        .iter()
        .filter(|row| row.step_index < at as i32)
        .collect();
    let pack = episode
        .artifacts
        .iter()
        .find(|artifact| artifact.path == PACK);
    let mut packed = match pack {
        _ if rows.iter().all(|row| left_nothing(row)) => BTreeMap::new(),
        Some(pack) => read(pack, store)?,
        None => return Err(Missing::NoPack),
    };
    let mut files = Files::default();
    let mut all = Vec::with_capacity(rows.len());
    for row in rows {
        let place = (row.step_index, row.call_index);
        let (changed, incomplete) = packed.remove(&place).unwrap_or_default();
        compare(row, &changed)?;
        let sandbox_ended = is_noted(row, "sandbox_ended");
        if !sandbox_ended {
            files.change(&changed, incomplete);
        } else if !says_nothing(row) {
            files.forget_lost();
        }
        all.push(CallChanges {
            step: row.step_index,
            call: row.call_index,
            files: changed,
            incomplete,
            sandbox_ended,
        });
    }
    match files.lost() {
        Some(what) => Err(Missing::Lost { what }),
        None => Ok(all),
    }
}

/// No file is another one after this call.
fn left_nothing(row: &ToolCallRow) -> bool {
    is_noted(row, "sandbox_ended")
        || row.files_changed.is_empty() && !row.state_lost && !others_changed(row)
}

/// Somebody else changed a file just before the call; its row does not list that.
fn others_changed(row: &ToolCallRow) -> bool {
    row.fault_injected.as_deref() == Some(FaultKind::ConcurrentChange.as_str())
}

type Packed = BTreeMap<(i32, i32), (Vec<ChangedFile>, bool)>;

fn read(pack: &Artifact, store: &Utf8Path) -> Result<Packed, Missing> {
    let of_store = artifacts::place(store, &pack.blake3);
    let (path, bytes) = if let Ok(bytes) = fs_err::read(&of_store) {
        (of_store, bytes)
    } else {
        let path = Utf8PathBuf::from(&pack.uri);
        match fs_err::read(&path) {
            Ok(bytes) => (path, bytes),
            Err(source) => return Err(Missing::NotFound { path, source }),
        }
    };
    if blake3::hash(&bytes).to_hex().as_str() != pack.blake3 {
        return Err(damaged(format!("{path} has another hash")));
    }
    let mut content = Vec::new();
    Decoder::new(bytes.as_slice())
        .and_then(|decoder| decoder.take(MAX_BYTES as u64).read_to_end(&mut content))
        .map_err(|error| damaged(error.to_string()))?;
    parse(&content).ok_or_else(|| damaged(format!("{path} can't be understood")))
}

fn parse(content: &[u8]) -> Option<Packed> {
    let mut rest = content.strip_prefix(FORMAT)?;
    let mut packed = Packed::new();
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let line: Line = serde_json::from_slice(&rest[..end]).ok()?;
        rest = &rest[end + 1..];
        let mut files = line.files;
        if files.len() != line.contents.len() {
            return None;
        }
        for (file, size) in files.iter_mut().zip(line.contents) {
            let Some(size) = size else { continue };
            let (content, after) = rest.split_at_checked(size)?;
            file.content = Some(content.to_vec());
            rest = after;
        }
        packed.insert((line.step, line.call), (files, line.incomplete));
    }
    Some(packed)
}

/// Whether what was kept is what the call's row says.
fn compare(row: &ToolCallRow, files: &[ChangedFile]) -> Result<(), Missing> {
    let (step, call) = (row.step_index, row.call_index);
    let of = |path: &str| format!("'{path}' after call {call} of step {step}");
    for change in &row.files_changed {
        let same = files.iter().any(|file| {
            file.path == change.path
                && label(file.change) == change.change
                && file.after_hash == change.after_hash
                && file.size as i64 == change.size_bytes
        });
        if !same {
            return Err(damaged(format!("it lacks {}", of(&change.path))));
        }
    }
    for file in files {
        let listed = row.files_changed.iter().any(|c| c.path == file.path);
        if !listed && !others_changed(row) {
            return Err(damaged(format!("no row tells of {}", of(&file.path))));
        }
        if let (Some(content), Some(hash)) = (&file.content, &file.after_hash)
            && blake3::hash(content).to_hex().as_str() != hash
        {
            return Err(damaged(format!("another content of {}", of(&file.path))));
        }
    }
    Ok(())
}

/// A change as the lake calls it.
pub(crate) const fn label(change: Change) -> &'static str {
    match change {
        Change::Created => "created",
        Change::Modified => "modified",
        Change::Deleted => "deleted",
    }
}

#[cfg(test)]
mod tests {
    use drillyard_sandbox::Kind;
    use drillyard_schema::table::Timestamp;

    use super::*;

    fn row(files_changed: bool) -> ToolCallRow {
        serde_json::from_value(serde_json::json!({
            "run_date": "", "purpose": "train", "run_id": "r", "episode_id": "e", "step_index": 0, "call_index": 0,
            "call_id": "", "tool": "t", "arguments": "", "call_hash": "", "schema_ok": true, "outcome": "ok",
            "stdout": "", "stderr": "", "stdout_bytes": 0, "stderr_bytes": 0, "truncated": false, "wall_us": 0,
            "files_changed": [], "state_lost": files_changed, "started_at": Timestamp(0),
        }))
        .unwrap()
    }

    fn call(content: Vec<u8>) -> LoggedCall {
        LoggedCall {
            row: row(false),
            observation: String::new(),
            artifacts: Vec::new(),
            files: vec![ChangedFile {
                path: "line\nbreak".to_owned(),
                change: Change::Created,
                kind: Kind::File,
                mode: 0o600,
                before_hash: None,
                after_hash: Some(blake3::hash(&content).to_hex().to_string()),
                size: content.len() as u64,
                content: Some(content),
            }],
            sandbox_ended: false,
        }
    }

    fn content_of(pack: Pack) -> Vec<u8> {
        let packed = pack.finish().unwrap();
        zstd::decode_all(packed.as_slice()).unwrap()
    }

    #[test]
    fn what_was_packed_comes_back() {
        let mut pack = Pack::default();
        let calls = [
            call(b"\n{}\n".to_vec()),
            call(Vec::new()),
            call(vec![7; 100_000]),
        ];
        for (step, call) in calls.iter().enumerate() {
            pack.add(step as u32, 1, call);
        }
        let packed = parse(&content_of(pack)).unwrap();
        assert_eq!(packed.len(), 3);
        for (step, call) in calls.iter().enumerate() {
            let (files, incomplete) = &packed[&(step as i32, 1)];
            assert_eq!((files, *incomplete), (&call.files, false));
        }
    }

    #[test]
    fn an_episode_that_changed_nothing_or_too_much_has_no_pack() {
        let mut pack = Pack::default();
        let mut idle = call(Vec::new());
        idle.files.clear();
        pack.add(0, 0, &idle);
        assert_eq!(pack.finish(), None);
        let mut pack = Pack::default();
        for step in 0..17 {
            pack.add(step, 0, &call(vec![0; 1 << 20]));
        }
        assert_eq!(pack.finish(), None);
    }

    #[test]
    fn half_a_pack_is_damaged() {
        let mut pack = Pack::default();
        pack.add(0, 0, &call(b"content".to_vec()));
        let content = content_of(pack);
        for end in [0, 5, FORMAT.len() + 3, content.len() - 1] {
            assert!(parse(&content[..end]).is_none(), "{end}");
        }
    }
}
