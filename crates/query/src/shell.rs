//! What an interactive shell needs from a session: names to list and to complete.

use crate::session::Session;

/// A table or view, for listings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name in SQL.
    pub name: String,
    /// `table` or `view`.
    pub kind: &'static str,
    /// One line about it; empty for tables.
    pub title: String,
    /// Its columns, in order.
    pub columns: Vec<String>,
}

/// The tables and views of a session, tables first.
pub fn tables(session: &Session) -> Vec<Listed> {
    session.listed()
}

const KEYWORDS: [&str; 30] = [
    "SELECT",
    "FROM",
    "WHERE",
    "GROUP BY",
    "ORDER BY",
    "LIMIT",
    "JOIN",
    "LEFT JOIN",
    "ON",
    "USING",
    "AS",
    "AND",
    "OR",
    "NOT",
    "NULL",
    "IS",
    "IN",
    "LIKE",
    "BETWEEN",
    "CASE",
    "WHEN",
    "THEN",
    "ELSE",
    "END",
    "DISTINCT",
    "HAVING",
    "WITH",
    "count",
    "DESCRIBE",
    "EXPLAIN",
];

/// Completions of the word that ends at byte `position` of `line`: where the word starts, and what may stand there, sorted.
/// After `name.` only that table's columns are offered.
pub fn complete(session: &Session, line: &str, position: usize) -> (usize, Vec<String>) {
    let before = line.get(..position).unwrap_or(line);
    let start = before
        .rfind(|c: char| !(c.is_alphanumeric() || c == '_' || c == '.'))
        .map_or(0, |at| {
            at + before[at..].chars().next().map_or(1, char::len_utf8)
        });
    let word = &before[start..];
    let listed = tables(session);
    if let Some((table, prefix)) = word.rsplit_once('.')
        && let Some(found) = listed.iter().find(|t| t.name == table)
    {
        let columns = found.columns.iter().filter(|c| c.starts_with(prefix));
        return (start + table.len() + 1, columns.cloned().collect());
    }
    if word.is_empty() {
        return (start, Vec::new());
    }
    let keywords = KEYWORDS
        .iter()
        .filter(|k| k.to_lowercase().starts_with(&word.to_lowercase()))
        .map(|k| (*k).to_owned());
    let names = listed
        .iter()
        .flat_map(|t| std::iter::once(&t.name).chain(&t.columns));
    let mut found: Vec<String> = names
        .filter(|name| name.starts_with(word))
        .cloned()
        .chain(keywords)
        .collect();
    found.sort();
    found.dedup();
    (start, found)
}
