//! Ranks as processes: each test runs this binary again, once for each rank, with the name of a role.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, CudaStream};
use fsdp_core::{
    ProcessGroup, RankEnv, Result,
    device::cuda,
    process_group::{Nccl, Options, shm},
};

/// Nothing takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(240);

/// Ranks that run.
pub(crate) struct Job(Vec<Child>);

/// Starts a rank for each of `devices`, which the rank computes on, with `role` and further variables.
pub(crate) fn start(role: &str, devices: &[usize], variables: &[(&str, &str)]) -> Job {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let port = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
    let children = devices.iter().enumerate().map(|(rank, device)| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "roles::run_as_a_rank", "--nocapture", "--test-threads=1"])
            .env("FSDP_TEST_ROLE", role)
            .env("FSDP_TEST_DEVICE", device.to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", devices.len().to_string())
            .env("MASTER_PORT", &port)
            .env("TORCHELASTIC_RUN_ID", format!("cuda test {}", std::process::id()))
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    Job(children.collect())
}

/// Devices of a rank each.
pub(crate) fn own(ranks: usize) -> Vec<usize> {
    (0..ranks).collect()
}

impl Job {
    /// Returns the text that each rank printed after "says: ", or its exit status.
    pub(crate) fn outcomes(mut self) -> Vec<String> {
        let started = Instant::now();
        let outcome = |child: &mut Child| {
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status.to_string(),
                    None if started.elapsed() > HANG => {
                        child.kill().unwrap();
                        child.wait().unwrap();
                        break "hung".to_string();
                    }
                    None => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            let mut text = String::new();
            child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            match text.lines().find_map(|line| line.split_once("says: ")) {
                // The text counts only if the rank succeeded.
                Some((_, said)) if status.ends_with(" 0") => said.to_string(),
                _ => format!("{status}: {text}"),
            }
        };
        self.0.iter_mut().map(outcome).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
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
