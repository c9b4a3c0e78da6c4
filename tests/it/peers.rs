//! `bench peers` without PyTorch. `tests/outside/pytorch.rs` runs it with PyTorch.

use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, golden, program, run};

fn peers(model: &str, flags: &[&str]) -> Run {
    let mut command = Command::new(program("bench"));
    command.args(["peers", "--python", "no-python", "--rounds", "1", "--steps", "1", "--model"]).arg(golden(model));
    command.args(flags);
    run(command, Duration::from_secs(120))
}

#[test]
fn measures_candle_fsdp_alone_without_pytorch() {
    let run = peers("llama_tiny", &["--", "--seq", "32"]).ok();
    assert_eq!(run.stderr.matches("PyTorch was not found (can't start no-python").count(), 1, "{run:?}");
    let row = run.stdout.lines().last().unwrap();
    assert!(row.starts_with("| llama_tiny --seq 32 | - | ") && row.contains("s | - | - | - | 0."), "{row}");
}

#[test]
fn a_failed_row_has_its_error_and_the_command_fails() {
    let run = peers("llama_tiny", &["--json", "--", "--seq", "4096"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let row: serde_json::Value = serde_json::from_str(run.stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&row["row"], &row["ours"]), (&"llama_tiny".into(), &serde_json::Value::Null));
    let error = row["errors"][0]["error"].as_str().unwrap();
    assert!(error.contains("--seq 4096 is beyond the model's 128 positions"), "{error}");
    assert!(run.failed().contains("these rows failed: llama_tiny"));
}
