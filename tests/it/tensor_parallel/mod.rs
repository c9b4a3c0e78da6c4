//! `train --tensor-parallel` with and without FSDP and replicas.

mod checkpoints;
mod communication;
mod documented;
mod families;
mod golden;
mod refusals;

use std::path::Path;

use fsdp_test_support::trajectory::{Difference, Trajectory};
use fsdp_test_support::{Run, merge_flags, train_golden};

/// PyTorch's runs differ from each other by 4.3e-7, this project's from them by 1.1e-6. Adam steps along rounding
/// errors if a true gradient is zero: Qwen 2's norms differ by 3.4e-6, and by 1e-5 between one rank and three.
const NEAR: Difference = Difference { loss: 5e-6, grad_norm: 1e-5 };
/// Sequences of a step.
const SEQUENCES: usize = 6;

/// A mesh of four ranks with a run that PyTorch recorded.
struct Mesh {
    record: &'static str,
    flags: &'static str,
    /// Ranks that read different data.
    readers: usize,
}

const DP2_TP2: Mesh = Mesh { record: "dp2_tp2", flags: "--tensor-parallel 2", readers: 2 };
const TP4: Mesh = Mesh { record: "tp4", flags: "--tensor-parallel 4", readers: 1 };
const REPLICATE2_TP2: Mesh = Mesh { record: "replicate2_tp2", flags: "--replicate 2 --tensor-parallel 2", readers: 2 };
const SEQUENCE: &str = "--sequence-parallel";

/// Trains as the recorded runs did, on four ranks.
fn train(model: &str, mesh: &Mesh, flags: &str, dir: &Path) -> (Trajectory, Run) {
    train_on(4, model, mesh.readers, &format!("{} {flags}", mesh.flags), dir)
}

/// Trains as the recorded runs did, on any number of ranks, of which `readers` read different data.
fn train_on(ranks: usize, model: &str, readers: usize, flags: &str, dir: &Path) -> (Trajectory, Run) {
    let flags = merge_flags(&format!("--batch-size {}", SEQUENCES / readers), flags);
    let run = train_golden(model, ranks, &flags, dir).ok();
    (Trajectory::of_metrics(&dir.join("metrics.jsonl")), run)
}

fn assert_near(ours: &Trajectory, want: &Trajectory, about: &str) {
    let difference = ours.difference(want);
    assert!(difference.is_within(NEAR), "{about}: {difference:?}");
}
