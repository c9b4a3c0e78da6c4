//! Tensor parallelism beside FSDP.

mod layout;
mod model;
mod parity;
mod state;
mod steps;
