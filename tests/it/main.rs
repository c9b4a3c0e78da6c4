//! Tests over processes that `fsdp-launch` starts: one program, because each links all of Candle.
#![allow(clippy::unwrap_used, missing_docs)]

mod adapters;
mod alike;
mod bad_input;
mod candle_gradients;
mod candle_nn;
mod candle_transformers;
mod changed;
mod chaos;
mod completions;
mod dpo;
mod dropout;
mod exports;
mod fine_tuning;
mod finite;
mod from_pytorch;
// The device double has no kernels of quantized products.
#[cfg(not(feature = "device"))]
mod gguf;
mod golden;
mod golden_optimizers;
mod gradcheck;
mod hub;
mod launchers;
mod layering;
mod lost_output;
mod main_job;
mod matrix;
mod memory;
mod memory_options;
mod offload_disk;
mod peers;
mod plan;
mod pytorch;
mod readme;
mod resume;
mod sft;
mod sizes;
mod tensor_parallel;
mod tensorboard;
mod texts;
mod threads;
mod trace;
mod tutorial;
mod writable;
