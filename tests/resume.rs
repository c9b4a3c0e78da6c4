//! A run that stops and goes on, at the same world size or another, is the run that never stopped.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use fsdp_tests::{golden, launch};
use serde_json::Value;

/// Runs `steps` steps of 12 sequences each at `ranks` ranks in `dir`; returns the losses of the steps taken, as their bits and values.
fn train(dir: &Path, ranks: usize, steps: usize, more: &[&str], metrics: &str) -> Vec<(u64, f64)> {
    let model = golden("llama_tiny");
    let (steps, batch_size) = (steps.to_string(), (12 / ranks).to_string());
    let mut args = vec![
        "--model",
        model.to_str().unwrap(),
        "--init",
        "random",
        "--data",
        "tokens.bin",
        "--seq-len",
        "32",
        "--steps",
        &steps,
        "--lr",
        "1e-3",
        "--lr-schedule",
        "constant",
        "--batch-size",
        &batch_size,
        "--metrics",
        metrics,
    ];
    args.extend(more);
    std::fs::copy(model.join("tokens.bin"), dir.join("tokens.bin")).unwrap();
    launch(ranks, "train", &args, dir).ok();
    let text = std::fs::read_to_string(dir.join(metrics)).unwrap();
    text.lines()
        .map(|line| {
            let record: Value = serde_json::from_str(line).unwrap();
            (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap())
        })
        .collect()
}

#[test]
fn a_resumed_run_is_the_undisturbed_run() {
    let dir = tempfile::tempdir().unwrap();
    let undisturbed = train(dir.path(), 4, 20, &[], "undisturbed.jsonl");
    assert_eq!(undisturbed.len(), 20);
    let first = train(dir.path(), 4, 10, &["--checkpoint-dir", "stopped"], "first.jsonl");
    assert_eq!(first, undisturbed[..10]);
    let checkpoint = dir.path().join("stopped/step-00000010");
    for ranks in [1, 2, 3, 4] {
        let metrics = format!("resumed-{ranks}.jsonl");
        let resumed = train(dir.path(), ranks, 20, &["--resume", checkpoint.to_str().unwrap()], &metrics);
        assert_eq!(resumed.len(), 10);
        for ((step, loss), (want_step, want)) in resumed.into_iter().zip(&undisturbed[10..]) {
            assert_eq!(step, *want_step);
            if ranks == 4 {
                assert_eq!(loss.to_bits(), want.to_bits(), "step {step}");
            } else {
                assert!((loss - want).abs() < 1e-5 * want, "{ranks} ranks, step {step}: {loss} instead of {want}");
            }
        }
    }
    // `auto` finds the newest whole checkpoint, and leaves half of one alone.
    std::fs::create_dir(dir.path().join("stopped/step-00000015")).unwrap();
    let auto = train(dir.path(), 4, 12, &["--checkpoint-dir", "stopped", "--resume", "auto"], "auto.jsonl");
    assert_eq!(auto, undisturbed[10..12]);
}

#[test]
fn saving_in_the_background_keeps_the_same_and_only_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let saves = ["--save-every", "3", "--keep", "2", "--checkpoint-dir"];
    let plain = train(dir.path(), 2, 10, &[&saves[..], &["plain"]].concat(), "plain.jsonl");
    let background =
        train(dir.path(), 2, 10, &[&saves[..], &["background", "--async-save"]].concat(), "background.jsonl");
    assert_eq!(background, plain);
    for run in ["plain", "background"] {
        let mut kept: Vec<_> =
            std::fs::read_dir(dir.path().join(run)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        kept.sort();
        assert_eq!(kept, ["step-00000009", "step-00000010"], "{run}");
    }
    for step in ["step-00000009", "step-00000010"] {
        let (plain, background) = (dir.path().join("plain").join(step), dir.path().join("background").join(step));
        for file in std::fs::read_dir(&plain).unwrap().map(|entry| entry.unwrap().file_name()) {
            let read = |dir: &Path| std::fs::read(dir.join(&file)).unwrap();
            assert!(read(&plain) == read(&background), "{step}: {file:?}");
        }
    }
}
