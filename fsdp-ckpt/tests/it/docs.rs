//! Runs the commands in docs/checkpoints.md in order.

use assert_cmd::Command;

use crate::cli::{succeeds, text};
use crate::world::{line, save_all, zoo};

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

    let page = include_str!("../../../docs/checkpoints.md");
    let mut count = 0;
    for block in page.split("```sh\n").skip(1) {
        for command in block.split("```").next().unwrap().lines() {
            let mut words = command.split_whitespace();
            assert_eq!(words.next(), Some("fsdp-ckpt"), "{command}");
            let output =
                Command::cargo_bin("fsdp-ckpt").unwrap().args(words).current_dir(root.path()).output().unwrap();
            assert!(output.status.success(), "{command}: {output:?}");
            count += 1;
        }
    }
    assert!(count >= 15);
    for name in ["files.svg", "llama-hf/config.json", "whole/model.safetensors", "for-pytorch/.metadata"] {
        assert!(at(name).is_file(), "{name}");
    }
}
