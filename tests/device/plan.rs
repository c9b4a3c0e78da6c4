//! Compares `bench plan` for a GPU with the device memory and the launches of a step.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{program, run};
use serde_json::Value;

use crate::train_run::Counts;

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512}"#;
/// In bf16, kernels for tensor cores compute the attention of heads of 64.
const HEADS_OF_64: &str = r#"{"model_type": "llama", "hidden_size": 128, "intermediate_size": 160,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
    "max_position_embeddings": 512}"#;
const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512,
    "vocab_size": 512}"#;

const EXPERTS: &str = r#"{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 512, "max_position_embeddings": 512}"#;

/// Runs a program that prints one JSON object for a model and sequences of 128 tokens.
fn json(command: Command, words: &[&str], dir: &Path) -> Value {
    json_of(command, &[words, &["--seq", "128"]].concat(), dir)
}

/// Runs a program that prints one JSON object, in a directory with the model's `config.json`.
fn json_of(mut command: Command, words: &[&str], dir: &Path) -> Value {
    command.args(words).args(["--model", ".", "--batch", "1", "--json"]).current_dir(dir);
    let stdout = run(command, Duration::from_secs(120)).ok().stdout;
    let line = stdout.lines().find(|line| line.contains('{')).unwrap();
    serde_json::from_str(&line[line.find('{').unwrap()..]).unwrap()
}

/// A plan leaves out small tensors: positions, masks of the loss, what collectives compare.
const NEAR: f64 = 0.03;

fn plan_words<'a>(dtype: &'a str, checkpoint: &'a str) -> [&'a str; 7] {
    ["plan", "--device", "h100-sxm", "--param-dtype", dtype, "--activation-checkpoint", checkpoint]
}

/// Sequences of 512 tokens have two blocks of queries.
#[test]
fn plans_count_launches() {
    let mut far = vec![];
    for (config, dtype, checkpoint, seq) in [
        (LLAMA, "f32", "none", "128"),
        (LLAMA, "bf16", "full", "512"),
        (HEADS_OF_64, "bf16", "none", "128"),
        (GPT2, "f32", "full", "512"),
        (GPT2, "bf16", "none", "128"),
        (EXPERTS, "f32", "none", "128"),
        (EXPERTS, "bf16", "full", "128"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let launches_of = |steps: &str| {
            let mut launch = Command::new(program("fsdp-launch"));
            launch.args(["--nproc-per-node", "2"]).arg(program("bench")).env("GPU_DOUBLE_REPORT", dir.path());
            let words = ["step", "--device", "cuda", "--steps", steps, "--param-dtype", dtype, "--seq", seq];
            let checkpointing = (checkpoint == "full").then_some("--activation-checkpoint");
            json_of(launch, &words.into_iter().chain(checkpointing).collect::<Vec<_>>(), dir.path());
            Counts::of(dir.path(), 2)[0].sum("operation", |_| true) as f64
        };
        let real = (launches_of("3") - launches_of("1")) / 2.;
        let words = [&plan_words(dtype, checkpoint)[..], &["--ranks-per-host", "2", "--seq", seq]].concat();
        let planned = json_of(Command::new(program("bench")), &words, dir.path());
        let planned = planned["time"]["launches"].as_f64().unwrap();
        let found = format!("{config}, {dtype}, checkpoint {checkpoint}: {planned} launches planned, {real} counted");
        println!("{found}: {:.1} %", 100. * (planned / real - 1.));
        far.extend(((planned / real - 1.).abs() >= NEAR).then_some(found));
    }
    assert!(far.is_empty(), "{far:#?}");
}

#[test]
fn plans_count_the_activations_of_attention_and_loss() {
    let mut far = vec![];
    let tensor = ["--tensor-parallel", "2"];
    let sequence = ["--tensor-parallel", "2", "--sequence-parallel"];
    let offload = ["--activation-offload"];
    for (config, dtype, checkpoint, more) in [
        (LLAMA, "f32", "none", &[][..]),
        (LLAMA, "bf16", "none", &[]),
        (LLAMA, "f32", "full", &[]),
        (LLAMA, "bf16", "full", &[]),
        (LLAMA, "f32", "full", &offload),
        (LLAMA, "bf16", "full", &offload),
        (GPT2, "f32", "none", &[]),
        (GPT2, "bf16", "none", &[]),
        (EXPERTS, "f32", "none", &[]),
        (EXPERTS, "bf16", "full", &[]),
        (LLAMA, "bf16", "none", &tensor),
        (LLAMA, "bf16", "none", &sequence),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let ranks = if more.first() == tensor.first() { "2" } else { "1" };
        let mut words = vec!["step", "--device", "cuda", "--steps", "1", "--param-dtype", dtype];
        words.extend((checkpoint == "full").then_some("--activation-checkpoint").into_iter().chain(more.to_vec()));
        words.extend((more == offload).then_some("cpu"));
        let mut launch = Command::new(program("fsdp-launch"));
        launch.args(["--nproc-per-node", ranks]).arg(program("bench"));
        let real = json(launch, &words, dir.path())["allocated"]["peak"].as_f64().unwrap();
        let words = [&plan_words(dtype, checkpoint)[..], &["--reserve", "0", "--ranks-per-host", ranks], more];
        let planned = json(Command::new(program("bench")), &words.concat(), dir.path());
        let planned = planned["memory"]["total"].as_f64().unwrap();
        let error = planned / real - 1.;
        let found =
            format!("{config}, {dtype}, checkpoint {checkpoint}, {more:?}: {planned} bytes planned, {real} counted");
        println!("{found}: {:.1} %", 100. * error);
        far.extend((error.abs() >= NEAR).then_some(found));
    }
    assert!(far.is_empty(), "{far:#?}");
}
