//! Hugging Face model directories: a `config.json` and weights in safetensors files.

mod export;
mod model;
pub(crate) mod sharding;
mod write;

pub use export::{ExportOptions, export, export_with};
pub use model::HfModel;
pub use write::{config_files, write};

/// The weights of a model in one file.
const SINGLE: &str = "model.safetensors";
/// The index of a model in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
