//! The building blocks of the operations on the CPU: slices of f32, threads, vector instructions and matrix products.
//!
//! Operations compute in f32. Half floats are widened when they are read, and rounded once when the result is written.
//! Rows are divided over rayon's threads. A rank of a CPU job often has one thread; then everything runs in place,
//! because a hand-over to rayon's own thread would only cost the caller's cache.

pub(in crate::nn) mod float8;
pub(in crate::nn) mod matrix;
pub(in crate::nn) mod simd;

use std::borrow::Cow;
use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::utils::get_num_threads;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, WithDType, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::kernels::Float;
use crate::nn::cpu::simd::kernel;
use crate::nn::weight::Weight;

/// Returns the storage of a tensor on the CPU.
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
        let $name = $crate::nn::cpu::floats($crate::nn::cpu::cpu(&guard)?, layout)?;
    };
}
pub(in crate::nn) use read;

/// Binds a name to the matrix of a tensor's rows, for the rest of the scope.
macro_rules! read_rows {
    ($name:ident, $tensor:expr) => {
        let (guard, layout) = $tensor.storage_and_layout();
        let operand = $crate::nn::cpu::matrix::Operand::of($crate::nn::cpu::cpu(&guard)?, layout)?;
        let $name = operand.mat();
    };
}
pub(in crate::nn) use read_rows;

/// Returns a copy of a tensor's values in row-major order.
pub(in crate::nn) fn to_vec(tensor: &Tensor) -> Result<Vec<f32>> {
    read!(values, tensor);
    Ok(values.into_owned())
}

/// Returns the values in row-major order, borrowed if the storage has them in this order.
pub(in crate::nn) fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    Ok(match storage {
        CpuStorage::F32(values) => dense(values, layout)?,
        CpuStorage::F16(values) => Cow::Owned(dense(values, layout)?.to_f32_vec()),
        CpuStorage::BF16(values) => Cow::Owned(widened(&dense(values, layout)?)),
        other => bail!("expected f32, f16 or bf16 values, found {:?}", other.dtype()),
    })
}

/// Returns some values in f32, borrowed or in `room`.
pub(in crate::nn) fn floats_in<'a>(
    values: &'a CpuStorage,
    part: Range<usize>,
    room: &'a mut [f32],
) -> Result<&'a [f32]> {
    let room = &mut room[..part.len()];
    match values {
        CpuStorage::F32(values) => return Ok(&values[part]),
        CpuStorage::F16(values) => values[part].convert_to_f32_slice(room),
        CpuStorage::BF16(values) => widen(room, &values[part]),
        other => bail!("expected f32, f16 or bf16 values, found {:?}", other.dtype()),
    }
    Ok(room)
}

/// Returns the elements that a layout selects, in row-major order.
pub(in crate::nn) fn dense<'a, T: Copy>(values: &'a [T], layout: &Layout) -> Result<Cow<'a, [T]>> {
    let missing = || {
        let message = format!("the storage of {} values is too short for {layout:?}", values.len());
        candle_core::Error::Msg(message).bt()
    };
    if layout.shape().elem_count() == 0 {
        return Ok(Cow::Borrowed(&[]));
    }
    if let Some((start, end)) = layout.contiguous_offsets() {
        return Ok(Cow::Borrowed(values.get(start..end).ok_or_else(missing)?));
    }
    // The trailing dimensions without gaps are copied as one run, from each index of the leading dimensions.
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

/// Returns storage with these values, rounded to the dtype (f32, f16 or bf16).
pub(in crate::nn) fn storage(values: Vec<f32>, dtype: DType) -> Result<Storage> {
    Ok(Storage::Cpu(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::F16 => CpuStorage::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
        DType::BF16 => CpuStorage::BF16(rounded(&values)),
        other => bail!("expected f32, f16 or bf16, found {other:?}"),
    }))
}

kernel! {
    /// `half` converts one element at a time.
    fn widened(values: &[bf16]) -> Vec<f32> {
        values.iter().map(|value| value.get()).collect()
    }

    fn widen(to: &mut [f32], from: &[bf16]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.get());
    }

    fn rounded(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&value| Float::from_f32(value)).collect()
    }
}

/// Returns a CPU tensor with these values, in the shape of another tensor and rounded to its dtype.
pub(in crate::nn) fn tensor_like(values: Vec<f32>, like: &Tensor) -> Result<Tensor> {
    tensor_of(values, like.shape(), like.dtype())
}

/// Returns a CPU tensor with these values, rounded to a dtype.
pub(in crate::nn) fn tensor_of(values: Vec<f32>, shape: &Shape, dtype: DType) -> Result<Tensor> {
    let storage = storage(values, dtype)?;
    Ok(Tensor::from_storage(storage, shape.clone(), candle_core::op::BackpropOp::none(), false))
}

/// Returns what an operation's `bwd` returns for a weight. `write(gradient, accumulate)` computes the gradient in f32,
/// whatever the weight's dtype.
pub(in crate::nn) fn weight_grad(
    weight: &Weight,
    write: impl FnOnce(&mut [f32], bool) -> Result<()>,
) -> Result<Option<Tensor>> {
    fn half<T: Float<Real = f32> + WithDType>(
        weight: &Weight,
        write: impl FnOnce(&mut [f32], bool) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        weight.write_grad::<T>(|buffer, accumulate| {
            let mut wide = vec![0f32; buffer.len()];
            write(&mut wide, false)?;
            for (to, &from) in buffer.iter_mut().zip(&wide) {
                *to = T::from_f32(if accumulate { to.get() + from } else { from });
            }
            Ok(())
        })
    }
    if !weight.wants_grad() {
        return Ok(None);
    }
    match weight.grad_dtype() {
        DType::F32 => weight.write_grad::<f32>(write),
        DType::F16 => half::<f16>(weight, write),
        DType::BF16 => half::<bf16>(weight, write),
        other => bail!("expected a gradient of f32, f16 or bf16, found {other:?}"),
    }
}

/// [`weight_grad`] of a small gradient that is already computed.
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

/// Returns the values of a tensor of indices (u8, u32 or i64), each checked to be less than `bound`. `function` and
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

/// [`indices`]; the value `none`, if given, stands for no index.
pub(in crate::nn) fn indices_or_none(
    function: &str,
    what: &str,
    ids: &Tensor,
    bound: usize,
    bound_name: &str,
    none: Option<i64>,
) -> Result<Vec<Option<u32>>> {
    let found = to_i64(function, what, ids)?;
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

/// Returns the row of a table for each id. [`no_id`] stands for no row.
pub(in crate::nn) fn table_rows(function: &str, ids: &Tensor, rows: usize) -> Result<Vec<Option<usize>>> {
    let found = indices_or_none(function, "id", ids, rows, "vocabulary size", Some(no_id(ids)))?;
    Ok(found.into_iter().map(|row| row.map(|row| row as usize)).collect())
}

/// Returns the largest number of the ids' dtype, which stands for no row, as with Candle.
pub(in crate::nn) fn no_id(ids: &Tensor) -> i64 {
    match ids.dtype() {
        DType::U8 => i64::from(u8::MAX),
        DType::U32 => i64::from(u32::MAX),
        _ => i64::MAX,
    }
}

fn to_i64(function: &str, what: &str, ids: &Tensor) -> Result<Vec<i64>> {
    let flat = ids.flatten_all()?;
    match ids.dtype() {
        DType::U8 => Ok(flat.to_vec1::<u8>()?.into_iter().map(i64::from).collect()),
        DType::U32 => Ok(flat.to_vec1::<u32>()?.into_iter().map(i64::from).collect()),
        DType::I64 => flat.to_vec1(),
        other => bail!("{function}: {what}s must be u8, u32 or i64, found {other:?}"),
    }
}

/// Fails unless both tensors have one dtype and device.
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

/// Elements below which threads cost more than they gain.
const MIN_PARALLEL: usize = 1 << 15;

/// Returns the number of threads for work on `elements` elements.
pub(in crate::nn) fn threads(elements: usize) -> usize {
    if elements < MIN_PARALLEL { 1 } else { get_num_threads() }
}

/// Returns how many of `rows` a thread gets, where each row costs as much as `cost` elements.
fn rows_per_thread(rows: usize, cost: usize) -> usize {
    rows.div_ceil(threads(rows.saturating_mul(cost))).max(1)
}

/// Calls `f(first_row, rows)` on runs of whole rows of `out`, each of `width` elements. Returns the results in order.
pub(in crate::nn) fn map_rows<R: Send>(
    out: &mut [f32],
    width: usize,
    cost: usize,
    f: impl Fn(usize, &mut [f32]) -> R + Sync,
) -> Vec<R> {
    if width == 0 || out.is_empty() {
        return Vec::new();
    }
    let share = rows_per_thread(out.len() / width, cost);
    if share * width >= out.len() {
        return vec![f(0, out)];
    }
    out.par_chunks_mut(share * width).enumerate().map(|(i, rows)| f(i * share, rows)).collect()
}

/// [`map_rows`] for two outputs of the same shape, whose rows are single elements.
pub(in crate::nn) fn map_rows2<R: Send>(
    a: &mut [f32],
    b: &mut [f32],
    f: impl Fn(usize, &mut [f32], &mut [f32]) -> R + Sync,
) -> Vec<R> {
    let share = rows_per_thread(a.len(), 1);
    if share >= a.len() {
        return vec![f(0, a, b)];
    }
    let shares = a.par_chunks_mut(share).zip(b.par_chunks_mut(share)).enumerate();
    shares.map(|(i, (a, b))| f(i * share, a, b)).collect()
}

/// Calls `f(task, scratch)` for each task. A thread makes its scratch once and uses it for all of its tasks.
pub(in crate::nn) fn for_each_task<S: Send>(
    tasks: usize,
    cost: usize,
    scratch: impl Fn() -> S + Sync + Send,
    f: impl Fn(usize, &mut S) + Sync + Send,
) {
    if tasks < 2 || threads(tasks.saturating_mul(cost)) < 2 {
        let mut scratch = scratch();
        (0..tasks).for_each(|task| f(task, &mut scratch));
    } else {
        (0..tasks).into_par_iter().for_each_init(scratch, |scratch, task| f(task, scratch));
    }
}
