//! The `fsdp-ckpt` command: looks into checkpoints, checks, converts and compares them.

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
use indicatif::{ProgressBar, ProgressStyle};

/// Look into sharded checkpoints, check them, convert them, compare them.
///
/// Every command finds out the format of what it reads: a directory with a checkpoint.json (fsdp), a Hugging Face model
/// directory, the directory of PyTorch's HuggingFaceStorageWriter, a single safetensors file (hf), or what PyTorch
/// itself writes. Tensors are whole, however many ranks wrote them: shapes are global. No command changes what
/// it reads.
#[derive(Parser)]
#[command(
    version,
    after_help = "EXAMPLES:
    fsdp-ckpt inspect runs/llama                                  which steps a run has
    fsdp-ckpt inspect runs/llama/step-00000010                    what is in one, and which file holds what
    fsdp-ckpt verify runs/llama/step-00000010                     is it undamaged
    fsdp-ckpt convert runs/llama/step-00000010 out --to hf        as a Hugging Face model
    fsdp-ckpt diff runs/llama/step-00000010 out                   are they equal

Exit status: 0 when all is well, 1 when not, 2 for a wrong command line."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show a checkpoint's tensors, files and values, and which file holds what; or the steps of a run.
    ///
    /// Reads headers and manifests only, so it is as fast for a large model as for a small one. Layers that are alike
    /// are shown once.
    #[command(after_help = "EXAMPLES:
    fsdp-ckpt inspect runs/llama                                  the steps, and which of them are whole
    fsdp-ckpt inspect runs/llama/step-00000010 --svg files.svg    which file holds what, as a picture
    fsdp-ckpt inspect model.safetensors --json                    for programs")]
    Inspect {
        /// A checkpoint or model, or a directory of steps.
        dir: PathBuf,
        /// Write JSON, for programs: format, mesh, tensors (dtype, shape, bytes, chunks), files, values; of a run its
        /// steps.
        #[arg(long)]
        json: bool,
        /// Draw which file holds what as an SVG picture, to this file.
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// Show every tensor, alike or not.
        #[arg(long)]
        full: bool,
    },
    /// Read everything in a checkpoint and check it against its checksums.
    ///
    /// Names all that is damaged: tensor, file, and how. It takes as long as reading all files. Where a format keeps no
    /// checksums, files are only checked for being whole.
    ///
    /// What was saved undamaged may still be of no use: --finite looks for numbers that are NaN or infinite, and fails
    /// where it finds any.
    #[command(after_help = "EXAMPLES:
    fsdp-ckpt verify runs/llama/step-00000010
    fsdp-ckpt verify runs/llama/step-00000010 --finite            and are its numbers finite
    fsdp-ckpt verify runs/llama/step-00000010 --json | jq .damaged")]
    Verify {
        /// A checkpoint or model.
        dir: PathBuf,
        /// Look for NaNs and infinities in all floating point tensors, too; each tensor with any is listed, with how
        /// many, and where the first is.
        #[arg(long)]
        finite: bool,
        /// Write JSON, for programs: ok, files, chunks, bytes, covered (what the checksums are of), damaged,
        /// non_finite.
        #[arg(long)]
        json: bool,
    },
    /// Write a checkpoint or model in another format, for another world size, or in another dtype.
    ///
    /// Tensors are streamed: a checkpoint of any size needs little memory. The destination must not exist and appears
    /// as a whole or not at all. A source with checksums is verified first.
    Convert(convert::Convert),
    /// Write a checkpoint as one safetensors file, or a few with an index, under the names that it has.
    ///
    /// It does what PyTorch's consolidate_hf_safetensors_files does, for every format: it writes all tensors, the
    /// optimizer's too, and renames nothing. `convert --to hf` writes what others take for a model: the parameters
    /// alone, by their own names.
    Consolidate(convert::Consolidate),
    /// Compare two checkpoints or models, whatever their formats.
    ///
    /// Exit status 0 when they are equal, 1 when they differ by more than the tolerance allows. When one has a model
    /// alone and the other a whole training state, the parameters are compared.
    #[command(after_help = "EXAMPLES:
    fsdp-ckpt diff runs/a/step-00000010 runs/b/step-00000010              equal to the bit?
    fsdp-ckpt diff runs/a/step-00000010 model --rtol 1e-2 --atol 1e-5     nearly equal? dtypes may differ then")]
    Diff(diff::Diff),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let done = match Cli::parse().command {
        Command::Inspect { dir, json, svg, full } => inspect::run(&dir, json, svg.as_deref(), full).map(|()| true),
        Command::Verify { dir, finite, json } => verify::run(&dir, finite, json),
        Command::Convert(command) => command.run().map(|()| true),
        Command::Consolidate(command) => command.run().map(|()| true),
        Command::Diff(command) => command.run(),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // Whoever reads our output has seen enough, as in `fsdp-ckpt inspect DIR | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => match error.downcast::<clap::Error>() {
            // Options that contradict each other.
            Ok(usage) => usage.format(&mut Cli::command()).exit(),
            Err(error) => {
                // Where stderr is closed, the exit status has to do.
                let _ = writeln!(std::io::stderr(), "fsdp-ckpt: {}", escape(format!("{error:#}")));
                ExitCode::FAILURE
            }
        },
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Opens what a path holds. That a run is no checkpoint is told in the words of whoever gave its path.
pub(crate) fn open(path: &Path) -> anyhow::Result<Box<dyn TensorSource>> {
    fsdp_ckpt::open(path).map_err(|error| match inspect::steps::newest(path) {
        Some(step) => anyhow::anyhow!(
            "{} holds the steps of a run; name one of them, as in {}",
            path.display(),
            path.join(step).display()
        ),
        None => error.into(),
    })
}

/// A value as pretty JSON, on stdout. Characters that steer a terminal stand in strings only, and JSON has escapes for
/// all of them.
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

/// A bar over `bytes` bytes. Nothing is drawn where stderr is no terminal.
pub(crate) fn bar(what: &'static str, bytes: u64) -> ProgressBar {
    // The template is a constant that a test reads; a bar without it would still be a bar.
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(bytes).with_style(style.progress_chars("=> ")).with_message(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_one() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
