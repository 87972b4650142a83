//! What can go wrong, said so that the reader can act on it.

use std::fmt;

use thiserror::Error;

/// The kind of an error: what an exit code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The SQL, a header or a parameter is wrong: whoever wrote it can put it right.
    Query,
    /// A file of the lake or of the SQL folder is missing or unreadable.
    Input,
    /// The result could not be written.
    Output,
    /// The machine refused something (threads, memory).
    Environment,
}

/// Why a query, a rule or a session failed.
#[derive(Debug, Error)]
#[error("{}{message}", place(.origin, *.line))]
pub struct QueryError {
    kind: ErrorKind,
    origin: String,
    line: Option<usize>,
    message: String,
    hint: Option<String>,
}

fn place(origin: &str, line: Option<usize>) -> String {
    match line {
        _ if origin.is_empty() => String::new(),
        Some(line) => format!("{origin}:{line}: "),
        None => format!("{origin}: "),
    }
}

impl QueryError {
    pub(crate) fn new(
        kind: ErrorKind,
        origin: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            origin: origin.into(),
            line: None,
            message: message.into(),
            hint: None,
        }
    }

    pub(crate) fn at_line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }

    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Where it happened: a file, or `query` for text given directly.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The line in the origin, from 1, where it is known.
    pub fn line(&self) -> Option<usize> {
        self.line
    }

    /// What to try, where something can be suggested.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

/// A file or rule that was set aside; the rest went on without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The file or rule.
    pub origin: String,
    /// What was wrong, with the place.
    pub message: String,
}

impl Problem {
    pub(crate) fn new(origin: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            origin: origin.into(),
            message: message.into(),
        }
    }
}

impl From<QueryError> for Problem {
    fn from(error: QueryError) -> Self {
        let hint = error
            .hint()
            .map(|h| format!(" (hint: {h})"))
            .unwrap_or_default();
        Self {
            origin: error.origin.clone(),
            message: format!("{error}{hint}"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
