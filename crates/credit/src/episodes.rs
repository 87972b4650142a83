//! The episodes credit is about, checked, and for the negative control with their outcomes exchanged.

use std::collections::{BTreeMap, BTreeSet};

use drillyard_schema::{RunId, Split, Table};
use polars::prelude::*;

use crate::frame::{Columns, collect, join};
use crate::scan::{Kind, READABLE, TableFiles, scan};
use crate::{CreditError, Request};

/// One episode, in memory: these few columns are all that is held of each.
pub struct Episode {
    pub run_date: String,
    pub purpose: String,
    pub run_id: String,
    pub episode_id: String,
    pub group_id: String,
    pub task_id: String,
    pub infrastructure: bool,
    pub evaluation_set: bool,
    /// Rows in `steps`.
    pub n_steps: i64,
    /// Whose outcome it has: its own, but for the control.
    pub source: usize,
}

/// All episodes of the runs asked for, by id.
pub fn load(lake: &dyn TableFiles, request: &Request) -> Result<Vec<Episode>, CreditError> {
    if let Some(purpose) = request.purposes.iter().find(|p| !READABLE.contains(p)) {
        return Err(CreditError::Purpose {
            purpose: purpose.to_string(),
        });
    }
    let wanted = |purpose: &str| request.purposes.iter().any(|p| p.as_str() == purpose);
    let of_runs = request.runs.iter().fold(lit(false), |any, run| {
        any.or(col("run_id").eq(lit(run.as_str().to_owned())))
    });
    let rows = scan(
        lake,
        Table::Episodes,
        &[
            ("run_date", Kind::Text),
            ("purpose", Kind::Text),
            ("run_id", Kind::Text),
            ("episode_id", Kind::Text),
            ("group_id", Kind::Text),
            ("task_id", Kind::Text),
            ("split", Kind::Text),
            ("status", Kind::Text),
            ("evaluation_set", Kind::Bool),
        ],
        wanted,
    )?
    .filter(of_runs.clone());
    let steps = scan(
        lake,
        Table::Steps,
        &[("episode_id", Kind::Text), ("step_index", Kind::Int)],
        wanted,
    )?
    .group_by([col("episode_id")])
    .agg([len().cast(DataType::Int64).alias("n_steps")]);
    let frame = collect(
        join(rows, steps, &[("episode_id", "episode_id")], JoinType::Left)
            .with_column(col("n_steps").fill_null(lit(0i64)))
            .sort(["episode_id"], SortMultipleOptions::default()),
        "episodes",
    )?;
    if frame.height() == 0 {
        return Err(nothing(lake, request, of_runs)?);
    }
    let episodes = rows_of(&frame)?;
    for pair in episodes.windows(2) {
        if pair[0].episode_id == pair[1].episode_id {
            return Err(CreditError::Twice {
                table: Table::Episodes.name(),
                episode: pair[0].episode_id.clone(),
                hint: "",
            });
        }
    }
    Ok(episodes)
}

fn rows_of(frame: &DataFrame) -> Result<Vec<Episode>, CreditError> {
    let columns = Columns {
        frame,
        what: "episodes",
    };
    let evaluation = [Split::Validation, Split::HeldOut].map(Split::as_str);
    let ids = columns.texts("episode_id")?;
    for (split, episode) in columns.texts_or_null("split")?.into_iter().zip(&ids) {
        if let Some(split) = split.filter(|s| evaluation.contains(&s.as_str())) {
            return Err(CreditError::EvaluationEpisode {
                episode: episode.clone(),
                split,
            });
        }
    }
    let mut run_dates = columns.texts("run_date")?.into_iter();
    let mut purposes = columns.texts("purpose")?.into_iter();
    let mut runs = columns.texts("run_id")?.into_iter();
    let mut groups = columns.texts("group_id")?.into_iter();
    let mut tasks = columns.texts("task_id")?.into_iter();
    let mut statuses = columns.texts("status")?.into_iter();
    let mut evaluation_sets = columns.bools("evaluation_set")?.into_iter();
    let mut n_steps = columns.ints("n_steps")?.into_iter();
    let episodes = ids
        .into_iter()
        .enumerate()
        .map_while(|(index, episode_id)| {
            Some(Episode {
                run_date: run_dates.next()?,
                purpose: purposes.next()?,
                run_id: runs.next()?,
                episode_id,
                group_id: groups.next()?,
                task_id: tasks.next()?,
                infrastructure: statuses.next()? == "infrastructure",
                evaluation_set: evaluation_sets.next()?,
                n_steps: n_steps.next()?,
                source: index,
            })
        });
    Ok(episodes.collect())
}

/// Why there are no episodes: none at all, or only some that must not be trained on.
fn nothing(
    lake: &dyn TableFiles,
    request: &Request,
    of_runs: Expr,
) -> Result<CreditError, CreditError> {
    let other = scan(
        lake,
        Table::Episodes,
        &[("run_id", Kind::Text), ("purpose", Kind::Text)],
        |p| !READABLE.iter().any(|r| r.as_str() == p),
    )?
    .filter(of_runs);
    let frame = collect(other, "episodes of other purposes")?;
    let columns = Columns {
        frame: &frame,
        what: "episodes of other purposes",
    };
    let found: BTreeSet<_> = columns.texts("purpose")?.into_iter().collect();
    let runs: Vec<_> = request.runs.iter().map(RunId::as_str).collect();
    Ok(if found.is_empty() {
        CreditError::NoEpisodes {
            runs: runs.join(", "),
        }
    } else {
        CreditError::EvaluationRun {
            run: runs.join(", "),
            found: found.into_iter().collect::<Vec<_>>().join(", "),
        }
    })
}

/// Exchanges whole outcomes among the scored episodes of each task, in a random order that the seed decides. What infrastructure
/// ended keeps its own: it has no outcome.
pub fn permute_outcomes(episodes: &mut [Episode], seed: u64) {
    let mut tasks: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, episode) in episodes.iter().enumerate() {
        if !episode.infrastructure {
            tasks.entry(&episode.task_id).or_default().push(index);
        }
    }
    let mut moves = Vec::new();
    for (task, members) in tasks {
        let mut draw = Draw(seed ^ fnv1a(task));
        let mut sources = members.clone();
        for last in (1..sources.len()).rev() {
            sources.swap(last, draw.below(last + 1));
        }
        moves.extend(members.into_iter().zip(sources));
    }
    for (index, source) in moves {
        episodes[index].source = source;
    }
}

fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// SplitMix64: the same on every machine and version.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((u128::from(z) * n as u128) >> 64) as usize
    }
}

/// The episodes as a frame: `episode_id`, `group_id`, `task_id`, `infrastructure`, `n_steps`, and of the outcome's source
/// `source` and `source_steps`.
pub fn frame(episodes: &[Episode]) -> Result<LazyFrame, CreditError> {
    let text = |pick: fn(&Episode) -> &str| -> Vec<&str> { episodes.iter().map(pick).collect() };
    let of_source = |e: &Episode| &episodes[e.source];
    let frame = df!(
        "episode_id" => text(|e| &e.episode_id),
        "group_id" => text(|e| &e.group_id),
        "task_id" => text(|e| &e.task_id),
        "infrastructure" => episodes.iter().map(|e| e.infrastructure).collect::<Vec<_>>(),
        "n_steps" => episodes.iter().map(|e| e.n_steps).collect::<Vec<_>>(),
        "source" => episodes.iter().map(|e| of_source(e).episode_id.as_str()).collect::<Vec<_>>(),
        "source_steps" => episodes.iter().map(|e| of_source(e).n_steps).collect::<Vec<_>>(),
    );
    Ok(frame.map_err(CreditError::plan("episodes"))?.lazy())
}
