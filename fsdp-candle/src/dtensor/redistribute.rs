//! What communicates: from one layout of a DTensor to another.

use std::sync::Arc;

use candle_core::Tensor;
use fsdp_core::{DTensorSpec, DeviceMesh, Placement, dtensor};

use super::memory::DeviceMemory;
use super::tensor::DTensor;
use crate::error::Result;
use crate::storage::{TensorMemory, to_tensor};

impl DTensor {
    /// The same tensor under other placements, by the steps of [`fsdp_core::dtensor::plan`]. Collective over the mesh;
    /// every rank passes the same placements. A tensor that lies so already shares its memory with the result.
    ///
    /// From replicate to `Partial(Sum)` rank 0 of the mesh dimension keeps the elements and the others get zeros; to
    /// `Partial` of an average, a smallest or a largest every rank keeps them.
    ///
    /// # Errors
    /// Those of [`DTensorSpec::new`], of [`fsdp_core::dtensor::plan`], and of a collective.
    pub fn redistribute(&self, placements: &[Placement]) -> Result<Self> {
        self.redistribute_async(placements)?.wait()
    }

    /// [`DTensor::redistribute`] that is in flight when this returns: PyTorch's `async_op=True`. All its collectives
    /// are issued by then, so that ranks issue them in the order of their calls; where it takes several, the last is
    /// in flight and those before it were waited for.
    ///
    /// Nobody may change the elements of this DTensor in place before [`Redistribution::wait`].
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
    ///
    /// # Errors
    /// As [`DTensor::redistribute`].
    pub fn redistribute_async(&self, placements: &[Placement]) -> Result<Redistribution> {
        self.start(placements, |tensor| tensor)
    }

    /// All of the tensor, reduced where it is partial, on every rank. Collective over the mesh. It shares the memory of
    /// a tensor that every rank holds already.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn full_tensor(&self) -> Result<Tensor> {
        self.full_tensor_async()?.wait()
    }

    /// [`DTensor::full_tensor`] that is in flight when this returns, as [`DTensor::redistribute_async`] is.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn full_tensor_async(&self) -> Result<Redistribution<Tensor>> {
        self.start(&vec![Placement::Replicate; self.placements().len()], |tensor| tensor.to_local().clone())
    }

    fn start<T>(&self, placements: &[Placement], finish: fn(DTensor) -> T) -> Result<Redistribution<T>> {
        let (from, mesh) = (self.spec(), self.device_mesh().clone());
        let spec = from.with_placements(placements)?;
        let given = self.to_local().contiguous()?;
        let local = Arc::new(TensorMemory(given.clone()));
        let memory = Arc::new(DeviceMemory::of(self.device())?);
        let moving = dtensor::Redistribution::issue(from, &spec, &mesh, local, memory)?;
        Ok(Redistribution { moving, given, spec, mesh, finish })
    }
}

/// A redistribution in flight: of [`DTensor::redistribute_async`], or of [`DTensor::full_tensor_async`]. Dropping it
/// does not cancel it.
#[must_use = "the result comes from wait()"]
pub struct Redistribution<T = DTensor> {
    moving: dtensor::Redistribution,
    given: Tensor,
    spec: DTensorSpec,
    mesh: DeviceMesh,
    finish: fn(DTensor) -> T,
}

impl<T> Redistribution<T> {
    /// Whether [`Redistribution::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        self.moving.is_done()
    }

    /// The result. For memory of the host this blocks until it is there; for a device's, what the device computes next
    /// waits, and the host goes on.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn wait(self) -> Result<T> {
        let Redistribution { moving, given, spec, mesh, finish } = self;
        let local = match moving.wait()? {
            Some(buffer) => to_tensor(buffer, &spec.local_shape(mesh.rank())?, given.device())?,
            None => given,
        };
        Ok(finish(DTensor::at(local, spec, &mesh)))
    }
}
