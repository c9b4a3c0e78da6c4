//! Hugging Face model directories: a `config.json` and weights in safetensors files.

mod export;
mod model;
pub(crate) mod sharding;

pub use export::export;
pub use model::HfModel;

/// The weights of a model in one file.
const SINGLE: &str = "model.safetensors";
/// The index of a model in several files.
const INDEX: &str = "model.safetensors.index.json";
