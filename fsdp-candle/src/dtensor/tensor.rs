//! The tensor type, its constructors and its redistributions.

use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use fsdp_core::dtensor::{self, LocalMemory, Rows};
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DTensorSpec, DeviceMesh, Placement, View};

use super::placement_rules::{self, Unary};
use crate::error::{Error, Result};
use crate::initializer::{Initializer, Philox, ShardRequest};
use crate::kernels::{self, Kernels, Slice, SliceMut};
use crate::storage::{DeviceMemory, TensorMemory, copied, to_core_dtype, to_dtype, to_tensor};

/// One tensor over the ranks of a mesh, as PyTorch's `DTensor`. Holds this rank's part.
///
/// Operations work on the part and keep the placements of their operands. A sum over a sharded dimension is a
/// [`Placement::Partial`], linear operations accept partials, and everything else returns an error that names the
/// redistribution to call. [`DTensor::redistribute`], [`DTensor::full_tensor`],
/// [`distribute_tensor`](crate::distribute_tensor) and [`PartialNorm::full_tensor`](crate::PartialNorm) communicate;
/// all ranks of the mesh call them in one order.
///
/// A DTensor is outside autograd. Use it for parameters, gradients and state between steps. Layers compute with plain
/// tensors, which `fully_shard` gathers.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use fsdp_candle::{distribute_tensor, DTensor, NormType, Placement::{Partial, Replicate, Shard}, ReduceOp, World};
/// use fsdp_core::process_group::local;
///
/// local::try_run(2, |group| {
///     let world = World::of(group);
///     let mesh = world.mesh(&[("dp", 2)])?;
///     // Rank 0 holds two rows of [[0, 1], [2, 3], [4, 5]], rank 1 one.
///     let full = Tensor::arange(0f32, 6., world.device())?.reshape((3, 2))?;
///     let rows = distribute_tensor(&full, &mesh, &[Shard(0)])?;
///     assert_eq!(rows.to_local().dims(), [2 - world.rank(), 2]);
///
///     // A sum over sharded rows is partial until it is reduced.
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
/// })?;
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
#[derive(Clone)]
pub struct DTensor {
    local: Tensor,
    spec: DTensorSpec,
    mesh: DeviceMesh,
    /// Name of the tensor in errors of its collectives.
    name: Option<Arc<str>>,
}

impl DTensor {
    /// Returns the tensor of global shape `shape` of which this rank holds `local`. Shares its memory. Does not
    /// communicate. Fails if `local` does not have the shape of this rank's part.
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
                "rank {} of the mesh: the local tensor has shape {:?}, expected {expected:?} for {spec}",
                mesh.rank(),
                local.dims()
            )));
        }
        Ok(Self::at(local.clone(), spec, mesh))
    }

    /// Makes a tensor of this rank's elements under `spec`.
    pub(super) fn at(local: Tensor, spec: DTensorSpec, mesh: &DeviceMesh) -> Self {
        DTensor { local: local.detach(), spec, mesh: mesh.clone(), name: None }
    }

    /// Names the tensor in errors of its collectives. Operations have results without a name.
    pub(crate) fn named(self, name: &str) -> Self {
        DTensor { name: Some(name.into()), ..self }
    }

    /// Returns this rank's elements, in the memory of the DTensor. [`DTensor::spec`] gives any rank's shape and region.
    pub fn to_local(&self) -> &Tensor {
        &self.local
    }

    /// Returns the layout.
    pub fn spec(&self) -> &DTensorSpec {
        &self.spec
    }

    /// Returns the shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        self.spec.shape()
    }

    /// Returns the placements, one a mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        self.spec.placements()
    }

    /// Returns the mesh.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.local.dtype()
    }

    /// Returns the device of this rank's elements.
    pub fn device(&self) -> &Device {
        self.local.device()
    }

    /// Converts the elements. Terms of a sum are converted one by one, to floating point only. Fails for terms of a sum
    /// or an average that would become integers: redistribute first.
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let kind = if dtype.is_float() { Unary::Conversion } else { Unary::Increasing };
        let placements = placement_rules::unary("to_dtype", kind, &self.spec)?;
        let (mesh, to) = (self.mesh.layout().clone(), to_core_dtype(dtype)?);
        let spec = DTensorSpec::new(mesh, &placements, self.shape(), to)?;
        Ok(Self::at(to_dtype(&self.local, dtype)?, spec, &self.mesh))
    }

    /// Copies this rank's elements to another device. Ranks that communicate keep elements on the device of the mesh's
    /// groups or in host memory.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self::at(self.local.to_device(device)?, self.spec.clone(), &self.mesh))
    }

    /// Makes the result of an operation, of global shape `shape`. Calls `compute` for this rank's elements, if it holds
    /// any.
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

/// Returns zeros of any shape. Candle launches a CUDA kernel without threads for an empty tensor, which CUDA refuses.
pub(super) fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let zeros = kernels::of_device(device)?.zeros(to_core_dtype(dtype)?, shape.iter().product())?;
    Ok(to_tensor(zeros, shape, device)?)
}

impl std::fmt::Debug for DTensor {
    /// `DTensor(F32 [5, 3] as [S(0)] on (dp: 4); rank 1 holds [2, 3])`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DTensor({}; rank {} holds {:?})", self.spec, self.mesh.rank(), self.local.dims())
    }
}

impl DTensor {
    /// Returns zeros, as PyTorch's `torch.distributed.tensor.zeros`. Constructors do not communicate. Fails for a
    /// product's partial placement.
    pub fn zeros(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        filled(shape.into(), dtype, mesh, placements, |_, local| zeros(local, dtype, device))
    }

    /// Returns ones.
    pub fn ones(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        Self::full(1., shape, dtype, device, mesh, placements)
    }

    /// Returns a tensor filled with `value`, rounded to the dtype.
    pub fn full(
        value: f64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        filled(shape.into(), dtype, mesh, placements, |_, local| match local.contains(&0) {
            true => zeros(local, dtype, device),
            false => Ok(to_dtype(&Tensor::full(value, local, device)?, dtype)?),
        })
    }

    /// Returns random values, uniform in 0..1. They depend on the seed and an element's index in the whole tensor only
    /// (Philox), so the tensor is the same on any mesh and under any placements. Fails as [`DTensor::zeros`] does, and
    /// if the dtype is not a floating-point type.
    pub fn rand(
        seed: u64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        random(Init::Uniform { lo: 0., up: 1. }, seed, shape.into(), (dtype, device), mesh, placements)
    }

    /// Returns random values of the standard normal distribution, drawn as by [`DTensor::rand`].
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use fsdp_candle::{DTensor, Placement::{Replicate, Shard}, World};
    /// # use fsdp_core::process_group::local;
    /// # local::try_run(2, |group| {
    /// # let world = World::of(group);
    /// # let mesh = world.mesh(&[("dp", 2)])?;
    /// let draw = |placement| DTensor::randn(7, (5, 3), DType::F32, world.device(), &mesh, &[placement]);
    /// let (rows, all) = (draw(Shard(0))?, draw(Replicate)?);
    /// assert_eq!(rows.full_tensor()?.to_vec2::<f32>()?, all.to_local().to_vec2::<f32>()?);
    /// # Ok::<_, fsdp_candle::Error>(())
    /// # })?;
    /// # Ok::<(), fsdp_candle::Error>(())
    /// ```
    pub fn randn(
        seed: u64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        random(Init::Randn { mean: 0., stdev: 1. }, seed, shape.into(), (dtype, device), mesh, placements)
    }
}

/// Calls `make` for this rank's part under `placements`. Partial placements are made from whole values.
fn filled(
    shape: Shape,
    dtype: DType,
    mesh: &DeviceMesh,
    placements: &[Placement],
    make: impl FnOnce(&DTensorSpec, &[usize]) -> Result<Tensor>,
) -> Result<DTensor> {
    let whole = |&placement: &Placement| match placement {
        Placement::Partial(_) => Placement::Replicate,
        placement => placement,
    };
    let wholes: Vec<_> = placements.iter().map(whole).collect();
    let spec = DTensorSpec::new(mesh.layout().clone(), &wholes, shape.dims(), to_core_dtype(dtype)?)?;
    let goal = spec.with_placements(placements)?;
    dtensor::plan(&spec, &goal)?;
    let local = make(&spec, &spec.local_shape(mesh.rank())?)?;
    DTensor::at(local, spec, mesh).redistribute(placements)
}

fn random(
    init: Init,
    seed: u64,
    shape: Shape,
    (dtype, device): (DType, &Device),
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<DTensor> {
    if !dtype.is_float() {
        return Err(Error::Argument(format!("cannot draw random values of {dtype:?}: use F32, F64, BF16 or F16")));
    }
    filled(shape, dtype, mesh, placements, |spec, local_shape| {
        let regions = spec.local_regions(mesh.rank())?;
        let draw = |region: &Region| -> Result<Tensor> {
            let mut values = Buffer::try_zeros(to_core_dtype(dtype)?, region.elements())?;
            let request = ShardRequest { name: "", shape: spec.shape(), dtype, region, init };
            Philox::new(seed).fill(&request, values.bytes_mut())?;
            Ok(to_tensor(values, &region.sizes, &Device::Cpu)?)
        };
        if let [region] = &regions[..] {
            return Ok(draw(region)?.to_device(device)?);
        }
        let mut local = zeros(local_shape, dtype, &Device::Cpu)?;
        for region in &regions {
            local = local.slice_assign(&local_positions(&regions, region), &draw(region)?)?;
        }
        Ok(local.to_device(device)?)
    })
}

/// Returns the position of a region in the local tensor, which concatenates the rank's regions in the order of the
/// whole tensor.
fn local_positions(regions: &[Region], region: &Region) -> Vec<std::ops::Range<usize>> {
    let place = |dim: usize| {
        let before = |other: &&Region| other.offsets[dim] < region.offsets[dim];
        let mut before: Vec<_> = regions.iter().filter(before).map(|r| (r.offsets[dim], r.sizes[dim])).collect();
        before.sort_unstable();
        before.dedup();
        let start: usize = before.into_iter().map(|(_, size)| size).sum();
        start..start + region.sizes[dim]
    };
    (0..region.sizes.len()).map(place).collect()
}

/// Distributes a tensor over a mesh, as PyTorch's `distribute_tensor`. Every rank passes a full tensor of the same
/// shape and dtype; the data is that of the mesh's rank 0. Collective over the mesh.
pub fn distribute_tensor(tensor: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor> {
    distribute_tensor_from(tensor, mesh, placements, Some(0))
}

/// Distributes the data of another rank of the mesh, PyTorch's `src_data_rank`. With `None`, each rank takes its part
/// of its own data and nothing is sent. Fails as [`distribute_tensor`] does, and if the mesh has no such rank.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fsdp_candle::{distribute_tensor_from, Placement::Shard, World};
/// # use fsdp_core::process_group::local;
/// # local::try_run(2, |group| {
/// # let world = World::of(group);
/// # let mesh = world.mesh(&[("dp", 2)])?;
/// let mine = Tensor::new(&[[world.rank() as u32; 2]; 2], world.device())?;
/// let sent = distribute_tensor_from(&mine, &mesh, &[Shard(0)], Some(1))?;
/// assert_eq!(sent.to_local().to_vec2::<u32>()?, [[1, 1]]);
/// let own = distribute_tensor_from(&mine, &mesh, &[Shard(0)], None)?;
/// assert_eq!(own.to_local().to_vec2::<u32>()?, [[world.rank() as u32; 2]]);
/// # Ok::<_, fsdp_candle::Error>(())
/// # })?;
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
pub fn distribute_tensor_from(
    tensor: &Tensor,
    mesh: &DeviceMesh,
    placements: &[Placement],
    src_data_rank: Option<usize>,
) -> Result<DTensor> {
    let replicate = vec![Placement::Replicate; placements.len()];
    let spec = DTensorSpec::new(mesh.layout().clone(), &replicate, tensor.dims(), to_core_dtype(tensor.dtype())?)?;
    dtensor::plan(&spec, &spec.with_placements(placements)?)?;
    let local = match src_data_rank {
        Some(root) => to_tensor(mesh.broadcast(copied(tensor)?, root)?, tensor.dims(), tensor.device())?,
        None => tensor.clone(),
    };
    DTensor::at(local, spec, mesh).redistribute(placements)
}

impl DTensor {
    /// Changes the placements, by the steps of [`fsdp_core::dtensor::plan`]. Collective over the mesh; every rank
    /// passes the same placements. If nothing changes, the result shares the memory of this tensor.
    ///
    /// From replicate to `Partial(Sum)`, rank 0 of the mesh dimension keeps the elements and the others get zeros. To
    /// `Partial` of an average, minimum or maximum, every rank keeps them.
    pub fn redistribute(&self, placements: &[Placement]) -> Result<Self> {
        self.redistribute_async(placements)?.wait()
    }

    /// Starts a [`DTensor::redistribute`]: PyTorch's `async_op=True`. Returns when all its collectives are issued, so
    /// ranks issue collectives in the order of their calls. Only the last collective may still run.
    ///
    /// Do not change the elements of this DTensor in place before [`Redistribution::wait`].
    ///
    /// ```
    /// use candle_core::{DType, Tensor};
    /// use fsdp_candle::{DTensor, Placement::{Replicate, Shard}, World};
    /// # let world = World::single()?;
    /// # let mesh = world.mesh(&[("dp", 1)])?;
    /// let rows = DTensor::ones((4, 2), DType::F32, world.device(), &mesh, &[Shard(0)])?;
    /// let gathering = rows.redistribute_async(&[Replicate])?;
    /// // What is computed here runs beside the all-gather.
    /// let squares = rows.square()?;
    /// assert_eq!(gathering.wait()?.shape(), squares.shape());
    /// # Ok::<(), fsdp_candle::Error>(())
    /// ```
    pub fn redistribute_async(&self, placements: &[Placement]) -> Result<Redistribution> {
        self.start(placements, |tensor| tensor)
    }

    /// Returns the whole tensor, reduced where it is partial, on every rank. Collective over the mesh. Shares the
    /// memory of a tensor that every rank already holds.
    pub fn full_tensor(&self) -> Result<Tensor> {
        self.full_tensor_async()?.wait()
    }

    /// Starts a [`DTensor::full_tensor`], as [`DTensor::redistribute_async`] does.
    pub fn full_tensor_async(&self) -> Result<Redistribution<Tensor>> {
        self.start(&vec![Placement::Replicate; self.placements().len()], |tensor| tensor.to_local().clone())
    }

    fn start<T>(&self, placements: &[Placement], finish: fn(DTensor) -> T) -> Result<Redistribution<T>> {
        let (from, mesh) = (self.spec(), self.device_mesh().clone());
        let spec = from.with_placements(placements)?;
        let given = self.to_local().contiguous()?;
        let local = Arc::new(TensorMemory(given.clone()));
        let memory = Arc::new(DeviceMemory(kernels::of_device(self.device())?));
        let moving = dtensor::Redistribution::issue(from, &spec, &mesh, local, memory, self.name.as_deref())?;
        Ok(Redistribution { moving, given, spec, mesh, finish })
    }
}

/// A redistribution in flight, from [`DTensor::redistribute_async`] or [`DTensor::full_tensor_async`]. Dropping it does
/// not cancel it.
#[must_use = "the result comes from wait()"]
pub struct Redistribution<T = DTensor> {
    moving: dtensor::Redistribution,
    given: Tensor,
    spec: DTensorSpec,
    mesh: DeviceMesh,
    finish: fn(DTensor) -> T,
}

impl<T> Redistribution<T> {
    /// Returns whether [`Redistribution::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        self.moving.is_done()
    }

    /// Waits for the result. Blocks for host memory; for device memory, the device's later work waits and the host
    /// continues.
    pub fn wait(self) -> Result<T> {
        let Redistribution { moving, given, spec, mesh, finish } = self;
        let local = match moving.wait()? {
            Some(buffer) => to_tensor(buffer, &spec.local_shape(mesh.rank())?, given.device())?,
            None => given,
        };
        Ok(finish(DTensor::at(local, spec, &mesh)))
    }
}

/// Memory in which a device's kernels pack and unpack redistributions.
impl LocalMemory for DeviceMemory {
    fn zeros(&self, dtype: fsdp_core::DType, len: usize) -> fsdp_core::Result<Buffer> {
        self.0.zeros(dtype, len)
    }

    fn copy_rows(&self, from: View<'_>, to: &mut Buffer, rows: &[Rows]) -> fsdp_core::Result<()> {
        rows.iter().try_for_each(|rows| copy(self.0, from, to, rows)).map_err(|error| fsdp_core::Error::Device {
            device: to.device(),
            what: "copying elements of a DTensor".into(),
            cause: error.to_string(),
        })
    }
}

fn copy(kernels: &dyn Kernels, from: View<'_>, to: &mut Buffer, rows: &Rows) -> candle_core::Result<()> {
    let &Rows { count, len, from: read, to: written, from_stride, to_stride } = rows;
    let (from, room) = (Slice::new(to.dtype(), from), to.len());
    let from = from.range(read..from.len())?;
    let to = SliceMut::from(to).range(written..room)?;
    kernels.copy_rows(from, to, kernels::Rows { count, len, from_stride, to_stride })
}
