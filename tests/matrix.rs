//! Every way to shard gives the same training: each combination of ranks, resharding, replication, accumulation, checkpointing and prefetch against what PyTorch
//! recorded.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use fsdp_tests::{golden, golden_flags, launch};
use serde_json::Value;

/// Losses and gradient norms of the steps.
type Trajectory = Vec<[f64; 2]>;

fn trajectory(records: impl Iterator<Item = Value>) -> Trajectory {
    records.map(|record| [record["loss"].as_f64().unwrap(), record["grad_norm"].as_f64().unwrap()]).collect()
}

fn recorded(name: &str) -> Trajectory {
    let record: Value = serde_json::from_str(&std::fs::read_to_string(golden(name).join("run.json")).unwrap()).unwrap();
    trajectory(record["trajectory"].as_array().unwrap().iter().cloned())
}

fn train(name: &str, ranks: usize, batch_size: usize, flags: &[&str], dir: &Path) -> Trajectory {
    let (golden, batch_size) = (golden_flags(name), batch_size.to_string());
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    args.extend(["--batch-size", &batch_size, "--metrics", "metrics.jsonl"]);
    args.extend(flags);
    launch(ranks, "train", &args, dir).ok();
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    trajectory(text.lines().map(|line| serde_json::from_str(line).unwrap()))
}

/// The largest relative difference of any loss or gradient norm.
fn difference(ours: &Trajectory, theirs: &Trajectory) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    pairs.map(|(ours, theirs)| ((ours - theirs) / theirs).abs()).fold(0., f64::max)
}

fn every_combination(name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let four_sequences = recorded(name);
    // Accumulating at four ranks takes eight sequences a step, which PyTorch did not record: one rank, nothing sharded, stands in.
    let eight_sequences = train(name, 1, 8, &[], dir.path());
    for ranks in [2, 4] {
        for replicate in ["1", "2"] {
            for reshard in ["default", "always", "never", "2"] {
                // To fewer ranks means fewer than there are shards, and more than one.
                if reshard == "2" && (ranks, replicate) != (4, "1") {
                    continue;
                }
                for (accumulate, sync) in [("1", "every"), ("2", "every"), ("2", "last")] {
                    for checkpoint in ["none", "full"] {
                        for prefetch in ["0", "1", "2"] {
                            let flags = [
                                "--replicate",
                                replicate,
                                "--reshard-after-forward",
                                reshard,
                                "--grad-accum",
                                accumulate,
                                "--grad-sync",
                                sync,
                                "--activation-checkpoint",
                                checkpoint,
                                "--prefetch",
                                prefetch,
                            ];
                            let (batch_size, want) = match (ranks, accumulate) {
                                (2, "1") => (2, &four_sequences),
                                (4, "2") => (1, &eight_sequences),
                                _ => (1, &four_sequences),
                            };
                            let run = tempfile::tempdir().unwrap();
                            let difference = difference(&train(name, ranks, batch_size, &flags, run.path()), want);
                            assert!(difference < 2e-5, "{name}, {ranks} ranks, {}: {difference:.1e}", flags.join(" "));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn llama() {
    every_combination("llama_tiny");
}

#[test]
fn gpt2() {
    every_combination("gpt2_tiny");
}

#[test]
fn bf16_compute_stays_near() {
    for name in ["llama_tiny", "gpt2_tiny"] {
        let dir = tempfile::tempdir().unwrap();
        let bf16 = train(name, 2, 2, &["--param-dtype", "bf16", "--reduce-dtype", "f32"], dir.path());
        for ([ours, _], [theirs, _]) in bf16.iter().zip(&recorded(name)) {
            assert!((ours - theirs).abs() < 0.02 * theirs, "{name}: {ours} instead of {theirs}");
        }
        assert!(difference(&bf16, &recorded(name)) > 1e-6, "{name}: nothing was rounded to bf16");
    }
}
