//! Optimizers with groups of parameters train as PyTorch's do: losses and gradient norms over FSDP2, at every split of
//! the batch, and going on at another number of ranks.

use std::path::Path;

use fsdp_test_support::trajectory::{Difference, Trajectory};
use fsdp_test_support::{golden_flags, launch};

/// What was recorded, on six sequences a step.
const MODEL: &str = "llama3_tiny";
/// The second group.
const GROUPS: [&str; 2] = ["--no-decay", "*norm*.weight,norm.weight"];

fn train(ranks: usize, lr: &str, flags: &[&str], dir: &Path) -> Trajectory {
    let (mut golden, batch_size) = (golden_flags(MODEL), (6 / ranks).to_string());
    let at = golden.iter().position(|flag| flag == "--lr").unwrap();
    golden[at + 1] = lr.into();
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    args.extend(["--batch-size", &batch_size, "--metrics", "metrics.jsonl"]);
    args.extend(GROUPS);
    args.extend(flags);
    launch(ranks, "train", &args, dir).ok();
    Trajectory::of_metrics(&dir.join("metrics.jsonl"))
}

/// On one, two and three ranks, and from the middle of two on three and one.
fn follows(run: &str, lr: &str, flags: &[&str], near: Difference) {
    let recorded = Trajectory::recorded(MODEL, run);
    assert_eq!(recorded.0.len(), 20);
    let saved = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let dir = if ranks == 2 { saved.path() } else { dir.path() };
        let saves = [flags, &["--save-every", "10", "--checkpoint-dir", "saved"]].concat();
        let difference = train(ranks, lr, &saves, dir).difference(&recorded);
        assert!(difference.is_within(near), "{run}, {ranks} ranks: {difference:?}");
    }
    let checkpoint = saved.path().join("saved/step-00000010");
    for ranks in [3, 1] {
        let dir = tempfile::tempdir().unwrap();
        let flags = [flags, &["--resume", checkpoint.to_str().unwrap()]].concat();
        let difference = train(ranks, lr, &flags, dir.path()).difference(&recorded.after(10));
        assert!(difference.is_within(near), "{run}, resumed on {ranks} ranks: {difference:?}");
    }
}

const NEAR: Difference = Difference { loss: 2e-5, grad_norm: 2e-5 };

#[test]
fn sgd_with_nesterovs_momentum() {
    follows("run_sgd", "5e-2", &["--optimizer", "sgd", "--nesterov", "on"], NEAR);
}

#[test]
fn adam() {
    follows("run_adam", "1e-3", &["--optimizer", "adam"], NEAR);
}

#[test]
fn adamw() {
    follows("run_adamw_groups", "1e-3", &[], NEAR);
}

/// Muon rounds to bf16, where the last bit of a gradient now and then becomes one of 8 bits: PyTorch on one rank
/// differs from PyTorch on two by 9.1e-6 and 6.2e-5, and ours was seen to differ by 1.2e-5 and 1.7e-4, with AVX-512 and
/// with AVX2.
#[test]
fn muon() {
    follows("run_muon", "1e-3", &["--optimizer", "muon"], Difference { loss: 4e-5, grad_norm: 4e-4 });
}

/// By 5.9e-5 and 6.4e-4, and by 5.5e-5 and 7.2e-4.
#[test]
fn muon_with_a_learning_rate_of_its_own() {
    let flags = ["--optimizer", "muon", "--muon-lr", "1e-2", "--muon-adjust-lr", "original"];
    follows("run_muon_original", "1e-3", &flags, Difference { loss: 1e-4, grad_norm: 2e-3 });
}

/// Against AdamW in f32, from which it was seen to differ by 4e-5 and 7e-4. All parameters of this model are smaller
/// than what is kept in 8 bits by default.
#[test]
fn adamw_with_moments_of_8_bits() {
    let recorded = Trajectory::recorded(MODEL, "run_adamw_groups");
    for ranks in [1, 2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let flags = ["--optimizer", "adamw8bit", "--min-8bit-size", "1"];
        let difference = train(ranks, "1e-3", &flags, dir.path()).difference(&recorded);
        let (near, rounded) = (Difference { loss: 2e-4, grad_norm: 4e-3 }, 1e-6);
        assert!(difference.is_within(near) && difference.loss > rounded, "{ranks} ranks: {difference:?}");
    }
}

#[test]
fn what_means_nothing_to_an_optimizer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |flags: &[&str], expected: &[&str]| {
        let golden = golden_flags(MODEL);
        let args: Vec<&str> = golden.iter().map(String::as_str).chain(flags.iter().copied()).collect();
        launch(2, "train", &args, dir.path()).refused(2, expected);
    };
    refused(&["--momentum", "0.9"], &["--momentum is for --optimizer sgd or muon, and this one is adamw"]);
    let nesterov = ["--optimizer", "sgd", "--nesterov", "on", "--dampening", "0.5"];
    refused(&nesterov, &["SGD: Nesterov momentum needs `momentum` above 0, found 0.9, and no `dampening`, found 0.5"]);
    let norms = ["--optimizer", "muon", "--lora-rank", "2"];
    refused(&norms, &["--optimizer muon is for the matrices of a model's blocks, and none is trained"]);
    // What an optimizer does not find in a checkpoint.
    let own = tempfile::tempdir().unwrap();
    train(1, "1e-3", &["--optimizer", "sgd", "--momentum", "0", "--checkpoint-dir", "saved"], own.path());
    let saved = own.path().join("saved/step-00000020");
    let sgd = ["--optimizer", "sgd", "--resume", saved.to_str().unwrap()];
    refused(&sgd, &["it holds step of", "keeps momentum_buffer: pass the --optimizer"]);
}
