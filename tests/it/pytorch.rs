//! Runs that PyTorch began go on here, from its own checkpoints.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_tests::{Run, golden, golden_flags, launch, program};
use serde_json::Value;

/// Goes on from `checkpoint` as the recorded run did; returns the metrics of the steps taken, and the run.
fn resume(name: &str, ranks: usize, checkpoint: &Path, more: &[&str], dir: &Path) -> (Vec<Value>, Run) {
    let (golden, batch_size) = (golden_flags(name), (4 / ranks).to_string());
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    args.extend(["--batch-size", &batch_size, "--metrics", "metrics.jsonl", "--resume", checkpoint.to_str().unwrap()]);
    args.extend(more);
    let run = launch(ranks, "train", &args, dir).ok();
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), run)
}

/// Steps 11 to 20 as PyTorch recorded them.
fn assert_recorded(name: &str, what: &str, metrics: &[Value]) {
    let record: Value = serde_json::from_str(&std::fs::read_to_string(golden(name).join("run.json")).unwrap()).unwrap();
    let recorded = &record["trajectory"].as_array().unwrap()[10..];
    assert_eq!((metrics.len(), recorded.len()), (10, 10));
    for (ours, theirs) in metrics.iter().zip(recorded) {
        assert_eq!(ours["step"], theirs["step"]);
        for key in ["loss", "grad_norm"] {
            let (ours, theirs) = (ours[key].as_f64().unwrap(), theirs[key].as_f64().unwrap());
            let difference = (ours - theirs).abs() / theirs;
            assert!(difference < 2e-5, "{name}, {what}: {key} {ours} instead of {theirs}: {difference:.1e}");
        }
    }
}

#[test]
fn a_run_of_pytorch_goes_on_and_back() {
    for name in ["llama_tiny", "gpt2_tiny"] {
        let theirs = golden(name).join("dcp_step10");
        for ranks in [1, 2, 4] {
            let dir = tempfile::tempdir().unwrap();
            let (metrics, run) = resume(name, ranks, &theirs, &["--checkpoint-dir", "saved"], dir.path());
            assert_recorded(name, &format!("{ranks} ranks"), &metrics);
            assert!(run.stderr.contains("dcp_step10 at step 10\n"), "{}", run.stderr);
            // A tied head is there twice in PyTorch's state dict.
            assert_eq!(run.stderr.contains("not loaded"), name == "gpt2_tiny", "{}", run.stderr);
        }
        // To our format, to PyTorch's again for three ranks, and on: nothing is lost on the way.
        let dir = tempfile::tempdir().unwrap();
        for (from, to, format, ranks) in
            [(theirs.as_path(), "ours", "fsdp", "3"), (Path::new("ours"), "theirs", "torch-dcp", "3")]
        {
            let args = ["convert", from.to_str().unwrap(), to, "--to", format, "--world-size", ranks];
            let mut convert = Command::new(program("fsdp-ckpt"));
            convert.args(args).current_dir(dir.path());
            fsdp_tests::run(convert, Duration::from_secs(120)).ok();
        }
        for from in ["ours", "theirs"] {
            let (metrics, _) =
                resume(name, 2, Path::new(from), &["--checkpoint-dir", &format!("saved-{from}")], dir.path());
            assert_recorded(name, from, &metrics);
        }
    }
}

#[test]
fn a_model_alone_goes_on_with_a_fresh_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny").join("dcp_step10_hf");
    let (metrics, run) = resume("llama_tiny", 2, &model, &["--checkpoint-dir", "saved"], dir.path());
    assert!(run.stderr.contains("dcp_step10_hf at step 0, with a fresh optimizer: it holds none"), "{}", run.stderr);
    assert_eq!(metrics.len(), 20);
    // A model that has learned for ten steps, on the data of the first.
    let record: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("llama_tiny").join("run.json")).unwrap()).unwrap();
    let first = |value: &Value| value["loss"].as_f64().unwrap();
    assert!(
        first(&metrics[0]) < first(&record["trajectory"][0]) - 0.05,
        "{} then {}",
        record["trajectory"][0],
        metrics[0]
    );
}
