//! The crate's integration tests, in one program that links once.
#![allow(clippy::unwrap_used, missing_docs)]

mod async_save;
mod cli;
mod cli_damage;
mod convert;
mod corpus;
mod damage;
mod disk_full;
mod docs;
mod export;
mod failures;
mod finite;
mod flips;
mod gated;
mod gguf;
mod host_dirs;
mod hostile;
mod kills;
mod load;
mod merge;
mod processes;
mod resharding;
mod run_dir;
mod terminal;
mod torch;
mod world;
