//! A mesh whose ranks run: a layout, this rank's place in it, and a process group for every dimension.

use crate::{Buffer, Error, MeshLayout, ProcessGroup, Result};

/// A [`MeshLayout`] with a [`ProcessGroup`] along each dimension, as PyTorch's `DeviceMesh`.
#[derive(Clone)]
pub struct DeviceMesh {
    layout: MeshLayout,
    rank: usize,
    coordinate: Vec<usize>,
    groups: Vec<ProcessGroup>,
    /// The group that the mesh was made over, to split for new dimensions.
    world: ProcessGroup,
    /// The rank in `world` of each rank of this mesh.
    members: Vec<usize>,
}

impl DeviceMesh {
    /// Lays the ranks of `world` out in a grid. Collective: every rank of `world` calls it with the same dimensions.
    ///
    /// # Errors
    /// When the product of the sizes is not the size of `world` or ranks pass different dimensions, and what
    /// [`MeshLayout::new`] and [`ProcessGroup::split`] refuse.
    pub fn new(world: &ProcessGroup, dims: &[(&str, usize)]) -> Result<Self> {
        let layout = MeshLayout::new(dims)?;
        if layout.size() != world.size() {
            return Err(Error::Mesh(format!(
                "mesh {layout} has {} ranks but the world has {}: choose sizes whose product is {}",
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

    /// A mesh of one dimension over a group that there is already, which runs its collectives: PyTorch's
    /// `DeviceMesh.from_group`. No communication.
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
    /// When the name is empty.
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

    /// Whether every rank of `other`, which this rank is in too, is in this mesh. Of meshes over groups that were not
    /// split from one, the numbers of ranks decide.
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
            (Some(own), Some(theirs)) => theirs.iter().all(|number| own.contains(number)),
            _ => self.size() >= other.size(),
        }
    }

    /// Where this process stands, one index a dimension.
    pub fn coordinate(&self) -> Vec<usize> {
        self.coordinate.clone()
    }

    /// The process group along dimension `dim`.
    ///
    /// # Errors
    /// When there is no such dimension.
    pub fn group(&self, dim: usize) -> Result<&ProcessGroup> {
        self.groups
            .get(dim)
            .ok_or_else(|| Error::Mesh(format!("mesh {} has no dimension {dim}; they count from 0", self.layout)))
    }

    /// The process group along the dimension called `name`: PyTorch's `get_group(name)`.
    ///
    /// # Errors
    /// Names the dimensions there are.
    pub fn group_by_name(&self, name: &str) -> Result<&ProcessGroup> {
        self.group(self.layout.dim(name)?)
    }

    /// The number of ranks along the dimension called `name`.
    ///
    /// # Errors
    /// Names the dimensions there are.
    pub fn size_of(&self, name: &str) -> Result<usize> {
        Ok(self.layout.shape()[self.layout.dim(name)?])
    }

    /// Where this process stands along the dimension called `name`.
    ///
    /// # Errors
    /// Names the dimensions there are.
    pub fn get_local_rank(&self, name: &str) -> Result<usize> {
        Ok(self.coordinate()[self.layout.dim(name)?])
    }

    /// The mesh of the named dimensions that this rank is part of, in the order given: `mesh["dp", "tp"]` in PyTorch.
    /// No communication.
    ///
    /// # Errors
    /// When a name is unknown or given twice.
    pub fn slice(&self, names: &[&str]) -> Result<Self> {
        let dims = self.dims(names)?;
        self.arranged(&names.iter().zip(dims).map(|(&name, dim)| (name, vec![dim])).collect::<Vec<_>>())
    }

    /// This mesh with the named dimensions made into one called `flat`, which stands where the first of them stood:
    /// PyTorch's `_flatten`. Along it the ranks are in row-major order of the dimensions in the order given. Collective
    /// over the world that the mesh was made over (for one slice, its sibling slices too).
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
    /// When no dimension is named, a name is unknown or given twice, or `flat` is the name of a dimension that stays;
    /// those of [`ProcessGroup::split`].
    pub fn flatten(&self, names: &[&str], flat: &str) -> Result<Self> {
        let flattened = self.dims(names)?;
        let Some(&place) = flattened.first() else {
            return Err(Error::Mesh(format!(
                "no dimension of mesh {} to flatten into \"{flat}\": name some",
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

    /// What rank `root` of the mesh passes, on every rank; the others pass a buffer of its dtype and length. Collective
    /// over the mesh; blocks.
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
    /// When there is no such rank, and those of [`ProcessGroup::broadcast`].
    pub fn broadcast(&self, buffer: Buffer, root: usize) -> Result<Buffer> {
        let Some(from) = self.layout.coordinate_of(root) else {
            let (mesh, size) = (&self.layout, self.size());
            return Err(Error::Mesh(format!("rank {root} is outside mesh {mesh}, whose ranks are 0..{size}")));
        };
        // Along the first dimension, then along the second: only what came from the root is passed on last.
        (self.groups.iter().zip(from))
            .try_fold(buffer, |buffer, (group, root)| group.only_output(group.broadcast(vec![buffer], root)))
    }

    /// The ranks that differ from this one in the given dimensions alone, in a grid of which each dimension has a name
    /// and is made of some of them. A dimension has the group of the first that it is made of.
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

    /// The positions of the dimensions with these names, which differ.
    fn dims(&self, names: &[&str]) -> Result<Vec<usize>> {
        let dims = names.iter().map(|name| self.layout.dim(name)).collect::<Result<Vec<_>>>()?;
        match names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            Some((_, name)) => Err(Error::Mesh(format!("dimension \"{name}\" of mesh {} is named twice", self.layout))),
            None => Ok(dims),
        }
    }
}

/// Checks that all ranks lay out the same mesh: groups of another shape or order would move the wrong shards.
fn agree(layout: &MeshLayout, world: &ProcessGroup) -> Result<()> {
    let others = world.differing_ranks(format!("{layout:?}").as_bytes())?;
    if others.is_empty() {
        return Ok(());
    }
    Err(Error::Mesh(format!(
        "rank {} lays out the mesh {layout} but rank(s) {others:?} another one: pass the same names and sizes in the \
         same order on every rank",
        world.rank()
    )))
}

/// The group of the ranks that differ from `rank` of a mesh in `dim` alone. Collective over `world`, whose ranks
/// `members` are the mesh.
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
    // Ranks with the same coordinates elsewhere have the same first rank along `dim`: it tells their group from its
    // siblings.
    let color = layout.ranks_along(dim, rank).and_then(|ranks| ranks.first().map(|&first| members[first]));
    let key = layout.coordinate_of(rank).map(|coordinate| coordinate[dim]);
    let (Some(color), Some(key)) = (color, key) else {
        let what = format!("rank {rank} of a mesh that is made is outside its layout {layout}");
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
