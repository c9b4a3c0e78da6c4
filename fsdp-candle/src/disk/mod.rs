//! State on disk instead of memory, for models whose state does not fit in memory (the NVMe tier of ZeRO-Infinity).
//!
//! Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning"
//! (arXiv:2104.07857). A rank has one file for its shards, and one for its optimizer's moments. [`stream`] passes parts
//! of a file through a few blocks of memory.

mod direct;
mod file;
mod stream;
mod tensor;
mod values;

use std::path::{Path, PathBuf};

use crate::error::Result;

pub(crate) use direct::{ALIGN, AlignedBuffer, Disk, bypass_page_cache};
pub(crate) use file::StateFile;
pub(crate) use stream::{Access, BLOCKS, FileRange};
pub(crate) use tensor::FileTensor;
pub(crate) use values::{FileMemory, FileValues, count_non_finite};

/// A directory for state, instead of memory: optimizer state ([`crate::ElementwiseOptimizer::on_disk`]) or shards
/// ([`crate::ShardedVarMap::store_on_disk`]).
///
/// Each rank has files without a name in the directory. The system frees them when their owner is dropped or the
/// process ends, even if the process is killed. Space is allocated when an optimizer or a parameter is made, so a full
/// disk fails before the first step.
///
/// In memory are four blocks of a file: a step computes on one while the others are written back and read ahead. Reads
/// and writes bypass the page cache (`O_DIRECT`). A file system without direct I/O is used through the page cache, with
/// a warning.
///
/// After a read or write failed in a step, some parameters and moments are those before the step and some those after.
/// Steps and reads of an optimizer's state then fail until [`crate::ElementwiseOptimizer::reset`], and those of shards
/// until the model is built again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateOnDisk {
    dir: PathBuf,
    memory_bytes: usize,
}

impl StateOnDisk {
    /// Uses an existing directory, and 16 MiB of memory.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        StateOnDisk { dir: dir.into(), memory_bytes: 16 << 20 }
    }

    /// Sets the size of all blocks in memory, of which each has a quarter, at least 32 KiB. All together take
    /// whole huge pages of 2 MiB.
    ///
    /// ```
    /// let disk = fsdp_candle::StateOnDisk::new("/nvme").memory_bytes(64 << 20);
    /// assert_eq!(disk.dir(), std::path::Path::new("/nvme"));
    /// ```
    pub fn memory_bytes(self, bytes: usize) -> Self {
        StateOnDisk { memory_bytes: bytes, ..self }
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the bytes of a block.
    pub(crate) fn block_bytes(&self) -> usize {
        self.memory_bytes / BLOCKS
    }

    /// Makes a file that grows.
    pub(crate) fn growing_file(&self, rank: usize) -> Result<StateFile> {
        let block = self.block_bytes().max(LEAST_BLOCK) / ALIGN * ALIGN;
        StateFile::create(&self.dir, rank, (BLOCKS * block) as u64, block)
    }
}

/// Least size of a block: several times [`STATE_BLOCK`](crate::kernels::STATE_BLOCK) elements of any two moments.
pub(crate) const LEAST_BLOCK: usize = 8 * ALIGN;
