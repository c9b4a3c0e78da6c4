//! Results do not depend on the number of threads.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{program, run, workspace};
use serde_json::{Value, json};

/// Returns the bits of the loss and of the gradients' norm after an optimizer step.
fn step(model: &Path, flags: &[&str], threads: usize) -> [u64; 2] {
    let mut command = Command::new(program("bench"));
    command.args(["step", "--json", "--steps", "1", "--model"]).arg(model).args(flags);
    command.env("RAYON_NUM_THREADS", threads.to_string());
    let run = run(command, Duration::from_secs(300)).ok();
    let report: Value = serde_json::from_str(run.stdout.lines().last().unwrap()).unwrap();
    ["loss", "grad_norm"].map(|key| report[key].as_f64().unwrap().to_bits())
}

/// The models have enough elements in each layer for several threads.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let gpt2 = json!({
        "model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 3, "n_positions": 256, "vocab_size": 700,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    });
    let mixtral = json!({
        "model_type": "mixtral", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 256, "vocab_size": 700,
        "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "hidden_act": "silu", "tie_word_embeddings": false,
    });
    for (name, config) in [("gpt2", gpt2), ("mixtral", mixtral)] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("config.json"), config.to_string()).unwrap();
    }
    let configs = workspace().join("examples/configs");
    let cases = [
        (dir.path().join("gpt2"), vec!["--batch", "3", "--seq", "250"]),
        (dir.path().join("gpt2"), vec!["--batch", "3", "--seq", "250", "--param-dtype", "bf16"]),
        (dir.path().join("mixtral"), vec!["--batch", "3", "--seq", "250"]),
        (configs.join("resnet-18"), vec!["--batch", "3"]),
        (configs.join("convnext-tiny"), vec!["--batch", "2"]),
    ];
    for (model, flags) in cases {
        let expected = step(&model, &flags, 1);
        for threads in [2, 5] {
            assert_eq!(step(&model, &flags, threads), expected, "{} {flags:?}, {threads} threads", model.display());
        }
    }
}
