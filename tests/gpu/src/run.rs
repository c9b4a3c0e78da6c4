//! Runs of `train` on devices.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, golden_flags_of, program};

/// Which engine moves the devices' memory between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// NCCL.
    Nccl,
    /// The host's memory, as for ranks that share a device.
    Host,
    /// The ranks compute on the CPU, and nothing is on a device.
    Cpu,
}

/// A run of `train` on a recorded model.
#[derive(Clone, Debug)]
pub struct Way<'a> {
    /// The recorded model.
    pub model: &'a str,
    /// The number of ranks.
    pub ranks: usize,
    /// Sequences a rank and micro-batch.
    pub batch: usize,
    /// What moves memory.
    pub engine: Which,
    /// How many steps.
    pub steps: usize,
    /// The seed of the double's schedule.
    pub seed: u64,
    /// Further flags.
    pub flags: &'a [&'a str],
}

impl<'a> Way<'a> {
    /// As it was recorded, with its sequences dealt to the ranks.
    pub fn recorded(model: &'a str, ranks: usize) -> Self {
        Way { model, ranks, batch: 4 / ranks, engine: Which::Nccl, steps: 20, seed: 0, flags: &[] }
    }

    /// Runs it in `dir`, where the double leaves what it counted.
    pub fn start(&self, dir: &Path) -> Run {
        let mut command = Command::new(program("fsdp-launch"));
        command
            .arg(format!("--nproc-per-node={}", self.ranks))
            .arg(program("train"))
            .args(golden_flags_of(self.model, self.steps));
        command.args(["--batch-size", &self.batch.to_string(), "--metrics", "metrics.jsonl"]);
        let device = if self.engine == Which::Cpu { "cpu" } else { "cuda" };
        command.args(["--device", device]).args(self.flags).current_dir(dir);
        command.env("FSDP_DEVICE_BACKEND", if self.engine == Which::Host { "host" } else { "nccl" });
        // As users run it: what fsdp-candle's own tests do not.
        command.env("FSDP_NCCL_CHECK", "timeout").env("GPU_DOUBLE_SEED", self.seed.to_string());
        // A model as small as these fits into one segment of the usual size.
        command.env("GPU_DOUBLE_REPORT", dir).env("GPU_DOUBLE_SEGMENT", "131072");
        fsdp_test_support::run(command, Duration::from_secs(300))
    }

    /// Its losses and norms.
    ///
    /// # Panics
    /// When it fails.
    pub fn train(&self, dir: &Path) -> Trajectory {
        self.start(dir).ok();
        Trajectory::of_metrics(&dir.join("metrics.jsonl"))
    }
}

/// A variable of the environment that says how much is run.
///
/// # Panics
/// When it is no number.
pub fn number(name: &str, usual: usize) -> usize {
    let parse = |text: String| text.parse().unwrap_or_else(|_| panic!("{name}={text}: it must be a number"));
    std::env::var(name).map_or(usual, parse)
}
