//! A device double: CUDA's driver, cuBLAS, cuDNN, cuRAND, NVRTC and NCCL on the CPU, as far as Candle and this project
//! call them. One library has all of their names, so that they share state.
//!
//! `machine` runs the streams and detects missing waits; its docs explain the schedule and the settings. `memory`
//! explains the contents of memory before its time, and `report` the counts and the faults.

mod bytes;
mod cublas;
mod cudnn;
mod curand;
mod driver;
mod element;
mod kernels;
mod library_handles;
mod machine;
mod memory;
mod nccl;
mod nvrtc;
mod pool;
mod races;
mod report;
mod status;
mod streams;

#[cfg(test)]
mod tests;
