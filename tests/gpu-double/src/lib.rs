//! CUDA's driver, cuBLAS, cuRAND, NVRTC and NCCL, as far as Candle and this project call them, on the CPU. One library
//! under all of their names, so that they share state.
//!
//! `machine` says what runs when, and what is told of missing waits; `schedule` what a seed does; `copy` and `memory`
//! what is in memory that is not ready; `report` what is counted and how tests read it; `settings` which variables of
//! the environment there are.

mod allocation;
mod arena;
mod bytes;
mod clock;
mod context;
mod copy;
mod cublas;
mod curand;
mod driver;
mod event;
mod host_compiler;
mod kernels;
mod machine;
mod memory;
mod nccl;
mod nvrtc;
mod operation;
mod pinned;
mod pool;
mod queue;
mod race;
mod report;
mod schedule;
mod settings;
mod status;
mod stream;

#[cfg(test)]
mod tests;
