//! `train --gradcheck` on every kind of model that `train` knows.

use fsdp_test_support::{golden, golden_flags, launch};

#[test]
fn gradients_of_every_model_are_those_of_its_loss() {
    let models = std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap());
    let names: Vec<String> = models
        .filter(|entry| entry.path().join("config.json").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    assert!(names.len() >= 12, "{names:?}");
    for name in names {
        let dir = tempfile::tempdir().unwrap();
        let flags = golden_flags(&name);
        let mut args: Vec<&str> = flags.iter().map(String::as_str).collect();
        args.extend(["--batch-size", "2", "--gradcheck"]);
        let run = launch(2, "train", &args, dir.path()).ok();
        assert!(run.stderr.contains("gradcheck: the gradients of 3 units are right"), "{name}: {}", run.stderr);
    }
}

#[test]
fn what_rounds_small_differences_away_is_refused_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let flags = golden_flags("llama_tiny");
    for (more, way_out) in [
        (["--param-dtype", "bf16"], "--param-dtype f32"),
        (["--param-dtype", "f16"], "--param-dtype f32"),
        (["--all-gather", "float8"], "--all-gather full"),
    ] {
        let mut args: Vec<&str> = flags.iter().map(String::as_str).collect();
        args.extend(["--batch-size", "2", "--gradcheck"]);
        args.extend(more);
        launch(2, "train", &args, dir.path()).refused(2, &["--gradcheck", way_out]);
    }
}
