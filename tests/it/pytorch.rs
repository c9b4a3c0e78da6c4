//! Runs that PyTorch began go on here, from its own checkpoints.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, golden, golden_flags, launch, program};

/// Goes on from `checkpoint` as the recorded run did; returns the steps taken, and the run.
fn resume(name: &str, ranks: usize, checkpoint: &Path, more: &[&str], dir: &Path) -> (Trajectory, Run) {
    let (golden, batch_size) = (golden_flags(name), (4 / ranks).to_string());
    let mut args: Vec<&str> = golden.iter().map(String::as_str).collect();
    args.extend(["--batch-size", &batch_size, "--metrics", "metrics.jsonl", "--resume", checkpoint.to_str().unwrap()]);
    args.extend(more);
    let run = launch(ranks, "train", &args, dir).ok();
    (Trajectory::of_metrics(&dir.join("metrics.jsonl")), run)
}

/// Steps 11 to 20 as PyTorch recorded them.
fn assert_recorded(name: &str, what: &str, ours: &Trajectory) {
    let difference = ours.difference(&Trajectory::recorded(name, "run").after(10));
    assert!(difference.max() < 2e-6, "{name}, {what}: {difference:?}");
}

#[test]
fn a_run_of_pytorch_goes_on_and_back() {
    for name in ["llama_tiny", "gpt2_tiny"] {
        let theirs = golden(name).join("dcp_step10");
        for ranks in [1, 2, 4] {
            let dir = tempfile::tempdir().unwrap();
            let (ours, run) = resume(name, ranks, &theirs, &["--checkpoint-dir", "saved"], dir.path());
            assert_recorded(name, &format!("{ranks} ranks"), &ours);
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
            fsdp_test_support::run(convert, Duration::from_secs(120)).ok();
        }
        for from in ["ours", "theirs"] {
            let (ours, _) =
                resume(name, 2, Path::new(from), &["--checkpoint-dir", &format!("saved-{from}")], dir.path());
            assert_recorded(name, from, &ours);
        }
    }
}

#[test]
fn a_model_alone_goes_on_with_a_fresh_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny").join("dcp_step10_hf");
    let (ours, run) = resume("llama_tiny", 2, &model, &["--checkpoint-dir", "saved"], dir.path());
    assert!(run.stderr.contains("dcp_step10_hf at step 0, with a fresh optimizer: it holds none"), "{}", run.stderr);
    assert_eq!(ours.0.len(), 20);
    // A model that has learned for ten steps, on the data of the first.
    let first = |run: &Trajectory| run.0[0].loss;
    let recorded = Trajectory::recorded("llama_tiny", "run");
    assert!(first(&ours) < first(&recorded) - 0.05, "{} then {}", first(&recorded), first(&ours));
}
