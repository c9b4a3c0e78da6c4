//! Devices reproduce the training that PyTorch FSDP2 recorded on the CPU.

use crate::train_run::{Engine, TrainRun};
use fsdp_test_support::tolerance;
use fsdp_test_support::trajectory::Trajectory;

fn reproduces(model: &str, ranks: usize, engine: Engine) {
    let dir = tempfile::tempdir().unwrap();
    let run = TrainRun { engine, ..TrainRun::recorded(model, ranks) };
    let difference = run.train(dir.path()).difference(&Trajectory::recorded(model, "run"));
    println!("{model}, {ranks} ranks, {engine:?}: {difference:?}");
    assert!(difference.is_within(tolerance::SAME), "{run:?}: {difference:?}");
}

#[test]
fn llama_by_nccl() {
    [1, 2, 4].into_iter().for_each(|ranks| reproduces("llama_tiny", ranks, Engine::Nccl));
}

#[test]
fn gpt2_by_nccl() {
    [1, 2, 4].into_iter().for_each(|ranks| reproduces("gpt2_tiny", ranks, Engine::Nccl));
}

#[test]
fn both_with_host_staging() {
    ["llama_tiny", "gpt2_tiny"].into_iter().for_each(|model| reproduces(model, 2, Engine::Host));
}
