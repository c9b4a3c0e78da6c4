//! `--metrics` have the tokens of the experts with the fewest and the most, and `--router-bias-rate` makes them more alike.

use std::path::Path;

use fsdp_ckpt::TensorSource;
use fsdp_ckpt::hf::HfModel;
use fsdp_test_support::{golden, json_lines, train_golden};

use crate::golden::values;

const NAME: &str = "deepseek_v3_tiny";
const BIAS: &str = "model.layers.1.mlp.gate.e_score_correction_bias";

/// Returns the fewest and the most tokens of each step, as multiples of the mean.
fn balances(dir: &Path) -> Vec<[f64; 2]> {
    let of = |record: serde_json::Value| ["experts/least", "experts/most"].map(|name| record[name].as_f64().unwrap());
    json_lines(&dir.join("metrics.jsonl")).into_iter().map(of).collect()
}

fn bias(dir: &Path) -> Vec<f32> {
    let model = HfModel::open(dir).unwrap();
    values(&[9], |region, bytes| model.read(BIAS, region, bytes).unwrap())
}

#[test]
fn biases_balance_experts_on_any_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let run = |at: &str, ranks: usize, flags: &str| {
        let dir = dir.path().join(at);
        std::fs::create_dir(&dir).unwrap();
        train_golden(NAME, ranks, &format!("--export-hf export {flags}"), &dir).ok();
        (balances(&dir), bias(&dir.join("export")))
    };
    let start = bias(&golden(NAME));
    let (without, unmoved) = run("without", 2, "");
    assert_eq!((without.len(), &unmoved), (20, &start));

    // A step moves each bias by the rate, or not at all if an expert has the mean.
    let (_, first) = run("first", 2, "--router-bias-rate 0.03125 --steps 1");
    let moves: Vec<f32> = first.iter().zip(&start).map(|(after, before)| after - before).collect();
    assert!(moves.iter().all(|by| (by.abs() - 0.03125).abs() < 1e-6 || by.abs() < 1e-6), "{moves:?}");
    assert!(moves.iter().any(|&by| by > 0.) && moves.iter().any(|&by| by < 0.), "{moves:?}");

    let (with, moved) = run("with", 2, "--router-bias-rate 0.03125");
    let late = |balances: &[[f64; 2]], which: usize| balances[15..].iter().map(|both| both[which]).sum::<f64>() / 5.;
    println!("{:?} without, {:?} with", [0, 1].map(|of| late(&without, of)), [0, 1].map(|of| late(&with, of)));
    assert!(late(&with, 1) < 0.7 * late(&without, 1) && late(&with, 0) > late(&without, 0));
    assert_eq!(with[0], without[0], "the first step has the biases of the file");

    // The counts are sums of all ranks, in any mesh, and checkpoints have the biases.
    for (at, ranks, flags) in [
        ("one", 1, "--activation-checkpoint full"),
        ("experts", 3, "--expert-parallel 3"),
        ("sequences", 2, "--context-parallel 2 --batch-size 6"),
        ("accumulated", 2, "--grad-accum 3 --batch-size 1"),
    ] {
        let (found, biases) = run(at, ranks, &format!("--router-bias-rate 0.03125 {flags}"));
        assert_eq!((found, &biases), (with.clone(), &moved), "{at}");
    }
    run("half", 2, "--router-bias-rate 0.03125 --steps 10 --checkpoint-dir saved");
    let resume = dir.path().join("half/saved/step-00000010");
    let (rest, biases) = run("rest", 3, &format!("--router-bias-rate 0.03125 --resume {}", resume.display()));
    assert_eq!((rest.as_slice(), &biases), (&with[10..], &moved), "resumed");
}

/// A step in f16 whose gradients overflow changes no weight, and no bias.
#[test]
fn skipped_steps_move_no_bias() {
    let dir = tempfile::tempdir().unwrap();
    let flags = "--router-bias-rate 0.03125 --param-dtype f16 --loss-scale 1e30 --steps 1 --export-hf export";
    train_golden(NAME, 2, flags, dir.path()).ok();
    assert_eq!(bias(&dir.path().join("export")), bias(&golden(NAME)));
    assert_eq!(balances(dir.path()).len(), 1);
}

#[test]
fn models_without_biases_and_adapters_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let rate = "--router-bias-rate 0.001";
    let expected = ["--router-bias-rate 0.001 is for models whose routers choose by a bias", "leave it out"];
    for name in ["qwen3_moe_tiny", "llama_tiny"] {
        train_golden(name, 2, rate, dir.path()).refused(2, &expected);
    }
    let words = ["--router-bias-rate excludes --lora-rank and --lora-from", "leave one out"];
    train_golden(NAME, 1, &format!("{rate} --lora-rank 3"), dir.path()).refused(1, &words);
    train_golden(NAME, 1, "--router-bias-rate 0", dir.path()).refused(1, &["--router-bias-rate", "above 0"]);
}
