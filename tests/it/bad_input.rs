//! Bad input ends all ranks at once with an error that names the input and the fix. No files remain.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::{Run, copy_golden, edit_file, merge_flags, program, run, train};

/// Makes a directory with the recorded Llama in `model`.
fn prepared() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy_golden("llama_tiny", &dir.path().join("model"));
    dir
}

const DEFAULTS: &str = "--data model/tokens.bin --model model --seq-len 32 --batch-size 1";

/// Trains on two ranks. Each rank's error and the launcher's summary contain all of `parts`.
fn fails(dir: &Path, flags: &str, parts: &[&str]) {
    let flags = merge_flags(&format!("{DEFAULTS} --steps 2 --checkpoint-dir checkpoints"), flags);
    let run = train(2, &flags, dir);
    let text = run.refused(2, parts);
    let (_, summary) = text.split_once("it recorded: ").unwrap_or_else(|| panic!("{flags}: no summary:\n{text}"));
    assert!(parts.iter().all(|part| summary.contains(part)), "{flags}: {parts:?} not in the summary\n{text}");
    assert!(!dir.join("checkpoints").exists(), "{flags}: a failed run left checkpoints");
}

/// Replaces text in the header of the weights file.
fn edit_weights(model: &Path, from: &str, to: &str) {
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    assert!(header.contains(from), "{header}");
    let header = header.replace(from, to);
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + length..]].concat()).unwrap();
}

fn wider(model: &Path) {
    edit_file(&model.join("config.json"), "\"intermediate_size\": 87", "\"intermediate_size\": 88");
}

#[test]
fn names_the_input_and_the_fix() {
    type Spoil = fn(&Path);
    let unchanged: Spoil = |_| ();
    let bert: Spoil = |model| copy_golden("bert_tiny", model);
    let cases: [(&str, Spoil, &str, &[&str]); 17] = [
        (
            "missing config",
            |model| fs::remove_file(model.join("config.json")).unwrap(),
            "",
            &["model/config.json", "Hugging Face model directory"],
        ),
        (
            "unknown architecture",
            |model| edit_file(&model.join("config.json"), "\"llama\"", "\"mamba\""),
            "",
            &["\"mamba\" is not supported", "expected llama, mistral, ", ", gpt2"],
        ),
        ("missing mask token", bert, "", &["needs a mask token", "\"[MASK]\"", "--mask-token ID"]),
        ("mask token out of range", bert, "--mask-token 137", &["--mask-token 137", "137 ids, 0 to 136"]),
        (
            "mask token of a decoder",
            unchanged,
            "--mask-token 3",
            &["--mask-token", "masked language models", "leave it out"],
        ),
        ("masking of a decoder", unchanged, "--mlm-probability 0.1", &["--mlm-probability", "masked language models"]),
        (
            "missing weight",
            |model| edit_weights(model, "model.norm.weight", "model.xorm.weight"),
            "",
            &["model.norm.weight", "has no tensor", "config.json"],
        ),
        ("wrong shape", wider, "", &["proj.weight", "[88, 32]", "[87, 32]"]),
        (
            "wrong dtype",
            |model| edit_weights(model, "norm.weight\":{\"dtype\":\"F32\"", "norm.weight\":{\"dtype\":\"U32\""),
            "",
            &["norm.weight", "U32", "F32"],
        ),
        (
            "not a safetensors file",
            |model| fs::write(model.join("model.safetensors"), "not at all").unwrap(),
            "",
            &["model.safetensors", "not a valid safetensors file"],
        ),
        (
            "missing weights file",
            |model| fs::remove_file(model.join("model.safetensors")).unwrap(),
            "--init pretrained",
            &["model.safetensors", "--init random"],
        ),
        (
            "token id out of range",
            |model| {
                let mut tokens = fs::read(model.join("tokens.bin")).unwrap();
                tokens[200..202].copy_from_slice(&131u16.to_le_bytes());
                fs::write(model.join("tokens.bin"), tokens).unwrap();
            },
            "",
            &["131", "tokens.bin", "vocab"],
        ),
        (
            "data shorter than a batch",
            |model| fs::write(model.join("tokens.bin"), [1, 0, 2, 0]).unwrap(),
            "",
            &["tokens.bin", "--seq-len"],
        ),
        ("missing data", |model| fs::remove_file(model.join("tokens.bin")).unwrap(), "", &["tokens.bin"]),
        ("sequence longer than the model's", unchanged, "--seq-len 129", &["--seq-len 129", "128 positions"]),
        (
            "missing device",
            unchanged,
            "--device cuda",
            &["this build has no CUDA", "--features cuda", "choose the CPU"],
        ),
        (
            "export over existing weights",
            unchanged,
            "--export-hf model",
            &["--export-hf model", "holds weights already", "another directory"],
        ),
    ];
    for (case, spoil, flags, parts) in cases {
        println!("{case}");
        let dir = prepared();
        spoil(&dir.path().join("model"));
        fails(dir.path(), flags, parts);
    }
}

#[test]
fn refuses_unusable_checkpoints() {
    let dir = prepared();
    fs::create_dir(dir.path().join("half")).unwrap();
    fails(dir.path(), "--resume half", &["half has no checkpoint", "no checkpoint.json (did the save finish?)"]);
    train(3, &format!("{DEFAULTS} --steps 1 --checkpoint-dir other"), dir.path()).ok();
    let step = dir.path().join("other/step-00000001");
    let resume = "--resume other/step-00000001";

    // A checkpoint of another model is not damaged: `auto` does not fall back to an older one.
    wider(&dir.path().join("model"));
    let changed = ["config.json's intermediate_size: it was 87, and is 88", "--resume-anyway"];
    fails(dir.path(), &format!("--init random {resume}"), &changed);
    fails(dir.path(), &format!("--init random {resume} --resume-anyway"), &["proj.weight", "[32, 87]", "[32, 88]"]);
    fails(dir.path(), "--init random --resume auto --checkpoint-dir other", &changed);
    assert!(step.join("checkpoint.json").exists());

    // No rank of two reads a whole chunk of a file that one rank of three wrote.
    copy_golden("llama_tiny", &dir.path().join("model"));
    let file = step.join("shard-00002-model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let text = train(2, &format!("{DEFAULTS} --steps 2 --checkpoint-dir checkpoints {resume}"), dir.path()).failed();
    assert!(text.contains("shard-00002") && text.contains("is damaged"), "{text}");
}

#[test]
fn reports_obstacles_to_checkpoints_before_the_first_step() {
    let dir = prepared();
    train(2, &format!("{DEFAULTS} --steps 2 --save-every 1 --checkpoint-dir saved"), dir.path()).ok();
    let fails = |flags: &str, parts: &[&str]| {
        fails(dir.path(), &format!("--checkpoint-dir saved --metrics steps.jsonl {flags}"), parts);
        assert!(!dir.path().join("steps.jsonl").exists(), "{flags}: the run had begun");
    };
    fails("", &["saved/step-00000002 is a checkpoint of an earlier run", "--resume auto"]);
    // A run from step 1 would overwrite step 2.
    fails(
        "--resume saved/step-00000001 --steps 9 --save-every 1",
        &["saved/step-00000002 already exists", "a checkpoint of an earlier run", "another --checkpoint-dir"],
    );
    // An incomplete checkpoint at an intermediate step and at the last. (`auto` quarantines it: resume.rs.)
    let obstacle = dir.path().join("saved/step-00000006");
    fs::create_dir(&obstacle).unwrap();
    for more in ["--steps 9 --save-every 3", "--steps 6 --save-every 0"] {
        fails(
            &format!("--resume saved/step-00000002 {more}"),
            &["saved/step-00000006 already exists", "step 6", "not a complete checkpoint", "remove it"],
        );
    }
    fs::remove_dir(&obstacle).unwrap();
    fs::write(&obstacle, "").unwrap();
    fails("--resume auto --steps 6", &["saved/step-00000006 already exists", "step 6", "remove it"]);
}

#[test]
fn concurrent_runs_have_their_own_directories_and_failed_runs_leave_none() {
    let dir = prepared();
    let run = || train(2, &format!("{DEFAULTS} --steps 1"), dir.path());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| run().ok());
        }
    });
    for run in ["run-001", "run-002"] {
        assert!(dir.path().join("checkpoints").join(run).join("step-00000001/checkpoint.json").exists());
    }
    fs::remove_file(dir.path().join("model/config.json")).unwrap();
    let text = run().failed();
    // Rank 0 cannot clean up after SIGTERM.
    assert!(!dir.path().join("checkpoints/run-003").exists() || text.contains("rank 0: ended by SIGTERM"), "{text}");
}

/// Runs one rank of two without a launcher.
fn alone(rank: usize, port: u16, more: &[(&str, &str)], dir: &Path) -> Run {
    let mut command = Command::new(program("train"));
    command.args(["--steps", "1"]).current_dir(dir).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
    command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RUN_ID", format!("alone {}", std::process::id())).env_remove("RUST_LOG");
    command.envs(more.iter().copied());
    run(command, Duration::from_secs(60))
}

#[test]
fn waiting_ranks_name_the_missing_ranks() {
    let dir = tempfile::tempdir().unwrap();
    for rank in [0, 1] {
        let port = 29_540 + rank as u16;
        let stderr = alone(rank, port, &[("FSDP_TIMEOUT_S", "9")], dir.path()).failed();
        let told = format!(" s for rank(s) {} at 127.0.0.1:{port}; it gives up after 9 s", 1 - rank);
        assert_eq!(stderr.matches(&told).count(), 1, "{stderr}");
        assert!(stderr.contains("Error: can't join the other ranks: "), "{stderr}");
    }
}

#[test]
fn user_errors_have_no_backtrace() {
    let dir = prepared();
    let backtraces = ("RUST_BACKTRACE", "1");
    let errors = dir.path().join("error.json");
    let recorded = ("TORCHELASTIC_ERROR_FILE", errors.to_str().unwrap());
    let stderr = alone(0, 29_542, &[("FSDP_TIMEOUT_S", "0.1"), backtraces, recorded], dir.path()).failed();
    assert!(stderr.lines().count() == 1 && stderr.contains("did not connect"), "{stderr}");
    let error: serde_json::Value = serde_json::from_slice(&fs::read(&errors).unwrap()).unwrap();
    assert_eq!(format!("Error: {}", error["message"]["message"].as_str().unwrap()), stderr.trim_end());

    // Candle's errors contain a backtrace.
    edit_weights(&dir.path().join("model"), "model.norm.weight", "model.xorm.weight");
    for (name, args) in [("train", DEFAULTS), ("train", "--data missing"), ("fsdp-ckpt", "verify missing")] {
        let mut command = Command::new(program(name));
        command.args(args.split(' ')).current_dir(dir.path()).envs([backtraces]);
        let stderr = run(command, Duration::from_secs(60)).failed();
        let is_short = if name == "train" { stderr.contains("Error: ") } else { stderr.lines().count() == 1 };
        assert!(is_short && !stderr.contains("   0: "), "{name} {args}: {stderr}");
    }
}
