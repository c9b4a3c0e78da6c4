//! 8-bit codes with a scale for each block.

use candle_core::Result;
use float8::F8E4M3;

use super::super::eight_bits::{EightBits, Magnitudes, SIGNED, UNSIGNED};
use super::super::slice::{Slice, SliceMut};
use super::float::{Float, floats};
use super::memory::{elements, elements_mut, same_length};

const LARGEST_INT8: f32 = 127.;
const LARGEST_E4M3: f32 = 448.;

pub(super) fn quantise(
    bits: EightBits,
    block: usize,
    values: Slice<'_>,
    (codes, scales): (SliceMut<'_>, SliceMut<'_>),
) -> Result<()> {
    let (values, block) = (elements::<f32>(values)?, block.max(1));
    let (codes, scales) = (elements_mut::<u8>(codes)?, elements_mut::<f32>(scales)?);
    same_length(values.len(), codes.len())?;
    same_length(values.len().div_ceil(block), scales.len())?;
    for ((values, codes), scale) in values.chunks(block).zip(codes.chunks_mut(block)).zip(scales) {
        let largest = values.iter().fold(0f32, |max, value| max.max(value.abs()));
        let is_finite = values.iter().all(|value| value.is_finite());
        match bits {
            EightBits::Int8 => {
                *scale = if is_finite { largest / LARGEST_INT8 } else { f32::NAN };
                let inverse = if *scale > 0. { 1. / *scale } else { 0. };
                codes.iter_mut().zip(values).for_each(|(code, v)| *code = (v * inverse).round() as i8 as u8);
            }
            EightBits::E4M3 => {
                *scale = match is_finite {
                    true if largest > 0. => largest / LARGEST_E4M3,
                    true => 1.,
                    false => f32::NAN,
                };
                codes.iter_mut().zip(values).for_each(|(code, v)| *code = F8E4M3::from_f32(v / *scale).to_bits());
            }
            EightBits::Signed => {
                *scale = if is_finite { largest } else { f32::NAN };
                encode_signed(values, *scale, codes);
            }
            EightBits::Unsigned => {
                *scale = if is_finite { largest } else { f32::NAN };
                encode_unsigned(values, *scale, codes);
            }
        }
    }
    Ok(())
}

pub(super) fn dequantise(
    bits: EightBits,
    block: usize,
    (codes, scales): (Slice<'_>, Slice<'_>),
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
            EightBits::Int8 => decode(block, codes, scales, values, |code| f32::from(code as i8)),
            EightBits::E4M3 => decode(block, codes, scales, values, |code| F8E4M3::from_bits(code).to_f32()),
            EightBits::Signed => decode(block, codes, scales, values, |code| signed(&SIGNED, code)),
            EightBits::Unsigned => decode(block, codes, scales, values, |code| UNSIGNED.values[usize::from(code)]),
        }
    });
    Ok(())
}

/// What values are multiplied by, to be at most 1.
fn inverse(scale: f32) -> f32 {
    if scale > 0. { 1. / scale } else { 0. }
}

/// Codes of [`EightBits::Signed`].
pub(super) fn encode_signed(values: &[f32], scale: f32, codes: &mut [u8]) {
    let (magnitudes, inverse) = (&*SIGNED, inverse(scale));
    let code = |v: f32| magnitudes.code((v * inverse).abs()) | u8::from(v < 0.) << 7;
    codes.iter_mut().zip(values).for_each(|(to, v)| *to = code(*v));
}

/// Codes of [`EightBits::Unsigned`].
pub(super) fn encode_unsigned(values: &[f32], scale: f32, codes: &mut [u8]) {
    let (magnitudes, inverse) = (&*UNSIGNED, inverse(scale));
    codes.iter_mut().zip(values).for_each(|(to, v)| *to = magnitudes.code(v * inverse));
}

/// What a code of [`EightBits::Signed`] stands for.
#[inline(always)]
pub(super) fn signed(magnitudes: &Magnitudes, code: u8) -> f32 {
    let magnitude = magnitudes.values[usize::from(code & 127)];
    if code > 127 { -magnitude } else { magnitude }
}
