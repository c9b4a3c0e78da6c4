//! PyTorch's files: state dicts of `torch.save`, and checkpoints of `torch.distributed.checkpoint` (DCP) in its classic
//! format.
//!
//! [`TorchFile`] reads `.pt`, `.pth` and `.bin` files and Hugging Face directories with `pytorch_model.bin`;
//! [`TorchDcp`] reads a DCP directory, and [`write_dcp`] writes one. Pickles are read by a machine that builds data:
//! the names of classes in them come from a list, and nothing is ever called.

mod archive;
mod dcp;
mod error;
mod file;
mod metadata;
mod pickle;
mod strided;
mod tensor;
mod walk;
mod write;

pub(crate) use dcp::METADATA;
pub use dcp::TorchDcp;
pub use file::TorchFile;
pub(crate) use file::{BIN, BIN_INDEX};
pub use write::{DcpOptions, write_dcp};
