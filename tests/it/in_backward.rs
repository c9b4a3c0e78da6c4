//! `train --optimizer-in-backward` has the bits of steps after backward, resumes, and refuses what it can't do.

use fsdp_test_support::{golden_trajectory, train_golden};

#[test]
fn unclipped_steps_have_the_bits_of_steps_after_backward() {
    for (name, more) in [
        ("llama_tiny", ""),
        ("llama_tiny", "--grad-accum 2 --batch-size 1 --replicate 2 --shard-optimizer-over-replicas"),
        ("gpt2_tiny", "--grad-accum 2 --batch-size 1 --grad-sync last --param-dtype bf16"),
        ("gpt2_tiny", "--optimizer adamw8bit --min-8bit-size 1 --activation-checkpoint full"),
        ("llama_tiny", "--optimizer muon"),
        ("llama_tiny", "--offload disk:."),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let run = |flag: &str| golden_trajectory(name, 2, &format!("--steps 6 {more} {flag}"), dir.path());
        let after = run("--clip-grad-norm 0 --checkpoint-dir after");
        let within = run("--optimizer-in-backward unclipped --checkpoint-dir within");
        for (after, within) in after.0.iter().zip(&within.0) {
            assert_eq!(after.loss, within.loss, "{name} {more}");
            // The norm's terms add up in another order.
            assert!((after.grad_norm - within.grad_norm).abs() <= 1e-9 * after.grad_norm, "{name} {more}");
        }
    }
}

#[test]
fn clipping_by_the_last_norm_resumes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let run = |flags: &str| {
        let common = "--optimizer-in-backward last-norm --clip-grad-norm 0.1";
        golden_trajectory("llama_tiny", 2, &format!("{common} {flags}"), dir.path())
    };
    let whole = run("--steps 8 --checkpoint-dir whole");
    run("--steps 5 --checkpoint-dir half");
    let rest = run("--steps 8 --resume half/step-00000005 --checkpoint-dir rest");
    let losses =
        |run: &fsdp_test_support::trajectory::Trajectory| run.0.iter().map(|step| step.loss).collect::<Vec<_>>();
    assert_eq!(losses(&rest)[5..], losses(&whole)[5..]);
    let unclipped = "--optimizer-in-backward unclipped --steps 8 --checkpoint-dir unclipped";
    let unclipped = golden_trajectory("llama_tiny", 2, unclipped, dir.path());
    assert_ne!(losses(&unclipped)[3], losses(&whole)[3]);
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let diverges = "--optimizer-in-backward unclipped --lr 3e38 --steps 4";
    let error = train_golden("llama_tiny", 2, diverges, dir.path()).failed();
    assert!(error.contains("step 2 was taken in backward (--optimizer-in-backward): the loss is NaN"), "{error}");
    assert!(error.contains("The weights became non-finite after step 0"), "{error}");
    let saves = format!("{diverges} --save-every 1");
    let error = train_golden("llama_tiny", 2, &saves, dir.path()).failed();
    assert!(error.contains("step-00000001 was not saved"), "{error}");
}
