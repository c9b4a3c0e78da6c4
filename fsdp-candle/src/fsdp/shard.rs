//! This rank's shard of a parameter: its variable, and where its values are.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use fsdp_core::{Allocator, Readable};

use super::offload::{Downloads, Offload};
use super::policy::OffloadPolicy;
use super::shard_inputs::ShardInputs;
use crate::disk::{FileMemory, FileTensor, FileValues, StateFile};
use crate::error::{Error, Result};
use crate::storage::{Memory, PooledBuffer, TensorMemory, copy_tensor, take, to_core_dtype, to_dtype, with_slice};

/// This rank's shard of a parameter.
pub(crate) struct Shard {
    /// Name of the parameter.
    name: String,
    /// The variable that optimizers update.
    var: Var,
    home: ShardHome,
    /// Device that layers compute on.
    device: Device,
}

/// Where the values of a shard are.
enum ShardHome {
    /// In the variable, on the device that layers compute on.
    Device,
    /// In the variable, in host memory, while layers compute on a device.
    Host(Offload),
    /// In a file. The variable has no memory.
    Disk(FileTensor),
}

impl Shard {
    /// Makes the shard of the parameter `name` from a variable with its values. With a file, moves the values there,
    /// unless the shard is empty. `device` is the device that layers compute on.
    pub(super) fn new(
        name: &str,
        var: Var,
        file: Option<Arc<StateFile>>,
        policy: OffloadPolicy,
        device: &Device,
        downloads: &Arc<Downloads>,
    ) -> Result<Self> {
        let home = match Offload::of(&var, policy, device, downloads)? {
            Some(offload) => ShardHome::Host(offload),
            None => match file.filter(|_| var.elem_count() > 0) {
                Some(file) => {
                    let values = FileTensor::new(file, &var)?;
                    take(&var)?;
                    ShardHome::Disk(values)
                }
                None => ShardHome::Device,
            },
        };
        Ok(Shard { name: name.into(), var, home, device: device.clone() })
    }

    /// Returns the variable, whose memory pending device copies may read.
    pub(super) fn var(&self) -> &Var {
        &self.var
    }

    /// Returns the variable, once pending device copies have read it.
    pub(super) fn settled(&self) -> &Var {
        if let ShardHome::Host(offload) = &self.home
            && let Err(error) = offload.settle()
        {
            // The device is lost, so no copy reads the shard any more.
            tracing::warn!(parameter = self.name, %error, "waiting for copies of a shard");
        }
        &self.var
    }

    /// Returns the copies between the host and the device, if the shard is on the host and layers compute on a device.
    pub(super) fn offload(&self) -> Option<&Offload> {
        match &self.home {
            ShardHome::Host(offload) => Some(offload),
            ShardHome::Device | ShardHome::Disk(_) => None,
        }
    }

    /// Returns the bytes on the device that layers compute on.
    pub(super) fn device_bytes(&self) -> usize {
        match &self.home {
            ShardHome::Device => self.var.elem_count() * self.var.dtype().size_in_bytes(),
            ShardHome::Host(_) | ShardHome::Disk(_) => 0,
        }
    }

    /// Returns the values in the file, if the shard is on disk.
    pub(crate) fn on_disk(&self) -> Option<&FileTensor> {
        match &self.home {
            ShardHome::Disk(values) => Some(values),
            ShardHome::Device | ShardHome::Host(_) => None,
        }
    }

    /// Returns the values: the variable's tensor, or a copy of a shard on disk.
    pub(crate) fn values(&self) -> Result<Tensor> {
        match self.on_disk() {
            Some(on_disk) => on_disk.tensor(),
            None => Ok(self.settled().as_tensor().clone()),
        }
    }

    /// Copies values of the shard's shape and dtype into the shard.
    pub(crate) fn set(&self, values: &Tensor) -> Result<()> {
        match self.on_disk() {
            Some(on_disk) => on_disk.set(values),
            None => Ok(copy_tensor(values, self.settled().as_tensor())?),
        }
    }

    /// Lets `f` change the values.
    pub(crate) fn update(&self, f: impl FnOnce(&Tensor) -> candle_core::Result<()>) -> Result<()> {
        let values = self.values()?;
        f(&values)?;
        self.on_disk().map_or(Ok(()), |on_disk| on_disk.set(&values))
    }

    /// Returns the shard as a checkpoint reads and fills it.
    pub(crate) fn memory(&self) -> Arc<dyn Memory> {
        match self.on_disk() {
            Some(on_disk) => Arc::new(FileMemory(on_disk.clone())),
            None => Arc::new(TensorMemory(self.settled().as_tensor().clone())),
        }
    }

    /// Returns the values in a dtype, on the device that computes.
    fn to_dtype(&self, dtype: DType) -> candle_core::Result<Tensor> {
        if let ShardHome::Host(offload) = &self.home {
            return offload.upload(to_core_dtype(dtype)?)?.into_tensor(self.var.dims(), &self.device);
        }
        let values = self.values()?;
        if values.dtype() == dtype { Ok(values) } else { to_dtype(&values.detach(), dtype) }
    }

    /// Returns the values in a dtype, as the input of a collective on the device that computes. A copy takes memory of
    /// the pool on the CPU. A device's own pool also gives the memory to other sizes.
    pub(super) fn input(&self, dtype: DType, inputs: &ShardInputs) -> candle_core::Result<Arc<dyn Readable>> {
        match &self.home {
            ShardHome::Host(offload) => Ok(Arc::new(offload.upload(to_core_dtype(dtype)?)?)),
            ShardHome::Disk(on_disk) => Ok(Arc::new(inputs.on_disk.add(on_disk, to_core_dtype(dtype)?))),
            ShardHome::Device if self.var.dtype() == dtype => {
                Ok(Arc::new(TensorMemory(self.settled().as_tensor().clone())))
            }
            ShardHome::Device if !self.var.device().is_cpu() => inputs.cast(&self.var, dtype),
            ShardHome::Device => {
                let mut cast = inputs.pool.take(to_core_dtype(dtype)?, self.var.elem_count()).map_err(Error::from)?;
                let outcome = with_slice(&self.var, |kernels, values| kernels.cast(values, (&mut cast).into()));
                let cast = PooledBuffer::new(cast, &inputs.pool);
                outcome.map(|()| Arc::new(cast) as _)
            }
        }
    }
}

/// The shard that an all-gather over the shard ranks sends.
pub(super) enum SentShard<'a> {
    /// The shard that this rank stores.
    Own { shard: &'a Shard, inputs: &'a ShardInputs },
    /// The shard in the compute dtype, gathered from the replicas that divide it.
    OfReplicas(Tensor),
}

impl SentShard<'_> {
    /// Returns the values in a dtype, as the input of a collective.
    pub(super) fn input(&self, dtype: DType) -> candle_core::Result<Arc<dyn Readable>> {
        match self {
            SentShard::Own { shard, inputs } => shard.input(dtype, inputs),
            SentShard::OfReplicas(shard) => Ok(Arc::new(TensorMemory(shard.clone()))),
        }
    }

    /// Returns the values in a dtype, on the device that computes.
    pub(super) fn to_dtype(&self, dtype: DType) -> candle_core::Result<Tensor> {
        match self {
            SentShard::Own { shard, .. } => shard.to_dtype(dtype),
            SentShard::OfReplicas(shard) => Ok(shard.clone()),
        }
    }
}
