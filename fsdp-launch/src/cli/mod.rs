//! The command line: its options, what they mean together, and how a wrong one is told.

pub(crate) mod args;
mod help;
mod plan;
pub(crate) mod rendezvous_conf;
mod torchrun_only;
pub(crate) mod usage;
mod values;
