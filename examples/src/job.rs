//! A rank's life in a job: joining, working, and telling what went wrong while the others still listen.

use std::io::IsTerminal;
use std::process::ExitCode;

use fsdp_candle::{DeviceChoice, Error, World};
use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer};

use crate::console::Console;

/// Joins the job that the environment describes and does this rank's work in it.
///
/// An error is recorded for the launcher and printed, with all of its causes and in one piece, before this rank leaves
/// the job: the others would print first that it left. `RUST_BACKTRACE` shows where programs panic; an error is for the
/// user, and says by itself what is wrong.
pub fn run(work: impl FnOnce(&World) -> anyhow::Result<()>) -> ExitCode {
    run_on(DeviceChoice::Cpu, work)
}

/// [`run`], on other devices.
pub fn run_on(choice: DeviceChoice, work: impl FnOnce(&World) -> anyhow::Result<()>) -> ExitCode {
    // Shows for whom this rank waits; `work` may want to see more than events, but knows only then which rank it is.
    let join = || fsdp_candle::init_on(choice);
    let joined = tracing::subscriber::with_default(tracing_subscriber::registry().with(events()), join);
    let joined = joined.map_err(|error| match error {
        Error::Device(_) => anyhow::Error::from(error),
        error => anyhow::Error::from(error).context("can't join the other ranks"),
    });
    let world = match joined {
        Ok(world) => world,
        Err(error) => return report(&error),
    };
    match work(&world) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

/// Shows events on stderr as `RUST_LOG` asks; warnings, where it is silent.
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
    let words = without_backtraces(&format!("{error:#}"));
    fsdp_core::record_error(&words);
    Console::Stderr.line(format_args!("Error: {words}"));
    ExitCode::FAILURE
}

/// Candle's errors have the backtrace in their message where `RUST_BACKTRACE` asks for one.
fn without_backtraces(text: &str) -> String {
    // A frame is its number, to the right of four columns, and its name; the next line may say where that is.
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
    fn frames_are_left_out_and_nothing_else() {
        let capture = std::backtrace::Backtrace::force_capture();
        let error = anyhow::anyhow!("the cause: 7\n  12 lines\n{capture}").context("the error");
        assert_eq!(without_backtraces(&format!("{error:#}")), "the error: the cause: 7\n  12 lines");
    }
}
