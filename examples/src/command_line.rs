//! Command lines of the programs: parsed, or completed by a shell.

use clap::{Arg, Command, Parser, value_parser};
use clap_complete::{Shell, generate};

use crate::console::Console;

const FLAG: &str = "print-completion";

/// Parses the command line by `command`, which is `A`'s, maybe with other help. Ends the program after `--help`,
/// `--version` and `--print-completion`, and for a wrong command line.
pub fn parse<A: Parser>(command: Command) -> A {
    let command = with_completion(command);
    // Completions need no subcommand. Any other command line is parsed again, with the whole command's errors.
    let requested = command.clone().subcommand_required(false).try_get_matches();
    if let Some(shell) = requested.ok().and_then(|matches| matches.get_one::<Shell>(FLAG).copied()) {
        generate(shell, &mut command.clone(), command.get_name(), &mut Console::Stdout);
        std::process::exit(0);
    }
    A::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit())
}

fn with_completion(command: Command) -> Command {
    command.arg(
        Arg::new(FLAG)
            .long(FLAG)
            .value_name("SHELL")
            .value_parser(value_parser!(Shell))
            .exclusive(true)
            .help("Print shell completions for this command")
            .help_heading("Shell"),
    )
}
