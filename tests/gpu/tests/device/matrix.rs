//! Ways to shard and to step give the same training on devices as on the CPU.

use std::collections::BTreeSet;

use fsdp_test_support::combinations::Combination;
use fsdp_test_support::tolerance;
use fsdp_test_support::trajectory::{Difference, Trajectory};
use fsdp_tests_gpu::{Way, Which, number};

/// A run on devices against the recorded one, or one on the CPU where that is the same training.
fn same_as(way: &Way<'_>, reference: &Trajectory, near: Difference) {
    let dir = tempfile::tempdir().unwrap();
    let ours = way.train(dir.path());
    let difference = ours.difference(reference);
    println!("{} x {}, {:?}: {difference:?}", way.model, way.ranks, way.flags);
    assert!(difference.is_within(near), "{way:?}: {difference:?}");
    assert_eq!(ours.skipped(), reference.skipped(), "{way:?}");
}

fn on_cpu(way: &Way<'_>) -> Trajectory {
    let dir = tempfile::tempdir().unwrap();
    Way { engine: Which::Cpu, ..way.clone() }.train(dir.path())
}

/// Every so many of the combinations of sharding and stepping: `FSDP_GPU_EVERY`, or few that have each flag's values.
fn combinations() -> Vec<Combination> {
    let (all, every) = (Combination::all(), number("FSDP_GPU_EVERY", 29));
    let chosen: Vec<_> = all.iter().copied().step_by(every).collect();
    if every <= 29 {
        let values = |of: &[Combination]| of.iter().flat_map(|one| one.flags().into_iter().enumerate()).collect();
        let (some, whole): (BTreeSet<_>, BTreeSet<_>) = (values(&chosen), values(&all));
        assert_eq!(some, whole, "values of flags that no combination has");
    }
    chosen
}

#[test]
fn every_way_to_shard_is_the_same_training() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let four_sequences = Trajectory::recorded(model, "run");
        let eight_sequences = on_cpu(&Way { batch: 8, ..Way::recorded(model, 1) });
        for combination in combinations() {
            let want = if combination.sequences() == 4 { &four_sequences } else { &eight_sequences };
            let (batch, flags) = (combination.batch_size(), combination.flags());
            same_as(&Way { batch, flags: &flags, ..Way::recorded(model, combination.ranks) }, want, tolerance::SAME);
        }
    }
}

#[test]
fn offload_is_the_same_training() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let ways: [(usize, &[&str]); 3] = [
            (2, &["--offload", "cpu"]),
            (2, &["--offload", "cpu", "--activation-checkpoint", "full", "--prefetch", "2"]),
            (4, &["--offload", "cpu", "--replicate", "2", "--reshard-after-forward", "never"]),
        ];
        for (ranks, flags) in ways {
            same_as(
                &Way { flags, ..Way::recorded(model, ranks) },
                &Trajectory::recorded(model, "run"),
                tolerance::SAME,
            );
        }
    }
}

#[test]
fn lora_is_the_same_training_as_on_the_cpu() {
    let flags = ["--lora-rank", "4", "--lora-targets", "all-linear"];
    let way = Way { flags: &flags, ..Way::recorded("llama_tiny", 2) };
    same_as(&way, &on_cpu(&way), tolerance::SAME);
}

/// Half precision is rounded where the device's operations round, which the CPU's are not everywhere.
#[test]
fn bf16_follows_the_recorded_training() {
    for (model, reduce) in [("llama_tiny", "f32"), ("llama_tiny", "bf16"), ("gpt2_tiny", "f32")] {
        let flags = ["--param-dtype", "bf16", "--reduce-dtype", reduce];
        let recorded = Trajectory::recorded(model, &format!("run_bf16_reduce_{reduce}"));
        same_as(&Way { flags: &flags, ..Way::recorded(model, 2) }, &recorded, tolerance::BF16);
    }
}

/// With a loss scale that is good, and with one that is too large: then the first steps are skipped, as recorded.
#[test]
fn f16_follows_the_recorded_training() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        for (run, scale) in [("run_f16_reduce_f32", "65536"), ("run_f16_overflow", "9e5")] {
            let flags = ["--param-dtype", "f16", "--loss-scale", scale];
            let recorded = Trajectory::recorded(model, run);
            assert_eq!(recorded.skipped().is_empty(), run == "run_f16_reduce_f32");
            same_as(&Way { flags: &flags, ..Way::recorded(model, 2) }, &recorded, tolerance::F16);
        }
    }
}

/// The scales of 8-bit shards are those of the host, and so a run in f32 is as near to the recorded one as there.
#[test]
fn float8_gathers_follow_the_recorded_training() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let recorded = Trajectory::recorded(model, "run_float8_gather");
        for flags in [&["--all-gather", "float8"][..], &["--all-gather", "float8", "--offload", "cpu"]] {
            same_as(&Way { flags, ..Way::recorded(model, 2) }, &recorded, tolerance::FLOAT8);
        }
    }
}
