//! Hugging Face model directories: a `config.json` and weights in safetensors files.
//!
//! [`HfModel`] reads a directory or a single file. [`Renamed`] gives tensors other names, and [`unfused`] the names of
//! single experts. [`SplitExperts`] are those of gpt-oss, and [`JoinedExperts`] the reverse. [`ConfiguredTokens`] are the tokens in a tokenizer's configuration. [`write()`] writes the tensors of
//! any source, one block at a time. [`export`] writes one file from the shards of all ranks at once, without gathering
//! them.

mod experts;
mod export;
mod gpt_oss;
mod model;
mod mxfp4;
mod renamed;
mod shard;
mod tied;
mod tokens;
mod weight_map;
mod write;

pub use experts::{ExpertNames, unfused};
pub use export::{ExportOptions, check_export, export, export_file, export_with};
pub use gpt_oss::{JoinedExperts, SplitExperts, has_split_experts};
pub use model::HfModel;
pub use renamed::{Part, Renamed};
pub(crate) use shard::Shard;
pub use tied::same_values;
pub use tokens::{AddedToken, ConfiguredTokens, missing_tokenizer};
pub(crate) use weight_map::WeightMap;
pub use write::{config_files, write, write_with};

/// File name of a model's weights in one file.
pub(crate) const SINGLE: &str = "model.safetensors";
/// File name of the index of a model in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
