//! Options of `torchrun` that have nothing to do here: accepted, so that its command lines work, or refused with what
//! to use in their place.

use std::time::Duration;

use crate::cli::values::seconds;

/// The options; nothing reads their values.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Accepted, without effect")]
pub(crate) struct TorchrunOnly {
    /// The launcher is told at once when a rank ends
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS", value_parser = seconds)]
    #[arg(allow_negative_numbers = true)]
    #[arg(env = "PET_MONITOR_INTERVAL", hide_env = true)]
    monitor_interval: Option<Duration>,

    /// Every rank is a new process
    #[arg(long, alias = "start_method", value_name = "METHOD", value_parser = ["spawn", "fork", "forkserver"])]
    #[arg(env = "PET_START_METHOD", hide_env = true)]
    start_method: Option<String>,

    /// Events are told on stderr only
    #[arg(long, alias = "event_log_handler", value_name = "NAME")]
    #[arg(env = "PET_EVENT_LOG_HANDLER", hide_env = true)]
    event_log_handler: Option<String>,

    /// `default`
    #[arg(long, alias = "logs_specs", value_name = "NAME", value_parser = logs_specs, hide = true)]
    logs_specs: Option<()>,

    /// None
    #[arg(long, alias = "duplicate_stdout_filters", value_name = "FILTERS", value_parser = filters, hide = true)]
    #[arg(env = "PET_DUPLICATE_STDOUT_FILTERS", hide_env = true)]
    duplicate_stdout_filters: Option<()>,

    /// None
    #[arg(long, alias = "duplicate_stderr_filters", value_name = "FILTERS", value_parser = filters, hide = true)]
    #[arg(env = "PET_DUPLICATE_STDERR_FILTERS", hide_env = true)]
    duplicate_stderr_filters: Option<()>,
}

fn logs_specs(text: &str) -> Result<(), String> {
    if text == "default" {
        return Ok(());
    }
    Err("there are no classes of Python's here, only `default`; --log-dir, --redirects and --tee say what is kept"
        .into())
}

fn filters(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Ok(());
    }
    Err("lines can't be filtered here; --local-ranks-filter shows some ranks only, and --log-dir keeps all, for `grep`"
        .into())
}
