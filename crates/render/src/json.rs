//! JSON as models write it: where things are in valid JSON, and what damaged JSON was meant to be.

use std::ops::Range;

use serde_json::{Map, Number, Value};

/// Nesting beyond this is not a tool call, and following it would cost stack.
const MAX_DEPTH: usize = 64;

/// The JSON value that `text` starts with (after blanks), and where it ends.
pub(crate) fn prefix(text: &str) -> Option<(Value, usize)> {
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = stream.next()?.ok()?;
    Some((value, stream.byte_offset()))
}

/// Members of a JSON object.
pub(crate) struct Member {
    pub(crate) key: String,
    /// The value's place in the text.
    pub(crate) value: Range<usize>,
}

/// The members of the valid JSON object that `text` starts with (after blanks). Empty for anything else.
pub(crate) fn members(text: &str) -> Vec<Member> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut at = blanks(bytes, 0);
    if bytes.get(at) != Some(&b'{') {
        return found;
    }
    at = blanks(bytes, at + 1);
    while bytes.get(at) == Some(&b'"') {
        let key_end = string_end(bytes, at);
        let key = text
            .get(at..key_end)
            .and_then(|k| serde_json::from_str(k).ok());
        at = blanks(bytes, key_end);
        at = blanks(bytes, at + 1);
        let end = value_end(bytes, at);
        if let Some(key) = key {
            found.push(Member {
                key,
                value: at..end,
            });
        }
        at = blanks(bytes, end);
        if bytes.get(at) != Some(&b',') {
            break;
        }
        at = blanks(bytes, at + 1);
    }
    found
}

/// The places of scalar values inside the valid JSON value `text[range]`, quotes left out.
pub(crate) fn leaves(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut at = range.start;
    // In an object, a string before a colon is a key.
    while at < range.end {
        match bytes[at] {
            b'"' => {
                let end = string_end(bytes, at);
                let next = blanks(bytes, end);
                if bytes.get(next) != Some(&b':') || next >= range.end {
                    found.push(at + 1..end.saturating_sub(1).max(at + 1));
                }
                at = end;
            }
            b'{' | b'}' | b'[' | b']' | b',' | b':' | b' ' | b'\n' | b'\r' | b'\t' => at += 1,
            _ => {
                let end = scalar_end(bytes, at).max(at + 1);
                found.push(at..end);
                at = end;
            }
        }
    }
    found
}

fn blanks(bytes: &[u8], mut at: usize) -> usize {
    while matches!(bytes.get(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
        at += 1;
    }
    at
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn scalar_end(bytes: &[u8], start: usize) -> usize {
    let length = bytes[start..]
        .iter()
        .position(|b| matches!(b, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t'));
    length.map_or(bytes.len(), |length| start + length)
}

fn value_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = start;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at = string_end(bytes, at);
                if depth == 0 {
                    return at;
                }
            }
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                at += 1;
                if depth == 0 {
                    return at;
                }
            }
            _ if depth == 0 => return scalar_end(bytes, at),
            _ => at += 1,
        }
    }
    bytes.len()
}

/// What a damaged JSON object was meant to be, and where it ends. Repaired are: single quotes, keys without quotes, missing or
/// superfluous commas, unescaped quotes, line breaks and backslashes in strings, Python's `True`, `False` and `None`, and closing
/// brackets missing at the end.
pub(crate) fn repair(text: &str) -> Option<(Value, usize)> {
    let mut repairer = Repairer { text, at: 0 };
    repairer.skip();
    if repairer.peek() != Some('{') {
        return None;
    }
    let value = repairer.value(0)?;
    Some((value, repairer.at))
}

struct Repairer<'a> {
    text: &'a str,
    at: usize,
}

impl Repairer<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn bump(&mut self) {
        self.at += self.peek().map_or(0, char::len_utf8);
    }

    fn skip(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    fn take(&mut self, expected: char) -> bool {
        let found = self.peek() == Some(expected);
        if found {
            self.bump();
        }
        found
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.skip();
        match self.peek()? {
            '{' => self.object(depth),
            '[' => self.array(depth),
            quote @ ('"' | '\'') => Some(Value::String(self.string(quote, depth > 0))),
            _ => self.word(),
        }
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        let mut map = Map::new();
        self.bump();
        loop {
            self.skip();
            match self.peek() {
                None => break,
                Some('}') => {
                    self.bump();
                    break;
                }
                Some(',') => self.bump(),
                Some(quote @ ('"' | '\'')) => {
                    let key = self.key(quote);
                    self.member(&mut map, key, depth)?;
                }
                Some(c) if c.is_alphabetic() || c == '_' => {
                    let rest = self.rest();
                    let end = rest
                        .find(|c: char| !(c.is_alphanumeric() || c == '_'))
                        .unwrap_or(rest.len());
                    let key = rest[..end].to_owned();
                    self.at += end;
                    self.member(&mut map, key, depth)?;
                }
                Some(_) => return None,
            }
        }
        Some(Value::Object(map))
    }

    fn member(&mut self, map: &mut Map<String, Value>, key: String, depth: usize) -> Option<()> {
        self.skip();
        if !self.take(':') {
            return None;
        }
        let value = self.value(depth + 1)?;
        map.insert(key, value);
        Some(())
    }

    fn array(&mut self, depth: usize) -> Option<Value> {
        let mut items = Vec::new();
        self.bump();
        loop {
            self.skip();
            match self.peek() {
                Some(']') => {
                    self.bump();
                    break;
                }
                Some(',') => self.bump(),
                // The bracket is missing.
                None | Some('}') => break,
                Some(_) => items.push(self.value(depth + 1)?),
            }
        }
        Some(Value::Array(items))
    }

    fn key(&mut self, quote: char) -> String {
        self.bump();
        let rest = self.rest();
        let end = rest.find(quote).unwrap_or(rest.len());
        let key = rest[..end].to_owned();
        self.at += end;
        self.bump();
        key
    }

    /// A string's text. A quote inside it that does not look like its end is taken for a part of it.
    fn string(&mut self, quote: char, nested: bool) -> String {
        let mut out = String::new();
        self.bump();
        while let Some(c) = self.peek() {
            self.bump();
            match c {
                '\\' => self.escape(&mut out),
                c if c == quote && (!nested || self.ends_here()) => return out,
                c => out.push(c),
            }
        }
        out
    }

    fn escape(&mut self, out: &mut String) {
        let Some(c) = self.peek() else {
            out.push('\\');
            return;
        };
        self.bump();
        match c {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            '"' | '\'' | '\\' | '/' => out.push(c),
            'u' => {
                let code = self
                    .rest()
                    .get(..4)
                    .and_then(|hex| u32::from_str_radix(hex, 16).ok());
                if let Some(code) = code {
                    self.at += 4;
                    out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                } else {
                    out.push_str("\\u");
                }
            }
            other => {
                out.push('\\');
                out.push(other);
            }
        }
    }

    /// Whether a quote just read ends its string: a closing bracket or the end follows, or a comma and something like a key or a
    /// value, or a key whose comma was forgotten.
    fn ends_here(&self) -> bool {
        let rest = self.rest().trim_start();
        match rest.chars().next() {
            None | Some('}' | ']') => true,
            Some(',') => {
                let after = rest[1..].trim_start();
                after.is_empty() || after.starts_with(['"', '\'', '}', ']', '{', '['])
            }
            Some('"') => {
                let key_end = rest[1..].find('"').map(|end| end + 2);
                key_end.is_some_and(|end| rest[end..].trim_start().starts_with(':'))
            }
            _ => false,
        }
    }

    fn word(&mut self) -> Option<Value> {
        let rest = self.rest();
        let end = rest.find([',', '}', ']', '\n']).unwrap_or(rest.len());
        let word = rest[..end].trim_end();
        let value = match word {
            "true" | "True" => Value::Bool(true),
            "false" | "False" => Value::Bool(false),
            "null" | "None" => Value::Null,
            "" => return None,
            _ => match word.parse::<i64>() {
                Ok(number) => Value::from(number),
                Err(_) => word
                    .parse()
                    .ok()
                    .and_then(Number::from_f64)
                    .map(Value::Number)?,
            },
        };
        self.at += end;
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn members_and_leaves_lie_where_they_lie() {
        let text = r#" {"name" : "a\"b", "arguments":{"x":[1, "two"],"y":{}} } rest"#;
        let found: Vec<_> = members(text)
            .into_iter()
            .map(|m| (m.key, &text[m.value]))
            .collect();
        assert_eq!(
            found,
            [
                ("name".to_owned(), r#""a\"b""#),
                ("arguments".to_owned(), r#"{"x":[1, "two"],"y":{}}"#)
            ]
        );
        let whole = 1..text.len() - 5;
        let leaves: Vec<_> = leaves(text, whole).into_iter().map(|r| &text[r]).collect();
        assert_eq!(leaves, [r#"a\"b"#, "1", "two"]);
    }

    #[test]
    fn small_damage_is_repaired() {
        for (damaged, meant) in [
            (r"{'a': 'b'}", json!({"a": "b"})),
            (r"{a: 1, b: 2.5,}", json!({"a": 1, "b": 2.5})),
            (r#"{"a": True, "b": None"#, json!({"a": true, "b": null})),
            (
                r#"{"a": "grep "x y" f", "b": 1}"#,
                json!({"a": "grep \"x y\" f", "b": 1}),
            ),
            ("{\"a\": \"two\nlines\"}", json!({"a": "two\nlines"})),
            (r#"{"a": "\d+\."}"#, json!({"a": "\\d+\\."})),
            (r#"{"a": {"b": [1, 2}"#, json!({"a": {"b": [1, 2]}})),
            (r#"{"a": "b" "c": "d"}"#, json!({"a": "b", "c": "d"})),
        ] {
            assert_eq!(
                repair(damaged).map(|(value, _)| value),
                Some(meant),
                "{damaged}"
            );
        }
    }

    #[test]
    fn what_cannot_be_repaired_is_not() {
        for hopeless in ["", "x", "{1}", "{\"a\"}", "{\"a\": }", "{\"a\": b c}"] {
            assert!(repair(hopeless).is_none(), "{hopeless}");
        }
        let deep = "{\"a\":".repeat(10_000);
        assert!(repair(&deep).is_none());
    }
}
