//! Ranks that share a device: with a left-over `CUDA_VISIBLE_DEVICES=0`, and for tests of NCCL on one device.

use std::process::Command;
use std::time::Duration;

use crate::train_run::{Counts, Engine, TrainRun};
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{golden_flags_of, program, run, tolerance};

#[test]
fn warns_once_about_ranks_that_share_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let said = |visible: Option<&str>| {
        let mut command = Command::new(program("fsdp-launch"));
        command.arg("--nproc-per-node=2").arg(program("train")).args(golden_flags_of("llama_tiny", 1));
        command.args(["--batch-size", "2", "--device", "cuda"]).current_dir(dir.path());
        command.env_remove("FSDP_DEVICE_BACKEND").env_remove("CUDA_VISIBLE_DEVICES");
        if let Some(devices) = visible {
            // The double does not read CUDA's variable.
            command.env("CUDA_VISIBLE_DEVICES", devices).env("GPU_DOUBLE_DEVICES", "1");
        }
        let run = run(command, Duration::from_secs(120)).ok();
        format!("{}{}", run.stdout, run.stderr)
    };
    let warning = "ranks [0, 1] share a device (CUDA_VISIBLE_DEVICES=\"0\" on this rank)";
    let text = said(Some("0"));
    assert_eq!(text.matches(warning).count(), 1, "{text}");
    let text = said(None);
    assert!(!text.contains("share a device"), "{text}");
}

#[test]
fn ranks_on_one_device_train_by_nccl() {
    for (ranks, flags) in [(2, &[][..]), (4, &["--replicate", "2"])] {
        let dir = tempfile::tempdir().unwrap();
        let run = TrainRun { engine: Engine::NcclShared, flags, ..TrainRun::recorded("llama_tiny", ranks) };
        let difference = run.train(dir.path()).difference(&Trajectory::recorded("llama_tiny", "run"));
        assert!(difference.is_within(tolerance::SAME), "{run:?}: {difference:?}");
        for counts in Counts::of(dir.path(), ranks) {
            assert!(counts.sum("nccl", |_| true) > 100, "{counts:?}");
        }
    }
}

#[test]
fn ranks_that_nccl_takes_for_one_host_are_refused_unless_nccl_accepts_them() {
    let dir = tempfile::tempdir().unwrap();
    let start = |set: &str| {
        let mut command = Command::new(program("fsdp-launch"));
        command.args(["--nproc-per-node=2", "--no-python", "bash", "-c", &format!("{set} exec \"$0\" \"$@\"")]);
        command.arg(program("train")).args(golden_flags_of("llama_tiny", 1));
        command.args(["--batch-size", "2", "--device", "cuda"]).current_dir(dir.path());
        command.env("FSDP_DEVICE_BACKEND", "nccl-shared").env("NCCL_HOSTID", "one").env("GPU_DOUBLE_DEVICES", "1");
        run(command, Duration::from_secs(120))
    };
    let refused = |set: &str| {
        let run = start(set);
        assert!(run.code != Some(0), "{}{}", run.stdout, run.stderr);
        format!("{}{}", run.stdout, run.stderr)
    };
    let text = refused("");
    assert!(text.contains("FSDP_DEVICE_BACKEND=nccl-shared: ranks [0, 1] share a device"), "{text}");
    assert!(text.contains("NCCL_HOSTID"), "{text}");
    let text = refused("[ $RANK = 0 ] && export FSDP_DEVICE_BACKEND=host;");
    assert!(text.contains("FSDP_DEVICE_BACKEND=nccl-shared on 1 of 2 ranks: set it for all or none"), "{text}");
    // From 2.30 on.
    start("export NCCL_MULTI_RANK_GPU_ENABLE=1;").ok();
}
