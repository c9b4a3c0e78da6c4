//! A tensor that an optimizer keeps for a parameter's shard, as it lies in memory.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use fsdp_core::{Readable, Writable};

use crate::kernels;
use crate::storage::{TensorMemory, copy_tensor, to_core_dtype, to_tensor};
use crate::unit::FsdpParam;

/// Memory that a checkpoint reads and fills.
pub(crate) trait Memory: Readable + Writable {}
impl<T: Readable + Writable> Memory for T {}

/// A tensor of a shard's shape.
#[derive(Clone, Debug)]
pub enum Moment {
    /// As it is.
    Plain(Tensor),
}

impl Moment {
    /// Zeros of a shard's shape and dtype.
    pub(super) fn zeros(param: &FsdpParam) -> crate::error::Result<Self> {
        let shard = param.var().as_tensor();
        let fail = |error: fsdp_core::Error| crate::error::Error::Parameter {
            name: param.name().into(),
            message: format!("the optimizer's state: {error}"),
        };
        let kernels = kernels::of_device(shard.device())?;
        let zeros = kernels.zeros(to_core_dtype(shard.dtype())?, shard.elem_count()).map_err(fail)?;
        Ok(Moment::Plain(to_tensor(zeros, shard.dims(), shard.device())?))
    }

    /// The values: the memory itself, or a copy of what is kept otherwise.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        match self {
            Moment::Plain(tensor) => Ok(tensor.clone()),
        }
    }

    /// The dtype of the values.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Moment::Plain(tensor) => tensor.dtype(),
        }
    }

    /// Sets the values to those of a tensor of this shape and dtype.
    pub(crate) fn set(&self, values: &Tensor) -> Result<()> {
        match self {
            Moment::Plain(tensor) => copy_tensor(values, tensor),
        }
    }

    /// The values as a checkpoint reads and fills them.
    pub(crate) fn memory(&self) -> Arc<dyn Memory> {
        match self {
            Moment::Plain(tensor) => Arc::new(TensorMemory(tensor.clone())),
        }
    }

    /// What is not finite when a value is not.
    pub(super) fn telling(&self) -> &Tensor {
        match self {
            Moment::Plain(tensor) => tensor,
        }
    }

    /// The memory of all its parts, which a step writes to.
    pub(super) fn parts(&self) -> Vec<&Tensor> {
        match self {
            Moment::Plain(tensor) => vec![tensor],
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.parts().iter().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }
}
