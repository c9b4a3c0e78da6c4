//! Training resumes from checkpoints that PyTorch wrote.

use std::path::Path;

use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{Run, convert, golden, train_golden};

/// Resumes the recorded run from `checkpoint`. Returns the steps taken, and the run.
fn resume(name: &str, ranks: usize, checkpoint: &Path, saved: &str, dir: &Path) -> (Trajectory, Run) {
    let flags = format!("--resume {} --checkpoint-dir {saved}", checkpoint.display());
    let run = train_golden(name, ranks, &flags, dir).ok();
    (Trajectory::of_metrics(&dir.join("metrics.jsonl")), run)
}

fn assert_recorded(name: &str, what: &str, ours: &Trajectory) {
    let difference = ours.difference(&Trajectory::recorded(name, "run").after(10));
    assert!(difference.max() < 2e-6, "{name}, {what}: {difference:?}");
}

#[test]
fn resumes_from_pytorch_checkpoints_and_their_conversions() {
    for name in ["llama_tiny", "gpt2_tiny"] {
        let theirs = golden(name).join("dcp_step10");
        for ranks in [1, 2, 4] {
            let dir = tempfile::tempdir().unwrap();
            let (ours, run) = resume(name, ranks, &theirs, "saved", dir.path());
            assert_recorded(name, &format!("{ranks} ranks"), &ours);
            assert!(run.stderr.contains("dcp_step10 at step 10\n"), "{}", run.stderr);
            // PyTorch's state dict holds a tied head twice.
            assert_eq!(run.stderr.contains("not loaded"), name == "gpt2_tiny", "{}", run.stderr);
        }
        let dir = tempfile::tempdir().unwrap();
        convert(&theirs, Path::new("ours"), "fsdp", dir.path());
        convert(Path::new("ours"), Path::new("theirs"), "torch-dcp", dir.path());
        for from in ["ours", "theirs"] {
            let (ours, _) = resume(name, 2, Path::new(from), &format!("saved-{from}"), dir.path());
            assert_recorded(name, from, &ours);
        }
    }
}

#[test]
fn weights_alone_start_with_a_fresh_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny").join("dcp_step10_hf");
    let (ours, run) = resume("llama_tiny", 2, &model, "saved", dir.path());
    assert!(run.stderr.contains("dcp_step10_hf at step 0, with a fresh optimizer: it holds none"), "{}", run.stderr);
    assert_eq!(ours.0.len(), 20);
    // The model has learned for ten steps and sees the data of the first step.
    let first = |run: &Trajectory| run.0[0].loss;
    let recorded = Trajectory::recorded("llama_tiny", "run");
    assert!(first(&ours) < first(&recorded) - 0.05, "{} then {}", first(&recorded), first(&ours));
}
