//! The owners of Muon's matrices, and the exchange of matrices between shards and owners.
//!
//! A matrix is sharded along some mesh axes and replicated along others. Blocks move to the owner one sharded axis
//! after the other, each by one all-to-all, and return the same way. Ranks along a replicated axis that are not in line
//! with the owner do not take part; an all-gather brings them the result.
//!
//! The owner has the whole matrix before anything is added up, so the bits do not depend on the mesh. Owners follow
//! from global shapes and meshes, so ranks agree on them without communication.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use fsdp_core::layout::{Region, local_region};
use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{Allocator, Buffer, DType, ExchangePart, GatherPart, ProcessGroup};

use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::kernels::{Kernels, Rows, Slice, SliceMut};
use crate::storage::{Pool, TensorMemory, to_tensor};

/// Ranks along which matrices are sharded or replicated.
#[derive(Clone)]
struct MeshAxis {
    group: ProcessGroup,
    /// The dimension of the parameters' mesh, if the axis shards matrices.
    mesh_dim: Option<usize>,
}

/// A matrix, its state in the optimizer, and its owner: the rank along each axis that orthogonalizes it.
pub(super) struct Matrix {
    pub(super) state: usize,
    pub(super) param: Arc<FsdpParam>,
    pub(super) owner: Vec<usize>,
}

/// Matrices that are sharded over the same ranks.
pub(super) struct MatrixGroup {
    axes: Vec<MeshAxis>,
    /// In the order of the optimizer's states.
    pub(super) matrices: Vec<Matrix>,
}

/// A box of a matrix that a rank holds, and the ranks of earlier axes that it came from.
#[derive(Clone, Debug, PartialEq)]
struct Block {
    /// Index of the matrix in its group.
    matrix: usize,
    region: Region,
    from: Vec<usize>,
}

/// Assigns owners to matrices, so that the ranks that hold them (replicas too) have loads as even as whole matrices
/// allow. Every rank computes the same result.
pub(super) fn assign_owners(params: &[Arc<FsdpParam>]) -> Vec<MatrixGroup> {
    // Matrices on the same ranks share one distribution of loads.
    let mut by_ranks: Vec<(Vec<MeshAxis>, Vec<usize>)> = vec![];
    for (state, param) in params.iter().enumerate() {
        let axes = axes(param);
        match by_ranks.iter_mut().find(|(others, _)| have_same_ranks(others, &axes)) {
            Some((_, states)) => states.push(state),
            None => by_ranks.push((axes, vec![state])),
        }
    }
    let mut groups: Vec<MatrixGroup> = vec![];
    for (axes_of_first, states) in by_ranks {
        let sizes: Vec<usize> = axes_of_first.iter().map(|axis| axis.group.size()).collect();
        let costs: Vec<u128> = states.iter().map(|&state| cost(params[state].shape().dims())).collect();
        let first = groups.len();
        for (&state, rank) in states.iter().zip(owners(&costs, sizes.iter().product())) {
            let axes = axes(&params[state]);
            let matrix = Matrix { state, param: params[state].clone(), owner: coordinate(&sizes, rank) };
            let mesh_dims = |axes: &[MeshAxis]| axes.iter().map(|axis| axis.mesh_dim).collect::<Vec<_>>();
            match groups[first..].iter_mut().find(|matrix_group| mesh_dims(&matrix_group.axes) == mesh_dims(&axes)) {
                Some(matrix_group) => matrix_group.matrices.push(matrix),
                None => groups.push(MatrixGroup { axes, matrices: vec![matrix] }),
            }
        }
    }
    groups
}

fn have_same_ranks(a: &[MeshAxis], b: &[MeshAxis]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.group.is(&b.group))
}

/// Returns the axes of a parameter: the dimension that shards, the dimension that replicates (which also shards if
/// shards are divided over replicas), the ranks that own experts, and the tensor-parallel ranks.
fn axes(param: &FsdpParam) -> Vec<MeshAxis> {
    let ranks = &param.spec.ranks;
    let dims = 0..ranks.mesh.layout().shape().len();
    let dim_of = |group: &ProcessGroup| dims.clone().find(|&dim| ranks.mesh.group(dim).is_ok_and(|of| of.is(group)));
    let shard = MeshAxis { group: ranks.shard.clone(), mesh_dim: dim_of(&ranks.shard) };
    let replicate = ranks.replicate().map(|group| MeshAxis {
        mesh_dim: if ranks.is_sharded_over_replicas { dim_of(group) } else { None },
        group: group.clone(),
    });
    let parallel = param.parallel().map(|parallel| {
        let group = parallel.group.clone();
        MeshAxis { mesh_dim: param.split_over().and_then(dim_of), group }
    });
    let experts = ranks.experts().map(|group| MeshAxis { group: group.clone(), mesh_dim: ranks.experts_dim() });
    std::iter::once(shard).chain(replicate).chain(experts).chain(parallel).collect()
}

/// Returns the cost of a matrix: the products of Newton-Schulz.
fn cost(shape: &[usize]) -> u128 {
    let (rows, columns) = (shape[0] as u128, shape[1] as u128);
    rows * columns * rows.min(columns)
}

/// Returns a rank for each cost: the largest cost first, each to the rank with the least load.
fn owners(costs: &[u128], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(costs[at]), at));
    let mut loads = vec![0; ranks.max(1)];
    let mut owners = vec![0; costs.len()];
    for at in order {
        let rank = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[rank] += costs[at];
        owners[at] = rank;
    }
    owners
}

fn coordinate(sizes: &[usize], index: usize) -> Vec<usize> {
    let mut rest = index;
    let mut at: Vec<usize> = sizes
        .iter()
        .rev()
        .map(|size| {
            let at = rest % size;
            rest /= size;
            at
        })
        .collect();
    at.reverse();
    at
}

impl MatrixGroup {
    /// Returns this rank's coordinate along the axes.
    fn own(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.group.rank()).collect()
    }

    /// Returns whether the rank at `at` helps to move a matrix to its owner. Along replicated axes, only ranks aligned
    /// with the owner do.
    fn is_aligned(&self, matrix: &Matrix, at: &[usize]) -> bool {
        (0..self.axes.len()).all(|axis| self.axes[axis].mesh_dim.is_some() || matrix.owner[axis] == at[axis])
    }

    /// Returns the axes that shard matrices.
    fn sharded_axes(&self) -> Vec<usize> {
        (0..self.axes.len()).filter(|&axis| self.axes[axis].mesh_dim.is_some()).collect()
    }

    /// Returns the box of a matrix that the rank at `at` holds.
    fn region(&self, matrix: usize, at: &[usize]) -> Result<Region> {
        let param = &self.matrices[matrix].param;
        let mesh = &param.spec.ranks.mesh;
        let mut coordinate = mesh.coordinate();
        for (axis, &at) in self.axes.iter().zip(at) {
            if let Some(dim) = axis.mesh_dim {
                coordinate[dim] = at;
            }
        }
        Ok(local_region(param.shape().dims(), mesh.layout(), &coordinate, &param.placements())?)
    }

    /// Returns the blocks that the rank at `at` holds after the first `after` of [`MatrixGroup::sharded_axes`], in
    /// order.
    fn blocks_at(&self, matrices: &[usize], at: &[usize], after: usize) -> Result<Vec<Block>> {
        let Some(last) = after.checked_sub(1) else {
            let own = matrices.iter().filter(|&&matrix| self.is_aligned(&self.matrices[matrix], at));
            return own.map(|&matrix| Ok(Block { matrix, region: self.region(matrix, at)?, from: vec![] })).collect();
        };
        let axis = self.sharded_axes()[last];
        let mut held = vec![];
        for peer in 0..self.axes[axis].group.size() {
            held.extend(self.blocks_from(matrices, at, last, peer)?);
        }
        Ok(held)
    }

    /// Returns the blocks that the rank at `at` receives from a peer along the axis number `last` of
    /// [`MatrixGroup::sharded_axes`].
    fn blocks_from(&self, matrices: &[usize], at: &[usize], last: usize, peer: usize) -> Result<Vec<Block>> {
        let axis = self.sharded_axes()[last];
        let mut peer_at = at.to_vec();
        peer_at[axis] = peer;
        let mut blocks = self.blocks_at(matrices, &peer_at, last)?;
        blocks.retain(|block| self.matrices[block.matrix].owner[axis] == at[axis]);
        blocks.iter_mut().for_each(|block| block.from.push(peer));
        Ok(blocks)
    }
}

/// A block with its values in BF16, row-major.
struct BlockValues {
    block: Block,
    values: Buffer,
}

/// The dtype of exchanged values.
const DTYPE: DType = DType::BF16;

/// The exchange of some of a group's matrices in one step. Collective.
pub(super) struct Exchange<'a> {
    pub(super) group: &'a MatrixGroup,
    /// Indices in the group of the matrices that take part.
    pub(super) matrices: &'a [usize],
    pub(super) subject: &'a Arc<Subject>,
    pub(super) device: &'a Device,
    pub(super) kernels: &'static dyn Kernels,
    pub(super) memory: Arc<Pool>,
}

impl Exchange<'_> {
    /// Moves this rank's blocks to the owners, calls `update` with the whole matrices that this rank owns, and moves
    /// the results back. `own` returns the values of this rank's block of a matrix. Returns the values of all matrices,
    /// in order.
    pub(super) fn run(
        &self,
        own: &mut dyn FnMut(usize) -> Result<Buffer>,
        update: &mut dyn FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<(usize, Buffer)>> {
        let (matrix_group, at) = (self.group, self.group.own());
        let sharded = matrix_group.sharded_axes();
        let blocks = matrix_group.blocks_at(self.matrices, &at, 0)?;
        let with_values = |block: Block| Ok(BlockValues { values: own(block.matrix)?, block });
        let mut values = blocks.into_iter().map(with_values).collect::<Result<Vec<_>>>()?;
        let mut sent = vec![];
        for (last, &axis) in sharded.iter().enumerate() {
            let group = &matrix_group.axes[axis].group;
            let is_sent = |block: &Block, peer: usize| matrix_group.matrices[block.matrix].owner[axis] == peer;
            let sent_blocks: Vec<Block> = values.iter().map(|value| value.block.clone()).collect();
            let received = |peer: usize| matrix_group.blocks_from(self.matrices, &at, last, peer);
            let received = (0..group.size()).map(received).collect::<Result<Vec<_>>>()?;
            values = self.exchange(group, values, is_sent, received, "to their owners")?;
            sent.push(sent_blocks);
        }
        values = self.update_owned(values, update)?;
        for (&axis, sent_blocks) in sharded.iter().zip(sent).rev() {
            let group = &matrix_group.axes[axis].group;
            // Each block returns to the rank that it came from.
            let is_sent = |block: &Block, peer: usize| block.from.last() == Some(&peer);
            let was_sent = |at: &usize, peer: usize| matrix_group.matrices[sent_blocks[*at].matrix].owner[axis] == peer;
            let was_sent =
                |peer: usize| (0..sent_blocks.len()).filter(move |at| was_sent(at, peer)).collect::<Vec<_>>();
            let order: Vec<Vec<usize>> = (0..group.size()).map(was_sent).collect();
            let received = order.iter().map(|back| back.iter().map(|&at| sent_blocks[at].clone()).collect()).collect();
            values = self.exchange(group, values, is_sent, received, "back from their owners")?;
            // Restore the order in which the blocks were sent.
            let mut in_order: Vec<_> = order.into_iter().flatten().zip(values).collect();
            in_order.sort_by_key(|(at, _)| *at);
            values = in_order.into_iter().map(|(_, value)| value).collect();
        }
        self.gather_over_replicas(values)
    }

    /// Runs one all-to-all. `received` lists the blocks that each rank sends here.
    fn exchange(
        &self,
        group: &ProcessGroup,
        values: Vec<BlockValues>,
        is_sent: impl Fn(&Block, usize) -> bool,
        received: Vec<Vec<Block>>,
        how: &str,
    ) -> Result<Vec<BlockValues>> {
        let elements = |blocks: &mut dyn Iterator<Item = &Block>| blocks.map(|block| block.region.elements()).sum();
        let blocks = || values.iter().map(|value| &value.block);
        let peers = 0..group.size();
        let send_counts: Vec<usize> =
            peers.clone().map(|peer| elements(&mut blocks().filter(|block| is_sent(block, peer)))).collect();
        let recv_counts = received.iter().map(|blocks| elements(&mut blocks.iter())).collect();
        let mut input = self.memory.take(DTYPE, send_counts.iter().sum())?;
        let mut end = 0;
        for peer in peers {
            for value in values.iter().filter(|value| is_sent(&value.block, peer)) {
                end = self.append(&value.values, &mut input, end)?;
            }
        }
        drop(values);
        let group = self.signed(group, how);
        let part = ExchangePart { input, send_counts, recv_counts };
        let output = only(group.all_to_all(vec![part], self.memory.clone()).wait()?)?;
        let mut begin = 0;
        let mut received_values = vec![];
        for block in received.into_iter().flatten() {
            let end = begin + block.region.elements();
            received_values.push(BlockValues { values: self.copy_range(&output, begin..end)?, block });
            begin = end;
        }
        self.memory.give(output);
        Ok(received_values)
    }

    /// Assembles the matrices that this rank owns, updates them, and splits them into the same blocks.
    fn update_owned(
        &self,
        mut values: Vec<BlockValues>,
        update: &mut dyn FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<BlockValues>> {
        for &matrix in self.matrices {
            let of_matrix = |value: &BlockValues| value.block.matrix == matrix;
            if !values.iter().any(of_matrix) {
                continue;
            }
            let shape = self.group.matrices[matrix].param.shape().dims();
            let mut whole = self.memory.zeros(DTYPE, shape.iter().product())?;
            for value in values.iter().filter(|value| of_matrix(value)) {
                let (begin, rows) = rows_in_matrix(value, shape);
                let room = whole.len();
                let to = SliceMut::from(&mut whole).range(begin..room)?;
                self.kernels.copy_rows(Slice::from(&value.values), to, rows)?;
            }
            let updated = update(matrix, &to_tensor(whole, shape, self.device)?)?;
            let updated = crate::storage::copied(&updated)?;
            for value in values.iter_mut().filter(|value| of_matrix(value)) {
                let (begin, rows) = rows_in_matrix(value, shape);
                let rows = Rows { from_stride: rows.to_stride, to_stride: rows.from_stride, ..rows };
                let from = Slice::from(&updated).range(begin..updated.len())?;
                self.kernels.copy_rows(from, (&mut value.values).into(), rows)?;
            }
        }
        Ok(values)
    }

    /// Gathers the results over the replicated axes.
    fn gather_over_replicas(&self, values: Vec<BlockValues>) -> Result<Vec<(usize, Buffer)>> {
        let mut updated: Vec<(usize, Buffer)> =
            values.into_iter().map(|value| (value.block.matrix, value.values)).collect();
        let same: Vec<usize> =
            (0..self.group.axes.len()).filter(|&axis| self.group.axes[axis].mesh_dim.is_none()).collect();
        for (number, &axis) in same.iter().enumerate() {
            // The results along earlier axes are already gathered.
            let (own, rest) = (self.group.own(), &same[number + 1..]);
            let is_aligned = |matrix: usize| {
                let owner = &self.group.matrices[matrix].owner;
                rest.iter().all(|&axis| owner[axis] == own[axis])
            };
            updated = self.gather_over(&self.group.axes[axis], axis, updated, is_aligned)?;
        }
        updated.sort_by_key(|(matrix, _)| *matrix);
        Ok(updated)
    }

    fn gather_over(
        &self,
        MeshAxis { group, .. }: &MeshAxis,
        axis: usize,
        updated: Vec<(usize, Buffer)>,
        is_aligned: impl Fn(usize) -> bool,
    ) -> Result<Vec<(usize, Buffer)>> {
        let own = self.group.own();
        let by_peer = |peer: usize| {
            let is_sent = |matrix: &usize| self.group.matrices[*matrix].owner[axis] == peer && is_aligned(*matrix);
            self.matrices.iter().copied().filter(is_sent).collect::<Vec<_>>()
        };
        let order: Vec<Vec<usize>> = (0..group.size()).map(by_peer).collect();
        let elements = |matrix: usize| Ok(self.group.region(matrix, &own)?.elements());
        let mut counts = vec![];
        for matrices in &order {
            counts.push(matrices.iter().map(|&matrix| elements(matrix)).sum::<Result<usize>>()?);
        }
        let mut input = self.memory.zeros(DTYPE, counts[group.rank()])?;
        let mut end = 0;
        for matrix in &order[group.rank()] {
            let Some((_, values)) = updated.iter().find(|(own, _)| own == matrix) else {
                return Err(Error::Argument("no rank has updated a matrix of Muon".into()));
            };
            end = self.append(values, &mut input, end)?;
        }
        drop(updated);
        let input = Arc::new(TensorMemory(to_tensor(input, &[counts[group.rank()]], self.device)?));
        let part = GatherPart { input, counts };
        let group = self.signed(group, "to the replicas");
        let output = only(group.all_gather(vec![part], self.memory.clone()).wait()?)?;
        let mut begin = 0;
        let mut all = vec![];
        for matrix in order.into_iter().flatten() {
            let end = begin + elements(matrix)?;
            all.push((matrix, self.copy_range(&output, begin..end)?));
            begin = end;
        }
        self.memory.give(output);
        Ok(all)
    }

    fn signed(&self, group: &ProcessGroup, how: &str) -> ProcessGroup {
        group.signed(Signature::new(self.subject, self.matrices.iter().copied()).with_how(how))
    }

    /// Appends values to a buffer. Returns the new end.
    fn append(&self, values: &Buffer, to: &mut Buffer, end: usize) -> Result<usize> {
        let to = SliceMut::from(to).range(end..end + values.len())?;
        self.kernels.copy(values.into(), to)?;
        Ok(end + values.len())
    }

    /// Copies a range of a buffer.
    fn copy_range(&self, from: &Buffer, elements: Range<usize>) -> Result<Buffer> {
        let mut part = self.kernels.zeros(DTYPE, elements.len())?;
        self.kernels.copy(Slice::from(from).range(elements)?, (&mut part).into())?;
        Ok(part)
    }
}

/// Returns the first element of a block in its matrix, and its rows, from the block to the matrix.
fn rows_in_matrix(value: &BlockValues, shape: &[usize]) -> (usize, Rows) {
    let (region, width) = (&value.block.region, shape[1]);
    let rows = Rows {
        count: if region.is_empty() { 0 } else { region.sizes[0] },
        len: region.sizes[1],
        from_stride: region.sizes[1],
        to_stride: width,
    };
    let begin = region.offsets[0] * width + region.offsets[1];
    (if region.is_empty() { 0 } else { begin }, rows)
}

fn only(mut buffers: Vec<Buffer>) -> Result<Buffer> {
    buffers.pop().ok_or_else(|| Error::Argument("a collective of one buffer returned none".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_have_even_loads() {
        assert_eq!(owners(&[1, 8, 3, 3, 2], 2), [0, 0, 1, 1, 1]);
        assert_eq!(owners(&[5, 5, 5], 4), [0, 1, 2]);
        assert_eq!(owners(&[], 3), [0usize; 0]);
        // No rank has more than the mean and the largest cost.
        let costs: Vec<u128> = (1..100).map(|at| at * at % 37 + 1).collect();
        let owners = owners(&costs, 7);
        let load = |rank| costs.iter().zip(&owners).filter(|(_, owner)| **owner == rank).map(|(c, _)| c).sum();
        let loads: Vec<u128> = (0..7).map(load).collect();
        assert!(loads.iter().all(|&load| load <= costs.iter().sum::<u128>() / 7 + 37), "{loads:?}");
    }

    #[test]
    fn ranks_have_coordinates_along_axes() {
        let all: Vec<_> = (0..6).map(|rank| coordinate(&[2, 3], rank)).collect();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
    }
}
