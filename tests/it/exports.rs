//! `train --export-gguf` writes what `fsdp-ckpt convert` makes of the exported model, and refuses bad input before the
//! first step. `--export-hf` copies the tokenizer's files.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_ckpt::SafetensorsFile;
use fsdp_test_support::{copy_golden, edit_file, file_names, golden, program, run, train, train_golden};

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

/// The experts of gpt-oss are joined under the names of each task's model, and a resumed run replaces its export.
#[test]
fn joined_experts_have_the_names_of_each_task() {
    let dir = tempfile::tempdir().unwrap();
    let pairs: String = (0..16).map(|at| format!("a{at},b{at}\n")).collect();
    fs::write(dir.path().join("pairs.csv"), format!("anchor,positive\n{pairs}")).unwrap();
    let labels: String = (0..16).map(|at| format!("a{at},{}\n", at % 2)).collect();
    fs::write(dir.path().join("labels.csv"), format!("text,label\n{labels}")).unwrap();
    let run = |more: &str, export: &str| {
        let model = golden("gpt_oss_tiny").display().to_string();
        let flags = format!("--model {model} --seq-len 16 --batch-size 2 --export-hf {export} {more}");
        train(2, &flags, dir.path()).ok();
        let left: Vec<String> = file_names(&dir.path().join(export));
        assert!(!left.iter().any(|name| name.starts_with('.')), "{left:?}");
        let weights = SafetensorsFile::open(dir.path().join(export).join("model.safetensors")).unwrap();
        let experts = weights.names().filter(|name| name.contains(".experts."));
        (experts.map(str::to_owned).collect::<Vec<_>>(), weights.names().count())
    };
    let ends = ["down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias"];
    let names = |prefix: &str| -> Vec<String> {
        let of = |layer: usize| ends.map(|end| format!("{prefix}layers.{layer}.mlp.experts.{end}"));
        (0..2).flat_map(of).collect()
    };
    let data = format!("--data {}", golden("tokens.bin").display());
    let first = run(&format!("{data} --steps 1 --checkpoint-dir saved"), "language");
    assert_eq!(first.0, names("model."));
    assert_eq!(run(&format!("{data} --steps 2 --checkpoint-dir saved --resume auto"), "language"), first);
    let (experts, count) = run("--task classify --data labels.csv --steps 1 --checkpoint-dir c", "classes");
    assert_eq!((experts, count), (names("model."), first.1));
    let (experts, count) = run("--task embed --data pairs.csv --steps 1 --checkpoint-dir e", "embeddings");
    assert_eq!((experts, count), (names(""), first.1 - 1));
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
