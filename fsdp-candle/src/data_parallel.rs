//! The ranks that a parameter is sharded and replicated over, or that own it.
//!
//! [Note: Tensor parallelism before FSDP]
//!
//! A map's mesh has all ranks that train one model. Some of its dimensions shard, some replicate, and the others split
//! parameters before FSDP shards them. A parameter therefore has three shapes. The global shape counts for names,
//! checkpoints and initial values. Layers hold the *unsharded* shape: under tensor parallelism, this rank's part. FSDP
//! shards that part.
//!
//! The shard is always one box of the global shape (`region`), which follows from the placements. State dicts,
//! checkpoints, random numbers and readers of weights use only the box, so they do not know of tensor parallelism.
//!
//! A trained parameter's mesh must contain all ranks of the map's mesh: the copies of other ranks would drift. The mesh
//! may be larger, as for weights that pipeline stages share. Norms and the results of
//! [`GradScaler`](crate::GradScaler) are therefore reduced over the meshes of all parameters.

use std::collections::HashMap;
use std::hash::Hasher;
use std::sync::{Arc, OnceLock};

use fsdp_core::layout::{Region, chunk_range, local_region, padded_share};
use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{Buffer, DeviceMesh, Element, Placement, ProcessGroup, ReduceOp};
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::kernels::{self, Rows, Slice, SliceMut};
use crate::tensor_parallel::Parallel;

/// The roles of a mesh's dimensions: PyTorch's `DataParallelMeshDims`, as in `fully_shard(.., mesh=mesh,
/// dp_mesh_dims=..)`.
///
/// Several dimensions in one role are merged, in the order given. With only `replicate`, every rank holds whole
/// parameters (DDP). With neither role, no dimension is data parallel. Other dimensions have no role here: FSDP shards
/// what [`parallelize`](crate::parallelize) splits along them.
///
/// ```
/// use fsdp_candle::{DataParallelMeshDims, ShardedVarMap, World};
/// use fsdp_core::process_group::local;
///
/// local::try_run(8, |group| {
///     let world = World::of(group);
///     let mesh = world.mesh(&[("replicate", 2), ("shard", 2), ("tp", 2)])?;
///     let dims = DataParallelMeshDims { shard: &["shard"], replicate: &["replicate"] };
///     let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device())?;
///     assert_eq!(vars.mesh().size(), 8);
///     Ok::<_, fsdp_candle::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataParallelMeshDims<'a> {
    /// Dimensions that shard parameters.
    pub shard: &'a [&'a str],
    /// Dimensions that replicate shards.
    pub replicate: &'a [&'a str],
}

/// A mesh that shards parameters, for [`crate::ShardPlacement`]. Clones are equal; make one for each mesh.
#[derive(Clone)]
pub struct ShardMesh(pub(crate) Arc<DataParallel>);

impl ShardMesh {
    /// Makes the mesh of a unit. A 1-D mesh shards (FSDP); the first dimension of a 2-D mesh replicates and the second
    /// shards (HSDP). Fails if the mesh has another number of dimensions.
    pub fn new(mesh: &DeviceMesh) -> Result<Self> {
        Ok(ShardMesh(Arc::new(DataParallel::of(mesh)?)))
    }

    /// Makes the mesh of some dimensions of a larger mesh: PyTorch's `dp_mesh_dims`. Collective. Fails if the mesh has
    /// no such dimension, one is repeated, or ranks pass different dimensions.
    pub fn of_dims(mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>) -> Result<Self> {
        Ok(ShardMesh(Arc::new(DataParallel::of_dims(mesh, dims)?)))
    }
}

/// The dimensions of a mesh by role.
#[derive(Clone)]
struct Dims {
    /// Position of the dimension that shards, if any.
    sharding: Option<usize>,
    /// Positions of the dimensions without a role.
    others: Vec<usize>,
    /// Position of the dimension whose ranks own different experts, if the parameters belong to experts. One of `others`.
    experts: Option<usize>,
    /// Names of the dimensions that shard, before they are merged.
    shard_names: Vec<String>,
    /// Names of the dimensions that replicate, before they are merged.
    replicate_names: Vec<String>,
}

/// The roles of a mesh's dimensions: some shard (FSDP), some replicate (HSDP, DDP), and others may split parameters
/// first (tensor parallelism).
pub(crate) struct DataParallel {
    /// All dimensions; the sharding dimensions are merged.
    pub(crate) mesh: DeviceMesh,
    /// The dimensions that shard or replicate.
    pub(crate) data: DeviceMesh,
    dims: Dims,
    /// The ranks that hold different shards.
    pub(crate) shard: ProcessGroup,
    /// The ranks that hold the same shard, if there are several.
    replicate: Option<ProcessGroup>,
    /// Whether shards are divided over replicas, each of which updates its part.
    pub(crate) is_sharded_over_replicas: bool,
    /// The same ranks with shards divided over replicas.
    over_replicas: OnceLock<Arc<DataParallel>>,
    post_forward_groups: Mutex<HashMap<usize, ProcessGroup>>,
    /// A dedicated reduce-scatter group of the shard ranks, so that reductions do not queue behind all-gathers.
    reduce_scatter_group: Mutex<Option<ProcessGroup>>,
}

impl DataParallel {
    /// Makes the roles of a mesh: a 1-D mesh shards; the first dimension of a 2-D mesh replicates and the second
    /// shards.
    pub(crate) fn of(mesh: &DeviceMesh) -> Result<Self> {
        let (sharding, replicate) = match mesh.layout().shape().len() {
            1 => (0, None),
            2 => (1, Some(mesh.group(0)?.clone())),
            dims => {
                return Err(fsdp_core::Error::Mesh(format!(
                    "fully_shard takes a 1-D mesh (shard) or a 2-D one (replicate, shard), found {} of {dims} \
                     dimensions: name their roles with ShardedVarMap::with_dp_mesh_dims, or pass a slice",
                    mesh.layout()
                ))
                .into());
            }
        };
        let shard = mesh.group(sharding)?.clone();
        let (replicating, shards) = mesh.layout().names().split_at(sharding);
        let dims = Dims {
            sharding: Some(sharding),
            others: vec![],
            experts: None,
            shard_names: shards.to_vec(),
            replicate_names: replicating.to_vec(),
        };
        Ok(DataParallel::new(mesh.clone(), mesh.clone(), dims, (shard, replicate)))
    }

    /// Makes the roles of named dimensions. Collective.
    pub(crate) fn of_dims(mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>) -> Result<Self> {
        let DataParallelMeshDims { shard, replicate } = *dims;
        let named: Vec<&str> = replicate.iter().chain(shard).copied().collect();
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let (shard_names, replicate_names) = (owned(shard), owned(replicate));
        // Refuses unknown and repeated names before any communication.
        let data = if named.is_empty() { None } else { Some(mesh.slice(&named)?) };
        check_ranks_agree(mesh, "roles of its dimensions", &format!("{dims:?}"))?;
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
            // A group of one rank, on the device of the other groups.
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
        let dims = Dims { sharding, others, experts: None, shard_names, replicate_names };
        Ok(DataParallel::new(whole, data, dims, (shard, replicate)))
    }

    /// Makes the roles for experts that live on different ranks of the dimension `name` of `mesh`, the mesh of these roles:
    /// the dimension does not shard them. Collective. Fails if the dimension does not shard other parameters.
    pub(crate) fn of_experts(&self, mesh: &DeviceMesh, name: &str) -> Result<Self> {
        let Dims { shard_names: shard, replicate_names: replicate, .. } = &self.dims;
        if !shard.iter().any(|other| other == name) {
            return Err(fsdp_core::Error::Mesh(format!(
                "dimension \"{name}\" of the mesh {} does not shard: experts can live on the ranks of a dimension that shards \
                 other parameters, which are {shard:?}",
                mesh.layout()
            ))
            .into());
        }
        let remaining: Vec<&str> = shard.iter().map(String::as_str).filter(|other| *other != name).collect();
        let replicate: Vec<&str> = replicate.iter().map(String::as_str).collect();
        let mut ranks =
            DataParallel::of_dims(mesh, &DataParallelMeshDims { shard: &remaining, replicate: &replicate })?;
        ranks.dims.experts = ranks.parallel_dim(name, mesh.group_by_name(name)?);
        Ok(ranks)
    }

    fn new(
        mesh: DeviceMesh,
        data: DeviceMesh,
        dims: Dims,
        (shard, replicate): (ProcessGroup, Option<ProcessGroup>),
    ) -> Self {
        DataParallel {
            mesh,
            data,
            dims,
            shard,
            replicate: replicate.filter(|group| group.size() > 1),
            is_sharded_over_replicas: false,
            over_replicas: OnceLock::new(),
            post_forward_groups: Mutex::default(),
            reduce_scatter_group: Mutex::default(),
        }
    }

    /// Checks that every rank of `of`, the mesh of all copies, is a data-parallel rank here.
    pub(crate) fn check_covers(&self, of: &DeviceMesh) -> std::result::Result<(), String> {
        // Each rank sends tokens to the ranks of their experts.
        if self.dims.experts.is_some() || self.data.covers(of) {
            return Ok(());
        }
        Err(format!(
            "it is trained on the mesh {} of {} rank(s), which leaves out some of the {} ranks of its ShardedVarMap's \
             mesh {}. Replicate it over them (a mesh (replicate, shard) of all ranks), freeze it, or give its ranks a \
             ShardedVarMap of their own",
            self.data.layout(),
            self.data.size(),
            of.size(),
            of.layout()
        ))
    }

    /// Returns the same roles on a larger mesh with these dimensions and others, or `None` if the mesh lacks one of
    /// them.
    pub(crate) fn on_larger_mesh(&self, mesh: &DeviceMesh) -> Option<Self> {
        let count = self.mesh.layout().shape().len();
        if mesh.layout().shape().len() <= count {
            return None;
        }
        let place = |dim: usize| dim_of(mesh, &self.mesh.layout().names()[dim], self.mesh.group(dim).ok()?);
        let places: Vec<usize> = (0..count).map(place).collect::<Option<_>>()?;
        let dims = Dims {
            sharding: self.dims.sharding.map(|dim| places[dim]),
            others: (0..mesh.layout().shape().len()).filter(|dim| !places.contains(dim)).collect(),
            experts: self.dims.experts.map(|dim| places[dim]),
            ..self.dims.clone()
        };
        let groups = (self.shard.clone(), self.replicate.clone());
        Some(DataParallel::new(mesh.clone(), self.data.clone(), dims, groups))
    }

    /// Returns the same ranks with shards divided over replicas; without replicas, these ranks. Fails if several
    /// dimensions replicate, or one to the right of the dimension that shards.
    pub(crate) fn sharded_over_replicas(self: &Arc<Self>) -> Result<Arc<Self>> {
        let Some(replicas) = self.replicate.as_ref().filter(|_| !self.is_sharded_over_replicas) else {
            return Ok(self.clone());
        };
        let along =
            (0..self.dims.sharding.unwrap_or(0)).find(|&dim| self.mesh.group(dim).is_ok_and(|g| g.is(replicas)));
        if along.is_none() {
            return Err(fsdp_core::Error::Mesh(format!(
                "to divide shards over replicas, the mesh {} must replicate along one dimension, left of the one \
                 that shards: flatten its dimensions, or choose another order",
                self.mesh.layout()
            ))
            .into());
        }
        let divided = || {
            let groups = (self.shard.clone(), self.replicate.clone());
            let ranks = DataParallel::new(self.mesh.clone(), self.data.clone(), self.dims.clone(), groups);
            Arc::new(DataParallel { is_sharded_over_replicas: true, ..ranks })
        };
        Ok(self.over_replicas.get_or_init(divided).clone())
    }

    /// Returns the groups whose ranks hold different parts of a model.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &ProcessGroup> {
        let replicas = self.replicate.as_ref().filter(|_| self.is_sharded_over_replicas);
        std::iter::once(&self.shard).chain(replicas).chain(self.experts())
    }

    /// Returns the ranks that own different experts, if the parameters are of experts.
    pub(crate) fn experts(&self) -> Option<&ProcessGroup> {
        self.dims.experts.and_then(|dim| self.mesh.group(dim).ok())
    }

    /// Returns the position of the dimension whose ranks own different experts.
    pub(crate) fn experts_dim(&self) -> Option<usize> {
        self.dims.experts
    }

    /// Returns the number of ranks whose batches a gradient sums over, on all data-parallel ranks.
    pub(crate) fn batches(&self) -> usize {
        let replicas = self.replicate.as_ref().map_or(1, ProcessGroup::size);
        self.shard.size() * replicas * self.experts().map_or(1, ProcessGroup::size)
    }

    /// Returns whether the same ranks have the same roles.
    pub(crate) fn has_same_roles(&self, other: &Self) -> bool {
        let replicates = match (&self.replicate, &other.replicate) {
            (Some(own), Some(others)) => own.is(others),
            (None, None) => true,
            _ => false,
        };
        self.shard.is(&other.shard) && replicates
    }

    /// Returns the groups along the dimensions without a role.
    pub(crate) fn other_groups(&self) -> impl Iterator<Item = &ProcessGroup> {
        self.dims.others.iter().filter_map(|&dim| self.mesh.group(dim).ok())
    }

    /// Returns the position of the tensor-parallel dimension among those without a role.
    pub(crate) fn parallel_dim(&self, name: &str, ranks: &ProcessGroup) -> Option<usize> {
        dim_of(&self.mesh, name, ranks).filter(|dim| self.dims.others.contains(dim))
    }

    /// Returns the ranks that hold the same shard, if there are several.
    pub(crate) fn replicate(&self) -> Option<&ProcessGroup> {
        self.replicate.as_ref()
    }

    /// Returns this rank's group of `size` consecutive shard ranks. Collective the first time. Fails if `size` is not a
    /// proper divisor of the number of shard ranks.
    pub(crate) fn post_forward_group(&self, size: usize) -> Result<ProcessGroup> {
        let world = self.shard.size();
        if size <= 1 || size >= world || !world.is_multiple_of(size) {
            let proper: Vec<String> =
                (2..world).filter(|size| world.is_multiple_of(*size)).map(|size| size.to_string()).collect();
            let numbers = match proper.as_slice() {
                [] if world == 1 => "there is only one shard rank. Choose ".to_string(),
                [] => format!("only 1 and {world} divide the {world} shard ranks. Choose "),
                some => {
                    format!("expected a proper divisor of the {world} shard ranks. Choose {}, ", some.join(" or "))
                }
            };
            return Err(fsdp_core::Error::Mesh(format!(
                "reshard_after_forward = {size}: {numbers}`always` (gather again) or `never` (keep \
                 everything)"
            ))
            .into());
        }
        let made = self.post_forward_groups.lock().get(&size).cloned();
        if let Some(group) = made {
            return Ok(group);
        }
        // Ranks communicate without a lock.
        let group = self.shard.split(self.shard.rank() / size, self.shard.rank() % size)?;
        Ok(self.post_forward_groups.lock().entry(size).or_insert(group).clone())
    }

    /// Returns the dedicated reduce-scatter group of the shard ranks. Collective the first time.
    pub(crate) fn dedicated_reduce_scatter_group(&self) -> Result<ProcessGroup> {
        let made = self.reduce_scatter_group.lock().clone();
        if let Some(group) = made {
            return Ok(group);
        }
        let group = self.shard.split(0, self.shard.rank())?;
        Ok(self.reduce_scatter_group.lock().get_or_insert(group).clone())
    }

    /// Returns the placements of a parameter that is sharded along `dim`, may be split by tensor parallelism, and may be of
    /// an expert that the rank `owner` has.
    pub(crate) fn placements(&self, dim: usize, parallel: Option<&Parallel>, owner: Option<usize>) -> Vec<Placement> {
        let sizes = self.mesh.layout().shape();
        let mut placements = vec![Placement::Replicate; sizes.len()];
        if let Some(parallel) = parallel
            && let (Some(cut), Some(at)) = (parallel.shard_dim, self.parallel_dim(&parallel.name, &parallel.group))
        {
            placements[at] = Placement::Shard(cut);
        }
        if let (Some(at), Some(rank)) = (self.dims.experts, owner) {
            placements[at] = Placement::OwnedBy { dim: 0, rank };
        }
        let replicas = self.replicate.as_ref().filter(|_| self.is_sharded_over_replicas);
        let dividing =
            replicas.and_then(|own| (0..sizes.len()).find(|&at| self.mesh.group(at).is_ok_and(|g| g.is(own))));
        for at in self.dims.sharding.into_iter().chain(dividing) {
            // Dimensions further right that shard the same dimension split it first.
            let before = (at + 1..sizes.len()).filter(|&right| placements[right].shard_dim() == Some(dim));
            placements[at] = match before.map(|right| sizes[right]).product() {
                1 => Placement::Shard(dim),
                split_factor => Placement::StridedShard { dim, split_factor },
            };
        }
        placements
    }

    /// Returns this rank's region of a parameter sharded along `dim`, and the layout of the shards in the layers'
    /// tensor, of shape `local`.
    pub(crate) fn lay_out(
        &self,
        name: &str,
        (shape, local): (&[usize], &[usize]),
        dim: usize,
        parallel: Option<&Parallel>,
        owner: Option<usize>,
    ) -> Result<(Region, ShardLayout)> {
        let world = self.shard.size();
        let fail = |message: String| Error::parameter(name, message);
        let Some(&extent) = local.get(dim) else {
            return Err(fail(format!(
                "its shape {shape:?} has no dimension {dim} to shard; a scalar becomes a tensor of shape [1]"
            )));
        };
        if dim > 0 && !extent.is_multiple_of(world) {
            return Err(fail(format!(
                "dimension {dim} of its shape {local:?} does not divide evenly over {world} ranks, which only \
                 dimension 0 may: shard another dimension, or change the mesh"
            )));
        }
        if let Some(parallel) = parallel
            && self.parallel_dim(&parallel.name, &parallel.group).is_none()
        {
            return Err(fail(format!(
                "its module is {} over {} rank(s), but the mesh {} of its unit has no such dimension beside those that \
                 shard and replicate: use the map's mesh, or a slice of it",
                parallel.style.name(),
                parallel.group.size(),
                self.mesh.layout()
            )));
        }
        let placements = self.placements(dim, parallel, owner);
        let region = local_region(shape, self.mesh.layout(), &self.mesh.coordinate(), &placements)?;
        Ok((region, ShardLayout::of(local, dim, world)))
    }

    /// Lays out the replicas' parts of this rank's shard of the layers' tensor, of shape `local`, if shards are divided
    /// over replicas.
    pub(crate) fn lay_out_parts(&self, name: &str, local: &[usize], dim: usize) -> Result<Option<ReplicaLayout>> {
        let Some(replicas) = self.replicate.as_ref().filter(|_| self.is_sharded_over_replicas) else { return Ok(None) };
        let ranks = self.shard.size() * replicas.size();
        if dim > 0 && !local[dim].is_multiple_of(ranks) {
            let message = format!(
                "dimension {dim} of its shape {local:?} does not divide evenly over {} shard ranks and {} replicas \
                 that divide shards, which only dimension 0 may: shard another dimension, or change the mesh",
                self.shard.size(),
                replicas.size()
            );
            return Err(Error::parameter(name, message));
        }
        let mut shard = local.to_vec();
        shard[dim] = chunk_range(local[dim], self.shard.size(), self.shard.rank()).len();
        let layout = ShardLayout::of(&shard, dim, replicas.size());
        Ok(Some(ReplicaLayout { shape: shard, layout }))
    }
}

/// Returns the position of a mesh's dimension with this name and group.
fn dim_of(mesh: &DeviceMesh, name: &str, ranks: &ProcessGroup) -> Option<usize> {
    let dim = mesh.layout().dim(name).ok()?;
    mesh.group(dim).is_ok_and(|group| group.is(ranks)).then_some(dim)
}

/// How replicas divide a shard among them.
pub(crate) struct ReplicaLayout {
    /// Shape of the whole shard.
    pub(crate) shape: Vec<usize>,
    /// Layout of the replicas' parts in the shard.
    pub(crate) layout: ShardLayout,
}

/// The layout of shards in a parameter of `outer` rows (one if dimension 0 is sharded), each split into a chunk for
/// every rank.
pub(crate) struct ShardLayout {
    outer: usize,
    /// Number of elements of a row that each rank holds.
    chunks: Vec<usize>,
}

impl ShardLayout {
    /// Makes the layout of a tensor whose dimension `dim` is split over `ranks` ranks.
    fn of(shape: &[usize], dim: usize, ranks: usize) -> Self {
        let inner: usize = shape[dim + 1..].iter().product();
        let chunks = (0..ranks).map(|rank| chunk_range(shape[dim], ranks, rank).len() * inner).collect();
        ShardLayout { outer: shape[..dim].iter().product(), chunks }
    }

    /// Returns the number of elements that each rank holds.
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.chunks.iter().map(|chunk| chunk * self.outer).collect()
    }

    /// Returns the number of elements, without and with the padding of all shards to equal lengths, if collectives pad
    /// them.
    pub(crate) fn padded(&self) -> Option<(usize, usize)> {
        let counts = self.counts();
        let share = padded_share(&counts)?;
        Some((counts.iter().sum(), share * counts.len()))
    }

    /// Returns whether the concatenation of all shards is the parameter.
    pub(crate) fn is_concatenation(&self) -> bool {
        self.outer <= 1
    }

    /// Converts the concatenation of all shards to the parameter.
    pub(crate) fn unpack(&self, shards: &Buffer, full: &mut Buffer) -> candle_core::Result<()> {
        let kernels = kernels::of_buffer(shards)?;
        self.chunks().try_for_each(|(packed, column, rows)| {
            let from = Slice::from(shards).range(packed..shards.len())?;
            let room = full.len();
            kernels.copy_rows(from, SliceMut::from(&mut *full).range(column..room)?, rows)
        })
    }

    /// Converts the parameter to the concatenation of all shards.
    pub(crate) fn pack(&self, full: &Buffer, shards: &mut Buffer) -> candle_core::Result<()> {
        let kernels = kernels::of_buffer(full)?;
        self.chunks().try_for_each(|(packed, column, rows)| {
            let rows = Rows { from_stride: rows.to_stride, to_stride: rows.from_stride, ..rows };
            let from = Slice::from(full).range(column..full.len())?;
            let room = shards.len();
            kernels.copy_rows(from, SliceMut::from(&mut *shards).range(packed..room)?, rows)
        })
    }

    /// Returns for each rank the first element of its chunk in the concatenation and in a row of the parameter, and the
    /// rows between them.
    fn chunks(&self) -> impl Iterator<Item = (usize, usize, Rows)> + '_ {
        let row: usize = self.chunks.iter().sum();
        let (mut packed, mut column) = (0, 0);
        self.chunks.iter().map(move |&chunk| {
            let rows = Rows { count: self.outer, len: chunk, from_stride: chunk, to_stride: row };
            let at = (packed, column, rows);
            packed += chunk * self.outer;
            column += chunk;
            at
        })
    }
}

/// Checks that all ranks of a mesh passed the same value, by a 64-bit hash. Otherwise they would issue different
/// collectives. Collective; every rank gets the same result.
pub(crate) fn check_ranks_agree(mesh: &DeviceMesh, what: &str, given: &str) -> Result<()> {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(given.as_bytes());
    let hash = hasher.finish() as i64;
    // The largest hash and the complement of the smallest.
    let ends = largest_over(mesh, vec![hash, !hash], &format!("check that ranks agree on {what}"))?;
    if ends == [ends[0], !ends[0]] {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "the ranks of the mesh {} have different {what}, rank {} {given}: pass the same on every rank",
        mesh.layout(),
        mesh.rank()
    )))
}

/// Returns the largest of all ranks' values, element by element. A rank in another collective gets an error that names
/// `what`. Collective over the mesh.
pub(crate) fn largest_over<T: Element>(mesh: &DeviceMesh, mut values: Vec<T>, what: &str) -> Result<Vec<T>> {
    let subject = Subject::new(what, []);
    for dim in 0..mesh.layout().shape().len() {
        let group = mesh.group(dim)?.signed(Signature::new(&subject, []));
        values = group.all_reduce_values(values, ReduceOp::Max)?;
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_and_unpacking_are_inverse() {
        let layout = ShardLayout { outer: 2, chunks: vec![2, 1, 0] };
        let full = Buffer::from(vec![0f32, 1., 2., 10., 11., 12.]);
        let mut shards = Buffer::zeros(full.dtype(), 6);
        layout.pack(&full, &mut shards).unwrap();
        assert_eq!(shards, Buffer::from(vec![0f32, 1., 10., 11., 2., 12.]));
        let mut back = Buffer::zeros(full.dtype(), 6);
        layout.unpack(&shards, &mut back).unwrap();
        assert_eq!(back, full);
        layout.unpack(&shards, &mut Buffer::zeros(full.dtype(), 5)).unwrap_err();
        layout.pack(&full, &mut Buffer::zeros(fsdp_core::DType::F64, 6)).unwrap_err();
    }
}
