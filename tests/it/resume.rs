//! A resumed run, at the same world size or another, equals an uninterrupted run.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use fsdp_test_support::{file_names, files, golden, json_lines};
use serde_json::Value;

/// Trains on 12 sequences a step. Returns the steps and losses.
fn train(dir: &Path, ranks: usize, steps: usize, more: &str, metrics: &str) -> Vec<(u64, f64)> {
    let model = golden("llama_tiny");
    fs::copy(model.join("tokens.bin"), dir.join("tokens.bin")).unwrap();
    let flags = format!(
        "--model {} --init random --data tokens.bin --seq-len 32 --lr 1e-3 --lr-schedule constant --steps {steps} \
         --batch-size {} --metrics {metrics} {more}",
        model.display(),
        12 / ranks
    );
    let run = fsdp_test_support::train(ranks, &flags, dir).ok();
    fs::write(dir.join("stderr"), run.stderr).unwrap();
    let records = json_lines(&dir.join(metrics));
    records.iter().map(|record| (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap())).collect()
}

#[test]
fn resumes_at_any_world_size() {
    let dir = tempfile::tempdir().unwrap();
    let undisturbed = train(dir.path(), 4, 20, "", "undisturbed.jsonl");
    assert_eq!(undisturbed.len(), 20);
    let first = train(dir.path(), 4, 10, "--checkpoint-dir stopped", "first.jsonl");
    assert_eq!(first, undisturbed[..10]);
    for ranks in [1, 2, 3, 4] {
        let metrics = format!("resumed-{ranks}.jsonl");
        let resumed = train(dir.path(), ranks, 20, "--resume stopped/step-00000010", &metrics);
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
    // `auto` finds the newest complete checkpoint.
    fs::create_dir(dir.path().join("stopped/step-00000015")).unwrap();
    let auto = train(dir.path(), 4, 12, "--checkpoint-dir stopped --resume auto", "auto.jsonl");
    assert_eq!(auto, undisturbed[10..12]);
}

/// No sequence is left out or read twice: losses of other sequences differ by much more than rounding.
#[test]
fn a_run_on_four_two_and_four_ranks_reads_all_data_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let undisturbed = train(dir.path(), 4, 12, "", "undisturbed.jsonl");
    let mut found = train(dir.path(), 4, 4, "--checkpoint-dir moved", "0.jsonl");
    for (ranks, steps) in [(2, 8), (4, 12)] {
        let metrics = format!("{steps}.jsonl");
        found.extend(train(dir.path(), ranks, steps, "--checkpoint-dir moved --resume auto", &metrics));
    }
    assert_eq!(found.len(), undisturbed.len());
    for ((step, loss), (want_step, want)) in found.iter().zip(&undisturbed) {
        assert!(step == want_step && (loss - want).abs() < 1e-5 * want, "step {step}: {loss} instead of {want}");
    }
    let differs = |pair: &[(u64, f64)]| (pair[0].1 - pair[1].1).abs() > 1e-4 * pair[1].1;
    assert!(undisturbed.windows(2).all(differs), "{undisturbed:?}");
}

/// The loss scale is restored: a new one would skip steps again.
#[test]
fn resumes_the_loss_scale() {
    let dir = tempfile::tempdir().unwrap();
    let f16 = "--param-dtype f16 --loss-scale 1e8 --all-gather float8";
    let saves = |to| format!("{f16} --save-every 6 --checkpoint-dir {to}");
    let undisturbed = train(dir.path(), 2, 18, &saves("undisturbed"), "undisturbed.jsonl");
    let stderr = fs::read_to_string(dir.path().join("stderr")).unwrap();
    // Overflows halve the scale before and after the first save.
    assert!(stderr.contains("step 6: skipped") && stderr.contains("step 7: skipped"), "{stderr}");
    assert!(!stderr.contains("step 18: skipped"), "{stderr}");
    let resume = format!("{} --resume undisturbed/step-00000006", saves("resumed"));
    let resumed = train(dir.path(), 2, 18, &resume, "resumed.jsonl");
    assert_eq!(resumed, undisturbed[6..]);
    for step in ["step-00000012", "step-00000018"] {
        let [one, other] = ["undisturbed", "resumed"].map(|run| files(&dir.path().join(run).join(step)));
        assert!(one == other, "{step}");
    }
}

fn truncate(file: &Path) {
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
}

/// Changes three bytes in the middle of rank 1's file.
fn flip(checkpoint: &Path) {
    let shard = checkpoint.join("shard-00002-model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 3].iter_mut().for_each(|byte| *byte ^= 0x55);
    fs::write(shard, bytes).unwrap();
}

#[test]
fn quarantines_a_damaged_checkpoint_and_resumes_from_an_older_one() {
    let dir = tempfile::tempdir().unwrap();
    let saves = |to| format!("--save-every 2 --checkpoint-dir {to}");
    let undisturbed = train(dir.path(), 2, 8, &saves("undisturbed"), "undisturbed.jsonl");
    let want = files(&dir.path().join("undisturbed/step-00000008"));
    // Damages of the newest checkpoint, and the expected warning.
    type Damage = (&'static str, fn(&Path), &'static str);
    let damages: [Damage; 4] = [
        ("no-manifest", |step| fs::remove_file(step.join("checkpoint.json")).unwrap(), "checkpoint.json is missing"),
        ("half-manifest", |step| truncate(&step.join("checkpoint.json")), "checkpoint.json"),
        (
            "half-shard",
            |step| truncate(&step.join("shard-00001-model-00001-of-00001.safetensors")),
            "shard-00001-model-00001-of-00001.safetensors",
        ),
        // Only one rank sees the damage, when it reads the file.
        ("flipped", flip, "shard-00002-model-00001-of-00001.safetensors is damaged: checksum"),
    ];
    for (run, damage, said) in damages {
        train(dir.path(), 2, 6, &saves(run), "first.jsonl");
        let root = dir.path().join(run);
        damage(&root.join("step-00000006"));
        let spoilt = files(&root.join("step-00000006"));
        let resume = format!("{} --resume auto --keep 2", saves(run));
        let resumed = train(dir.path(), 2, 8, &resume, &format!("{run}.jsonl"));
        assert_eq!(resumed, undisturbed[4..], "{run}");
        let stderr = fs::read_to_string(dir.path().join("stderr")).unwrap();
        let warning =
            format!("{run}/step-00000006 can't be resumed from and was renamed to {run}/step-00000006.damaged: ");
        let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains(&warning)).collect();
        assert!(warnings.len() == 1 && warnings[0].contains(said), "{stderr}");
        // The quarantined checkpoint is unchanged, and does not count for `--keep`.
        assert_eq!(file_names(&root), ["step-00000006", "step-00000006.damaged", "step-00000008"], "{run}");
        assert!(files(&root.join("step-00000006.damaged")) == spoilt, "{run}");
        assert!(files(&root.join("step-00000008")) == want, "{run}: other weights than those of the undisturbed run");
    }

    // The same bits as a run resumed from the older checkpoint. The next quarantine gets the next name.
    let flipped = dir.path().join("flipped");
    flip(&flipped.join("step-00000008"));
    fs::rename(flipped.join("step-00000006.damaged"), flipped.join("step-00000008.damaged")).unwrap();
    let direct = train(dir.path(), 2, 10, "--resume flipped/step-00000006 --checkpoint-dir direct", "direct.jsonl");
    assert_eq!(train(dir.path(), 2, 10, "--resume auto --checkpoint-dir flipped", "auto.jsonl"), direct);
    assert_eq!(
        file_names(&flipped),
        ["step-00000006", "step-00000008.damaged", "step-00000008.damaged-2", "step-00000010"]
    );
    assert!(files(&flipped.join("step-00000010")) == files(&dir.path().join("direct/step-00000010")));
}

const SAVES: &str = "--save-every 2 --checkpoint-dir saved";

/// Asserts that a run with `--resume auto` fails with an error that contains all of `parts`.
fn refused(dir: &Path, parts: &[&str]) {
    let common = "--data tokens.bin --seq-len 32 --resume auto --steps 6 --batch-size 6";
    let flags = format!("--model {} {common} {SAVES}", golden("llama_tiny").display());
    fsdp_test_support::train(2, &flags, dir).refused(2, parts);
}

#[test]
fn does_not_start_over_if_all_checkpoints_are_damaged() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 2, 4, SAVES, "first.jsonl");
    let root = dir.path().join("saved");
    flip(&root.join("step-00000002"));
    flip(&root.join("step-00000004"));
    // A restart with only quarantined checkpoints fails as well.
    for _ in 0..2 {
        let aside = ["saved/step-00000002.damaged: damaged", "saved/step-00000004.damaged: damaged"];
        refused(dir.path(), &["no checkpoint in saved can be used", aside[0], aside[1], "another --checkpoint-dir"]);
        assert_eq!(file_names(&root), ["step-00000002.damaged", "step-00000004.damaged"]);
    }
}

#[test]
fn does_not_start_over_if_the_only_checkpoint_is_an_unusable_link() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 2, 2, SAVES, "first.jsonl");
    let step = dir.path().join("saved/step-00000002");
    fs::rename(&step, dir.path().join("step-00000009")).unwrap();
    for (target, why) in [("../gone/step-00000002", "does not exist"), ("../step-00000009", "under another name")] {
        symlink(target, &step).unwrap();
        refused(dir.path(), &["no checkpoint in saved can be used", "saved/step-00000002: a link to ", why]);
        fs::remove_file(&step).unwrap();
    }
}

#[test]
fn does_not_quarantine_undamaged_directories() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), 2, 4, SAVES, "first.jsonl");
    let root = dir.path().join("saved");
    let model = golden("llama_tiny");
    // Another program's model has the name of the next save.
    fs::create_dir(root.join("step-00000006")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(model.join(file), root.join("step-00000006").join(file)).unwrap();
    }
    let before = file_names(&root);
    refused(dir.path(), &["step-00000006 already exists, and this run saves a checkpoint there at step 6"]);
    assert_eq!(file_names(&root), before);
    fs::remove_dir_all(root.join("step-00000006")).unwrap();

    // A checkpoint of a newer version may be better than the older one.
    let manifest = root.join("step-00000004/checkpoint.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    json["version"] = 1000.into();
    fs::write(&manifest, json.to_string()).unwrap();
    let told = "saved/step-00000004 can't be read, but is not known to be damaged";
    refused(dir.path(), &[told, "1000", "--resume"]);
    assert_eq!(file_names(&root), ["step-00000002", "step-00000004"]);
}
