//! Takes the records out of one large JSON object or list without trusting it to be whole.
//!
//! A strict parser gives up on the whole file at the first bad byte. Here each record's extent is found by its brackets, then
//! the record is parsed strictly on its own. Where that fails, reading goes on at the next place that looks like the start of a
//! record, so that one broken bracket costs one record.

use serde_json::Value;

/// One record, or why it could not be read.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The key in the object, or the index in the list, counted over good and bad records.
    pub key: String,
    /// The parsed record, or what was wrong with it.
    pub value: Result<Value, String>,
}

/// Splits a file into its records. `marker` is the first field of each record, by which a lost reader finds the next one.
pub fn split(bytes: &[u8], marker: &str) -> Vec<Record> {
    let mut splitter = Splitter {
        bytes,
        marker,
        at: 0,
        keyed: false,
        found: Vec::new(),
    };
    splitter.run();
    splitter.found
}

struct Splitter<'a> {
    bytes: &'a [u8],
    marker: &'a str,
    at: usize,
    keyed: bool,
    found: Vec<Record>,
}

impl Splitter<'_> {
    fn run(&mut self) {
        if self.bytes.starts_with(b"\xef\xbb\xbf") {
            self.at = 3;
        }
        self.skip_space();
        match self.bytes.get(self.at) {
            Some(b'{') => self.keyed = true,
            Some(b'[') => {}
            _ => {
                self.found.push(Record {
                    key: "0".to_owned(),
                    value: Err("neither a JSON object nor a list".to_owned()),
                });
                return;
            }
        }
        self.at += 1;
        loop {
            self.skip_space();
            match self.bytes.get(self.at) {
                None => {
                    if self.found.last().is_none_or(|r| r.value.is_ok()) {
                        self.push_unkeyed("the file ends before its closing bracket".to_owned());
                    }
                    return;
                }
                Some(b'}' | b']') => {
                    self.at += 1;
                    self.skip_space();
                    if self.at == self.bytes.len() {
                        return;
                    }
                    self.push_unkeyed("a closing bracket before the end of the file".to_owned());
                    let Some(next) = self.next_start(self.at) else {
                        return;
                    };
                    self.at = next;
                }
                Some(b',') => self.at += 1,
                Some(_) => self.record(),
            }
        }
    }

    fn push_unkeyed(&mut self, problem: String) {
        self.found.push(Record {
            key: self.found.len().to_string(),
            value: Err(problem),
        });
    }

    fn skip_space(&mut self) {
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    /// One entry at `self.at`; afterwards `self.at` is past it, or at the next record's start.
    fn record(&mut self) {
        let start = self.at;
        let key = if self.keyed {
            self.key()
        } else {
            Some(self.found.len().to_string())
        };
        let Some(key) = key else {
            self.push_unkeyed("no key before the record".to_owned());
            self.resume_after(start, self.bytes.len());
            return;
        };
        let value_start = self.at;
        let end = self.extent(value_start);
        let slice = &self.bytes[value_start..end.unwrap_or(self.bytes.len())];
        let value = match end {
            None => Err("the file ends in the middle of the record".to_owned()),
            Some(_) => std::str::from_utf8(slice)
                .map_err(|e| format!("not UTF-8: {e}"))
                .and_then(|text| {
                    serde_json::from_str(text).map_err(|e| format!("not valid JSON: {e}"))
                }),
        };
        let failed = value.is_err();
        self.found.push(Record { key, value });
        if failed {
            self.resume_after(value_start, end.unwrap_or(self.bytes.len()));
        } else {
            self.at = end.unwrap_or(self.bytes.len());
        }
    }

    /// Reads `"key":` and leaves `self.at` at the value.
    fn key(&mut self) -> Option<String> {
        let end = self.string_end(self.at)?;
        let key = serde_json::from_slice(&self.bytes[self.at..end]).ok()?;
        self.at = end;
        self.skip_space();
        (self.bytes.get(self.at) == Some(&b':')).then_some(())?;
        self.at += 1;
        self.skip_space();
        Some(key)
    }

    /// One past the closing quote of the string that starts at `at`.
    fn string_end(&self, at: usize) -> Option<usize> {
        (self.bytes.get(at) == Some(&b'"')).then_some(())?;
        let mut i = at + 1;
        loop {
            match self.bytes.get(i)? {
                b'\\' => i += 2,
                b'"' => return Some(i + 1),
                _ => i += 1,
            }
        }
    }

    /// One past the end of the value that starts at `at`, by its brackets.
    fn extent(&self, at: usize) -> Option<usize> {
        let (mut depth, mut i) = (0usize, at);
        loop {
            match self.bytes.get(i)? {
                b'"' => i = self.string_end(i)?,
                b'{' | b'[' => {
                    depth += 1;
                    i += 1;
                }
                b'}' | b']' | b',' if depth == 0 => return Some(i),
                b'}' | b']' => {
                    depth -= 1;
                    i += 1;
                    if depth == 0 {
                        return Some(i);
                    }
                }
                _ => i += 1,
            }
        }
    }

    /// Goes on at the next start of a record after `start`: if that lies within the bad record's extent, the bad one had
    /// swallowed it; else the next entry follows the extent as usual.
    fn resume_after(&mut self, start: usize, end: usize) {
        self.at = self.next_start(start + 1).map_or(end, |next| next.min(end));
    }

    /// Where the next record starts: `{` and the marker, with `"digits":` before it in an object.
    fn next_start(&self, from: usize) -> Option<usize> {
        let marker = format!("\"{}\"", self.marker);
        let mut searched = from;
        loop {
            let at = searched + find(&self.bytes[searched..], marker.as_bytes())?;
            let start = self.back_to(at, b'{').and_then(|brace| {
                if self.keyed {
                    self.back_over_key(brace)
                } else {
                    Some(brace)
                }
            });
            if let Some(start) = start.filter(|s| *s >= from) {
                return Some(start);
            }
            searched = at + marker.len();
        }
    }

    /// The place of `byte` if only white space lies between it and `at`.
    fn back_to(&self, at: usize, byte: u8) -> Option<usize> {
        let place = self.bytes[..at]
            .iter()
            .rposition(|b| !b.is_ascii_whitespace())?;
        (self.bytes[place] == byte).then_some(place)
    }

    /// The place of the opening quote of `"digits":` before `brace`.
    fn back_over_key(&self, brace: usize) -> Option<usize> {
        let colon = self.back_to(brace, b':')?;
        let close = self.back_to(colon, b'"')?;
        let digits = self.bytes[..close]
            .iter()
            .rposition(|b| !b.is_ascii_digit())?;
        (self.bytes[digits] == b'"' && digits + 1 < close).then_some(digits)
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(text: &str) -> Vec<(String, bool)> {
        split(text.as_bytes(), "m")
            .into_iter()
            .map(|r| (r.key, r.value.is_ok()))
            .collect()
    }

    fn expect(pairs: &[(&str, bool)]) -> Vec<(String, bool)> {
        pairs.iter().map(|(k, ok)| ((*k).to_owned(), *ok)).collect()
    }

    #[test]
    fn whole_files_give_every_record() {
        assert_eq!(
            summary(r#"{"0": {"m": 1, "s": "a } \" ,"}, "7": {"m": [2]}}"#),
            expect(&[("0", true), ("7", true)])
        );
        assert_eq!(
            summary("\u{feff} [ {\"m\": 1} , {\"m\": 2} ]\n"),
            expect(&[("0", true), ("1", true)])
        );
        assert_eq!(summary("{}"), expect(&[]));
        assert_eq!(summary("[]"), expect(&[]));
    }

    #[test]
    fn a_cut_off_file_loses_its_last_record_only() {
        assert_eq!(
            summary(r#"{"0": {"m": 1}, "1": {"m": 2, "s": "ab"#),
            expect(&[("0", true), ("1", false)])
        );
        assert_eq!(
            summary(r#"[{"m": 1}, {"m": 2"#),
            expect(&[("0", true), ("1", false)])
        );
        assert_eq!(
            summary(r#"[{"m": 1}, "#),
            expect(&[("0", true), ("1", false)])
        );
    }

    #[test]
    fn a_value_json_does_not_know_costs_one_record() {
        assert_eq!(
            summary(r#"{"0": {"m": NaN}, "1": {"m": 2}}"#),
            expect(&[("0", false), ("1", true)])
        );
        assert_eq!(
            summary(r#"[{"m": NaN}, {"m": 2}]"#),
            expect(&[("0", false), ("1", true)])
        );
    }

    #[test]
    fn a_broken_bracket_or_quote_costs_one_record() {
        assert_eq!(
            summary(r#"{"0": {"m": [1}, "1": {"m": 2}, "2": {"m": 3}}"#),
            expect(&[("0", false), ("1", true), ("2", true)])
        );
        assert_eq!(
            summary(r#"{"0": {"m": "x}, "1": {"m": 2}, "2": {"m": 3}}"#),
            expect(&[("0", false), ("1", true), ("2", true)])
        );
        assert_eq!(
            summary(r#"[{"m": {1}, {"m": 2}, {"m": 3}]"#),
            expect(&[("0", false), ("1", true), ("2", true)])
        );
    }

    #[test]
    fn a_bracket_too_many_does_not_end_the_file() {
        assert_eq!(
            summary(r#"{"0": {"m": 1}, "s": 2}, "1": {"m": 2}}"#),
            expect(&[("0", true), ("s", true), ("2", false), ("1", true)])
        );
        assert_eq!(
            summary(r#"[{"m": 1}] trailing"#),
            expect(&[("0", true), ("1", false)])
        );
    }

    #[test]
    fn bytes_that_are_not_text_cost_one_record() {
        let found = split(b"[{\"m\": \"\xff\"}, {\"m\": 2}]", "m");
        assert!(found[0].value.as_ref().unwrap_err().contains("UTF-8"));
        assert!(found[1].value.is_ok());
    }

    #[test]
    fn text_that_is_no_json_is_a_problem_not_a_loop() {
        assert_eq!(summary("hello"), expect(&[("0", false)]));
        assert_eq!(summary(""), expect(&[("0", false)]));
        assert_eq!(summary("{ 5, 6 }").len(), 1);
        assert_eq!(summary(r#"{"a" 5, "m": {"m": 1}}"#).len(), 1);
    }
}
