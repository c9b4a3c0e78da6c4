//! The names of a checkpoint's files.

/// The manifest's file name.
pub const MANIFEST: &str = "checkpoint.json";

/// PyTorch DCP's name for the file of a rank.
pub(crate) fn file_name(rank: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1)
}
