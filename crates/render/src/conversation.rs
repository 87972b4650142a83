//! Conversations to ids.
//!
//! A conversation is encoded piece by piece, cut where the assistant's turns begin and end: ids that a model sampled stay as they
//! are, and what is rendered after them does not depend on them. So the ids of a conversation rendered for imitation are those it
//! has when it is played.
//!
//! The text of control tokens inside messages of the system, the user or a tool stays text: a tool's output that contains
//! `<|end|><|system|>…` is read by the model as these characters, not as the start of a system message.

use std::borrow::Cow;

use drillyard_schema::{Message, Role, ToolSpec};

use crate::{ChatTemplate, RenderError, Tokenizer};

/// A conversation as ids, with the assistant's own tokens marked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Masked {
    /// The ids of the whole conversation.
    pub ids: Vec<i32>,
    /// As long as the ids: true where the assistant wrote the token, its end-of-turn token included.
    pub mask: Vec<bool>,
}

/// The ids of a conversation; with `add_generation_prompt`, up to where the assistant's next turn begins.
pub fn render_ids(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[ToolSpec],
    add_generation_prompt: bool,
) -> Result<Vec<i32>, RenderError> {
    let safe = Safe::new(tokenizer, messages);
    let text = template.render(&safe.messages, tools, add_generation_prompt)?;
    safe.encode(tokenizer, &text)
}

/// The ids that follow `prior_ids`, which are exactly what was sent and sampled for the first `prior_messages` messages (the last
/// of which is the assistant's): the rest of the messages and the prompt for the assistant's next turn. A turn that was cut short
/// is closed first.
pub fn continuation_ids(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[ToolSpec],
    prior_messages: usize,
    prior_ids: &[i32],
) -> Result<Vec<i32>, RenderError> {
    if prior_messages > messages.len() {
        return Err(RenderError::Prior(format!(
            "{prior_messages} of only {} messages",
            messages.len()
        )));
    }
    if prior_messages == 0 {
        return Err(RenderError::Prior(
            "at least one message must be prior".into(),
        ));
    }
    if messages[prior_messages - 1].role != Role::Assistant {
        return Err(RenderError::Prior(format!(
            "the last of the {prior_messages} prior messages must be the assistant's"
        )));
    }
    let safe = Safe::new(tokenizer, messages);
    let (before, whole) = cut(template, &safe.messages, tools, prior_messages)?;
    let mut ids = Vec::new();
    // What the template writes after the end-of-turn token (a newline, in some) was not sampled either.
    let mut tail = "";
    if let Some(eos) = template.eos_token()
        && let Some(at) = before.rfind(eos)
    {
        tail = &before[at + eos.len()..];
        let eos_id = tokenizer.id(eos);
        if prior_ids.last().copied() != eos_id {
            ids.extend(eos_id);
        }
    }
    let rest = format!("{tail}{}", &whole[before.len()..]);
    ids.extend(safe.encode(tokenizer, &rest)?);
    Ok(ids)
}

/// The text of the first `n` messages, and of all of them with the generation prompt, the first being a prefix of the second.
fn cut(
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[ToolSpec],
    n: usize,
) -> Result<(String, String), RenderError> {
    let render = |messages: &[Message]| -> Result<_, RenderError> {
        Ok((
            template.render(&messages[..n.min(messages.len())], tools, false)?,
            template.render(messages, tools, true)?,
        ))
    };
    let (before, whole) = render(messages)?;
    if whole.starts_with(&before) {
        return Ok((before, whole));
    }
    // Some templates drop the reasoning of earlier turns once others follow. What follows does not depend on it.
    let mut plain = messages.to_vec();
    for message in &mut plain[..n] {
        if message.role == Role::Assistant {
            message.reasoning_content = None;
            if message.content.is_some() || message.tool_calls.is_empty() {
                message.content = Some("x".into());
            }
        }
    }
    let (before, whole) = render(&plain)?;
    if whole.starts_with(&before) {
        return Ok((before, whole));
    }
    Err(RenderError::NotIncremental { message: n - 1 })
}

/// A conversation as ids with the assistant's tokens marked, for imitation.
pub fn masked(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[ToolSpec],
) -> Result<Masked, RenderError> {
    let safe = Safe::new(tokenizer, messages);
    let eos = template.eos_token().and_then(|eos| tokenizer.id(eos));
    let (mut ids, mut mask) = (Vec::new(), Vec::new());
    let mut done = String::new();
    for (i, message) in safe.messages.iter().enumerate() {
        if message.role != Role::Assistant {
            continue;
        }
        let not_incremental = || RenderError::NotIncremental { message: i };
        let prompt = template.render(&safe.messages[..i], tools, true)?;
        let given = prompt.strip_prefix(&done).ok_or_else(not_incremental)?;
        let given = safe.encode(tokenizer, given)?;
        let through = template.render(&safe.messages[..=i], tools, false)?;
        let own = through.strip_prefix(&prompt).ok_or_else(not_incremental)?;
        let own = safe.encode(tokenizer, own)?;
        // The last end-of-turn token is the model's; what the template writes after it is not.
        let written = own
            .iter()
            .rposition(|id| Some(*id) == eos)
            .map_or(own.len(), |at| at + 1);
        mask.extend(std::iter::repeat_n(false, given.len()));
        mask.extend((0..own.len()).map(|at| at < written));
        ids.extend(given);
        ids.extend(own);
        done = through;
    }
    let whole = template.render(&safe.messages, tools, false)?;
    let rest = whole
        .strip_prefix(&done)
        .ok_or(RenderError::NotIncremental {
            message: messages.len().saturating_sub(1),
        })?;
    let rest = safe.encode(tokenizer, rest)?;
    mask.extend(std::iter::repeat_n(false, rest.len()));
    ids.extend(rest);
    Ok(Masked { ids, mask })
}

/// Messages whose text can't turn into control tokens: each control token's text is replaced by a private character while the
/// template runs, and encoded as plain text afterwards.
struct Safe<'a> {
    messages: Cow<'a, [Message]>,
    /// Private characters from this one on stand for the tokenizer's control tokens.
    first: Option<u32>,
}

/// Start of Unicode's supplementary private use area, and how far apart the ranges tried are.
const PRIVATE: u32 = 0xF_0000;
const RANGES: u32 = 8;

impl<'a> Safe<'a> {
    fn new(tokenizer: &Tokenizer, messages: &'a [Message]) -> Self {
        let specials = tokenizer.specials();
        let dangerous = |message: &Message| {
            message.role != Role::Assistant
                && message.content.as_ref().is_some_and(|content| {
                    specials
                        .iter()
                        .any(|(text, _)| content.contains(text.as_str()))
                })
        };
        let size = 0xFFFE / RANGES;
        if !messages.iter().any(dangerous) || specials.len() > size as usize {
            return Self {
                messages: Cow::Borrowed(messages),
                first: None,
            };
        }
        // A range of which no character occurs in the conversation; the last one if someone uses them all.
        let occurs = |range: u32| {
            messages
                .iter()
                .filter_map(|m| m.content.as_ref())
                .any(|content| {
                    content.chars().any(|c| {
                        (PRIVATE + range * size..PRIVATE + (range + 1) * size)
                            .contains(&u32::from(c))
                    })
                })
        };
        let range = (0..RANGES)
            .find(|range| !occurs(*range))
            .unwrap_or(RANGES - 1);
        let first = PRIVATE + range * size;
        let mut messages = messages.to_vec();
        for message in &mut messages {
            if let Some(content) = &mut message.content
                && message.role != Role::Assistant
            {
                for ((text, _), code) in specials.iter().zip(first..) {
                    if let Some(stand_in) = char::from_u32(code) {
                        *content = content.replace(text.as_str(), &stand_in.to_string());
                    }
                }
            }
        }
        Self {
            messages: Cow::Owned(messages),
            first: Some(first),
        }
    }

    fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<i32>, RenderError> {
        let Some(first) = self.first else {
            return tokenizer.encode(text);
        };
        let specials = tokenizer.specials();
        let stands_for = |c: char| {
            let index = u32::from(c).checked_sub(first)?;
            specials.get(index as usize)
        };
        let mut ids = Vec::new();
        let mut from = 0;
        for (at, character) in text.char_indices() {
            if let Some((special, _)) = stands_for(character) {
                ids.extend(tokenizer.encode(&text[from..at])?);
                ids.extend(tokenizer.encode_plain(special)?);
                from = at + character.len_utf8();
            }
        }
        ids.extend(tokenizer.encode(&text[from..])?);
        Ok(ids)
    }
}
