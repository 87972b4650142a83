//! How responsive the host stays while it is attacked: the time that starting a program and waiting for it takes.

use std::fmt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// Measures until it is stopped.
pub struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Duration>>,
}

impl Probe {
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut took = Vec::new();
            while !seen.load(Ordering::Relaxed) {
                let started = Instant::now();
                if Command::new("/bin/true").status().is_ok() {
                    took.push(started.elapsed());
                }
                std::thread::sleep(PAUSE);
            }
            took
        });
        Self { stop, thread }
    }

    pub fn stop(self) -> Vec<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// What all looks together say.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Latency {
    pub looks: usize,
    pub p50: Duration,
    pub p99: Duration,
    pub longest: Duration,
}

impl Latency {
    pub fn of(mut took: Vec<Duration>) -> Option<Self> {
        took.sort();
        let at = |share: f64| {
            let last = took.len().checked_sub(1)?;
            took.get((last as f64 * share).round() as usize).copied()
        };
        Some(Self {
            looks: took.len(),
            p50: at(0.5)?,
            p99: at(0.99)?,
            longest: at(1.0)?,
        })
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        write!(
            f,
            "median {:.1} ms, p99 {:.1} ms, longest {:.1} ms of {}",
            ms(self.p50),
            ms(self.p99),
            ms(self.longest),
            self.looks
        )
    }
}
