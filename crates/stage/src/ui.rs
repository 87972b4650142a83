//! The one place that prints.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often a plain (non-terminal) progress line is printed.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Talks on standard error, writes data to standard output. Clones share the screen.
#[derive(Clone, Debug)]
pub struct Ui {
    bars: MultiProgress,
    fancy: bool,
    quiet: bool,
}

impl Default for Ui {
    fn default() -> Self {
        Self::new(false)
    }
}

impl Ui {
    /// Progress bars on a terminal, a plain line every ten seconds elsewhere; `quiet` keeps only warnings and errors.
    pub fn new(quiet: bool) -> Self {
        let fancy = std::io::stderr().is_terminal() && !quiet;
        let target = if fancy {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        };
        Self {
            bars: MultiProgress::with_draw_target(target),
            fancy,
            quiet,
        }
    }

    fn line(&self, text: &str) {
        self.bars.suspend(|| {
            // A closed standard error is no reason to stop a run.
            let _ = writeln!(std::io::stderr(), "{text}");
        });
    }

    /// Says something.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            self.line(text.as_ref());
        }
    }

    /// Says something that needs attention.
    pub fn warn(&self, text: impl AsRef<str>) {
        self.line(&format!("warning: {}", text.as_ref()));
    }

    /// Says why it ends.
    pub fn error(&self, message: &str, hint: Option<&str>) {
        self.line(&format!("error: {message}"));
        if let Some(hint) = hint {
            self.line(&format!("\nhint: {hint}"));
        }
    }

    /// Writes data to standard output.
    ///
    /// # Errors
    /// When standard output is closed or full.
    pub fn data(&self, text: &str) -> std::io::Result<()> {
        self.bars.suspend(|| {
            let mut out = std::io::stdout().lock();
            match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                // Whoever reads has seen enough.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
                written => written,
            }
        })
    }

    /// A progress bar over `total` things.
    pub fn bar(&self, label: &str, total: u64) -> Bar {
        let bar = self.bars.add(ProgressBar::new(total));
        if let Ok(style) = ProgressStyle::with_template(
            "{prefix:>10} {wide_bar:.cyan/dim} {pos}/{len} {msg} eta {eta}",
        ) {
            bar.set_style(style.progress_chars("━━╌"));
        }
        bar.set_prefix(label.to_owned());
        if self.fancy {
            bar.enable_steady_tick(Duration::from_millis(250));
        }
        let now = Instant::now();
        Bar {
            ui: self.clone(),
            bar,
            label: label.to_owned(),
            started: now,
            last_line: Arc::new(Mutex::new(now)),
        }
    }
}

/// A progress bar. Clones share it.
#[derive(Clone, Debug)]
pub struct Bar {
    ui: Ui,
    bar: ProgressBar,
    label: String,
    started: Instant,
    last_line: Arc<Mutex<Instant>>,
}

impl Bar {
    /// Moves to `position` and shows `message` beside the bar.
    pub fn set(&self, position: u64, message: impl Into<String>) {
        self.bar.set_position(position);
        self.bar.set_message(message.into());
        if self.ui.fancy || self.ui.quiet {
            return;
        }
        let Ok(mut last) = self.last_line.lock() else {
            return;
        };
        if last.elapsed() >= PLAIN_INTERVAL {
            *last = Instant::now();
            let total = self.bar.length().unwrap_or(0);
            self.ui.line(&format!(
                "{:>10} {position}/{total} {}",
                self.label,
                self.bar.message()
            ));
        }
    }

    /// Changes how many things there are.
    pub fn set_total(&self, total: u64) {
        self.bar.set_length(total);
    }

    /// Takes the bar away and says how it ended.
    pub fn finish(&self, message: impl AsRef<str>) {
        self.bar.finish_and_clear();
        self.ui.note(format!(
            "{:>10} {} ({:.1} s)",
            self.label,
            message.as_ref(),
            self.started.elapsed().as_secs_f64()
        ));
    }
}
