//! What the engine has done so far.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// Counters since the start; `GET /metrics.json` shows a [`Snapshot`].
        #[derive(Debug, Default)]
        pub struct Metrics { $($name: AtomicU64,)* }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
        pub struct Snapshot { $($(#[$meta])* pub $name: u64,)* }

        impl Metrics {
            /// The counters now.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Requests taken up.
    requests,
    /// Requests refused because the queue was full.
    refused,
    /// Requests whose client went away before the end.
    cancelled,
    /// Requests waiting or under way now.
    in_flight,
    /// Tokens of prompts.
    prompt_tokens,
    /// Of these, tokens that were in a slot already or copied from one.
    cached_tokens,
    /// Tokens generated.
    generated_tokens,
    /// Steps that gave every conversation one token.
    decode_steps,
    /// Conversations in these steps, summed: divided by the steps, the mean batch.
    decode_rows,
    /// Largest batch of such a step.
    largest_batch,
    /// Batches of prompts computed.
    prefill_batches,
    /// Prompts in these batches, summed.
    prefill_rows,
    /// Time spent on prompts, microseconds.
    prefill_us,
    /// Time spent on steps, microseconds.
    decode_us,
}

impl Metrics {
    pub(crate) fn taken(&self, prompt: usize, cached: usize) {
        add(&self.requests, 1);
        add(&self.prompt_tokens, prompt);
        add(&self.cached_tokens, cached);
    }

    pub(crate) fn refused(&self) {
        add(&self.refused, 1);
    }

    pub(crate) fn cancelled(&self) {
        add(&self.cancelled, 1);
    }

    pub(crate) fn in_flight(&self, n: usize) {
        self.in_flight.store(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn prefilled(&self, rows: usize, took: Duration) {
        add(&self.prefill_batches, 1);
        add(&self.prefill_rows, rows);
        add(&self.generated_tokens, rows);
        add(&self.prefill_us, took.as_micros() as usize);
    }

    pub(crate) fn decoded(&self, rows: usize, took: Duration) {
        add(&self.decode_steps, 1);
        add(&self.decode_rows, rows);
        add(&self.generated_tokens, rows);
        self.largest_batch.fetch_max(rows as u64, Ordering::Relaxed);
        add(&self.decode_us, took.as_micros() as usize);
    }
}

fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}
