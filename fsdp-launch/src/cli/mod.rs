//! The command line: its options, their meaning together, and its error messages.

pub(crate) mod args;
mod help;
mod plan;
pub(crate) mod usage;
