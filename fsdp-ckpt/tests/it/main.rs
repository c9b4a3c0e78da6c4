//! The crate's integration tests, in one program so that it links once.
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
mod host_dirs;
mod host_dirs_refused;
mod hostile;
mod kills;
mod load;
mod processes;
mod resharding;
mod retention;
mod save_load;
mod terminal;
mod torch;
mod world;
