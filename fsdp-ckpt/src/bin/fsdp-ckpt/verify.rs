//! `fsdp-ckpt verify`.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use fsdp_ckpt::{Checkpoint, TensorSource};

pub(crate) fn run(dir: &Path) -> Result<()> {
    let verified = Checkpoint::open(dir)?.verify()?;
    let (chunks, files, bytes) = (verified.chunks, verified.files, verified.bytes);
    writeln!(std::io::stdout(), "{}: ok, {chunks} chunks in {files} files, {bytes} bytes", dir.display())?;
    Ok(())
}
