//! A run that stops and goes on, at the same world size or another, is the run that never stopped.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use fsdp_test_support::{golden, launch};
use serde_json::Value;

/// Runs `steps` steps of 12 sequences each at `ranks` ranks in `dir`; returns the losses of the steps taken, as their
/// bits and values.
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
    let run = launch(ranks, "train", &args, dir).ok();
    fs::write(dir.join("stderr"), run.stderr).unwrap();
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

/// The loss scale goes on as well: one that began anew would skip steps again.
#[test]
fn a_resumed_run_in_f16_is_the_undisturbed_run() {
    let dir = tempfile::tempdir().unwrap();
    let f16 = ["--param-dtype", "f16", "--loss-scale", "1e8", "--all-gather", "float8"];
    let saves = |to| [&f16[..], &["--save-every", "6", "--checkpoint-dir", to]].concat();
    let undisturbed = train(dir.path(), 2, 18, &saves("undisturbed"), "undisturbed.jsonl");
    let stderr = fs::read_to_string(dir.path().join("stderr")).unwrap();
    // At 1e8 in all steps to the sixth, so the scale is halved on both sides of the first save.
    assert!(stderr.contains("step 6: skipped") && stderr.contains("step 7: skipped"), "{stderr}");
    assert!(!stderr.contains("step 18: skipped"), "{stderr}");
    let checkpoint = dir.path().join("undisturbed/step-00000006");
    let resume = ["--resume", checkpoint.to_str().unwrap()];
    let resumed = train(dir.path(), 2, 18, &[&saves("resumed")[..], &resume].concat(), "resumed.jsonl");
    assert_eq!(resumed, undisturbed[6..]);
    for step in ["step-00000012", "step-00000018"] {
        let [one, other] = ["undisturbed", "resumed"].map(|run| files(&dir.path().join(run).join(step)));
        assert!(one == other, "{step}");
    }
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

/// The files of a checkpoint.
fn files(checkpoint: &Path) -> BTreeMap<std::ffi::OsString, Vec<u8>> {
    let entries = fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap())).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn truncate(file: &Path) {
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
}

/// Changes three bytes in the middle of what rank 1 wrote.
fn flip(checkpoint: &Path) {
    let shard = checkpoint.join("shard-00002-model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 3].iter_mut().for_each(|byte| *byte ^= 0x55);
    fs::write(shard, bytes).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_an_older_one() {
    let dir = tempfile::tempdir().unwrap();
    let saves = |to| ["--save-every", "2", "--checkpoint-dir", to];
    let undisturbed = train(dir.path(), 2, 8, &saves("undisturbed"), "undisturbed.jsonl");
    let want = files(&dir.path().join("undisturbed/step-00000008"));
    // What is done to the newest checkpoint, and what is said of it.
    type Damage = (&'static str, fn(&Path), &'static str);
    let damages: [Damage; 4] = [
        ("no-manifest", |step| fs::remove_file(step.join("checkpoint.json")).unwrap(), "checkpoint.json is missing"),
        ("half-manifest", |step| truncate(&step.join("checkpoint.json")), "checkpoint.json"),
        (
            "half-shard",
            |step| truncate(&step.join("shard-00001-model-00001-of-00001.safetensors")),
            "shard-00001-model-00001-of-00001.safetensors",
        ),
        // Nothing shows before it is read, and then one rank sees it.
        ("flipped", flip, "shard-00002-model-00001-of-00001.safetensors is damaged: its checksum is"),
    ];
    for (run, damage, said) in damages {
        train(dir.path(), 2, 6, &saves(run), "first.jsonl");
        let root = dir.path().join(run);
        damage(&root.join("step-00000006"));
        let spoilt = files(&root.join("step-00000006"));
        let resume = ["--resume", "auto", "--keep", "2"];
        let resumed = train(dir.path(), 2, 8, &[&saves(run)[..], &resume].concat(), &format!("{run}.jsonl"));
        assert_eq!(resumed, undisturbed[4..], "{run}");
        let stderr = fs::read_to_string(dir.path().join("stderr")).unwrap();
        let warning =
            format!("{run}/step-00000006 can't be gone on from and was set aside as {run}/step-00000006.damaged: ");
        let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains(&warning)).collect();
        assert!(warnings.len() == 1 && warnings[0].contains(said), "{stderr}");
        // It is as it was, and none of the two that are kept.
        assert_eq!(names(&root), ["step-00000006", "step-00000006.damaged", "step-00000008"], "{run}");
        assert!(files(&root.join("step-00000006.damaged")) == spoilt, "{run}");
        assert!(files(&root.join("step-00000008")) == want, "{run}: other weights than those of the undisturbed run");
    }

    // To the bit what a run that is told to go on from the older one makes. The next damage gets the next name.
    let flipped = dir.path().join("flipped");
    flip(&flipped.join("step-00000008"));
    fs::rename(flipped.join("step-00000006.damaged"), flipped.join("step-00000008.damaged")).unwrap();
    let direct = ["--resume", "flipped/step-00000006", "--checkpoint-dir", "direct"];
    let direct = train(dir.path(), 2, 10, &direct, "direct.jsonl");
    let auto = ["--resume", "auto", "--checkpoint-dir", "flipped"];
    assert_eq!(train(dir.path(), 2, 10, &auto, "auto.jsonl"), direct);
    assert_eq!(names(&flipped), ["step-00000006", "step-00000008.damaged", "step-00000008.damaged-2", "step-00000010"]);
    assert!(files(&flipped.join("step-00000010")) == files(&dir.path().join("direct/step-00000010")));
}

const SAVES: [&str; 4] = ["--save-every", "2", "--checkpoint-dir", "saved"];

/// A run of six steps that resumes by itself in `dir` is refused in these words.
fn refused(dir: &Path, parts: &[&str]) {
    let model = golden("llama_tiny");
    let args = ["--model", model.to_str().unwrap(), "--data", "tokens.bin", "--seq-len", "32", "--resume", "auto"];
    let stderr =
        launch(2, "train", &[&args[..], &SAVES, &["--steps", "6", "--batch-size", "6"]].concat(), dir).failed();
    parts.iter().for_each(|part| assert!(stderr.contains(part), "{part:?} not in\n{stderr}"));
}

#[test]
fn a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 2, 4, &SAVES, "first.jsonl");
    let root = dir.path().join("saved");
    flip(&root.join("step-00000002"));
    flip(&root.join("step-00000004"));
    // Also when it is started again, with nothing but what was set aside.
    for _ in 0..2 {
        let aside = ["saved/step-00000002.damaged: set aside", "saved/step-00000004.damaged: set aside"];
        refused(dir.path(), &["no checkpoint in saved can be used", aside[0], aside[1], "another --checkpoint-dir"]);
        assert_eq!(names(&root), ["step-00000002.damaged", "step-00000004.damaged"]);
    }
}

#[test]
fn a_run_whose_only_checkpoint_is_behind_a_link_that_does_not_count_does_not_begin_anew() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 2, 2, &SAVES, "first.jsonl");
    let step = dir.path().join("saved/step-00000002");
    fs::rename(&step, dir.path().join("step-00000009")).unwrap();
    for (target, why) in [("../gone/step-00000002", "is not there"), ("../step-00000009", "has a name of its own")] {
        symlink(target, &step).unwrap();
        refused(dir.path(), &["no checkpoint in saved can be used", "saved/step-00000002: a link to ", why]);
        fs::remove_file(&step).unwrap();
    }
}

#[test]
fn what_is_not_damaged_is_neither_set_aside_nor_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 2, 4, &SAVES, "first.jsonl");
    let root = dir.path().join("saved");
    let model = golden("llama_tiny");
    // Another program's model under the name of the next save.
    fs::create_dir(root.join("step-00000006")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(model.join(file), root.join("step-00000006").join(file)).unwrap();
    }
    let before = names(&root);
    refused(dir.path(), &["step-00000006 is in the way of the checkpoint that this run saves at step 6"]);
    assert_eq!(names(&root), before);
    fs::remove_dir_all(root.join("step-00000006")).unwrap();

    // A newer program's checkpoint, which may be better than the one that can be read.
    let manifest = root.join("step-00000004/checkpoint.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    json["version"] = 1000.into();
    fs::write(&manifest, json.to_string()).unwrap();
    let told = "saved/step-00000004 can't be read, which does not mean that it is damaged";
    refused(dir.path(), &[told, "1000", "--resume"]);
    assert_eq!(names(&root), ["step-00000002", "step-00000004"]);
}
