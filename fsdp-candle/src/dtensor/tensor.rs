//! One tensor over the ranks of a mesh.

use candle_core::{DType, Device, Shape, Tensor};
use fsdp_core::{DTensorSpec, DeviceMesh, Placement};

use super::rules::{self, Unary};
use crate::error::{Error, Result};
use crate::kernels;
use crate::storage::{to_core_dtype, to_dtype, to_tensor};

/// One tensor over the ranks of a mesh, of which this is one rank's part, as PyTorch's `DTensor`.
///
/// Operations work on the part, and their results lie as their operands do: a sum over a sharded dimension is a
/// [`Placement::Partial`], what is linear goes on with it, and everything else is an error that says which
/// redistribution it takes. [`DTensor::redistribute`], [`DTensor::full_tensor`],
/// [`distribute_tensor`](crate::distribute_tensor) and [`PartialNorm::full_tensor`](crate::PartialNorm) are all that
/// communicates; the ranks of the mesh call them in one order.
///
/// A DTensor is outside autograd: it is for parameters, gradients and state between steps, and no gradient flows
/// through one. Layers compute with plain tensors, which `fully_shard` gathers.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use fsdp_candle::{distribute_tensor, DTensor, NormType, Placement::{Partial, Replicate, Shard}, ReduceOp, World};
/// use fsdp_core::process_group::local;
///
/// local::run(2, |group| {
///     let world = World::of(group);
///     let mesh = world.mesh(&[("dp", 2)])?;
///     // Rows of [[0, 1], [2, 3], [4, 5]]: two for rank 0, one for rank 1.
///     let full = Tensor::arange(0f32, 6., world.device())?.reshape((3, 2))?;
///     let rows = distribute_tensor(&full, &mesh, &[Shard(0)])?;
///     assert_eq!(rows.to_local().dims(), [2 - world.rank(), 2]);
///
///     // A sum over the rows that ranks share is a partial one, until somebody asks for the reduction.
///     let sum = rows.mul(2.)?.sum(0)?;
///     assert_eq!(sum.placements(), [Partial(ReduceOp::Sum)]);
///     assert_eq!(sum.full_tensor()?.to_vec1::<f32>()?, [12., 18.]);
///     let error = sum.exp().unwrap_err().to_string();
///     assert!(error.contains("redistribute to [R] first"), "{error}");
///
///     let columns = rows.redistribute(&[Shard(1)])?;
///     assert_eq!(columns.to_local().dims(), [3, 1]);
///     assert_eq!(columns.norm(NormType::Two)?.full_tensor()?.to_scalar::<f32>()?, 55f32.sqrt());
///     Ok::<_, fsdp_candle::Error>(())
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
#[derive(Clone)]
pub struct DTensor {
    local: Tensor,
    spec: DTensorSpec,
    mesh: DeviceMesh,
}

impl DTensor {
    /// The tensor of global shape `shape` of which this rank holds `local`, whose memory it shares. No communication.
    ///
    /// # Errors
    /// Those of [`DTensorSpec::new`], and when `local` has not the shape of what this rank holds.
    pub fn from_local(
        local: &Tensor,
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let dtype = to_core_dtype(local.dtype())?;
        let spec = DTensorSpec::new(mesh.layout().clone(), placements, shape.into().dims(), dtype)?;
        let expected = spec.local_shape(mesh.rank())?;
        if local.dims() != expected {
            return Err(Error::Argument(format!(
                "rank {} of the mesh: the local tensor has shape {:?}, but of {spec} it must have {expected:?}",
                mesh.rank(),
                local.dims()
            )));
        }
        Ok(Self::at(local.clone(), spec, mesh))
    }

    /// What this rank holds under `spec`.
    pub(super) fn at(local: Tensor, spec: DTensorSpec, mesh: &DeviceMesh) -> Self {
        DTensor { local: local.detach(), spec, mesh: mesh.clone() }
    }

    /// The elements that this rank holds, in the memory that the DTensor has. [`DTensorSpec::local_shape`] and
    /// [`DTensorSpec::local_region`] of [`DTensor::spec`] tell any rank's shape and place.
    pub fn to_local(&self) -> &Tensor {
        &self.local
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

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.local.dtype()
    }

    /// Where this rank's elements are.
    pub fn device(&self) -> &Device {
        self.local.device()
    }

    /// The same values in another dtype. Terms that are still to be added are converted one by one, to floating point
    /// alone.
    ///
    /// # Errors
    /// For terms of a sum or an average that are to become integers: they are to be redistributed first.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let kind = if dtype.is_float() { Unary::Conversion } else { Unary::Increasing };
        let placements = rules::unary("to_dtype", kind, &self.spec)?;
        let (mesh, to) = (self.mesh.layout().clone(), to_core_dtype(dtype)?);
        let spec = DTensorSpec::new(mesh, &placements, self.shape(), to)?;
        Ok(Self::at(to_dtype(&self.local, dtype)?, spec, &self.mesh))
    }

    /// The same tensor with this rank's elements on another device. Ranks that communicate hold theirs on the device of
    /// the mesh's groups, or in host memory.
    ///
    /// # Errors
    /// Those of the copy.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self::at(self.local.to_device(device)?, self.spec.clone(), &self.mesh))
    }

    /// The result of an operation, of global shape `shape`: `compute` makes this rank's elements, where it holds any.
    pub(super) fn result(
        &self,
        shape: &[usize],
        placements: &[Placement],
        compute: impl FnOnce(&[usize]) -> Result<Tensor>,
    ) -> Result<Self> {
        let spec = DTensorSpec::new(self.mesh.layout().clone(), placements, shape, self.spec.dtype())?;
        let expected = spec.local_shape(self.mesh.rank())?;
        let local = match expected.contains(&0) {
            true => zeros(&expected, self.dtype(), self.device())?,
            false => compute(&expected)?,
        };
        Ok(Self::at(local, spec, &self.mesh))
    }
}

/// Zeros of any shape. Candle asks CUDA for a kernel of no threads where there is no element, which it refuses.
pub(super) fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let zeros = kernels::of_device(device)?.zeros(to_core_dtype(dtype)?, shape.iter().product())?;
    Ok(to_tensor(zeros, shape, device)?)
}

impl std::fmt::Debug for DTensor {
    /// `DTensor(F32 [5, 3] as [S(0)] on (dp: 4), of which rank 1 holds [2, 3])`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DTensor({}, of which rank {} holds {:?})", self.spec, self.mesh.rank(), self.local.dims())
    }
}
