//! Training has the same bits on every schedule of a device. Only the device double has schedules.

use crate::train_run::{TrainRun, number};

/// `FSDP_GPU_SEEDS` is the number of schedules.
#[test]
fn every_schedule_gives_the_same_bits() {
    let (hsdp, lean) = (["--replicate", "2", "--grad-accum", "2"], ["--activation-checkpoint", "full"]);
    let recorded = TrainRun { steps: 2, ..TrainRun::recorded("llama_tiny", 2) };
    let runs = [
        TrainRun { flags: &lean, ..recorded.clone() },
        TrainRun { flags: &["--offload", "cpu"], ..recorded.clone() },
        TrainRun { flags: &["--reshard-after-forward", "never"], model: "gpt2_tiny", ..recorded },
        TrainRun { flags: &hsdp, steps: 2, ..TrainRun::recorded("llama_tiny", 4) },
    ];
    for run in runs {
        let mut first = None;
        for seed in 0..number("FSDP_GPU_SEEDS", 3) as u64 {
            let dir = tempfile::tempdir().unwrap();
            let steps = TrainRun { seed, ..run.clone() }.train(dir.path());
            let first = first.get_or_insert_with(|| steps.clone());
            assert_eq!(steps, *first, "seed {seed}");
        }
    }
}
