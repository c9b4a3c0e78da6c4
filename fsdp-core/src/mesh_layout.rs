//! The arithmetic of a mesh, without process groups. Checkpoint plans use it for meshes that do not run.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A grid of ranks 0..n, row-major: the last dimension varies fastest.
///
/// ```
/// use fsdp_core::MeshLayout;
/// let mesh = MeshLayout::new(&[("replicate", 2), ("shard", 4)]).unwrap();
/// assert_eq!(mesh.coordinate_of(6), Some(vec![1, 2]));
/// assert_eq!(mesh.rank_at(&[1, 2]), Some(6));
/// assert_eq!(mesh.ranks_along(0, 6), Some(vec![2, 6]));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeshLayout {
    names: Vec<String>,
    shape: Vec<usize>,
}

impl MeshLayout {
    /// Makes a mesh of these dimensions, outermost first.
    ///
    /// # Errors
    /// Returns an error when there is no dimension, a size is zero, or a name is empty or repeated.
    pub fn new(dims: &[(&str, usize)]) -> Result<Self> {
        if dims.is_empty() {
            return Err(Error::Mesh("a mesh needs at least one dimension".into()));
        }
        for (i, &(name, size)) in dims.iter().enumerate() {
            if size == 0 {
                return Err(Error::Mesh(format!("mesh dimension \"{name}\" has size 0; sizes start at 1")));
            }
            if name.is_empty() || dims[..i].iter().any(|&(other, _)| other == name) {
                return Err(Error::Mesh(format!(
                    "mesh dimension {i} is named \"{name}\"; every dimension needs a unique name"
                )));
            }
        }
        dims.iter()
            .try_fold(1usize, |product, &(_, size)| product.checked_mul(size))
            .ok_or_else(|| Error::Mesh(format!("the product of the mesh dimensions {dims:?} is too large")))?;
        Ok(MeshLayout {
            names: dims.iter().map(|&(name, _)| name.to_string()).collect(),
            shape: dims.iter().map(|&(_, size)| size).collect(),
        })
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the names of the dimensions.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the position of the dimension `name`.
    ///
    /// # Errors
    /// Returns an error that lists the dimensions when `name` is unknown.
    pub fn dim(&self, name: &str) -> Result<usize> {
        self.names
            .iter()
            .position(|have| have == name)
            .ok_or_else(|| Error::Mesh(format!("mesh {self} has no dimension \"{name}\"; it has {:?}", self.names)))
    }

    /// Returns the coordinate of `rank`, or `None` when the rank is outside the mesh.
    pub fn coordinate_of(&self, rank: usize) -> Option<Vec<usize>> {
        if rank >= self.size() {
            return None;
        }
        let mut rest = rank;
        let mut coordinate = vec![0; self.shape.len()];
        for dim in (0..self.shape.len()).rev() {
            coordinate[dim] = rest % self.shape[dim];
            rest /= self.shape[dim];
        }
        Some(coordinate)
    }

    /// Returns the rank at `coordinate`, or `None` when the coordinate is outside the mesh.
    pub fn rank_at(&self, coordinate: &[usize]) -> Option<usize> {
        if coordinate.len() != self.shape.len() {
            return None;
        }
        coordinate.iter().zip(&self.shape).try_fold(0, |rank, (&at, &size)| (at < size).then_some(rank * size + at))
    }

    /// Returns the ranks that differ from `rank` in dimension `dim` only, in order along the dimension.
    pub fn ranks_along(&self, dim: usize, rank: usize) -> Option<Vec<usize>> {
        let mut coordinate = self.coordinate_of(rank)?;
        (0..*self.shape.get(dim)?)
            .map(|at| {
                coordinate[dim] = at;
                self.rank_at(&coordinate)
            })
            .collect()
    }
}

impl std::fmt::Display for MeshLayout {
    /// `(replicate: 2, shard: 4)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(")?;
        for (i, (name, size)) in self.names.iter().zip(&self.shape).enumerate() {
            write!(f, "{}{name}: {size}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_and_ranks_are_inverse() {
        let mesh = MeshLayout::new(&[("a", 2), ("b", 3), ("c", 2)]).unwrap();
        for rank in 0..mesh.size() {
            assert_eq!(mesh.rank_at(&mesh.coordinate_of(rank).unwrap()), Some(rank));
        }
        assert_eq!(mesh.coordinate_of(12), None);
        assert_eq!(mesh.rank_at(&[0, 3, 0]), None);
    }

    #[test]
    fn invalid_dimensions_are_refused() {
        for (dims, part) in [
            (vec![], "at least one"),
            (vec![("dp", 0)], "\"dp\" has size 0"),
            (vec![("dp", 2), ("dp", 2)], "a unique name"),
            (vec![("a", usize::MAX), ("b", 2)], "too large"),
        ] {
            let error = MeshLayout::new(&dims).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(MeshLayout::new(&[("dp", 2)]).unwrap().dim("tp").unwrap_err().to_string().contains("[\"dp\"]"));
    }
}
