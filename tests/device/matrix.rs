//! Training on devices matches training on the CPU for all kinds of sharding and steps.

use std::collections::BTreeSet;

use crate::train_run::{Engine, TrainRun, number};
use fsdp_test_support::combinations::Combination;
use fsdp_test_support::trajectory::{Difference, Trajectory};
use fsdp_test_support::{golden, tolerance};

/// Compares a run on devices with the recorded run, or with an equal run on the CPU.
fn same_as(run: &TrainRun<'_>, reference: &Trajectory, near: Difference) {
    let dir = tempfile::tempdir().unwrap();
    let ours = run.train(dir.path());
    let difference = ours.difference(reference);
    println!("{} x {}, {:?}: {difference:?}", run.model, run.ranks, run.flags);
    assert!(difference.is_within(near), "{run:?}: {difference:?}");
    assert_eq!(ours.skipped(), reference.skipped(), "{run:?}");
}

fn on_cpu(run: &TrainRun<'_>) -> Trajectory {
    let dir = tempfile::tempdir().unwrap();
    TrainRun { engine: Engine::Cpu, ..run.clone() }.train(dir.path())
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
fn every_sharding_matches() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let four_sequences = Trajectory::recorded(model, "run");
        let eight_sequences = on_cpu(&TrainRun { batch: 8, ..TrainRun::recorded(model, 1) });
        for combination in combinations() {
            let want = if combination.sequences() == 4 { &four_sequences } else { &eight_sequences };
            let (batch, flags) = (combination.batch_size(), combination.flags());
            same_as(
                &TrainRun { batch, flags: &flags, ..TrainRun::recorded(model, combination.ranks) },
                want,
                tolerance::SAME,
            );
        }
    }
}

#[test]
fn offload_matches() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let ways: [(usize, &[&str]); 3] = [
            (2, &["--offload", "cpu"]),
            (2, &["--offload", "cpu", "--activation-checkpoint", "full", "--prefetch", "2"]),
            (4, &["--offload", "cpu", "--replicate", "2", "--reshard-after-forward", "never"]),
        ];
        for (ranks, flags) in ways {
            same_as(
                &TrainRun { flags, ..TrainRun::recorded(model, ranks) },
                &Trajectory::recorded(model, "run"),
                tolerance::SAME,
            );
        }
    }
}

#[test]
fn lora_matches_the_cpu() {
    let flags = ["--lora-rank", "4", "--lora-targets", "all-linear"];
    let run = TrainRun { flags: &flags, ..TrainRun::recorded("llama_tiny", 2) };
    same_as(&run, &on_cpu(&run), tolerance::SAME);
}

/// Rows of several documents, and positions that restart in each. Gemma 2 also has windows and caps.
#[test]
fn packed_documents_match_the_cpu() {
    let examples = golden("examples.jsonl").display().to_string();
    let flags = ["--sft", &examples, "--seq-len", "64"];
    for model in ["llama_tiny", "gpt2_tiny", "gemma2_tiny"] {
        let run = TrainRun { flags: &flags, ..TrainRun::recorded(model, 2) };
        same_as(&run, &on_cpu(&run), tolerance::SAME);
    }
}

#[test]
fn dropout_matches_the_cpu() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let run = TrainRun { flags: &["--dropout", "0.2"], ..TrainRun::recorded(model, 2) };
        same_as(&run, &on_cpu(&run), tolerance::SAME);
    }
}

/// Half precision is rounded where the device's operations round, which the CPU's are not everywhere.
#[test]
fn bf16_matches_the_recorded_run() {
    for (model, reduce, attention) in [
        ("llama_tiny", "f32", "own"),
        ("llama_tiny", "f32", "cudnn"),
        ("llama_tiny", "bf16", "own"),
        ("gpt2_tiny", "f32", "own"),
    ] {
        let variables = &[("FSDP_ATTENTION_BACKEND", attention)];
        let flags = ["--param-dtype", "bf16", "--reduce-dtype", reduce];
        let recorded = Trajectory::recorded(model, &format!("run_bf16_reduce_{reduce}"));
        let run = TrainRun { flags: &flags, variables, ..TrainRun::recorded(model, 2) };
        same_as(&run, &recorded, tolerance::BF16);
    }
}

/// With a loss scale that is good, and with one that is too large: then the first steps are skipped, as recorded.
#[test]
fn f16_matches_the_recorded_run() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        for (run, scale) in [("run_f16_reduce_f32", "65536"), ("run_f16_overflow", "9e5")] {
            let flags = ["--param-dtype", "f16", "--loss-scale", scale];
            let recorded = Trajectory::recorded(model, run);
            assert_eq!(recorded.skipped().is_empty(), run == "run_f16_reduce_f32");
            same_as(&TrainRun { flags: &flags, ..TrainRun::recorded(model, 2) }, &recorded, tolerance::F16);
        }
    }
}

/// The double's cuBLASLt adds f32 products of the same codes.
#[test]
fn float8_products_match_the_recorded_runs() {
    for (flag, run) in [
        ("float8", "run_float8_tensorwise"),
        ("float8-rowwise", "run_float8_rowwise"),
        ("float8-rowwise-gw-hp", "run_float8_rowwise_with_gw_hp"),
    ] {
        let flags = ["--compute", flag];
        let recorded = Trajectory::recorded("llama_float8_tiny", run);
        let near = Difference { loss: 2e-2, grad_norm: 0.15 };
        same_as(&TrainRun { flags: &flags, ..TrainRun::recorded("llama_float8_tiny", 1) }, &recorded, near);
    }
}

/// 8-bit shards have the same scales as on the CPU, so a run in f32 is as close to the recorded one.
#[test]
fn float8_gathers_match_the_recorded_run() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        let recorded = Trajectory::recorded(model, "run_float8_gather");
        for flags in [&["--all-gather", "float8"][..], &["--all-gather", "float8", "--offload", "cpu"]] {
            same_as(&TrainRun { flags, ..TrainRun::recorded(model, 2) }, &recorded, tolerance::FLOAT8);
        }
    }
}
