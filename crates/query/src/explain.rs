//! Turns the engine's errors into ones that name a place and a way out.

use datafusion::arrow::error::ArrowError;
use datafusion::error::DataFusionError;

use crate::error::{ErrorKind, QueryError};

/// The candidate nearest to `word`, if one is near enough to be a slip of the fingers.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let limit = 1 + word.chars().count() / 4;
    candidates
        .into_iter()
        .map(|candidate| (edit_distance(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, candidate)| candidate)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substitution = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substitution.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// An engine error as one of ours. `tables` are the names a query may use.
pub(crate) fn explain(error: &DataFusionError, origin: &str, tables: &[String]) -> QueryError {
    let root = error.find_root();
    let mut message = first_line(&root.strip_backtrace());
    for prefix in [
        "Error during planning: ",
        "SQL error: ",
        "Schema error: ",
        "Execution error: ",
        "Arrow error: ",
        "Parquet error: ",
        "This feature is not implemented: ",
    ] {
        if let Some(rest) = message.strip_prefix(prefix) {
            message = rest.to_owned();
        }
    }
    if let Some(inner) = message
        .strip_prefix("ParserError(\"")
        .and_then(|m| m.strip_suffix("\")"))
    {
        message = inner.replace("\\\"", "\"");
    }
    let line = error
        .diagnostic()
        .and_then(|d| d.span)
        .map(|span| span.start.line as usize)
        .filter(|line| *line > 0)
        .or_else(|| line_in(&message));
    let kind = if unreadable(root) {
        ErrorKind::Input
    } else {
        ErrorKind::Query
    };
    let hint = missing_table(&message).map(|name| {
        let short = name.rsplit('.').next().unwrap_or(name);
        let near = nearest(short, tables.iter().map(String::as_str));
        (
            format!("table '{short}' not found"),
            near.map_or_else(
                || format!("tables and views are: {}", tables.join(", ")),
                |near| format!("did you mean '{near}'?"),
            ),
        )
    });
    let (message, hint) = match hint {
        Some((message, hint)) => (message, Some(hint)),
        None => (lower_first(&message), None),
    };
    let mut out = QueryError::new(kind, origin, message);
    if let Some(line) = line {
        out = out.at_line(line);
    }
    if let Some(hint) = hint {
        out = out.with_hint(hint);
    }
    out
}

fn unreadable(error: &DataFusionError) -> bool {
    match error {
        DataFusionError::ParquetError(_)
        | DataFusionError::ObjectStore(_)
        | DataFusionError::IoError(_) => true,
        DataFusionError::ArrowError(error, _) => matches!(
            **error,
            ArrowError::IoError(..) | ArrowError::ParquetError(_) | ArrowError::ExternalError(_)
        ),
        DataFusionError::External(error) => error.is::<std::io::Error>(),
        _ => false,
    }
}

fn missing_table(message: &str) -> Option<&str> {
    let rest = message.strip_prefix("table '")?;
    rest.split_once("' not found").map(|(name, _)| name)
}

fn line_in(message: &str) -> Option<usize> {
    let (_, rest) = message.split_once("Line: ")?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), chars.clone().next()) {
        // An acronym keeps its capitals.
        (Some(first), Some(second)) if second.is_lowercase() => {
            first.to_lowercase().chain(chars).collect()
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_suggested_and_far_ones_are_not() {
        let names = ["steps", "episodes", "tool_calls"];
        assert_eq!(nearest("step", names), Some("steps"));
        assert_eq!(nearest("toolcalls", names), Some("tool_calls"));
        assert_eq!(nearest("rewards", names), None);
    }

    #[test]
    fn edit_distance_counts_single_edits() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("abc", "abc"), 0);
    }
}
