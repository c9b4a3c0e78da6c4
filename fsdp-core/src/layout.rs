//! Shard layout math: the elements of a global tensor that a rank holds, computed without communication.
//!
//! Uneven shards are those of `torch.chunk`: chunks of `ceil(n / world)` elements, so the last ranks hold fewer
//! elements or none.

#![allow(clippy::single_range_in_vec_init, reason = "a rank holds a list of ranges, often of one")]

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, MeshLayout, Placement, Result};

/// Returns the box of a tensor of shape `shape` that the rank at `coordinate` of `mesh` holds under `placements` (one a
/// mesh dimension).
///
/// If several mesh dimensions shard a tensor dimension, the leftmost splits it first, as in PyTorch; a
/// [`Placement::StridedShard`] splits it later. [`crate::dtensor::DTensorSpec`] answers the same question by rank.
///
/// # Errors
/// Returns an error when the numbers of placements, coordinates and mesh dimensions differ, when a coordinate is
/// outside the mesh, or when a placement does not fit the tensor or the mesh. Also when the rank holds several boxes:
/// use [`crate::dtensor::DTensorSpec::local_regions`].
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
    let splits = splits(shape, mesh, placements)?;
    if mesh.rank_at(coordinate).is_none() {
        return Err(Error::Layout(format!(
            "coordinate {coordinate:?} is outside mesh {mesh}: pass one index a mesh dimension, below its size"
        )));
    }
    one_region(&ranges(shape, &splits, mesh, coordinate), placements)
}

/// Returns the box of one range a dimension.
pub(crate) fn one_region(ranges: &[Ranges], placements: &[Placement]) -> Result<Region> {
    let mut region = Region { offsets: Vec::with_capacity(ranges.len()), sizes: Vec::with_capacity(ranges.len()) };
    for (dim, ranges) in ranges.iter().enumerate() {
        let [range] = ranges.as_slice() else {
            let placements: Vec<_> = placements.iter().map(ToString::to_string).collect();
            return Err(Error::Layout(format!(
                "under [{}] a rank holds {} ranges of tensor dimension {dim}, not one box: use local_regions",
                placements.join(", "),
                ranges.len()
            )));
        };
        region.offsets.push(range.start);
        region.sizes.push(range.len());
    }
    Ok(region)
}

/// Returns the indices of chunk `index` of `chunks` in a dimension of `n` elements, as `torch.chunk` does.
///
/// ```
/// use fsdp_core::layout::chunk_range;
/// assert_eq!(chunk_range(5, 4, 0), 0..2);
/// assert_eq!(chunk_range(5, 4, 2), 4..5);
/// assert!(chunk_range(5, 4, 3).is_empty());
/// ```
pub fn chunk_range(n: usize, chunks: usize, index: usize) -> Range<usize> {
    let chunk = n.div_ceil(chunks.max(1));
    let start = chunk.saturating_mul(index).min(n);
    start..start.saturating_add(chunk).min(n)
}

/// Returns the length that all ranks' shares can be padded to, where the concatenation of the padded shares begins with
/// the concatenation of the shares: for chunks as [`chunk_range`] makes them. `None` if no share needs padding, and if only
/// one rank has elements.
///
/// ```
/// use fsdp_core::layout::padded_share;
/// assert_eq!(padded_share(&[3, 3, 2, 0]), Some(3));
/// assert_eq!((padded_share(&[3, 3]), padded_share(&[3, 0]), padded_share(&[2, 3])), (None, None, None));
/// ```
pub fn padded_share(counts: &[usize]) -> Option<usize> {
    let (&longest, others) = counts.split_first()?;
    let mut shorter = others.iter().skip_while(|&&count| count == longest);
    let are_chunks = *shorter.next()? < longest && shorter.all(|&count| count == 0);
    (are_chunks && others.first() != Some(&0)).then_some(longest)
}

/// A box of a global tensor: its offset and its extent in every dimension.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region {
    /// First index in every dimension.
    pub offsets: Vec<usize>,
    /// Number of indices in every dimension.
    pub sizes: Vec<usize>,
}

impl Region {
    /// Returns the box of a whole tensor.
    pub fn whole(shape: &[usize]) -> Self {
        Region { offsets: vec![0; shape.len()], sizes: shape.to_vec() }
    }

    /// Returns the number of elements, saturating.
    pub fn elements(&self) -> usize {
        self.sizes.iter().fold(1, |elements, &size| elements.saturating_mul(size))
    }

    /// Returns whether the box has no elements.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// Returns the intersection with another box of the same tensor, or `None` if it is empty.
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

    /// Cuts the box into boxes of at most `most` elements, but at least one, which follow each other in row-major order.
    ///
    /// ```
    /// use fsdp_core::layout::Region;
    ///
    /// let pieces: Vec<_> = Region::whole(&[5, 3]).pieces(7).collect();
    /// let rows = |start, count| Region { offsets: vec![start, 0], sizes: vec![count, 3] };
    /// assert_eq!(pieces, [rows(0, 2), rows(2, 2), rows(4, 1)]);
    /// ```
    pub fn pieces(&self, most: usize) -> impl Iterator<Item = Region> + use<> {
        // Pieces span the dimensions after `dim`, cut `dim` into steps, and hold one index of the dimensions before it.
        let mut dim = self.sizes.len();
        let mut row = 1usize;
        while dim > 0 && row.saturating_mul(self.sizes[dim - 1]) <= most {
            dim -= 1;
            row *= self.sizes[dim];
        }
        let outer = self.sizes[..dim.saturating_sub(1)].to_vec();
        let (extent, step) = match dim {
            0 => (1, 1),
            _ => (self.sizes[dim - 1], (most / row.max(1)).max(1)),
        };
        let each = extent.div_ceil(step);
        let count = if self.is_empty() { 0 } else { outer.iter().product::<usize>() * each };
        let region = self.clone();
        (0..count).map(move |index| {
            let mut piece = region.clone();
            if dim > 0 {
                let at = index % each * step;
                piece.offsets[dim - 1] += at;
                piece.sizes[dim - 1] = step.min(extent - at);
            }
            let mut rest = index / each;
            for dim in (0..outer.len()).rev() {
                piece.offsets[dim] += rest % outer[dim];
                piece.sizes[dim] = 1;
                rest /= outer[dim];
            }
            piece
        })
    }
}

/// Indices of one tensor dimension, as ascending ranges.
pub(crate) type Ranges = Vec<Range<usize>>;

/// One split of a tensor dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DimSplit {
    /// Splits into chunks; a rank keeps the chunk at its coordinate in this mesh dimension.
    Mesh(usize),
    /// The rank at the second coordinate in the mesh dimension keeps all.
    Owned(usize, usize),
    /// Splits into this number of pieces and keeps all of them.
    Pieces(usize),
}

/// Returns the splits of each dimension of a tensor of shape `shape`, in order.
///
/// Planning relies on two properties. Removing the placement of the last split keeps the other splits. Equal splits
/// have equal placements, except that a strided shard of split factor 1 is a shard.
pub(crate) fn splits(shape: &[usize], mesh: &MeshLayout, placements: &[Placement]) -> Result<Vec<Vec<DimSplit>>> {
    if placements.len() != mesh.shape().len() {
        return Err(Error::Layout(format!(
            "mesh {mesh} has {} dimensions, found {} placements: pass one a mesh dimension",
            mesh.shape().len(),
            placements.len()
        )));
    }
    let mut splits = vec![Vec::new(); shape.len()];
    // Right to left: a shard goes before the shards to its right, a strided shard after as many as its split factor
    // says.
    for (mesh_dim, &placement) in placements.iter().enumerate().rev() {
        let (tensor_dim, split_factor, split) = match placement {
            Placement::Shard(dim) => (dim, 1, DimSplit::Mesh(mesh_dim)),
            Placement::StridedShard { dim, split_factor } => (dim, split_factor, DimSplit::Mesh(mesh_dim)),
            Placement::OwnedBy { rank, .. } if rank >= mesh.shape()[mesh_dim] => {
                return Err(Error::Layout(format!(
                    "{placement} on dimension \"{}\" of mesh {mesh}: it has no rank {rank}",
                    mesh.names()[mesh_dim]
                )));
            }
            Placement::OwnedBy { dim, rank } => (dim, 1, DimSplit::Owned(mesh_dim, rank)),
            Placement::Replicate | Placement::Partial(_) => continue,
        };
        let Some(splits) = splits.get_mut(tensor_dim) else {
            return Err(Error::Layout(format!(
                "{placement} on a tensor of shape {shape:?}: no dimension {tensor_dim}"
            )));
        };
        insert(splits, mesh, split, split_factor).map_err(|why| {
            Error::Layout(format!("{placement} on dimension \"{}\" of mesh {mesh}: {why}", mesh.names()[mesh_dim]))
        })?;
    }
    Ok(splits)
}

fn insert(splits: &mut Vec<DimSplit>, mesh: &MeshLayout, new: DimSplit, split_factor: usize) -> Result<(), String> {
    if split_factor == 0 {
        return Err(
            "a split factor of 0; expected the product of the sizes of the mesh dimensions that split first".into()
        );
    }
    if split_factor > 1 && splits.iter().any(|split| matches!(split, DimSplit::Pieces(_))) {
        return Err("a mesh dimension to its right is a strided shard whose pieces no mesh dimension splits; \
                    use a mesh that includes the dimension that splits first"
            .into());
    }
    let mut products = vec![1usize];
    for split in &*splits {
        let (DimSplit::Mesh(dim) | DimSplit::Owned(dim, _), Some(&last)) = (split, products.last()) else { break };
        products.push(last * mesh.shape()[*dim]);
    }
    match products.iter().position(|&product| product == split_factor) {
        Some(place) => splits.insert(place, new),
        None if splits.is_empty() => splits.extend([DimSplit::Pieces(split_factor), new]),
        None => {
            return Err(format!(
                "split factor {split_factor} is not one of {products:?}, the numbers of pieces \
                 that the mesh dimensions to its right make"
            ));
        }
    }
    Ok(())
}

/// Returns the indices of each dimension that the rank at `coordinate` holds: at least one range, which is empty when
/// the rank holds nothing.
pub(crate) fn ranges(
    shape: &[usize],
    splits: &[Vec<DimSplit>],
    mesh: &MeshLayout,
    coordinate: &[usize],
) -> Vec<Ranges> {
    let held = |(&n, splits): (&usize, &Vec<DimSplit>)| {
        let mut ranges = vec![0..n];
        for &split in splits {
            ranges = match split {
                DimSplit::Mesh(dim) => {
                    ranges.iter().map(|range| chunk(range, mesh.shape()[dim], coordinate[dim])).collect()
                }
                DimSplit::Owned(dim, rank) if coordinate[dim] == rank => ranges,
                DimSplit::Owned(..) => ranges.iter().map(|range| range.start..range.start).collect(),
                DimSplit::Pieces(pieces) => ranges.iter().flat_map(|range| all_chunks(range, pieces)).collect(),
            };
        }
        joined(ranges)
    };
    shape.iter().zip(splits).map(held).collect()
}

fn chunk(range: &Range<usize>, chunks: usize, index: usize) -> Range<usize> {
    let within = chunk_range(range.len(), chunks, index);
    range.start + within.start..range.start + within.end
}

/// Returns the chunks that are not empty, or one empty chunk.
fn all_chunks(range: &Range<usize>, chunks: usize) -> impl Iterator<Item = Range<usize>> {
    let (range, size) = (range.clone(), range.len().div_ceil(chunks).max(1));
    (0..range.len().div_ceil(size).max(1)).map(move |index| chunk(&range, chunks, index))
}

/// Merges adjacent ranges.
fn joined(ranges: Ranges) -> Ranges {
    let mut joined = Ranges::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(_) if range.is_empty() => {}
            Some(last) if last.start == last.end => *last = range,
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_a_region_in_order(
            sizes in prop::collection::vec(0usize..6, 0..4),
            offset in 0usize..3,
            most in 1usize..50,
        ) {
            let region = Region { offsets: vec![offset; sizes.len()], sizes: sizes.clone() };
            let strides: Vec<usize> = (0..sizes.len()).map(|dim| sizes[dim + 1..].iter().product()).collect();
            let mut next = 0;
            for piece in region.pieces(most) {
                prop_assert!(piece.elements() <= most && !piece.is_empty());
                let first: usize = (0..sizes.len()).map(|dim| (piece.offsets[dim] - offset) * strides[dim]).sum();
                let last: usize = (0..sizes.len())
                    .map(|dim| (piece.offsets[dim] - offset + piece.sizes[dim] - 1) * strides[dim])
                    .sum();
                // It begins where the previous piece ended, without gaps.
                prop_assert_eq!((first, last + 1 - first), (next, piece.elements()));
                next += piece.elements();
            }
            prop_assert_eq!(next, region.elements());
        }

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
    fn one_rank_of_a_dimension_owns_all_rows() {
        let mesh = MeshLayout::new(&[("shard", 2), ("ep", 3)]).unwrap();
        let strided = Placement::StridedShard { dim: 0, split_factor: 3 };
        let rows = |coordinate: &[usize]| {
            let region =
                local_region(&[5, 4], &mesh, coordinate, &[strided, Placement::OwnedBy { dim: 0, rank: 1 }]).unwrap();
            assert_eq!(region.sizes[1], 4);
            (region.offsets[0], region.sizes[0])
        };
        assert_eq!((rows(&[0, 1]), rows(&[1, 1])), ((0, 3), (3, 2)));
        for coordinate in [[0, 0], [1, 0], [0, 2], [1, 2]] {
            assert_eq!(rows(&coordinate).1, 0);
        }
        // The other dimension is divided as without an owner.
        let region =
            local_region(&[5, 4], &mesh, &[1, 1], &[Placement::Shard(1), Placement::OwnedBy { dim: 0, rank: 1 }])
                .unwrap();
        assert_eq!((region.offsets, region.sizes), (vec![0, 2], vec![5, 2]));
        let error = local_region(&[5], &mesh, &[0, 0], &[Placement::Replicate, Placement::OwnedBy { dim: 0, rank: 3 }])
            .unwrap_err();
        assert!(error.to_string().contains("O(0, 3) on dimension \"ep\""), "{error}");
    }

    #[test]
    fn invalid_arguments_are_refused() {
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
