//! Sharded models against plain ones, with ranks as threads.
#![allow(clippy::unwrap_used, missing_docs)]

mod accumulation;
mod building;
mod by_name;
mod checkpointing;
mod common;
mod communication;
mod contract;
mod finite;
mod gradcheck;
mod graph_cut;
mod heartbeat;
mod layers;
mod looks;
mod lora;
mod memory;
mod mesh;
mod mismatch;
mod numerics;
mod optimizers;
mod parity;
mod past_the_hooks;
mod placements;
mod settings;
mod state_dict;
mod unused;
