//! What every rank of a mesh holds of a tensor, computed without communication.

use std::ops::Range;

use crate::{
    DType, Error, MeshLayout, Placement, ReduceOp, Result,
    layout::{self, Cut, Ranges, Region},
};

/// The layout of a DTensor: a global tensor's shape and dtype, and how it lies on a mesh.
///
/// ```
/// use fsdp_core::{DType, DTensorSpec, MeshLayout, Placement};
/// let mesh = MeshLayout::new(&[("dp", 4)])?;
/// let spec = DTensorSpec::new(mesh, &[Placement::Shard(0)], &[5, 3], DType::F32)?;
/// assert_eq!(spec.local_shape(0)?, [2, 3]);
/// assert_eq!(spec.local_region(2)?.offsets, [4, 0]);
/// assert_eq!(spec.local_shape(3)?, [0, 3]);
/// # Ok::<(), fsdp_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DTensorSpec {
    mesh: MeshLayout,
    placements: Vec<Placement>,
    shape: Vec<usize>,
    dtype: DType,
    /// What `placements` do to each tensor dimension.
    cuts: Vec<Vec<Cut>>,
}

impl DTensorSpec {
    /// A tensor of shape `shape` under `placements`, one a mesh dimension.
    ///
    /// # Errors
    /// [`Error::Layout`] when there is not one placement a mesh dimension, one shards a dimension that the tensor has
    /// not, a strided shard's split factor is not the product of sizes of the mesh dimensions to its right that shard
    /// the same dimension, partials don't go together (only sums and averages do, and any operation with itself), an
    /// average is of integers, or the tensor is larger than memory can be.
    pub fn new(mesh: MeshLayout, placements: &[Placement], shape: &[usize], dtype: DType) -> Result<Self> {
        let cuts = layout::cuts(shape, &mesh, placements)?;
        check_partials(placements, dtype)?;
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, &size| bytes.checked_mul(size.max(1)));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::Layout(format!("a tensor of shape {shape:?} is larger than memory can be")));
        }
        Ok(DTensorSpec { mesh, placements: placements.to_vec(), shape: shape.to_vec(), dtype, cuts })
    }

    /// The same tensor under other placements.
    ///
    /// # Errors
    /// As [`DTensorSpec::new`].
    pub fn with_placements(&self, placements: &[Placement]) -> Result<Self> {
        DTensorSpec::new(self.mesh.clone(), placements, &self.shape, self.dtype)
    }

    /// The mesh.
    pub fn mesh(&self) -> &MeshLayout {
        &self.mesh
    }

    /// The placements, one a mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// The shape of the global tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of what `rank` of the mesh holds.
    ///
    /// # Errors
    /// When `rank` is outside the mesh.
    pub fn local_shape(&self, rank: usize) -> Result<Vec<usize>> {
        Ok(shape_of(&self.ranges(rank)?))
    }

    /// The box of the tensor that `rank` of the mesh holds. One that holds nothing has an empty box, where its elements
    /// would be.
    ///
    /// # Errors
    /// When `rank` is outside the mesh, and when it holds several boxes, as a [`Placement::StridedShard`] may have it.
    pub fn local_region(&self, rank: usize) -> Result<Region> {
        layout::one_region(&self.ranges(rank)?, &self.placements)
    }

    /// The boxes of the tensor that `rank` of the mesh holds, by ascending offsets; none when it holds nothing. They
    /// are several only with a [`Placement::StridedShard`]. Locally they lie as in the global tensor with everything
    /// else taken out.
    ///
    /// ```
    /// use fsdp_core::{DType, DTensorSpec, MeshLayout, Placement};
    /// // A dimension of 8 that 2 tensor parallel ranks share, seen along the data parallel dimension alone.
    /// let mesh = MeshLayout::new(&[("dp", 2)])?;
    /// let spec = DTensorSpec::new(mesh, &[Placement::StridedShard { dim: 0, split_factor: 2 }], &[8], DType::F32)?;
    /// let boxes = spec.local_regions(1)?.into_iter().map(|region| (region.offsets[0], region.sizes[0]));
    /// let boxes: Vec<_> = boxes.collect();
    /// assert_eq!(boxes, [(2, 2), (6, 2)]);
    /// # Ok::<(), fsdp_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When `rank` is outside the mesh.
    pub fn local_regions(&self, rank: usize) -> Result<Vec<Region>> {
        let mut regions = vec![Region { offsets: Vec::new(), sizes: Vec::new() }];
        for ranges in self.ranges(rank)? {
            regions = regions
                .into_iter()
                .flat_map(|region| {
                    ranges.iter().filter(|range| !range.is_empty()).map(move |range| {
                        let mut region = region.clone();
                        region.offsets.push(range.start);
                        region.sizes.push(range.len());
                        region
                    })
                })
                .collect();
        }
        Ok(regions)
    }

    /// The indices of each tensor dimension that `rank` holds, ascending.
    pub(super) fn ranges(&self, rank: usize) -> Result<Vec<Ranges>> {
        let coordinate = self.mesh.coordinate_of(rank).ok_or_else(|| {
            Error::Layout(format!("rank {rank} is outside mesh {}, whose ranks are 0..{}", self.mesh, self.mesh.size()))
        })?;
        Ok(layout::ranges(&self.shape, &self.cuts, &self.mesh, &coordinate))
    }

    /// What cuts each tensor dimension.
    pub(super) fn cuts(&self) -> &[Vec<Cut>] {
        &self.cuts
    }

    /// Whether `mesh_dim` shards a tensor dimension and cuts it last, so that its ranks hold, together, all that the
    /// other cuts leave.
    pub(super) fn cuts_last(&self, mesh_dim: usize) -> bool {
        let tensor_dim = self.placements.get(mesh_dim).and_then(|placement| placement.shard_dim());
        tensor_dim.is_some_and(|dim| self.cuts[dim].last() == Some(&Cut::Mesh(mesh_dim)))
    }
}

/// How many indices `ranges` have in each dimension.
pub(super) fn shape_of(ranges: &[Ranges]) -> Vec<usize> {
    ranges.iter().map(|ranges| ranges.iter().map(Range::len).sum()).collect()
}

fn check_partials(placements: &[Placement], dtype: DType) -> Result<()> {
    let mut ops = placements.iter().filter_map(|placement| match placement {
        Placement::Partial(op) => Some(*op),
        _ => None,
    });
    let Some(first) = ops.next() else { return Ok(()) };
    let linear = |op| matches!(op, ReduceOp::Sum | ReduceOp::Avg);
    if let Some(other) = ops.clone().find(|&op| op != first && !(linear(op) && linear(first))) {
        return Err(Error::Layout(format!(
            "P({first}) and P({other}) in one layout: which comes first would change the tensor, so only sum and avg \
             go together"
        )));
    }
    if !dtype.is_float() && (first == ReduceOp::Avg || ops.any(|op| op == ReduceOp::Avg)) {
        return Err(Error::Layout(format!(
            "P(avg) of {dtype}: the average of integers is no integer; use sum or a floating point type"
        )));
    }
    Ok(())
}

impl std::fmt::Display for DTensorSpec {
    /// `F32 [5, 3] as [S(0)] on (dp: 4)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let placements: Vec<_> = self.placements.iter().map(ToString::to_string).collect();
        write!(f, "{} {:?} as [{}] on {}", self.dtype, self.shape, placements.join(", "), self.mesh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Placement::{Partial, Replicate, Shard};

    fn strided(dim: usize, split_factor: usize) -> Placement {
        Placement::StridedShard { dim, split_factor }
    }

    fn spec(dims: &[usize], placements: &[Placement], shape: &[usize]) -> Result<DTensorSpec> {
        let names = ["a", "b", "c"];
        let mesh = MeshLayout::new(&names.into_iter().zip(dims.iter().copied()).collect::<Vec<_>>()).unwrap();
        DTensorSpec::new(mesh, placements, shape, DType::F32)
    }

    /// `torch.chunk`, with empty chunks up to `chunks`.
    fn chunk(indices: &[usize], chunks: usize, index: usize) -> Vec<usize> {
        let size = indices.len().div_ceil(chunks).max(1);
        indices.chunks(size).nth(index).unwrap_or_default().to_vec()
    }

    fn indices(spec: &DTensorSpec, rank: usize) -> Vec<usize> {
        let regions = spec.local_regions(rank).unwrap();
        let indices: Vec<_> = regions.iter().flat_map(|r| r.offsets[0]..r.offsets[0] + r.sizes[0]).collect();
        assert_eq!(spec.local_shape(rank).unwrap(), [indices.len()]);
        indices
    }

    #[test]
    fn fsdp_over_tensor_parallel_shards_what_tensor_parallel_left() {
        for n in 0..40 {
            let all: Vec<usize> = (0..n).collect();
            for (dp, tp) in [(1, 1), (2, 2), (2, 3), (3, 2), (4, 2), (1, 3), (3, 1)] {
                let spec = spec(&[dp, tp], &[strided(0, tp), Shard(0)], &[n]).unwrap();
                for rank in 0..dp * tp {
                    let expected = chunk(&chunk(&all, tp, rank % tp), dp, rank / tp);
                    assert_eq!(indices(&spec, rank), expected, "n {n} dp {dp} tp {tp} rank {rank}");
                    assert_eq!(spec.local_region(rank).unwrap().sizes, [expected.len()]);
                }
            }
        }
    }

    #[test]
    fn hsdp_and_two_inner_dimensions_too() {
        for n in 0..40 {
            let all: Vec<usize> = (0..n).collect();
            let hsdp = spec(&[2, 3, 2], &[Replicate, strided(0, 2), Shard(0)], &[n]).unwrap();
            let deep = spec(&[2, 3, 2], &[strided(0, 6), strided(0, 2), Shard(0)], &[n]).unwrap();
            let mixed = spec(&[2, 3, 2], &[strided(0, 3), Shard(0), Shard(0)], &[n]).unwrap();
            for rank in 0..12 {
                let (a, b, c) = (rank / 6, rank / 2 % 3, rank % 2);
                assert_eq!(indices(&hsdp, rank), chunk(&chunk(&all, 2, c), 3, b));
                assert_eq!(indices(&deep, rank), chunk(&chunk(&chunk(&all, 2, c), 3, b), 2, a));
                assert_eq!(indices(&mixed, rank), chunk(&chunk(&chunk(&all, 3, b), 2, a), 2, c));
            }
        }
    }

    #[test]
    fn without_the_inner_dimension_a_rank_holds_a_chunk_of_every_piece() {
        for (n, pieces, ranks) in (0..30).flat_map(|n| (2..5).flat_map(move |f| (1..4).map(move |r| (n, f, r)))) {
            let all: Vec<usize> = (0..n).collect();
            let spec = spec(&[ranks], &[strided(0, pieces)], &[n]).unwrap();
            for rank in 0..ranks {
                let expected: Vec<_> = (0..pieces).flat_map(|j| chunk(&chunk(&all, pieces, j), ranks, rank)).collect();
                assert_eq!(indices(&spec, rank), expected, "n {n} pieces {pieces} ranks {ranks}");
            }
        }
    }

    #[test]
    fn regions_of_several_dimensions_are_all_combinations() {
        let spec = spec(&[2, 2], &[strided(0, 2), strided(1, 2)], &[4, 4]).unwrap();
        let offsets: Vec<_> = spec.local_regions(1).unwrap().into_iter().map(|region| region.offsets).collect();
        assert_eq!(offsets, [[0, 1], [0, 3], [2, 1], [2, 3]]);
        assert!(spec.local_region(1).unwrap_err().to_string().contains("[_S(0, 2), _S(1, 2)]"));
    }

    #[test]
    fn scalars_and_empty_tensors() {
        assert_eq!(spec(&[3], &[Replicate], &[]).unwrap().local_regions(2).unwrap(), [Region::whole(&[])]);
        let empty = spec(&[3], &[Shard(1)], &[2, 0]).unwrap();
        assert_eq!((empty.local_shape(1).unwrap(), empty.local_regions(1).unwrap()), (vec![2, 0], vec![]));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (sum, max, avg) = (Partial(ReduceOp::Sum), Partial(ReduceOp::Max), Partial(ReduceOp::Avg));
        for (result, part) in [
            (spec(&[2, 2], &[Shard(0)], &[4]), "(a: 2, b: 2) has 2 dimensions but there are 1 placements"),
            (spec(&[2], &[Shard(1)], &[4]), "S(1) on a tensor of shape [4]: it has no dimension 1"),
            (spec(&[2], &[Shard(0)], &[]), "no dimension 0"),
            (spec(&[2], &[strided(2, 2)], &[4, 4]), "_S(2, 2) on a tensor"),
            (spec(&[2], &[strided(0, 0)], &[4]), "split factor of 0"),
            (
                spec(&[2, 3], &[strided(0, 2), Shard(0)], &[4]),
                "[1, 3] pieces one after the other, none of which is split factor 2",
            ),
            (
                spec(&[2, 2], &[strided(0, 4), strided(0, 2)], &[4]),
                "\"a\" of mesh (a: 2, b: 2): a mesh dimension to its right",
            ),
            (spec(&[2, 2], &[sum, max], &[4]), "P(sum) and P(max)"),
            (spec(&[2], &[Replicate], &[usize::MAX, 2]), "larger than memory"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let error = spec(&[2], &[Replicate], &[4]).unwrap().local_shape(2).unwrap_err().to_string();
        assert!(error.contains("rank 2 is outside mesh (a: 2)"), "{error}");
        let mesh = MeshLayout::new(&[("a", 2), ("b", 2)]).unwrap();
        assert!(spec(&[2, 2], &[sum, avg], &[4]).is_ok());
        let error = DTensorSpec::new(mesh, &[sum, avg], &[4], DType::I64).unwrap_err().to_string();
        assert!(error.contains("P(avg) of I64"), "{error}");
    }
}
