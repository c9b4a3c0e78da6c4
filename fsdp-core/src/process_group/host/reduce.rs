//! Reduction kernels: plain loops over slices that the compiler turns into vector instructions.

use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::{DType, ReduceOp};

/// Elements combined at a time. Their accumulators stay in the first-level cache.
const BLOCK: usize = 512;

/// Where a rank's contribution is.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// In the output, which the result replaces.
    Output,
    /// Elsewhere.
    Bytes(&'a [u8]),
}

/// Combines the inputs in their order into `output`. All are native elements of `dtype`, aligned and of the same
/// length.
pub(crate) fn reduce(dtype: DType, op: ReduceOp, output: &mut [u8], inputs: &[Input<'_>]) {
    match dtype {
        DType::U8 => combine::<u8>(op, output, inputs),
        DType::U32 => combine::<u32>(op, output, inputs),
        DType::I64 => combine::<i64>(op, output, inputs),
        DType::BF16 => combine::<bf16>(op, output, inputs),
        DType::F16 => combine::<f16>(op, output, inputs),
        DType::F32 => combine::<f32>(op, output, inputs),
        DType::F64 => combine::<f64>(op, output, inputs),
    }
}

fn combine<T: Element>(op: ReduceOp, output: &mut [u8], inputs: &[Input<'_>]) {
    let output = bytemuck::cast_slice_mut(output);
    let ranks = inputs.len();
    match op {
        ReduceOp::Sum => fold::<T>(output, inputs, T::Acc::add, |x| x),
        ReduceOp::Avg => fold::<T>(output, inputs, T::Acc::add, |x| x.divided(ranks)),
        ReduceOp::Min => fold::<T>(output, inputs, T::Acc::min, |x| x),
        ReduceOp::Max => fold::<T>(output, inputs, T::Acc::max, |x| x),
        ReduceOp::Product => fold::<T>(output, inputs, T::Acc::mul, |x| x),
    }
}

/// One function for each dtype and operation, so that the compiler sees small loops.
fn fold<T: Element>(
    output: &mut [T],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512bw") && std::arch::is_x86_feature_detected!("avx512vl") {
        // SAFETY: the processor has AVX-512 BW, which includes F, and VL.
        unsafe { fold_with_avx512(output, inputs, f, finish) };
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        unsafe { fold_with_avx2(output, inputs, f, finish) };
        return;
    }
    fold_inlined(output, inputs, f, finish);
}

/// The same code for processors with wider vectors. The bits are the same: it has no fused operations. (With AVX-512
/// reductions of BF16 are half as fast again.)
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold_with_avx2<T: Element>(
    output: &mut [T],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    fold_inlined(output, inputs, f, finish);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bw,avx512vl")]
fn fold_with_avx512<T: Element>(
    output: &mut [T],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    fold_inlined(output, inputs, f, finish);
}

// Everything below is inlined into the functions above, to be compiled for the instructions that each may use.

#[inline(always)]
fn fold_inlined<T: Element>(
    output: &mut [T],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    // Two ranks are the most common and need no accumulator.
    if let [first, second] = inputs
        && T::DIRECT
    {
        match (*first, *second) {
            (Input::Bytes(a), Input::Bytes(b)) => {
                let (a, b): (&[T], &[T]) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b));
                for ((o, &a), &b) in output.iter_mut().zip(a).zip(b) {
                    *o = T::narrow(finish(f(a.widen(), b.widen())));
                }
                return;
            }
            (Input::Bytes(a), Input::Output) => {
                for (o, &a) in output.iter_mut().zip(bytemuck::cast_slice::<u8, T>(a)) {
                    *o = T::narrow(finish(f(a.widen(), o.widen())));
                }
                return;
            }
            (Input::Output, Input::Bytes(b)) => {
                for (o, &b) in output.iter_mut().zip(bytemuck::cast_slice::<u8, T>(b)) {
                    *o = T::narrow(finish(f(o.widen(), b.widen())));
                }
                return;
            }
            (Input::Output, Input::Output) => {}
        }
    }
    let (mut acc, mut next) = ([T::Acc::default(); BLOCK], [T::Acc::default(); BLOCK]);
    let mut start = 0;
    for out in output.chunks_mut(BLOCK) {
        let (acc, next) = (&mut acc[..out.len()], &mut next[..out.len()]);
        for (rank, input) in inputs.iter().enumerate() {
            let source: &[T] = match input {
                Input::Output => out,
                Input::Bytes(bytes) => &bytemuck::cast_slice(bytes)[start..start + out.len()],
            };
            if rank == 0 {
                T::widen_all(source, acc);
            } else if T::DIRECT {
                for (acc, &x) in acc.iter_mut().zip(source) {
                    *acc = f(*acc, x.widen());
                }
            } else {
                T::widen_all(source, next);
                for (acc, &next) in acc.iter_mut().zip(&*next) {
                    *acc = f(*acc, next);
                }
            }
        }
        for acc in &mut *acc {
            *acc = finish(*acc);
        }
        T::narrow_all(acc, out);
        start += out.len();
    }
}

/// An element as it is stored, with the type it is combined in.
trait Element: Pod {
    type Acc: Number;
    /// Whether a loop over single elements is as fast as one over slices.
    const DIRECT: bool = true;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
    #[inline(always)]
    fn widen_all(source: &[Self], acc: &mut [Self::Acc]) {
        for (acc, &x) in acc.iter_mut().zip(source) {
            *acc = x.widen();
        }
    }
    #[inline(always)]
    fn narrow_all(acc: &[Self::Acc], out: &mut [Self]) {
        for (out, &x) in out.iter_mut().zip(acc) {
            *out = Self::narrow(x);
        }
    }
}

macro_rules! native {
    ($($t:ty),*) => {$(
        impl Element for $t {
            type Acc = $t;
            #[inline(always)]
            fn widen(self) -> $t {
                self
            }
            #[inline(always)]
            fn narrow(acc: $t) -> $t {
                acc
            }
        }
    )*};
}
native!(u8, u32, i64, f32, f64);

impl Element for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// `bf16::from_f32` without its branch, which keeps loops from being vectorised.
    #[inline(always)]
    fn narrow(acc: f32) -> bf16 {
        let bits = acc.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        bf16::from_bits(if acc.is_nan() { (bits >> 16) | 0x40 } else { rounded } as u16)
    }
}

impl Element for f16 {
    type Acc = f32;
    const DIRECT: bool = false;
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(acc: f32) -> f16 {
        f16::from_f32(acc)
    }
    #[inline(always)]
    fn widen_all(source: &[f16], acc: &mut [f32]) {
        source.convert_to_f32_slice(acc);
    }
    #[inline(always)]
    fn narrow_all(acc: &[f32], out: &mut [f16]) {
        out.convert_from_f32_slice(acc);
    }
}

/// What reductions compute in. Integers wrap around; a NaN makes the smallest and the largest NaN, as in PyTorch.
trait Number: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn divided(self, by: usize) -> Self;
}

macro_rules! integer {
    ($($t:ty),*) => {$(
        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            // Averages of integers are refused before they get here.
            #[inline(always)]
            fn divided(self, by: usize) -> Self {
                self / by as $t
            }
        }
    )*};
}
integer!(u8, u32, i64);

macro_rules! float {
    ($($t:ty),*) => {$(
        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn divided(self, by: usize) -> Self {
                self / by as $t
            }
        }
    )*};
}
float!(f32, f64);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(bf16::narrow(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn not_a_number_is_not_lost() {
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum] {
            for values in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
                let mut out = [0f32];
                reduce(
                    DType::F32,
                    op,
                    bytemuck::cast_slice_mut(&mut out),
                    &values.each_ref().map(|x| Input::Bytes(bytemuck::bytes_of(x))),
                );
                assert!(out[0].is_nan());
            }
        }
    }

    proptest! {
        #[test]
        fn half_precision_is_summed_in_single_precision_in_order_also_in_place(
            columns in proptest::collection::vec(proptest::collection::vec(-100f32..100.0, 1300), 2..5),
            len in 0usize..1300,
            own in 0usize..4,
        ) {
            let own = own % columns.len();
            let expect = |round: fn(f32) -> f32| -> Vec<f32> {
                let sum = |i: usize| columns.iter().map(|c| round(c[i])).reduce(|a, b| a + b).unwrap();
                (0..len).map(|i| round(sum(i) / columns.len() as f32)).collect()
            };
            let bf: Vec<Vec<bf16>> = columns.iter().map(|c| c.iter().map(|&x| bf16::from_f32(x)).collect()).collect();
            let mut out = bf[own][..len].to_vec();
            let inputs: Vec<_> = bf.iter().enumerate()
                .map(|(rank, c)| match rank == own {
                    true => Input::Output,
                    false => Input::Bytes(bytemuck::cast_slice(&c[..len])),
                })
                .collect();
            reduce(DType::BF16, ReduceOp::Avg, bytemuck::cast_slice_mut(&mut out), &inputs);
            prop_assert_eq!(out.iter().map(|x| x.to_f32()).collect::<Vec<_>>(), expect(|x| bf16::from_f32(x).to_f32()));

            let hf: Vec<Vec<f16>> = columns.iter().map(|c| c.iter().map(|&x| f16::from_f32(x)).collect()).collect();
            let mut out = vec![f16::ZERO; len];
            let inputs: Vec<_> = hf.iter().map(|c| Input::Bytes(bytemuck::cast_slice(&c[..len]))).collect();
            reduce(DType::F16, ReduceOp::Avg, bytemuck::cast_slice_mut(&mut out), &inputs);
            prop_assert_eq!(out.iter().map(|x| x.to_f32()).collect::<Vec<_>>(), expect(|x| f16::from_f32(x).to_f32()));
        }
    }
}
