//! Parameters that tensor parallelism has cut, beside FSDP.

mod layout;
mod model;
mod optimizers;
mod parity;
mod pytorch;
mod state;
mod steps;
