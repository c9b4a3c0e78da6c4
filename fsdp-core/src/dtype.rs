//! Element types of tensors, buffers and checkpoints.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of one element. Its text form is the safetensors name (`F32`, `BF16`, ...).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[non_exhaustive]
pub enum DType {
    /// Unsigned 8-bit integer.
    U8,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 64-bit integer.
    I64,
    /// Brain floating point, 16 bits.
    BF16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl DType {
    /// All dtypes.
    pub const ALL: [DType; 7] = [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];

    /// Returns the bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::BF16 | DType::F16 => 2,
            DType::U32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// Returns the safetensors name.
    pub const fn name(self) -> &'static str {
        match self {
            DType::U8 => "U8",
            DType::U32 => "U32",
            DType::I64 => "I64",
            DType::BF16 => "BF16",
            DType::F16 => "F16",
            DType::F32 => "F32",
            DType::F64 => "F64",
        }
    }

    /// Returns whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::BF16 | DType::F16 | DType::F32 | DType::F64)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type whose values are elements of a dtype.
///
/// ```
/// use fsdp_core::{DType, Scalar};
/// assert_eq!(f32::DTYPE, DType::F32);
/// ```
pub trait Scalar: Copy + Send + 'static {
    /// The dtype of the type.
    const DTYPE: DType;
}

macro_rules! scalars {
    ($($t:ty: $dtype:ident),*) => {$(
        impl Scalar for $t {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
scalars!(u8: U8, u32: U32, i64: I64, bf16: BF16, f16: F16, f32: F32, f64: F64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_serialized_form_is_the_name() {
        for dtype in DType::ALL {
            assert_eq!(serde_json::to_string(&dtype).unwrap(), format!("\"{}\"", dtype.name()));
        }
    }
}
