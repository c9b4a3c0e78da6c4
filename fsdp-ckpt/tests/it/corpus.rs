//! The corpus of the fuzz targets `manifest` and `safetensors`: what has gone wrong once, or well could.

use std::path::Path;

use crate::hostile;

/// All inputs of a target, by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let inputs: Vec<_> =
        files.map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap())).collect();
    assert!(inputs.len() >= 8, "{target}");
    inputs
}

#[test]
fn only_the_good_manifest_is_read() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("checkpoint");
    hostile::files(&dir);
    for (name, bytes) in corpus("manifest") {
        let read = hostile::manifest(&bytes, &dir);
        assert_eq!(read.is_ok(), name.starts_with("good"), "{name}: {read:?}");
    }
}

#[test]
fn only_good_files_are_read() {
    let root = tempfile::tempdir().unwrap();
    for (name, bytes) in corpus("safetensors") {
        let read = hostile::safetensors(&bytes, root.path());
        assert_eq!(read.is_ok(), name.starts_with("good"), "{name}: {read:?}");
    }
}
