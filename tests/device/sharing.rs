//! Ranks that share a device, as with a left-over `CUDA_VISIBLE_DEVICES=0`.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{golden_flags_of, program, run};

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
