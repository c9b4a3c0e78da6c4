//! Training continues without metrics and traces when their disk is full.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, golden, program, run};
use libtest_mimic::Trial;

use crate::need::{Need, trials};

pub(crate) fn trials() -> Vec<Trial> {
    trials![&[Need::Mounts] => metrics_and_traces_without_room_are_warnings]
}

/// Runs a shell script in a mount namespace.
pub(crate) fn with_mounts(script: &str, args: &[&Path], dir: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "/bin/sh", "-c", script]).args(args).current_dir(dir);
    command
}

/// Checks that this process may mount file systems.
pub(crate) fn mounts() -> Result<(), String> {
    let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
    match with_mounts("mount -t tmpfs -o size=4k none .", &[], dir.path()).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(_) => Err("this process may not mount a file system; root may".into()),
        Err(error) => Err(format!("unshare can't be run: {error}")),
    }
}

fn metrics_and_traces_without_room_are_warnings() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("small")).unwrap();
    // Room for the test writes before the first step and the begin of a trace.
    let script = "mount -t tmpfs -o size=24k none small && exec \"$0\" --nproc-per-node=2 \"$1\" --model \"$2\" \
                  --data \"$2/tokens.bin\" --seq-len 32 --batch-size 1 --steps 30 --checkpoint-dir saved \
                  --metrics small/metrics.jsonl --trace small/trace.json";
    let (launcher, train, model) = (program("fsdp-launch"), program("train"), golden("llama_tiny"));
    let command = with_mounts(script, &[&launcher, &train, &model], dir.path());
    let run: Run = run(command, Duration::from_secs(120)).ok();
    // Rank 0 writes metrics, and each rank writes a trace.
    for (words, ranks) in [
        ("warning: cannot write metrics to small/metrics.jsonl: No space left on device", 1),
        ("warning: can't write --trace small/trace.json: No space left on device", 2),
    ] {
        assert_eq!(run.stderr.matches(words).count(), ranks, "{words:?}: {run:?}");
    }
    assert!(
        run.stdout.contains("sample:") && dir.path().join("saved/step-00000030/checkpoint.json").exists(),
        "{run:?}"
    );
}
