//! Shard layout math: which elements of a global tensor a rank holds, computed without communication.
//!
//! Uneven sharding is `torch.chunk`'s: chunks of `ceil(n / world)` elements, so that the last ranks hold less or nothing.

use std::ops::Range;

use crate::{Error, MeshLayout, Placement, Result};

/// The indices that chunk `index` of `chunks` holds of a dimension of `n` elements.
///
/// ```
/// use fsdp_core::layout::chunk_range;
/// assert_eq!(chunk_range(5, 4, 0), 0..2);
/// assert_eq!(chunk_range(5, 4, 2), 4..5);
/// assert!(chunk_range(5, 4, 3).is_empty());
/// ```
pub fn chunk_range(n: usize, chunks: usize, index: usize) -> Range<usize> {
    let chunk = n.div_ceil(chunks.max(1));
    let start = (chunk * index).min(n);
    start..(start + chunk).min(n)
}

/// A box of a global tensor: where it starts and how far it reaches in every dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The first index in every dimension.
    pub offsets: Vec<usize>,
    /// The extent in every dimension.
    pub sizes: Vec<usize>,
}

impl Region {
    /// All of a tensor.
    pub fn whole(shape: &[usize]) -> Self {
        Region { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// What this box and another of the same tensor have in common, if anything.
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        let mut both =
            Region { offsets: Vec::with_capacity(self.offsets.len()), sizes: Vec::with_capacity(self.sizes.len()) };
        for dim in 0..self.offsets.len() {
            let start = self.offsets[dim].max(other.offsets[dim]);
            let end = (self.offsets[dim] + self.sizes[dim]).min(other.offsets[dim] + other.sizes[dim]);
            if start >= end {
                return None;
            }
            both.offsets.push(start);
            both.sizes.push(end - start);
        }
        Some(both)
    }
}

/// The box of a tensor of shape `shape` that the rank at `coordinate` of `mesh` holds under `placements` (one a mesh dimension).
///
/// A tensor dimension that several mesh dimensions shard is cut by the leftmost of them first, as in PyTorch.
///
/// # Errors
/// When the numbers of placements, coordinates and mesh dimensions differ, or a placement shards a dimension that the tensor has not.
///
/// ```
/// use fsdp_core::{layout::local_region, MeshLayout, Placement};
/// let mesh = MeshLayout::new(&[("replicate", 2), ("shard", 2)]).unwrap();
/// let region = local_region(&[5, 3], &mesh, &[1, 1], &[Placement::Replicate, Placement::Shard(0)]).unwrap();
/// assert_eq!((region.offsets, region.sizes), (vec![3, 0], vec![2, 3]));
/// ```
pub fn local_region(
    shape: &[usize],
    mesh: &MeshLayout,
    coordinate: &[usize],
    placements: &[Placement],
) -> Result<Region> {
    let dims = mesh.shape().len();
    if placements.len() != dims || coordinate.len() != dims {
        return Err(Error::Layout(format!(
            "mesh {mesh} has {dims} dimensions; got {} placements and {} coordinates: pass one of each a dimension",
            placements.len(),
            coordinate.len()
        )));
    }
    let mut region = Region::whole(shape);
    for (dim, placement) in placements.iter().enumerate() {
        let Placement::Shard(tensor_dim) = *placement else { continue };
        if tensor_dim >= shape.len() {
            return Err(Error::Layout(format!(
                "{placement} on a tensor of shape {shape:?}: it has no dimension {tensor_dim}"
            )));
        }
        let range = chunk_range(region.sizes[tensor_dim], mesh.shape()[dim], coordinate[dim]);
        region.offsets[tensor_dim] += range.start;
        region.sizes[tensor_dim] = range.len();
    }
    Ok(region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_a_dimension_once_and_in_order(n in 0usize..50, chunks in 1usize..9) {
            let all: Vec<usize> = (0..chunks).flat_map(|i| chunk_range(n, chunks, i)).collect();
            prop_assert_eq!(all, (0..n).collect::<Vec<_>>());
        }

        #[test]
        fn the_ranks_of_a_mesh_cover_a_tensor_once(
            rows in 0usize..9, cols in 1usize..7, a in 1usize..4, b in 1usize..4, second in 0usize..2,
        ) {
            let mesh = MeshLayout::new(&[("a", a), ("b", b)]).unwrap();
            let mut seen = vec![0; rows * cols];
            for rank in 0..mesh.size() {
                let coordinate = mesh.coordinate_of(rank).unwrap();
                let region = local_region(&[rows, cols], &mesh, &coordinate, &[Placement::Shard(0), Placement::Shard(second)]).unwrap();
                for i in 0..region.sizes[0] {
                    for j in 0..region.sizes[1] {
                        seen[(region.offsets[0] + i) * cols + region.offsets[1] + j] += 1;
                    }
                }
            }
            prop_assert!(seen.iter().all(|&count| count == 1));
        }
    }

    #[test]
    fn a_dimension_that_is_not_there_is_named() {
        let mesh = MeshLayout::new(&[("dp", 2)]).unwrap();
        let error = local_region(&[4], &mesh, &[0], &[Placement::Shard(1)]).unwrap_err();
        assert!(error.to_string().contains("no dimension 1"), "{error}");
    }
}
