//! Ways to shard and to step give the same training on devices as on the CPU.

use fsdp_tests::trajectory::Trajectory;
use fsdp_tests_gpu::{Way, Which};

/// Each run on devices against the same on the CPU, or against the recorded one where it is the same training.
fn same_as(way: &Way<'_>, reference: &Trajectory, most: f64) {
    let dir = tempfile::tempdir().unwrap();
    let difference = way.train(dir.path()).difference(reference);
    println!("{} x {}, {:?}: {difference:?}", way.model, way.ranks, way.flags);
    assert!(difference.max() < most, "{way:?}: {difference:?}");
}

fn on_cpu(way: &Way<'_>) -> Trajectory {
    let dir = tempfile::tempdir().unwrap();
    Way { engine: Which::Cpu, ..way.clone() }.train(dir.path())
}

#[test]
fn every_way_to_shard_is_the_recorded_training() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let recorded = Trajectory::recorded(model, "run");
        let ways: [(usize, usize, &[&str]); 6] = [
            (4, 1, &["--replicate", "2"]),
            (2, 2, &["--reshard-after-forward", "never"]),
            (4, 1, &["--reshard-after-forward", "2", "--activation-checkpoint", "full"]),
            (2, 2, &["--offload", "cpu"]),
            (2, 1, &["--grad-accum", "2", "--grad-sync", "every"]),
            (2, 1, &["--grad-accum", "2", "--grad-sync", "last", "--prefetch", "2"]),
        ];
        for (ranks, batch, flags) in ways {
            same_as(&Way { batch, flags, ..Way::recorded(model, ranks) }, &recorded, 2e-5);
        }
    }
}

#[test]
fn lora_is_the_same_training_as_on_the_cpu() {
    let flags = ["--lora-rank", "4", "--lora-targets", "all-linear"];
    let way = Way { flags: &flags, ..Way::recorded("llama_tiny", 2) };
    same_as(&way, &on_cpu(&way), 2e-5);
}

/// Half precision is rounded where the device's operations round: not bit by bit where the CPU's do.
#[test]
fn half_precision_follows_the_cpu() {
    for (dtype, most) in [("bf16", 2e-2), ("f16", 4e-3)] {
        let flags = ["--param-dtype", dtype, "--reduce-dtype", "f32"];
        let way = Way { flags: &flags, ..Way::recorded("llama_tiny", 2) };
        same_as(&way, &on_cpu(&way), most);
    }
}
