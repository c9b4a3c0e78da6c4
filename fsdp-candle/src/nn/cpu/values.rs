//! Between tensors and the slices of f32 that the kernels work on: half floats are widened on the way in and rounded
//! once on the way out.

use std::borrow::Cow;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::nn::weight::Weight;

pub(in crate::nn) use crate::nn::weight::served;

/// The CPU storage of a tensor that lives on the CPU.
pub(in crate::nn) fn cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => bail!("expected a tensor on the CPU, found one on {:?}", other.device().location()),
    }
}

/// Binds a name to a tensor's values in row-major order, for the rest of the scope.
macro_rules! read {
    ($name:ident, $tensor:expr) => {
        let (guard, layout) = $tensor.storage_and_layout();
        let $name = $crate::nn::cpu::values::floats($crate::nn::cpu::values::cpu(&guard)?, layout)?;
    };
}
pub(in crate::nn) use read;

/// The values in row-major order; borrowed where they lie in memory like that.
pub(in crate::nn) fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    Ok(match storage {
        CpuStorage::F32(values) => dense(values, layout)?,
        CpuStorage::F16(values) => Cow::Owned(dense(values, layout)?.to_f32_vec()),
        CpuStorage::BF16(values) => Cow::Owned(dense(values, layout)?.to_f32_vec()),
        other => bail!("expected f32, f16 or bf16 values, found {:?}", other.dtype()),
    })
}

/// The elements that a layout selects, in row-major order.
pub(in crate::nn) fn dense<'a, T: Copy>(values: &'a [T], layout: &Layout) -> Result<Cow<'a, [T]>> {
    let missing = || {
        let message = format!("the storage of {} values is too short for {layout:?}", values.len());
        candle_core::Error::Msg(message).bt()
    };
    if let Some((start, end)) = layout.contiguous_offsets() {
        return Ok(Cow::Borrowed(values.get(start..end).ok_or_else(missing)?));
    }
    // The trailing dimensions that lie in memory without gaps are copied as one run, from each of the places that the
    // dimensions before them lead to.
    let (dims, strides) = (layout.dims(), layout.stride());
    let (mut outer, mut run) = (dims.len(), 1);
    while outer > 0 && strides[outer - 1] == run {
        outer -= 1;
        run *= dims[outer];
    }
    let count = layout.shape().elem_count();
    let mut out = Vec::with_capacity(count);
    let mut index = vec![0; outer];
    let mut start = layout.start_offset();
    while out.len() < count {
        out.extend_from_slice(values.get(start..start + run).ok_or_else(missing)?);
        for axis in (0..outer).rev() {
            index[axis] += 1;
            start += strides[axis];
            if index[axis] < dims[axis] {
                break;
            }
            start -= strides[axis] * dims[axis];
            index[axis] = 0;
        }
    }
    Ok(Cow::Owned(out))
}

/// Storage of the dtype (f32, f16 or bf16) with these values.
pub(in crate::nn) fn storage(values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::F16 => CpuStorage::F16(Vec::from_f32(&values)),
        DType::BF16 => CpuStorage::BF16(Vec::from_f32(&values)),
        other => bail!("expected f32, f16 or bf16, found {other:?}"),
    })
}

/// A CPU tensor of the dtype (f32, f16 or bf16) with these values.
pub(in crate::nn) fn tensor(values: Vec<f32>, shape: &Shape, dtype: DType) -> Result<Tensor> {
    let storage = Storage::Cpu(storage(values, dtype)?);
    Ok(Tensor::from_storage(storage, shape.clone(), candle_core::op::BackpropOp::none(), false))
}

trait Half: candle_core::WithDType {
    fn widen(self) -> f32;
    fn round(value: f32) -> Self;
}

impl Half for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn round(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Half for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn round(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

trait FromF32<T> {
    fn from_f32(values: &[f32]) -> Self;
}

impl<T: Half> FromF32<T> for Vec<T> {
    fn from_f32(values: &[f32]) -> Self {
        values.iter().map(|&x| T::round(x)).collect()
    }
}

/// What an operation's `bwd` returns for a weight: `write(gradient, accumulate)` computes it in f32, whatever the
/// weight's dtype.
pub(in crate::nn) fn weight_grad(
    weight: &Weight,
    write: impl FnOnce(&mut [f32], bool) -> Result<()>,
) -> Result<Option<Tensor>> {
    fn half<T: Half>(weight: &Weight, write: impl FnOnce(&mut [f32], bool) -> Result<()>) -> Result<Option<Tensor>> {
        weight.grad::<T>(|buffer, accumulate| {
            let mut wide = vec![0f32; buffer.len()];
            write(&mut wide, false)?;
            for (to, &from) in buffer.iter_mut().zip(&wide) {
                *to = T::round(if accumulate { to.widen() + from } else { from });
            }
            Ok(())
        })
    }
    if !weight.wants_grad() {
        return Ok(None);
    }
    match weight.dtype() {
        DType::F32 => weight.grad::<f32>(write),
        DType::F16 => half::<f16>(weight, write),
        DType::BF16 => half::<bf16>(weight, write),
        other => bail!("expected a weight of f32, f16 or bf16, found {other:?}"),
    }
}

/// Adds a small gradient that is already computed.
pub(in crate::nn) fn small_weight_grad(weight: &Weight, gradient: &[f32]) -> Result<Option<Tensor>> {
    weight_grad(weight, |buffer, accumulate| {
        if accumulate {
            buffer.iter_mut().zip(gradient).for_each(|(to, from)| *to += from);
        } else {
            buffer.copy_from_slice(gradient);
        }
        Ok(())
    })
}

/// The values of a tensor of indices (u8, u32 or i64), each checked to be less than `bound`. `function` and
/// `bound_name` are for the error.
pub(in crate::nn) fn indices(
    function: &str,
    what: &str,
    ids: &Tensor,
    bound: usize,
    bound_name: &str,
) -> Result<Vec<u32>> {
    Ok(indices_or_none(function, what, ids, bound, bound_name, None)?.into_iter().flatten().collect())
}

/// As [`indices`]; `none`, if given, stands for no index.
pub(in crate::nn) fn indices_or_none(
    function: &str,
    what: &str,
    ids: &Tensor,
    bound: usize,
    bound_name: &str,
    none: Option<i64>,
) -> Result<Vec<Option<u32>>> {
    let found = whole_numbers(function, what, ids)?;
    let index = |id: i64| u32::try_from(id).ok().filter(|&id| (id as usize) < bound);
    match found.iter().position(|&id| Some(id) != none && index(id).is_none()) {
        Some(at) => bail!(
            "{function}: {what} {} (element {at} of {}) is out of range: the {bound_name} is {bound}",
            found[at],
            found.len()
        ),
        None => Ok(found.into_iter().map(|id| index(id).filter(|_| Some(id) != none)).collect()),
    }
}

/// The rows of a table that ids stand for. The largest number of their dtype stands for none, as with Candle.
pub(in crate::nn) fn rows_of(function: &str, ids: &Tensor, rows: usize) -> Result<Vec<Option<usize>>> {
    let none = match ids.dtype() {
        DType::U8 => i64::from(u8::MAX),
        DType::U32 => i64::from(u32::MAX),
        _ => i64::MAX,
    };
    let found = indices_or_none(function, "id", ids, rows, "vocabulary size", Some(none))?;
    Ok(found.into_iter().map(|row| row.map(|row| row as usize)).collect())
}

fn whole_numbers(function: &str, what: &str, ids: &Tensor) -> Result<Vec<i64>> {
    let flat = ids.flatten_all()?;
    match ids.dtype() {
        DType::U8 => Ok(flat.to_vec1::<u8>()?.into_iter().map(i64::from).collect()),
        DType::U32 => Ok(flat.to_vec1::<u32>()?.into_iter().map(i64::from).collect()),
        DType::I64 => flat.to_vec1(),
        other => bail!("{function}: {what}s must be u8, u32 or i64, found {other:?}"),
    }
}

/// Errors unless both tensors have one dtype and device.
pub(in crate::nn) fn same_kind(function: &str, a: (&str, &Tensor), b: (&str, &Tensor)) -> Result<()> {
    if a.1.dtype() != b.1.dtype() || !a.1.device().same_device(b.1.device()) {
        bail!(
            "{function}: {} is {:?} on {:?} but {} is {:?} on {:?}: both must be of one dtype on one device",
            a.0,
            a.1.dtype(),
            a.1.device().location(),
            b.0,
            b.1.dtype(),
            b.1.device().location()
        );
    }
    Ok(())
}
