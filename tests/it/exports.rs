//! `train --export-gguf` writes what `fsdp-ckpt convert` makes of the exported model, and refuses bad input before the
//! first step. `--export-hf` copies the tokenizer's files.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{copy_golden, edit_file, golden, program, run, train_golden};

/// Models that llama.cpp computes as transformers does.
const MODELS: [&str; 8] =
    ["llama_tiny", "llama3_tiny", "mistral_tiny", "qwen2_tiny", "phi3_tiny", "mixtral_tiny", "gpt2_tiny", "bert_tiny"];
/// Other models, and the field of `config.json` that llama.cpp does not have.
const REFUSED: [(&str, &str); 4] = [
    ("qwen3_tiny", "attention_bias"),
    ("qwen3_moe_tiny", "mlp_only_layers"),
    ("gemma2_tiny", "query_pre_attn_scalar"),
    ("gemma3_text_tiny", "query_pre_attn_scalar"),
];

fn fsdp_ckpt(args: &[&str], dir: &Path) {
    let mut command = Command::new(program("fsdp-ckpt"));
    command.args(args).current_dir(dir);
    run(command, Duration::from_secs(120)).ok();
}

fn assert_equal(name: &str, dir: &Path) {
    // The file's name is in its metadata.
    let [ours, theirs] = ["ours/model.gguf", "theirs/model.gguf"].map(|path| fs::read(dir.join(path)).unwrap());
    assert!(ours == theirs, "{name}: {} and {} bytes", ours.len(), theirs.len());
}

#[test]
fn exports_equal_conversions() {
    for name in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let flags = "--steps 1 --export-gguf ours/model.gguf --gguf-quantize q8_0 --export-hf hf";
        let stdout = train_golden(name, 2, flags, dir.path()).ok().stdout;
        assert!(stdout.contains("exported: ours/model.gguf (q8_0, "), "{name}: {stdout}");
        fs::create_dir(dir.path().join("theirs")).unwrap();
        fsdp_ckpt(&["convert", "hf", "theirs/model.gguf", "--to", "gguf", "--quantize", "q8_0"], dir.path());
        assert_equal(name, dir.path());
    }
}

#[test]
fn exports_of_adapters_have_merged_weights() {
    for (name, targets) in [("llama_tiny", "all-linear"), ("gpt2_tiny", "c_attn,c_proj")] {
        let dir = tempfile::tempdir().unwrap();
        let flags = format!(
            "--steps 2 --lora-rank 3 --lora-alpha 5 --lora-targets {targets} --lr 1e-2 --export-gguf ours/model.gguf \
             --export-hf adapters"
        );
        train_golden(name, 2, &flags, dir.path()).ok();
        fs::create_dir(dir.path().join("theirs")).unwrap();
        let base = golden(name);
        fsdp_ckpt(&["merge", base.to_str().unwrap(), "adapters", "merged"], dir.path());
        fsdp_ckpt(&["convert", "merged", "theirs/model.gguf", "--to", "gguf"], dir.path());
        assert_equal(name, dir.path());
        fsdp_ckpt(&["convert", base.to_str().unwrap(), "base.gguf", "--to", "gguf"], dir.path());
        let [ours, base] = ["ours/model.gguf", "base.gguf"].map(|path| fs::read(dir.path().join(path)).unwrap());
        assert!(ours[ours.len() / 2..] != base[base.len() / 2..], "{name}: the adapters have learned");
    }
}

#[test]
fn bad_exports_are_refused_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("there.gguf"), "mine").unwrap();
    let model = |change: &dyn Fn(&Path)| {
        let model = dir.path().join("model");
        _ = fs::remove_dir_all(&model);
        copy_golden("llama_tiny", &model);
        change(&model);
    };
    let refused = |flags: &str, parts: &[&str]| {
        let flags = format!("--steps 1 --model model --checkpoint-dir saved {flags}");
        train_golden("llama_tiny", 2, &flags, dir.path()).refused(2, parts);
        let steps = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap_or_default();
        assert!(!steps.contains("\"step\""), "{flags}: {steps}");
    };
    model(&|_| {});
    refused("--export-gguf there.gguf", &["--export-gguf there.gguf", "it exists", "pass another path"]);
    refused("--export-gguf there.gguf/a.gguf", &["can't write --export-gguf there.gguf/a.gguf", "is not a directory"]);
    refused("--export-gguf s3://bucket/a.gguf", &["--export-gguf s3://bucket/a.gguf", "expected a path on this host"]);
    model(&|model| fs::write(model.join("tokenizer.json"), "{").unwrap());
    // The tokenizer that training reads is damaged, too.
    refused("--export-gguf a.gguf", &["tokenizer.json"]);
    model(&|model| edit_file(&model.join("config.json"), "\"silu\"", "\"gelu\""));
    refused("--export-gguf a.gguf", &["hidden_act", "gelu"]);
    assert_eq!(fs::read_to_string(dir.path().join("there.gguf")).unwrap(), "mine");
    assert!(!dir.path().join("a.gguf").exists() && !dir.path().join("saved").exists());
}

#[test]
fn models_that_llama_cpp_does_not_have_are_refused_before_the_first_step() {
    for (name, field) in REFUSED {
        let dir = tempfile::tempdir().unwrap();
        train_golden(name, 2, "--steps 1 --export-gguf a.gguf", dir.path())
            .refused(2, &["--export-gguf a.gguf", field]);
        assert!(!dir.path().join("checkpoints").exists(), "{name}");
    }
}

#[test]
fn an_export_has_the_chat_template() {
    let dir = tempfile::tempdir().unwrap();
    copy_golden("llama_tiny", &dir.path().join("model"));
    fs::write(dir.path().join("model/chat_template.jinja"), "{{ messages }}").unwrap();
    train_golden("llama_tiny", 2, "--steps 1 --model model --export-hf out", dir.path()).ok();
    assert_eq!(fs::read_to_string(dir.path().join("out/chat_template.jinja")).unwrap(), "{{ messages }}");
}
