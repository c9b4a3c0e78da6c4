//! Runs of `train` on devices, and the counts that the device double reports.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, golden_flags_of, not_given, program};
use serde_json::Value;

/// The engine of collectives on device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// NCCL.
    Nccl,
    /// NCCL between ranks on one device.
    NcclShared,
    /// Staging in host memory, as for ranks that share a device.
    Host,
    /// The ranks compute on the CPU.
    Cpu,
}

/// A run of `train` on a recorded model.
#[derive(Clone, Debug)]
pub(crate) struct TrainRun<'a> {
    /// The recorded model.
    pub(crate) model: &'a str,
    /// The number of ranks.
    pub(crate) ranks: usize,
    /// Sequences for each rank and micro-batch.
    pub(crate) batch: usize,
    /// The engine of collectives.
    pub(crate) engine: Engine,
    /// The number of steps.
    pub(crate) steps: usize,
    /// The seed of the double's schedule.
    pub(crate) seed: u64,
    /// Further flags.
    pub(crate) flags: &'a [&'a str],
    /// Further environment variables.
    pub(crate) variables: &'a [(&'a str, &'a str)],
}

impl<'a> TrainRun<'a> {
    /// Returns the recorded run, with its sequences divided over the ranks.
    pub(crate) fn recorded(model: &'a str, ranks: usize) -> Self {
        let (engine, steps, seed, batch) = (Engine::Nccl, 20, 0, 4 / ranks);
        TrainRun { model, ranks, batch, engine, steps, seed, flags: &[], variables: &[] }
    }

    /// Runs `train` in `dir`, where the double writes its reports.
    pub(crate) fn start(&self, dir: &Path) -> Run {
        let mut command = Command::new(program("fsdp-launch"));
        let recorded = not_given(&golden_flags_of(self.model, self.steps), self.flags);
        command.arg(format!("--nproc-per-node={}", self.ranks)).arg(program("train")).args(recorded);
        command.args(["--batch-size", &self.batch.to_string(), "--metrics", "metrics.jsonl"]);
        let device = if self.engine == Engine::Cpu { "cpu" } else { "cuda" };
        command.args(["--device", device]).args(self.flags).current_dir(dir);
        let backend = match self.engine {
            Engine::Host => "host",
            Engine::NcclShared => "nccl-shared",
            Engine::Nccl | Engine::Cpu => "nccl",
        };
        command.env("FSDP_DEVICE_BACKEND", backend);
        if self.engine == Engine::NcclShared {
            command.env("GPU_DOUBLE_DEVICES", "1");
        }
        // As in users' runs. fsdp-candle's own tests check every call.
        command.env("FSDP_NCCL_CHECK", "timeout").env("GPU_DOUBLE_SEED", self.seed.to_string());
        // The small models fit into one segment of the default size.
        command.env("GPU_DOUBLE_REPORT", dir).env("GPU_DOUBLE_SEGMENT", "131072");
        command.envs(self.variables.iter().copied());
        fsdp_test_support::run(command, Duration::from_secs(300))
    }

    /// Runs `train` and returns its losses and norms.
    ///
    /// # Panics
    /// When the run fails.
    pub(crate) fn train(&self, dir: &Path) -> Trajectory {
        self.start(dir).ok();
        Trajectory::of_metrics(&dir.join("metrics.jsonl"))
    }
}

/// Returns a number from an environment variable.
///
/// # Panics
/// When the value is not a number.
pub(crate) fn number(name: &str, usual: usize) -> usize {
    let parse = |text: String| text.parse().unwrap_or_else(|_| panic!("{name}={text}: it must be a number"));
    std::env::var(name).map_or(usual, parse)
}

/// The counts of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Counts(Value);

impl Counts {
    /// Returns the counts of each rank of a run with `GPU_DOUBLE_REPORT` set to this directory.
    ///
    /// # Panics
    /// When a rank wrote no report.
    pub(crate) fn of(directory: &Path, ranks: usize) -> Vec<Self> {
        let read = |rank: usize| {
            let path = directory.join(format!("rank-{rank}.json"));
            let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            Counts(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        };
        (0..ranks).map(read).collect()
    }

    /// Returns a number of the whole process, such as `peak_bytes`.
    ///
    /// # Panics
    /// When the report has no number of this name.
    pub(crate) fn bytes(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("the double did not count {name}: {}", self.0))
    }

    /// Returns the counts of a category, by name.
    pub(crate) fn by_name(&self, category: &str) -> Vec<(String, u64)> {
        let counts = self.0["counts"][category].as_object().into_iter().flatten();
        counts.map(|(name, count)| (name.clone(), count.as_u64().unwrap_or(0))).collect()
    }

    /// Returns the sum of a category's counts whose name `is_it` accepts.
    pub(crate) fn sum(&self, category: &str, is_it: impl Fn(&str) -> bool) -> u64 {
        self.by_name(category).into_iter().filter(|(name, _)| is_it(name)).map(|(_, count)| count).sum()
    }
}
