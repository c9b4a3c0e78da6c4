//! Reduction kernels: elements, their accumulators, and plain loops that the compiler vectorizes.
//!
//! Ranks' elements are combined as a balanced tree of neighbours: pairs that start at an even rank, then pairs of
//! pairs, and so on. For six ranks that is `((0 + 1) + (2 + 3)) + (4 + 5)`. The order depends on the number of ranks
//! only, so every run and every backend of host memory gives the same bits. It is a tree because ranks that form a
//! subtree, such as ranks of one host, may then combine their elements before other ranks see them ([`partial`]).
//!
//! Half precision is accumulated in f32 and rounded once. An average in f16 therefore does not overflow, and needs no
//! division before the sum.
//!
//! Everything is inlined into functions that are compiled for particular instruction sets.

use std::ops::Range;

use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};

use crate::{DType, ReduceOp};

/// An element as it is stored, with its accumulator.
pub(super) trait Element: Pod {
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
    /// `bf16::from_f32` without its branch, which prevents vectorization.
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

/// An accumulator. Integers wrap around. NaN propagates through minimum and maximum, as in PyTorch.
pub(super) trait Number: Pod + Default {
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
            // The group rejects averages of integers.
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

/// Largest number of elements combined at a time.
const BLOCK: usize = 512;
/// Elements of the accumulators, one block for each level of the tree. They stay in the first-level cache.
const ROOM: usize = 4 * BLOCK;
/// Blocks are a multiple of this, so that vectors are full.
const VECTORS: usize = 64;

/// Location of a rank's contribution.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// In the output, which the result replaces.
    Output,
    /// In other memory.
    Bytes(&'a [u8]),
    /// The result of [`partial`] for a subtree of this many ranks.
    Partial(&'a [u8], usize),
}

impl Input<'_> {
    fn ranks(&self) -> usize {
        if let Input::Partial(_, ranks) = self { *ranks } else { 1 }
    }
}

/// Combines the inputs of all ranks, in rank order, into `output`. All are aligned native elements of `dtype` and have
/// the same length; inputs of several ranks have the dtype [`accumulator`].
pub(crate) fn reduce(dtype: DType, op: ReduceOp, output: &mut [u8], inputs: &[Input<'_>]) {
    match dtype {
        DType::U8 => combine::<u8, u8>(op, output, inputs),
        DType::U32 => combine::<u32, u32>(op, output, inputs),
        DType::I64 => combine::<i64, i64>(op, output, inputs),
        DType::BF16 => combine::<bf16, bf16>(op, output, inputs),
        DType::F16 => combine::<f16, f16>(op, output, inputs),
        DType::F32 => combine::<f32, f32>(op, output, inputs),
        DType::F64 => combine::<f64, f64>(op, output, inputs),
    }
}

/// Combines the inputs of ranks that form a subtree into `output`, with the dtype [`accumulator`], neither rounded nor
/// divided. No input is the output.
pub(crate) fn partial(dtype: DType, op: ReduceOp, output: &mut [u8], inputs: &[Input<'_>]) {
    let op = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
    match dtype {
        DType::BF16 => combine::<bf16, f32>(op, output, inputs),
        DType::F16 => combine::<f16, f32>(op, output, inputs),
        _ => reduce(dtype, op, output, inputs),
    }
}

/// Returns the dtype that elements are combined in.
fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::BF16 | DType::F16 => DType::F32,
        own => own,
    }
}

/// Returns the size of an accumulator in elements.
pub(crate) fn widening(dtype: DType) -> usize {
    accumulator(dtype).size() / dtype.size()
}

fn combine<T: Element, O: Element<Acc = T::Acc>>(op: ReduceOp, output: &mut [u8], inputs: &[Input<'_>]) {
    let output = bytemuck::cast_slice_mut(output);
    let ranks = inputs.iter().map(Input::ranks).sum();
    match op {
        ReduceOp::Sum => fold::<T, O>(output, inputs, T::Acc::add, |x| x),
        ReduceOp::Avg => fold::<T, O>(output, inputs, T::Acc::add, |x| x.divided(ranks)),
        // These reduce few numbers. Compiling them for each instruction set would take as long as sums.
        ReduceOp::Min => fold_inlined::<T, O>(output, inputs, T::Acc::min, |x| x),
        ReduceOp::Max => fold_inlined::<T, O>(output, inputs, T::Acc::max, |x| x),
        ReduceOp::Product => fold_inlined::<T, O>(output, inputs, T::Acc::mul, |x| x),
    }
}

/// Folds with a separate function for each dtype and operation, so that the compiler sees small loops.
fn fold<T: Element, O: Element<Acc = T::Acc>>(
    output: &mut [O],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512bw") && std::arch::is_x86_feature_detected!("avx512vl") {
        // SAFETY: the processor has AVX-512 BW, which includes F, and VL.
        unsafe { fold_with_avx512::<T, O>(output, inputs, f, finish) };
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        unsafe { fold_with_avx2::<T, O>(output, inputs, f, finish) };
        return;
    }
    fold_inlined::<T, O>(output, inputs, f, finish);
}

/// The same code for processors with wider vectors. It has no fused operations, so the bits are the same. AVX-512 makes
/// BF16 reductions half as fast again.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold_with_avx2<T: Element, O: Element<Acc = T::Acc>>(
    output: &mut [O],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    fold_inlined::<T, O>(output, inputs, f, finish);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bw,avx512vl")]
fn fold_with_avx512<T: Element, O: Element<Acc = T::Acc>>(
    output: &mut [O],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    fold_inlined::<T, O>(output, inputs, f, finish);
}

// Everything below is inlined into the functions above and compiled for their instruction sets.

#[inline(always)]
fn fold_inlined<T: Element, O: Element<Acc = T::Acc>>(
    output: &mut [O],
    inputs: &[Input<'_>],
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    // Two ranks are the most common case and need no accumulator.
    if let [first, second] = inputs
        && T::DIRECT
    {
        match (*first, *second) {
            (Input::Bytes(a), Input::Bytes(b)) => {
                let (a, b): (&[T], &[T]) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b));
                for ((o, &a), &b) in output.iter_mut().zip(a).zip(b) {
                    *o = O::narrow(finish(f(a.widen(), b.widen())));
                }
                return;
            }
            (Input::Bytes(a), Input::Output) => {
                for (o, &a) in output.iter_mut().zip(bytemuck::cast_slice::<u8, T>(a)) {
                    *o = O::narrow(finish(f(a.widen(), o.widen())));
                }
                return;
            }
            (Input::Output, Input::Bytes(b)) => {
                for (o, &b) in output.iter_mut().zip(bytemuck::cast_slice::<u8, T>(b)) {
                    *o = O::narrow(finish(f(o.widen(), b.widen())));
                }
                return;
            }
            _ => {}
        }
    }
    // One open accumulator for each level, and one to combine with the last.
    let ranks: usize = inputs.iter().map(Input::ranks).sum();
    let len = (ROOM / (ranks.max(1).ilog2() as usize + 2)).min(BLOCK) / VECTORS * VECTORS;
    let mut room = [T::Acc::default(); ROOM];
    let mut levels = [0; ROOM / VECTORS];
    let mut start = 0;
    for out in output.chunks_mut(len) {
        let (mut open, mut rank) = (0, 0);
        let mut rest = inputs;
        while let [input, others @ ..] = rest {
            let acc = &mut room[open * len..][..out.len()];
            let here = start..start + out.len();
            rest = others;
            levels[open] = match (input, others) {
                (&Input::Partial(bytes, ranks), _) => {
                    acc.copy_from_slice(&bytemuck::cast_slice(bytes)[here]);
                    ranks.next_power_of_two().ilog2()
                }
                (_, [next @ (Input::Output | Input::Bytes(_)), others @ ..]) if T::DIRECT && rank % 2 == 0 => {
                    let (a, b): (&[T], &[T]) = (source(input, out, here.clone()), source(next, out, here));
                    for ((acc, &a), &b) in acc.iter_mut().zip(a).zip(b) {
                        *acc = f(a.widen(), b.widen());
                    }
                    rank += next.ranks();
                    rest = others;
                    1
                }
                _ => {
                    T::widen_all(source(input, out, here), acc);
                    0
                }
            };
            rank += input.ranks();
            open += 1;
            // The last two are combined below.
            while open > 1
                && (levels[open - 1] == levels[open - 2] || rest.is_empty())
                && (open > 2 || !rest.is_empty())
            {
                open -= 1;
                let (before, last) = room.split_at_mut(open * len);
                for (acc, &last) in before[(open - 1) * len..][..out.len()].iter_mut().zip(&*last) {
                    *acc = f(*acc, last);
                }
                levels[open - 1] += 1;
            }
        }
        let (acc, last) = room.split_at_mut(len);
        let (acc, last) = (&mut acc[..out.len()], &last[..out.len()]);
        match open {
            2 if O::DIRECT => {
                for ((out, &acc), &last) in out.iter_mut().zip(&*acc).zip(last) {
                    *out = O::narrow(finish(f(acc, last)));
                }
            }
            2 => {
                acc.iter_mut().zip(last).for_each(|(acc, &last)| *acc = finish(f(*acc, last)));
                O::narrow_all(acc, out);
            }
            _ => {
                acc.iter_mut().for_each(|acc| *acc = finish(*acc));
                O::narrow_all(acc, out);
            }
        }
        start += out.len();
    }
}

/// Returns a rank's elements of a block, at `here` in inputs outside the output.
#[inline(always)]
fn source<'a, T: Element, O: Element>(input: &Input<'a>, out: &'a [O], here: Range<usize>) -> &'a [T] {
    match *input {
        // Both types are the same where this is called.
        Input::Output => bytemuck::cast_slice(out),
        Input::Bytes(bytes) | Input::Partial(bytes, _) => &bytemuck::cast_slice(bytes)[here],
    }
}

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

    /// The definition of the sum: the largest power of two ranks that leaves some, plus the others.
    fn tree(values: &[f32]) -> f32 {
        match values {
            [value] => *value,
            _ => {
                let (before, rest) = values.split_at(values.len().next_power_of_two() / 2);
                tree(before) + tree(rest)
            }
        }
    }

    proptest! {
        #[test]
        fn half_precision_is_summed_in_single_precision_as_a_tree_also_in_place_and_in_steps(
            columns in proptest::collection::vec(proptest::collection::vec(-100f32..100.0, 1300), 2..20),
            len in 1usize..1300,
            own in 0usize..20,
            subtree in 1u32..4,
            which in 0u32..1024,
        ) {
            let own = own % columns.len();
            let expect = |round: fn(f32) -> f32| -> Vec<f32> {
                let sum = |i: usize| tree(&columns.iter().map(|c| round(c[i])).collect::<Vec<_>>());
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

            // Combines some subtrees first.
            for (dtype, all) in [
                (DType::F16, &inputs),
                (DType::F32, &columns.iter().map(|c| Input::Bytes(bytemuck::cast_slice(&c[..len]))).collect()),
            ] {
                let blocks: Vec<_> = all.chunks(1 << subtree).collect();
                let mut sums = vec![vec![0f32; len]; blocks.len()];
                for (block, sum) in blocks.iter().zip(&mut sums) {
                    partial(dtype, ReduceOp::Avg, bytemuck::cast_slice_mut(sum), block);
                }
                let first = blocks.iter().zip(&sums).enumerate().flat_map(|(at, (block, sum))| match which >> at & 1 {
                    0 => block.to_vec(),
                    _ => vec![Input::Partial(bytemuck::cast_slice(sum), block.len())],
                });
                let (mut whole, mut stepped) = (vec![0; len * dtype.size()], vec![0; len * dtype.size()]);
                reduce(dtype, ReduceOp::Avg, &mut whole, all);
                reduce(dtype, ReduceOp::Avg, &mut stepped, &first.collect::<Vec<_>>());
                prop_assert!(whole == stepped, "{dtype}");
            }
        }
    }
}
