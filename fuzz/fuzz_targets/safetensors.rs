//! Any bytes as a safetensors file.
#![no_main]

use std::sync::LazyLock;

#[path = "../../fsdp-ckpt/tests/it/hostile.rs"]
#[allow(dead_code)]
mod hostile;

static ROOT: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().unwrap());

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = hostile::safetensors(bytes, ROOT.path());
});
