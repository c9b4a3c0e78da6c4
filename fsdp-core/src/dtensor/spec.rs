//! The part of a tensor that each rank of a mesh holds, computed without communication.

use std::ops::Range;

use crate::{
    DType, Error, MeshLayout, Placement, ReduceOp, Result,
    layout::{self, DimSplit, Ranges, Region},
};

/// The layout of a DTensor: a global tensor's shape and dtype, a mesh, and the placements on the mesh.
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
    /// The splits of each tensor dimension.
    splits: Vec<Vec<DimSplit>>,
}

impl DTensorSpec {
    /// Describes a tensor of shape `shape` under `placements`, one a mesh dimension.
    ///
    /// # Errors
    /// Returns [`Error::Layout`] when:
    ///
    /// - the number of placements is not the number of mesh dimensions;
    /// - a placement shards a dimension that the tensor does not have;
    /// - a split factor is not a product of sizes of mesh dimensions to its right that shard the same dimension;
    /// - partials do not combine (only sums and averages do, and an operation with itself);
    /// - an average is over integers;
    /// - the tensor is larger than the address space.
    pub fn new(mesh: MeshLayout, placements: &[Placement], shape: &[usize], dtype: DType) -> Result<Self> {
        let splits = layout::splits(shape, &mesh, placements)?;
        check_partials(placements, dtype)?;
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, &size| bytes.checked_mul(size.max(1)));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::Layout(format!("a tensor of shape {shape:?} is larger than memory")));
        }
        Ok(DTensorSpec { mesh, placements: placements.to_vec(), shape: shape.to_vec(), dtype, splits })
    }

    /// Returns the spec of the same tensor under other placements.
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

    /// Returns the shape of the local tensor of `rank`.
    ///
    /// # Errors
    /// Returns an error when `rank` is outside the mesh.
    pub fn local_shape(&self, rank: usize) -> Result<Vec<usize>> {
        Ok(shape_of(&self.ranges(rank)?))
    }

    /// Returns the box of the tensor that `rank` holds. A rank that holds nothing has an empty box.
    ///
    /// # Errors
    /// Returns an error when `rank` is outside the mesh, or holds several boxes, as under a
    /// [`Placement::StridedShard`].
    pub fn local_region(&self, rank: usize) -> Result<Region> {
        layout::one_region(&self.ranges(rank)?, &self.placements)
    }

    /// Returns the boxes of the tensor that `rank` holds, by ascending offsets; none when it holds nothing. Only a
    /// [`Placement::StridedShard`] makes several boxes. The local tensor concatenates them in the order of the global
    /// tensor.
    ///
    /// # Errors
    /// Returns an error when `rank` is outside the mesh.
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

    /// Returns the indices of each tensor dimension that `rank` holds, ascending.
    pub(super) fn ranges(&self, rank: usize) -> Result<Vec<Ranges>> {
        let coordinate = self.mesh.coordinate_of(rank).ok_or_else(|| {
            Error::Layout(format!("rank {rank} is outside mesh {} of ranks 0..{}", self.mesh, self.mesh.size()))
        })?;
        Ok(layout::ranges(&self.shape, &self.splits, &self.mesh, &coordinate))
    }

    /// Splits of each tensor dimension.
    pub(super) fn splits(&self) -> &[Vec<DimSplit>] {
        &self.splits
    }

    /// Returns whether `mesh_dim` is the last split of a tensor dimension. The ranks along it then hold, together,
    /// everything that the other splits leave.
    pub(super) fn is_last_split(&self, mesh_dim: usize) -> bool {
        let tensor_dim = self.placements.get(mesh_dim).and_then(|placement| placement.shard_dim());
        let last = tensor_dim.and_then(|dim| self.splits[dim].last());
        last.is_some_and(|split| matches!(split, DimSplit::Mesh(dim) | DimSplit::Owned(dim, _) if *dim == mesh_dim))
    }
}

/// Returns the number of indices in each dimension.
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
            "P({first}) and P({other}) in one layout: their order would change the tensor; only sum and avg combine"
        )));
    }
    if !dtype.is_float() && (first == ReduceOp::Avg || ops.any(|op| op == ReduceOp::Avg)) {
        return Err(Error::Layout(format!(
            "P(avg) of {dtype}: an average of integers is not an integer; use sum or a floating-point dtype"
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
    fn fsdp_shards_tensor_parallel_shards() {
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
    fn hsdp_and_two_inner_dimensions() {
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
    fn a_lone_strided_shard_holds_a_chunk_of_every_piece() {
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
    fn invalid_layouts_are_refused() {
        let (sum, max, avg) = (Partial(ReduceOp::Sum), Partial(ReduceOp::Max), Partial(ReduceOp::Avg));
        for (result, part) in [
            (spec(&[2, 2], &[Shard(0)], &[4]), "(a: 2, b: 2) has 2 dimensions, found 1 placements"),
            (spec(&[2], &[Shard(1)], &[4]), "S(1) on a tensor of shape [4]: no dimension 1"),
            (spec(&[2], &[Shard(0)], &[]), "no dimension 0"),
            (spec(&[2], &[strided(2, 2)], &[4, 4]), "_S(2, 2) on a tensor"),
            (spec(&[2], &[strided(0, 0)], &[4]), "split factor of 0"),
            (spec(&[2, 3], &[strided(0, 2), Shard(0)], &[4]), "split factor 2 is not one of [1, 3]"),
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
