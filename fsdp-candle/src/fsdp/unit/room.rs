//! Memory for one parameter: an error names it.

use std::sync::Arc;

use candle_core::Result;
use fsdp_core::{Allocator, Buffer, DType};

use crate::error::Error;
use crate::storage::{Pool, to_core_dtype};

/// How large a parameter is, and where its buffers come from.
pub(super) struct Room {
    /// The parameter's name.
    pub(super) name: String,
    /// Of what layers hold.
    pub(super) elements: usize,
    /// The dtype that layers compute with.
    pub(super) dtype: candle_core::DType,
    pub(super) pool: Arc<Pool>,
}

impl Room {
    /// A buffer of the pool's for so many elements of the compute dtype.
    pub(super) fn take(&self, len: usize) -> Result<Buffer> {
        self.named(self.pool.take(to_core_dtype(self.dtype)?, len))
    }

    /// A buffer for the whole parameter that never goes back.
    pub(super) fn take_unpooled(&self) -> Result<Buffer> {
        self.named(self.pool.take_unpooled(to_core_dtype(self.dtype)?, self.elements))
    }

    /// Zeros for the whole parameter.
    pub(super) fn zeros(&self, dtype: DType) -> Result<Buffer> {
        self.named(self.pool.zeros(dtype, self.elements))
    }

    /// Gives a buffer back to the pool.
    pub(super) fn give(&self, buffer: Buffer) {
        self.pool.give(buffer);
    }

    fn named(&self, memory: fsdp_core::Result<Buffer>) -> Result<Buffer> {
        Ok(memory.map_err(|error| Error::Parameter { name: self.name.clone(), message: error.to_string() })?)
    }
}
