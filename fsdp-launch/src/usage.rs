//! How a wrong command line is told.

use std::env;

use clap::{
    CommandFactory,
    error::{ContextKind, ContextValue},
};

use crate::Args;

/// A wrong command line in one line: the option, or the variable in its place, its value, and what it must be.
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
                "; c10d serves in place of others: the launchers hold the rendezvous themselves\n\nFor more",
            );
        }
    }
    let usage = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
    // How to give the program what is no option of ours; an option was misspelt more likely.
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

/// The variable that gave the option this value, if the command line did not.
fn variable_of(option: &str, value: &str) -> Option<String> {
    let long = option.strip_prefix("--")?;
    let command = Args::command();
    let variable = command.get_arguments().find(|arg| arg.get_long() == Some(long))?.get_env()?;
    let is_there = env::var_os(variable).is_some_and(|found| found == value);
    // What is on the command line counts, and then the variable is not read.
    let is_given = env::args_os().any(|arg| arg == value || arg.to_string_lossy().ends_with(&format!("={value}")));
    (is_there && !is_given).then(|| variable.to_string_lossy().into_owned())
}
