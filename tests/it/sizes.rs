//! Sizes are checked before memory is allocated. An error names the required memory and its use.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fsdp_test_support::{Run, copy_golden, merge_flags, program, run};

const HUGE: &str = "18446744073709551615";

/// Trains in one process on the recorded model in `dir/model`, in at most `limit` KiB of address space.
fn train(dir: &Path, limit: Option<u64>, flags: &str) -> Run {
    let limit = limit.map_or_else(String::new, |kib| format!("ulimit -v {kib}; "));
    let defaults = "--model model --data model/tokens.bin --init random --seq-len 32 --batch-size 1 --steps 1";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &format!("{limit}exec \"$0\" {}", merge_flags(defaults, flags))]);
    command.arg(program("train")).current_dir(dir);
    run(command, Duration::from_secs(150))
}

/// Makes a directory with a recorded model in `model`, whose configuration has `value` in some fields.
fn model(name: &str, fields: &[&str], value: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy_golden(name, &dir.path().join("model"));
    let path = dir.path().join("model/config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    fields.iter().for_each(|field| config[field] = value.into());
    fs::write(&path, config.to_string()).unwrap();
    dir
}

fn refused(run: Run, parts: &[&str]) {
    // An abort has no exit code.
    assert_eq!(run.code, Some(1), "{run:?}");
    let text = run.failed();
    assert!(parts.iter().all(|part| text.contains(part)) && !text.contains("panicked"), "{parts:?} not in\n{text}");
    assert!(text.lines().filter(|line| line.starts_with("Error: ")).count() == 1, "{text}");
}

#[test]
fn refuses_configurations_larger_than_memory() {
    let cases: [(&str, &[&[&str]]); 3] = [
        (
            "llama_tiny",
            &[
                &["hidden_size", "num_attention_heads"],
                &["hidden_size"],
                &["intermediate_size"],
                &["num_hidden_layers"],
                &["vocab_size"],
                &["head_dim"],
            ],
        ),
        ("gpt2_tiny", &[&["n_embd"], &["n_inner"], &["n_layer"], &["n_positions"], &["vocab_size"]]),
        (
            "bert_tiny",
            &[
                &["hidden_size"],
                &["intermediate_size"],
                &["num_hidden_layers"],
                &["max_position_embeddings"],
                &["type_vocab_size"],
                &["vocab_size"],
            ],
        ),
    ];
    for (name, all) in cases {
        let flags = if name == "bert_tiny" { "--mask-token 131" } else { "" };
        for fields in all {
            let dir = model(name, fields, 1 << 62);
            for limit in [None, Some(2 << 20)] {
                refused(train(dir.path(), limit, flags), &["rank 0 needs at least ", " of memory (", " for "]);
            }
        }
    }
}

#[test]
fn refuses_configurations_with_zero_sizes() {
    for (name, field) in
        [("llama_tiny", "intermediate_size"), ("llama_tiny", "num_attention_heads"), ("gpt2_tiny", "n_layer")]
    {
        let dir = model(name, &[field], 0);
        refused(train(dir.path(), None, ""), &["in model/config.json", &format!("{field} = 0 must be at least 1")]);
    }
}

#[test]
fn refuses_flags_larger_than_memory() {
    let dir = model("llama_tiny", &[], 0);
    for rank in [HUGE, "4611686018427387904", "1000000000000"] {
        refused(train(dir.path(), None, &format!("--lora-rank {rank}")), &["rank 0 needs at least ", "--lora-rank"]);
    }
    for flag in ["--batch-size", "--grad-accum"] {
        for value in [HUGE, "9223372036854775808"] {
            let parts = ["no data is large enough for one step of 1 ranks x ", value, "use a smaller --seq-len"];
            refused(train(dir.path(), None, &format!("{flag} {value}")), &parts);
        }
        refused(train(dir.path(), None, &format!("{flag} 1000000000")), &["the data is too short", "1000000000"]);
    }
    let parts =
        ["no data is large enough for one step of 1 ranks x 1 sequences x 1 micro-batches x 18446744073709551615"];
    refused(train(dir.path(), None, &format!("--seq-len {HUGE}")), &parts);
}

#[test]
fn names_missing_memory_before_allocation() {
    let dir = model("llama_tiny", &[], 0);
    let data = dir.path().join("model/tokens.bin");
    let tokens = fs::read(&data).unwrap();
    fs::write(&data, tokens.repeat(1 << 10)).unwrap();
    // 2.6 million tokens of 131 logits are more than the 1.2 GiB that are allowed.
    refused(
        train(dir.path(), Some(1_200 << 10), "--batch-size 81000"),
        &["rank 0 needs at least ", "GiB for the widest activation of 2,592,000 tokens", "the system refuses so much"],
    );
}

#[test]
fn names_flags_that_would_fit() {
    let dir = model("llama_tiny", &["intermediate_size"], 3_000_000);
    // About 4 GB each of weights, gradients, and each of two moments.
    let parts = ["rank 0 needs at least ", "It would fit with one of: ", "--lora-rank 16 --base nf4 (", "GiB"];
    let error = train(dir.path(), Some(7 << 20), "").failed();
    assert!(parts.iter().all(|part| error.contains(part)) && !error.contains("unclipped ("), "{error}");
    // Less than the gathered parameters of one block.
    refused(train(dir.path(), Some(1_100 << 10), ""), &["Use a smaller model, --batch-size, --seq-len or --lora-rank"]);
}

#[test]
fn accepts_any_prefetch() {
    let dir = model("llama_tiny", &[], 0);
    for ahead in ["2", HUGE, "9223372036854775808"] {
        train(dir.path(), None, &format!("--prefetch {ahead}")).ok();
    }
}

#[test]
fn truncated_data_is_an_error() {
    let dir = model("llama_tiny", &[], 0);
    let (data, metrics) = (dir.path().join("model/tokens.bin"), dir.path().join("steps.jsonl"));
    let length = fs::metadata(&data).unwrap().len();
    // The first call builds the program, which can take longer than a step may.
    program("train");
    std::thread::scope(|scope| {
        let training = scope.spawn(|| train(dir.path(), None, "--steps 10000000 --metrics steps.jsonl"));
        let start = Instant::now();
        // The file exists before the data is opened, because `train` tests whether it can write it.
        while !fs::read_to_string(&metrics).is_ok_and(|text| text.contains("\"step\"")) {
            assert!(start.elapsed() < Duration::from_secs(120) && !training.is_finished(), "no step was taken");
            std::thread::sleep(Duration::from_millis(5));
        }
        File::options().write(true).open(&data).unwrap().set_len(length / 2).unwrap();
        let parts = ["cannot read tokens ", "of model/tokens.bin, which had ", "when the run began"];
        refused(training.join().unwrap(), &parts);
    });
}

#[test]
fn bench_refuses_sizes_larger_than_memory() {
    let dir = tempfile::tempdir().unwrap();
    let bench = |args: &[&str]| {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "ulimit -v 8388608; exec \"$0\" \"$@\""]).arg(program("bench")).args(args);
        command.current_dir(dir.path());
        run(command, Duration::from_secs(60))
    };
    for flag in [&["memory", "--width"][..], &["finite", "--layers"], &["finite", "--rows"], &["collectives", "--mib"]]
    {
        let run = bench(&[flag, &[HUGE]].concat());
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.failed().contains("is not in 1..="), "{flag:?}");
    }
    refused(bench(&["collectives", "--mib", "1048576"]), &["memory"]);
    refused(bench(&["memory", "--width", "65536", "--layers", "65536", "--mode", "zero3"]), &["memory"]);
}
