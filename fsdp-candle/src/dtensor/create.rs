//! DTensors of constants and of random values, of which each rank makes its own part.

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use fsdp_core::layout::Region;
use fsdp_core::{Buffer, DTensorSpec, DeviceMesh, Placement};

use super::tensor::{DTensor, zeros};
use crate::error::{Error, Result};
use crate::initializer::{Initializer, Philox, ShardRequest};
use crate::storage::{to_core_dtype, to_dtype, to_tensor};

impl DTensor {
    /// Zeros. No communication, as of all that makes a DTensor of nothing: PyTorch's `torch.distributed.tensor.zeros`.
    ///
    /// # Errors
    /// Those of [`DTensorSpec::new`], and a product's partial placement.
    pub fn zeros(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        made(shape.into(), dtype, mesh, placements, |_, local| zeros(local, dtype, device))
    }

    /// Ones.
    ///
    /// # Errors
    /// As [`DTensor::zeros`].
    pub fn ones(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        Self::full(1., shape, dtype, device, mesh, placements)
    }

    /// A value everywhere, rounded to the dtype.
    ///
    /// # Errors
    /// As [`DTensor::zeros`].
    pub fn full(
        value: f64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        made(shape.into(), dtype, mesh, placements, |_, local| match local.contains(&0) {
            true => zeros(local, dtype, device),
            false => Ok(to_dtype(&Tensor::full(value, local, device)?, dtype)?),
        })
    }

    /// Random values between 0 and 1, all alike probable. They follow from the seed and the element's place in the
    /// whole tensor alone (Philox): the tensor is the same on any mesh and under any placements.
    ///
    /// # Errors
    /// As [`DTensor::zeros`], and when the dtype is no floating point type.
    pub fn rand(
        seed: u64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        drawn(Init::Uniform { lo: 0., up: 1. }, seed, shape.into(), (dtype, device), mesh, placements)
    }

    /// Random values of the normal distribution of mean 0 and variance 1, drawn as those of [`DTensor::rand`].
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use fsdp_candle::{DTensor, Placement::{Replicate, Shard}, World};
    /// # use fsdp_core::process_group::local;
    /// # local::run(2, |group| {
    /// # let world = World::of(group);
    /// # let mesh = world.mesh(&[("dp", 2)])?;
    /// let draw = |placement| DTensor::randn(7, (5, 3), DType::F32, world.device(), &mesh, &[placement]);
    /// let (rows, all) = (draw(Shard(0))?, draw(Replicate)?);
    /// assert_eq!(rows.full_tensor()?.to_vec2::<f32>()?, all.to_local().to_vec2::<f32>()?);
    /// # Ok::<_, fsdp_candle::Error>(())
    /// # }).into_iter().collect::<Result<Vec<_>, _>>()?;
    /// # Ok::<(), fsdp_candle::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`DTensor::rand`].
    pub fn randn(
        seed: u64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        drawn(Init::Randn { mean: 0., stdev: 1. }, seed, shape.into(), (dtype, device), mesh, placements)
    }
}

/// What `make` makes of the part that this rank has under `placements`; terms of a reduction come of the whole values.
fn made(
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
    fsdp_core::dtensor::plan(&spec, &goal)?;
    let local = make(&spec, &spec.local_shape(mesh.rank())?)?;
    DTensor::at(local, spec, mesh).redistribute(placements)
}

fn drawn(
    init: Init,
    seed: u64,
    shape: Shape,
    (dtype, device): (DType, &Device),
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<DTensor> {
    if !dtype.is_float() {
        return Err(Error::Argument(format!("random values of {dtype:?} can't be drawn: use F32, F64, BF16 or F16")));
    }
    made(shape, dtype, mesh, placements, |spec, local_shape| {
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
            local = local.slice_assign(&places(&regions, region), &draw(region)?)?;
        }
        Ok(local.to_device(device)?)
    })
}

/// Where a region is among those that a rank holds, which lie as in the whole tensor with everything else taken out.
fn places(regions: &[Region], region: &Region) -> Vec<std::ops::Range<usize>> {
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
