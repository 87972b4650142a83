//! Which generated tokens are call syntax, which are the model's choice, and which are plain text.

use std::ops::Range;

use drillyard_schema::table::LossSpan;

use crate::parse::{CLOSE, OPEN, regions, split_reasoning};
use crate::{Tokenizer, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Format,
    Action,
}

impl Kind {
    const fn label(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Format => "action_format",
            Self::Action => "action",
        }
    }
}

/// The spans of a turn's generated ids, in order, without gaps. `action_format` is what every call looks like (tags, brackets, keys,
/// the end of the turn after a call), `action` what the model chose: the tool's name and the arguments' values. A token with a part
/// in both counts as `action`. A damaged call counts as `action` as a whole, its tags apart.
pub fn spans(tokenizer: &Tokenizer, ids: &[i32]) -> Vec<LossSpan> {
    let (text, ends) = tokenizer.pieces(ids);
    let (marks, calls_end) = marks(&text);
    let mut spans: Vec<LossSpan> = Vec::new();
    let mut start = 0;
    for (i, (id, end)) in ids.iter().zip(ends).enumerate() {
        let end_of_turn = i + 1 == ids.len()
            && calls_end.is_some_and(|at| start >= at)
            && tokenizer.is_special(*id);
        let kind = if end_of_turn {
            Kind::Format
        } else {
            kind_of(&marks, start..end.max(start + 1))
        };
        match spans.last_mut() {
            Some(last) if last.kind == kind.label() => last.end = i as i32 + 1,
            _ => spans.push(LossSpan {
                start: i as i32,
                end: i as i32 + 1,
                kind: kind.label().to_owned(),
            }),
        }
        start = end;
    }
    spans
}

fn kind_of(marks: &[(Range<usize>, Kind)], token: Range<usize>) -> Kind {
    let touches = |kind| {
        marks
            .iter()
            .any(|(range, k)| *k == kind && range.start < token.end && token.start < range.end)
    };
    if touches(Kind::Action) {
        Kind::Action
    } else if touches(Kind::Format) {
        Kind::Format
    } else {
        Kind::Text
    }
}

/// The stretches of a turn that are calls (as format) and inside them what was chosen (as action), and where the last call ends.
fn marks(text: &str) -> (Vec<(Range<usize>, Kind)>, Option<usize>) {
    let (_, body) = split_reasoning(text);
    let shift = text.len() - body.len();
    let mut marks = Vec::new();
    let mut calls_end = None;
    for region in regions(body) {
        let moved = |range: Range<usize>| range.start + shift..range.end + shift;
        calls_end = Some(region.range.end + shift);
        if region.strict.is_empty() {
            let inner = body[region.range.clone()]
                .trim_start_matches(OPEN)
                .trim_end_matches(CLOSE);
            let start = if body[region.range.clone()].starts_with(OPEN) {
                region.range.start + OPEN.len()
            } else {
                region.range.start
            };
            marks.push((moved(start..start + inner.len()), Kind::Action));
        }
        for range in &region.strict {
            for member in json::members(&body[range.clone()]) {
                let value = range.start + member.value.start..range.start + member.value.end;
                for leaf in json::leaves(body, value) {
                    marks.push((moved(leaf), Kind::Action));
                }
            }
        }
        marks.push((moved(region.range), Kind::Format));
    }
    (marks, calls_end)
}
