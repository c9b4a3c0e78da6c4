//! Training on CUDA devices, or on the device double: `scripts/gpu-double cargo test -p fsdp-tests --features
//! device`.

mod checkpoints;
mod counts;
mod golden;
mod hosts;
mod matrix;
mod memory;
mod one_queue;
mod plan;
mod registered;
mod schedules;
mod sharing;
mod toolkit;
mod train_run;
