//! `bench plan` against measured memory, and docs/planning.md against `bench plan`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, launch, program, read_text, run, workspace};
use serde_json::Value;

const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 512, "n_head": 8, "n_layer": 6, "n_positions": 256,
    "vocab_size": 8192}"#;
const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 256}"#;
const MIXTRAL: &str = r#"{"model_type": "mixtral", "hidden_size": 384, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 8192,
    "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2}"#;

fn plan(words: &[&str], dir: &Path) -> Run {
    let mut command = Command::new(program("bench"));
    command.arg("plan").args(words).current_dir(dir);
    run(command, Duration::from_secs(60))
}

fn json(run: Run) -> Value {
    let stdout = run.ok().stdout;
    let line = stdout.lines().find(|line| line.contains('{')).unwrap();
    serde_json::from_str(&line[line.find('{').unwrap()..]).unwrap()
}

/// docs/planning.md promises state within 2 %. It promises the peak within 5 % on one rank. On several, at most 10 % are
/// missing and at most 15 % too much.
#[test]
fn memory_matches_the_allocator() {
    let half = ["--param-dtype", "bf16"];
    let tensor = ["--tensor-parallel", "2"];
    let sequence = ["--tensor-parallel", "2", "--sequence-parallel"];
    for (config, ranks, batch, flags) in [
        (GPT2, 1, "1", &[][..]),
        (GPT2, 2, "4", &[]),
        (LLAMA, 1, "4", &[]),
        (LLAMA, 2, "1", &[]),
        (LLAMA, 4, "2", &[]),
        (LLAMA, 1, "2", &half),
        (LLAMA, 2, "2", &half),
        (LLAMA, 2, "8", &half),
        (GPT2, 4, "2", &half),
        (LLAMA, 2, "8", &tensor),
        (LLAMA, 2, "8", &sequence),
        (LLAMA, 4, "2", &tensor),
        (MIXTRAL, 2, "4", &[]),
        (MIXTRAL, 2, "4", &["--expert-parallel", "2"]),
        (MIXTRAL, 4, "2", &["--expert-parallel", "4"]),
        (MIXTRAL, 4, "2", &["--expert-parallel", "2"]),
        (MIXTRAL, 2, "8", &tensor),
        (MIXTRAL, 2, "8", &sequence),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let common = [&["--model", ".", "--batch", batch, "--seq", "256", "--json"], flags].concat();
        let real = json(launch(ranks, "bench", &[&["step", "--steps", "1"], &common[..]].concat(), dir.path()));
        let ranks_word = ranks.to_string();
        let cpu = ["--device", "cpu", "--flops", "0.05", "--ranks-per-host", &ranks_word];
        let planned = json(plan(&[&cpu[..], &common].concat(), dir.path()));
        let real = |name: &str| real["allocated"][name].as_f64().unwrap();
        let state = |name: &str| planned["memory"]["state"][name].as_f64().unwrap();
        let (parameters, gradients, optimizer) = (state("parameters"), state("gradients"), state("optimizer"));
        // Rotary tables and names, and with them the batch.
        let (tables, besides) = (0.15e6, 2e6);
        // The pool keeps fewer buffers if reductions end early.
        let of_peak = if ranks == 1 { -0.05..=0.05 } else { -0.1..=0.15 };
        let of_state = || -0.02..=0.02;
        for (name, planned, real, bounds) in [
            ("parameters", parameters, real("parameters") - tables, of_state()),
            ("optimizer", optimizer, real("optimizer"), of_state()),
            ("all state", parameters + gradients + optimizer, real("between_steps") - besides, of_state()),
            ("peak", planned["memory"]["total"].as_f64().unwrap(), real("peak"), of_peak),
        ] {
            let error = planned / real - 1.;
            assert!(
                bounds.contains(&error),
                "{name} of {ranks} ranks, {config}, {flags:?}: {planned}, not {real}: {error}"
            );
            println!("{name} of {ranks} ranks, {flags:?}: {:+.1} %", 100. * error);
        }
    }
}

/// docs/planning.md promises the peak within 10 %.
#[test]
fn memory_of_recomputed_blocks_matches_the_allocator() {
    let dir = tempfile::tempdir().unwrap();
    let mut config: Value = serde_json::from_str(LLAMA).unwrap();
    for (name, value) in [("num_hidden_layers", 12), ("hidden_size", 192), ("intermediate_size", 512)] {
        config[name] = value.into();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let peaks = |ranks: usize, is_offloaded: bool| {
        let common = ["--model", ".", "--batch", "16", "--seq", "256", "--json"];
        let offload: &[&str] = if is_offloaded { &["--activation-offload", "disk:."] } else { &[] };
        let step = [&["step", "--steps", "1", "--activation-checkpoint"], offload, &common].concat();
        let real = json(launch(ranks, "bench", &step, dir.path()))["allocated"]["peak"].as_f64().unwrap();
        let ranks_word = ranks.to_string();
        let cpu = ["--device", "cpu", "--flops", "0.05", "--ranks-per-host", &ranks_word];
        let checkpoint = ["--activation-checkpoint", "full", "--activation-offload"];
        let checkpoint = &checkpoint[..if is_offloaded { 3 } else { 2 }];
        let planned = json(plan(&[&cpu[..], checkpoint, &common].concat(), dir.path()));
        let planned = planned["memory"]["total"].as_f64().unwrap();
        let error = planned / real - 1.;
        println!("peak of {ranks} ranks, offloaded {is_offloaded}: {:+.1} %", 100. * error);
        assert!(error.abs() <= 0.1, "{ranks} ranks, offloaded {is_offloaded}: {planned}, not {real}: {error}");
        real
    };
    for ranks in [1, 2] {
        // 12 inputs of 4096 tokens, of which few are underway. The peak is at the first input instead of the last, where
        // the other blocks have gradients.
        let less = peaks(ranks, false) - peaks(ranks, true);
        let (inputs, gradients) = (9. * 4096. * 192. * 4., 11. * 4e5 * 4. / ranks as f64);
        assert!(less > 0.8 * (inputs - gradients), "{less} bytes less on {ranks} ranks");
    }
}

/// docs/planning.md promises the peak within 10 %. Adapters are not planned, and have rank 1 here.
#[test]
fn memory_of_a_frozen_base_matches_the_allocator() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), LLAMA).unwrap();
    for (ranks, base) in [(1, "f32"), (2, "int8"), (2, "nf4")] {
        let common = ["--model", ".", "--batch", "2", "--seq", "256", "--json", "--base", base];
        let step = [&["step", "--steps", "1", "--lora-rank", "1"], &common[..]].concat();
        let real = json(launch(ranks, "bench", &step, dir.path()));
        let ranks_word = ranks.to_string();
        let cpu = ["--device", "cpu", "--flops", "0.05", "--ranks-per-host", &ranks_word];
        let planned = json(plan(&[&cpu[..], &common].concat(), dir.path()));
        let real = |name: &str| real["allocated"][name].as_f64().unwrap();
        let parameters = planned["memory"]["state"]["parameters"].as_f64().unwrap();
        // Adapters, rotary tables and names.
        let more = real("parameters") - parameters;
        assert!((0. ..=0.6e6).contains(&more), "{base} on {ranks}: {more} bytes more than {parameters}");
        let error = planned["memory"]["total"].as_f64().unwrap() / real("peak") - 1.;
        println!("peak of {ranks} ranks, {base}: {:+.1} %", 100. * error);
        assert!(error.abs() <= 0.1, "{base} on {ranks}: {error}");
    }
}

/// Returns the commands of the document, with their output if the document shows it.
fn commands() -> Vec<(String, Option<String>)> {
    let document = read_text(&workspace().join("docs/planning.md"));
    let mut found: Vec<(String, Option<String>)> = vec![];
    for block in document.split("```").skip(1).step_by(2) {
        if let Some(lines) = block.strip_prefix("sh\n") {
            found.extend(lines.replace("\\\n", "").lines().map(|line| (line.to_owned(), None)));
        } else if let Some(output) = block.strip_prefix("text\n") {
            found.last_mut().unwrap().1 = Some(output.to_owned());
        }
    }
    found
}

#[test]
fn documented_commands_print_the_documented_output() {
    let commands = commands();
    assert!(commands.len() >= 4 && commands.iter().any(|(_, output)| output.is_some()));
    for (line, output) in commands {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[..2], ["bench", "plan"], "{line}");
        let printed = plan(&words[2..], workspace()).ok().stdout;
        assert!(printed.contains("Memory of a rank, GiB") || printed.contains("\"memory\""), "{line}: {printed}");
        if let Some(output) = output {
            assert_eq!(printed, output, "{line}");
        }
    }
}

/// The table of docs/expert-parallel.md: ranks, peak, gathered weights, bytes that a rank sends, launches.
#[test]
fn documented_sizes_of_a_mixture_are_planned() {
    let document = read_text(&workspace().join("docs/expert-parallel.md"));
    let command = document.lines().find(|line| line.starts_with("bench plan ")).unwrap();
    let (command, _) = command.strip_prefix("bench plan ").unwrap().split_once(" --expert-parallel ").unwrap();
    let rows = document.lines().filter(|line| line.contains(" GiB | "));
    let mut count = 0;
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let number = |cell: &str| cell.trim_end_matches(" GiB").replace(',', "").parse::<f64>().unwrap();
        let words = format!("{command} --expert-parallel {} --json", cells[1]);
        let planned = json(plan(&words.split_whitespace().collect::<Vec<_>>(), workspace()));
        let gib = |bytes: &Value| bytes.as_f64().unwrap() / f64::from(1 << 30);
        let memory = &planned["memory"];
        for (cell, planned, rounding) in [
            (cells[2], gib(&memory["total"]), 0.05),
            (cells[3], gib(&memory["peak"]["gathered"]), 0.005),
            (cells[4], gib(&planned["time"]["sent"]), 0.5),
            (cells[5], planned["time"]["launches"].as_f64().unwrap(), 500.),
        ] {
            assert!((number(cell) - planned).abs() <= rounding, "{row}: {planned}, not {cell}");
        }
        count += 1;
    }
    assert_eq!(count, 4);
}

#[test]
fn plans_or_refuses_any_size() {
    let dir = tempfile::tempdir().unwrap();
    for field in ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"] {
        let mut config: Value = serde_json::from_str(LLAMA).unwrap();
        config[field] = (1u64 << 62).into();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let run = plan(&["--model", ".", "--device", "h100-sxm"], dir.path());
        let words = format!("{}{}", run.stdout, run.stderr);
        assert!(!words.contains("panicked"), "{field}: {words}");
        match run.code {
            Some(0) => assert!(words.contains("It does NOT fit"), "{field}: {words}"),
            Some(1) => assert!(words.contains("Error: "), "{field}: {words}"),
            code => panic!("{field}: {code:?}: {words}"),
        }
    }
}
