//! Collectives of the memory of CUDA devices, with processes as ranks. They run with the device double
//! (`scripts/gpu-double`) and on machines with as many devices as ranks.
#![allow(clippy::unwrap_used, missing_docs)]

mod conformance;
mod memory;
mod nccl;
mod over_host;
mod padded;
mod ranks;
mod roles;
mod values;
