//! Checkpoints from a device load on the CPU with the same bits.

use std::fs;
use std::path::Path;

use crate::train_run::{Engine, TrainRun};

/// Returns the weights of an export without the headers, which name the run.
fn export(dir: &Path) -> Vec<u8> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    assert!(!files.is_empty());
    let weights = |path| {
        let bytes = fs::read(path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[8 + header..].to_vec()
    };
    files.iter().flat_map(weights).collect()
}

#[test]
fn device_checkpoints_load_on_the_cpu_and_on_other_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved").display().to_string();
    let save = ["--checkpoint-dir", &saved, "--save-every", "20", "--export-hf", "from-device"];
    TrainRun { flags: &save, ..TrainRun::recorded("llama_tiny", 2) }.train(dir.path());
    // Nothing is left to train: what was loaded is exported.
    let latest = fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().path()).find(|path| path.is_dir()).unwrap();
    let latest = latest.display().to_string();
    for (ranks, engine, name) in [(2, Engine::Cpu, "cpu"), (1, Engine::Cpu, "cpu1"), (4, Engine::Nccl, "device")] {
        let load = ["--resume", &latest, "--export-hf", name];
        TrainRun { engine, flags: &load, ..TrainRun::recorded("llama_tiny", ranks) }.start(dir.path()).ok();
        assert!(export(&dir.path().join(name)) == export(&dir.path().join("from-device")), "{ranks} ranks, {engine:?}");
    }
}
