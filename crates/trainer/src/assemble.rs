//! From rows of the lake, or from conversations, to sequences. Pure: what is read from where is the business of [`crate::load`].

use std::collections::BTreeMap;

use drillyard_render::{ChatTemplate, Tokenizer, masked};
use drillyard_schema::table::{
    AdvantageRow, EpisodeRow, MessageRow, PairRow, ScoreRow, TokenRow, VerdictRow,
};
use drillyard_schema::{EpisodeId, Message, Role, Tier, ToolSpec, VerdictKind};
use serde::{Deserialize, Serialize};

use crate::advice::Groups;
use crate::config::{Select, TrainConfig};
use crate::error::TrainError;
use crate::gate::Provenance;
use crate::sequence::{Sequence, Turn, VersionKeys};
use crate::train::{Dataset, Pair};

/// The kind of loss span that marks call syntax.
const ACTION_FORMAT: &str = "action_format";
/// The key of [`TrainConfig::toolsets`] that stands for every other hash.
const ANY_TOOLSET: &str = "*";

/// What turns text into ids.
#[derive(Debug)]
pub struct Texts {
    /// The tokenizer of the model to train.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: ChatTemplate,
}

impl Texts {
    /// Reads both from a checkpoint's folder.
    pub fn load(dir: &camino::Utf8Path) -> Result<Self, TrainError> {
        Ok(Self {
            tokenizer: Tokenizer::load(dir)?,
            template: ChatTemplate::load(dir)?,
        })
    }

    /// A conversation as ids with the assistant's turns.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<(Vec<i32>, Vec<Turn>), TrainError> {
        let rendered = masked(&self.tokenizer, &self.template, messages, tools)?;
        let turns = turns_of_mask(&rendered.mask);
        Ok((rendered.ids, turns))
    }
}

/// The runs of true as turns, numbered from 0. The first position is nobody's: nothing predicts it.
fn turns_of_mask(mask: &[bool]) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    for (position, &own) in mask.iter().enumerate().skip(1) {
        if !own {
            continue;
        }
        let position = position as u32;
        match turns.last_mut() {
            Some(turn) if turn.end == position => turn.end += 1,
            _ => turns.push(Turn {
                start: position,
                end: position + 1,
                step: turns.len() as i32,
                temperature: 1.0,
            }),
        }
    }
    turns
}

/// A conversation to imitate, as a line of a JSON-lines file has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversation {
    /// A name; the line number when absent.
    #[serde(default)]
    pub id: Option<String>,
    /// The messages, in the chat API's shape.
    pub messages: Vec<Message>,
    /// The tools offered; those of the configuration's `*` toolset when absent.
    #[serde(default)]
    pub tools: Option<Vec<ToolSpec>>,
    /// Sampling weight.
    #[serde(default = "one")]
    pub weight: f32,
}

fn one() -> f32 {
    1.0
}

/// A conversation as a sequence.
pub fn conversation(
    texts: &Texts,
    conversation: &Conversation,
    name: &str,
    default_tools: &[ToolSpec],
) -> Result<Sequence, TrainError> {
    let tools = conversation.tools.as_deref().unwrap_or(default_tools);
    let (ids, turns) = texts.render(&conversation.messages, tools)?;
    Ok(Sequence {
        episode: EpisodeId(conversation.id.clone().unwrap_or_else(|| name.to_owned())),
        group: None,
        ids,
        turns,
        behaviour: vec![],
        reference: vec![],
        format: vec![],
        advantage: 0.0,
        weight: conversation.weight,
        success: None,
        version: 0,
    })
}

/// The rows a data set is made from; per-episode lists are sorted by step or message.
#[derive(Debug, Default)]
pub struct Rows {
    /// Episodes that infrastructure did not end.
    pub episodes: BTreeMap<EpisodeId, EpisodeRow>,
    /// Their token ids.
    pub tokens: BTreeMap<EpisodeId, Vec<TokenRow>>,
    /// Their messages.
    pub messages: BTreeMap<EpisodeId, Vec<MessageRow>>,
    /// Sampling temperature by step, where it differs from the episode's.
    pub temperatures: BTreeMap<(EpisodeId, i32), f64>,
    /// Whether they succeeded, by the verdict that counts.
    pub success: BTreeMap<EpisodeId, bool>,
    /// Their scores.
    pub scores: BTreeMap<EpisodeId, ScoreRow>,
    /// The advantages.
    pub advantages: Vec<AdvantageRow>,
    /// The pairs.
    pub pairs: Vec<PairRow>,
}

/// The verdict that counts for each episode: re-verified before verified before recorded, the latest of a kind; judges don't count.
pub fn verdicts(rows: &[VerdictRow]) -> BTreeMap<EpisodeId, bool> {
    let rank = |kind: &str| match kind.parse() {
        Ok(VerdictKind::ReVerified) => 3,
        Ok(VerdictKind::Verified) => 2,
        Ok(VerdictKind::Recorded) => 1,
        _ => 0,
    };
    let mut best: BTreeMap<&EpisodeId, (i32, i64, bool)> = BTreeMap::new();
    for row in rows {
        let (Some(success), rank) = (row.success, rank(&row.kind)) else {
            continue;
        };
        let key = (rank, row.decided_at.0, success);
        let entry = best.entry(&row.episode_id).or_insert(key);
        if rank > 0 && (key.0, key.1) >= (entry.0, entry.1) {
            *entry = key;
        }
    }
    best.into_iter()
        .filter(|(_, (rank, _, _))| *rank > 0)
        .map(|(id, (_, _, success))| (id.clone(), success))
        .collect()
}

/// An episode's token rows as sequences: one, unless a step's context dropped own tokens of earlier steps; then what was there is
/// closed as a sequence and a new one starts with the prefix that was kept, in which nothing carries a loss again.
///
/// Weight, advantage, group, success and version are left at their neutral values.
pub fn token_sequences(
    episode: &EpisodeId,
    rows: &[TokenRow],
    temperature: impl Fn(i32) -> f64,
) -> Result<Vec<Sequence>, TrainError> {
    let broken = |message: String| TrainError::Row {
        episode: episode.to_string(),
        message,
    };
    let empty = |ids: Vec<i32>| Sequence {
        episode: episode.clone(),
        group: None,
        ids,
        turns: vec![],
        behaviour: vec![],
        reference: vec![],
        format: vec![],
        advantage: 0.0,
        weight: 1.0,
        success: None,
        version: 0,
    };
    let mut done = Vec::new();
    let mut current = empty(vec![]);
    for row in rows {
        let kept = row.kept_prefix as usize;
        if row.kept_prefix < 0 || kept > current.ids.len() {
            return Err(broken(format!(
                "step {} keeps {kept} ids of {}",
                row.step_index,
                current.ids.len()
            )));
        }
        if !row.logprobs.is_empty() && row.logprobs.len() != row.generated_ids.len() {
            return Err(broken(format!(
                "step {} has {} log-probabilities for {} generated ids",
                row.step_index,
                row.logprobs.len(),
                row.generated_ids.len()
            )));
        }
        if current
            .turns
            .last()
            .is_some_and(|turn| turn.end as usize > kept)
        {
            let prefix = current.ids[..kept].to_vec();
            done.push(std::mem::replace(&mut current, empty(prefix)));
        } else {
            current.ids.truncate(kept);
        }
        current.ids.extend_from_slice(&row.context_ids);
        let start = current.ids.len() as u32;
        current.ids.extend_from_slice(&row.generated_ids);
        if row.generated_ids.is_empty() || start == 0 {
            continue;
        }
        current.turns.push(Turn {
            start,
            end: current.ids.len() as u32,
            step: row.step_index,
            temperature: temperature(row.step_index) as f32,
        });
        current.behaviour.extend_from_slice(&row.logprobs);
        let before = current.format.len();
        current
            .format
            .resize(before + row.generated_ids.len(), false);
        for span in row.loss_spans.iter().filter(|s| s.kind == ACTION_FORMAT) {
            let range =
                span.start.max(0) as usize..(span.end.max(0) as usize).min(row.generated_ids.len());
            if let Some(marks) = current.format[before..].get_mut(range) {
                marks.fill(true);
            }
        }
    }
    done.push(current);
    done.retain(|sequence| !sequence.turns.is_empty());
    for sequence in &mut done {
        // A step without log-probabilities makes the whole sequence one without.
        if sequence.behaviour.len() != sequence.own_len() {
            sequence.behaviour.clear();
        }
    }
    Ok(done)
}

/// A message row as a message.
fn message(row: &MessageRow) -> Result<Message, String> {
    let role = match row.role.as_str() {
        "system" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => return Err(format!("role '{other}' is none a chat template knows")),
    };
    let tool_calls = match &row.tool_calls {
        Some(json) => serde_json::from_str(json)
            .map_err(|error| format!("message {}: tool_calls: {error}", row.message_index))?,
        None => vec![],
    };
    Ok(Message {
        role,
        content: row.content.clone(),
        tool_calls,
        tool_call_id: row.tool_call_id.clone(),
        name: row.name.clone(),
        reasoning_content: None,
    })
}

/// Counts what is left out, by reason.
#[derive(Debug, Default)]
struct LeftOut(BTreeMap<String, usize>);

impl LeftOut {
    fn count(&mut self, reason: impl Into<String>) {
        *self.0.entry(reason.into()).or_default() += 1;
    }

    fn notes(self) -> impl Iterator<Item = String> {
        self.0
            .into_iter()
            .map(|(reason, n)| format!("{n} left out: {reason}"))
    }
}

struct Builder<'a> {
    rows: &'a Rows,
    config: &'a TrainConfig,
    texts: &'a Texts,
    versions: VersionKeys,
    left_out: LeftOut,
    from_tokens: usize,
    from_messages: usize,
}

impl Builder<'_> {
    /// The sequences of an episode to imitate: its token ids where they are of this tokenizer and template and whole, else its
    /// messages rendered anew.
    fn sequences(&mut self, episode: &EpisodeRow) -> Result<Vec<Sequence>, TrainError> {
        let id = &episode.episode_id;
        let tokens = self.rows.tokens.get(id).map_or(&[][..], Vec::as_slice);
        let ours = |row: &TokenRow| {
            row.tokenizer_hash == self.texts.tokenizer.hash()
                && row.template_hash == self.texts.template.hash()
        };
        let usable =
            !tokens.is_empty() && tokens.len() as i32 == episode.n_steps && tokens.iter().all(ours);
        let sequences = if usable {
            self.from_tokens += 1;
            token_sequences(id, tokens, |_| 1.0)?
        } else {
            match self.render(episode) {
                Ok(sequence) => {
                    self.from_messages += 1;
                    vec![sequence]
                }
                Err(reason) => {
                    self.left_out.count(reason);
                    return Ok(vec![]);
                }
            }
        };
        let weight = self.rows.scores.get(id).map_or(1.0, |s| s.weight as f32);
        let success = self.rows.success.get(id).copied();
        let version = self.version(episode, self.texts.template.hash());
        Ok(sequences
            .into_iter()
            .map(|sequence| Sequence {
                weight,
                success,
                version,
                // What imitation does not read is not kept.
                behaviour: vec![],
                format: vec![],
                ..sequence
            })
            .collect())
    }

    fn render(&self, episode: &EpisodeRow) -> Result<Sequence, String> {
        let rows = self
            .rows
            .messages
            .get(&episode.episode_id)
            .ok_or("no messages are recorded")?;
        let messages = rows.iter().map(message).collect::<Result<Vec<_>, _>>()?;
        let tools = self
            .config
            .toolsets
            .get(&episode.toolset_hash)
            .or_else(|| self.config.toolsets.get(ANY_TOOLSET))
            .map_or(&[][..], Vec::as_slice);
        let conversation_ = Conversation {
            id: Some(episode.episode_id.to_string()),
            messages,
            tools: None,
            weight: 1.0,
        };
        conversation(self.texts, &conversation_, "", tools)
            .map_err(|error| format!("cannot be rendered: {error}"))
    }

    fn version(&mut self, episode: &EpisodeRow, template: &str) -> u32 {
        self.versions.number(&[
            &episode.toolset_hash,
            &episode.prompt_hash,
            &episode.parser_version,
            template,
        ])
    }

    /// Checks the length and says where it went.
    fn fits(&mut self, sequence: &Sequence) -> bool {
        let limit = self.config.hyper.max_length;
        let fits = sequence.ids.len() <= limit && sequence.own_len() > 0;
        if sequence.own_len() == 0 {
            self.left_out.count("no token of the model's own");
        } else if !fits {
            self.left_out.count(format!("longer than {limit} tokens"));
        }
        fits
    }
}

/// The data set of imitation, with pairs for the preference term where it is on.
pub fn imitation(rows: &Rows, config: &TrainConfig, texts: &Texts) -> Result<Dataset, TrainError> {
    let hyper = &config.hyper;
    let mut builder = Builder {
        rows,
        config,
        texts,
        versions: VersionKeys::default(),
        left_out: LeftOut::default(),
        from_tokens: 0,
        from_messages: 0,
    };
    let mut data = Dataset::default();
    let mut index_of: BTreeMap<&EpisodeId, usize> = BTreeMap::new();
    let in_pairs: std::collections::BTreeSet<&EpisodeId> = if hyper.preference_weight > 0.0 {
        rows.pairs
            .iter()
            .flat_map(|pair| [&pair.chosen_episode_id, &pair.rejected_episode_id])
            .collect()
    } else {
        std::collections::BTreeSet::new()
    };
    for (id, episode) in &rows.episodes {
        let tier = rows
            .scores
            .get(id)
            .and_then(|score| score.tier.as_deref())
            .and_then(|tier| tier.parse::<Tier>().ok());
        let selected = match hyper.select {
            Select::All => true,
            Select::Successes => rows.success.get(id) == Some(&true),
            Select::Positive => tier == Some(Tier::Positive),
            Select::PositiveAndGraded => {
                matches!(tier, Some(Tier::Positive | Tier::Graded))
            }
        };
        let weighs = rows.scores.get(id).is_none_or(|score| score.weight > 0.0);
        let (selected, paired) = (selected && weighs, in_pairs.contains(id) && weighs);
        if !selected && !paired {
            continue;
        }
        for sequence in builder.sequences(episode)? {
            if builder.fits(&sequence) {
                let index = data.sequences.len();
                index_of.insert(id, index);
                if selected {
                    data.train.push(index);
                }
                data.sequences.push(sequence);
            }
        }
    }
    if hyper.preference_weight > 0.0 {
        data.pairs = pairs(&rows.pairs, &index_of);
    }
    data.notes.push(format!(
        "{} episodes as sampled token ids, {} rendered from messages",
        builder.from_tokens, builder.from_messages
    ));
    if builder.versions.len() > 1 {
        data.notes
            .push(versions_note(builder.versions.len(), hyper.allow_mixed));
    }
    data.notes.extend(builder.left_out.notes());
    Ok(data)
}

fn versions_note(count: usize, mixed: bool) -> String {
    format!(
        "{count} combinations of toolset, prompt, parser and template versions, {}",
        if mixed {
            "mixed in batches"
        } else {
            "each in batches of its own"
        }
    )
}

fn pairs(rows: &[PairRow], index_of: &BTreeMap<&EpisodeId, usize>) -> Vec<Pair> {
    let mut tasks: BTreeMap<&str, u32> = BTreeMap::new();
    rows.iter()
        .filter_map(|row| {
            let chosen = *index_of.get(&row.chosen_episode_id)?;
            let rejected = *index_of.get(&row.rejected_episode_id)?;
            let next = tasks.len() as u32;
            (row.weight > 0.0).then(|| Pair {
                chosen,
                rejected,
                divergence: row.divergence_step,
                task: *tasks.entry(row.task_id.as_str()).or_insert(next),
                weight: row.weight as f32,
            })
        })
        .collect()
}

/// The data set of GRPO and where it comes from. `current` is the revision of the weights training starts from, `lineage` those it
/// descends from.
pub fn grpo(
    rows: &Rows,
    config: &TrainConfig,
    current: &str,
    lineage: &[String],
) -> Result<(Dataset, Provenance), TrainError> {
    let hyper = &config.hyper;
    let mut data = Dataset::default();
    let mut provenance = Provenance {
        current: current.to_owned(),
        lineage: lineage.to_vec(),
        ..Provenance::default()
    };
    let mut groups: BTreeMap<&str, bool> = BTreeMap::new();
    let mut versions = VersionKeys::default();
    let mut left_out = LeftOut::default();
    let mut index_of: BTreeMap<&EpisodeId, usize> = BTreeMap::new();
    for row in &rows.advantages {
        if row.scored {
            groups.insert(row.group_id.as_str(), row.zero_variance);
        }
        let (true, false, Some(advantage)) = (row.scored, row.zero_variance, row.advantage) else {
            continue;
        };
        let Some(episode) = rows.episodes.get(&row.episode_id) else {
            left_out.count("an advantage without its episode");
            continue;
        };
        if row.weight <= 0.0 {
            left_out.count("weight 0");
            continue;
        }
        if episode.temperature <= 0.0 {
            provenance.greedy += 1;
            continue;
        }
        provenance.episodes += 1;
        *provenance
            .revisions
            .entry(episode.policy_revision.clone())
            .or_default() += 1;
        let id = &episode.episode_id;
        let tokens = rows.tokens.get(id).map_or(&[][..], Vec::as_slice);
        let temperature = |step: i32| {
            rows.temperatures
                .get(&(id.clone(), step))
                .copied()
                .unwrap_or(episode.temperature)
        };
        let sequences = token_sequences(id, tokens, temperature)?;
        let whole = tokens.len() as i32 == episode.n_steps && !sequences.is_empty();
        if whole && sequences.iter().all(|s| !s.behaviour.is_empty()) {
            provenance.with_logprobs += 1;
        } else if whole {
            provenance.tokens_only += 1;
        }
        let template = tokens.first().map_or("", |row| row.template_hash.as_str());
        let version = versions.number(&[
            &episode.toolset_hash,
            &episode.prompt_hash,
            &episode.parser_version,
            template,
        ]);
        for sequence in sequences {
            if sequence.ids.len() > hyper.max_length {
                left_out.count(format!("longer than {} tokens", hyper.max_length));
                continue;
            }
            index_of.insert(id, data.sequences.len());
            data.train.push(data.sequences.len());
            data.sequences.push(Sequence {
                group: Some(row.group_id.clone()),
                advantage: advantage as f32,
                weight: row.weight as f32,
                success: rows.success.get(id).copied(),
                version,
                ..sequence
            });
        }
    }
    data.groups = Groups {
        total: groups.len(),
        zero_variance: groups.values().filter(|zero| **zero).count(),
    };
    if hyper.contrastive_weight > 0.0 {
        data.pairs = pairs(&rows.pairs, &index_of);
    }
    if versions.len() > 1 {
        data.notes
            .push(versions_note(versions.len(), hyper.allow_mixed));
    }
    data.notes.extend(left_out.notes());
    Ok((data, provenance))
}

#[cfg(test)]
mod tests {
    use drillyard_schema::table::{LossSpan, Timestamp};

    use super::*;

    fn tokens(step: i32, kept: i32, context: &[i32], generated: &[i32]) -> TokenRow {
        TokenRow {
            run_date: "2026-01-02".into(),
            purpose: "train".into(),
            run_id: "r".into(),
            episode_id: "e".into(),
            step_index: step,
            kept_prefix: kept,
            context_ids: context.to_vec(),
            generated_ids: generated.to_vec(),
            logprobs: generated.iter().map(|&id| -0.1 * id as f32).collect(),
            loss_spans: vec![LossSpan {
                start: 0,
                end: 1,
                kind: "action_format".into(),
            }],
            tokenizer_hash: "t".into(),
            template_hash: "h".into(),
        }
    }

    #[test]
    fn steps_that_continue_make_one_sequence() {
        let rows = [
            tokens(0, 0, &[1, 2, 3], &[4, 5]),
            tokens(1, 5, &[6], &[7, 8]),
        ];
        let sequences = token_sequences(&"e".into(), &rows, |step| 1.0 + f64::from(step)).unwrap();
        assert_eq!(sequences.len(), 1);
        let s = &sequences[0];
        assert_eq!(s.ids, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(s.own_positions().collect::<Vec<_>>(), [3, 4, 6, 7]);
        assert_eq!(s.behaviour, [-0.4, -0.5, -0.7, -0.8]);
        assert_eq!(s.format, [true, false, true, false]);
        assert!((s.turns[1].temperature - 2.0).abs() < 1e-6);
        assert!(s.check().is_ok());
    }

    #[test]
    fn a_dropped_generation_starts_a_new_sequence_without_counting_twice() {
        let rows = [
            tokens(0, 0, &[1, 2], &[3]),
            tokens(1, 3, &[4], &[5, 6]),
            // The context was cut back into step 1's generation and rendered anew.
            tokens(2, 5, &[9], &[10]),
        ];
        let sequences = token_sequences(&"e".into(), &rows, |_| 1.0).unwrap();
        assert_eq!(sequences.len(), 2);
        assert_eq!(sequences[0].ids, [1, 2, 3, 4, 5, 6]);
        assert_eq!(sequences[1].ids, [1, 2, 3, 4, 5, 9, 10]);
        let own: usize = sequences.iter().map(Sequence::own_len).sum();
        assert_eq!(own, 4, "each generated token once");
    }

    #[test]
    fn a_step_without_logprobs_makes_a_sequence_without() {
        let mut rows = [tokens(0, 0, &[1], &[2]), tokens(1, 2, &[3], &[4])];
        rows[1].logprobs.clear();
        let sequences = token_sequences(&"e".into(), &rows, |_| 1.0).unwrap();
        assert!(sequences[0].behaviour.is_empty());
        assert_eq!(sequences[0].own_len(), 2);
    }

    #[test]
    fn rows_that_contradict_each_other_are_named() {
        let missing = token_sequences(&"e".into(), &[tokens(0, 4, &[1], &[2])], |_| 1.0);
        assert!(
            missing
                .unwrap_err()
                .to_string()
                .contains("episode e: step 0 keeps 4 ids of 0")
        );
        let mut row = tokens(0, 0, &[1], &[2, 3]);
        row.logprobs.pop();
        assert!(token_sequences(&"e".into(), &[row], |_| 1.0).is_err());
    }

    #[test]
    fn the_best_verdict_counts_and_judges_do_not() {
        let verdict = |episode: &str, kind: &str, at: i64, success: Option<bool>| VerdictRow {
            run_date: "2026-01-02".into(),
            purpose: "train".into(),
            run_id: "r".into(),
            episode_id: episode.into(),
            kind: kind.into(),
            verifier: "v".into(),
            verifier_version: "1".into(),
            success,
            score: None,
            detail: None,
            decided_at: Timestamp(at),
        };
        let result = verdicts(&[
            verdict("a", "verified", 1, Some(true)),
            verdict("a", "re_verified", 2, Some(false)),
            verdict("a", "judge", 3, Some(true)),
            verdict("b", "judge", 1, Some(true)),
            verdict("c", "recorded", 5, Some(true)),
            verdict("c", "verified", 1, Some(false)),
            verdict("d", "verified", 1, None),
        ]);
        let expected: BTreeMap<EpisodeId, bool> = [("a".into(), false), ("c".into(), false)].into();
        assert_eq!(result, expected);
    }

    #[test]
    fn turns_are_the_runs_of_the_mask() {
        let mask = [true, false, true, true, false, true];
        let turns: Vec<_> = turns_of_mask(&mask)
            .iter()
            .map(|t| (t.start, t.end, t.step))
            .collect();
        assert_eq!(turns, [(2, 4, 0), (5, 6, 1)]);
    }
}
