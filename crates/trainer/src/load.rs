//! Reading: rows of a lake snapshot, or a JSON-lines file of conversations.

use std::collections::BTreeMap;
use std::io::BufRead;

use camino::Utf8Path;
use drillyard_lake::{Filter, Lake, Snapshot};
use drillyard_schema::table::{EpisodeRow, MessageRow, ScoreRow, StepRow, TokenRow, VerdictRow};
use drillyard_schema::{EpisodeId, Row, ToolSpec};

use crate::assemble::{Conversation, Rows, Texts, conversation, verdicts};
use crate::config::{LakeSource, Method, Select, TrainConfig};
use crate::error::TrainError;
use crate::sequence::Sequence;
use crate::train::Dataset;

/// Lines of a conversations file that are rendered between two reads.
const CHUNK: usize = 4096;

/// Opens the snapshot a configuration names.
pub async fn snapshot(source: &LakeSource) -> Result<Snapshot, TrainError> {
    if !source.root.exists() {
        return Err(TrainError::Input {
            path: source.root.clone(),
            message: "there is no lake here; roll out or import first".into(),
        });
    }
    let lake = Lake::open(&source.root).await?;
    Ok(if source.versions.is_empty() {
        lake.snapshot().await?
    } else {
        lake.snapshot_at(&source.versions).await?
    })
}

/// Reads what the method needs, and nothing more.
pub async fn rows(config: &TrainConfig, source: &LakeSource) -> Result<Rows, TrainError> {
    let snapshot = snapshot(source).await?;
    let reader = Reader {
        snapshot: &snapshot,
        source,
    };
    let hyper = &config.hyper;
    let mut rows = Rows::default();
    for episode in reader.read::<EpisodeRow>().await? {
        if episode.status == "finished" {
            rows.episodes.insert(episode.episode_id.clone(), episode);
        }
    }
    rows.tokens = by_episode(reader.read::<TokenRow>().await?, |row| {
        (&row.episode_id, row.step_index)
    });
    rows.success = verdicts(&reader.read::<VerdictRow>().await?);
    if let Some(scores) = &source.scores {
        rows.scores = reader
            .read_stage::<ScoreRow>(scores)
            .await?
            .into_iter()
            .map(|row| (row.episode_id.clone(), row))
            .collect();
    }
    match config.method {
        Method::Imitation => {
            if matches!(hyper.select, Select::Positive | Select::PositiveAndGraded)
                && rows.scores.is_empty()
            {
                return Err(TrainError::config(
                    "lake.scores",
                    "selecting by tier needs the scores of a QA execution",
                ));
            }
            rows.messages = by_episode(reader.read::<MessageRow>().await?, |row| {
                (&row.episode_id, row.message_index)
            });
        }
        Method::Grpo => {
            let greedy_or_tempered =
                |episode: &EpisodeRow| (episode.temperature - 1.0).abs() > 1e-9;
            for step in reader.read::<StepRow>().await? {
                let differs = rows.episodes.get(&step.episode_id).is_some_and(|episode| {
                    (episode.temperature - step.temperature).abs() > 1e-9
                        || greedy_or_tempered(episode)
                });
                if differs {
                    rows.temperatures
                        .insert((step.episode_id, step.step_index), step.temperature);
                }
            }
        }
    }
    if let Some(credit) = &source.credit {
        if config.method == Method::Grpo {
            rows.advantages = reader.read_stage(credit).await?;
        }
        if hyper.contrastive_weight > 0.0 || hyper.preference_weight > 0.0 {
            rows.pairs = reader.read_stage(credit).await?;
        }
    }
    Ok(rows)
}

struct Reader<'a> {
    snapshot: &'a Snapshot,
    source: &'a LakeSource,
}

impl Reader<'_> {
    async fn read<R: Row>(&self) -> Result<Vec<R>, TrainError> {
        self.read_filtered(None).await
    }

    async fn read_stage<R: Row>(
        &self,
        stage_run: &drillyard_schema::StageRunId,
    ) -> Result<Vec<R>, TrainError> {
        self.read_filtered(Some(stage_run)).await
    }

    async fn read_filtered<R: Row>(
        &self,
        stage_run: Option<&drillyard_schema::StageRunId>,
    ) -> Result<Vec<R>, TrainError> {
        let filter = |run_id| Filter {
            run_id,
            purposes: self.source.purposes.clone(),
            stage_run: stage_run.cloned(),
        };
        if self.source.run_ids.is_empty() {
            return Ok(self.snapshot.read(&filter(None)).await?);
        }
        let mut all = Vec::new();
        for run_id in &self.source.run_ids {
            all.extend(self.snapshot.read(&filter(Some(run_id.clone()))).await?);
        }
        Ok(all)
    }
}

fn by_episode<R>(
    rows: Vec<R>,
    key: impl Fn(&R) -> (&EpisodeId, i32),
) -> BTreeMap<EpisodeId, Vec<R>> {
    let mut map: BTreeMap<EpisodeId, Vec<R>> = BTreeMap::new();
    for row in rows {
        let episode = key(&row).0.clone();
        map.entry(episode).or_default().push(row);
    }
    for list in map.values_mut() {
        list.sort_by_key(|row| key(row).1);
    }
    map
}

/// Reads and renders a file of conversations, on `threads` threads.
pub fn conversations(
    path: &Utf8Path,
    texts: &Texts,
    tools: &[ToolSpec],
    max_length: usize,
    threads: usize,
) -> Result<Dataset, TrainError> {
    let mut data = Dataset::default();
    let mut too_long = 0;
    let mut lines = std::io::BufReader::new(fs_err::File::open(path)?).lines();
    let mut number = 0;
    loop {
        let chunk: Vec<(usize, String)> = lines
            .by_ref()
            .take(CHUNK)
            .map(|line| {
                number += 1;
                line.map(|line| (number, line))
            })
            .collect::<Result<_, _>>()?;
        if chunk.is_empty() {
            break;
        }
        for sequence in render_chunk(path, &chunk, texts, tools, threads)? {
            if sequence.ids.len() > max_length {
                too_long += 1;
            } else if sequence.own_len() > 0 {
                data.train.push(data.sequences.len());
                data.sequences.push(sequence);
            }
        }
    }
    if too_long > 0 {
        data.notes.push(format!(
            "{too_long} left out: longer than {max_length} tokens"
        ));
    }
    Ok(data)
}

fn render_chunk(
    path: &Utf8Path,
    chunk: &[(usize, String)],
    texts: &Texts,
    tools: &[ToolSpec],
    threads: usize,
) -> Result<Vec<Sequence>, TrainError> {
    let one = |(number, line): &(usize, String)| -> Result<Option<Sequence>, TrainError> {
        if line.trim().is_empty() {
            return Ok(None);
        }
        let at = |message: String| TrainError::Input {
            path: path.to_owned(),
            message: format!("line {number}: {message}"),
        };
        let parsed: Conversation =
            serde_json::from_str(line).map_err(|error| at(error.to_string()))?;
        conversation(texts, &parsed, &format!("line-{number}"), tools)
            .map(Some)
            .map_err(|error| at(error.to_string()))
    };
    let part = chunk.len().div_ceil(threads.max(1));
    let parts: Vec<Result<Vec<Option<Sequence>>, TrainError>> = std::thread::scope(|scope| {
        let workers: Vec<_> = chunk
            .chunks(part)
            .map(|lines| scope.spawn(move || lines.iter().map(one).collect()))
            .collect();
        workers
            .into_iter()
            .map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    });
    let mut sequences = Vec::with_capacity(chunk.len());
    for part in parts {
        sequences.extend(part?.into_iter().flatten());
    }
    Ok(sequences)
}
