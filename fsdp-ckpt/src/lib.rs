//! Sharded checkpoints in safetensors files.
//!
//! [`save`] writes a checkpoint from the shards of every rank of a process group; [`Checkpoint`] reads any box of any
//! tensor from it, whatever mesh wrote it and whatever mesh reads it; [`latest`] finds the one to go on from,
//! [`set_aside`] moves a damaged one away, [`keep_newest`] removes older ones. [`AsyncSaver`] saves while training goes
//! on; [`HostDirs`] is for hosts without a shared directory; [`Stateful`] is for what is no tensor. [`hf`] reads and
//! writes Hugging Face model directories, [`torch`] PyTorch's files.
//!
//! # On disk
//!
//! A checkpoint is a directory:
//!
//! ```text
//! step-00000010/
//!   checkpoint.json                                   the manifest
//!   shard-00001-model-00001-of-00001.safetensors      what rank 0 wrote
//!   shard-00002-model-00001-of-00001.safetensors      what rank 1 wrote
//! ```
//!
//! The files are laid out as PyTorch's `HuggingFaceStorageWriter` does, so that its `HuggingFaceStorageReader` reads
//! them: a file holds one chunk of a tensor at most, under the tensor's name, and `DCP_SHARDING_INFO` in its
//! `__metadata__` says where each chunk starts. The manifest holds the format version, the mesh, each tensor's dtype,
//! shape and chunks with their checksums (CRC-32C), those of the files' headers, and the non-tensor state. It ends with
//! a checksum of itself, so that every byte of a checkpoint is under one.
//!
//! The manifest is written last, when every file is on disk, and the directory then gets its name by an atomic rename:
//! a reader never sees half a checkpoint. A directory without a manifest is none.

#[cfg(not(target_endian = "little"))]
compile_error!("safetensors files are little-endian, and this crate copies memory to them as it is");

mod aside;
mod async_save;
mod blocks;
mod cast;
mod checkpoint;
mod checksum;
mod chunked;
pub mod convert;
mod diff;
mod error;
mod exchange;
mod file_names;
mod finite;
pub mod hf;
mod host_dirs;
mod hosts;
mod latest;
mod load;
mod manifest;
mod names;
mod open;
mod plan;
mod region;
mod retention;
mod safetensors;
mod save;
mod scattered;
mod seal;
mod shown;
mod source;
mod staged;
mod stateful;
mod store;
mod tensor;
pub mod torch;
mod writable;
mod written;

pub use aside::{name_before_aside, set_aside};
pub use async_save::{AsyncSaver, WhenBusy};
pub use blocks::blocks;
pub use checkpoint::Checkpoint;
pub use diff::{Diff, TensorDiff, Tolerance, ValueDiff, diff};
pub use error::{Error, Result};
pub use file_names::MANIFEST;
pub use finite::{NonFinite, count_non_finite, non_finite};
pub use host_dirs::HostDirs;
pub use latest::{Survey, latest, other_name_of, survey};
pub use load::{LoadOptions, LoadReport, LoadTensor, Strict, load, read_as};
pub use manifest::{ChunkEntry, FileEntry, TensorEntry};
pub use names::{MODEL, Names};
pub use open::open;
pub use retention::keep_newest;
pub use safetensors::SafetensorsFile;
pub use save::{SaveOptions, SaveState, SaveSummary, save, save_with};
pub use shown::{Shown, shown};
pub use source::{Checksums, Format, TensorSource, Verified, stream};
pub use stateful::{Stateful, collect_state, restore_state};
pub use tensor::{TensorInfo, TensorShard};
pub use writable::check_writable;
