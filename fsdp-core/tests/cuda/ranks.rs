//! Ranks as processes: each test runs this binary again, once for each rank, with the name of a role.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream};
use fsdp_core::{
    ProcessGroup, RankEnv, Result,
    device::cuda,
    process_group::{Nccl, Options, shm},
};
use fsdp_test_support::ranks::{self, Job};

/// Returns whether all ranks compute on device 0, each as a host of its own to NCCL, for tests on one GPU. NCCL is
/// then slow.
fn on_one_device() -> bool {
    std::env::var_os("FSDP_TEST_ONE_DEVICE").is_some()
}

/// Returns a time limit or a delay of a test. On one device it is longer.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(if on_one_device() { 5. * seconds } else { seconds })
}

/// Starts a rank for each of `devices`, which the rank computes on, with `role` and further variables.
pub(crate) fn start(role: &str, devices: &[usize], variables: &[(&str, &str)]) -> Job {
    let port = ranks::port();
    Job::start(devices.iter().enumerate().map(|(rank, device)| {
        let mut command = ranks::command("roles::run_as_a_rank", role, (rank, devices.len()), port);
        if on_one_device() {
            command.env("FSDP_TEST_DEVICE", "0").env("NCCL_HOSTID", format!("rank-{rank}"));
        } else {
            command.env("FSDP_TEST_DEVICE", device.to_string());
        }
        command.envs(variables.iter().copied());
        command
    }))
}

/// Devices of a rank each.
pub(crate) fn own(ranks: usize) -> Vec<usize> {
    (0..ranks).collect()
}

/// This rank's device, ready to be used: the stream that it computes on.
pub(crate) fn compute() -> Arc<CudaStream> {
    let device = std::env::var("FSDP_TEST_DEVICE").unwrap().parse().unwrap();
    let context = CudaContext::new(device).unwrap();
    cuda::ready(&context).unwrap();
    context.new_stream().unwrap()
}

/// The world of this job over the host's memory.
pub(crate) fn host(options: Options) -> Result<ProcessGroup> {
    shm::connect(&RankEnv::from_env()?, options)
}

/// The world of this job over NCCL.
pub(crate) fn nccl(options: Options, compute: &Arc<CudaStream>) -> Result<ProcessGroup> {
    let host = host(options)?;
    let engine = Nccl::new(&host, compute)?;
    host.on_device(Box::new(engine))
}
