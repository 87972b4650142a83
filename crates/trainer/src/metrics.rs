//! Training curves: means over the steps between two records, as rows of the lake's `train_metrics`.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime};

use drillyard_schema::StageRunId;
use drillyard_schema::table::{Timestamp, TrainMetricRow};

/// Collects what steps report and turns it into rows.
#[derive(Debug)]
pub struct Recorder {
    stage_run: StageRunId,
    rows: Vec<TrainMetricRow>,
    means: BTreeMap<&'static str, (f64, f64)>,
    sums: BTreeMap<&'static str, f64>,
    steps: usize,
    tokens: usize,
    since: Instant,
}

impl Recorder {
    /// Starts with rows of an earlier part of the run.
    pub fn new(stage_run: StageRunId, rows: Vec<TrainMetricRow>) -> Self {
        Self {
            stage_run,
            rows,
            means: BTreeMap::new(),
            sums: BTreeMap::new(),
            steps: 0,
            tokens: 0,
            since: Instant::now(),
        }
    }

    /// Adds a value to the mean since the last record, with a weight.
    pub fn add(&mut self, name: &'static str, value: f64, weight: f64) {
        let (sum, total) = self.means.entry(name).or_default();
        *sum += value * weight;
        *total += weight;
    }

    /// Adds a part of a step's sum; what is recorded is the mean over steps.
    pub fn add_part(&mut self, name: &'static str, value: f64) {
        *self.sums.entry(name).or_default() += value;
    }

    /// Counts a step and its tokens.
    pub fn add_step(&mut self, tokens: usize) {
        self.steps += 1;
        self.tokens += tokens;
    }

    /// Turns what was added into rows, and returns it by name.
    pub fn record(&mut self, step: u64, epoch: u32) -> BTreeMap<&'static str, f64> {
        let mut values: BTreeMap<&'static str, f64> = std::mem::take(&mut self.means)
            .into_iter()
            .filter(|(_, (_, total))| *total > 0.0)
            .map(|(name, (sum, total))| (name, sum / total))
            .collect();
        let steps = std::mem::take(&mut self.steps).max(1) as f64;
        values.extend(
            std::mem::take(&mut self.sums)
                .into_iter()
                .map(|(name, sum)| (name, sum / steps)),
        );
        let seconds = self.since.elapsed().as_secs_f64();
        if self.tokens > 0 && seconds > 0.0 {
            values.insert("tokens_per_second", self.tokens as f64 / seconds);
        }
        self.tokens = 0;
        self.since = Instant::now();
        for (&name, &value) in &values {
            self.push(step, epoch, name, value);
        }
        values
    }

    /// Adds one row.
    pub fn push(&mut self, step: u64, epoch: u32, name: &str, value: f64) {
        self.rows.push(TrainMetricRow {
            stage_run: self.stage_run.clone(),
            step: step as i64,
            epoch: epoch as i32,
            name: name.to_owned(),
            value,
            at: now(),
        });
    }

    /// Leaves out the time until now: measuring on validation tasks is no training.
    pub fn pause(&mut self, started: Instant) {
        self.since += started.elapsed();
    }

    /// The rows so far.
    pub fn rows(&self) -> &[TrainMetricRow] {
        &self.rows
    }

    /// The rows.
    pub fn into_rows(self) -> Vec<TrainMetricRow> {
        self.rows
    }
}

/// The curve of one metric: (step, value), ascending.
pub fn curve<'a>(
    rows: &'a [TrainMetricRow],
    name: &'a str,
) -> impl Iterator<Item = (i64, f64)> + 'a {
    rows.iter()
        .filter(move |row| row.name == name)
        .map(|row| (row.step, row.value))
}

fn now() -> Timestamp {
    let micros = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_micros());
    Timestamp(micros as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_weighted_means_between_records() {
        let mut recorder = Recorder::new("t".into(), vec![]);
        recorder.add("loss", 1.0, 1.0);
        recorder.add("loss", 4.0, 2.0);
        assert!((recorder.record(1, 0)["loss"] - 3.0).abs() < 1e-12);
        recorder.add("loss", 7.0, 1.0);
        recorder.add_part("loss_policy", 1.0);
        recorder.add_step(10);
        recorder.add_part("loss_policy", 1.0);
        recorder.add_part("loss_policy", 2.0);
        recorder.add_step(10);
        let values = recorder.record(2, 0);
        assert!((values["loss_policy"] - 2.0).abs() < 1e-12);
        let points: Vec<_> = curve(recorder.rows(), "loss").collect();
        assert_eq!(points, vec![(1, 3.0), (2, 7.0)]);
    }
}
