//! Candle's words for a parameter whose values are not there.

/// Whether Candle says that it met a sharded parameter, and nobody has explained it yet.
pub(crate) fn is_freed_storage_error(error: &candle_core::Error) -> bool {
    let text = error.to_string();
    let names_it = text.split(|c: char| !c.is_alphanumeric()).any(|word| word == "F4");
    // Fused norms name the dtype of their input, which they serve, and not the weight's.
    let norm = ["F32", "F16", "BF16"].map(|dtype| format!("unsupported dtype for rmsnorm {dtype}"));
    let norm = norm.iter().any(|words| text.contains(words));
    (names_it || norm) && !text.contains("FSDP unit")
}
