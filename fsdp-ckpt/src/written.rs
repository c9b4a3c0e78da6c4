//! What has been written, of whatever format.

use std::path::PathBuf;

/// What has been written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Where.
    pub path: PathBuf,
    /// The number of tensors.
    pub tensors: usize,
    /// The number of files that hold them.
    pub files: usize,
    /// The bytes of the tensors.
    pub bytes: u64,
}
