//! Ranks with different settings, models or data fail before the first step, and all name the values of each rank.

use std::fs;
use std::path::Path;

use fsdp_test_support::{Run, copy_golden, edit_file, launch_script};

/// Trains on three ranks. Rank 1 has other arguments.
fn train(dir: &Path, common: &str, ranks_0_and_2: &str, rank_1: &str) -> Run {
    let script = format!(
        "case $RANK in 1) own='{rank_1}';; *) own='{ranks_0_and_2}';; esac; exec \"$0\" {common} --steps 2 \
         --metrics steps.jsonl $own"
    );
    launch_script(3, &script, dir)
}

/// Makes a directory with the recorded Llama in `a` and `b`.
fn two_models() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for copy in ["a", "b"] {
        copy_golden("llama_tiny", &dir.path().join(copy));
    }
    dir
}

/// Asserts that each rank fails with all of `parts` before the first step.
fn refused(dir: &Path, run: Run, parts: &[&str]) {
    run.refused(3, parts);
    assert!(!dir.join("steps.jsonl").exists() && !dir.join("checkpoints").exists(), "the run had begun");
}

const COMMON: &str = "--model a --data a/tokens.bin --seq-len 32 --batch-size 1";

#[test]
fn refuses_different_settings() {
    let dir = two_models();
    let small = "--model a --data a/tokens.bin";
    let said = "the ranks disagree on ";
    for (common, others, own, words) in [
        (COMMON, "", "--lr 1e-3", "--lr (ranks 0, 2: 0.002; rank 1: 0.001); start all ranks"),
        (COMMON, "", "--seed 7", "--seed (ranks 0, 2: 42; rank 1: 7)"),
        (COMMON, "", "--clip-grad-norm 0", "--clip-grad-norm (ranks 0, 2: 1.0; rank 1: 0.0)"),
        (COMMON, "--keep 3", "", "--keep (ranks 0, 2: 3; rank 1: not given)"),
        (
            small,
            "--batch-size 1 --seq-len 32",
            "--batch-size 2 --seq-len 16",
            "--batch-size (ranks 0, 2: 1; rank 1: 2), --seq-len (ranks 0, 2: 32; rank 1: 16)",
        ),
        // Settings of collective operations before the first step: traces and checkpoints.
        (COMMON, "", "--trace t.json", "--trace (ranks 0, 2: not given; rank 1: "),
        (COMMON, "--checkpoint-dir c", "--checkpoint-dir d --resume auto", "--resume (ranks 0, 2: none; rank 1: auto)"),
        (COMMON, "", "--async-save", "--async-save (ranks 0, 2: false; rank 1: true)"),
        (COMMON, "", "--init random", "--init (ranks 0, 2: auto; rank 1: random)"),
    ] {
        refused(dir.path(), train(dir.path(), common, others, own), &[said, words]);
    }
    assert!(!dir.path().join("t.rank1.json").exists() && !dir.path().join("c").exists());
}

#[test]
fn refuses_different_models() {
    let dir = two_models();
    let common = "--data a/tokens.bin --seq-len 32 --batch-size 1";
    let differ = || train(dir.path(), common, "--model a", "--model b");
    let given = format!("--model (ranks 0, 2: {}; rank 1: ", dir.path().canonicalize().unwrap().join("a").display());
    // Equal models in two directories are accepted.
    differ().ok();
    fs::remove_file(dir.path().join("steps.jsonl")).unwrap();
    fs::remove_dir_all(dir.path().join("checkpoints")).unwrap();

    let weights = dir.path().join("b/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let mut other = whole.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&weights, other).unwrap();
    refused(dir.path(), differ(), &["the first weights (ranks 0, 2: ", "tensors with checksum", &given]);
    fs::remove_file(&weights).unwrap();
    refused(dir.path(), differ(), &["the first weights (ranks 0, 2: ", "; rank 1: random)", &given]);
    fs::write(&weights, whole).unwrap();

    edit_file(&dir.path().join("b/config.json"), "\"rope_theta\": 10000.0", "\"rope_theta\": 77.0");
    let theta = "config.json's rope_parameters.rope_theta (ranks 0, 2: 10000.0; rank 1: 77.0)";
    refused(dir.path(), differ(), &[theta, &given]);
}

#[test]
fn refuses_different_data() {
    let dir = two_models();
    let differ = || {
        let common = "--model a --seq-len 32 --batch-size 1";
        train(dir.path(), common, "--data a/tokens.bin", "--data b/tokens.bin")
    };
    let tokens = dir.path().join("b/tokens.bin");
    let mut bytes = fs::read(&tokens).unwrap();
    // Swaps two tokens.
    let swapped = (0..bytes.len() - 2).step_by(2).find(|&at| bytes[at] != bytes[at + 2]).unwrap();
    bytes.swap(swapped, swapped + 2);
    fs::write(&tokens, &bytes).unwrap();
    let parts =
        ["the data (ranks 0, 2: ", "tokens with checksum ", "they were given --data (ranks 0, 2: ", "b/tokens.bin"];
    refused(dir.path(), differ(), &parts);
    fs::write(&tokens, &bytes[..bytes.len() - 2]).unwrap();
    refused(dir.path(), differ(), &parts);
}

#[test]
fn accepts_different_settings_of_rank_0() {
    let dir = two_models();
    train(dir.path(), COMMON, "--tensorboard logs", "--tensorboard other").ok();
    assert!(dir.path().join("logs").exists() && !dir.path().join("other").exists());
}
