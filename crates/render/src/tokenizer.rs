//! A Hugging Face tokenizer.

use std::collections::HashMap;

use camino::Utf8Path;
use drillyard_schema::ids::derive_id;
use serde_json::Value;

use crate::RenderError;

/// The file a tokenizer is read from.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Text to ids and back. Ids are `i32`, as the lake stores them.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The same, with the text of special tokens taken for ordinary text.
    plain: tokenizers::Tokenizer,
    specials: Vec<(String, i32)>,
    added: HashMap<i32, String>,
    byte_level: bool,
    hash: String,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a checkpoint folder.
    pub fn load(dir: &Utf8Path) -> Result<Self, RenderError> {
        let path = dir.join(TOKENIZER_FILE);
        let bytes = fs_err::read(&path)?;
        Self::from_bytes(&bytes).map_err(|error| RenderError::File {
            path,
            message: error.to_string(),
        })
    }

    /// A tokenizer from the content of a `tokenizer.json`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RenderError> {
        let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(failed)?;
        let description: Value =
            serde_json::from_slice(bytes).map_err(|e| RenderError::Tokenizer(e.to_string()))?;
        let mut plain = inner.clone();
        plain.set_encode_special_tokens(true);
        let (mut specials, mut added) = (Vec::new(), HashMap::new());
        for (id, token) in inner.get_added_tokens_decoder() {
            if token.special {
                specials.push((token.content.clone(), id as i32));
            }
            added.insert(id as i32, token.content);
        }
        specials.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(&b.0)));
        let text = String::from_utf8_lossy(bytes);
        Ok(Self {
            inner,
            plain,
            specials,
            added,
            byte_level: is_byte_level(&description["decoder"]),
            hash: derive_id(&["tokenizer", &text], 32),
        })
    }

    /// The ids of a text, the text of control tokens becoming those tokens. Nothing is added at the ends.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>, RenderError> {
        ids(&self.inner, text)
    }

    /// The ids of a text in which nothing is a control token.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<i32>, RenderError> {
        ids(&self.plain, text)
    }

    /// The text of ids, control tokens included. Ids outside the vocabulary are left out; bytes that are not UTF-8 are replaced.
    pub fn decode(&self, ids: &[i32]) -> Result<String, RenderError> {
        let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
        self.inner.decode(&ids, false).map_err(failed)
    }

    /// The id of a token given by its text.
    pub fn id(&self, token: &str) -> Option<i32> {
        self.inner.token_to_id(token).map(|id| id as i32)
    }

    /// How many ids there are, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Control tokens and their ids, longest first.
    pub fn specials(&self) -> &[(String, i32)] {
        &self.specials
    }

    /// Whether an id is a control token.
    pub fn is_special(&self, id: i32) -> bool {
        self.specials.iter().any(|(_, special)| *special == id)
    }

    /// 32 hexadecimal digits over the content of `tokenizer.json`.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The text of ids, and for each id where in the text it ends (bytes). A token that ends within a character ends at that
    /// character's start.
    pub fn pieces(&self, ids: &[i32]) -> (String, Vec<usize>) {
        if self.byte_level {
            return self.byte_level_pieces(ids);
        }
        // Without a byte-level vocabulary a token's text can depend on its neighbours, so prefixes are decoded.
        let ends = (1..=ids.len())
            .map(|n| self.decode(&ids[..n]).map_or(0, |text| text.len()))
            .collect();
        (self.decode(ids).unwrap_or_default(), ends)
    }

    fn byte_level_pieces(&self, ids: &[i32]) -> (String, Vec<usize>) {
        let mut bytes = Vec::new();
        let mut byte_ends = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(content) = self.added.get(id) {
                bytes.extend(content.as_bytes());
            } else {
                let token = self.inner.id_to_token(*id as u32).unwrap_or_default();
                bytes.extend(token.chars().filter_map(char_byte));
            }
            byte_ends.push(bytes.len());
        }
        // Where each byte's character starts in the text, replacements counted.
        let mut text = String::with_capacity(bytes.len());
        let mut place = Vec::with_capacity(bytes.len() + 1);
        for chunk in bytes.utf8_chunks() {
            for character in chunk.valid().chars() {
                place.extend(std::iter::repeat_n(text.len(), character.len_utf8()));
                text.push(character);
            }
            if !chunk.invalid().is_empty() {
                place.extend(std::iter::repeat_n(text.len(), chunk.invalid().len()));
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        place.push(text.len());
        let ends = byte_ends.into_iter().map(|end| place[end]).collect();
        (text, ends)
    }
}

fn ids(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<i32>, RenderError> {
    let encoding = tokenizer.encode_fast(text, false).map_err(failed)?;
    Ok(encoding.get_ids().iter().map(|id| *id as i32).collect())
}

#[expect(clippy::needless_pass_by_value, reason = "made for map_err")]
fn failed(error: tokenizers::Error) -> RenderError {
    RenderError::Tokenizer(error.to_string())
}

fn is_byte_level(decoder: &Value) -> bool {
    match decoder["type"].as_str() {
        Some("ByteLevel") => true,
        Some("Sequence") => decoder["decoders"]
            .as_array()
            .is_some_and(|all| all.iter().any(is_byte_level)),
        _ => false,
    }
}

/// The character that stands for a byte in byte-level vocabularies: printable bytes stand for themselves, the others are moved
/// up behind Latin-1 in order (OpenAI's GPT-2 encoder).
pub(crate) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        char::from(byte)
    } else {
        let rank = (0..byte).filter(|b| !printable(*b)).count() as u32;
        char::from_u32(256 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
    }
}

/// The byte a vocabulary's character stands for.
fn char_byte(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ 0..=288 => Some(code as u8),
        289..=322 => Some((u32::from(character) - 289) as u8 + 127),
        323 => Some(0xAD),
        _ => None,
    }
    .filter(|byte| byte_char(*byte) == character)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_their_characters_are_one_to_one() {
        for byte in 0..=255 {
            assert_eq!(char_byte(byte_char(byte)), Some(byte), "{byte}");
        }
        assert_eq!(byte_char(b' '), 'Ġ');
        assert_eq!(byte_char(b'\n'), 'Ċ');
    }
}
