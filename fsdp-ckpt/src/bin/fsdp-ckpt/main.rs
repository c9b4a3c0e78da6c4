//! The `fsdp-ckpt` command: inspects, verifies, converts, merges and compares checkpoints.

mod convert;
mod diff;
mod inspect;
mod verify;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};
use fsdp_ckpt::{TensorSource, escape};
use fsdp_core::{env, file_limit};
use indicatif::{ProgressBar, ProgressStyle};

/// Inspect, verify, convert and compare sharded checkpoints.
///
/// Every command detects the format of its input: a directory with a checkpoint.json (fsdp); a Hugging Face model
/// directory, a directory of PyTorch's HuggingFaceStorageWriter or a safetensors file (hf); a DCP directory
/// (torch-dcp); a file of torch.save (torch). Shapes are global, however many ranks saved the tensors. No command
/// changes its input.
#[derive(Parser)]
#[command(
    version,
    after_help = "EXAMPLES:
    fsdp-ckpt inspect runs/llama                                  which steps a run has
    fsdp-ckpt inspect runs/llama/step-00000010                    what is in one, and which file holds what
    fsdp-ckpt verify runs/llama/step-00000010                     is it undamaged
    fsdp-ckpt convert runs/llama/step-00000010 out --to hf        as a Hugging Face model
    fsdp-ckpt convert out out.gguf --to gguf --quantize q4_k_m    for llama.cpp
    fsdp-ckpt merge base-model adapters merged                    adapters into weights
    fsdp-ckpt diff runs/llama/step-00000010 out                   are they equal

Exit status: 0 when all is well, 1 when not, 2 for a wrong command line."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the tensors, files and values of a checkpoint, or the steps of a run.
    ///
    /// Reads headers and manifests only. Shows layers that are alike once.
    #[command(after_help = "EXAMPLES:
    fsdp-ckpt inspect runs/llama                                  the steps, and which of them are whole
    fsdp-ckpt inspect runs/llama/step-00000010 --svg files.svg    which file holds what, as a picture
    fsdp-ckpt inspect model.safetensors --json                    for programs")]
    Inspect {
        /// A checkpoint or model, or a directory of steps.
        dir: PathBuf,
        /// Write JSON: format, mesh, tensors (dtype, shape, bytes, chunks), files, values; for a run, its steps.
        #[arg(long)]
        json: bool,
        /// Draw an SVG picture of the tensors in each file to this file.
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// Show every layer.
        #[arg(long)]
        full: bool,
    },
    /// Read a whole checkpoint and verify its checksums.
    ///
    /// Lists each damaged tensor with its file. If the format has no checksums, checks only that files are complete.
    ///
    /// With --finite, also fails if a number is NaN or infinite.
    #[command(after_help = "EXAMPLES:
    fsdp-ckpt verify runs/llama/step-00000010
    fsdp-ckpt verify runs/llama/step-00000010 --finite            and are its numbers finite
    fsdp-ckpt verify runs/llama/step-00000010 --json | jq .damaged")]
    Verify {
        /// A checkpoint or model.
        dir: PathBuf,
        /// Also list floating point tensors with NaN or infinity: how many, and where the first one is.
        #[arg(long)]
        finite: bool,
        /// Write JSON: ok, files, chunks, bytes, covered (the parts with checksums), damaged, non_finite.
        #[arg(long)]
        json: bool,
    },
    /// Write a checkpoint or model in another format, for another world size, or with another dtype.
    ///
    /// Streams tensors, so it needs little memory. The destination must not exist, and appears when it is complete.
    /// Verifies the source first, if it has checksums.
    Convert(convert::Convert),
    /// Write a checkpoint as one safetensors file, or a few with an index, and keep all names.
    ///
    /// Like PyTorch's consolidate_hf_safetensors_files, but for every format. Writes all tensors, including the
    /// optimizer's. `convert --to hf` writes only the parameters, under their own names.
    Consolidate(convert::Consolidate),
    /// Merge adapters (LoRA, in PEFT's format) into the weights of a model.
    ///
    /// Adds the product of an adapter's matrices to a weight in f32, and rounds the sum once to the weight's dtype.
    /// Streams tensors, so it needs little memory. Writes a Hugging Face model directory.
    Merge(convert::Merge),
    /// Compare two checkpoints or models of any format.
    ///
    /// The exit status is 0 if they match and 1 if they differ by more than the tolerance. If one is a model and the
    /// other a training state, compares only the parameters.
    #[command(after_help = "EXAMPLES:
    fsdp-ckpt diff runs/a/step-00000010 runs/b/step-00000010              equal to the bit?
    fsdp-ckpt diff runs/a/step-00000010 model --rtol 1e-2 --atol 1e-5     nearly equal? dtypes may differ then")]
    Diff(diff::Diff),
}

fn main() -> ExitCode {
    file_limit::return_errors();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let command = Cli::parse().command;
    let done = env::check_threads().map_err(anyhow::Error::from).and_then(|()| run(command));
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The reader closed the pipe, as in `fsdp-ckpt inspect DIR | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => match error.downcast::<clap::Error>() {
            // Conflicting options.
            Ok(usage) => usage.format(&mut Cli::command()).exit(),
            Err(error) => {
                // If stderr is closed, only the exit status tells.
                let advice =
                    file_limit::advice(error.as_ref()).map_or_else(String::new, |advice| format!(": {advice}"));
                let _ = writeln!(std::io::stderr(), "fsdp-ckpt: {}", escape(format!("{error:#}{advice}")));
                ExitCode::FAILURE
            }
        },
    }
}

/// Runs a command. Returns whether all is well.
fn run(command: Command) -> anyhow::Result<bool> {
    match command {
        Command::Inspect { dir, json, svg, full } => inspect::run(&dir, json, svg.as_deref(), full).map(|()| true),
        Command::Verify { dir, finite, json } => verify::run(&dir, finite, json),
        Command::Convert(command) => command.run().map(|()| true),
        Command::Consolidate(command) => command.run().map(|()| true),
        Command::Merge(command) => command.run().map(|()| true),
        Command::Diff(command) => command.run(),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Opens a path. For the directory of a run, the error suggests its newest step.
pub(crate) fn open(path: &Path) -> anyhow::Result<Box<dyn TensorSource>> {
    fsdp_ckpt::open(path).map_err(|error| match inspect::steps::newest(path) {
        Some(step) => anyhow::anyhow!(
            "{} is the directory of a run; pass one of its steps, such as {}",
            path.display(),
            path.join(step).display()
        ),
        None => error.into(),
    })
}

/// Prints a value as pretty JSON. Control characters occur only in strings, where JSON has escapes for them.
pub(crate) fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    let mut text = String::new();
    for c in format!("{value:#}\n").chars() {
        if c == '\n' || escape(c).to_string().chars().eq([c]) {
            text.push(c);
        } else {
            text.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

const TEMPLATE: &str =
    "{msg} [{wide_bar:.cyan/blue}] {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  ETA {eta}";

/// Creates a progress bar over `bytes` bytes, drawn only if stderr is a terminal.
pub(crate) fn bar(what: &'static str, bytes: u64) -> ProgressBar {
    // A test checks the template.
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(bytes).with_style(style.progress_chars("=> ")).with_message(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_is_valid() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
