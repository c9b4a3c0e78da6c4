//! Candle's memory and the collectives' buffers are the same memory: these move it across without copying.

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Storage, Tensor, Var, bail};
use fsdp_core::Buffer;

use crate::error::Error;
use crate::kernels;

/// The buffer as a tensor's storage.
pub(crate) fn to_storage(buffer: Buffer) -> Result<Storage> {
    kernels::of_buffer(&buffer)?.storage(buffer)
}

/// The storage as a buffer; `None` for the poison and for dtypes that collectives do not move.
pub(crate) fn to_buffer(storage: Storage) -> Result<Option<Buffer>> {
    Ok(kernels::of_device(&storage.device())?.buffer(storage))
}

/// The buffer as a tensor on a device.
pub(crate) fn to_tensor(buffer: Buffer, shape: &[usize], device: &Device) -> Result<Tensor> {
    of_storage(buffer, shape, false)?.to_device(device)
}

/// The buffer as a variable on a device.
pub(crate) fn to_var(buffer: Buffer, shape: &[usize], device: &Device) -> Result<Var> {
    Var::from_tensor(&of_storage(buffer, shape, true)?.to_device(device)?)
}

/// The tensor in another dtype. One of no elements as well, as some ranks' shards are: Candle asks CUDA for a kernel of
/// no threads, which it refuses.
pub(crate) fn to_dtype(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype || tensor.elem_count() > 0 {
        return tensor.to_dtype(dtype);
    }
    let nothing = kernels::of_device(tensor.device())?.zeros(to_core_dtype(dtype)?, 0).map_err(Error::from)?;
    to_tensor(nothing, tensor.dims(), tensor.device())
}

fn of_storage(buffer: Buffer, shape: &[usize], is_variable: bool) -> Result<Tensor> {
    let len = buffer.len();
    if shape.iter().product::<usize>() != len {
        bail!("{len} elements are no tensor of shape {shape:?}")
    }
    Ok(Tensor::from_storage(to_storage(buffer)?, shape, BackpropOp::none(), is_variable))
}

/// Candle's dtype in fsdp-core's terms.
pub(crate) fn to_core_dtype(dtype: DType) -> Result<fsdp_core::DType> {
    Ok(match dtype {
        DType::U8 => fsdp_core::DType::U8,
        DType::U32 => fsdp_core::DType::U32,
        DType::I64 => fsdp_core::DType::I64,
        DType::BF16 => fsdp_core::DType::BF16,
        DType::F16 => fsdp_core::DType::F16,
        DType::F32 => fsdp_core::DType::F32,
        DType::F64 => fsdp_core::DType::F64,
        other => bail!("tensors of {other:?} can't be sharded; use one of U8, U32, I64, BF16, F16, F32, F64"),
    })
}
