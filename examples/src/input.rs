//! Reading input files. Other programs may have left something else in their place.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use fsdp_ckpt::Placeholder;

/// Reads a text file of a model. Fails for a Git LFS pointer, an HTML page and an empty file, and says what it is. The
/// caller adds the path to errors.
pub fn read_text(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path)?;
    match Placeholder::of(text.as_bytes()) {
        Some(found) => bail!("{found}"),
        None => Ok(text),
    }
}

/// Fails if a file of data is a Git LFS pointer.
pub fn check_data(path: &Path) -> Result<()> {
    let mut start = Vec::new();
    // The caller reports files that it can't read.
    let read = File::open(path).and_then(|file| file.take(512).read_to_end(&mut start));
    match read.ok().and_then(|_| Placeholder::of(&start)) {
        Some(found @ Placeholder::LfsPointer) => Err(anyhow!("{}: {found}", path.display())),
        _ => Ok(()),
    }
}
