//! Entry point of a rank: joins the job, runs the work, and reports errors before it leaves.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fsdp_candle::{DeviceChoice, Error, World};
use fsdp_core::file_limit;
use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer};

use crate::console::Console;

/// Joins the job that the environment describes, and runs `work` on this rank.
///
/// An error is recorded for the launcher and printed with its causes before this rank leaves the job. Otherwise the
/// other ranks would print first that it left. Backtraces are left out, because errors are for the user.
pub fn run(device: DeviceChoice, work: impl FnOnce(&World) -> anyhow::Result<()>) -> ExitCode {
    file_limit::return_errors();
    // Shows which ranks this rank waits for. `work` sets up its own logging once it knows its rank.
    let join = || fsdp_candle::init_on(device);
    let joined = tracing::subscriber::with_default(tracing_subscriber::registry().with(events()), join);
    let joined = joined.map_err(|error| match error {
        Error::Device(_) | Error::Core(fsdp_core::Error::Device { .. }) => anyhow::Error::from(error),
        error => anyhow::Error::from(error).context("can't join the other ranks"),
    });
    let world = match joined {
        Ok(world) => world,
        Err(error) => return report(&error),
    };
    exit_code(work(&world))
}

/// Returns the exit code of a program. Records and prints an error.
pub fn exit_code(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

/// Returns a parser for the values of `--device`.
pub fn device_parser() -> impl TypedValueParser<Value = DeviceChoice> {
    let values =
        [("auto", "CUDA devices if there are any, else the CPU"), ("cpu", "The CPU"), ("cuda", "CUDA devices")];
    let values = values.map(|(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values).map(|name| match name.as_str() {
        "auto" => DeviceChoice::Auto,
        "cuda" => DeviceChoice::Cuda,
        _ => DeviceChoice::Cpu,
    })
}

/// Prints events to stderr as `RUST_LOG` selects them, and warnings by default.
pub fn events<S>() -> impl Layer<S>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(|| Console::Stderr)
        .with_filter(filter)
}

fn report(error: &anyhow::Error) -> ExitCode {
    let advice = file_limit::advice(error.as_ref()).map_or_else(String::new, |advice| format!(": {advice}"));
    let words = without_backtraces(&format!("{error:#}{advice}"));
    fsdp_core::record_error(&words);
    Console::Stderr.line(format_args!("Error: {words}"));
    ExitCode::FAILURE
}

/// Removes the backtrace that Candle adds to error messages under `RUST_BACKTRACE`.
fn without_backtraces(text: &str) -> String {
    // A frame is its number, right-aligned in four columns, and its name. The next line may hold its location.
    let is_frame = |line: &str| {
        let number = line.split_once(": ").map_or("", |(number, _)| number);
        let is_number = number.len() == 4 && number.trim_start().parse::<u16>().is_ok();
        is_number && number.starts_with(' ') || line.starts_with("             at ")
    };
    text.lines().filter(|line| !is_frame(line)).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_backtrace_frames_are_removed() {
        let capture = std::backtrace::Backtrace::force_capture();
        let error = anyhow::anyhow!("the cause: 7\n  12 lines\n{capture}").context("the error");
        assert_eq!(without_backtraces(&format!("{error:#}")), "the error: the cause: 7\n  12 lines");
    }
}
