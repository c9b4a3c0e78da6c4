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
/// Attention needs more memory than the MLP and the loss.
const WIDE_HEADS: &str = r#"{"model_type": "llama", "hidden_size": 128, "intermediate_size": 160, "head_dim": 128,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 2048}"#;
const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512,
    "vocab_size": 512}"#;

const EXPERTS: &str = r#"{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 512, "max_position_embeddings": 512}"#;

/// Chooses what computes attention.
const ATTENTION: &str = "FSDP_ATTENTION_BACKEND";

/// Runs a program that prints one JSON object, in a directory with the model's `config.json`.
fn json(mut command: Command, words: &[&str], dir: &Path) -> Value {
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
    for (config, dtype, checkpoint, seq, ranks, attention, experts) in [
        (LLAMA, "f32", "none", "128", 2, "own", "1"),
        (LLAMA, "bf16", "full", "512", 2, "own", "1"),
        // 3 ranks divide none of the matrices.
        (LLAMA, "bf16", "full", "512", 3, "own", "1"),
        (HEADS_OF_64, "bf16", "none", "128", 2, "own", "1"),
        (HEADS_OF_64, "bf16", "full", "512", 2, "cudnn", "1"),
        (GPT2, "f32", "full", "512", 2, "own", "1"),
        (GPT2, "bf16", "none", "128", 2, "own", "1"),
        (EXPERTS, "f32", "none", "128", 2, "own", "1"),
        (EXPERTS, "bf16", "full", "128", 2, "own", "1"),
        (EXPERTS, "f32", "none", "128", 2, "own", "2"),
        (EXPERTS, "bf16", "full", "128", 4, "own", "2"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let count = ranks.to_string();
        let launches_of = |steps: &str| {
            let mut launch = Command::new(program("fsdp-launch"));
            launch.args(["--nproc-per-node", &count]).arg(program("bench"));
            launch.env("GPU_DOUBLE_REPORT", dir.path()).env(ATTENTION, attention);
            let words = ["step", "--device", "cuda", "--steps", steps, "--param-dtype", dtype, "--seq", seq];
            let checkpointing = (checkpoint == "full").then_some("--activation-checkpoint");
            let placed = ["--expert-parallel", experts];
            json(launch, &words.into_iter().chain(checkpointing).chain(placed).collect::<Vec<_>>(), dir.path());
            Counts::of(dir.path(), ranks)[0].sum("operation", |_| true) as f64
        };
        let real = (launches_of("3") - launches_of("1")) / 2.;
        let mut words = [&plan_words(dtype, checkpoint)[..], &["--ranks-per-host", &count, "--seq", seq]].concat();
        words.extend((attention == "cudnn").then_some("--cudnn"));
        words.extend(["--expert-parallel", experts]);
        let planned = json(Command::new(program("bench")), &words, dir.path());
        let planned = planned["time"]["launches"].as_f64().unwrap();
        let found = format!(
            "{config}, {dtype}, checkpoint {checkpoint}, {ranks} ranks, {experts} of experts, {attention}: {planned} launches \
             planned, {real} counted"
        );
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
    for (config, dtype, checkpoint, more, seq, attention) in [
        (LLAMA, "f32", "none", &[][..], "128", "own"),
        (LLAMA, "bf16", "none", &[], "128", "own"),
        (LLAMA, "f32", "full", &[], "128", "own"),
        (LLAMA, "bf16", "full", &[], "128", "own"),
        (LLAMA, "f32", "full", &offload, "128", "own"),
        (LLAMA, "bf16", "full", &offload, "128", "own"),
        (GPT2, "f32", "none", &[], "128", "own"),
        (GPT2, "bf16", "none", &[], "128", "own"),
        (EXPERTS, "f32", "none", &[], "128", "own"),
        (EXPERTS, "bf16", "full", &[], "128", "own"),
        (LLAMA, "bf16", "none", &tensor, "128", "own"),
        (LLAMA, "bf16", "none", &sequence, "128", "own"),
        // Attention has the peak here, not the loss.
        (WIDE_HEADS, "bf16", "full", &[], "2048", "own"),
        (WIDE_HEADS, "bf16", "full", &[], "2048", "cudnn"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let ranks = if more.first() == tensor.first() { "2" } else { "1" };
        let mut words = vec!["step", "--device", "cuda", "--steps", "1", "--param-dtype", dtype];
        words.extend((checkpoint == "full").then_some("--activation-checkpoint").into_iter().chain(more.to_vec()));
        words.extend((more == offload).then_some("cpu"));
        let mut launch = Command::new(program("fsdp-launch"));
        launch.args(["--nproc-per-node", ranks]).arg(program("bench"));
        launch.env(ATTENTION, attention);
        launch.envs((config == WIDE_HEADS).then_some(("GPU_DOUBLE_COMPUTE", "no")));
        words.extend(["--seq", seq]);
        let real = json(launch, &words, dir.path())["allocated"]["peak"].as_f64().unwrap();
        let of_plan = ["--reserve", "0", "--ranks-per-host", ranks, "--seq", seq];
        let mut words = [&plan_words(dtype, checkpoint)[..], &of_plan, more].concat();
        words.extend((attention == "cudnn").then_some("--cudnn"));
        let planned = json(Command::new(program("bench")), &words, dir.path());
        let planned = planned["memory"]["total"].as_f64().unwrap();
        let error = planned / real - 1.;
        let found = format!(
            "{config}, {dtype}, checkpoint {checkpoint}, {more:?}, {attention}: {planned} planned, {real} counted"
        );
        println!("{found}: {:.1} %", 100. * error);
        far.extend((error.abs() >= NEAR).then_some(found));
    }
    assert!(far.is_empty(), "{far:#?}");
}

/// One segment is for the largest reduction, in f32. The segment of the first all-gathers, in bf16, is freed when they
/// have ended, and is part of the first step's peak.
#[test]
fn plans_count_registered_memory() {
    const FLAG: &str = "--allocate-memory-from-process-group-for-comm";
    let dir = tempfile::tempdir().unwrap();
    let config = LLAMA.replace("160", "2816").replace("\"hidden_size\": 64", "\"hidden_size\": 1024");
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let words = ["step", "--device", "cuda", "--steps", "1", "--param-dtype", "bf16", "--seq", "128"];
    let [with, without] = [&[FLAG][..], &[]].map(|flag| {
        let mut launch = Command::new(program("fsdp-launch"));
        launch.args(["--nproc-per-node", "2"]).arg(program("bench"));
        // Bytes are counted without computing.
        launch.env("GPU_DOUBLE_REPORT", dir.path()).env("GPU_DOUBLE_COMPUTE", "no");
        json(launch, &[&words[..], flag].concat(), dir.path());
        Counts::of(dir.path(), 2)[0].bytes("peak_bytes")
    });
    let words = [&plan_words("bf16", "none")[..], &["--ranks-per-host", "2", "--seq", "128", FLAG]].concat();
    let planned = json(Command::new(program("bench")), &words, dir.path());
    let planned = planned["memory"]["state"]["registered"].as_f64().unwrap();
    // A segment in bf16 has half the bytes of one in f32.
    let (real, both) = ((with - without) as f64, planned + planned / 2.);
    assert!((both / real - 1.).abs() < NEAR, "{planned} bytes planned, {real} counted");
}
