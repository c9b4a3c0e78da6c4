//! The command line, in `torchrun`'s names. Every option is also understood with underscores for dashes, as `torchrun` does.

use std::{ffi::OsString, num::NonZeroU16, str::FromStr, time::Duration};

use clap::Parser;

use crate::{LaunchSpec, Result, find_program};

const AFTER_HELP: &str = "\
Example:
  fsdp-launch --nproc-per-node 2 train --steps 100

builds the binary or example `train` of the Cargo workspace you are in (release mode) and starts it twice, as rank 0 and rank 1. \
A name that is no target of a workspace is looked for beside fsdp-launch, then in PATH; a PROGRAM with a '/' in it is a path:
  fsdp-launch --nproc-per-node auto ./target/release/train
  fsdp-launch --nproc-per-node 2 python3 train.py

Each rank finds who it is in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID and the other \
variables that torchrun sets. RAYON_NUM_THREADS and OMP_NUM_THREADS are set to cores / ranks unless you set them.

Output is printed line by line behind `[rank N] `. Where stderr is a terminal, rank 0's stderr goes there directly, so that its progress bar shows. \
The ranks' stdin is empty.

The first rank that fails ends the others: SIGTERM, then SIGKILL after --shutdown-timeout. (If it failed by an exit code, SIGTERM comes 0.3 s later, so \
that ranks which find the same thing wrong tell it.) The exit code is that rank's, or 128 + the number of the \
signal that killed it. Ctrl-C (also SIGTERM, SIGHUP) ends all ranks in the same way; a second Ctrl-C kills them at once. Processes that a rank \
left behind in its process group end with the launch.

RUST_LOG=fsdp_launch=debug shows what the launcher does.";

/// Starts one process per rank of a training program on this host, and ends them all when one fails.
#[derive(Parser, Debug)]
#[command(name = "fsdp-launch", version, after_long_help = AFTER_HELP, override_usage = "fsdp-launch [OPTIONS] PROGRAM [ARGS]...")]
#[command(after_help = "Example: fsdp-launch --nproc-per-node 2 train --steps 100     (--help tells more)")]
pub struct Args {
    /// Ranks to start on this host: a number, or `auto` or `cpu` for one per core
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value = "1")]
    pub nproc_per_node: ProcessCount,

    /// Where the ranks reach rank 0
    #[arg(long, alias = "master_addr", value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub master_addr: String,

    /// The port there [default: one that is free]
    #[arg(long, alias = "master_port", value_name = "PORT")]
    pub master_port: Option<NonZeroU16>,

    /// The run's id, TORCHELASTIC_RUN_ID [default: one that no other run has]
    #[arg(long, alias = "rdzv_id", value_name = "ID")]
    pub rdzv_id: Option<String>,

    /// How long ranks have to end after SIGTERM before they are killed
    #[arg(long, alias = "shutdown_timeout", value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub shutdown_timeout: Duration,

    /// The program, by name or by path, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_names = ["PROGRAM", "ARGS"], num_args = 1..)]
    pub command: Vec<OsString>,
}

impl Args {
    /// Finds or builds the program and puts the launch together.
    ///
    /// # Errors
    /// As [`find_program`].
    pub fn into_spec(self) -> Result<LaunchSpec> {
        let mut command = self.command.into_iter();
        let program = find_program(&command.next().unwrap_or_default())?;
        Ok(LaunchSpec {
            program,
            args: command.collect(),
            nproc_per_node: self.nproc_per_node.get(),
            master_addr: self.master_addr,
            master_port: self.master_port.map(NonZeroU16::get),
            run_id: self.rdzv_id,
            shutdown_timeout: self.shutdown_timeout,
        })
    }
}

/// How many ranks to start on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessCount {
    /// This many.
    Exactly(NonZeroU16),
    /// One per core that this process may use (`auto`, `cpu`).
    Cores,
}

impl ProcessCount {
    /// The number of ranks, at least 1.
    pub fn get(self) -> usize {
        match self {
            ProcessCount::Exactly(count) => usize::from(count.get()),
            ProcessCount::Cores => cores(),
        }
    }
}

impl FromStr for ProcessCount {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" | "cpu" => Ok(ProcessCount::Cores),
            number => number
                .parse()
                .map(ProcessCount::Exactly)
                .map_err(|_| format!("expected a number from 1 to {}, `auto` or `cpu`", u16::MAX)),
        }
    }
}

/// The cores that this process may use, at least 1.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> std::result::Result<Args, clap::Error> {
        Args::try_parse_from(line.split(' '))
    }

    #[test]
    fn what_follows_the_program_belongs_to_it() {
        let args = parse("fsdp-launch --nproc_per_node 2 train -x --nproc-per-node 7 -- --help").unwrap();
        assert_eq!(args.nproc_per_node.get(), 2);
        assert_eq!(args.command, ["train", "-x", "--nproc-per-node", "7", "--", "--help"]);
        assert_eq!(parse("fsdp-launch -- -odd name").unwrap().command, ["-odd", "name"]);
    }

    #[test]
    fn both_spellings_of_every_option() {
        for line in [
            "l --nproc-per-node=auto --master-addr=a --master-port=7 --rdzv-id=r --shutdown-timeout=0.5 p",
            "l --nproc_per_node=cpu --master_addr=a --master_port=7 --rdzv_id=r --shutdown_timeout=0.5 p",
        ] {
            let args = parse(line).unwrap();
            assert_eq!(args.nproc_per_node, ProcessCount::Cores);
            assert_eq!((args.master_addr.as_str(), args.master_port.map(u16::from)), ("a", Some(7)));
            assert_eq!((args.rdzv_id.as_deref(), args.shutdown_timeout), (Some("r"), Duration::from_millis(500)));
        }
    }

    #[test]
    fn bad_values_are_refused() {
        for line in [
            "l --nproc-per-node 0 p",
            "l --nproc-per-node -1 p",
            "l --nproc-per-node many p",
            "l --nproc-per-node 65536 p",
            "l --master-port 0 p",
            "l --master-port 65536 p",
            "l --shutdown-timeout -1 p",
            "l --shutdown-timeout inf p",
            "l --shutdown-timeout nan p",
            "l --no-such-option p",
            "l",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
