//! Devices reproduce the training that PyTorch FSDP2 recorded on the CPU.

use crate::train_run::{Engine, TrainRun};
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{golden, tolerance};

fn reproduces(run: &TrainRun<'_>, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let difference = run.train(dir.path()).difference(&Trajectory::recorded(run.model, name));
    println!("{}, {} ranks, {:?}, {name}: {difference:?}", run.model, run.ranks, run.engine);
    assert!(difference.is_within(tolerance::SAME), "{run:?}: {difference:?}");
}

#[test]
fn llama_by_nccl() {
    [1, 2, 4].into_iter().for_each(|ranks| reproduces(&TrainRun::recorded("llama_tiny", ranks), "run"));
}

#[test]
fn gpt2_by_nccl() {
    [1, 2, 4].into_iter().for_each(|ranks| reproduces(&TrainRun::recorded("gpt2_tiny", ranks), "run"));
}

#[test]
fn both_with_host_staging() {
    for model in ["llama_tiny", "gpt2_tiny"] {
        reproduces(&TrainRun { engine: Engine::Host, ..TrainRun::recorded(model, 2) }, "run");
    }
}

/// Windows, caps of scores and logits, fused projections, experts, and a head with a bias over masked tokens.
#[test]
fn other_families_by_nccl() {
    for model in ["gemma2_tiny", "phi3_tiny", "mixtral_tiny", "qwen3_moe_tiny", "bert_tiny"] {
        reproduces(&TrainRun { batch: 3, ..TrainRun::recorded(model, 2) }, "run");
    }
    let examples = golden("examples.jsonl").display().to_string();
    let flags = ["--sft", &examples, "--packing", "off", "--shuffle", "off"];
    reproduces(&TrainRun { batch: 3, flags: &flags, ..TrainRun::recorded("mixtral_tiny", 2) }, "run_padded");
}
