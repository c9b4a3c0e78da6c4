//! Conversion between floating point types.

use fsdp_core::DType;
use half::{bf16, f16};

/// Converts elements in native byte order, rounding to nearest. Both buffers hold the same number of elements. Returns
/// `None` unless both types are floating point.
pub(crate) fn cast(from: &[u8], from_dtype: DType, to: &mut [u8], to_dtype: DType) -> Option<()> {
    // An f64 holds every value of the other types, so nothing is rounded twice.
    macro_rules! into {
        ($values:expr) => {
            match to_dtype {
                DType::F32 => write(to, $values, |value| (value as f32).to_ne_bytes()),
                DType::F64 => write(to, $values, f64::to_ne_bytes),
                DType::BF16 => write(to, $values, |value| bf16::from_f32(to_odd(value)).to_ne_bytes()),
                DType::F16 => write(to, $values, |value| f16::from_f32(to_odd(value)).to_ne_bytes()),
                _ => return None,
            }
        };
    }
    match from_dtype {
        DType::F32 => into!(from.as_chunks().0.iter().map(|bytes| f64::from(f32::from_ne_bytes(*bytes)))),
        DType::F64 => into!(from.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes))),
        DType::BF16 => into!(from.as_chunks().0.iter().map(|bytes| bf16::from_ne_bytes(*bytes).to_f64())),
        DType::F16 => into!(from.as_chunks().0.iter().map(|bytes| f16::from_ne_bytes(*bytes).to_f64())),
        _ => return None,
    }
    Some(())
}

/// Rounds to odd: returns an inexact `value` as the neighbouring f32 with the last bit set. Rounding the result further
/// is the same as rounding `value`. (The conversions of `half` ignore the lower half of an f64.)
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let bits = near.to_bits();
    if f64::from(near) == value || bits & 1 == 1 || !near.is_finite() {
        return near;
    }
    f32::from_bits(if f64::from(near).abs() < value.abs() { bits + 1 } else { bits - 1 })
}

/// Decodes one element of any type as f64. Integers beyond 2^53 lose their last bits.
pub(crate) fn decode(bytes: &[u8], dtype: DType) -> f64 {
    let bits = bytes.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
    match dtype {
        DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
        DType::F16 => f16::from_bits(bits as u16).to_f64(),
        DType::F32 => f32::from_bits(bits as u32).into(),
        DType::F64 => f64::from_bits(bits),
        DType::I64 => bits as i64 as f64,
        // Unsigned integers.
        _ => bits as f64,
    }
}

fn write<const N: usize>(to: &mut [u8], values: impl Iterator<Item = f64>, bytes: impl Fn(f64) -> [u8; N]) {
    for (to, value) in to.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *to = bytes(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_once_to_nearest() {
        // Halfway between two bf16 after rounding to f32, but above halfway before.
        let value = 1.0 + f64::from(2f32.powi(-8)) + 1e-12;
        let mut half = [0; 2];
        cast(&value.to_ne_bytes(), DType::F64, &mut half, DType::BF16).unwrap();
        assert_eq!(bf16::from_ne_bytes(half), bf16::from_f32(1.0 + 2f32.powi(-7)));
        let mut back = [0; 4];
        cast(&half, DType::BF16, &mut back, DType::F32).unwrap();
        assert_eq!(f32::from_ne_bytes(back), 1.0 + 2f32.powi(-7));
        assert!(cast(&[0; 4], DType::U32, &mut [0; 4], DType::F32).is_none());
        assert!(cast(&[0; 4], DType::F32, &mut [0; 8], DType::I64).is_none());
    }

    #[test]
    fn decodes_numbers() {
        for (dtype, bytes, number) in [
            (DType::U8, vec![200], 200.0),
            (DType::U32, 4_000_000_000u32.to_ne_bytes().to_vec(), 4e9),
            (DType::I64, (-5i64).to_ne_bytes().to_vec(), -5.0),
            (DType::BF16, bf16::from_f32(-1.5).to_ne_bytes().to_vec(), -1.5),
            (DType::F16, f16::from_f32(0.25).to_ne_bytes().to_vec(), 0.25),
            (DType::F32, 3.5f32.to_ne_bytes().to_vec(), 3.5),
            (DType::F64, 1e300f64.to_ne_bytes().to_vec(), 1e300),
        ] {
            assert_eq!(decode(&bytes, dtype), number, "{dtype}");
        }
    }
}
