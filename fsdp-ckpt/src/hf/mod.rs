//! Hugging Face model directories: a `config.json` and weights in safetensors files.

mod export;
mod files;
mod model;
pub(crate) mod sharding;
mod write;

pub use export::{ExportOptions, export, export_with};
pub(crate) use files::INDEX;
pub use model::HfModel;
pub use write::{config_files, write};
