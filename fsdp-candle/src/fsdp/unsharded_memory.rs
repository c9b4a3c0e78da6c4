//! The memory of a parameter's full values and gradients: who allocates it, and who keeps it.

use std::sync::Arc;

use candle_core::{DType, Result};
use fsdp_core::{Allocator, Buffer};

use crate::error::Error;
use crate::storage::{Pool, to_core_dtype};

/// Memory of the full values of a parameter.
pub(super) struct FullBuffer {
    pub(super) buffer: Buffer,
    /// Whether the parameter keeps this buffer.
    pub(super) is_kept: bool,
}

/// Part of the full values, kept between forward and backward to unshard over fewer ranks.
pub(super) struct PostForwardShard {
    pub(super) buffer: Buffer,
    /// Number of neighbouring ranks that hold all parts.
    pub(super) ranks: usize,
}

/// Where a unit allocates full values.
pub(super) struct UnshardMemory {
    pub(super) allocator: Arc<dyn Allocator>,
    /// Whether each parameter keeps a buffer, whose address never changes.
    pub(super) keep: bool,
    /// Whether all-gathers go through memory of the process group.
    pub(super) from_process_group: bool,
}

/// Allocates buffers for one parameter. Errors name the parameter.
pub(super) struct ParamAllocator {
    pub(super) name: String,
    /// Number of elements of the full values.
    pub(super) elements: usize,
    pub(super) dtype: DType,
    pub(super) pool: Arc<Pool>,
}

impl ParamAllocator {
    /// Takes a buffer of the compute dtype from the pool.
    pub(super) fn take(&self, len: usize) -> Result<Buffer> {
        self.take_of(self.dtype, len)
    }

    /// Takes a buffer of a dtype from the pool.
    pub(super) fn take_of(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.named(self.pool.take(to_core_dtype(dtype)?, len))
    }

    /// Takes a buffer for the full values that never goes back to the pool.
    pub(super) fn take_unpooled(&self) -> Result<Buffer> {
        self.named(self.pool.take_unpooled(to_core_dtype(self.dtype)?, self.elements))
    }

    /// Allocates zeros for the full gradient.
    pub(super) fn zeros(&self, dtype: fsdp_core::DType) -> Result<Buffer> {
        self.named(self.pool.zeros(dtype, self.elements))
    }

    fn named(&self, memory: fsdp_core::Result<Buffer>) -> Result<Buffer> {
        Ok(memory.map_err(|error| Error::parameter(&self.name, error.to_string()))?)
    }
}
