//! PyTorch's files: state dicts of `torch.save`, and checkpoints of `torch.distributed.checkpoint` (DCP) in the classic
//! format.
//!
//! [`TorchFile`] reads `.pt`, `.pth` and `.bin` files and Hugging Face directories with `pytorch_model.bin`.
//! [`TorchDcp`] reads a DCP directory. [`write_dcp`] writes one.
//!
//! A file of `torch.save` and an item of a DCP file are zip archives (`archive`) with a pickle (`pickle`) and the bytes
//! of storages. `pickle` builds values and never calls anything; only listed names are allowed. `tensor` finds a
//! tensor's elements in its storage. `flatten` turns nested dicts into dotted names. `pickler`, `archive_layout` and
//! `dcp_writer` are the writing side.

mod archive;
mod archive_layout;
mod dcp;
mod dcp_metadata;
mod dcp_writer;
mod file;
mod flatten;
mod pickle;
mod pickler;
mod tensor;

use std::path::Path;

use crate::Error;

pub(crate) use dcp::METADATA;
pub use dcp::TorchDcp;
pub use dcp_writer::{DcpOptions, write_dcp};
pub use file::TorchFile;
pub(crate) use file::{BIN, BIN_INDEX, LEGACY};

/// Returns the error for a file of PyTorch, or for one item in it.
fn not_torch(path: &Path, item: Option<&str>, reason: String) -> Error {
    Error::Malformed { path: path.to_path_buf(), item: item.map(str::to_string), reason }
}
