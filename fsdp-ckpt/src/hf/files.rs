//! The names of a model's files.

/// The weights of a model in one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index of a model in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
