//! The corpora of the fuzz targets: earlier failures and other hostile inputs.

use std::path::Path;

use crate::hostile;
use crate::torch::{fixture, hostile as torch};

/// Returns all inputs of a target by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let inputs: Vec<_> =
        files.map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap())).collect();
    assert!(inputs.len() >= 5, "{target}");
    inputs
}

#[test]
fn reads_only_good_manifests() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("checkpoint");
    hostile::files(&dir);
    for (name, bytes) in corpus("manifest") {
        let read = hostile::manifest(&bytes, &dir);
        assert_eq!(read.is_ok(), name.starts_with("good"), "{name}: {read:?}");
    }
}

#[test]
fn reads_only_good_safetensors() {
    let root = tempfile::tempdir().unwrap();
    for (name, bytes) in corpus("safetensors") {
        let read = hostile::safetensors(&bytes, root.path());
        assert_eq!(read.is_ok(), name.starts_with("good"), "{name}: {read:?}");
    }
}

/// Some inputs of each target of PyTorch's files are valid; none panics.
#[test]
fn reads_untrusted_pickles_and_metadata() {
    type Target<'a> = (&'a str, &'a dyn Fn(&[u8]) -> bool);
    let files = fixture("dcp");
    let targets: [Target; 2] = [
        ("pickle", &|bytes| torch::pickle(bytes).is_ok()),
        ("dcp_metadata", &|bytes| torch::dcp_metadata(bytes, &files).is_ok()),
    ];
    for (target, is_read) in targets {
        assert!(corpus(target).iter().any(|(_, bytes)| is_read(bytes)), "{target}");
    }
}
