//! Tests over processes that `fsdp-launch` starts: one program, because each links all of Candle.
#![allow(clippy::unwrap_used, missing_docs)]

mod alike;
mod bad_input;
mod candle_nn;
mod candle_transformers;
mod chaos;
mod devices;
mod finite;
mod from_pytorch;
mod golden;
mod gradcheck;
mod imports;
mod launchers;
mod lost_output;
mod matrix;
mod memory;
mod memory_options;
mod pytorch;
mod readme;
mod resume;
mod sizes;
mod tensorboard;
mod trace;
mod width;
mod writable;
