//! Optimizer state on disk, for models whose state does not fit in memory (the optimizer tier of ZeRO-Infinity).
//!
//! Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning"
//! (arXiv:2104.07857). A rank has one file. [`layout`] places moments in it, [`stream`] passes it through a few blocks of memory, and
//! [`moment`] reads and writes one moment.

mod file;
mod layout;
mod moment;
mod stream;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use fsdp_core::DType as CoreDType;

use super::elementwise::ShardUpdate;
use super::state::{MomentKind, ParamState};
use crate::error::Result;
use crate::fsdp::FsdpParam;
use crate::kernels::{SliceMut, ViewMut};
use crate::storage::{with_slice, with_slice_mut};

use file::StateFile;
use layout::{Block, Piece};
use moment::{Extent, split};
use stream::BLOCKS;

pub(super) use layout::PartKind;
pub(super) use moment::OnDisk;

/// A directory for optimizer state, instead of memory: see [`crate::ElementwiseOptimizer::on_disk`].
///
/// Each rank has a file without a name in the directory. The system frees it when the optimizer is dropped or the
/// process ends, even if the process is killed. All of the file is allocated when the optimizer is made, so a full disk
/// fails before the first step.
///
/// In memory are four blocks: a step computes on one while the others are written back and read ahead. Reads and
/// writes bypass the page cache (`O_DIRECT`). A file system without direct I/O is used through the page cache, with a
/// warning.
///
/// After a read or write failed in a step, some parameters and moments are those before the step and some those after.
/// Steps and reads of the state then fail until [`crate::ElementwiseOptimizer::reset`].
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

    /// Sets the size of all blocks in memory, of which each has a quarter, at least 16 KiB.
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

    /// Makes the file of the moments of parameters.
    pub(super) fn create(&self, params: &[(Arc<FsdpParam>, Vec<MomentKind>)]) -> Result<(DiskState, Vec<Vec<OnDisk>>)> {
        let block = self.memory_bytes / BLOCKS;
        DiskState::new(params, block, |rank, bytes, block| StateFile::create(&self.dir, rank, bytes, block))
    }
}

/// The moments of an optimizer's parameters in a file.
#[derive(Debug)]
pub(super) struct DiskState {
    /// `None` on a rank without moments, such as one whose shards are empty.
    file: Option<Arc<StateFile>>,
    blocks: Vec<Block>,
    /// Dtypes of the tensors of each parameter.
    dtypes: Vec<Vec<CoreDType>>,
}

impl DiskState {
    /// Makes the file of the moments of parameters. `file` gets this rank, the bytes of the file and those of a block.
    /// Also returns the moments of each parameter.
    fn new(
        params: &[(Arc<FsdpParam>, Vec<MomentKind>)],
        block_bytes: usize,
        file: impl FnOnce(usize, u64, usize) -> Result<StateFile>,
    ) -> Result<(Self, Vec<Vec<OnDisk>>)> {
        let mut all = vec![];
        for (param, kinds) in params {
            let device = param.var().device();
            if !device.is_cpu() && !kinds.is_empty() {
                return Err(param.error(format!(
                    "its shard is on {:?}, expected host memory for optimizer state on disk: use OffloadPolicy::Cpu",
                    device.location()
                )));
            }
            let parts = kinds.iter().map(|kind| kind.parts()).collect::<candle_core::Result<Vec<_>>>()?;
            all.push((param.region().elements(), parts.concat()));
        }
        let blocks = layout::blocks(all.iter().map(|(elements, parts)| (*elements, &parts[..])), block_bytes);
        let rank = params.first().map_or(0, |(param, _)| param.device_mesh().rank());
        let largest = blocks.iter().map(|block| block.bytes.end - block.bytes.start).max().unwrap_or(0);
        let file = blocks.last().map(|last| file(rank, last.bytes.end, largest as usize)).transpose()?.map(Arc::new);

        let mut extents: Vec<Vec<Vec<Extent>>> = params.iter().map(|(_, kinds)| vec![vec![]; kinds.len()]).collect();
        for Block { bytes, pieces } in &blocks {
            for Piece { state, elements, parts } in pieces {
                let mut parts = parts.iter().map(|part| bytes.start + part.start as u64..bytes.start + part.end as u64);
                for (kind, extents) in params[*state].1.iter().zip(&mut extents[*state]) {
                    let parts = parts.by_ref().take(kind.parts()?.len()).collect();
                    extents.push(Extent { elements: elements.clone(), parts });
                }
            }
        }
        let moments = params.iter().zip(extents).map(|((param, kinds), extents)| {
            let moment = |(&kind, extents)| OnDisk::new(file.clone(), kind, param.var().dims(), extents);
            kinds.iter().zip(extents).map(moment).collect()
        });
        let moments = moments.collect();
        let dtypes = all.iter().map(|(_, parts)| parts.iter().map(|part| part.dtype).collect()).collect();
        Ok((DiskState { file, blocks, dtypes }, moments))
    }

    /// Returns the number of blocks in the file.
    #[cfg(test)]
    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Sets all moments to zero, also after a failed step.
    pub(super) fn reset(&self) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.zero())
    }

    /// Updates the parameters that have a gradient, a block at a time. `gradient` returns the gradient of a parameter,
    /// and `update` takes the index of the parameter and some of its elements.
    pub(super) fn step(
        &self,
        states: &[ParamState],
        has_gradient: &[bool],
        gradient: impl Fn(&ParamState) -> candle_core::Result<Option<Tensor>>,
        update: impl Fn(&ParamState, ShardUpdate<'_>) -> candle_core::Result<()>,
    ) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let is_updated = |block: &&Block| block.pieces.iter().any(|piece| has_gradient[piece.state]);
        let blocks: Vec<&Block> = self.blocks.iter().filter(is_updated).collect();
        let ranges: Vec<_> = blocks.iter().map(|block| block.bytes.clone()).collect();
        // A large parameter has several blocks, one after the other.
        let mut current: Option<(usize, Tensor)> = None;
        file.stream(&ranges, true, |at, bytes| {
            let pieces = &blocks[at].pieces;
            let mut parts = split(bytes, pieces.iter().flat_map(|piece| piece.parts.iter().cloned())).into_iter();
            for Piece { state, elements, parts: own } in pieces {
                let own: Vec<_> = parts.by_ref().take(own.len()).zip(&self.dtypes[*state]).collect();
                if !has_gradient[*state] {
                    continue;
                }
                if current.as_ref().is_none_or(|(of, _)| of != state) {
                    current = gradient(&states[*state])?.map(|gradient| (*state, gradient));
                }
                let Some((_, grad)) = &current else { continue };
                let parts = own.into_iter().map(|(part, dtype)| SliceMut::new(*dtype, ViewMut::Host(part))).collect();
                with_slice_mut(states[*state].param.var(), |kernels, param| {
                    with_slice(grad, |_, grad| {
                        let (param, grad) = (param.range(elements.clone())?, grad.range(elements.clone())?);
                        update(&states[*state], ShardUpdate { kernels, param, grad, parts })
                    })
                })?;
            }
            Ok(())
        })
    }
}
