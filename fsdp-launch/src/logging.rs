//! What the launcher says of itself, on stderr: warnings, and more where `RUST_LOG` asks for it.

use std::io::{self, IsTerminal};

use fsdp_launch::Console;
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// To be called once.
pub(crate) fn start() {
    let filter = std::env::var("RUST_LOG").ok().and_then(|text| EnvFilter::try_new(with_warnings(&text)).ok());
    let filter = filter.unwrap_or_else(|| EnvFilter::new("warn"));
    let ansi = io::stderr().is_terminal();
    let to_stderr = || Console::Stderr.for_own_words();
    // An error of writing to stderr would be told on stderr, by a macro that panics when that fails.
    let subscriber = tracing_subscriber::fmt().log_internal_errors(false).with_writer(to_stderr);
    subscriber.with_env_filter(filter).with_ansi(ansi).without_time().init();
}

/// `RUST_LOG` is most often meant for the training program, and does not take the launcher's warnings away unless it
/// speaks of the launcher, or of everything.
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
    fn only_who_speaks_of_the_launcher_changes_its_warnings() {
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
