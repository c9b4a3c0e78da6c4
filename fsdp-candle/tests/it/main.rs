//! Sharded models against plain ones, with ranks as threads.
#![allow(clippy::unwrap_used, missing_docs)]

mod accumulation;
mod checkpointing;
mod common;
mod communication;
mod contract;
mod heartbeat;
mod lora;
mod numerics;
mod parity;
mod placements;
mod settings;
mod state_dict;
mod unused;
