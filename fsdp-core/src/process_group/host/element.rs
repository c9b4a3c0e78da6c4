//! What reductions are of: elements as they are stored, and as they are combined.
//!
//! All of it is inlined into functions that are compiled for the instructions they may use.

use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// An element as it is stored, with the type it is combined in.
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

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(bf16::narrow(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }
}
