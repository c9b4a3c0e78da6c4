//! The `fsdp-launch` command.

use std::{
    io::{self, ErrorKind, IsTerminal, Write},
    process::ExitCode,
};

use clap::{CommandFactory, Parser};
use fsdp_launch::{Action, Args, Console, Result, StatusArgs, dry_run, launch, one_line, status};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

fn main() -> ExitCode {
    fsdp_core::file_limit::return_errors();
    let args = match Args::try_parse() {
        Ok(args) => args,
        // --help and --version are also errors to clap.
        Err(error) if !error.use_stderr() => error.exit(),
        Err(error) => {
            tell(&one_line(&error));
            return ExitCode::from(2);
        }
    };
    start_logging();
    run(args).unwrap_or_else(|error| {
        tell(&error.to_string());
        ExitCode::from(error.exit_code())
    })
}

fn run(args: Args) -> Result<ExitCode> {
    if let Some(shell) = args.print_completion {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Args::command(), "fsdp-launch", &mut script);
        // In bash completions for a command name with a dash, clap_complete uses two different names for a subcommand's
        // functions.
        let script = String::from_utf8_lossy(&script).replace("fsdp__subcmd__launch", "fsdp__launch");
        return Ok(printed(script.as_bytes()));
    }
    if let Some(Action::Status(args)) = &args.action {
        return show_status(args);
    }
    if args.dry_run {
        let (spec, build) = args.plan()?;
        let text = dry_run(&spec)?;
        let build = build.map_or_else(String::new, |command| format!("# built first by: {command}\n"));
        return Ok(printed((build + &text).as_bytes()));
    }
    let spec = args.into_spec()?;
    let outcome = launch(&spec)?;
    if !outcome.succeeded() || outcome.restarts > 0 {
        tell(&outcome.to_string());
    }
    if let (true, None, Some(dir)) = (outcome.succeeded(), &spec.logs.dir, &outcome.log_dir) {
        tell(&format!("the logs are in {} (--log-dir sets another directory)", dir.display()));
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

fn show_status(args: &StatusArgs) -> Result<ExitCode> {
    let runs = status(args.run.as_deref());
    let text = match (args.json, runs) {
        (true, Ok(runs)) => format!("{:#}\n", serde_json::json!(runs)),
        (false, Ok(runs)) => runs.iter().map(|run| format!("{run}\n")).collect::<Vec<_>>().join("\n"),
        (_, Err(error)) => return Err(error),
    };
    Ok(printed(text.as_bytes()))
}

/// Prints a message to stderr, if it has a reader.
fn tell(text: &str) {
    Console::Stderr.print_line(&format!("fsdp-launch: {text}"));
}

/// Prints to stdout. A closed pipe (`| head`) is not reported.
fn printed(text: &[u8]) -> ExitCode {
    match Console::Stdout.write_all(text) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        Err(error) => tell(&format!("can't write to stdout: {error}")),
    }
    ExitCode::FAILURE
}

/// Starts logging. Call it once.
fn start_logging() {
    let filter = std::env::var("RUST_LOG").ok().and_then(|text| EnvFilter::try_new(with_warnings(&text)).ok());
    let filter = filter.unwrap_or_else(|| EnvFilter::new("warn"));
    let ansi = io::stderr().is_terminal();
    let to_stderr = || Console::Stderr.writer_with_timeout();
    // The default error handler would panic if stderr can't be written.
    let subscriber = tracing_subscriber::fmt().log_internal_errors(false).with_writer(to_stderr);
    subscriber.with_env_filter(filter).with_ansi(ansi).without_time().init();
}

/// Adds the launcher's warnings to a `RUST_LOG` filter, which is usually meant for the training program. A filter that
/// names the launcher, or a level for everything, stays as it is.
fn with_warnings(filter: &str) -> String {
    let speaks_of_us = |directive: &str| {
        let target = directive.split(['=', '[']).next().unwrap_or_default();
        directive.parse::<LevelFilter>().is_ok() || target.split("::").next() == Some("fsdp_launch")
    };
    let mut directives: Vec<&str> = filter.split(',').map(str::trim).filter(|it| !it.is_empty()).collect();
    if !directives.iter().any(|it| speaks_of_us(it)) {
        directives.push("fsdp_launch=warn");
    }
    directives.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_filters_for_the_launcher_change_its_warnings() {
        for filter in ["foo=debug", "foo", "foo=debug,bar::baz=off", "[span]=info", "fsdp_launcher=error"] {
            assert_eq!(with_warnings(filter), format!("{filter},fsdp_launch=warn"));
        }
        for filter in ["debug", "off", "ERROR", "foo=debug,error", "fsdp_launch=off", "fsdp_launch::output=debug", "2"]
        {
            assert_eq!(with_warnings(filter), filter);
        }
        assert_eq!(with_warnings(" "), "fsdp_launch=warn");
    }
}
