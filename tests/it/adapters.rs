//! `train` with low-rank adapters and parameter groups.

use std::fs;
use std::path::Path;

use fsdp_candle::nn::is_adapter;
use fsdp_ckpt::TensorSource;
use fsdp_ckpt::hf::HfModel;
use fsdp_test_support::trajectory::Trajectory;
use fsdp_test_support::{golden_trajectory, train_golden};

/// All steps of the recorded run's data. The next step reads the data of the first.
const ALL: usize = 20;

fn train(dir: &Path, name: &str, steps: usize, more: &str) -> Trajectory {
    golden_trajectory(name, 2, &format!("--steps {steps} {more}"), dir)
}

#[test]
fn trains_exported_adapters() {
    for (name, targets, other) in
        [("llama_tiny", "all-linear", "gpt2_tiny"), ("gpt2_tiny", "c_attn,h.1.mlp.*", "llama_tiny")]
    {
        let dir = tempfile::tempdir().unwrap();
        let lora = format!("--lora-rank 3 --lora-alpha 5 --lora-targets {targets}");
        let run = train(dir.path(), name, ALL, &format!("{lora} --checkpoint-dir ckpt --export-hf peft"));

        let config = fs::read_to_string(dir.path().join("peft/adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!((&config["r"], &config["lora_alpha"]), (&3.into(), &5.0.into()));
        let weights = HfModel::open_file(dir.path().join("peft/adapter_model.safetensors")).unwrap();
        let layers = weights.tensors().keys().filter(|name| name.ends_with("lora_A.weight")).count();
        // Llama: seven layers in each of two blocks. GPT-2: attention in both blocks and the two MLP layers of one.
        assert_eq!(layers, if name == "llama_tiny" { 14 } else { 4 });
        assert!(weights.tensors().keys().all(|name| name.starts_with("base_model.model.") && is_adapter(name)));

        let on = train(dir.path(), name, 21, &format!("{lora} --resume ckpt/step-00000020 --checkpoint-dir on"));
        let from = train(dir.path(), name, 1, "--lora-from peft --checkpoint-dir from --export-hf again");
        assert_eq!(on.0.last().unwrap().loss, from.0[0].loss, "{name}: the same adapters see the same data");
        assert!((from.0[0].loss - run.0[0].loss).abs() > 1e-4, "{name}: the adapters have learned: {from:?} {run:?}");
        let again = HfModel::open_file(dir.path().join("again/adapter_model.safetensors")).unwrap();
        assert!(again.tensors().keys().eq(weights.tensors().keys()));

        train_golden(other, 2, "--steps 1 --lora-from peft", dir.path())
            .refused(2, &["has an adapter of ", "pass the --model that it was trained on"]);
    }
}

#[test]
fn no_decay_makes_a_parameter_group() {
    let dir = tempfile::tempdir().unwrap();
    let decaying = train(dir.path(), "llama_tiny", 3, "--checkpoint-dir all");
    let kept = train(dir.path(), "llama_tiny", 3, "--no-decay *norm*.weight,norm.weight --checkpoint-dir some");
    assert_eq!(decaying.0[0], kept.0[0]);
    let manifest = fs::read_to_string(dir.path().join("some/step-00000003/checkpoint.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let groups = manifest["values"]["optim.param_groups"].as_array().unwrap();
    assert_eq!((&groups[0]["weight_decay"], &groups[1]["weight_decay"]), (&0.1.into(), &0.0.into()));
    // Two norms in each of two blocks, and the last norm.
    assert_eq!(groups[1]["params"].as_array().unwrap().len(), 5);
    // A resume with other groups takes hyper-parameters from the flags.
    train(dir.path(), "llama_tiny", 4, "--no-decay norm.weight --resume some/step-00000003 --checkpoint-dir on");
}

#[test]
fn refuses_unknown_layers_and_patterns() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("none")).unwrap();
    for (more, expected) in [
        ("--lora-rank 2 --lora-targets q_proj,qproj", &["`qproj`", "model.layers.*.self_attn.q_proj"][..]),
        ("--lora-rank 2 --lora-targets norm", &["`norm` matches no fully connected layer"]),
        (
            "--lora-rank 2 --lora-targets embed_tokens",
            &[
                "`embed_tokens` matches no fully connected layer of the model; it has lm_head, model.layers.*.mlp.down_proj",
            ],
        ),
        ("--lora-rank 2 --lora-targets a[", &["--lora-targets", "`a[` is not a valid pattern of names"]),
        ("--lora-from none", &["--lora-from none", "adapter_config.json"]),
        ("--no-decay scale", &["--no-decay: `scale` matches no trained parameter"]),
        ("--no-decay **x", &["--no-decay", "`**x` is not a valid pattern of names"]),
    ] {
        train_golden("llama_tiny", 2, &format!("--steps 1 {more}"), dir.path()).refused(2, expected);
    }
    let of_experts = "--steps 1 --lora-rank 2 --lora-targets w1,w2 --checkpoint-dir run --export-hf out";
    let expected = &["PEFT can't load the adapters of experts", "block_sparse_moe.experts.0.w1", "--lora-alpha"];
    train_golden("mixtral_tiny", 2, of_experts, dir.path()).refused(2, expected);
    assert!(!dir.path().join("out").exists());
}
