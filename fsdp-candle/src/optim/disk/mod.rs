//! Optimizer state on disk. A rank has one file. [`layout`] places moments in it, and [`moment`] reads and writes one.

mod layout;
mod moment;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::Tensor;

use super::elementwise::ShardUpdate;
use super::state::{MomentKind, ParamState};
use crate::disk::{StateFile, StateOnDisk};
use crate::error::Result;
use crate::fsdp::FsdpParam;
use crate::kernels::{SliceMut, ViewMut};
use crate::storage::with_slice;

use layout::{Block, Piece};
use moment::{Extent, split};

pub(super) use layout::PartKind;
pub(super) use moment::OnDisk;

/// The moments of an optimizer's parameters in a file.
#[derive(Debug)]
pub(super) struct DiskState {
    /// `None` on a rank without moments, such as one whose shards are empty.
    file: Option<Arc<StateFile>>,
    blocks: Vec<Block>,
    /// Kinds of the tensors of each parameter.
    kinds: Vec<Vec<PartKind>>,
}

impl DiskState {
    /// Makes the file of the moments of parameters.
    pub(super) fn create(
        params: &[(Arc<FsdpParam>, Vec<MomentKind>)],
        disk: &StateOnDisk,
    ) -> Result<(Self, Vec<Vec<OnDisk>>)> {
        DiskState::new(params, disk.block_bytes(), |rank, bytes, block| {
            StateFile::create(disk.dir(), rank, bytes, block)
        })
    }

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
        let kinds = all.into_iter().map(|(_, parts)| parts).collect();
        Ok((DiskState { file, blocks, kinds }, moments))
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
                let mut own: Vec<_> = parts.by_ref().take(own.len()).zip(&self.kinds[*state]).collect();
                if !has_gradient[*state] {
                    continue;
                }
                if current.as_ref().is_none_or(|(of, _)| of != state) {
                    current = gradient(&states[*state])?.map(|gradient| (*state, gradient));
                }
                let Some((_, grad)) = &current else { continue };
                states[*state].param.update_elements(elements.clone(), |kernels, some, param| {
                    let within = some.start - elements.start..some.end - elements.start;
                    let slices = own.iter_mut().map(|(part, kind)| {
                        SliceMut::new(kind.dtype, ViewMut::Host(&mut part[kind.bytes_of(&within)]))
                    });
                    let parts = slices.collect();
                    with_slice(grad, |_, grad| {
                        update(&states[*state], ShardUpdate { kernels, param, grad: grad.range(some)?, parts })
                    })
                })?;
            }
            Ok(())
        })
    }
}
