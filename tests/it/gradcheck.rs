//! `train --gradcheck` on every model that `train` supports.

use fsdp_test_support::{golden, train_golden};

#[test]
fn every_model_passes() {
    let models = std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap());
    let names: Vec<String> = models
        .filter(|entry| entry.path().join("config.json").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    assert!(names.len() >= 12, "{names:?}");
    for name in names {
        let dir = tempfile::tempdir().unwrap();
        let run = train_golden(&name, 2, "--batch-size 2 --gradcheck", dir.path()).ok();
        assert!(run.stderr.contains("gradcheck: the gradients of 3 units are right"), "{name}: {}", run.stderr);
    }
}

#[test]
fn refuses_rounded_computation() {
    let dir = tempfile::tempdir().unwrap();
    for (more, fix) in [
        ("--param-dtype bf16", "--param-dtype f32"),
        ("--param-dtype f16", "--param-dtype f32"),
        ("--all-gather float8", "--all-gather full"),
    ] {
        train_golden("llama_tiny", 2, &format!("--gradcheck {more}"), dir.path()).refused(2, &["--gradcheck", fix]);
    }
}
