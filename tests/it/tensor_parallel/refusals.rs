//! What `--tensor-parallel` can't do is refused before a weight is read, with the number, the flag and the way out.

use std::fs;
use std::path::Path;

use fsdp_test_support::{golden, launch};

/// A recorded model with weights that can't be read.
fn model(name: &str, dir: &Path) {
    fs::create_dir(dir.join("model")).unwrap();
    fs::copy(golden(name).join("config.json"), dir.join("model/config.json")).unwrap();
    fs::write(dir.join("model/model.safetensors"), "damaged").unwrap();
}

fn refused(name: &str, ranks: usize, flags: &str, parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    model(name, dir.path());
    let tokens = golden("tokens.bin").display().to_string();
    let mut args = vec!["--model", "model", "--data", &tokens, "--steps", "1", "--batch-size", "1"];
    args.extend(flags.split(' '));
    if !flags.contains("--seq-len") {
        args.extend(["--seq-len", "32"]);
    }
    let text = launch(ranks, "train", &args, dir.path()).refused(ranks, parts);
    assert!(!text.contains("damaged"), "{text}");
}

#[test]
fn numbers_that_do_not_divide() {
    let parts = ["--tensor-parallel 2 does not divide the model's vocab_size = 131 and intermediate_size = 87"];
    refused("llama_tiny", 2, "--tensor-parallel 2", &[parts[0], "no common divisor but 1", "leave it out"]);
    let parts = ["num_key_value_heads = 2; their common divisors are 2"];
    refused("llama_tp_tied_tiny", 4, "--tensor-parallel 4", &parts);
    let parts =
        ["num_attention_heads = 4 and num_key_value_heads = 2 and vocab_size = 131", "moe_intermediate_size = 11"];
    refused("qwen3_moe_tiny", 3, "--tensor-parallel 3", &parts);
}

#[test]
fn processes_and_sequences_that_do_not_divide() {
    let name = "llama_tp_tiny";
    let parts = ["--tensor-parallel 2 does not divide the 3 processes: start a multiple of 2, or change it"];
    refused(name, 3, "--tensor-parallel 2", &parts);
    let parts = ["--replicate 2 times --tensor-parallel 2 does not divide the 2 processes: start a multiple of 4"];
    refused(name, 2, "--tensor-parallel 2 --replicate 2", &parts);
    let flags = "--tensor-parallel 2 --sequence-parallel --seq-len 31";
    let parts =
        ["--seq-len 31", "2 processes of --tensor-parallel", "a multiple of 2, or leave out --sequence-parallel"];
    refused(name, 2, flags, &parts);
    refused(name, 2, "--sequence-parallel", &["--sequence-parallel has no effect without --tensor-parallel"]);
}

#[test]
fn models_without_a_plan() {
    for (name, family, why) in [
        ("phi3_tiny", "phi3", "queries, keys and values are one matrix"),
        ("gpt2_tiny", "gpt2", "queries, keys and values are one matrix"),
        ("bert_tiny", "bert", "it is for decoders"),
    ] {
        let said = format!("--tensor-parallel 2 is not for {family}");
        refused(name, 2, "--tensor-parallel 2", &[&said, why, "the processes then shard the model"]);
    }
}
