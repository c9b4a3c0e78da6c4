//! Any bytes as the `.metadata` of a DCP checkpoint.
#![no_main]

use std::path::Path;

#[path = "../../fsdp-ckpt/tests/it/torch/hostile.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let files = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fsdp-ckpt/tests/it/torch/fixtures/dcp"));
    let _ = hostile::dcp_metadata(bytes, files);
});
