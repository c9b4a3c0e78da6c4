//! How a wrong command line is told.

/// A wrong command line in one line: the option, its value, and what it must be.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let usage = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
    let lines: Vec<&str> =
        text.lines().map(str::trim).take_while(|line| !usage(line)).filter(|line| !line.is_empty()).collect();
    format!("{} (--help tells more)", lines.join(" ").trim_start_matches("error: "))
}
