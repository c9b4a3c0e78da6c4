//! Parameters sharded by tensor parallelism and FSDP.

mod gradients;
mod layout;
mod model;
mod optimizers;
mod parity;
mod pytorch;
mod state;
