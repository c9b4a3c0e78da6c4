//! The `fsdp-ckpt` command: looks into checkpoints.

mod inspect;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Look into sharded checkpoints.
///
/// A checkpoint is a directory with a checkpoint.json and one safetensors file for each rank that wrote it. Its tensors are whole, however many ranks
/// wrote them: what is shown are global shapes.
#[derive(Parser)]
#[command(
    version,
    after_help = "EXAMPLES:
    fsdp-ckpt inspect runs/llama/step-00000010      what is in it
    fsdp-ckpt verify runs/llama/step-00000010       is it undamaged

Exit status: 0 when all is well, 1 when not, 2 for a wrong command line."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show a checkpoint's mesh, tensors, files and values.
    ///
    /// Reads the manifest only, so it is as fast for a large model as for a small one; files are checked for being there with the right size.
    Inspect {
        /// The checkpoint: a directory with a checkpoint.json.
        dir: PathBuf,
        /// Write JSON, for programs: mesh, world_size, created_by, tensors (dtype, shape, bytes, chunks), files, values.
        #[arg(long)]
        json: bool,
    },
    /// Read everything in a checkpoint and check it against its checksums.
    ///
    /// Names the first tensor and file that are damaged. Takes as long as reading all files.
    Verify {
        /// The checkpoint: a directory with a checkpoint.json.
        dir: PathBuf,
    },
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let done = match Cli::parse().command {
        Command::Inspect { dir, json } => inspect::run(&dir, json),
        Command::Verify { dir } => verify::run(&dir),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough, as in `fsdp-ckpt inspect DIR | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fsdp-ckpt: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
