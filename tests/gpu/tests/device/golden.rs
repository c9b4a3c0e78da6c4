//! Devices reproduce what PyTorch FSDP2 recorded on the CPU.

use fsdp_test_support::tolerance;
use fsdp_test_support::trajectory::Trajectory;
use fsdp_tests_gpu::{Way, Which};

fn reproduces(model: &str, ranks: usize, engine: Which) {
    let dir = tempfile::tempdir().unwrap();
    let way = Way { engine, ..Way::recorded(model, ranks) };
    let difference = way.train(dir.path()).difference(&Trajectory::recorded(model, "run"));
    println!("{model}, {ranks} ranks, {engine:?}: {difference:?}");
    assert!(difference.is_within(tolerance::SAME), "{way:?}: {difference:?}");
}

#[test]
fn llama_by_nccl() {
    [1, 2, 4].into_iter().for_each(|ranks| reproduces("llama_tiny", ranks, Which::Nccl));
}

#[test]
fn gpt2_by_nccl() {
    [1, 2, 4].into_iter().for_each(|ranks| reproduces("gpt2_tiny", ranks, Which::Nccl));
}

#[test]
fn both_through_the_host() {
    ["llama_tiny", "gpt2_tiny"].into_iter().for_each(|model| reproduces(model, 2, Which::Host));
}
