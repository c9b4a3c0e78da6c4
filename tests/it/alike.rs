//! Ranks that were started with other settings, or read another model or other data, say so before the first step: all
//! of them, and who has what.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, golden, program, run};

/// Trains on three ranks, rank 1 with arguments of its own.
fn train(dir: &Path, common: &str, ranks_0_and_2: &str, rank_1: &str) -> Run {
    let script = format!(
        "case $RANK in 1) own='{rank_1}';; *) own='{ranks_0_and_2}';; esac; exec \"$0\" {common} --steps 2 \
         --metrics steps.jsonl $own"
    );
    let mut command = Command::new(program("fsdp-launch"));
    command.args(["--nproc-per-node=3", "/bin/sh", "-c", &script]).arg(program("train")).current_dir(dir);
    run(command, Duration::from_secs(120))
}

/// A directory with the golden Llama in `a` and `b`.
fn two_models() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for copy in ["a", "b"] {
        fs::create_dir(dir.path().join(copy)).unwrap();
        for file in ["config.json", "model.safetensors", "tokens.bin"] {
            fs::copy(golden("llama_tiny").join(file), dir.path().join(copy).join(file)).unwrap();
        }
    }
    dir
}

/// Every rank says all of this, and nothing was trained.
fn refused(dir: &Path, run: Run, parts: &[&str]) {
    run.refused(3, parts);
    assert!(!dir.join("steps.jsonl").exists() && !dir.join("checkpoints").exists(), "the run had begun");
}

const COMMON: &str = "--model a --data a/tokens.bin --seq-len 32 --batch-size 1";

#[test]
fn settings_that_differ_are_refused_with_who_has_what() {
    let dir = two_models();
    let small = "--model a --data a/tokens.bin";
    let said = "the ranks differ in what must be the same: ";
    for (common, others, own, words) in [
        (COMMON, "", "--lr 1e-3", "--lr (ranks 0, 2: 0.002; rank 1: 0.001). The way out: start all ranks"),
        (COMMON, "", "--seed 7", "--seed (ranks 0, 2: 42; rank 1: 7)"),
        (COMMON, "", "--clip-grad-norm 0", "--clip-grad-norm (ranks 0, 2: 1.0; rank 1: 0.0)"),
        (COMMON, "--keep 3", "", "--keep (ranks 0, 2: 3; rank 1: not given)"),
        (
            small,
            "--batch-size 1 --seq-len 32",
            "--batch-size 2 --seq-len 16",
            "--batch-size (ranks 0, 2: 1; rank 1: 2), --seq-len (ranks 0, 2: 32; rank 1: 16)",
        ),
        // What ranks do together before they train: write a trace, look for a checkpoint.
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
fn a_model_that_differs_is_refused_with_what_does() {
    let dir = two_models();
    let common = "--data a/tokens.bin --seq-len 32 --batch-size 1";
    let differ = || train(dir.path(), common, "--model a", "--model b");
    let given = format!("--model (ranks 0, 2: {}; rank 1: ", dir.path().canonicalize().unwrap().join("a").display());
    // The same model at two places is the same.
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

    let config = dir.path().join("b/config.json");
    let text = fs::read_to_string(&config).unwrap();
    assert!(text.contains("\"rope_theta\": 10000.0"));
    fs::write(&config, text.replace("\"rope_theta\": 10000.0", "\"rope_theta\": 77.0")).unwrap();
    let theta = "config.json's rope_parameters.rope_theta (ranks 0, 2: 10000.0; rank 1: 77.0)";
    refused(dir.path(), differ(), &[theta, &given]);
}

#[test]
fn data_that_differ_are_refused_with_what_each_rank_reads() {
    let dir = two_models();
    let differ = || {
        let common = "--model a --seq-len 32 --batch-size 1";
        train(dir.path(), common, "--data a/tokens.bin", "--data b/tokens.bin")
    };
    let tokens = dir.path().join("b/tokens.bin");
    let mut bytes = fs::read(&tokens).unwrap();
    // The order of two tokens.
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
fn what_only_rank_0_uses_may_differ() {
    let dir = two_models();
    train(dir.path(), COMMON, "--tensorboard logs", "--tensorboard other").ok();
    assert!(dir.path().join("logs").exists() && !dir.path().join("other").exists());
}
