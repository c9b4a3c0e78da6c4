//! Every Rust block of docs/tutorial.md is code of fsdp-candle/tests/it/tutorial, which runs it.

use fsdp_test_support::{code_blocks, read_text, without_layout, workspace};

#[test]
fn documented_code_runs_in_tests() {
    let sources = std::fs::read_dir(workspace().join("fsdp-candle/tests/it/tutorial")).unwrap();
    let sources: Vec<String> = sources.map(|entry| without_layout(&read_text(&entry.unwrap().path()))).collect();
    let blocks = code_blocks("docs/tutorial.md", "rust");
    assert!(blocks.len() > 15, "{}", blocks.len());
    for block in blocks {
        let code = without_layout(&block);
        assert!(sources.iter().any(|source| source.contains(&code)), "no test runs this block:\n{block}");
    }
}
