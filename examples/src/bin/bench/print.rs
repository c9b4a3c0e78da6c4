//! Results, on stdout.

use std::fmt::Display;
use std::io::Write;

use anyhow::Context;

/// Prints a line of results, which are what a measurement is for: an error where they would be lost.
pub(crate) fn print(line: impl Display) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("can't print the results")
}
