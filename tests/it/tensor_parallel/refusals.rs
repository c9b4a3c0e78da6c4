//! `--tensor-parallel` refuses unsupported models and sizes before reading weights, and names the number and the fix.

use std::fs;
use std::path::Path;

use fsdp_test_support::{golden, merge_flags, train};

/// Makes a recorded model with unreadable weights.
fn model(name: &str, dir: &Path) {
    fs::create_dir(dir.join("model")).unwrap();
    fs::copy(golden(name).join("config.json"), dir.join("model/config.json")).unwrap();
    fs::write(dir.join("model/model.safetensors"), "damaged").unwrap();
}

fn refused(name: &str, ranks: usize, flags: &str, parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    model(name, dir.path());
    let tokens = golden("tokens.bin").display().to_string();
    let defaults = format!("--model model --data {tokens} --steps 1 --batch-size 1 --seq-len 32");
    let text = train(ranks, &merge_flags(&defaults, flags), dir.path()).refused(ranks, parts);
    assert!(!text.contains("damaged"), "{text}");
}

#[test]
fn refuses_unsupported_sizes_and_models() {
    let cases: [(&str, usize, &str, &[&str]); 10] = [
        (
            "llama_tiny",
            2,
            "--tensor-parallel 2",
            &[
                "--tensor-parallel 2 does not divide the model's vocab_size = 131 and intermediate_size = 87",
                "no common divisor but 1",
                "leave it out",
            ],
        ),
        ("llama_tp_tied_tiny", 4, "--tensor-parallel 4", &["num_key_value_heads = 2; their common divisors are 2"]),
        (
            "qwen3_moe_tiny",
            3,
            "--tensor-parallel 3",
            &["num_attention_heads = 4 and num_key_value_heads = 2 and vocab_size = 131", "moe_intermediate_size = 11"],
        ),
        (
            "llama_tp_tiny",
            3,
            "--tensor-parallel 2",
            &["--tensor-parallel 2 does not divide the 3 processes: start a multiple of 2, or change it"],
        ),
        (
            "llama_tp_tiny",
            2,
            "--tensor-parallel 2 --replicate 2",
            &["--replicate 2 times --tensor-parallel 2 does not divide the 2 processes: start a multiple of 4"],
        ),
        (
            "llama_tp_tiny",
            2,
            "--tensor-parallel 2 --sequence-parallel --seq-len 31",
            &["found --seq-len 31 and --tensor-parallel 2", "pass a multiple, or leave out --sequence-parallel"],
        ),
        ("llama_tp_tiny", 2, "--sequence-parallel", &["--sequence-parallel needs --tensor-parallel"]),
        (
            "phi3_tiny",
            2,
            "--tensor-parallel 2",
            &["--tensor-parallel 2 is not for phi3", "queries, keys and values are one matrix"],
        ),
        (
            "gpt2_tiny",
            2,
            "--tensor-parallel 2",
            &["--tensor-parallel 2 is not for gpt2", "queries, keys and values are one matrix"],
        ),
        (
            "bert_tiny",
            2,
            "--tensor-parallel 2",
            &["--tensor-parallel 2 is not for bert", "it is for decoders", "the processes then shard the model"],
        ),
    ];
    for (name, ranks, flags, parts) in cases {
        refused(name, ranks, flags, parts);
    }
}
