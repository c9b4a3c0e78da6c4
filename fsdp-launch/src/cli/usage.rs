//! One-line messages for a wrong command line.

use std::env;

use clap::{
    CommandFactory,
    error::{ContextKind, ContextValue},
};

use crate::Args;

/// Formats a command-line error as one line: the option or variable, its value, and the expected value.
pub fn one_line(error: &clap::Error) -> String {
    let mut text = error.to_string();
    if let (Some(option), Some(value)) =
        (context(error, ContextKind::InvalidArg), context(error, ContextKind::InvalidValue))
    {
        let name = option.split([' ', '=']).next().unwrap_or_default();
        if let Some(variable) = variable_of(name, value) {
            text = text.replace(&format!("'{option}'"), &format!("'{option}' from {variable}"));
        }
        if name == "--rdzv-backend" {
            text = text.replace(
                "\n\nFor more",
                "; use c10d instead of others: the launchers serve the rendezvous themselves\n\nFor more",
            );
        }
    }
    let usage = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
    // Drop clap's tip for arguments of the program: a misspelt option is more likely.
    let is_told = |line: &&str| !line.is_empty() && !line.starts_with("tip: to pass ");
    let lines: Vec<&str> = text.lines().map(str::trim).take_while(|line| !usage(line)).filter(is_told).collect();
    format!("{} (--help tells more)", lines.join(" ").trim_start_matches("error: "))
}

fn context(error: &clap::Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    }
}

/// Returns the variable that set the option, unless the command line did.
fn variable_of(option: &str, value: &str) -> Option<String> {
    let long = option.strip_prefix("--")?;
    let command = Args::command();
    let variable = command.get_arguments().find(|arg| arg.get_long() == Some(long))?.get_env()?;
    let is_there = env::var_os(variable).is_some_and(|found| found == value);
    // An option on the command line takes precedence over its variable.
    let is_given = env::args_os().any(|arg| arg == value || arg.to_string_lossy().ends_with(&format!("={value}")));
    (is_there && !is_given).then(|| variable.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(line.split(' '))
    }

    #[test]
    fn bad_values_are_named_in_one_line() {
        for line in [
            "--nproc-per-node 0",
            "--nproc-per-node -1",
            "--nproc-per-node many",
            "--nproc-per-node 65536",
            "--nnodes 0",
            "--nnodes 2:1",
            "--node-rank -1",
            "--node-rank 18446744073709551615",
            "--nproc-per-node 18446744073709551615",
            "--max-restarts 18446744073709551615",
            "--master-port 18446744073709551615",
            "--shutdown-timeout 1e30",
            "--heartbeat-timeout 1e30",
            "--rdzv-conf join_timeout=1e30",
            "--rdzv-conf keep_alive_max_attempt=18446744073709551615",
            "--role ",
            "--master-port 0",
            "--master-port 65536",
            "--master-addr ",
            "--rdzv-backend etcd",
            "--rdzv-endpoint host:port",
            "--rdzv-conf timeout",
            "--rdzv-conf join_timeout=soon",
            "--shutdown-timeout -1",
            "--shutdown-timeout inf",
            "--shutdown-timeout nan",
            "--heartbeat-timeout -1",
            "--heartbeat-timeout never",
            "--signals-to-handle SIGKILL",
            "--signals-to-handle SIGTERM,,",
            "--tee 4",
            "--redirects 0:1,1:x",
            "--local-ranks-filter all",
            "--log-line-prefix-template ${pid}",
            "--max-restarts -1",
            "--max-restarts 1.5",
            "--monitor-interval soon",
            "--numa-binding core",
            "--print-completion dos",
        ] {
            let (flag, value) = line.split_once(' ').unwrap();
            let error = Args::try_parse_from(["l", &format!("{flag}={value}"), "p"]).unwrap_err();
            let message = one_line(&error);
            assert!(
                message.contains(flag) && message.contains(value) && message.lines().count() == 1,
                "{line}: {message}"
            );
            // The parser's own words are not shown.
            let is_ours = ["expected", "possible values", "can't be handled"].iter().any(|part| message.contains(part));
            assert!(is_ours && !message.contains("target type") && !message.contains("digit"), "{line}: {message}");
            assert_eq!(error.exit_code(), 2);
        }
        for line in [
            "l --no-such-option p",
            "l",
            "l --module --no-python p",
            "l --pin-cores --numa-binding node p",
            "l --nproc-per-node",
        ] {
            let message = one_line(&parse(line).unwrap_err());
            assert!(!message.contains("status [RUN]") && message.lines().count() == 1, "{line}: {message}");
        }
    }
}
