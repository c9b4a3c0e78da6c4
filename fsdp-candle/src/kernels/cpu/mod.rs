//! The kernels of the CPU: plain loops over slices. Candle's storage and the collectives' buffers are the same vectors.

mod float;
mod optimizers;

use std::any::Any;
use std::ops::Range;

use bytemuck::Pod;
use candle_core::{CpuStorage, Result, Storage, WithDType, bail};
use float8::F8E4M3;
use fsdp_core::{BlockFormat, Buffer, DType, Element, View};
use rayon::prelude::*;

use super::eight_bits::{SIGNED, UNSIGNED};
use super::slice::{ViewMut, each_dtype, no_values, same_length};
use super::{
    AdamUpdate, EightBits, Kernels, NormType, Rows, STATE_BLOCK, SgdUpdate, Slice, SliceMut, StorageMut, check_blocks,
};
pub(crate) use float::Float;
use float::{Real, floats};
use optimizers::{decode_signed, encode_signed, encode_unsigned, run_adam, run_adam_8bit, run_sgd};

const LARGEST_E4M3: f32 = 448.;

/// Number of values that one thread decodes at a time.
const PIECE: usize = 1 << 16;

/// The kernels of the CPU.
pub(in crate::kernels) struct CpuKernels;

impl Kernels for CpuKernels {
    fn zeros(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        Buffer::try_zeros(dtype, len)
    }

    fn storage(&self, buffer: Buffer) -> Result<Storage> {
        each_dtype!(buffer, Buffer(v) => Ok(Storage::Cpu(WithDType::to_cpu_storage_owned(v))), other => {
            bail!("a buffer of {} has no Candle storage", other.dtype())
        })
    }

    fn buffer(&self, storage: Storage) -> Option<Buffer> {
        let Storage::Cpu(storage) = storage else { return None };
        each_dtype!(storage, CpuStorage(v) => Some(Buffer::from(v)), _ => None)
    }

    fn freed_storage(&self) -> Result<Storage> {
        Ok(Storage::Cpu(CpuStorage::F4(vec![])))
    }

    fn slice<'a>(&self, storage: &'a Storage, elements: Range<usize>) -> Result<Slice<'a>> {
        let Storage::Cpu(storage) = storage else { bail!("the tensor is not in host memory") };
        each_dtype!(storage, CpuStorage(v) => whole(v), _ => no_values()?).range(elements)
    }

    fn slice_mut<'a>(&self, storage: StorageMut<'a>, elements: Range<usize>) -> Result<SliceMut<'a>> {
        let StorageMut::Cpu(storage) = storage else { bail!("the tensor is not in host memory") };
        each_dtype!(storage, CpuStorage(v) => whole_mut(v), _ => no_values()?).range(elements)
    }

    fn read(&self, from: Slice<'_>, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        f(bytes(from)?);
        Ok(())
    }

    fn write(&self, to: SliceMut<'_>, f: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        f(bytes_mut(to)?);
        Ok(())
    }

    fn copy_rows(&self, from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> Result<()> {
        let size = rows.check(&from, &to)?;
        let Rows { count, len, from_stride, to_stride } = rows;
        if count == 0 || len == 0 {
            return Ok(());
        }
        let (from, to) = (bytes(from)?, bytes_mut(to)?);
        for row in 0..count {
            let (read, written) = (row * from_stride * size, row * to_stride * size);
            to[written..written + len * size].copy_from_slice(&from[read..read + len * size]);
        }
        Ok(())
    }

    fn add(&self, sum: SliceMut<'_>, more: Slice<'_>) -> Result<()> {
        floats!(sum.dtype(), T => {
            let (sum, more) = (elements_mut::<T>(sum)?, elements::<T>(more)?);
            same_length(sum.len(), more.len())?;
            sum.iter_mut().zip(more).for_each(|(a, b)| *a += *b);
        });
        Ok(())
    }

    fn sum(&self, x: Slice<'_>, y: Slice<'_>) -> Result<Buffer> {
        fn sum<T: Float + Send + Sync>(x: &[T], y: &[T]) -> Vec<T> {
            let of_two = |(x, y): (&T, &T)| T::put(x.get() + y.get());
            if x.len() <= PIECE || rayon::current_num_threads() == 1 {
                return x.iter().zip(y).map(of_two).collect();
            }
            x.par_iter().zip(y).with_min_len(PIECE).map(of_two).collect()
        }
        same_length(x.len(), y.len())?;
        Ok(floats!(x.dtype(), T => sum(elements::<T>(x)?, elements::<T>(y)?).into()))
    }

    fn scale(&self, values: SliceMut<'_>, factor: f64) -> Result<()> {
        fn scale<T: Float>(values: &mut [T], factor: f64) {
            let factor = T::Real::of(factor);
            values.iter_mut().for_each(|v| *v = T::put(v.get() * factor));
        }
        floats!(values.dtype(), T => scale(elements_mut::<T>(values)?, factor));
        Ok(())
    }

    fn cast(&self, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
        fn cast<A: Float, B: Float>(from: &[A], to: &mut [B]) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.get().rounded());
        }
        same_length(from.len(), to.len())?;
        floats!(from.dtype(), A => floats!(to.dtype(), B => cast(elements::<A>(from)?, elements_mut::<B>(to)?)));
        Ok(())
    }

    fn powers(&self, values: Slice<'_>, norm: NormType, sum: SliceMut<'_>) -> Result<()> {
        let total = match values.dtype() {
            DType::F64 => {
                let values = elements::<f64>(values)?;
                values.iter().fold(0., |sum, &value| norm.combine(sum, norm.power(value.abs())))
            }
            DType::F32 => reduce(elements::<f32>(values)?, norm),
            DType::BF16 => reduce(elements::<half::bf16>(values)?, norm),
            DType::F16 => reduce(elements::<half::f16>(values)?, norm),
            other => bail!("parameters and gradients are floating point; got {other}"),
        };
        store_scalar(sum, total)
    }

    fn count_non_finite(&self, values: Slice<'_>, count: SliceMut<'_>) -> Result<()> {
        let counts = fsdp_ckpt::count_non_finite(values.dtype(), bytes(values)?);
        store_scalar(count, counts.map_or(0, |(_, [nan, infinite])| nan + infinite) as f64)
    }

    fn mix(&self, values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> Result<()> {
        fn mix<A: Float, B: Float>(values: &mut [A], kept: f64, more: &[B], taken: f64) {
            let (kept, taken) = (A::Real::of(kept), A::Real::of(taken));
            values.iter_mut().zip(more).for_each(|(v, m)| *v = A::put(kept * v.get() + taken * m.get().widened()));
        }
        same_length(values.len(), more.len())?;
        floats!(values.dtype(), A => floats!(more.dtype(), B => {
            mix(elements_mut::<A>(values)?, kept, elements::<B>(more)?, taken)
        }));
        Ok(())
    }

    fn adam(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        [means, squares]: [SliceMut<'_>; 2],
    ) -> Result<()> {
        for len in [grad.len(), means.len(), squares.len()] {
            same_length(param.len(), len)?;
        }
        floats!(param.dtype(), T => {
            let moments = (elements_mut::<T>(means)?, elements_mut::<T>(squares)?);
            let (params, grads) = (elements_mut::<T>(param)?, elements::<T>(grad)?);
            match update.l2 {
                0. => run_adam::<T, false>(update, params, grads, moments),
                _ => run_adam::<T, true>(update, params, grads, moments),
            }
        });
        Ok(())
    }

    fn sgd(
        &self,
        update: &SgdUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        buffer: Option<SliceMut<'_>>,
    ) -> Result<()> {
        for len in [Some(grad.len()), buffer.as_ref().map(SliceMut::len)].into_iter().flatten() {
            same_length(param.len(), len)?;
        }
        floats!(param.dtype(), T => {
            let (params, grads) = (elements_mut::<T>(param)?, elements::<T>(grad)?);
            let buffers = buffer.map(elements_mut::<T>).transpose()?;
            match update.l2 {
                0. => run_sgd::<T, false>(update, params, grads, buffers),
                _ => run_sgd::<T, true>(update, params, grads, buffers),
            }
        });
        Ok(())
    }

    fn adam_8bit(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        [codes1, scales1, codes2, scales2]: [SliceMut<'_>; 4],
    ) -> Result<()> {
        for len in [grad.len(), codes1.len(), codes2.len()] {
            same_length(param.len(), len)?;
        }
        for len in [scales1.len(), scales2.len()] {
            same_length(param.len().div_ceil(STATE_BLOCK), len)?;
        }
        let means = (elements_mut::<u8>(codes1)?, elements_mut::<f32>(scales1)?);
        let roots = (elements_mut::<u8>(codes2)?, elements_mut::<f32>(scales2)?);
        match param.dtype() {
            DType::F32 => run_adam_8bit(update, elements_mut::<f32>(param)?, elements(grad)?, means, roots),
            DType::BF16 => run_adam_8bit(update, elements_mut::<half::bf16>(param)?, elements(grad)?, means, roots),
            DType::F16 => run_adam_8bit(update, elements_mut::<half::f16>(param)?, elements(grad)?, means, roots),
            other => bail!("moments in 8 bits are for parameters of F32, BF16 and F16; got {other}"),
        }
        Ok(())
    }

    fn quantise(
        &self,
        bits: EightBits,
        block: usize,
        values: Slice<'_>,
        codes: SliceMut<'_>,
        scales: SliceMut<'_>,
    ) -> Result<()> {
        let (values, block) = (elements::<f32>(values)?, block.max(1));
        let (codes, scales) = (elements_mut::<u8>(codes)?, elements_mut::<f32>(scales)?);
        same_length(values.len(), codes.len())?;
        same_length(values.len().div_ceil(block), scales.len())?;
        // The number that a block's largest magnitude becomes, the scale of a block of zeros, and the least scale. E4M3
        // divides by the scale.
        let (most, of_zeros, least) = match bits {
            EightBits::E4M3 => (LARGEST_E4M3, 1., f32::MIN_POSITIVE),
            EightBits::Signed | EightBits::Unsigned => (1., 0., 0.),
        };
        for ((values, codes), scale) in values.chunks(block).zip(codes.chunks_mut(block)).zip(scales) {
            let largest = values.iter().fold(0f32, |max, value| max.max(value.abs()));
            let is_finite = values.iter().all(|value| value.is_finite());
            *scale = match is_finite {
                true if largest > 0. => (largest / most).max(least),
                true => of_zeros,
                false => f32::NAN,
            };
            match bits {
                EightBits::E4M3 => {
                    codes.iter_mut().zip(values).for_each(|(code, v)| *code = F8E4M3::from_f32(v / *scale).to_bits());
                }
                EightBits::Signed => encode_signed(values, *scale, codes),
                EightBits::Unsigned => encode_unsigned(values, *scale, codes),
            }
        }
        Ok(())
    }

    fn dequantise(
        &self,
        bits: EightBits,
        block: usize,
        codes: Slice<'_>,
        scales: Slice<'_>,
        values: SliceMut<'_>,
    ) -> Result<()> {
        fn decode<T: Float>(block: usize, codes: &[u8], scales: &[f32], values: &mut [T], decode: impl Fn(u8) -> f32) {
            for ((codes, &scale), values) in codes.chunks(block).zip(scales).zip(values.chunks_mut(block)) {
                values.iter_mut().zip(codes).for_each(|(value, &code)| *value = T::from_f32(decode(code) * scale));
            }
        }
        let (codes, scales, block) = (elements::<u8>(codes)?, elements::<f32>(scales)?, block.max(1));
        same_length(values.len(), codes.len())?;
        same_length(codes.len().div_ceil(block), scales.len())?;
        floats!(values.dtype(), T => {
            let values = elements_mut::<T>(values)?;
            match bits {
                EightBits::E4M3 => decode(block, codes, scales, values, |code| F8E4M3::from_bits(code).to_f32()),
                EightBits::Signed => decode(block, codes, scales, values, |code| decode_signed(&SIGNED, code)),
                EightBits::Unsigned => decode(block, codes, scales, values, |code| UNSIGNED.values[usize::from(code)]),
            }
        });
        Ok(())
    }

    fn decode_blocks(&self, format: BlockFormat, blocks: Slice<'_>, values: SliceMut<'_>) -> Result<()> {
        check_blocks(format, &blocks, &values)?;
        let blocks = elements::<u8>(blocks)?;
        floats!(values.dtype(), T => {
            let values = elements_mut::<T>(values)?;
            if rayon::current_num_threads() == 1 {
                // A hand-over to rayon's own thread would only cost the caller's cache.
                format.decode(blocks, values, T::from_f32);
            } else {
                let pieces = blocks.par_chunks(format.bytes(PIECE)).zip(values.par_chunks_mut(PIECE));
                pieces.for_each(|(blocks, values)| format.decode(blocks, values, T::from_f32));
            }
        });
        Ok(())
    }
}

fn reduce<T: Float<Real = f32>>(values: &[T], norm: NormType) -> f64 {
    if norm != NormType::Two {
        return values.iter().fold(0., |sum, value| norm.combine(sum, norm.power(f64::from(value.get()).abs())));
    }
    // Short runs are summed in f32 lanes, and the runs in f64: fast and exact enough.
    values
        .chunks(256)
        .map(|chunk| {
            let mut lanes = [0f32; 16];
            for run in chunk.chunks(16) {
                for (lane, value) in lanes.iter_mut().zip(run) {
                    let value = value.get();
                    *lane += value * value;
                }
            }
            let sum: f64 = lanes.iter().map(|&lane| f64::from(lane)).sum();
            // Squares of f32 numbers may overflow f32.
            if sum.is_finite() { sum } else { chunk.iter().map(|value| f64::from(value.get()).powi(2)).sum() }
        })
        .sum()
}

fn whole<T: Element + Pod>(elements: &[T]) -> Slice<'_> {
    Slice::new(T::DTYPE, View::Host(bytemuck::cast_slice(elements)))
}

fn whole_mut<T: Element + Pod>(elements: &mut [T]) -> SliceMut<'_> {
    SliceMut::new(T::DTYPE, ViewMut::Host(bytemuck::cast_slice_mut(elements)))
}

fn bytes(slice: Slice<'_>) -> Result<&[u8]> {
    match slice.view() {
        View::Host(bytes) => Ok(bytes),
        _ => bail!("the elements are not in host memory"),
    }
}

fn bytes_mut(slice: SliceMut<'_>) -> Result<&mut [u8]> {
    match slice.into_view() {
        ViewMut::Host(bytes) => Ok(bytes),
        #[cfg(feature = "cuda")]
        ViewMut::Cuda(_) => bail!("the elements are not in host memory"),
    }
}

/// Returns the elements of a slice as `T`, which must be their dtype.
fn elements<T: Element + Pod>(slice: Slice<'_>) -> Result<&[T]> {
    let dtype = slice.dtype();
    match bytemuck::try_cast_slice(bytes(slice)?) {
        Ok(elements) if dtype == T::DTYPE => Ok(elements),
        _ => bail!("expected elements of {}, got {dtype}", T::DTYPE),
    }
}

/// [`elements`] to write.
fn elements_mut<T: Element + Pod>(slice: SliceMut<'_>) -> Result<&mut [T]> {
    let dtype = slice.dtype();
    match bytemuck::try_cast_slice_mut(bytes_mut(slice)?) {
        Ok(elements) if dtype == T::DTYPE => Ok(elements),
        _ => bail!("expected elements of {}, got {dtype}", T::DTYPE),
    }
}

/// Writes a number to one element.
fn store_scalar(element: SliceMut<'_>, number: f64) -> Result<()> {
    match elements_mut::<f64>(element)? {
        [element] => *element = number,
        elements => bail!("expected one element for a number, found {}", elements.len()),
    }
    Ok(())
}

/// Returns the elements of a buffer in host memory, if they have this type.
pub(crate) fn host_elements<T: 'static>(buffer: &mut Buffer) -> Option<&mut [T]> {
    let elements: &mut dyn Any = match buffer {
        Buffer::BF16(v) => v,
        Buffer::F16(v) => v,
        Buffer::F32(v) => v,
        Buffer::F64(v) => v,
        _ => return None,
    };
    elements.downcast_mut::<Vec<T>>().map(Vec::as_mut_slice)
}
