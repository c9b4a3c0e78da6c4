//! The corpus of the fuzz targets: what has gone wrong once, or well could.

use std::path::Path;

use super::{fixture, hostile};

/// All inputs of a target.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let inputs: Vec<_> = files.map(|path| std::fs::read(path).unwrap()).collect();
    assert!(inputs.len() >= 5, "{target}");
    inputs
}

#[test]
fn pickles() {
    let read = corpus("pickle").iter().filter(|bytes| hostile::pickle(bytes).is_ok()).count();
    assert!(read >= 1);
}

#[test]
fn metadata() {
    let files = fixture("dcp");
    let read = corpus("dcp_metadata").iter().filter(|bytes| hostile::dcp_metadata(bytes, &files).is_ok()).count();
    assert!(read >= 1);
}
