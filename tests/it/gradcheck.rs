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
        // Two blocks, and the root or two tables.
        let config = std::fs::read_to_string(golden(&name).join("config.json")).unwrap();
        let units = if config.contains("\"tie_word_embeddings\": true") { 3 } else { 4 };
        let words = format!("gradcheck: the gradients of {units} units are right");
        assert!(run.stderr.contains(&words), "{name}: {}", run.stderr);
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
