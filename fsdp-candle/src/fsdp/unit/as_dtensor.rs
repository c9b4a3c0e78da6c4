//! A parameter as its users see it: a DTensor, whose values they read and set.

use candle_core::Tensor;
use candle_core::backprop::GradStore;

use super::param::FsdpParam;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::storage::{copy_tensor, to_dtype};

impl FsdpParam {
    /// The sharded parameter as a DTensor, in the memory of [`FsdpParam::var`]: what an optimizer has changed shows in
    /// it.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, Placement, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    /// # let model = fully_shard(&opts, vb, |vb| nn::linear_no_bias(4, 2, vb))?;
    /// for param in model.params() {
    ///     let dtensor = param.dtensor()?;
    ///     assert_eq!(dtensor.placements(), [Placement::Shard(0)]);
    ///     println!("{}: {:?} of {:?}", param.name(), dtensor.to_local().dims(), dtensor.shape());
    ///     // Every rank passes the whole tensor, and takes its own part of it.
    ///     param.set_full(&dtensor.mul(2.)?.full_tensor()?)?;
    /// }
    /// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// for param in model.params() {
    ///     let grad = param.grad(&grads)?.expect("it was used");
    ///     assert_eq!(grad.max_all()?.full_tensor()?.to_scalar::<f32>()?, 3.);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`DTensor::from_local`].
    pub fn dtensor(&self) -> Result<DTensor> {
        self.lying_alike(self.var().as_tensor())
    }

    /// The sharded gradient that a backward has left, as a DTensor that lies as the parameter does; `None` if it has
    /// none. It shares the gradient's memory. A rank whose shard is empty has an empty part of it.
    ///
    /// # Errors
    /// Those of [`DTensor::from_local`].
    pub fn grad(&self, grads: &GradStore) -> Result<Option<DTensor>> {
        let grad = match grads.get(self.var().as_tensor()) {
            Some(grad) => grad,
            None if self.is_empty_with_gradient(grads) => self.var().as_tensor(),
            None => return Ok(None),
        };
        self.lying_alike(grad).map(Some)
    }

    fn lying_alike(&self, local: &Tensor) -> Result<DTensor> {
        DTensor::from_local(local, self.shape(), self.device_mesh(), &self.placements())
    }

    /// Copies values into this rank's shard, as an assignment to PyTorch's `param.to_local()` does. Floating point
    /// dtypes are converted. No communication; what the unit had gathered before is stale, and is freed.
    ///
    /// # Errors
    /// When the tensor has not the shape of [`FsdpParam::region`] or is no floating point one. Nothing is changed then.
    pub fn set_local(&self, local: &Tensor) -> Result<()> {
        if local.dims() != self.region().sizes {
            return self.refuse(format!(
                "its shard on rank {} is {:?}, and a tensor of shape {:?} is no part of it: take it from a DTensor \
                 that lies as the parameter does, or set a full tensor with `set_full`",
                self.device_mesh().rank(),
                self.region().sizes,
                local.dims()
            ));
        }
        if !local.dtype().is_float() {
            return self.refuse(format!("it is {:?}, and values of {:?} are none of it", self.dtype(), local.dtype()));
        }
        // A part by itself: Candle takes all that a tensor is a view of to another device.
        let is_here = local.device().same_device(self.var().device());
        let local = if is_here { local.contiguous()? } else { local.force_contiguous()? };
        let local = to_dtype(&local.detach(), self.dtype())?;
        self.holder().reshard()?;
        Ok(copy_tensor(&local, self.var().as_tensor())?)
    }

    /// Copies this rank's part of a full tensor into its shard. No communication: every rank passes the full tensor.
    /// Where rank 0 alone has it, [`distribute_tensor`](crate::distribute_tensor) sends the parts, and each rank passes
    /// its own to [`FsdpParam::set_local`].
    ///
    /// # Errors
    /// When the tensor has not the parameter's shape or is no floating point one. Nothing is changed then.
    pub fn set_full(&self, full: &Tensor) -> Result<()> {
        if full.dims() != self.shape().dims() {
            return self.refuse(format!("it has shape {:?}, and the full tensor {:?}", self.shape(), full.shape()));
        }
        let region = self.region();
        let part = (0..full.rank())
            .try_fold(full.clone(), |part, dim| part.narrow(dim, region.offsets[dim], region.sizes[dim]))?;
        self.set_local(&part)
    }

    fn refuse<T>(&self, message: String) -> Result<T> {
        Err(Error::Parameter { name: self.name().into(), message })
    }
}
