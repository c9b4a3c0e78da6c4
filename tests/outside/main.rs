//! Tests that need more than Rust: PyTorch, MPI, network namespaces, Slurm, Kubernetes' schema and mounts.
//!
//! A test without its requirements is ignored, with the reason. With `FSDP_TESTS_REQUIRE=all`, as in CI, it fails, except
//! the comparison with llama.cpp, which nothing installs.
#![allow(clippy::unwrap_used, missing_docs)]

mod across_hosts;
mod full_disk;
mod gpu_acceptance;
mod hosts;
mod launchers;
mod limited_memory;
mod local_checkpoints;
mod lost_hosts;
mod manifests;
mod need;
mod network;
mod one_gpu;
mod pytorch;
mod slurm;
mod way;

use libtest_mimic::Arguments;

fn main() {
    let trials = [
        across_hosts::trials(),
        full_disk::trials(),
        gpu_acceptance::trials(),
        hosts::trials(),
        launchers::trials(),
        limited_memory::trials(),
        local_checkpoints::trials(),
        lost_hosts::trials(),
        manifests::trials(),
        one_gpu::trials(),
        pytorch::trials(),
        slurm::trials(),
    ];
    let trials = trials.into_iter().flatten().collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit()
}
