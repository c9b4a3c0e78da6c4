//! Benchmarks of the library, printed as tables or, with `--json`, as JSON: `fsdp-launch --nproc-per-node 2 bench
//! --help`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::builder::RangedU64ValueParser;
use clap::{CommandFactory, Parser, Subcommand};
use fsdp_candle::DeviceChoice;
use fsdp_core::{env, file_limit};
use fsdp_launch::{LaunchSpec, LinePrefix, launch};
use fsdp_train::command_line;
use fsdp_train::console::Console;

mod attention;
mod ckpt;
mod collectives;
mod communication;
mod disk;
mod finite;
mod images;
mod kernels;
mod layers;
mod memory;
mod meter;
mod passes;
mod peers;
mod plan;
mod precision;
mod residual;
mod step;

/// Measures candle-fsdp on this machine. Start it under fsdp-launch:
///
///     fsdp-launch --nproc-per-node 2 bench collectives
///
/// `bench attention`, `kernels`, `layers`, `peers` and `plan` need no launcher, nor do `bench ckpt` and `bench step` with
/// `--world 2`.
#[derive(Parser)]
#[command(name = "bench", version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Time of causal attention by the number of tokens. Needs no launcher.
    Attention(attention::Args),
    /// Speed of saving and loading checkpoints, and the pause that an asynchronous save causes.
    Ckpt(ckpt::Args),
    /// Time of collectives.
    Collectives(collectives::Args),
    /// Time of an optimizer step with its state on disk.
    Disk(disk::Args),
    /// Cost of the checks for NaN and infinity: in each step, and before a save.
    Finite(finite::Args),
    /// Bandwidth and arithmetic of the kernels of a training step. Needs no launcher.
    Kernels(kernels::Args),
    /// Time of layers beside candle_nn's. Needs no launcher.
    Layers(layers::Args),
    /// Memory of a training step on each rank: between steps, and its peak.
    Memory(memory::Args),
    /// Time and memory of training steps and of attention beside PyTorch's, as a Markdown table. Needs no launcher.
    Peers(peers::Args),
    /// Predicted memory, time and communication of a training run, and its best mesh. Nothing runs, so it needs no
    /// launcher.
    Plan(Box<plan::Args>),
    /// Time and memory of a training step of a real model.
    Step(step::Args),
}

fn main() -> ExitCode {
    let cli: Cli = command_line::parse(Cli::command());
    file_limit::return_errors();
    if let Err(error) = env::check_threads() {
        return failed(error.into());
    }
    let ranks = match &cli.what {
        What::Ckpt(args) => args.world,
        What::Step(args) => args.world,
        _ => None,
    };
    if let Some(ranks) = ranks.filter(|&ranks| ranks > 1)
        && std::env::var_os("WORLD_SIZE").is_none()
    {
        return start_ranks(usize::from(ranks)).unwrap_or_else(failed);
    }
    let alone = match &cli.what {
        What::Attention(args) => Some(attention::run(args)),
        What::Layers(args) => Some(layers::run(args)),
        What::Peers(args) => Some(peers::run(args)),
        What::Plan(args) => Some(plan::run(args)),
        _ => None,
    };
    if let Some(outcome) = alone {
        return outcome.map_or_else(failed, |()| ExitCode::SUCCESS);
    }
    let device = match &cli.what {
        What::Kernels(args) => args.device,
        What::Memory(args) => args.device,
        What::Step(args) => args.device,
        _ => DeviceChoice::Cpu,
    };
    fsdp_train::job::run(device, |world| match cli.what {
        What::Ckpt(args) => ckpt::run(&args, world),
        What::Collectives(args) => collectives::run(&args, world),
        What::Disk(args) => disk::run(&args, world),
        What::Finite(args) => finite::run(&args, world),
        What::Kernels(args) => kernels::run(&args, world),
        What::Memory(args) => memory::run(&args, world),
        What::Step(args) => step::run(&args, world),
        // These ran above.
        What::Attention(_) | What::Layers(_) | What::Peers(_) | What::Plan(_) => Ok(()),
    })
}

fn failed(error: anyhow::Error) -> ExitCode {
    Console::Stderr.line(format_args!("Error: {error:#}"));
    ExitCode::FAILURE
}

/// Parses a number from 1 to `most`. The limits keep products of sizes below overflow.
pub(crate) fn count(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// Prints a line of results. Fails if it can't be written.
pub(crate) fn print(line: impl Display) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("can't print the results")
}

/// Starts this program with its arguments on `ranks` ranks, and waits for them.
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
