//! The names that generated tasks use for files, columns, keys and words: two consonant-vowel syllables, such as `kafo`.
//!
//! Short made-up names with no meaning force a model to copy instead of recalling, and a tokenizer that knows the 90 syllables
//! spends two tokens on each. One name in ten never occurs in the train split, so copying of unseen names can be measured.

use std::sync::LazyLock;

use drillyard_schema::Split;

use crate::draw::{Draw, digest};

const CONSONANTS: &str = "bcdfghjklmnprstvwz";
const VOWELS: &str = "aeiou";

/// Two-syllable words that the tasks' own texts use, or that nobody wants to read in a generated file.
const RESERVED: &[&str] = &[
    "base", "dago", "file", "have", "homo", "hole", "line", "make", "mode", "name", "nazi", "none",
    "note", "nude", "puta", "rape", "rite", "role", "rule", "same", "save", "size", "take", "time",
    "wide", "pipe", "code", "date", "data", "like", "more", "move", "done", "gene", "give", "case",
];

/// The syllables and names of generated tasks.
#[derive(Debug, Clone)]
pub struct NameGrammar {
    syllables: Vec<String>,
    common: Vec<String>,
    held_out: Vec<String>,
}

static GRAMMAR: LazyLock<NameGrammar> = LazyLock::new(NameGrammar::build);

/// The one grammar of names.
pub fn grammar() -> &'static NameGrammar {
    &GRAMMAR
}

impl NameGrammar {
    fn build() -> Self {
        let syllables: Vec<String> = CONSONANTS
            .chars()
            .flat_map(|c| VOWELS.chars().map(move |v| format!("{c}{v}")))
            .collect();
        let (mut common, mut held_out) = (Vec::new(), Vec::new());
        for name in syllables
            .iter()
            .flat_map(|first| {
                syllables
                    .iter()
                    .map(move |second| format!("{first}{second}"))
            })
            // Some awks read a word that starts with `nan` as the number it names.
            .filter(|name| !RESERVED.contains(&name.as_str()) && !name.starts_with("nan"))
        {
            if digest(&["held-out name", &name])[0].is_multiple_of(10) {
                held_out.push(name);
            } else {
                common.push(name);
            }
        }
        Self {
            syllables,
            common,
            held_out,
        }
    }

    /// The 90 syllables, in order.
    pub fn syllables(&self) -> &[String] {
        &self.syllables
    }

    /// The names that every split may use.
    pub fn common(&self) -> &[String] {
        &self.common
    }

    /// The names that the train split never uses: about one in ten, chosen by hash.
    pub fn held_out(&self) -> &[String] {
        &self.held_out
    }

    /// Two-syllable words that are never drawn as names, so a tokenizer may give them one token.
    pub fn reserved(&self) -> &'static [&'static str] {
        RESERVED
    }
}

/// Draws names, each once. Outside the train split every second name is, on average, one that the train split never uses.
pub(crate) struct Names {
    split: Split,
    taken: Vec<&'static str>,
}

impl Names {
    pub(crate) fn new(split: Split) -> Self {
        Self {
            split,
            taken: Vec::new(),
        }
    }

    pub(crate) fn next(&mut self, draw: &mut Draw) -> String {
        let grammar = grammar();
        loop {
            let unseen = self.split != Split::Train && draw.chance(0.5);
            let pool = if unseen {
                grammar.held_out()
            } else {
                grammar.common()
            };
            let name = draw.pick(pool).as_str();
            if !self.taken.contains(&name) {
                self.taken.push(name);
                return name.to_owned();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_has_90_syllables_and_holds_out_a_tenth_of_the_names() {
        let grammar = grammar();
        assert_eq!(grammar.syllables().len(), 90);
        let (common, held_out) = (grammar.common().len(), grammar.held_out().len());
        assert_eq!(common + held_out, 8_100 - RESERVED.len() - VOWELS.len());
        let share = held_out as f64 / (common + held_out) as f64;
        assert!((0.08..0.12).contains(&share), "{share}");
        assert!(
            grammar
                .common()
                .iter()
                .all(|n| !grammar.held_out().contains(n))
        );
    }
}
