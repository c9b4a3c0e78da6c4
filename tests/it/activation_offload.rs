//! `train --activation-offload` has the losses of a run in memory, and refuses what it can't do.

use fsdp_test_support::{golden_trajectory, train_golden};

#[test]
fn losses_have_the_bits_of_a_run_in_memory() {
    for (name, more) in [
        ("llama_tiny", "--activation-checkpoint full"),
        ("gpt2_tiny", "--activation-checkpoint full --param-dtype bf16 --grad-accum 2 --batch-size 1"),
        ("llama_tiny", "--activation-checkpoint 2 --checkpoint-keep linear"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let run = |flags: &str| golden_trajectory(name, 2, &format!("--steps 4 {more} {flags}"), dir.path());
        let in_memory = run("--checkpoint-dir memory");
        for offload in ["cpu", "disk:."] {
            let offloaded = run(&format!("--activation-offload {offload} --checkpoint-dir {offload}"));
            for (in_memory, offloaded) in in_memory.0.iter().zip(&offloaded.0) {
                let numbers = |step: &fsdp_test_support::trajectory::Step| (step.loss, step.grad_norm);
                assert_eq!(numbers(in_memory), numbers(offloaded), "{name} {more} {offload}");
            }
        }
    }
}

#[test]
fn refuses_directories_that_do_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let flags = "--steps 1 --activation-checkpoint full --activation-offload disk:absent";
    let error = train_golden("llama_tiny", 2, flags, dir.path()).failed();
    for part in
        ["--activation-offload: rank ", "activations offloaded to absent: can't create a file: ", "Pass a directory"]
    {
        assert!(error.contains(part), "{error}");
    }
}
