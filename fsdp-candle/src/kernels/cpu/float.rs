//! The float dtypes, and the selection of one of them.

use std::ops::{Add, AddAssign, Div, Mul, Sub};

use bytemuck::Pod;
use fsdp_core::Element;
use half::{bf16, f16};

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
pub(crate) trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    fn of(number: f64) -> Self;
    fn sqrt(self) -> Self;
    fn rounded<T: Float>(self) -> T;
    /// Converts to the type of another float's arithmetic.
    fn widened<R: Real>(self) -> R;
}

impl Real for f32 {
    #[inline(always)]
    fn of(number: f64) -> Self {
        number as f32
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn rounded<T: Float>(self) -> T {
        T::from_f32(self)
    }
    #[inline(always)]
    fn widened<R: Real>(self) -> R {
        R::of(f64::from(self))
    }
}

impl Real for f64 {
    #[inline(always)]
    fn of(number: f64) -> Self {
        number
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn rounded<T: Float>(self) -> T {
        T::from_f64(self)
    }
    #[inline(always)]
    fn widened<R: Real>(self) -> R {
        R::of(self)
    }
}

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

impl Float for f32 {
    type Real = f32;
    #[inline(always)]
    fn get(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Float for f64 {
    type Real = f64;
    #[inline(always)]
    fn get(self) -> f64 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f64::from(value)
    }
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value
    }
}

macro_rules! half {
    ($t:ty) => {
        impl Float for $t {
            type Real = f32;
            #[inline(always)]
            fn get(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                <$t>::from_f32(value)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                <$t>::from_f64(value)
            }
        }
    };
}
half!(bf16);
half!(f16);
