//! What can't be written shows before the first step, on every rank; what a run has exported itself, and what killed
//! runs have left, is in nobody's way.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use fsdp_tests::{Run, golden, launch};

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

/// Both ranks said all of this.
fn refused(run: Run, parts: &[&str]) {
    let text = run.failed();
    for rank in ["[rank 0]", "[rank 1]"] {
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with(rank)).collect();
        let said = lines.join("\n");
        assert!(parts.iter().all(|part| said.contains(part)), "{rank}: {parts:?} not in\n{text}");
    }
}

#[test]
fn every_rank_hears_before_the_first_step_what_one_can_not_write() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    symlink("nowhere", dir.path().join("link")).unwrap();
    symlink("gone/file", dir.path().join("link-to-file")).unwrap();
    fs::create_dir(dir.path().join("t.rank1.json")).unwrap();
    let before = names(dir.path());
    let cases: [(&str, &str, &[&str]); 11] = [
        (
            "--checkpoint-dir",
            "file/below",
            &["rank 0 failed to make a directory there", "file is not a directory", "pass a"],
        ),
        ("--checkpoint-dir", "/proc/runs", &["rank 0 failed", "/proc/runs", "No such file", "all hosts share"]),
        ("--checkpoint-dir", "link", &["link is a symbolic link to nowhere, which is not there"]),
        ("--export-hf", "file/below", &["rank 0 failed to make a directory there", "file is not a directory"]),
        ("--export-hf", "link/below", &["link is a symbolic link to nowhere, which is not there"]),
        (
            "--metrics",
            "file/below",
            &["rank 0: can't write --metrics file/below: file is not a directory", "pass another"],
        ),
        ("--metrics", "/dev/full", &["rank 0: can't write --metrics /dev/full: No space left", "make room"]),
        ("--metrics", "link-to-file", &["link-to-file is a symbolic link to gone/file, which can't be made"]),
        ("--tensorboard", "file", &["rank 0: can't write --tensorboard file: file is not a directory"]),
        ("--trace", "file/below.json", &["rank 0: can't write --trace file/below.json: file is not a directory"]),
        // What one rank alone can't write.
        ("--trace", "t.json", &["rank 1: can't write --trace t.rank1.json", "irectory"]),
    ];
    for (flag, path, parts) in cases {
        let mut args = vec!["--steps", "1", flag, path];
        if flag != "--checkpoint-dir" {
            args.extend(["--checkpoint-dir", "saved"]);
        }
        refused(train(dir.path(), &args), &[parts, &[flag]].concat());
        assert_eq!(names(dir.path()), before, "{flag} {path}");
    }
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
        refused(run("3", &["--checkpoint-dir", "other"]), &["holds weights already", "another run exported at step 2"]);
        fs::rename(dir.path().join("saved/step-00000002"), dir.path().join("away")).unwrap();
        refused(run("1", &RUN), &["holds weights already", "this run exported at step 2, and it is to end at step 1"]);
        fs::remove_dir_all(dir.path().join("saved")).unwrap();
        refused(run("3", &RUN), &["holds weights already", "another run exported at step 2"]);
        assert!(fs::read(out.join(weights)).unwrap() == second);
        // Somebody else's.
        fs::copy(golden("llama_tiny").join("model.safetensors"), out.join(weights)).unwrap();
        refused(run("1", &RUN), &["holds weights already", "which this program did not export"]);
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
