//! Any bytes as the `checkpoint.json` of a checkpoint.
#![no_main]

use std::sync::LazyLock;

#[path = "../../fsdp-ckpt/tests/it/hostile.rs"]
#[allow(dead_code)]
mod hostile;

static ROOT: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let root = tempfile::tempdir().unwrap();
    hostile::files(&root.path().join("checkpoint"));
    root
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = hostile::manifest(bytes, &ROOT.path().join("checkpoint"));
});
