//! The commands and examples of docs/fine-tuning.md.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fsdp_test_support::hub::Hub;
use fsdp_test_support::{code_blocks, copy_golden, program, run, train, workspace};

use crate::sft;

/// Returns pairs of completions for `--dpo`.
fn preferences() -> String {
    let pair = |i| format!(r#"{{"prompt": "{i} + 1 = ", "chosen": "{}", "rejected": "nothing"}}"#, i + 1);
    (0..20).map(pair).collect::<Vec<_>>().join("\n")
}

#[test]
fn documented_commands_run() {
    let document = fs::read_to_string(workspace().join("docs/fine-tuning.md")).unwrap().replace("\\\n", "");
    let blocks = document.split("```").skip(1).step_by(2);
    let blocks: Vec<&str> = blocks.filter_map(|block| block.strip_prefix("sh\n")).collect();
    assert!(blocks.len() > 3);
    for block in blocks {
        let dir = tempfile::tempdir().unwrap();
        sft::prepare(dir.path());
        fs::rename(dir.path().join("model"), dir.path().join("DIR")).unwrap();
        fs::write(dir.path().join("preferences.jsonl"), preferences()).unwrap();
        write_texts(dir.path());
        let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
        let hub = Hub::start([
            ("org/name/config.json", read("DIR/config.json")),
            ("datasets/org/chats/data/train.jsonl", read("chats.jsonl")),
        ]);
        for line in block.lines() {
            let mut words = line.split_whitespace();
            assert_eq!(words.next(), Some("fsdp-launch"));
            let mut command = Command::new(program("fsdp-launch"));
            let named =
                |word: &str| if word == "train" { program(word).into() } else { word.trim_matches('\'').into() };
            command.args(words.map(named).collect::<Vec<std::ffi::OsString>>()).current_dir(dir.path());
            command.env("HF_ENDPOINT", hub.endpoint()).env("HF_HOME", dir.path().join("home"));
            let stdout = run(command, Duration::from_secs(240)).ok().stdout;
            assert!(stdout.contains("sample before training: ") && stdout.contains(" sample: \""), "{line}: {stdout}");
        }
    }
}

/// Writes the data of --task classify and --task embed.
fn write_texts(dir: &Path) {
    let rows = (0..40).map(|i| format!("{i} is {0},{0}\n", if i % 2 == 0 { "even" } else { "odd" }));
    let labelled = format!("text,label\n{}", rows.collect::<String>());
    for name in ["reviews.csv", "others.csv"] {
        fs::write(dir.join(name), &labelled).unwrap();
    }
    let pairs = (0..40).map(|i| format!("{{\"anchor\": \"{i} + 1?\", \"positive\": \"It is {}.\"}}\n", i + 1));
    fs::write(dir.join("pairs.jsonl"), pairs.collect::<String>()).unwrap();
}

#[test]
fn documented_examples_are_read() {
    let blocks = code_blocks("docs/fine-tuning.md", "json");
    let dir = tempfile::tempdir().unwrap();
    copy_golden("llama3_tiny", &dir.path().join("model"));
    for (file, block) in ["chats.jsonl", "preferences.jsonl"].into_iter().zip(&blocks) {
        fs::write(dir.path().join(file), block).unwrap();
    }
    assert_eq!(blocks.len(), 2);
    train(2, "--sft chats.jsonl --packing off --batch-size 1 --steps 1 --seq-len 64", dir.path()).ok();
    train(1, "--model model --dpo preferences.jsonl --batch-size 3 --steps 1 --seq-len 64", dir.path()).ok();
}
