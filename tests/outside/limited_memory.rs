//! Two hosts train a model that does not fit one. `tests/hosts/limited` limits their memory.

use std::{fs, path::Path, process::Command, time::Duration};

use fsdp_test_support::{Run, golden, program, run, workspace};
use libtest_mimic::Trial;

use crate::need::{Need, trials};
use crate::way::Way;

const NEEDS: &[Need] = &[Need::Networks, Need::Mpi, Need::Memory];
/// Much longer than a test takes.
const LIMIT: Duration = Duration::from_secs(300);
/// Memory of a host in bytes.
const MEMORY: u64 = 512 << 20;

pub(crate) fn trials() -> Vec<Trial> {
    trials![NEEDS => a_model_too_large_for_one_host_trains_on_two]
}

fn limited(size: u64) -> Command {
    let mut command = Command::new(workspace().join("tests/hosts/limited"));
    command.arg(size.to_string());
    command
}

/// Checks that memory can be limited.
pub(crate) fn memory_can_be_limited() -> Result<(), String> {
    let output = limited(100 << 20).arg("true").output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

/// Writes the configuration of a Llama of 33 million parameters, with 16 bytes of training state each.
fn model(dir: &Path) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 131, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    });
    fs::create_dir(dir.join("model")).unwrap();
    fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
}

/// Returns each host's peak memory, or `None` if the kernel does not measure it.
fn peaks(run: &Run) -> Vec<Option<u64>> {
    let lines = run.stdout.lines().chain(run.stderr.lines());
    let told = lines.filter_map(|line| line.split_once("tests/hosts/limited: node")?.1.split(' ').nth(1));
    told.map(|bytes| if bytes == "unknown" { None } else { Some(bytes.parse().unwrap()) }).collect()
}

fn a_model_too_large_for_one_host_trains_on_two() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    let on = |hosts| {
        let (limited, size) = (workspace().join("tests/hosts/limited"), MEMORY.to_string());
        let (program, data) = (program("train"), golden("llama_tiny").join("tokens.bin"));
        let mut args = vec![limited.to_str().unwrap(), &size, program.to_str().unwrap()];
        args.extend(["--model", "model", "--data", data.to_str().unwrap(), "--seq-len", "32", "--batch-size", "1"]);
        args.extend(["--steps", "2", "--checkpoint-dir", "saved"]);
        run(Way::Ours.start(&[], (hosts, 1), &[], &args, dir.path()), LIMIT)
    };
    let alone = on(1);
    assert!(alone.code.is_some_and(|code| code != 0), "one host held it: {alone:?}");
    assert!(alone.stdout.contains("Killed") || alone.stderr.contains("Killed"), "{alone:?}");
    assert!(!dir.path().join("saved/step-00000002").exists());

    let run = on(2).ok();
    let peaks = peaks(&run);
    assert!(peaks.len() == 2 && peaks.iter().all(|peak| peak.is_none_or(|peak| peak <= MEMORY)), "{peaks:?}");
    let is_done = run.stdout.contains("step 2/2") || run.stderr.contains("step 2/2");
    assert!(is_done && dir.path().join("saved/step-00000002").exists(), "{run:?}");
}
