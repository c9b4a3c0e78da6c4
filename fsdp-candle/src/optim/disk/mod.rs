//! Optimizer state on disk. A rank has one file. [`layout`] places moments in it, and [`moment`] reads and writes one.

mod layout;
mod moment;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::moment_kind::{MomentKind, PartKind};
use super::shard_update::ShardUpdate;
use crate::disk::{Access, FileRange, FileValues, StateFile, StateOnDisk};
use crate::error::Result;
use crate::fsdp::FsdpParam;
use crate::kernels::{self, SliceMut, ViewMut};
use crate::storage::{with_slice, with_slice_mut};

use layout::{Block, Piece, State};
use moment::{Extent, split};

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
            all.push((param.region().elements(), parts.concat(), param.shard.on_disk().map(FileValues::dtype)));
        }
        let states = all.iter().map(|(elements, kinds, shard)| State { elements: *elements, kinds, shard: *shard });
        let blocks = layout::blocks(states, block_bytes);
        let rank = params.first().map_or(0, |(param, _)| param.device_mesh().rank());
        let largest = blocks.iter().map(|block| block.len() + block.beside).max().unwrap_or(0);
        let file = blocks.last().map(|last| file(rank, last.bytes.end, largest)).transpose()?.map(Arc::new);

        let mut extents: Vec<Vec<Vec<Extent>>> = params.iter().map(|(_, kinds)| vec![vec![]; kinds.len()]).collect();
        for Block { bytes, pieces, .. } in &blocks {
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
        let kinds = all.into_iter().map(|(_, parts, _)| parts).collect();
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

    /// Updates the parameters that have a gradient, a block at a time. `gradient` returns the gradient of the parameter
    /// of an index, and `update` takes the index of the parameter and some of its elements. Shards in a file are read
    /// and written with their moments.
    pub(super) fn step(
        &self,
        params: &[&FsdpParam],
        has_gradient: &[bool],
        gradient: impl Fn(usize) -> candle_core::Result<Option<Tensor>>,
        update: impl Fn(usize, ShardUpdate<'_>) -> candle_core::Result<()>,
    ) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let is_updated = |piece: &&Piece| has_gradient[piece.state];
        let blocks: Vec<&Block> =
            self.blocks.iter().filter(|block| block.pieces.iter().any(|piece| is_updated(&piece))).collect();
        let shard = |piece: &Piece| params[piece.state].shard.on_disk();
        let item = |block: &&Block| {
            let moments = FileRange { file, bytes: block.bytes.clone() };
            let updated = block.pieces.iter().filter(is_updated);
            let shards = updated.filter_map(|piece| Some(shard(piece)?.range(&piece.elements)));
            std::iter::once(moments).chain(shards).collect()
        };
        let items: Vec<Vec<FileRange<'_>>> = blocks.iter().map(item).collect();
        // A large parameter has several blocks, one after the other.
        let mut current: Option<(usize, Tensor)> = None;
        file.stream_items(&items, Access::Update, |at, bytes| {
            let pieces = &blocks[at].pieces;
            let (moments, mut shards) = bytes.split_at_mut(blocks[at].len());
            let mut parts = split(moments, pieces.iter().flat_map(|piece| piece.parts.iter().cloned())).into_iter();
            for piece in pieces {
                let Piece { state, elements, parts: own } = piece;
                let mut own: Vec<_> = parts.by_ref().take(own.len()).zip(&self.kinds[*state]).collect();
                if !is_updated(&piece) {
                    continue;
                }
                if current.as_ref().is_none_or(|(of, _)| of != state) {
                    current = gradient(*state)?.map(|gradient| (*state, gradient));
                }
                let slices = own.iter_mut().map(|(part, kind)| SliceMut::new(kind.dtype, ViewMut::Host(part)));
                let (parts, kernels) = (slices.collect(), kernels::of_device(&Device::Cpu)?);
                let update = |param: SliceMut<'_>| {
                    let Some((_, grad)) = &current else { return Ok(()) };
                    with_slice(grad, |_, grad| {
                        let grad = grad.range(elements.clone())?;
                        update(*state, ShardUpdate { kernels, param, grad, parts })
                    })
                };
                match shard(piece) {
                    None => {
                        let shard = params[*state].var();
                        with_slice_mut(shard, |_, shard| update(shard.range(elements.clone())?))?;
                    }
                    Some(shard) => {
                        let (own, rest) = std::mem::take(&mut shards).split_at_mut(shard.range(elements).len());
                        shards = rest;
                        let own = &mut own[..elements.len() * shard.dtype().size()];
                        update(SliceMut::new(shard.dtype(), ViewMut::Host(own)))?;
                    }
                }
            }
            Ok(())
        })
    }
}
