//! A tensor that an optimizer keeps for a parameter's shard, as it lies in memory.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use fsdp_core::{Readable, Writable};

use super::packed::{Packed, PackedOf};
use crate::fsdp::FsdpParam;
use crate::kernels::{self, STATE_BLOCK};
use crate::storage::{TensorMemory, copy_tensor, to_core_dtype, to_tensor};

/// Memory that a checkpoint reads and fills.
pub(crate) trait Memory: Readable + Writable {}
impl<T: Readable + Writable> Memory for T {}

/// A tensor of a shard's shape.
#[derive(Clone, Debug)]
pub enum Moment {
    /// As it is.
    Plain(Tensor),
    /// In 8 bits.
    Packed(Packed),
}

impl Moment {
    /// Zeros of a shard's shape and dtype.
    pub(super) fn zeros(param: &FsdpParam) -> crate::error::Result<Self> {
        let shard = param.var().as_tensor();
        Ok(Moment::Plain(zeros(param, shard.dtype(), shard.dims())?))
    }

    /// Zeros of a shard's shape in 8 bits.
    pub(super) fn packed(param: &FsdpParam, of: PackedOf) -> crate::error::Result<Self> {
        let shape = param.var().dims();
        let elements: usize = shape.iter().product();
        let codes = zeros(param, DType::U8, &[elements])?;
        let scales = zeros(param, DType::F32, &[elements.div_ceil(STATE_BLOCK)])?;
        Ok(Moment::Packed(Packed::new(codes, scales, shape, of)))
    }

    /// The values: the memory itself, or a copy of what is kept otherwise.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        match self {
            Moment::Plain(tensor) => Ok(tensor.clone()),
            Moment::Packed(packed) => packed.tensor(),
        }
    }

    /// The dtype of the values.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Moment::Plain(tensor) => tensor.dtype(),
            Moment::Packed(_) => DType::F32,
        }
    }

    /// Sets the values to those of a tensor of this shape and dtype.
    pub(crate) fn set(&self, values: &Tensor) -> Result<()> {
        match self {
            Moment::Plain(tensor) => copy_tensor(values, tensor),
            Moment::Packed(packed) => packed.set(values),
        }
    }

    /// The values as a checkpoint reads and fills them.
    pub(crate) fn memory(&self) -> Arc<dyn Memory> {
        match self {
            Moment::Plain(tensor) => Arc::new(TensorMemory(tensor.clone())),
            Moment::Packed(packed) => Arc::new(packed.clone()),
        }
    }

    /// What is not finite when a value is not.
    pub(super) fn telling(&self) -> &Tensor {
        match self {
            Moment::Plain(tensor) => tensor,
            Moment::Packed(packed) => packed.parts()[1],
        }
    }

    /// The memory of all its parts, which a step writes to.
    pub(super) fn parts(&self) -> Vec<&Tensor> {
        match self {
            Moment::Plain(tensor) => vec![tensor],
            Moment::Packed(packed) => packed.parts().to_vec(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.parts().iter().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum()
    }
}

fn zeros(param: &FsdpParam, dtype: DType, shape: &[usize]) -> crate::error::Result<Tensor> {
    let device = param.var().device();
    let fail = |error: fsdp_core::Error| crate::error::Error::Parameter {
        name: param.name().into(),
        message: format!("the optimizer's state: {error}"),
    };
    let zeros = kernels::of_device(device)?.zeros(to_core_dtype(dtype)?, shape.iter().product()).map_err(fail)?;
    Ok(to_tensor(zeros, shape, device)?)
}
