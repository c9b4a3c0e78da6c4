//! Device meshes: a mesh layout, this rank's coordinate, and a process group for every dimension.

use std::collections::HashSet;

use crate::{Buffer, Error, MeshLayout, ProcessGroup, Result};

/// A [`MeshLayout`] with a [`ProcessGroup`] along each dimension, as PyTorch's `DeviceMesh`.
#[derive(Clone)]
pub struct DeviceMesh {
    layout: MeshLayout,
    rank: usize,
    coordinate: Vec<usize>,
    groups: Vec<ProcessGroup>,
    /// The group that the mesh was made from; new dimensions split it.
    world: ProcessGroup,
    /// Rank in `world` of each rank of this mesh.
    members: Vec<usize>,
}

impl DeviceMesh {
    /// Arranges the ranks of `world` in a grid. Collective: every rank of `world` passes the same dimensions.
    ///
    /// # Errors
    /// Returns an error when the product of the sizes is not the size of `world`, or ranks pass different dimensions.
    /// Also the errors of [`MeshLayout::new`] and [`ProcessGroup::split`].
    pub fn new(world: &ProcessGroup, dims: &[(&str, usize)]) -> Result<Self> {
        let layout = MeshLayout::new(dims)?;
        if layout.size() != world.size() {
            return Err(Error::Mesh(format!(
                "mesh {layout} has {} ranks, the world {}: choose sizes whose product is {}",
                layout.size(),
                world.size(),
                world.size()
            )));
        }
        agree(&layout, world)?;
        let members: Vec<usize> = (0..world.size()).collect();
        let groups = (0..layout.shape().len())
            .map(|dim| group_along(dim, &layout, world.rank(), &members, world))
            .collect::<Result<Vec<_>>>()?;
        Self::at(layout, world.rank(), groups, world, members)
    }

    /// Makes a mesh of one dimension over an existing group: PyTorch's `DeviceMesh.from_group`. Does not communicate.
    ///
    /// ```
    /// use fsdp_core::{DeviceMesh, process_group::local};
    /// local::run(4, |world| {
    ///     let evens_or_odds = world.split(world.rank() % 2, world.rank()).unwrap();
    ///     let mesh = DeviceMesh::from_group("dp", &evens_or_odds).unwrap();
    ///     assert_eq!((mesh.size(), mesh.get_local_rank("dp").unwrap()), (2, world.rank() / 2));
    /// });
    /// ```
    ///
    /// # Errors
    /// Returns an error when the name is empty.
    pub fn from_group(name: &str, group: &ProcessGroup) -> Result<Self> {
        let layout = MeshLayout::new(&[(name, group.size())])?;
        Self::at(layout, group.rank(), vec![group.clone()], group, (0..group.size()).collect())
    }

    fn at(
        layout: MeshLayout,
        rank: usize,
        groups: Vec<ProcessGroup>,
        world: &ProcessGroup,
        members: Vec<usize>,
    ) -> Result<Self> {
        let coordinate = coordinate(&layout, rank)?;
        Ok(DeviceMesh { layout, rank, coordinate, groups, world: world.clone(), members })
    }

    /// Returns the layout.
    pub fn layout(&self) -> &MeshLayout {
        &self.layout
    }

    /// Returns this process's rank in the mesh.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.layout.size()
    }

    /// Returns whether this mesh contains every rank of `other`, which contains this rank. For meshes over groups that
    /// were not split from one group, compares the numbers of ranks.
    ///
    /// ```
    /// use fsdp_core::{DeviceMesh, process_group::local};
    /// local::run(4, |world| {
    ///     let mesh = DeviceMesh::new(&world, &[("replicate", 2), ("shard", 2)]).unwrap();
    ///     let (rows, columns) = (mesh.slice(&["shard"]).unwrap(), mesh.slice(&["replicate"]).unwrap());
    ///     assert!(mesh.covers(&rows) && !rows.covers(&mesh) && !rows.covers(&columns));
    ///     // Meshes over groups that were split from one are compared by its ranks.
    ///     let split = |color: usize| world.split(color, world.rank()).unwrap();
    ///     let pair = |color: usize| DeviceMesh::from_group("pair", &split(color)).unwrap();
    ///     let (halves, others) = (pair(world.rank() / 2), pair(world.rank() % 2));
    ///     assert!(mesh.covers(&halves) && rows.covers(&halves) && !halves.covers(&others) && !halves.covers(&mesh));
    /// });
    /// ```
    pub fn covers(&self, other: &DeviceMesh) -> bool {
        let numbers = |mesh: &DeviceMesh, beside: &DeviceMesh| -> Option<Vec<usize>> {
            mesh.members.iter().map(|&member| mesh.world.common_number(member, &beside.world)).collect()
        };
        match (numbers(self, other), numbers(other, self)) {
            (Some(own), Some(theirs)) => {
                let own: HashSet<usize> = own.into_iter().collect();
                theirs.iter().all(|number| own.contains(number))
            }
            _ => self.size() >= other.size(),
        }
    }

    /// Returns this process's coordinate, one index a dimension.
    pub fn coordinate(&self) -> Vec<usize> {
        self.coordinate.clone()
    }

    /// Returns the process group along dimension `dim`.
    ///
    /// # Errors
    /// Returns an error when the mesh has no such dimension.
    pub fn group(&self, dim: usize) -> Result<&ProcessGroup> {
        self.groups
            .get(dim)
            .ok_or_else(|| Error::Mesh(format!("mesh {} has no dimension {dim}; dimensions count from 0", self.layout)))
    }

    /// Returns the process group along the dimension `name`: PyTorch's `get_group(name)`.
    ///
    /// # Errors
    /// Returns an error that lists the dimensions when `name` is unknown.
    pub fn group_by_name(&self, name: &str) -> Result<&ProcessGroup> {
        self.group(self.layout.dim(name)?)
    }

    /// Returns the number of ranks along the dimension `name`.
    ///
    /// # Errors
    /// Returns an error that lists the dimensions when `name` is unknown.
    pub fn size_of(&self, name: &str) -> Result<usize> {
        Ok(self.layout.shape()[self.layout.dim(name)?])
    }

    /// Returns this process's index along the dimension `name`.
    ///
    /// # Errors
    /// Returns an error that lists the dimensions when `name` is unknown.
    pub fn get_local_rank(&self, name: &str) -> Result<usize> {
        Ok(self.coordinate()[self.layout.dim(name)?])
    }

    /// Returns the submesh of the named dimensions that contains this rank, in the order given: `mesh["dp", "tp"]` in
    /// PyTorch. Does not communicate.
    ///
    /// # Errors
    /// Returns an error when a name is unknown or repeated.
    pub fn slice(&self, names: &[&str]) -> Result<Self> {
        let dims = self.dims(names)?;
        self.arranged(&names.iter().zip(dims).map(|(&name, dim)| (name, vec![dim])).collect::<Vec<_>>())
    }

    /// Merges the named dimensions into one called `flat`, at the position of the first: PyTorch's `_flatten`. Its
    /// ranks are in row-major order of the dimensions in the order given. Collective over the world of the mesh; for a
    /// slice, over its sibling slices too.
    ///
    /// ```
    /// use fsdp_core::{DeviceMesh, process_group::local};
    /// local::run(4, |world| {
    ///     let mesh = DeviceMesh::new(&world, &[("replicate", 2), ("shard", 1), ("tp", 2)]).unwrap();
    ///     let mesh = mesh.flatten(&["replicate", "shard"], "dp").unwrap();
    ///     assert_eq!(mesh.layout().to_string(), "(dp: 2, tp: 2)");
    ///     assert_eq!(mesh.get_local_rank("dp").unwrap(), world.rank() / 2);
    ///     assert_eq!(mesh.slice(&["dp"]).unwrap().size(), 2);
    /// });
    /// ```
    ///
    /// # Errors
    /// Returns an error when no dimension is named, a name is unknown or repeated, or `flat` names a dimension that
    /// stays. Also the errors of [`ProcessGroup::split`].
    pub fn flatten(&self, names: &[&str], flat: &str) -> Result<Self> {
        let flattened = self.dims(names)?;
        let Some(&place) = flattened.first() else {
            return Err(Error::Mesh(format!(
                "cannot flatten no dimensions of mesh {} into \"{flat}\": name at least one",
                self.layout
            )));
        };
        let mut arrangement = Vec::new();
        for (dim, name) in self.layout.names().iter().enumerate() {
            match dim == place {
                true => arrangement.push((flat, flattened.clone())),
                false if !flattened.contains(&dim) => arrangement.push((name, vec![dim])),
                false => {}
            }
        }
        let mut mesh = self.arranged(&arrangement)?;
        if flattened.len() > 1 {
            let dim = mesh.layout.dim(flat)?;
            mesh.groups[dim] = group_along(dim, &mesh.layout, mesh.rank, &mesh.members, &mesh.world)?;
        }
        Ok(mesh)
    }

    /// Returns the buffer of rank `root`, on every rank. Other ranks pass a buffer of the same dtype and length.
    /// Collective over the mesh; blocks.
    ///
    /// ```
    /// use fsdp_core::{Buffer, DeviceMesh, process_group::local};
    /// local::run(4, |world| {
    ///     let mesh = DeviceMesh::new(&world, &[("replicate", 2), ("shard", 2)]).unwrap();
    ///     let mine = Buffer::U32(vec![world.rank() as u32]);
    ///     assert_eq!(mesh.broadcast(mine, 2).unwrap(), Buffer::U32(vec![2]));
    /// });
    /// ```
    ///
    /// # Errors
    /// Returns an error when the mesh has no rank `root`, and the errors of [`ProcessGroup::broadcast`].
    pub fn broadcast(&self, buffer: Buffer, root: usize) -> Result<Buffer> {
        let Some(from) = self.layout.coordinate_of(root) else {
            let (mesh, size) = (&self.layout, self.size());
            return Err(Error::Mesh(format!("rank {root} is outside mesh {mesh} of ranks 0..{size}")));
        };
        // Each dimension passes on what the root's coordinate holds, first dimension first.
        (self.groups.iter().zip(from))
            .try_fold(buffer, |buffer, (group, root)| group.only_output(group.broadcast(vec![buffer], root)))
    }

    /// Returns the submesh of the given dimensions, each made of some of this mesh's. A new dimension has the group of
    /// the first dimension that it is made of.
    fn arranged(&self, dims: &[(&str, Vec<usize>)]) -> Result<Self> {
        let size = |made_of: &[usize]| made_of.iter().map(|&dim| self.layout.shape()[dim]).product();
        let layout = MeshLayout::new(&dims.iter().map(|(name, made_of)| (*name, size(made_of))).collect::<Vec<_>>())?;
        let mut members = Vec::with_capacity(layout.size());
        for rank in 0..layout.size() {
            let mut own = self.coordinate();
            for ((_, made_of), mut at) in dims.iter().zip(coordinate(&layout, rank)?) {
                for &dim in made_of.iter().rev() {
                    own[dim] = at % self.layout.shape()[dim];
                    at /= self.layout.shape()[dim];
                }
            }
            members.extend(self.layout.rank_at(&own).map(|rank| self.members[rank]));
        }
        let own = self.members[self.rank];
        let rank = (members.iter().position(|&member| member == own))
            .ok_or_else(|| Error::Mesh(format!("rank {} is outside {layout}", self.rank)))?;
        let groups = dims.iter().filter_map(|(_, made_of)| Some(self.groups[*made_of.first()?].clone())).collect();
        Self::at(layout, rank, groups, &self.world, members)
    }

    /// Returns the positions of the named dimensions, which must differ.
    fn dims(&self, names: &[&str]) -> Result<Vec<usize>> {
        let dims = names.iter().map(|name| self.layout.dim(name)).collect::<Result<Vec<_>>>()?;
        match names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            Some((_, name)) => Err(Error::Mesh(format!("dimension \"{name}\" of mesh {} is named twice", self.layout))),
            None => Ok(dims),
        }
    }
}

/// Checks that all ranks pass the same mesh: other groups would move the wrong shards.
fn agree(layout: &MeshLayout, world: &ProcessGroup) -> Result<()> {
    let others = world.differing_ranks(format!("{layout:?}").as_bytes())?;
    if others.is_empty() {
        return Ok(());
    }
    Err(Error::Mesh(format!(
        "rank {} passes mesh {layout}, rank(s) {others:?} another: pass the same names and sizes in the same order on \
         every rank",
        world.rank()
    )))
}

/// Returns the group of the ranks that differ from `rank` in `dim` only. Collective over `world`; `members` are the
/// ranks of the mesh there.
fn group_along(
    dim: usize,
    layout: &MeshLayout,
    rank: usize,
    members: &[usize],
    world: &ProcessGroup,
) -> Result<ProcessGroup> {
    if layout.shape()[dim] == world.size() && members.iter().copied().eq(0..world.size()) {
        return Ok(world.clone());
    }
    // Sibling groups differ in their first rank along `dim`.
    let color = layout.ranks_along(dim, rank).and_then(|ranks| ranks.first().map(|&first| members[first]));
    let key = layout.coordinate_of(rank).map(|coordinate| coordinate[dim]);
    let (Some(color), Some(key)) = (color, key) else {
        let what = format!("rank {rank} is outside its own mesh {layout}");
        return Err(Error::Internal { rank: world.rank(), what });
    };
    world.split(color, key)
}

fn coordinate(layout: &MeshLayout, rank: usize) -> Result<Vec<usize>> {
    let outside = || Error::Internal { rank, what: format!("mesh {layout} has no such rank") };
    layout.coordinate_of(rank).ok_or_else(outside)
}

impl std::fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceMesh{} rank {}", self.layout, self.rank)
    }
}
