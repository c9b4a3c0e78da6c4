//! Progress of downloads: what the ranks tell each other, and what rank 0 shows.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use parking_lot::Mutex;

use crate::console::Console;

const TEMPLATE: &str = "download {bytes}/{total_bytes} [{wide_bar:.cyan/blue}] {bytes_per_sec}  ETA {eta}";
/// Number of lines that a whole download prints to a file or a pipe.
const LINES: u64 = 10;

/// Work of this rank's downloads, as other threads see it.
#[derive(Default)]
pub(super) struct Activity {
    total: AtomicU64,
    done: AtomicU64,
    ticks: AtomicU64,
    note: Mutex<String>,
}

impl Activity {
    /// Counts bytes that are to be downloaded.
    pub(super) fn plan(&self, bytes: u64) {
        self.total.fetch_add(bytes, Relaxed);
        self.tick();
    }

    /// Counts bytes that are there. They are progress only if they were not there before.
    pub(super) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Relaxed);
    }

    /// Takes bytes back that have to be downloaded again.
    pub(super) fn subtract(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Relaxed);
    }

    /// Reports progress: a new byte, or work such as checking a file.
    pub(super) fn tick(&self) {
        self.ticks.fetch_add(1, Relaxed);
    }

    /// Returns a number that changes while there is progress.
    pub(super) fn ticks(&self) -> u64 {
        self.ticks.load(Relaxed)
    }

    /// Returns the bytes that are there, and all bytes.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.done.load(Relaxed), self.total.load(Relaxed))
    }

    /// Records the reason for a pause.
    pub(super) fn note(&self, why: String) {
        *self.note.lock() = why;
    }

    /// Returns the last reason for a pause.
    pub(super) fn last_note(&self) -> String {
        self.note.lock().clone()
    }
}

/// Display of all hosts' downloads on stderr: a bar on a terminal, plain lines elsewhere.
pub(super) struct Display {
    bar: Option<ProgressBar>,
    is_terminal: bool,
    lines: u64,
}

impl Display {
    pub(super) fn new() -> Self {
        Display { bar: None, is_terminal: io::stderr().is_terminal(), lines: 0 }
    }

    /// Shows the bytes that are there, of all hosts together.
    pub(super) fn show(&mut self, done: u64, total: u64) {
        if total == 0 {
            return;
        }
        if self.is_terminal {
            let style = || ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
            let new = || ProgressBar::new(total).with_style(style().progress_chars("=> "));
            let bar = self.bar.get_or_insert_with(new);
            bar.set_length(total);
            bar.set_position(done);
            return;
        }
        let due = (u128::from(done) * u128::from(LINES) / u128::from(total)) as u64;
        if due > self.lines {
            self.lines = due;
            Console::Stderr.line(format_args!("downloaded {} of {}", BinaryBytes(done), BinaryBytes(total)));
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_is_valid() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }

    #[test]
    fn tenths_are_lines() {
        let mut display = Display { bar: None, is_terminal: false, lines: 0 };
        let lines = [(0, 0), (0, 100), (9, 100), (10, 100), (55, 100), (56, 100), (100, 100)].map(|(done, total)| {
            display.show(done, total);
            display.lines
        });
        assert_eq!(lines, [0, 0, 0, 1, 5, 5, 10]);
    }
}
