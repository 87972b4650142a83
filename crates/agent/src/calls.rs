//! One call in a sandbox, with the fault it meets, if any: what rollouts and replays share.

use std::time::Duration;

use drillyard_sandbox::{
    Call, CallOutcome, CallResult, Change, ChangedFile, Fault, FaultKind, Kind, Limits, Sandbox,
    SandboxError,
};
use drillyard_schema::table::ToolCallRow;
use serde::{Deserialize, Serialize};

use crate::files::Files;

/// Larger disks are not filled: the file that fills one lies in the host's memory.
const LARGEST_FILLED: u64 = 256 << 20;
/// The files that fill the disk: one for each place that may be a file system of its own.
const FILLERS: [&str; 3] = [
    "/dev/shm/.other-process",
    "/tmp/.other-process",
    "/work/.other-process",
];
/// How long filling may take.
const FILLING: Duration = Duration::from_secs(20);
/// What somebody else leaves where the agent has written nothing that could be changed.
const STRAY: (&str, &[u8]) = ("notes.txt", b"written by another process\n");

/// A fault as it was carried out. A call's row keeps it under `fault` in `extras`, so that a replay carries out the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Injected {
    /// What was done.
    pub kind: FaultKind,
    /// How much longer the call took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_us: Option<u64>,
    /// Which file somebody else changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// How many bytes of standard output arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_bytes: Option<u64>,
    /// False where the disk is so large that the call was refused instead of the disk filled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filled: Option<bool>,
    /// False where nothing came of it: there was no room for somebody else's change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied: Option<bool>,
    /// What was drawn beside the kind.
    #[serde(skip)]
    share: f64,
}

impl Injected {
    const fn of(kind: FaultKind) -> Self {
        Self {
            kind,
            delay_us: None,
            path: None,
            kept_bytes: None,
            filled: None,
            applied: None,
            share: 0.0,
        }
    }

    /// Whether anything came of it.
    pub fn took_place(&self) -> bool {
        self.applied != Some(false)
    }

    /// What becomes of a drawn fault, given the files as they are. How much of an output is cut is settled when there is one.
    pub fn settle(fault: Fault, files: &Files, limits: &Limits) -> Self {
        let mut injected = Self::of(fault.kind);
        injected.share = fault.share;
        match fault.kind {
            FaultKind::Slow => injected.delay_us = Some(fault.delay().as_micros() as u64),
            FaultKind::ConcurrentChange => {
                let mut own = files.written_texts();
                own.retain(|path| *path != STRAY.0);
                let path = fault.pick(own.len()).map_or(STRAY.0, |index| own[index]);
                injected.path = Some(path.to_owned());
            }
            FaultKind::DiskFull => injected.filled = Some(disk(limits) <= LARGEST_FILLED),
            FaultKind::PermissionDenied
            | FaultKind::NetworkFailure
            | FaultKind::TruncatedOutput => {}
        }
        injected
    }
}

/// Bytes that the sandbox's files may take: they lie in memory and get three quarters of it at most.
fn disk(limits: &Limits) -> u64 {
    limits.disk_bytes.min(limits.memory_bytes / 4 * 3)
}

/// Whether a call says nothing of the agent: what came of it was lost, or a fault was injected that changes more than how long it took.
pub(crate) fn says_nothing(row: &ToolCallRow) -> bool {
    let outcome = row.outcome.as_str();
    let lost = [
        drillyard_schema::CallOutcome::OutcomeUnknown,
        drillyard_schema::CallOutcome::SandboxFault,
    ];
    let injected = row.fault_injected.as_deref();
    lost.iter().any(|label| label.as_str() == outcome)
        || injected.is_some_and(|kind| kind != FaultKind::Slow.as_str())
}

/// What came of a call.
pub(crate) struct Called {
    /// What the tool did.
    pub result: CallResult,
    /// What the agent sees of it, where that is less.
    pub seen: Option<CallResult>,
    /// What somebody else changed just before it.
    pub others: Vec<ChangedFile>,
    /// The fault, if one took place.
    pub injected: Option<Injected>,
}

impl Called {
    /// A call that met no fault.
    pub const fn plain(result: CallResult) -> Self {
        Self {
            result,
            seen: None,
            others: Vec::new(),
            injected: None,
        }
    }
}

/// The result of a call that could not be run because the files that the agent left do not fit where they have to go.
pub(crate) fn no_room(tool: &str, message: &str) -> CallResult {
    let words =
        format!("{tool}: not run: the files as they are don't fit a fresh sandbox: {message}\n");
    CallResult::refused(CallOutcome::Disk, 1, &words)
}

/// Runs `call` with the fault it is to meet. `waits` is false in replays, where a slow call need not be waited for.
pub(crate) async fn run(
    sandbox: &mut Sandbox,
    tool: &str,
    call: Call,
    injected: Option<Injected>,
    files: &Files,
    waits: bool,
) -> Result<Called, SandboxError> {
    let Some(mut injected) = injected else {
        return Ok(Called::plain(sandbox.call(call).await?));
    };
    let (mut seen, mut others) = (None, Vec::new());
    let mut kept = true;
    let result = match injected.kind {
        FaultKind::Slow => {
            let delay = Duration::from_micros(injected.delay_us.unwrap_or_default());
            if waits {
                tokio::time::sleep(delay).await;
            }
            let mut result = sandbox.call(call).await?;
            result.wall += delay;
            result
        }
        FaultKind::PermissionDenied => {
            let (code, words) = refusal(tool, &call, "Permission denied", 126);
            CallResult::refused(CallOutcome::Error, code, &words)
        }
        FaultKind::NetworkFailure => {
            let code = if matches!(call, Call::Shell { .. }) {
                255
            } else {
                1
            };
            let words = format!("{tool}: connection reset by peer; the call was not carried out\n");
            CallResult::refused(CallOutcome::Error, code, &words)
        }
        FaultKind::ConcurrentChange => {
            let path = injected.path.as_deref().unwrap_or(STRAY.0);
            let change = [by_somebody_else(path, files)];
            if injected.took_place() {
                match sandbox.apply(&change).await {
                    Ok(()) => others.extend(change),
                    // Where the agent filled disk or memory there is no room for anybody else.
                    Err(error) if !error.is_infrastructure() => injected.applied = Some(false),
                    Err(error) => return Err(error),
                }
            }
            if sandbox.is_lost() {
                CallResult::out_of_memory(1, Duration::ZERO)
            } else {
                sandbox.call(call).await?
            }
        }
        FaultKind::TruncatedOutput => {
            let result = sandbox.call(call).await?;
            let fault = Fault {
                kind: injected.kind,
                share: injected.share,
            };
            let text = String::from_utf8_lossy(&result.stdout);
            let arrived = text.floor_char_boundary(fault.kept(text.len()));
            // Of nothing, nothing can be cut.
            kept = arrived < text.trim_end().len();
            if kept {
                let arrived = &text[..arrived];
                injected.kept_bytes = Some(arrived.len() as u64);
                seen = Some(CallResult {
                    stdout: arrived.as_bytes().to_vec(),
                    stdout_bytes: arrived.len() as u64,
                    ..result.clone()
                });
            }
            result
        }
        FaultKind::DiskFull if injected.filled == Some(false) => {
            let (code, words) = refusal(tool, &call, "No space left on device", 1);
            CallResult::refused(CallOutcome::Disk, code, &words)
        }
        FaultKind::DiskFull => with_full_disk(sandbox, call).await?,
    };
    Ok(Called {
        result,
        seen,
        others,
        injected: kept.then_some(injected),
    })
}

/// Runs a call while files take all the space there is.
async fn with_full_disk(sandbox: &mut Sandbox, call: Call) -> Result<CallResult, SandboxError> {
    // Where the places are one file system, the first file takes it all, and the others would be empty.
    let command = FILLERS
        .map(|file| format!("cat /dev/zero > {file}; [ -s {file} ] || rm -f {file}"))
        .join("\n");
    let fill = Call::Shell {
        command: format!("exec 2>/dev/null\n{command}"),
        timeout: Some(FILLING),
    };
    let filled = sandbox.call(fill).await?;
    if sandbox.is_lost() {
        // Files are memory: filling the disk can take the sandbox down with it. That was the fault's doing.
        return Ok(filled);
    }
    let mut result = sandbox.call(call).await?;
    // The call may have removed them; that is none of its changes that last.
    let is_filler = |path: &str| FILLERS.iter().any(|file| in_place(file) == path);
    result.files_changed.retain(|file| !is_filler(&file.path));
    if !sandbox.is_lost() {
        sandbox.apply(&FILLERS.map(gone)).await?;
    }
    Ok(result)
}

/// A path as changes tell it: relative in the work directory.
fn in_place(path: &str) -> &str {
    path.strip_prefix("/work/").unwrap_or(path)
}

fn gone(path: &str) -> ChangedFile {
    ChangedFile {
        path: in_place(path).to_owned(),
        change: Change::Deleted,
        kind: Kind::File,
        mode: 0,
        before_hash: None,
        after_hash: None,
        size: 0,
        content: None,
    }
}

/// A file as somebody else leaves it: the last line of one that the agent wrote is there twice, or there is one more file. The task's
/// own inputs stay: a task whose inputs are gone can't be done by anyone.
fn by_somebody_else(path: &str, files: &Files) -> ChangedFile {
    let (content, change) = match files.content(path) {
        Some(content) => {
            let mut content = content.to_vec();
            let body = content.strip_suffix(b"\n").unwrap_or(&content);
            let line = body
                .iter()
                .rposition(|byte| *byte == b'\n')
                .map_or(body, |at| &body[at + 1..])
                .to_vec();
            if !content.is_empty() && !content.ends_with(b"\n") {
                content.push(b'\n');
            }
            content.extend_from_slice(&line);
            content.push(b'\n');
            (content, Change::Modified)
        }
        None => (STRAY.1.to_vec(), Change::Created),
    };
    ChangedFile {
        path: path.to_owned(),
        change,
        kind: Kind::File,
        mode: files.mode(path),
        before_hash: files
            .content(path)
            .map(|content| blake3::hash(content).to_hex().to_string()),
        after_hash: Some(blake3::hash(&content).to_hex().to_string()),
        size: content.len() as u64,
        content: Some(content),
    }
}

/// What a tool says that the system refuses, and its exit code.
fn refusal(tool: &str, call: &Call, why: &str, of_shell: i32) -> (i32, String) {
    match call {
        Call::Shell { command, .. } => {
            let program = command.split_whitespace().next().unwrap_or("sh");
            (of_shell, format!("bash: line 1: {program}: {why}\n"))
        }
        Call::Exec { argv, .. } => {
            let what = argv.get(1).map_or(tool, String::as_str);
            (1, format!("error: {what}: {why}\n"))
        }
        Call::ReadFile { path, .. } | Call::WriteFile { path, .. } | Call::ListDir { path } => {
            (1, format!("{tool}: {path}: {why}\n"))
        }
    }
}

/// What others and a call changed, as one list that tells each file's last state.
pub(crate) fn all_changes(others: Vec<ChangedFile>, own: Vec<ChangedFile>) -> Vec<ChangedFile> {
    let mut all = others;
    all.retain(|other| own.iter().all(|file| file.path != other.path));
    all.extend(own);
    all
}

/// The call with its own clock set so that it can't outlast the episode.
pub(crate) fn within(call: Call, usual: Duration, left: Duration) -> Call {
    let shorten = |timeout: Option<Duration>| Some(timeout.unwrap_or(usual).min(left));
    match call {
        Call::Shell { command, timeout } => Call::Shell {
            command,
            timeout: shorten(timeout),
        },
        Call::Exec {
            argv,
            stdin,
            timeout,
        } => Call::Exec {
            argv,
            stdin,
            timeout: shorten(timeout),
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn written(path: &str, content: &[u8]) -> ChangedFile {
        ChangedFile {
            path: path.to_owned(),
            change: Change::Created,
            kind: Kind::File,
            mode: 0o600,
            before_hash: None,
            after_hash: None,
            size: content.len() as u64,
            content: Some(content.to_vec()),
        }
    }

    fn concurrent(files: &Files) -> Injected {
        let fault = Fault {
            kind: FaultKind::ConcurrentChange,
            share: 0.0,
        };
        Injected::settle(fault, files, &Limits::default())
    }

    #[test]
    fn somebody_else_changes_what_the_agent_wrote_and_never_an_input() {
        let mut files = Files::new(vec![("in.csv".to_owned(), Arc::from(&b"a\n1\n"[..]))]);
        assert_eq!(concurrent(&files).path.as_deref(), Some("notes.txt"));
        let stray = by_somebody_else("notes.txt", &files);
        assert_eq!(stray.change, Change::Created);
        // An input that a call changed is still the task's, and what is no text is left alone.
        files.change(
            &[written("in.csv", b"a\n2\n"), written("db", b"\xff\x00")],
            false,
        );
        assert_eq!(concurrent(&files).path.as_deref(), Some("notes.txt"));
        files.change(&[written("out.csv", b"a\n1\n2")], false);
        assert_eq!(concurrent(&files).path.as_deref(), Some("out.csv"));
        let changed = by_somebody_else("out.csv", &files);
        assert_eq!(changed.content.as_deref(), Some(&b"a\n1\n2\n2\n"[..]));
        assert_eq!((changed.change, changed.mode), (Change::Modified, 0o600));
    }

    #[test]
    fn only_small_disks_are_filled() {
        let fault = Fault {
            kind: FaultKind::DiskFull,
            share: 0.0,
        };
        let filled = |disk_bytes, memory_bytes| {
            let limits = Limits {
                disk_bytes,
                memory_bytes,
                ..Limits::default()
            };
            Injected::settle(fault, &Files::default(), &limits).filled
        };
        assert_eq!(filled(64 << 20, 4 << 30), Some(true));
        assert_eq!(filled(1 << 30, 4 << 30), Some(false));
        assert_eq!(filled(1 << 30, 256 << 20), Some(true));
    }

    #[test]
    fn a_refusal_sounds_like_the_tool() {
        let (code, words) = refusal(
            "execute_shell",
            &Call::shell("sort -u x"),
            "Permission denied",
            126,
        );
        assert_eq!(
            (code, words.as_str()),
            (126, "bash: line 1: sort: Permission denied\n")
        );
        let write = Call::WriteFile {
            path: "o".to_owned(),
            content: Vec::new(),
        };
        assert_eq!(
            refusal("write_file", &write, "Permission denied", 126),
            (1, "write_file: o: Permission denied\n".to_owned())
        );
    }
}
