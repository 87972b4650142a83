//! The questions, one JSON object a line.

use std::sync::LazyLock;

use drillyard_schema::Split;
use serde::Deserialize;

use crate::error::GymError;

const TEXT: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../datasets/tasks/text2sql/questions.jsonl"
));

/// A question with its reference and the expert's mistake.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Question {
    /// Unique in the file, never reused.
    pub(crate) id: String,
    /// `one_table`, `joins` or `nested`.
    pub(crate) grade: String,
    /// The split it belongs to, fixed for ever.
    pub(crate) split: Split,
    /// The rows must come in order.
    pub(crate) ordered: bool,
    /// What is asked.
    pub(crate) question: String,
    /// A right query.
    pub(crate) sql: String,
    /// A plausible wrong query that runs and gives other rows.
    pub(crate) mistake: String,
}

static ALL: LazyLock<Result<Vec<Question>, (usize, String)>> = LazyLock::new(|| parse(TEXT));

/// Every question, in the order of the file.
pub(crate) fn all() -> Result<&'static [Question], GymError> {
    ALL.as_deref()
        .map_err(|(line, reason)| GymError::Questions {
            set: "text2sql",
            line: *line,
            reason: reason.clone(),
        })
}

fn parse(text: &str) -> Result<Vec<Question>, (usize, String)> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(at, line)| serde_json::from_str(line).map_err(|error| (at + 1, error.to_string())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_line_is_named() {
        let good = TEXT.lines().next().unwrap();
        let (line, reason) = parse(&format!("{good}\n\n{{\"id\":\"x\"}}")).unwrap_err();
        assert_eq!(line, 3);
        assert!(reason.contains("missing field"), "{reason}");
    }
}
