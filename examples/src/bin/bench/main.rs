//! Measurements of the library, each printed as a table or, with `--json`, as one JSON object:
//! `fsdp-launch --nproc-per-node 2 bench --help`.
//! Sizes on the command line.
//! Results, on stdout.
//! Starting a measurement's ranks where no launcher has.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::builder::RangedU64ValueParser;
use clap::{Parser, Subcommand};
use fsdp_candle::DeviceChoice;
use fsdp_examples::console::Console;
use fsdp_launch::{LaunchSpec, LinePrefix, launch};

mod ckpt;
mod collectives;
mod communication;
mod finite;
mod memory;
mod meter;
mod plan;
mod residual;
mod step;

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
    /// What a training run would need and how fast it would be, by arithmetic: memory of a rank, time of a step,
    /// communication that compute waits for, and the best mesh. Nothing runs, so it needs no launcher.
    Plan(Box<plan::Args>),
    /// How long a training step of a real model takes, and the memory that it needs.
    Step(step::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let What::Ckpt(ckpt::Args { world: Some(world), .. }) = cli.what
        && world > 1
        && std::env::var_os("WORLD_SIZE").is_none()
    {
        return start_ranks(usize::from(world)).unwrap_or_else(failed);
    }
    if let What::Plan(args) = &cli.what {
        return plan::run(args).map_or_else(failed, |()| ExitCode::SUCCESS);
    }
    let device = match &cli.what {
        What::Memory(args) => args.device,
        What::Step(args) => args.device,
        _ => DeviceChoice::Cpu,
    };
    fsdp_examples::job::run(device, |world| match cli.what {
        What::Ckpt(args) => ckpt::run(&args, world),
        What::Collectives(args) => collectives::run(&args, world),
        What::Finite(args) => finite::run(&args, world),
        What::Memory(args) => memory::run(&args, world),
        What::Plan(args) => plan::run(&args),
        What::Step(args) => step::run(&args, world),
    })
}

fn failed(error: anyhow::Error) -> ExitCode {
    Console::Stderr.line(format_args!("Error: {error:#}"));
    ExitCode::FAILURE
}

/// Reads a number from 1 to `most`. Below that, products of such numbers are numbers still, and memory that is not
/// there is an error of the library's.
pub(crate) fn count(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// Prints a line of results, which are what a measurement is for: an error where they would be lost.
pub(crate) fn print(line: impl Display) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("can't print the results")
}

/// Starts this program, with the arguments that it has, once for each of `ranks` ranks, and waits for all.
fn start_ranks(ranks: usize) -> anyhow::Result<ExitCode> {
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
