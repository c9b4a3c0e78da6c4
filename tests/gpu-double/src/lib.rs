//! CUDA's driver, cuBLAS, cuRAND, NVRTC and NCCL, as far as Candle and this project call them, on the CPU. One library
//! under all of their names, so that they share state.

mod operation;
