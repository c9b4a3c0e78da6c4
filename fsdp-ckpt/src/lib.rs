//! Saves, loads and converts sharded checkpoints.
//!
//! | to | use |
//! |---|---|
//! | save from the ranks of a process group | [`save`], [`AsyncSaver`] |
//! | save where hosts share no directory | [`HostDirs`] |
//! | read any format | [`open`], [`load`], [`TensorSource`] |
//! | manage the checkpoints of a run | [`latest`], [`survey`], [`quarantine`], [`keep_newest`] |
//! | read and write Hugging Face models | [`hf`] |
//! | read and write PyTorch's files | [`torch`] |
//! | write a source in another format | [`convert`] |
//! | merge adapters (LoRA) into a model | [`merge`] |
//! | write a GGUF file for llama.cpp | `gguf`, with the feature `gguf` |
//!
//! # On disk
//!
//! A checkpoint is a directory:
//!
//! ```text
//! step-00000010/
//!   checkpoint.json                                   the manifest
//!   shard-00001-model-00001-of-00001.safetensors      written by rank 0
//!   shard-00002-model-00001-of-00001.safetensors      written by rank 1
//! ```
//!
//! The files have the layout of PyTorch's `HuggingFaceStorageWriter`, so `HuggingFaceStorageReader` reads them. Each
//! file holds at most one chunk of a tensor, under the tensor's name. `DCP_SHARDING_INFO` in the file's `__metadata__`
//! holds the offsets of the chunks.
//!
//! The manifest lists the mesh, the tensors with their chunks and checksums (CRC-32C), the files with the checksums of
//! their headers, and the non-tensor state. It ends with its own checksum, so every byte has a checksum.
//!
//! The manifest is written last. An atomic rename then gives the directory its name, so a reader never sees an
//! unfinished checkpoint.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_endian = "little"))]
compile_error!("safetensors files are little-endian, and this crate copies memory to them unchanged");

mod cast;
mod checkpoint;
mod checksum;
pub mod convert;
mod diff;
mod error;
mod escape;
mod file_names;
mod finite;
#[cfg(feature = "gguf")]
pub mod gguf;
pub mod hf;
mod load;
pub mod merge;
mod model_prefix;
mod open;
mod placeholder;
mod region;
mod safetensors;
mod source;
mod store;
mod text_file;
pub mod torch;
mod training_state;
mod weights;

pub use checkpoint::Checkpoint;
pub use checkpoint::async_save::{AsyncSaver, WhenBusy};
pub use checkpoint::host_dirs::HostDirs;
pub use checkpoint::plan::TensorShard;
pub use checkpoint::run_dir::{Survey, alias_target, keep_newest, latest, name_before_quarantine, quarantine, survey};
pub use checkpoint::save::{SaveOptions, SaveState, SaveSummary, save, save_with};
pub use checkpoint::writable::{RemoveIfEmpty, check_writable};
pub use diff::{Diff, TensorDiff, Tolerance, ValueDiff, diff};
pub use error::{Error, ModelPart, Result};
pub use escape::{Escaped, escape};
pub use file_names::MANIFEST;
pub use finite::{NonFinite, count_non_finite, non_finite};
pub use load::{LoadOptions, LoadReport, LoadTensor, Strict, load, read_as};
pub use model_prefix::{MODEL, ModelPrefix};
pub use open::{open, open_for};
pub use placeholder::Placeholder;
pub use safetensors::{SafetensorsFile, TensorInfo};
pub use source::{
    Checksums, ChunkEntry, FileEntry, Format, SourceIndex, TensorEntry, TensorSource, Verified, WriteSummary, stream,
};
pub use training_state::{ROOT, TrainingState};
pub use weights::{find_weights, open_weights};

/// Runs the program in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
