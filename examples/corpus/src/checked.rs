//! A file whose blocks are verified when they are first read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use crc_fast::CrcAlgorithm;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Bytes of a block.
pub(crate) const BLOCK: usize = 1 << 20;

/// Returns the checksum of a block.
pub(crate) fn checksum(block: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, block) as u32
}

/// A file with checksums of its blocks.
pub(crate) struct CheckedFile {
    path: PathBuf,
    file: File,
    len: u64,
    checksums: Vec<u32>,
    /// A bit for each verified block.
    verified: Vec<AtomicU64>,
}

impl CheckedFile {
    /// Opens a file, and compares its length with the expected one.
    pub(crate) fn open(path: PathBuf, len: u64, checksums: Vec<u32>) -> Result<Self> {
        let file = open_file(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let found = file.metadata().with_context(|| format!("cannot read {}", path.display()))?.len();
        ensure!(
            found == len,
            "{} has {found} bytes, but {len} were written: it was changed or copied in part. Copy it again",
            path.display()
        );
        ensure!(
            checksums.len() as u64 == len.div_ceil(BLOCK as u64),
            "{} needs {} checksums of blocks, but its index has {}",
            path.display(),
            len.div_ceil(BLOCK as u64),
            checksums.len()
        );
        let verified = (0..checksums.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(CheckedFile { path, file, len, checksums, verified })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads bytes, and verifies the blocks that were not read before.
    pub(crate) fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<()> {
        let end = offset + out.len() as u64;
        for block in offset / BLOCK as u64..end.div_ceil(BLOCK as u64) {
            self.verify(block)?;
        }
        self.file.read_exact_at(out, offset).with_context(|| {
            format!(
                "cannot read bytes {offset} to {end} of {}, which had {} when opened",
                self.path.display(),
                self.len
            )
        })
    }

    fn verify(&self, block: u64) -> Result<()> {
        let word = self.verified.get((block / 64) as usize);
        let bit = 1 << (block % 64);
        if word.is_some_and(|word| word.load(Ordering::Relaxed) & bit != 0) {
            return Ok(());
        }
        let Some((word, &expected)) = word.zip(self.checksums.get(block as usize)) else {
            bail!("{} has no block {block}", self.path.display())
        };
        let start = block * BLOCK as u64;
        let mut bytes = vec![0; (self.len - start).min(BLOCK as u64) as usize];
        self.file
            .read_exact_at(&mut bytes, start)
            .with_context(|| format!("cannot read block {block} of {}", self.path.display()))?;
        let found = checksum(&bytes);
        ensure!(
            found == expected,
            "block {block} of {} is damaged (bytes {start} to {}): its checksum is {found:08x}, but {expected:08x} was \
             written. Copy the file again, or prepare the corpus again",
            self.path.display(),
            start + bytes.len() as u64
        );
        word.fetch_or(bit, Ordering::Relaxed);
        Ok(())
    }
}

/// Opens a file that stays open. Raises the limit of open files if necessary.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    match File::open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
            let limit = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
            File::open(path)
        }
        outcome => outcome,
    }
}
