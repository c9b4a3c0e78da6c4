//! The `fsdp-launch` command.

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use clap::Parser;
use fsdp_launch::{Args, Result, launch};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let ansi = io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(ansi).without_time().init();
    run(args).unwrap_or_else(|error| {
        eprintln!("fsdp-launch: {error}");
        ExitCode::FAILURE
    })
}

fn run(args: Args) -> Result<ExitCode> {
    let outcome = launch(&args.into_spec()?)?;
    if !outcome.succeeded() {
        eprintln!("fsdp-launch: {outcome}");
    }
    Ok(ExitCode::from(outcome.exit_code()))
}
