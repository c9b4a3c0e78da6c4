//! The values of a parameter's shard, in memory or in a file ([`ShardedVarMap::store_on_disk`]).
//!
//! The variable of a shard on disk has no memory. The group's thread reads the shard when an all-gather begins, so it
//! reads the next unit's shards while this unit computes.
//!
//! [`ShardedVarMap::store_on_disk`]: crate::ShardedVarMap::store_on_disk

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use fsdp_core::{Allocator, Buffer, DType, Readable};
use parking_lot::Mutex;

use super::param::FsdpParam;
use crate::disk::FileTensor;
use crate::kernels::{self, Kernels, SliceMut, ViewMut};
use crate::storage::{Memory, Pool, PooledBuffer, TensorMemory, copy_tensor, to_core_dtype, with_slice_mut};

impl FsdpParam {
    /// Returns the values: the shard itself, or a copy of a shard on disk.
    pub(crate) fn shard(&self) -> crate::error::Result<Tensor> {
        match &self.spec.on_disk {
            Some(on_disk) => on_disk.tensor(),
            None => Ok(self.var().as_tensor().clone()),
        }
    }

    /// Copies values of the shard's shape and dtype into the shard.
    pub(crate) fn set_shard(&self, values: &Tensor) -> crate::error::Result<()> {
        match &self.spec.on_disk {
            Some(on_disk) => on_disk.set(values),
            None => Ok(copy_tensor(values, self.var().as_tensor())?),
        }
    }

    /// Lets `f` change the shard.
    pub(crate) fn update_shard(&self, f: impl FnOnce(&Tensor) -> Result<()>) -> crate::error::Result<()> {
        let shard = self.shard()?;
        f(&shard)?;
        self.spec.on_disk.as_ref().map_or(Ok(()), |on_disk| on_disk.set(&shard))
    }

    /// Lets `f` change some elements of the shard, in one or several calls in order.
    pub(crate) fn update_elements(
        &self,
        elements: Range<usize>,
        mut f: impl FnMut(&dyn Kernels, Range<usize>, SliceMut<'_>) -> Result<()>,
    ) -> crate::error::Result<()> {
        let Some(on_disk) = &self.spec.on_disk else {
            let done = with_slice_mut(self.var(), |kernels, all| f(kernels, elements.clone(), all.range(elements)?));
            return Ok(done?);
        };
        let (kernels, dtype) = (kernels::of_device(self.var().device())?, to_core_dtype(self.dtype())?);
        on_disk.update(elements, |some, bytes| Ok(f(kernels, some, SliceMut::new(dtype, ViewMut::Host(bytes)))?))
    }

    /// Returns the shard as a checkpoint reads and fills it.
    pub(crate) fn memory(&self) -> Arc<dyn Memory> {
        match &self.spec.on_disk {
            Some(on_disk) => Arc::new(on_disk.clone()),
            None => Arc::new(TensorMemory(self.var().as_tensor().clone())),
        }
    }

    /// Returns a shard on disk in a dtype, for an all-gather, or `None` for a shard in memory.
    pub(super) fn input_from_disk(&self, dtype: candle_core::DType, pool: &Arc<Pool>) -> Result<Option<ReadShard>> {
        let dtype = to_core_dtype(dtype)?;
        Ok(self.spec.on_disk.as_ref().map(|on_disk| ReadShard::new(on_disk, dtype, pool)))
    }
}

/// A shard on disk that an all-gather reads, in any dtype. It is in memory from the first read until it is dropped.
pub(super) struct ReadShard {
    on_disk: FileTensor,
    dtype: DType,
    pool: Arc<Pool>,
    values: Mutex<Option<PooledBuffer>>,
}

impl ReadShard {
    fn new(on_disk: &FileTensor, dtype: DType, pool: &Arc<Pool>) -> Self {
        ReadShard { on_disk: on_disk.clone(), dtype, pool: pool.clone(), values: Mutex::default() }
    }

    fn load(&self) -> crate::error::Result<PooledBuffer> {
        // Buffers go back to the pool also after an error.
        let mut values = self.pool.take(Readable::dtype(&self.on_disk), self.len())?;
        let outcome = self.on_disk.copy_to(&mut values);
        let values = PooledBuffer::new(values, &self.pool);
        outcome?;
        if values.dtype() == self.dtype {
            return Ok(values);
        }
        let mut cast = self.pool.take(self.dtype, self.len())?;
        let outcome = kernels::of_buffer(&values)?.cast((&*values).into(), (&mut cast).into());
        let cast = PooledBuffer::new(cast, &self.pool);
        outcome?;
        Ok(cast)
    }
}

impl Readable for ReadShard {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        Readable::len(&self.on_disk)
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        let mut values = self.values.lock();
        let values = match &mut *values {
            Some(values) => values,
            none => none.insert(self.load().map_err(|error| error.to_string())?),
        };
        f(Buffer::bytes(values));
        Ok(())
    }
}
