//! The ranks that a parameter is sharded and replicated over.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fsdp_core::Buffer;
use fsdp_core::layout::{Region, chunk_range, local_region};
use fsdp_core::{DeviceMesh, Placement, ProcessGroup};

use crate::error::{Error, Result};
use crate::kernels::{self, Rows, Slice, SliceMut};

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

    /// The named dimensions of a larger mesh: PyTorch's `dp_mesh_dims`.
    ///
    /// # Errors
    /// When the mesh has no such dimension.
    pub fn of_dims(mesh: &DeviceMesh, replicate: Option<&str>, shard: &str) -> Result<Self> {
        let names: Vec<&str> = replicate.into_iter().chain([shard]).collect();
        Self::new(&mesh.slice(&names)?)
    }
}

/// A mesh in its roles: a 1-D mesh shards (FSDP); of a 2-D mesh the first dimension replicates and the second shards
/// (HSDP).
pub(crate) struct DataParallel {
    mesh: DeviceMesh,
    shard: ProcessGroup,
    replicate: Option<ProcessGroup>,
    neighbours: Mutex<HashMap<usize, ProcessGroup>>,
    /// The shard ranks once more, for reductions that do not queue behind gathers.
    apart: Mutex<Option<ProcessGroup>>,
}

impl DataParallel {
    pub(crate) fn of(mesh: &DeviceMesh) -> Result<Self> {
        let (shard, replicate) = match mesh.layout().shape().len() {
            1 => (mesh.group(0)?.clone(), None),
            2 => (mesh.group(1)?.clone(), Some(mesh.group(0)?.clone())),
            dims => {
                return Err(fsdp_core::Error::Mesh(format!(
                    "fully_shard takes a 1-D mesh (shard) or a 2-D one (replicate, shard); got {} with {dims} \
                     dimensions: pass a slice of it",
                    mesh.layout()
                ))
                .into());
            }
        };
        let replicate = replicate.filter(|group| group.size() > 1);
        Ok(DataParallel { mesh: mesh.clone(), shard, replicate, neighbours: Mutex::default(), apart: Mutex::default() })
    }

    /// Fails when ranks of `of`, the mesh of all copies, hold none of these.
    pub(crate) fn check_covers(&self, of: &DeviceMesh) -> std::result::Result<(), String> {
        if self.mesh.covers(of) {
            return Ok(());
        }
        Err(format!(
            "it is trained on the mesh {} of {} rank(s), which leaves out some of the {} ranks of its ShardedVarMap's \
             mesh {}: gradients would not reach those, and their copies would drift apart. Replicate it over them (a \
             mesh (replicate, shard) of all ranks), freeze it, or give the ranks that share it a ShardedVarMap of \
             their own on their mesh",
            self.mesh.layout(),
            self.mesh.size(),
            of.size(),
            of.layout()
        ))
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

    /// One placement a mesh dimension, for a parameter sharded along `dim`.
    pub(crate) fn placements(&self, dim: usize) -> Vec<Placement> {
        match self.mesh.layout().shape().len() {
            1 => vec![Placement::Shard(dim)],
            _ => vec![Placement::Replicate, Placement::Shard(dim)],
        }
    }

    /// What this rank holds of a parameter sharded along `dim`, and how the shards of all ranks lie in it.
    pub(crate) fn lay_out(&self, name: &str, shape: &[usize], dim: usize) -> Result<(Region, ShardLayout)> {
        let world = self.shard.size();
        let fail = |message: String| Error::Parameter { name: name.into(), message };
        let Some(&extent) = shape.get(dim) else {
            return Err(fail(format!(
                "its shape {shape:?} has no dimension {dim} to shard; a scalar becomes a tensor of shape [1]"
            )));
        };
        if dim > 0 && !extent.is_multiple_of(world) {
            return Err(fail(format!(
                "dimension {dim} of its shape {shape:?} does not divide evenly over {world} ranks; dimensions other \
                 than 0 must: shard another, or change the mesh"
            )));
        }
        let region = local_region(shape, self.mesh.layout(), &self.mesh.coordinate(), &self.placements(dim))?;
        let inner: usize = shape[dim + 1..].iter().product();
        let outer: usize = shape[..dim].iter().product();
        let chunks = (0..world).map(|rank| chunk_range(extent, world, rank).len() * inner).collect();
        Ok((region, ShardLayout { outer, chunks }))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How the shards of a parameter lie in it: it is `outer` rows (one, when dimension 0 is sharded), each cut into a
/// chunk for every rank.
pub(crate) struct ShardLayout {
    outer: usize,
    /// Elements of a row that each rank holds.
    chunks: Vec<usize>,
}

impl ShardLayout {
    /// How many elements each rank holds.
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.chunks.iter().map(|chunk| chunk * self.outer).collect()
    }

    /// Whether the concatenation of all shards is the parameter itself.
    pub(crate) fn is_concatenation(&self) -> bool {
        self.outer <= 1
    }

    /// Turns the concatenation of all shards into the parameter.
    pub(crate) fn unpack(&self, shards: &Buffer, full: &mut Buffer) -> candle_core::Result<()> {
        let kernels = kernels::of_buffer(shards)?;
        self.chunks().try_for_each(|(packed, column, rows)| {
            let from = Slice::from(shards).range(packed..shards.len())?;
            let room = full.len();
            kernels.copy_rows(from, SliceMut::from(&mut *full).range(column..room)?, rows)
        })
    }

    /// Turns the parameter into the concatenation of all shards.
    pub(crate) fn pack(&self, full: &Buffer, shards: &mut Buffer) -> candle_core::Result<()> {
        let kernels = kernels::of_buffer(full)?;
        self.chunks().try_for_each(|(packed, column, rows)| {
            let rows = Rows { from_stride: rows.to_stride, to_stride: rows.from_stride, ..rows };
            let from = Slice::from(full).range(column..full.len())?;
            let room = shards.len();
            kernels.copy_rows(from, SliceMut::from(&mut *shards).range(packed..room)?, rows)
        })
    }

    /// Each rank's chunk: where it begins in the concatenation and in a row of the parameter, and its rows, from there
    /// to here.
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
