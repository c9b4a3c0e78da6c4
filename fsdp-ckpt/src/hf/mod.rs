//! Hugging Face model directories: a `config.json` and weights in safetensors files.
//!
//! [`HfModel`] reads a directory or a single file. [`write()`] writes the tensors of any source, one block at a time.
//! [`export`] writes one file from the shards of all ranks at once, without gathering them.

mod export;
mod model;
mod weight_map;
mod write;

pub use export::{ExportOptions, check_export, export, export_with};
pub use model::HfModel;
pub(crate) use weight_map::WeightMap;
pub use write::{config_files, write};

/// File name of a model's weights in one file.
const SINGLE: &str = "model.safetensors";
/// File name of the index of a model in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
