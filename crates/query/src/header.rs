//! The header block of a `.sql` file: the leading `-- key: value` lines.
//!
//! It is strict on purpose: a rule whose header has a typo would otherwise run with a default nobody chose. A value goes on in the next
//! line where that line starts with three or more spaces after the dashes.

use std::collections::BTreeMap;
use std::str::FromStr;

use drillyard_schema::FailReason;

use crate::error::{ErrorKind, QueryError};
use crate::explain::nearest;
use crate::params::ParamValue;

macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident => $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $($(#[$vmeta])* $variant,)* }

        impl $name {
            /// The word as headers and tables write it.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$variant),)*
                    other => Err(format!("'{other}' is not one of {}", [$($text),*].join(", "))),
                }
            }
        }
    };
}

words!(
    /// What a rule is about.
    Category {
        /// The form of what the model wrote.
        Format => "format",
        /// The order and sense of its actions.
        Logic => "logic",
        /// What came out, and whether that can be trusted.
        Result => "result",
        /// What it cost.
        Efficiency => "efficiency",
    }
);

words!(
    /// How much a finding weighs.
    Severity {
        /// A success with such a finding drops to the graded tier, and a run with too many of them stops.
        Block => "block",
        /// Lowers quality and weight, no more.
        Warn => "warn",
    }
);

words!(
    /// What a rule counts, and so what its denominator is.
    Grain {
        /// At most one row per episode.
        Episode => "episode",
        /// At most one row per step.
        Step => "step",
        /// Rows per tool call.
        Call => "call",
    }
);

/// What a rule costs and says.
#[derive(Debug, Clone, PartialEq)]
pub struct QaHeader {
    /// What it is about.
    pub category: Category,
    /// How much a finding weighs.
    pub severity: Severity,
    /// The share of an episode's quality that the rule takes, 0 to below 1; once per rule, however many findings.
    pub penalty: f64,
    /// The failure label it stands for, if any.
    pub fail_reason: Option<FailReason>,
    /// What it counts.
    pub grain: Grain,
}

/// What kind of file it is.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// A view that others build on.
    View,
    /// A rule: returns offending rows.
    Qa(QaHeader),
    /// A part of QA that is no rule: scores, counts.
    Score,
    /// A question about failures.
    Failure,
    /// A figure.
    Metric,
}

impl Kind {
    /// The word in the header.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::View => "view",
            Self::Qa(_) => "qa",
            Self::Score => "score",
            Self::Failure => "failure",
            Self::Metric => "metric",
        }
    }
}

/// The header of a `.sql` file.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// Its name: the file's stem without a leading underscore.
    pub id: String,
    /// One line for people.
    pub title: String,
    /// What kind of file it is.
    pub kind: Kind,
    /// Raised whenever results change.
    pub version: i32,
    /// What one row stands for.
    pub grain: String,
    /// The tables and views it reads, sorted.
    pub reads: Vec<String>,
    /// Why it exists.
    pub why: String,
    /// Defaults of its `$name` placeholders.
    pub params: BTreeMap<String, ParamValue>,
}

const KEYS: [&str; 12] = [
    "id",
    "title",
    "kind",
    "category",
    "severity",
    "version",
    "penalty",
    "fail_reason",
    "grain",
    "reads",
    "param",
    "why",
];

struct Lines<'a> {
    origin: &'a str,
    values: BTreeMap<&'static str, (usize, String)>,
    params: BTreeMap<String, ParamValue>,
    end: usize,
}

impl Header {
    /// Reads the header of `text`, the content of the file `origin` with the stem `stem`.
    pub fn parse(origin: &str, stem: &str, text: &str) -> Result<Self, QueryError> {
        let mut lines = Lines::read(origin, text)?;
        let id = lines.required("id")?;
        let expected = stem.trim_start_matches('_');
        if id != expected {
            return Err(lines.wrong(
                "id",
                format!("'{id}' differs from the file's name '{expected}'"),
            ));
        }
        if id.is_empty()
            || !id
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        {
            return Err(lines.wrong("id", "must be lower-case letters, digits and underscores"));
        }
        let title = lines.required("title")?;
        let version: i32 = lines.parsed("version")?;
        if version < 1 {
            return Err(lines.wrong("version", "must be 1 or more"));
        }
        let grain = lines.required("grain")?;
        let why = lines.required("why")?;
        let mut reads: Vec<String> = lines
            .required("reads")?
            .split(',')
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty() && name != "nothing")
            .collect();
        reads.sort();
        let kind = lines.required("kind")?;
        let kind = match kind.as_str() {
            "view" => Kind::View,
            "score" => Kind::Score,
            "failure" => Kind::Failure,
            "metric" => Kind::Metric,
            "qa" => Kind::Qa(QaHeader {
                category: lines.parsed("category")?,
                severity: lines.parsed("severity")?,
                penalty: lines.penalty()?,
                fail_reason: lines.optional("fail_reason")?,
                grain: lines.parsed("grain")?,
            }),
            other => {
                return Err(lines.wrong(
                    "kind",
                    format!("'{other}' is not one of view, qa, score, failure, metric"),
                ));
            }
        };
        if !matches!(kind, Kind::Qa(_)) {
            for key in ["category", "severity", "penalty", "fail_reason"] {
                if lines.values.contains_key(key) {
                    return Err(lines.wrong(key, "belongs to rules (kind: qa) only"));
                }
            }
        }
        Ok(Self {
            id,
            title,
            kind,
            version,
            grain,
            reads,
            why,
            params: std::mem::take(&mut lines.params),
        })
    }
}

impl<'a> Lines<'a> {
    fn read(origin: &'a str, text: &str) -> Result<Self, QueryError> {
        let mut lines = Self {
            origin,
            values: BTreeMap::new(),
            params: BTreeMap::new(),
            end: 1,
        };
        let mut open: Option<&'static str> = None;
        for (index, line) in text.lines().enumerate() {
            let number = index + 1;
            let Some(comment) = line.strip_prefix("--") else {
                break;
            };
            lines.end = number;
            if comment.starts_with("   ") {
                let Some((_, value)) = open.and_then(|key| lines.values.get_mut(key)) else {
                    return Err(lines.at(number, "goes on with a value that has not begun"));
                };
                value.push(' ');
                value.push_str(comment.trim());
                continue;
            }
            let Some((key, value)) = comment.trim().split_once(':') else {
                return Err(lines.at(
                    number,
                    "a header line must read '-- key: value' (an empty line ends the header)",
                ));
            };
            let (key, value) = (key.trim(), value.trim());
            let Some(&key) = KEYS.iter().find(|known| **known == key) else {
                let mut error = lines.at(number, format!("unknown header key '{key}'"));
                if let Some(near) = nearest(key, KEYS.iter().copied()) {
                    error = error.with_hint(format!("did you mean '{near}'?"));
                }
                return Err(error);
            };
            if value.is_empty() {
                return Err(lines.at(number, format!("header key '{key}' has no value")));
            }
            open = Some(key);
            if key == "param" {
                open = None;
                let Some((name, default)) = value.split_once('=') else {
                    return Err(lines.at(number, "a parameter must read 'name = default'"));
                };
                let default = ParamValue::parse(default);
                if lines
                    .params
                    .insert(name.trim().to_owned(), default)
                    .is_some()
                {
                    return Err(lines.at(number, format!("parameter '{}' twice", name.trim())));
                }
            } else if lines
                .values
                .insert(key, (number, value.to_owned()))
                .is_some()
            {
                return Err(lines.at(number, format!("header key '{key}' twice")));
            }
        }
        if lines.values.is_empty() {
            return Err(lines
                .at(1, "has no header")
                .with_hint("a .sql file starts with '-- id: …' lines; see sql/README.md"));
        }
        Ok(lines)
    }

    fn at(&self, line: usize, message: impl Into<String>) -> QueryError {
        QueryError::new(ErrorKind::Query, self.origin, message).at_line(line)
    }

    fn wrong(&self, key: &str, message: impl Into<String>) -> QueryError {
        let line = self.values.get(key).map_or(self.end, |(line, _)| *line);
        self.at(line, format!("header key '{key}': {}", message.into()))
    }

    fn required(&self, key: &str) -> Result<String, QueryError> {
        self.values
            .get(key)
            .map(|(_, value)| value.clone())
            .ok_or_else(|| self.at(self.end, format!("header lacks '{key}'")))
    }

    fn parsed<T: FromStr>(&self, key: &str) -> Result<T, QueryError>
    where
        T::Err: std::fmt::Display,
    {
        self.required(key)?
            .parse()
            .map_err(|e: T::Err| self.wrong(key, e.to_string()))
    }

    fn optional<T: FromStr>(&self, key: &str) -> Result<Option<T>, QueryError>
    where
        T::Err: std::fmt::Display,
    {
        if self.values.contains_key(key) {
            self.parsed(key).map(Some)
        } else {
            Ok(None)
        }
    }

    fn penalty(&self) -> Result<f64, QueryError> {
        let penalty: f64 = self.parsed("penalty")?;
        if (0.0..1.0).contains(&penalty) {
            Ok(penalty)
        } else {
            Err(self.wrong(
                "penalty",
                "must lie from 0 to below 1: a flaw lowers quality, it never deletes an episode",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "-- id: x\n-- title: T\n-- kind: qa\n-- category: logic\n-- severity: warn\n-- version: 2\n-- penalty: 0.1\n\
        -- fail_reason: loop\n-- grain: call\n-- reads: steps, episodes\n-- param: times = 3\n-- why: because\n--   of it\nSELECT 1\n";

    fn error(text: &str) -> String {
        Header::parse("f.sql", "x", text).unwrap_err().to_string()
    }

    #[test]
    fn a_good_header_is_read_whole() {
        let header = Header::parse("f.sql", "x", GOOD).unwrap();
        assert_eq!(header.version, 2);
        assert_eq!(header.reads, ["episodes", "steps"]);
        assert_eq!(header.why, "because of it");
        assert_eq!(header.params["times"], ParamValue::Int(3));
        let Kind::Qa(qa) = header.kind else {
            panic!("not a rule")
        };
        assert_eq!(qa.fail_reason, Some(FailReason::Loop));
        assert_eq!(qa.grain, Grain::Call);
    }

    #[test]
    fn mistakes_name_file_and_line() {
        assert_eq!(error("SELECT 1"), "f.sql:1: has no header");
        assert_eq!(
            error(&GOOD.replace("-- title: T\n", "")),
            "f.sql:12: header lacks 'title'"
        );
        assert_eq!(
            error(&GOOD.replace("severity: warn", "severity: bad")),
            "f.sql:5: header key 'severity': 'bad' is not one of block, warn"
        );
        assert!(error(&GOOD.replace("penalty: 0.1", "penalty: 1")).starts_with("f.sql:7: "));
        assert!(error(&GOOD.replace("id: x", "id: y")).contains("differs from the file's name"));
        assert!(error(&GOOD.replace("loop", "looop")).starts_with("f.sql:8: "));
        assert!(error(&GOOD.replace("-- version: 2", "-- version: 0")).starts_with("f.sql:6: "));
        assert!(
            error(&GOOD.replace("-- version: 2", "-- version: 2\n-- version: 3"))
                .contains("'version' twice")
        );
        assert!(error(&GOOD.replace("kind: qa", "kind: metric")).contains("belongs to rules"));
    }

    #[test]
    fn an_unknown_key_gets_a_suggestion() {
        let text = GOOD.replace("severity", "severty");
        let error = Header::parse("f.sql", "x", &text).unwrap_err();
        assert_eq!(error.to_string(), "f.sql:5: unknown header key 'severty'");
        assert_eq!(error.hint(), Some("did you mean 'severity'?"));
    }
}
