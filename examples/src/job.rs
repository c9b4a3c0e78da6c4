//! A rank's life in a job: joining, working, and telling what went wrong while the others still listen.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use fsdp_candle::World;

/// Joins the job that the environment describes and does this rank's work in it.
///
/// An error is recorded for the launcher and printed, with all of its causes and in one piece, before this rank leaves the job: the others would print
/// first that it left.
pub fn run(work: impl FnOnce(&World) -> anyhow::Result<()>) -> ExitCode {
    let world = match fsdp_candle::init().context("can't join the other ranks") {
        Ok(world) => world,
        Err(error) => return report(&error),
    };
    match work(&world) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

fn report(error: &anyhow::Error) -> ExitCode {
    fsdp_core::record_error(&format!("{error:#}"));
    // There is nowhere left to tell that stderr is closed.
    let _ = std::io::stderr().write_all(format!("Error: {error:?}\n").as_bytes());
    ExitCode::FAILURE
}
