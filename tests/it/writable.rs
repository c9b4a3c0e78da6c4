//! Unwritable outputs are errors before the first step, on every rank. A run replaces its own exports and the remains
//! of killed runs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use fsdp_test_support::{Run, file_names, golden};

/// Trains the recorded Llama on two ranks.
fn train(dir: &Path, flags: &str) -> Run {
    let model = golden("llama_tiny");
    let common = format!("--model {0} --data {0}/tokens.bin --seq-len 32 --batch-size 1", model.display());
    fsdp_test_support::train(2, &format!("{common} {flags}"), dir)
}

#[test]
fn unwritable_outputs_fail_all_ranks_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    symlink("nowhere", dir.path().join("link")).unwrap();
    symlink("gone/file", dir.path().join("link-to-file")).unwrap();
    fs::create_dir(dir.path().join("t.rank1.json")).unwrap();
    let before = file_names(dir.path());
    let cases: [(&str, &str, &[&str]); 12] = [
        (
            "--checkpoint-dir",
            "file/below",
            &["rank 0 failed to make a directory there", "file is not a directory", "pass a"],
        ),
        ("--checkpoint-dir", "/proc/runs", &["rank 0 failed", "/proc/runs", "No such file", "all hosts share"]),
        ("--checkpoint-dir", "link", &["link is a symbolic link to nowhere, which does not exist"]),
        ("--export-hf", "file/below", &["rank 0 failed to make a directory there", "file is not a directory"]),
        ("--export-hf", "link/below", &["link is a symbolic link to nowhere, which does not exist"]),
        (
            "--metrics",
            "file/below",
            &["rank 0: can't write --metrics file/below: file is not a directory", "pass another"],
        ),
        ("--metrics", "/dev/full", &["rank 0: can't write --metrics /dev/full: No space left", "make room"]),
        ("--metrics", "link-to-file", &["link-to-file is a symbolic link to gone/file, which can't be made"]),
        ("--tensorboard", "file", &["rank 0: can't write --tensorboard file: file is not a directory"]),
        ("--trace", "file/below.json", &["rank 0: can't write --trace file/below.json: file is not a directory"]),
        ("--trace", "/dev/null", &["can't write --trace /dev/null: it is not a regular file"]),
        // Only rank 1 cannot write this file.
        ("--trace", "t.json", &["rank 1: can't write --trace t.rank1.json", "irectory"]),
    ];
    for (flag, path, parts) in cases {
        let saves = if flag == "--checkpoint-dir" { "" } else { "--checkpoint-dir saved" };
        train(dir.path(), &format!("--steps 1 {flag} {path} {saves}")).refused(2, &[parts, &[flag]].concat());
        assert_eq!(file_names(dir.path()), before, "{flag} {path}");
    }
    assert!(Path::new("/dev/null").exists());
}

const RUN: &str = "--checkpoint-dir saved --resume auto";

#[test]
fn a_restarted_run_replaces_its_own_exports_only() {
    for of_model in ["", "--lora-rank 2"] {
        let dir = tempfile::tempdir().unwrap();
        let run =
            |steps: usize, more: &str| train(dir.path(), &format!("--steps {steps} --export-hf out {of_model} {more}"));
        run(1, RUN).ok();
        let out = dir.path().join("out");
        let weights = if of_model.is_empty() { "model.safetensors" } else { "adapter_model.safetensors" };
        let files = file_names(&out);
        let first = fs::read(out.join(weights)).unwrap();
        // The same command again, as after a restart, and then a longer run.
        run(1, RUN).ok();
        assert!(fs::read(out.join(weights)).unwrap() == first);
        run(2, RUN).ok();
        assert_eq!(file_names(&out), files);
        let second = fs::read(out.join(weights)).unwrap();
        assert!(second != first);
        // Exports of another run, and of a later step than this run's end.
        run(3, "--checkpoint-dir other").refused(2, &["holds weights already", "another run exported at step 2"]);
        fs::rename(dir.path().join("saved/step-00000002"), dir.path().join("away")).unwrap();
        run(1, RUN).refused(2, &["holds weights already", "this run exported at step 2, and it is to end at step 1"]);
        fs::remove_dir_all(dir.path().join("saved")).unwrap();
        run(3, RUN).refused(2, &["holds weights already", "another run exported at step 2"]);
        assert!(fs::read(out.join(weights)).unwrap() == second);
        // Files of another program.
        fs::copy(golden("llama_tiny").join("model.safetensors"), out.join(weights)).unwrap();
        run(1, RUN).refused(2, &["holds weights already", "which this program did not export"]);
    }
}

#[test]
fn weights_written_during_a_run_are_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out/model.safetensors");
    let theirs = golden("llama_tiny").join("model.safetensors");
    train(dir.path(), &format!("--steps 1 --export-hf out {RUN}")).ok();
    let metrics = dir.path().join("steps.jsonl");
    let more = format!("--steps 1000 --export-hf out --metrics steps.jsonl {RUN}");
    std::thread::scope(|scope| {
        let training = scope.spawn(|| train(dir.path(), &more));
        // The file exists before the first step, because `train` tests whether it can write it.
        let has_begun = || fs::read_to_string(&metrics).is_ok_and(|text| text.contains("\"step\""));
        while !has_begun() && !training.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        fs::copy(&theirs, &out).unwrap();
        training.join().unwrap().refused(2, &["out: it holds weights already", "which this program did not export"]);
    });
    assert!(fs::read(&out).unwrap() == fs::read(&theirs).unwrap());
    assert!(dir.path().join("saved/step-00001000/checkpoint.json").exists());
}

/// Runs three times, because the race is rare.
#[test]
fn an_export_waits_for_an_async_save() {
    let dir = tempfile::tempdir().unwrap();
    for run in ["a", "b", "c"] {
        let flags = format!("--steps 1 --async-save --checkpoint-dir saved-{run} --export-hf out-{run}");
        train(dir.path(), &flags).ok();
        assert_eq!(file_names(&dir.path().join(format!("saved-{run}"))), ["step-00000001"]);
        assert_eq!(file_names(&dir.path().join(format!("out-{run}"))), ["config.json", "model.safetensors"]);
    }
}

#[test]
fn remains_of_killed_runs_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("out")).unwrap();
    fs::create_dir_all(dir.path().join("saved/.step-00000001.tmp-host-1-1f")).unwrap();
    fs::write(dir.path().join("out/.model.safetensors.tmp-host-1-1f"), "half").unwrap();
    fs::write(dir.path().join("out/notes.txt"), "mine").unwrap();
    train(dir.path(), &format!("--steps 1 --export-hf out {RUN}")).ok();
    assert_eq!(file_names(&dir.path().join("out")), ["config.json", "model.safetensors", "notes.txt"]);
    assert_eq!(file_names(&dir.path().join("saved")), ["step-00000001"]);
}
