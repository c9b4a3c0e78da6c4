//! A tensor over the ranks of a mesh.

use std::sync::Arc;

use super::{plan::plan, redistribute::Redistribution, spec::DTensorSpec};
use crate::{Buffer, DeviceId, DeviceMesh, Error, Heap, Placement, Result};

/// One tensor over the ranks of a mesh, of which this is one rank's part, as PyTorch's `DTensor`; in host memory.
///
/// Clones share the local elements.
///
/// ```
/// use fsdp_core::{Buffer, DTensor, DeviceMesh, Placement::{Replicate, Shard}, process_group::local};
/// local::run(2, |world| {
///     let mesh = DeviceMesh::new(&world, &[("dp", 2)]).unwrap();
///     // Rows of [[1, 2], [3, 4], [5, 6]]: two for rank 0, one for rank 1.
///     let rows = if world.rank() == 0 { vec![1.0, 2.0, 3.0, 4.0] } else { vec![5.0, 6.0] };
///     let tensor = DTensor::from_local(Buffer::F32(rows), &[3, 2], &mesh, &[Shard(0)]).unwrap();
///     let columns = tensor.redistribute(&[Shard(1)]).unwrap();
///     let expected = if world.rank() == 0 { vec![1.0, 3.0, 5.0] } else { vec![2.0, 4.0, 6.0] };
///     assert_eq!(columns.local(), &Buffer::F32(expected));
///     assert_eq!(columns.full_tensor().unwrap(), Buffer::F32(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
/// });
/// ```
#[derive(Clone, Debug)]
pub struct DTensor {
    spec: DTensorSpec,
    mesh: DeviceMesh,
    local: Arc<Buffer>,
    local_shape: Vec<usize>,
}

impl DTensor {
    /// The tensor of global shape `shape` of which this rank holds `local`, row-major. No communication.
    ///
    /// # Errors
    /// Those of [`DTensorSpec::new`], and when `local` has not the number of elements that this rank holds or is a
    /// device's.
    pub fn from_local(local: Buffer, shape: &[usize], mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        let spec = DTensorSpec::new(mesh.layout().clone(), placements, shape, local.dtype())?;
        let expected = spec.local_shape(mesh.rank())?;
        check_len("the local tensor", &local, &expected, mesh, &spec)?;
        Ok(DTensor { spec, mesh: mesh.clone(), local: Arc::new(local), local_shape: expected })
    }

    /// Lays a tensor out over a mesh. Every rank passes a full tensor of the same shape and dtype; the data is that of
    /// the mesh's rank 0, as in PyTorch. Collective over the mesh.
    ///
    /// ```
    /// use fsdp_core::{Buffer, DTensor, DeviceMesh, Placement, process_group::local};
    /// let locals = local::run(3, |world| {
    ///     let mesh = DeviceMesh::new(&world, &[("dp", 3)]).unwrap();
    ///     let mine = Buffer::I64(vec![10 * world.rank() as i64; 4]);
    ///     DTensor::distribute_tensor(mine, &[4], &mesh, &[Placement::Shard(0)]).unwrap().into_local()
    /// });
    /// assert_eq!(locals, [Buffer::I64(vec![0, 0]), Buffer::I64(vec![0, 0]), Buffer::I64(vec![])]);
    /// ```
    ///
    /// # Errors
    /// Those of [`DTensorSpec::new`] and of [`plan`] from replicate to `placements`; when `full` has not the elements
    /// of `shape`; those of a collective.
    pub fn distribute_tensor(
        full: Buffer,
        shape: &[usize],
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let replicate = vec![Placement::Replicate; placements.len()];
        let spec = DTensorSpec::new(mesh.layout().clone(), &replicate, shape, full.dtype())?;
        check_len("the full tensor", &full, shape, mesh, &spec)?;
        let to = spec.with_placements(placements)?;
        plan(&spec, &to)?;
        let local = Arc::new(mesh.broadcast(full, 0)?);
        Self::at(spec, mesh, local)?.redistribute(placements)
    }

    /// The same tensor under other placements, by the steps of [`plan`]. Collective over the mesh; every rank passes
    /// the same placements. A tensor that lies so already shares its elements with the result.
    ///
    /// Reductions are those of [`crate::ProcessGroup`]. From replicate to `Partial(Sum)` rank 0 of the mesh dimension
    /// keeps the elements and the others get zeros; to `Partial` of an average, a smallest or a largest every rank
    /// keeps them.
    ///
    /// # Errors
    /// Those of [`DTensorSpec::new`], of [`plan`], and of a collective.
    pub fn redistribute(&self, placements: &[Placement]) -> Result<Self> {
        let to = self.spec.with_placements(placements)?;
        let moved = Redistribution::issue(&self.spec, &to, &self.mesh, self.local.clone(), Arc::new(Heap))?.wait()?;
        let local = moved.map_or_else(|| self.local.clone(), Arc::new);
        Self::at(to, &self.mesh, local)
    }

    fn at(spec: DTensorSpec, mesh: &DeviceMesh, local: Arc<Buffer>) -> Result<Self> {
        let local_shape = spec.local_shape(mesh.rank())?;
        Ok(DTensor { spec, mesh: mesh.clone(), local, local_shape })
    }

    /// All of the tensor, reduced where it is partial, on every rank. Collective over the mesh.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn full_tensor(&self) -> Result<Buffer> {
        let replicate = vec![Placement::Replicate; self.spec.placements().len()];
        Ok(self.redistribute(&replicate)?.into_local())
    }

    /// The elements that this rank holds, row-major, of shape [`DTensor::local_shape`]. PyTorch's `to_local`.
    pub fn local(&self) -> &Buffer {
        &self.local
    }

    /// The elements that this rank holds, copied only while another DTensor shares them.
    pub fn into_local(self) -> Buffer {
        Arc::unwrap_or_clone(self.local)
    }

    /// The shape of what this rank holds. [`DTensorSpec::local_shape`] tells any rank's.
    pub fn local_shape(&self) -> Vec<usize> {
        self.local_shape.clone()
    }

    /// The layout.
    pub fn spec(&self) -> &DTensorSpec {
        &self.spec
    }

    /// The shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        self.spec.shape()
    }

    /// The placements, one a mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        self.spec.placements()
    }

    /// The mesh.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.mesh
    }
}

fn check_len(what: &str, buffer: &Buffer, shape: &[usize], mesh: &DeviceMesh, spec: &DTensorSpec) -> Result<()> {
    let expected: usize = shape.iter().product();
    if buffer.device() != DeviceId::Host {
        return Err(Error::Layout(format!(
            "rank {} of the mesh: {what} is in the memory of {}: this DTensor is over the host's, and fsdp_candle's \
             over that of any device",
            mesh.rank(),
            buffer.device()
        )));
    }
    if buffer.len() == expected {
        return Ok(());
    }
    Err(Error::Layout(format!(
        "rank {} of the mesh: {what} has {} elements, but of {spec} it must have shape {shape:?}, {expected} elements",
        mesh.rank(),
        buffer.len()
    )))
}
