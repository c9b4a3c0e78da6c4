//! The crate's integration tests, in one program so that it links once.
#![allow(clippy::unwrap_used, missing_docs)]

mod cli;
mod damage;
mod export;
mod failures;
mod load;
mod save_load;
mod world;
