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
    ($t:ty, $real:ty) => {
        impl Float for $t {
            type Real = $real;
            #[inline(always)]
            fn get(self) -> $real {
                self.as_()
            }
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                value.as_()
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value.as_()
            }
        }
    };
}
float!(f32, f32);
float!(f64, f64);
float!(bf16, f32);
float!(f16, f32);
