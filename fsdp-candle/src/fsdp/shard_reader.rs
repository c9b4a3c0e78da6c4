//! Shards in files ([`ShardedVarMap::store_on_disk`]), read for all-gathers.
//!
//! The variable of a shard on disk has no memory. The group's thread reads the shard when an all-gather begins, so it
//! reads the next unit's shards while this unit computes.
//!
//! [`ShardedVarMap::store_on_disk`]: crate::ShardedVarMap::store_on_disk

use std::sync::Arc;

use fsdp_core::{Allocator, Buffer, DType, Readable};
use parking_lot::Mutex;

use crate::disk::{FileTensor, FileValues};
use crate::kernels;
use crate::storage::{Pool, PooledBuffer};

/// Reads the shards on disk of a unit, all at once: one request at a time does not use all of a disk's bandwidth.
pub(super) struct ShardReader {
    pool: Arc<Pool>,
    /// Shards to read, each with the dtype of its copy.
    shards: Mutex<Vec<(FileTensor, DType)>>,
    values: Mutex<Option<Vec<PooledBuffer>>>,
}

impl ShardReader {
    pub(super) fn new(pool: &Arc<Pool>) -> Arc<Self> {
        Arc::new(ShardReader { pool: pool.clone(), shards: Mutex::default(), values: Mutex::default() })
    }

    /// Adds a shard, which is read in this dtype with the others.
    pub(super) fn add(self: &Arc<Self>, shard: &FileTensor, dtype: DType) -> ReadShard {
        let mut shards = self.shards.lock();
        shards.push((shard.clone(), dtype));
        ReadShard { at: shards.len() - 1, len: shard.len(), dtype, reader: self.clone() }
    }

    fn load(&self) -> crate::error::Result<Vec<PooledBuffer>> {
        let shards = self.shards.lock();
        let tensors: Vec<&FileTensor> = shards.iter().map(|(on_disk, _)| on_disk).collect();
        let mut values = vec![];
        let mut outcome = Ok(());
        for tensor in &tensors {
            match self.pool.take(tensor.dtype(), tensor.len()) {
                Ok(buffer) => values.push(buffer),
                Err(error) => outcome = Err(error.into()),
            }
        }
        outcome = outcome.and_then(|()| FileTensor::copy_all(&tensors, &mut values));
        // Buffers go back to the pool also after an error.
        let values: Vec<_> = values.into_iter().map(|buffer| PooledBuffer::new(buffer, &self.pool)).collect();
        outcome?;
        values.into_iter().zip(shards.iter()).map(|(values, (_, dtype))| self.cast(values, *dtype)).collect()
    }

    fn cast(&self, values: PooledBuffer, dtype: DType) -> crate::error::Result<PooledBuffer> {
        if values.dtype() == dtype {
            return Ok(values);
        }
        let mut cast = self.pool.take(dtype, values.len())?;
        let outcome = kernels::of_buffer(&values)?.cast((&*values).into(), (&mut cast).into());
        let cast = PooledBuffer::new(cast, &self.pool);
        outcome?;
        Ok(cast)
    }
}

/// A shard on disk that an all-gather reads, in any dtype. The unit's shards are in memory from the first read of one
/// until all are dropped.
pub(super) struct ReadShard {
    reader: Arc<ShardReader>,
    at: usize,
    len: usize,
    dtype: DType,
}

impl Readable for ReadShard {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        let mut values = self.reader.values.lock();
        let values = match &mut *values {
            Some(values) => values,
            none => none.insert(self.reader.load().map_err(|error| error.to_string())?),
        };
        f(Buffer::bytes(&values[self.at]));
        Ok(())
    }
}
