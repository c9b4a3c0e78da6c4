//! Compares `bench plan` for a GPU with the device memory of a step.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{program, run};
use serde_json::Value;

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128}"#;
const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128,
    "vocab_size": 512}"#;

/// Runs a program that prints one JSON object, in a directory with the model's `config.json`.
fn json(mut command: Command, words: &[&str], dir: &Path) -> Value {
    command.args(words).args(["--model", ".", "--seq", "128", "--batch", "1", "--json"]).current_dir(dir);
    let stdout = run(command, Duration::from_secs(120)).ok().stdout;
    let line = stdout.lines().find(|line| line.contains('{')).unwrap();
    serde_json::from_str(&line[line.find('{').unwrap()..]).unwrap()
}

/// A plan leaves out small tensors: positions, masks of the loss, what collectives compare.
const NEAR: f64 = 0.03;

#[test]
fn plans_count_the_activations_of_attention_and_loss() {
    let mut far = vec![];
    let tensor = ["--tensor-parallel", "2"];
    let sequence = ["--tensor-parallel", "2", "--sequence-parallel"];
    for (config, dtype, checkpoint, parallel) in [
        (LLAMA, "f32", "none", &[][..]),
        (LLAMA, "bf16", "none", &[]),
        (LLAMA, "f32", "full", &[]),
        (LLAMA, "bf16", "full", &[]),
        (GPT2, "f32", "none", &[]),
        (GPT2, "bf16", "none", &[]),
        (LLAMA, "bf16", "none", &tensor),
        (LLAMA, "bf16", "none", &sequence),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let ranks = if parallel.is_empty() { "1" } else { "2" };
        let mut words = vec!["step", "--device", "cuda", "--steps", "1", "--param-dtype", dtype];
        words.extend((checkpoint == "full").then_some("--activation-checkpoint").into_iter().chain(parallel.to_vec()));
        let mut launch = Command::new(program("fsdp-launch"));
        launch.args(["--nproc-per-node", ranks]).arg(program("bench"));
        let real = json(launch, &words, dir.path())["allocated"]["peak"].as_f64().unwrap();
        let words =
            ["plan", "--device", "h100-sxm", "--ranks-per-host", ranks, "--reserve", "0", "--param-dtype", dtype];
        let words = [&words[..], &["--activation-checkpoint", checkpoint], parallel].concat();
        let planned = json(Command::new(program("bench")), &words, dir.path());
        let planned = planned["memory"]["total"].as_f64().unwrap();
        let error = planned / real - 1.;
        let found = format!(
            "{config}, {dtype}, checkpoint {checkpoint}, {parallel:?}: {planned} bytes planned, {real} counted"
        );
        println!("{found}: {:.1} %", 100. * error);
        far.extend((error.abs() >= NEAR).then_some(found));
    }
    assert!(far.is_empty(), "{far:#?}");
}
