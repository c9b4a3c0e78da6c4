//! Sharded models against plain ones, with ranks as threads.
#![allow(clippy::unwrap_used, missing_docs)]

mod checkpointing;
mod common;
mod contract;
mod features;
mod lora;
mod parity;
