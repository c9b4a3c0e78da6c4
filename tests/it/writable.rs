//! What can't be written shows before the first step, on every rank; what a run has exported itself, and what killed
//! runs have left, is in nobody's way.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use fsdp_test_support::{Run, golden, launch};

/// One step of the golden Llama on two ranks in `dir`.
fn train(dir: &Path, args: &[&str]) -> Run {
    let model = golden("llama_tiny");
    let data = model.join("tokens.bin");
    let common = ["--model", model.to_str().unwrap(), "--data", data.to_str().unwrap(), "--seq-len", "32"];
    launch(2, "train", &[&common[..], &["--batch-size", "1"], args].concat(), dir)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_rank_hears_before_the_first_step_what_one_can_not_write() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    symlink("nowhere", dir.path().join("link")).unwrap();
    symlink("gone/file", dir.path().join("link-to-file")).unwrap();
    fs::create_dir(dir.path().join("t.rank1.json")).unwrap();
    let before = names(dir.path());
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
        ("--trace", "/dev/null", &["can't write --trace /dev/null: it is there and no file"]),
        // What one rank alone can't write.
        ("--trace", "t.json", &["rank 1: can't write --trace t.rank1.json", "irectory"]),
    ];
    for (flag, path, parts) in cases {
        let mut args = vec!["--steps", "1", flag, path];
        if flag != "--checkpoint-dir" {
            args.extend(["--checkpoint-dir", "saved"]);
        }
        train(dir.path(), &args).refused(2, &[parts, &[flag]].concat());
        assert_eq!(names(dir.path()), before, "{flag} {path}");
    }
    assert!(Path::new("/dev/null").exists());
}

const RUN: [&str; 4] = ["--checkpoint-dir", "saved", "--resume", "auto"];

#[test]
fn a_run_that_is_started_again_replaces_what_it_has_exported_and_nobody_elses() {
    for of_model in [&[][..], &["--lora-rank", "2"]] {
        let dir = tempfile::tempdir().unwrap();
        let run = |steps: &str, more: &[&str]| {
            train(dir.path(), &[&["--steps", steps, "--export-hf", "out"], of_model, more].concat())
        };
        run("1", &RUN).ok();
        let out = dir.path().join("out");
        let weights = if of_model.is_empty() { "model.safetensors" } else { "adapter_model.safetensors" };
        let files = names(&out);
        let first = fs::read(out.join(weights)).unwrap();
        // The very same command, as a launcher gives it again after the sample failed, and then a longer run.
        run("1", &RUN).ok();
        assert!(fs::read(out.join(weights)).unwrap() == first);
        run("2", &RUN).ok();
        assert_eq!(names(&out), files);
        let second = fs::read(out.join(weights)).unwrap();
        assert!(second != first);
        // Another run's, also when it has the same directory of checkpoints, and what goes beyond this one's end.
        run("3", &["--checkpoint-dir", "other"])
            .refused(2, &["holds weights already", "another run exported at step 2"]);
        fs::rename(dir.path().join("saved/step-00000002"), dir.path().join("away")).unwrap();
        run("1", &RUN)
            .refused(2, &["holds weights already", "this run exported at step 2, and it is to end at step 1"]);
        fs::remove_dir_all(dir.path().join("saved")).unwrap();
        run("3", &RUN).refused(2, &["holds weights already", "another run exported at step 2"]);
        assert!(fs::read(out.join(weights)).unwrap() == second);
        // Somebody else's.
        fs::copy(golden("llama_tiny").join("model.safetensors"), out.join(weights)).unwrap();
        run("1", &RUN).refused(2, &["holds weights already", "which this program did not export"]);
    }
}

#[test]
fn weights_that_come_while_a_run_trains_are_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out/model.safetensors");
    let theirs = golden("llama_tiny").join("model.safetensors");
    train(dir.path(), &[&["--steps", "1", "--export-hf", "out"], &RUN[..]].concat()).ok();
    let metrics = dir.path().join("steps.jsonl");
    let more = ["--steps", "1000", "--export-hf", "out", "--metrics", "steps.jsonl"];
    std::thread::scope(|scope| {
        let training = scope.spawn(|| train(dir.path(), &[&more[..], &RUN].concat()));
        // A step, and not only what is written there to see whether it can be.
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

/// Each time: the directory of checkpoints is not there before the save has ended.
#[test]
fn an_export_waits_for_the_save_in_the_background() {
    let dir = tempfile::tempdir().unwrap();
    for run in ["a", "b", "c"] {
        let [saved, out] = [format!("saved-{run}"), format!("out-{run}")];
        train(dir.path(), &["--steps", "1", "--async-save", "--checkpoint-dir", &saved, "--export-hf", &out]).ok();
        assert_eq!(names(&dir.path().join(&saved)), ["step-00000001"]);
        assert_eq!(names(&dir.path().join(&out)), ["config.json", "model.safetensors"]);
    }
}

#[test]
fn what_killed_runs_have_left_is_swept_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("out")).unwrap();
    fs::create_dir_all(dir.path().join("saved/.step-00000001.tmp-host-1-1f")).unwrap();
    fs::write(dir.path().join("out/.model.safetensors.tmp-host-1-1f"), "half").unwrap();
    fs::write(dir.path().join("out/notes.txt"), "mine").unwrap();
    train(dir.path(), &[&["--steps", "1", "--export-hf", "out"], &RUN[..]].concat()).ok();
    assert_eq!(names(&dir.path().join("out")), ["config.json", "model.safetensors", "notes.txt"]);
    assert_eq!(names(&dir.path().join("saved")), ["step-00000001"]);
}
