//! Single safetensors files: reading any box of a tensor by byte ranges, and writing tensors one after another.
//!
//! A header is trusted in nothing: not in its length, not in where it says that tensors lie.

mod header;
mod read;
mod write;

pub(crate) use header::{Entry, Layout};
pub use read::SafetensorsFile;
pub(crate) use write::{read_bytes, write_file};

/// How many bytes of scattered pieces are read at once.
const BLOCK: usize = 1 << 20;
/// How many bytes are read or written at once where they are summed as well: what stays in a core's cache between the two.
const CACHED: usize = 256 << 10;
