//! Any bytes as the pickle of a file of `torch.save`.
#![no_main]

#[path = "../../fsdp-ckpt/tests/it/torch/hostile.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = hostile::pickle(bytes);
});
