//! Tests over processes that `fsdp-launch` starts: one program, because each links all of Candle.
#![allow(clippy::unwrap_used, missing_docs)]

mod bad_input;
mod chaos;
mod from_pytorch;
mod golden;
mod hosts;
mod launchers;
mod matrix;
mod memory;
mod memory_options;
mod pytorch;
mod readme;
mod resume;
mod tensorboard;
mod trace;
