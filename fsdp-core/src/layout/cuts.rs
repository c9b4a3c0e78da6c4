//! In which order the mesh dimensions cut a tensor dimension, and what the cuts leave.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges are what this is about")]

use std::ops::Range;

use super::chunk::chunk_range;
use crate::{Error, MeshLayout, Placement, Result};

/// Indices of one tensor dimension, as ascending ranges.
pub(crate) type Ranges = Vec<Range<usize>>;

/// One cut of a tensor dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Into chunks, of which a rank keeps the one at its coordinate in this mesh dimension.
    Mesh(usize),
    /// Into this many pieces, all of which are kept.
    Pieces(usize),
}

/// The cuts of each dimension of a tensor of shape `shape`, first cut first.
///
/// Two properties that the planning of redistributions rests on: without the placement of a dimension's last cut, the
/// other cuts stay what they are; and equal cuts come of equal placements, but that a strided shard with split factor 1
/// is a shard.
pub(crate) fn cuts(shape: &[usize], mesh: &MeshLayout, placements: &[Placement]) -> Result<Vec<Vec<Cut>>> {
    if placements.len() != mesh.shape().len() {
        return Err(Error::Layout(format!(
            "mesh {mesh} has {} dimensions but there are {} placements: pass one a mesh dimension",
            mesh.shape().len(),
            placements.len()
        )));
    }
    let mut cuts = vec![Vec::new(); shape.len()];
    // Right to left: a shard goes before those to its right, a strided shard after as many as its split factor says.
    for (mesh_dim, &placement) in placements.iter().enumerate().rev() {
        let (tensor_dim, split_factor) = match placement {
            Placement::Shard(dim) => (dim, 1),
            Placement::StridedShard { dim, split_factor } => (dim, split_factor),
            Placement::Replicate | Placement::Partial(_) => continue,
        };
        let Some(cuts) = cuts.get_mut(tensor_dim) else {
            return Err(Error::Layout(format!(
                "{placement} on a tensor of shape {shape:?}: it has no dimension {tensor_dim}"
            )));
        };
        insert(cuts, mesh, mesh_dim, split_factor).map_err(|why| {
            Error::Layout(format!("{placement} on dimension \"{}\" of mesh {mesh}: {why}", mesh.names()[mesh_dim]))
        })?;
    }
    Ok(cuts)
}

fn insert(cuts: &mut Vec<Cut>, mesh: &MeshLayout, mesh_dim: usize, split_factor: usize) -> Result<(), String> {
    if split_factor == 0 {
        return Err("a split factor of 0 leaves no pieces to cut: it is the product of the sizes of the mesh \
                    dimensions that cut first"
            .into());
    }
    if split_factor > 1 && cuts.iter().any(|cut| matches!(cut, Cut::Pieces(_))) {
        return Err("a mesh dimension to its right is a strided shard of pieces that no mesh dimension cuts; \
                    only one such can shard a tensor dimension: use a mesh that has the dimension that cuts first"
            .into());
    }
    let mut products = vec![1usize];
    for cut in &*cuts {
        let (Cut::Mesh(dim), Some(&last)) = (cut, products.last()) else { break };
        products.push(last * mesh.shape()[*dim]);
    }
    match products.iter().position(|&product| product == split_factor) {
        Some(place) => cuts.insert(place, Cut::Mesh(mesh_dim)),
        None if cuts.is_empty() => cuts.extend([Cut::Pieces(split_factor), Cut::Mesh(mesh_dim)]),
        None => {
            return Err(format!(
                "the mesh dimensions to its right that shard the same tensor dimension cut it into {products:?} \
                 pieces one after the other, \
                 none of which is split factor {split_factor}"
            ));
        }
    }
    Ok(())
}

/// What the rank at `coordinate` holds of each dimension, in ascending order: at least one range, which is empty when
/// it holds nothing.
pub(crate) fn ranges(shape: &[usize], cuts: &[Vec<Cut>], mesh: &MeshLayout, coordinate: &[usize]) -> Vec<Ranges> {
    let held = |(&n, cuts): (&usize, &Vec<Cut>)| {
        let mut ranges = vec![0..n];
        for &cut in cuts {
            ranges = match cut {
                Cut::Mesh(dim) => ranges.iter().map(|range| chunk(range, mesh.shape()[dim], coordinate[dim])).collect(),
                Cut::Pieces(pieces) => ranges.iter().flat_map(|range| all_chunks(range, pieces)).collect(),
            };
        }
        joined(ranges)
    };
    shape.iter().zip(cuts).map(held).collect()
}

fn chunk(range: &Range<usize>, chunks: usize, index: usize) -> Range<usize> {
    let within = chunk_range(range.len(), chunks, index);
    range.start + within.start..range.start + within.end
}

/// The chunks that are not empty, or one that is.
fn all_chunks(range: &Range<usize>, chunks: usize) -> impl Iterator<Item = Range<usize>> {
    let (range, size) = (range.clone(), range.len().div_ceil(chunks).max(1));
    (0..range.len().div_ceil(size).max(1)).map(move |index| chunk(&range, chunks, index))
}

/// The same indices in as few ranges as can be.
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
