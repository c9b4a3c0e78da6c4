//! Starting a measurement's ranks where no launcher has.

use std::process::ExitCode;

use anyhow::Context;
use fsdp_examples::console::Console;
use fsdp_launch::{LaunchSpec, LinePrefix, launch};

/// Starts this program, with the arguments that it has, once for each of `ranks` ranks, and waits for all.
pub(crate) fn start(ranks: usize) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("can't tell which program this is")?;
    let mut spec = LaunchSpec::new(program, ranks);
    spec.args = std::env::args_os().skip(1).collect();
    spec.logs.line_prefix = LinePrefix::none();
    let outcome = launch(&spec)?;
    if !outcome.succeeded() {
        Console::Stderr.line(&outcome);
    }
    Ok(ExitCode::from(outcome.exit_code()))
}
