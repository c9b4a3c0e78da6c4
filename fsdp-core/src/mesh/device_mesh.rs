//! A mesh whose ranks run: a layout, this rank's place in it, and a process group for every dimension.

use std::sync::Arc;

use crate::{Error, MeshLayout, ProcessGroup, Result};

/// A [`MeshLayout`] with a [`ProcessGroup`] along each dimension, as PyTorch's `DeviceMesh`.
#[derive(Clone)]
pub struct DeviceMesh {
    layout: MeshLayout,
    rank: usize,
    groups: Vec<Arc<dyn ProcessGroup>>,
}

impl DeviceMesh {
    /// Lays the ranks of `world` out in a grid. Collective: every rank of `world` calls it with the same dimensions.
    ///
    /// # Errors
    /// When the product of the sizes is not the size of `world`, and what [`MeshLayout::new`] and [`ProcessGroup::split`] refuse.
    pub fn new(world: &Arc<dyn ProcessGroup>, dims: &[(&str, usize)]) -> Result<Self> {
        let layout = MeshLayout::new(dims)?;
        if layout.size() != world.size() {
            return Err(Error::Mesh(format!(
                "mesh {layout} has {} ranks but the world has {}: choose sizes whose product is {}",
                layout.size(),
                world.size(),
                world.size()
            )));
        }
        let rank = world.rank();
        let groups = (0..layout.shape().len())
            .map(|dim| {
                let size = layout.shape()[dim];
                if size == world.size() {
                    return Ok(world.clone());
                }
                // Ranks with the same coordinates elsewhere have the same first rank along `dim`: it tells their group from its siblings.
                let ranks = layout.ranks_along(dim, rank).unwrap_or_default();
                let color = ranks.first().copied().unwrap_or(rank);
                world.split(color, layout.coordinate_of(rank).map_or(0, |c| c[dim]))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(DeviceMesh { layout, rank, groups })
    }

    /// The grid.
    pub fn layout(&self) -> &MeshLayout {
        &self.layout
    }

    /// This process's rank in the mesh.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.layout.size()
    }

    /// Where this process stands, one index a dimension.
    pub fn coordinate(&self) -> Vec<usize> {
        self.layout.coordinate_of(self.rank).unwrap_or_default()
    }

    /// The process group along dimension `dim`.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn group(&self, dim: usize) -> Result<&Arc<dyn ProcessGroup>> {
        self.groups
            .get(dim)
            .ok_or_else(|| Error::Mesh(format!("mesh {} has no dimension {dim}; they count from 0", self.layout)))
    }

    /// The mesh of the named dimensions that this rank is part of, in the order given: `mesh["dp", "tp"]` in PyTorch.
    ///
    /// # Errors
    /// When a name is unknown or given twice.
    pub fn slice(&self, names: &[&str]) -> Result<Self> {
        let dims = names.iter().map(|name| self.layout.dim(name)).collect::<Result<Vec<_>>>()?;
        let layout = MeshLayout::new(
            &dims.iter().map(|&dim| (self.layout.names()[dim].as_str(), self.layout.shape()[dim])).collect::<Vec<_>>(),
        )?;
        let coordinate = self.coordinate();
        let rank = layout
            .rank_at(&dims.iter().map(|&dim| coordinate[dim]).collect::<Vec<_>>())
            .ok_or_else(|| Error::Mesh(format!("rank {} is outside {layout}", self.rank)))?;
        Ok(DeviceMesh { layout, rank, groups: dims.iter().map(|&dim| self.groups[dim].clone()).collect() })
    }
}

impl std::fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceMesh{} rank {}", self.layout, self.rank)
    }
}
