//! Measurements of the library, each printed as a table or, with `--json`, as one JSON object: `fsdp-launch --nproc-per-node 2 bench --help`.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod ckpt;
mod collectives;
mod finite;
mod memory;
mod ranks;

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use fsdp_examples::console::Console;

/// Counts every allocation of the process, for `bench memory`.
#[global_allocator]
static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// Measures candle-fsdp on this machine. Start it under fsdp-launch:
///
///     fsdp-launch --nproc-per-node 2 bench collectives
///
/// `bench ckpt --world 2` starts its ranks by itself.
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// How fast checkpoints are saved and loaded, and for how long an asynchronous save stops training.
    Ckpt(ckpt::Args),
    /// How long collectives take.
    Collectives(collectives::Args),
    /// What it costs to know that all numbers are finite: in each step, and before a save.
    Finite(finite::Args),
    /// What a training step keeps in memory on each rank, and what it needs on top for a moment.
    Memory(memory::Args),
}

/// Prints a line of results, which are what a measurement is for: an error where they would be lost.
fn print(line: impl Display) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("can't print the results")
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let What::Ckpt(ckpt::Args { world: Some(world), .. }) = cli.what
        && world > 1
        && std::env::var_os("WORLD_SIZE").is_none()
    {
        return ranks::start(usize::from(world)).unwrap_or_else(|error| {
            Console::Stderr.line(format_args!("Error: {error:#}"));
            ExitCode::FAILURE
        });
    }
    fsdp_examples::job::run(|world| match cli.what {
        What::Ckpt(args) => ckpt::run(&args, world),
        What::Collectives(args) => collectives::run(&args, world),
        What::Finite(args) => finite::run(&args, world),
        What::Memory(args) => memory::run(&args, world),
    })
}
