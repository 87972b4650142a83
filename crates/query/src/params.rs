//! Values for `$name` placeholders.

use std::collections::{BTreeMap, HashMap};

use datafusion::common::{ParamValues, ScalarValue};

/// The value of a placeholder.
#[derive(Debug, Clone, PartialEq)]
pub enum ParamValue {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    Text(String),
}

impl ParamValue {
    /// Reads a value as a header writes it: `3`, `0.5`, `true`, or text, with or without quotes.
    pub fn parse(text: &str) -> Self {
        let text = text.trim();
        if let Ok(value) = text.parse() {
            return Self::Int(value);
        }
        if let Ok(value) = text.parse() {
            return Self::Float(value);
        }
        if let Ok(value) = text.parse() {
            return Self::Bool(value);
        }
        let unquoted = text
            .strip_prefix('\'')
            .and_then(|t| t.strip_suffix('\''))
            .unwrap_or(text);
        Self::Text(unquoted.to_owned())
    }

    fn to_scalar(&self) -> ScalarValue {
        match self {
            Self::Int(value) => ScalarValue::Int64(Some(*value)),
            Self::Float(value) => ScalarValue::Float64(Some(*value)),
            Self::Bool(value) => ScalarValue::Boolean(Some(*value)),
            Self::Text(value) => ScalarValue::Utf8(Some(value.clone())),
        }
    }
}

pub(crate) fn to_param_values(params: &BTreeMap<String, ParamValue>) -> ParamValues {
    let values: HashMap<_, _> = params
        .iter()
        .map(|(name, value)| (name.clone(), value.to_scalar().into()))
        .collect();
    ParamValues::Map(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_by_their_looks() {
        assert_eq!(ParamValue::parse(" 3 "), ParamValue::Int(3));
        assert_eq!(ParamValue::parse("0.5"), ParamValue::Float(0.5));
        assert_eq!(ParamValue::parse("true"), ParamValue::Bool(true));
        assert_eq!(ParamValue::parse("'3'"), ParamValue::Text("3".into()));
        assert_eq!(
            ParamValue::parse("held_out"),
            ParamValue::Text("held_out".into())
        );
    }
}
