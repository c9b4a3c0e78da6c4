//! Candle's vectors and the collectives' buffers are the same vectors: these move them across without copying.

use candle_core::{CpuStorage, DType, Device, Result, Tensor, Var, bail};
use fsdp_core::Buffer;

/// Runs `$body` with `$v` bound to the typed vector inside a [`Buffer`] of floats; any other dtype is an error.
macro_rules! typed {
    ($buffer:expr, $v:ident => $body:expr) => {
        match $buffer {
            fsdp_core::Buffer::F32($v) => $body,
            fsdp_core::Buffer::BF16($v) => $body,
            fsdp_core::Buffer::F16($v) => $body,
            fsdp_core::Buffer::F64($v) => $body,
            other => candle_core::bail!("parameters and gradients are floating point; got {}", other.dtype()),
        }
    };
}
pub(crate) use typed;

/// The buffer as a tensor's storage.
pub(crate) fn to_storage(buffer: Buffer) -> Result<CpuStorage> {
    Ok(match buffer {
        Buffer::U8(v) => CpuStorage::U8(v),
        Buffer::U32(v) => CpuStorage::U32(v),
        Buffer::I64(v) => CpuStorage::I64(v),
        Buffer::BF16(v) => CpuStorage::BF16(v),
        Buffer::F16(v) => CpuStorage::F16(v),
        Buffer::F32(v) => CpuStorage::F32(v),
        Buffer::F64(v) => CpuStorage::F64(v),
        other => bail!("a buffer of {} has no Candle storage", other.dtype()),
    })
}

/// The buffer as a tensor of floats.
pub(crate) fn to_tensor(buffer: Buffer, shape: &[usize], device: &Device) -> Result<Tensor> {
    typed!(buffer, elements => Tensor::from_vec(elements, shape, device))
}

/// The buffer as a variable of floats.
pub(crate) fn to_var(buffer: Buffer, shape: &[usize], device: &Device) -> Result<Var> {
    typed!(buffer, elements => Var::from_vec(elements, shape, device))
}

/// The storage as a buffer; `None` for the poison and for dtypes that collectives do not move.
pub(crate) fn to_buffer(storage: CpuStorage) -> Option<Buffer> {
    match storage {
        CpuStorage::U8(v) => Some(Buffer::U8(v)),
        CpuStorage::U32(v) => Some(Buffer::U32(v)),
        CpuStorage::I64(v) => Some(Buffer::I64(v)),
        CpuStorage::BF16(v) => Some(Buffer::BF16(v)),
        CpuStorage::F16(v) => Some(Buffer::F16(v)),
        CpuStorage::F32(v) => Some(Buffer::F32(v)),
        CpuStorage::F64(v) => Some(Buffer::F64(v)),
        _ => None,
    }
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
