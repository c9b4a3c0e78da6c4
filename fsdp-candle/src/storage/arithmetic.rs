//! Sums, scales and casts of buffers.

use candle_core::{Result, bail};
use fsdp_core::{Allocator, Buffer, DType};
use half::{bf16, f16};

/// `sum += more`, of one dtype and length.
pub(crate) fn add(sum: &mut Buffer, more: &Buffer) -> Result<()> {
    match (sum, more) {
        (Buffer::F32(a), Buffer::F32(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
        (Buffer::F64(a), Buffer::F64(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
        (Buffer::BF16(a), Buffer::BF16(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += *b),
        (Buffer::F16(a), Buffer::F16(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += *b),
        (sum, more) => bail!("gradients of {} and {} can't be added", sum.dtype(), more.dtype()),
    }
    Ok(())
}

/// `buffer *= factor`.
pub(crate) fn scale(buffer: &mut Buffer, factor: f64) -> Result<()> {
    let single = factor as f32;
    match buffer {
        Buffer::F32(v) => v.iter_mut().for_each(|v| *v *= single),
        Buffer::F64(v) => v.iter_mut().for_each(|v| *v *= factor),
        Buffer::BF16(v) => v.iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32() * single)),
        Buffer::F16(v) => v.iter_mut().for_each(|v| *v = f16::from_f32(v.to_f32() * single)),
        other => bail!("gradients are floating point; got {}", other.dtype()),
    }
    Ok(())
}

/// The same values in another dtype; the old buffer goes back to `memory`.
pub(crate) fn cast(from: Buffer, dtype: DType, memory: &dyn Allocator) -> Result<Buffer> {
    if from.dtype() == dtype {
        return Ok(from);
    }
    let mut to = memory.take(dtype, from.len()).map_err(crate::error::Error::from)?;
    macro_rules! convert {
        ($from:expr, $to:expr, $f:expr) => {
            $to.iter_mut().zip($from).for_each(|(to, from)| *to = $f(*from))
        };
    }
    match (&from, &mut to) {
        (Buffer::BF16(from), Buffer::F32(to)) => convert!(from, to, bf16::to_f32),
        (Buffer::F16(from), Buffer::F32(to)) => convert!(from, to, f16::to_f32),
        (Buffer::F64(from), Buffer::F32(to)) => convert!(from, to, |v: f64| v as f32),
        (Buffer::F32(from), Buffer::BF16(to)) => convert!(from, to, bf16::from_f32),
        (Buffer::F16(from), Buffer::BF16(to)) => convert!(from, to, |v: f16| bf16::from_f32(v.to_f32())),
        (Buffer::F64(from), Buffer::BF16(to)) => convert!(from, to, bf16::from_f64),
        (Buffer::F32(from), Buffer::F16(to)) => convert!(from, to, f16::from_f32),
        (Buffer::BF16(from), Buffer::F16(to)) => convert!(from, to, |v: bf16| f16::from_f32(v.to_f32())),
        (Buffer::F64(from), Buffer::F16(to)) => convert!(from, to, f16::from_f64),
        (Buffer::F32(from), Buffer::F64(to)) => convert!(from, to, f64::from),
        (Buffer::BF16(from), Buffer::F64(to)) => convert!(from, to, bf16::to_f64),
        (Buffer::F16(from), Buffer::F64(to)) => convert!(from, to, f16::to_f64),
        (from, to) => bail!("gradients can't be cast from {} to {}", from.dtype(), to.dtype()),
    }
    memory.give(from);
    Ok(to)
}
