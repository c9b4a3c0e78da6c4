//! CUDA's driver, cuBLAS, cuRAND, NVRTC and NCCL, as far as Candle and this project call them, on the CPU. One library
//! under all of their names, so that they share state.

mod allocation;
mod bytes;
mod clock;
mod context;
mod copy;
mod cublas;
mod curand;
mod driver;
mod event;
mod kernels;
mod machine;
mod memory;
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
