//! What is wrong with a file of PyTorch's.

use std::path::Path;

use crate::Error;

/// Of the file at `path`, or of one item in it.
pub(super) fn not_torch(path: &Path, item: Option<&str>, reason: String) -> Error {
    Error::NotTorch { path: path.to_path_buf(), item: item.map(str::to_string), reason }
}
