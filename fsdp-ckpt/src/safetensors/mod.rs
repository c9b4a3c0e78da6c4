//! Single safetensors files: reading any box of a tensor by byte ranges, and writing tensors one after another.
//!
//! A header is trusted in nothing: not in its length, not in where it says that tensors lie.

mod header;
mod read;
mod write;

pub(crate) use header::{Entry, Layout};
pub use read::SafetensorsFile;
pub(crate) use write::{WrittenFile, read_bytes, write_file};
