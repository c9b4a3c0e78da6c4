//! Short runs of `train` by other launchers than `fsdp-launch`, beside each other.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{golden_flags_of, json_lines, launch};

/// Returns flags for three steps of the recorded Llama.
pub fn flags(name: &str) -> Vec<String> {
    let own = ["--batch-size", "2", "--metrics", &format!("{name}.jsonl"), "--checkpoint-dir", name];
    golden_flags_of("llama_tiny", 3).into_iter().chain(own.map(String::from)).collect()
}

/// Returns the losses of the run `name`.
///
/// # Panics
/// If it wrote none.
pub fn losses(name: &str, dir: &Path) -> Vec<Value> {
    json_lines(&dir.join(format!("{name}.jsonl"))).iter().map(|line| line["loss"].clone()).collect()
}

/// Returns the losses of two ranks under `fsdp-launch`.
///
/// # Panics
/// If the run fails.
pub fn expected(dir: &Path) -> Vec<Value> {
    launch(2, "train", &flags("ours").iter().map(String::as_str).collect::<Vec<_>>(), dir).ok();
    let losses = losses("ours", dir);
    assert_eq!(losses.len(), 3);
    losses
}

/// Removes the variables of a launcher that started the tests.
pub fn without_launcher(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        let prefixes = ["SLURM_", "OMPI_", "PMIX_", "PMI_", "MPI_", "HYDI_", "TORCHELASTIC_", "MASTER_", "LOCAL_"];
        if prefixes.iter().any(|prefix| name.starts_with(prefix)) || ["RANK", "WORLD_SIZE"].contains(&&*name) {
            command.env_remove(&*name);
        }
    }
    command
}
