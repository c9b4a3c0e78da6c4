//! Runs the commands in docs/checkpoints.md and docs/serving.md in order.

use std::path::Path;

use assert_cmd::Command;

use crate::cli::{succeeds, text};
use crate::gguf::{SMALL, llama, llama_adapters};
use crate::world::{line, save_all, zoo};

/// Runs the commands of a page in a directory, and returns their number.
fn run_all(page: &str, dir: &Path) -> usize {
    let mut count = 0;
    for block in page.split("```sh\n").skip(1) {
        for command in block.split("```").next().unwrap().lines() {
            let mut words = command.split_whitespace();
            assert_eq!(words.next(), Some("fsdp-ckpt"), "{command}");
            let output = Command::cargo_bin("fsdp-ckpt").unwrap().args(words).current_dir(dir).output().unwrap();
            assert!(output.status.success(), "{command}: {output:?}");
            count += 1;
        }
    }
    count
}

#[test]
fn commands_about_serving_run() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    llama(&at("model"), SMALL);
    llama_adapters(&at("adapters"));
    succeeds(&["convert", text(&at("model")), text(&at("runs/llama/step-00000010")), "--to", "fsdp"]);
    assert_eq!(run_all(include_str!("../../../docs/serving.md"), root.path()), 5);
    // Both have other weights than the model.
    let [plain, merged] = ["model-q8_0.gguf", "merged-q8_0.gguf"].map(|name| std::fs::read(at(name)).unwrap());
    assert!(plain.len().abs_diff(merged.len()) < 64 && plain != merged);
}

#[test]
fn commands_in_the_docs_run() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let mut globals = zoo();
    // Finite numbers in every floating point dtype.
    globals.iter_mut().for_each(|global| global.bytes.fill(0x3c));
    for step in ["step-00000010", "step-00000020"] {
        save_all(&at("runs/llama").join(step), &globals, &line(2));
    }
    let source = at("runs/llama/step-00000010");
    succeeds(&["convert", text(&source), text(&at("pytorch-run/step-10")), "--to", "torch-dcp"]);
    succeeds(&["convert", text(&source), text(&at("base-model")), "--to", "hf"]);
    std::fs::write(at("base-model/config.json"), "{}").unwrap();

    assert!(run_all(include_str!("../../../docs/checkpoints.md"), root.path()) >= 15);
    for name in ["files.svg", "llama-hf/config.json", "whole/model.safetensors", "for-pytorch/.metadata"] {
        assert!(at(name).is_file(), "{name}");
    }
}
