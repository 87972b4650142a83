//! What the model is shown of a call's result.

use drillyard_sandbox::{CallOutcome, CallResult};

/// The text a model gets back from a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// The text.
    pub text: String,
    /// True if output was left out; the text says where and how much.
    pub truncated: bool,
}

/// Renders a result: standard output without its last line end, then standard error, then a line that says how the call ended
/// where it did not end well. A call that succeeded without output reads `ok`, an empty file `(empty)`.
///
/// Output and errors together are cut to `max_bytes`: the start and the end stay, and a line between them says how many bytes
/// were left out.
pub fn observation(tool: &str, result: &CallResult, max_bytes: usize) -> Observation {
    let ending = ending(result);
    let stdout = Stream {
        kept: &result.stdout,
        lost: result
            .stdout_bytes
            .saturating_sub(result.stdout.len() as u64),
    };
    let stderr = Stream {
        kept: &result.stderr,
        lost: result
            .stderr_bytes
            .saturating_sub(result.stderr.len() as u64),
    };
    // Errors may take half of the room, and more where the output leaves it.
    let stderr_room = stderr
        .kept
        .len()
        .min((max_bytes / 2).max(max_bytes.saturating_sub(stdout.kept.len())));
    let (errors, errors_cut) = stderr.cut(stderr_room);
    let (output, output_cut) = stdout.cut(max_bytes.saturating_sub(stderr_room));
    let mut parts: Vec<&str> = vec![&output, &errors, &ending];
    parts.retain(|part| !part.is_empty());
    let text = match (parts.is_empty(), tool) {
        (true, "read_file" | "list_dir") => "(empty)".to_owned(),
        (true, _) => "ok".to_owned(),
        (false, _) => parts.join("\n"),
    };
    Observation {
        text,
        truncated: output_cut || errors_cut,
    }
}

/// The last line of an observation: how the call ended, if not well.
fn ending(result: &CallResult) -> String {
    let exit = match (result.exit_code, result.signal) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "killed".to_owned(),
    };
    match result.outcome {
        CallOutcome::Ok => String::new(),
        CallOutcome::Error | CallOutcome::Killed => format!("[{exit}]"),
        CallOutcome::Timeout => {
            format!("[timeout after {} s: killed]", result.wall.as_secs().max(1))
        }
        CallOutcome::Memory => format!("[memory limit: {exit}]"),
        CallOutcome::Processes => format!("[process limit: {exit}]"),
        CallOutcome::Disk => format!("[disk full: {exit}]"),
        CallOutcome::OutputLimit => "[output limit: killed]".to_owned(),
    }
}

struct Stream<'a> {
    kept: &'a [u8],
    /// Bytes the sandbox did not keep.
    lost: u64,
}

impl Stream<'_> {
    /// The text without its last line end, at most about `room` bytes of it, and whether something was left out.
    fn cut(&self, room: usize) -> (String, bool) {
        let text = String::from_utf8_lossy(self.kept);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        if text.len() <= room && self.lost == 0 {
            return (text.to_owned(), false);
        }
        let room = room.min(text.len());
        let head = text.floor_char_boundary(if self.lost == 0 { room * 2 / 3 } else { room });
        let tail = if self.lost == 0 {
            text.ceil_char_boundary(text.len() - (room - room * 2 / 3))
        } else {
            text.len()
        };
        let left_out = (tail - head) as u64 + self.lost;
        let marker = format!("[{left_out} bytes left out]");
        let parts = [&text[..head], &marker, &text[tail..]];
        let shown: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        (shown.join("\n"), true)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn result(stdout: &str, stderr: &str, code: i32) -> CallResult {
        CallResult {
            outcome: if code == 0 {
                CallOutcome::Ok
            } else {
                CallOutcome::Error
            },
            exit_code: Some(code),
            stdout: stdout.into(),
            stderr: stderr.into(),
            stdout_bytes: stdout.len() as u64,
            stderr_bytes: stderr.len() as u64,
            wall: Duration::from_millis(3),
            ..CallResult::default()
        }
    }

    fn shown(result: &CallResult) -> String {
        observation("execute_shell", result, 4_096).text
    }

    #[test]
    fn output_then_errors_then_exit_code() {
        assert_eq!(shown(&result("a;b\n1;2\n", "", 0)), "a;b\n1;2");
        assert_eq!(shown(&result("", "", 0)), "ok");
        assert_eq!(shown(&result("", "", 1)), "[exit 1]");
        assert_eq!(
            shown(&result("a\n", "sort: no such file\n", 2)),
            "a\nsort: no such file\n[exit 2]"
        );
        assert_eq!(
            observation("read_file", &result("", "", 0), 10).text,
            "(empty)"
        );
    }

    #[test]
    fn other_endings_are_named() {
        let mut killed = result("half\n", "", 0);
        killed.exit_code = None;
        killed.signal = Some(9);
        killed.outcome = CallOutcome::Timeout;
        killed.wall = Duration::from_millis(30_020);
        assert_eq!(shown(&killed), "half\n[timeout after 30 s: killed]");
        killed.outcome = CallOutcome::Memory;
        assert_eq!(shown(&killed), "half\n[memory limit: killed by signal 9]");
        killed.outcome = CallOutcome::OutputLimit;
        assert_eq!(shown(&killed), "half\n[output limit: killed]");
    }

    #[test]
    fn long_output_keeps_its_ends_and_says_what_is_missing() {
        let long = "x".repeat(500) + &"y".repeat(500);
        let seen = observation("execute_shell", &result(&long, "bad\n", 1), 103);
        assert!(seen.truncated);
        let lines: Vec<&str> = seen.text.lines().collect();
        assert_eq!(lines[1], "[901 bytes left out]");
        assert_eq!(lines[0].len() + lines[2].len(), 99);
        assert!(lines[0].starts_with('x') && lines[2].ends_with('y'));
        assert_eq!(lines[3..], ["bad", "[exit 1]"]);
    }

    #[test]
    fn what_the_sandbox_dropped_is_counted_and_characters_stay_whole() {
        let mut lost = result("\u{e9}\u{e9}\u{e9}\u{e9}", "", 0);
        lost.stdout_bytes = 1_008;
        let seen = observation("execute_shell", &lost, 5);
        assert_eq!(seen.text, "\u{e9}\u{e9}\n[1004 bytes left out]");
        let fits = observation("execute_shell", &result("\u{e9}", "", 0), 2);
        assert!(!fits.truncated);
    }
}
