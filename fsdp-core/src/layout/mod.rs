//! Shard layout math: which elements of a global tensor a rank holds, computed without communication.
//!
//! Uneven sharding is `torch.chunk`'s: chunks of `ceil(n / world)` elements, so that the last ranks hold less or
//! nothing.

mod chunk;
mod cuts;
mod region;

pub use chunk::chunk_range;
pub(crate) use cuts::{Cut, Ranges, cuts, ranges};
pub use region::Region;

use crate::{Error, MeshLayout, Placement, Result};

/// The box of a tensor of shape `shape` that the rank at `coordinate` of `mesh` holds under `placements` (one a mesh
/// dimension).
///
/// A tensor dimension that several mesh dimensions shard is cut by the leftmost of them first, as in PyTorch; a
/// [`Placement::StridedShard`] comes later, as it says. [`crate::dtensor::DTensorSpec`] asks the same of a rank.
///
/// # Errors
/// When the numbers of placements, coordinates and mesh dimensions differ, a coordinate is outside the mesh, a
/// placement does not fit the tensor or the mesh, or the rank holds several boxes
/// ([`crate::dtensor::DTensorSpec::local_regions`] lists them).
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
    let cuts = cuts(shape, mesh, placements)?;
    if mesh.rank_at(coordinate).is_none() {
        return Err(Error::Layout(format!(
            "coordinate {coordinate:?} is outside mesh {mesh}: pass one index a mesh dimension, below its size"
        )));
    }
    one_region(&ranges(shape, &cuts, mesh, coordinate), placements)
}

/// The box that `ranges`, those of each dimension, make.
pub(crate) fn one_region(ranges: &[Ranges], placements: &[Placement]) -> Result<Region> {
    let mut region = Region { offsets: Vec::with_capacity(ranges.len()), sizes: Vec::with_capacity(ranges.len()) };
    for (dim, ranges) in ranges.iter().enumerate() {
        let [range] = ranges.as_slice() else {
            let placements: Vec<_> = placements.iter().map(ToString::to_string).collect();
            return Err(Error::Layout(format!(
                "under [{}] a rank holds {} separate ranges of tensor dimension {dim}, which are no single box: ask \
                 for its local_regions",
                placements.join(", "),
                ranges.len()
            )));
        };
        region.offsets.push(range.start);
        region.sizes.push(range.len());
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
                let placements = [Placement::Shard(0), Placement::Shard(second)];
                let region = local_region(&[rows, cols], &mesh, &coordinate, &placements).unwrap();
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
        let error = local_region(&[4], &mesh, &[2], &[Placement::Shard(0)]).unwrap_err();
        assert!(error.to_string().contains("[2] is outside mesh (dp: 2)"), "{error}");
        let strided = Placement::StridedShard { dim: 0, split_factor: 2 };
        let error = local_region(&[8], &mesh, &[0], &[strided]).unwrap_err();
        assert!(error.to_string().contains("local_regions"), "{error}");
    }
}
