//! Sizes are looked at before memory is asked for: whatever a flag or a file says, it is an error that says how much
//! was wanted for what.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fsdp_test_support::{Run, golden, program, run};

const HUGE: &str = "18446744073709551615";

/// Trains by itself on the golden model in `dir/model`, with so many KiB of address space if limited.
fn train(dir: &Path, limit: Option<u64>, more: &[&str]) -> Run {
    let limit = limit.map_or_else(String::new, |kib| format!("ulimit -v {kib}; "));
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &format!("{limit}exec \"$0\" \"$@\"")]).arg(program("train")).current_dir(dir);
    command.args(["--model", "model", "--data", "model/tokens.bin", "--init", "random"]);
    for (flag, value) in [("--seq-len", "32"), ("--batch-size", "1"), ("--steps", "1")] {
        if !more.contains(&flag) {
            command.args([flag, value]);
        }
    }
    run(
        {
            command.args(more);
            command
        },
        Duration::from_secs(150),
    )
}

fn model(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("model")).unwrap();
    let own = golden(name).join("tokens.bin");
    let tokens = if own.exists() { own } else { golden("tokens.bin") };
    for (from, to) in [(golden(name).join("config.json"), "config.json"), (tokens, "tokens.bin")] {
        fs::copy(from, dir.path().join("model").join(to)).unwrap();
    }
    dir
}

fn refused(run: Run, parts: &[&str]) {
    // An abort is a signal, and has no exit code.
    assert_eq!(run.code, Some(1), "{run:?}");
    let text = run.failed();
    assert!(parts.iter().all(|part| text.contains(part)) && !text.contains("panicked"), "{parts:?} not in\n{text}");
    assert!(text.lines().filter(|line| line.starts_with("Error: ")).count() == 1, "{text}");
}

#[test]
fn a_configuration_beyond_all_memory_is_refused() {
    for (name, field, others) in [
        ("llama_tiny", "hidden_size", &["num_attention_heads"][..]),
        ("llama_tiny", "hidden_size", &[]),
        ("llama_tiny", "intermediate_size", &[]),
        ("llama_tiny", "num_hidden_layers", &[]),
        ("llama_tiny", "vocab_size", &[]),
        ("llama_tiny", "head_dim", &[]),
        ("gpt2_tiny", "n_embd", &[]),
        ("gpt2_tiny", "n_inner", &[]),
        ("gpt2_tiny", "n_layer", &[]),
        ("gpt2_tiny", "n_positions", &[]),
        ("gpt2_tiny", "vocab_size", &[]),
        ("bert_tiny", "hidden_size", &[]),
        ("bert_tiny", "intermediate_size", &[]),
        ("bert_tiny", "num_hidden_layers", &[]),
        ("bert_tiny", "max_position_embeddings", &[]),
        ("bert_tiny", "type_vocab_size", &[]),
        ("bert_tiny", "vocab_size", &[]),
    ] {
        let dir = model(name);
        let path = dir.path().join("model/config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for field in [&[field][..], others].concat() {
            config[field] = (1u64 << 62).into();
        }
        fs::write(&path, config.to_string()).unwrap();
        let more: &[&str] = if name == "bert_tiny" { &["--mask-token", "131"] } else { &[] };
        for limit in [None, Some(2 << 20)] {
            refused(train(dir.path(), limit, more), &["rank 0 needs at least ", " of memory (", " for "]);
        }
    }
}

#[test]
fn a_configuration_of_nothing_is_refused_by_name() {
    for (name, field) in
        [("llama_tiny", "intermediate_size"), ("llama_tiny", "num_attention_heads"), ("gpt2_tiny", "n_layer")]
    {
        let dir = model(name);
        let path = dir.path().join("model/config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[field] = 0.into();
        fs::write(&path, config.to_string()).unwrap();
        refused(train(dir.path(), None, &[]), &["in model/config.json", &format!("{field} = 0 must be at least 1")]);
    }
}

#[test]
fn flags_beyond_all_memory_are_refused() {
    let dir = model("llama_tiny");
    for rank in [HUGE, "4611686018427387904", "1000000000000"] {
        refused(train(dir.path(), None, &["--lora-rank", rank]), &["rank 0 needs at least ", "--lora-rank"]);
    }
    for flag in ["--batch-size", "--grad-accum"] {
        for value in [HUGE, "9223372036854775808"] {
            let parts = ["no data is large enough for one step of 1 ranks x ", value, "use a smaller --seq-len"];
            refused(train(dir.path(), None, &[flag, value]), &parts);
        }
        refused(train(dir.path(), None, &[flag, "1000000000"]), &["the data is too short", "1000000000"]);
    }
    let parts =
        ["no data is large enough for one step of 1 ranks x 1 sequences x 1 micro-batches x 18446744073709551615"];
    refused(train(dir.path(), None, &["--seq-len", HUGE]), &parts);
}

#[test]
fn memory_that_is_not_there_is_named_before_it_is_asked_for() {
    let dir = model("llama_tiny");
    let data = dir.path().join("model/tokens.bin");
    let tokens = fs::read(&data).unwrap();
    fs::write(&data, tokens.repeat(1 << 10)).unwrap();
    // 2.6 million tokens of 131 logits are more than the 1.2 GiB that are allowed.
    refused(
        train(dir.path(), Some(1_200 << 10), &["--batch-size", "81000"]),
        &["rank 0 needs at least ", "GiB for the widest activation of 2,592,000 tokens", "the system refuses so much"],
    );
}

#[test]
fn any_prefetch_is_as_many_blocks_as_there_are() {
    let dir = model("llama_tiny");
    for ahead in ["2", HUGE, "9223372036854775808"] {
        train(dir.path(), None, &["--prefetch", ahead]).ok();
    }
}

#[test]
fn data_cut_short_while_it_is_read_is_an_error() {
    let dir = model("llama_tiny");
    let (data, metrics) = (dir.path().join("model/tokens.bin"), dir.path().join("steps.jsonl"));
    let length = fs::metadata(&data).unwrap().len();
    // The first to ask builds it, which is no part of the time that a step may take.
    program("train");
    std::thread::scope(|scope| {
        let training = scope.spawn(|| train(dir.path(), None, &["--steps", "10000000", "--metrics", "steps.jsonl"]));
        let start = Instant::now();
        // Not only what is written there to see whether it can be, before the data is opened.
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
fn what_is_measured_has_a_size_too() {
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
