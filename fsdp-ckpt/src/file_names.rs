//! The names of a checkpoint's files.

/// The manifest's file name.
pub const MANIFEST: &str = "checkpoint.json";

/// PyTorch DCP's name for the file of a rank.
pub(crate) fn file_name(rank: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1)
}

/// The rank that a file of this name is of.
pub(crate) fn rank_of(name: &str) -> Option<usize> {
    let rank = name.strip_prefix("shard-")?.split('-').next()?.parse::<usize>().ok()?.checked_sub(1)?;
    (file_name(rank) == name).then_some(rank)
}
