//! Whatever a device does late, the training is the same to the last bit, and nothing waits for luck. Only the device
//! double can be asked to be late.

use fsdp_tests_gpu::{Way, number};

/// `FSDP_GPU_SEEDS` says how many schedules.
#[test]
fn every_schedule_gives_the_same_bits() {
    let (hsdp, lean) = (["--replicate", "2", "--grad-accum", "2"], ["--activation-checkpoint", "full"]);
    let recorded = Way { steps: 2, ..Way::recorded("llama_tiny", 2) };
    let ways = [
        Way { flags: &lean, ..recorded.clone() },
        Way { flags: &["--offload", "cpu"], ..recorded.clone() },
        Way { flags: &["--reshard-after-forward", "never"], model: "gpt2_tiny", ..recorded },
        Way { flags: &hsdp, steps: 2, ..Way::recorded("llama_tiny", 4) },
    ];
    for way in ways {
        let mut first = None;
        for seed in 0..number("FSDP_GPU_SEEDS", 3) as u64 {
            let dir = tempfile::tempdir().unwrap();
            let steps = Way { seed, ..way.clone() }.train(dir.path());
            let first = first.get_or_insert_with(|| steps.clone());
            assert_eq!(steps, *first, "seed {seed}");
        }
    }
}
