//! The float dtypes, and the selection of one of them.

use std::ops::AddAssign;

use bytemuck::Pod;
use fsdp_core::Element;
use half::{bf16, f16};
use num_traits::AsPrimitive;

/// Runs `$body` with `$t` as the type of a float dtype. Any other dtype is an error. A kernel does this once per call.
macro_rules! floats {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            fsdp_core::DType::F32 => {
                type $t = f32;
                $body
            }
            fsdp_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            fsdp_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            fsdp_core::DType::F64 => {
                type $t = f64;
                $body
            }
            other => candle_core::bail!("parameters and gradients are floating point; got {other}"),
        }
    };
}
pub(super) use floats;

/// The type of a float's arithmetic: f64 for f64, else f32.
pub(crate) trait Real: num_traits::Float {
    fn of(number: f64) -> Self;
    fn rounded<T: Float>(self) -> T;
    /// Converts to the type of another float's arithmetic.
    fn widened<R: Real>(self) -> R;
}

macro_rules! real {
    ($t:ty, $rounded:ident) => {
        impl Real for $t {
            #[inline(always)]
            fn of(number: f64) -> Self {
                number as $t
            }
            #[inline(always)]
            fn rounded<T: Float>(self) -> T {
                T::$rounded(self)
            }
            #[inline(always)]
            fn widened<R: Real>(self) -> R {
                R::of(self.into())
            }
        }
    };
}
real!(f32, from_f32);
real!(f64, from_f64);

/// A float as it is stored.
pub(crate) trait Float: Element + Pod + AddAssign {
    type Real: Real;
    fn get(self) -> Self::Real;
    fn from_f32(value: f32) -> Self;
    fn from_f64(value: f64) -> Self;
    #[inline(always)]
    fn put(value: Self::Real) -> Self {
        value.rounded()
    }
}

macro_rules! float {
    ($t:ty, $real:ty, $get:expr, $from_f32:expr) => {
        impl Float for $t {
            type Real = $real;
            #[inline(always)]
            fn get(self) -> $real {
                $get(self)
            }
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                $from_f32(value)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value.as_()
            }
        }
    };
}
float!(f32, f32, AsPrimitive::as_, AsPrimitive::as_);
float!(f64, f64, AsPrimitive::as_, AsPrimitive::as_);
float!(bf16, f32, from_bf16, to_bf16);
float!(f16, f32, AsPrimitive::as_, AsPrimitive::as_);

/// `bf16::to_f32` without its branch, which prevents vectorization.
#[inline(always)]
fn from_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// `bf16::from_f32` without its branches: rounds to the nearest, and to the even one of two.
#[inline(always)]
fn to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // The bit keeps a NaN from becoming infinite.
    bf16::from_bits(if value.is_nan() { (bits >> 16) | 0x40 } else { nearest } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_of_bf16_equal_those_of_half() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            let ours = Float::get(value);
            assert!(ours.to_bits() == value.to_f32().to_bits() || (ours.is_nan() && value.is_nan()), "{bits:#x}");
            // The value itself, those around it, and those around the middle to the next.
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(bits) << 16 | low);
                assert_eq!(
                    <bf16 as Float>::from_f32(value).to_bits(),
                    bf16::from_f32(value).to_bits(),
                    "{bits:#x} {low:#x}"
                );
            }
        }
    }
}
