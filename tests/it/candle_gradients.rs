//! The program and the table of `docs/candle-gradients.md`.

use fsdp_test_support::{code_blocks, read_text, without_layout, workspace};

const DOCUMENT: &str = "docs/candle-gradients.md";

/// The documented program.
mod mended {
    use candle_core::{DType, Device, Module, Result, Tensor};
    use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap, layer_norm, linear, loss, seq};
    use fsdp_candle::nn as candle_nn;

    include!("candle_gradients/program.rs");
}

/// The documented program without the line.
mod original {
    use candle_core::{DType, Device, Module, Result, Tensor};
    use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap, layer_norm, linear, loss, seq};

    include!("candle_gradients/program.rs");
}

#[test]
fn documented_code_is_this_code() {
    let source = format!("{}{}", include_str!("candle_gradients.rs"), include_str!("candle_gradients/program.rs"));
    let source = without_layout(&source.replace("pub(super) fn", "fn"));
    let blocks = code_blocks(DOCUMENT, "rust");
    let [block] = blocks.as_slice() else { panic!("{} blocks", blocks.len()) };
    let (imports, program) = block.split_at(block.find("fn train").unwrap());
    assert!(source.contains(&without_layout(imports)) && source.contains(&without_layout(program)), "{block}");
}

#[test]
fn one_line_trains_all_layers() {
    assert_eq!(mended::train().unwrap(), (6, 6));
    assert_eq!(original::train().unwrap(), (2, 6), "Candle's LayerNorm has a gradient now: update {DOCUMENT}");
}

#[test]
fn named_tests_and_patches_exist() {
    let text = read_text(&workspace().join(DOCUMENT));
    let rows = text.lines().filter(|line| line.starts_with("| `")).map(|row| row.split('|').map(str::trim).collect());
    let rows: Vec<Vec<&str>> = rows.collect();
    assert!(rows.len() > 10 && rows.iter().all(|row| row.len() == 7), "{rows:?}");
    let folder = workspace().join("fsdp-candle/src/nn/tests/mirror");
    let sources = std::fs::read_dir(folder).unwrap().map(|entry| read_text(&entry.unwrap().path()));
    let sources = sources.collect::<Vec<_>>().join("\n");
    for row in &rows {
        let tests: Vec<&str> = row[4].split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty(), "{row:?}");
        for test in tests {
            assert!(sources.contains(&format!("fn {test}()")), "{DOCUMENT} names {test}, which does not exist");
        }
    }
    for entry in std::fs::read_dir(workspace().join("docs/upstream")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(text.contains(&format!("(upstream/{name})")), "{DOCUMENT} does not name {name}");
    }
}
