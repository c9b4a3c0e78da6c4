//! The mesh of a parameter, whose dimensions have roles.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fsdp_core::layout::{Region, chunk_range, local_region};
use fsdp_core::{DeviceMesh, Placement, ProcessGroup};

use super::alike::check_alike;
use super::dims::DataParallelMeshDims;
use super::shard_layout::ShardLayout;
use crate::error::{Error, Result};
use crate::tensor_parallel::Parallel;

/// A mesh that parameters are sharded over, for [`crate::ShardPlacement`]. Clones are the same: make one for each mesh.
#[derive(Clone)]
pub struct ShardMesh(pub(crate) Arc<DataParallel>);

impl ShardMesh {
    /// A 1-D mesh shards (FSDP); of a 2-D mesh the first dimension replicates and the second shards (HSDP).
    ///
    /// # Errors
    /// When the mesh has another number of dimensions.
    pub fn new(mesh: &DeviceMesh) -> Result<Self> {
        Ok(ShardMesh(Arc::new(DataParallel::of(mesh)?)))
    }

    /// Dimensions of a larger mesh: PyTorch's `dp_mesh_dims`. Collective.
    ///
    /// # Errors
    /// When the mesh has no such dimension, one is named twice, or ranks pass different ones; those of
    /// [`ProcessGroup::split`].
    pub fn of_dims(mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>) -> Result<Self> {
        Ok(ShardMesh(Arc::new(DataParallel::of_dims(mesh, dims)?)))
    }
}

/// A mesh in its roles: some dimensions shard (FSDP), some replicate (HSDP, DDP), and others may cut parameters before
/// (tensor parallelism).
pub(crate) struct DataParallel {
    /// All dimensions, of which those that shard are one.
    mesh: DeviceMesh,
    /// The dimensions in a role.
    data: DeviceMesh,
    /// The position of the one that shards, if any does.
    sharding: Option<usize>,
    /// The positions of those without a role.
    others: Vec<usize>,
    shard: ProcessGroup,
    replicate: Option<ProcessGroup>,
    /// Whether replicas hold parts of one shard, each of which updates its own, rather than the same one.
    divided: bool,
    /// The same ranks, where replicas hold parts.
    as_divided: OnceLock<Arc<DataParallel>>,
    neighbours: Mutex<HashMap<usize, ProcessGroup>>,
    /// The shard ranks once more, for reductions that do not queue behind gathers.
    apart: Mutex<Option<ProcessGroup>>,
}

impl DataParallel {
    /// A 1-D mesh shards; of a 2-D mesh the first dimension replicates and the second shards.
    pub(crate) fn of(mesh: &DeviceMesh) -> Result<Self> {
        let (sharding, replicate) = match mesh.layout().shape().len() {
            1 => (0, None),
            2 => (1, Some(mesh.group(0)?.clone())),
            dims => {
                return Err(fsdp_core::Error::Mesh(format!(
                    "fully_shard takes a 1-D mesh (shard) or a 2-D one (replicate, shard); got {} with {dims} \
                     dimensions: say what they are for by DataParallelMeshDims (ShardedVarMap::with_mesh_dims), or pass a slice of \
                     it",
                    mesh.layout()
                ))
                .into());
            }
        };
        let shard = mesh.group(sharding)?.clone();
        Ok(DataParallel::new(mesh.clone(), mesh.clone(), (Some(sharding), vec![]), (shard, replicate)))
    }

    /// The dimensions with the roles that they are named in. Collective.
    pub(crate) fn of_dims(mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>) -> Result<Self> {
        let DataParallelMeshDims { shard, replicate } = *dims;
        let named: Vec<&str> = replicate.iter().chain(shard).copied().collect();
        // Fails for names that are unknown or given twice, before ranks meet.
        let data = if named.is_empty() { None } else { Some(mesh.slice(&named)?) };
        check_alike(mesh, "roles of its dimensions", &format!("{dims:?}"))?;
        let made_one = |names: &[&str]| -> Result<(DeviceMesh, usize)> {
            let name = names.join("_");
            let mesh = if let [_] = names { mesh.clone() } else { mesh.flatten(names, &name)? };
            let dim = mesh.layout().dim(&name)?;
            Ok((mesh, dim))
        };
        let replicate = match replicate {
            [] => None,
            names => {
                let (mesh, dim) = made_one(names)?;
                Some(mesh.group(dim)?.clone())
            }
        };
        let (whole, sharding, shard) = match shard {
            // A group of one, on the device of the others.
            [] => (mesh.clone(), None, mesh.group(0)?.split(mesh.group(0)?.rank(), 0)?),
            names => {
                let (whole, dim) = made_one(names)?;
                let shard = whole.group(dim)?.clone();
                (whole, Some(dim), shard)
            }
        };
        let data = data.map_or_else(|| DeviceMesh::from_group("rank", &shard), Ok)?;
        let names = whole.layout().names().iter().enumerate();
        let has_role = |dim: usize, name: &str| sharding == Some(dim) || named.contains(&name);
        let others = names.filter(|(dim, name)| !has_role(*dim, name)).map(|(dim, _)| dim).collect();
        Ok(DataParallel::new(whole, data, (sharding, others), (shard, replicate)))
    }

    fn new(
        mesh: DeviceMesh,
        data: DeviceMesh,
        (sharding, others): (Option<usize>, Vec<usize>),
        (shard, replicate): (ProcessGroup, Option<ProcessGroup>),
    ) -> Self {
        DataParallel {
            mesh,
            data,
            sharding,
            others,
            shard,
            replicate: replicate.filter(|group| group.size() > 1),
            divided: false,
            as_divided: OnceLock::new(),
            neighbours: Mutex::default(),
            apart: Mutex::default(),
        }
    }

    /// Fails when ranks of `of`, the mesh of all copies, hold none of these.
    pub(crate) fn check_covers(&self, of: &DeviceMesh) -> std::result::Result<(), String> {
        if self.data.covers(of) {
            return Ok(());
        }
        Err(format!(
            "it is trained on the mesh {} of {} rank(s), which leaves out some of the {} ranks of its ShardedVarMap's \
             mesh {}: gradients would not reach those, and their copies would drift apart. Replicate it over them (a \
             mesh (replicate, shard) of all ranks), freeze it, or give the ranks that share it a ShardedVarMap of \
             their own on their mesh",
            self.data.layout(),
            self.data.size(),
            of.size(),
            of.layout()
        ))
    }

    /// The same roles on a larger mesh, which has these dimensions and others; `None` where it has not.
    pub(crate) fn widened(&self, mesh: &DeviceMesh) -> Option<Self> {
        let dims = self.mesh.layout().shape().len();
        if mesh.layout().shape().len() <= dims {
            return None;
        }
        let place = |dim: usize| dim_of(mesh, &self.mesh.layout().names()[dim], self.mesh.group(dim).ok()?);
        let places: Vec<usize> = (0..dims).map(place).collect::<Option<_>>()?;
        let sharding = self.sharding.map(|dim| places[dim]);
        let others = (0..mesh.layout().shape().len()).filter(|dim| !places.contains(dim)).collect();
        let groups = (self.shard.clone(), self.replicate.clone());
        Some(DataParallel::new(mesh.clone(), self.data.clone(), (sharding, others), groups))
    }

    /// The same ranks, of which replicas hold parts of a shard, each its own; without replicas, just these.
    ///
    /// # Errors
    /// When the replicas are along several dimensions, or along one to the right of the one that shards.
    pub(crate) fn divided(self: &Arc<Self>) -> Result<Arc<Self>> {
        let Some(replicas) = self.replicate.as_ref().filter(|_| !self.divided) else { return Ok(self.clone()) };
        let along = (0..self.sharding.unwrap_or(0)).find(|&dim| self.mesh.group(dim).is_ok_and(|g| g.is(replicas)));
        if along.is_none() {
            return Err(fsdp_core::Error::Mesh(format!(
                "to divide shards over replicas, the mesh {} must replicate along one dimension, to the left of one \
                 that shards: flatten its dimensions, or choose another order",
                self.mesh.layout()
            ))
            .into());
        }
        let divided = || {
            let roles = (self.sharding, self.others.clone());
            let groups = (self.shard.clone(), self.replicate.clone());
            let ranks = DataParallel::new(self.mesh.clone(), self.data.clone(), roles, groups);
            Arc::new(DataParallel { divided: true, ..ranks })
        };
        Ok(self.as_divided.get_or_init(divided).clone())
    }

    /// Whether replicas hold parts of one shard.
    pub(crate) fn is_divided(&self) -> bool {
        self.divided
    }

    /// The groups over which ranks hold different parts.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &ProcessGroup> {
        std::iter::once(&self.shard).chain(self.replicate.as_ref().filter(|_| self.divided))
    }

    /// Whether the same ranks have the same roles.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let replicates = match (&self.replicate, &other.replicate) {
            (Some(own), Some(others)) => own.is(others),
            (None, None) => true,
            _ => false,
        };
        self.shard.is(&other.shard) && replicates
    }

    /// The groups along the dimensions without a role.
    pub(crate) fn other_groups(&self) -> impl Iterator<Item = &ProcessGroup> {
        self.others.iter().filter_map(|&dim| self.mesh.group(dim).ok())
    }

    /// The position of the dimension without a role that tensor-parallel ranks are along.
    pub(crate) fn parallel_dim(&self, name: &str, ranks: &ProcessGroup) -> Option<usize> {
        dim_of(&self.mesh, name, ranks).filter(|dim| self.others.contains(dim))
    }

    /// The ranks that train copies of one model: the dimensions in a role.
    pub(crate) fn data(&self) -> &DeviceMesh {
        &self.data
    }

    /// The mesh.
    pub(crate) fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The ranks that hold different shards.
    pub(crate) fn shard(&self) -> &ProcessGroup {
        &self.shard
    }

    /// The ranks that hold the same shard, where there are several.
    pub(crate) fn replicate(&self) -> Option<&ProcessGroup> {
        self.replicate.as_ref()
    }

    /// The group of `size` consecutive shard ranks that this one is in. Made once; collective the first time.
    ///
    /// # Errors
    /// When `size` is no proper divisor of the number of shard ranks.
    pub(crate) fn neighbours(&self, size: usize) -> Result<ProcessGroup> {
        let world = self.shard.size();
        if size <= 1 || size >= world || !world.is_multiple_of(size) {
            let proper: Vec<String> =
                (2..world).filter(|size| world.is_multiple_of(*size)).map(|size| size.to_string()).collect();
            let numbers = match proper.as_slice() {
                [] if world == 1 => "there is one shard rank alone. Choose ".to_string(),
                [] => format!("nothing but 1 and {world} divides the {world} shard ranks. Choose "),
                some => {
                    format!("it must be a proper divisor of the {world} shard ranks. Choose {}, ", some.join(" or "))
                }
            };
            return Err(fsdp_core::Error::Mesh(format!(
                "reshard_after_forward = {size}: {numbers}`always` (gather over all again) or `never` (keep \
                 everything)"
            ))
            .into());
        }
        let made = lock(&self.neighbours).get(&size).cloned();
        if let Some(group) = made {
            return Ok(group);
        }
        // No lock is held while ranks meet.
        let group = self.shard.split(self.shard.rank() / size, self.shard.rank() % size)?;
        Ok(lock(&self.neighbours).entry(size).or_insert(group).clone())
    }

    /// A second group of the shard ranks. Made once; collective the first time.
    pub(crate) fn shard_apart(&self) -> Result<ProcessGroup> {
        let made = lock(&self.apart).clone();
        if let Some(group) = made {
            return Ok(group);
        }
        let group = self.shard.split(0, self.shard.rank())?;
        Ok(lock(&self.apart).get_or_insert(group).clone())
    }

    /// One placement a mesh dimension, for a parameter sharded along `dim`, of which tensor parallelism has cut one.
    pub(crate) fn placements(&self, dim: usize, parallel: Option<&Parallel>) -> Vec<Placement> {
        let sizes = self.mesh.layout().shape();
        let mut placements = vec![Placement::Replicate; sizes.len()];
        if let Some(parallel) = parallel
            && let (Some(cut), Some(at)) = (parallel.cut(), self.parallel_dim(parallel.name(), parallel.group()))
        {
            placements[at] = Placement::Shard(cut);
        }
        let replicas = self.replicate.as_ref().filter(|_| self.divided);
        let dividing =
            replicas.and_then(|own| (0..sizes.len()).find(|&at| self.mesh.group(at).is_ok_and(|g| g.is(own))));
        for at in self.sharding.into_iter().chain(dividing) {
            // Dimensions further right that cut the same have done so before.
            let before = (at + 1..sizes.len()).filter(|&right| placements[right].shard_dim() == Some(dim));
            placements[at] = match before.map(|right| sizes[right]).product() {
                1 => Placement::Shard(dim),
                split_factor => Placement::StridedShard { dim, split_factor },
            };
        }
        placements
    }

    /// What this rank holds of a parameter sharded along `dim`, and how the shards of the shard ranks lie in what
    /// layers hold, of shape `local`.
    pub(crate) fn lay_out(
        &self,
        name: &str,
        (shape, local): (&[usize], &[usize]),
        dim: usize,
        parallel: Option<&Parallel>,
    ) -> Result<(Region, ShardLayout)> {
        let world = self.shard.size();
        let fail = |message: String| Error::Parameter { name: name.into(), message };
        let Some(&extent) = local.get(dim) else {
            return Err(fail(format!(
                "its shape {shape:?} has no dimension {dim} to shard; a scalar becomes a tensor of shape [1]"
            )));
        };
        if dim > 0 && !extent.is_multiple_of(world) {
            return Err(fail(format!(
                "dimension {dim} of its shape {local:?} does not divide evenly over {world} ranks; dimensions other \
                 than 0 must: shard another, or change the mesh"
            )));
        }
        if let Some(parallel) = parallel
            && self.parallel_dim(parallel.name(), parallel.group()).is_none()
        {
            return Err(fail(format!(
                "its module is {} over {} rank(s), for which the mesh {} of its unit has no dimension beside those \
                 that shard and replicate: take the map's mesh, or a slice of it",
                parallel.style().name(),
                parallel.group().size(),
                self.mesh.layout()
            )));
        }
        let placements = self.placements(dim, parallel);
        let region = local_region(shape, self.mesh.layout(), &self.mesh.coordinate(), &placements)?;
        Ok((region, ShardLayout::of(local, dim, world)))
    }

    /// The shape of this rank's shard of what layers hold, of shape `local`, and how the replicas' parts lie in it,
    /// where they hold parts.
    pub(crate) fn lay_out_parts(
        &self,
        name: &str,
        local: &[usize],
        dim: usize,
    ) -> Result<Option<(Vec<usize>, ShardLayout)>> {
        let Some(replicas) = self.replicate.as_ref().filter(|_| self.divided) else { return Ok(None) };
        let ranks = self.shard.size() * replicas.size();
        if dim > 0 && !local[dim].is_multiple_of(ranks) {
            return Err(Error::Parameter {
                name: name.into(),
                message: format!(
                    "dimension {dim} of its shape {local:?} does not divide evenly over {} shard ranks and {} replicas \
                     that hold parts of a shard; dimensions other than 0 must: shard another, or change the mesh",
                    self.shard.size(),
                    replicas.size()
                ),
            });
        }
        let mut shard = local.to_vec();
        shard[dim] = chunk_range(local[dim], self.shard.size(), self.shard.rank()).len();
        let layout = ShardLayout::of(&shard, dim, replicas.size());
        Ok(Some((shard, layout)))
    }
}

/// The position of a mesh's dimension of this name and group: one rank's groups are the same in all dimensions.
fn dim_of(mesh: &DeviceMesh, name: &str, ranks: &ProcessGroup) -> Option<usize> {
    let dim = mesh.layout().dim(name).ok()?;
    mesh.group(dim).is_ok_and(|group| group.is(ranks)).then_some(dim)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
