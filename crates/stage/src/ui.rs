//! The one place that prints.
//!
//! Much of what is shown was written by a model, or read from a file of unknown origin. A terminal takes some characters as commands:
//! to move the cursor, to change its title, to turn text around. So whatever is meant for people leaves here with such characters
//! escaped; data for programs goes out as it is, unless it is a terminal that it goes to.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often a plain (non-terminal) progress line is printed.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Whether a terminal might act on a character rather than show it: controls (C0, DEL, C1) and what changes the direction of text.
fn is_command(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200e}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2066}'..='\u{2069}'
                | '\u{feff}'
        )
}

fn escaped<'a>(text: &'a str, keep: &[char]) -> Cow<'a, str> {
    let commands = |c: char| is_command(c) && !keep.contains(&c);
    if !text.contains(commands) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\n' | '\r' | '\t' if commands(c) => out.extend(c.escape_default()),
            c if commands(c) => {
                let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// A text of any origin as a terminal may be given it: lines and tabs stay, everything else that a terminal acts on is escaped.
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, &['\n', '\t'])
}

/// The same on one line: a text that is part of a line can't begin another.
pub fn visible_line(text: &str) -> Cow<'_, str> {
    escaped(text, &[])
}

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
            let _ = writeln!(std::io::stderr(), "{}", visible(text));
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

    /// Writes text for people to standard output.
    ///
    /// # Errors
    /// When standard output is closed or full.
    pub fn text(&self, text: &str) -> std::io::Result<()> {
        self.out(&visible(text))
    }

    /// Writes data for programs to standard output, as it is unless people see it.
    ///
    /// # Errors
    /// When standard output is closed or full.
    pub fn data(&self, text: &str) -> std::io::Result<()> {
        if std::io::stdout().is_terminal() {
            return self.text(text);
        }
        self.out(text)
    }

    fn out(&self, text: &str) -> std::io::Result<()> {
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
        bar.set_prefix(visible_line(label).into_owned());
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
        let message = message.into();
        self.bar.set_message(visible_line(&message).into_owned());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_escaped() {
        for (text, shown) in [
            ("\u{1b}]0;title\u{7}a", "\\u{1b}]0;title\\u{7}a"),
            ("a\u{7f}\u{9b}2J", "a\\u{7f}\\u{9b}2J"),
            ("\u{202e}txt.exe\u{2066}", "\\u{202e}txt.exe\\u{2066}"),
            ("a\rb\0", "a\\rb\\u{0}"),
            ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ] {
            assert_eq!(visible(text), shown);
        }
        assert_eq!(visible_line("a\nb\tc\r"), "a\\nb\\tc\\r");
        for plain in ["größer · 12 % …", "家族👨‍👩‍👧", "\\u{1b}", ""] {
            assert!(matches!(visible_line(plain), Cow::Borrowed(same) if same == plain));
        }
    }
}
