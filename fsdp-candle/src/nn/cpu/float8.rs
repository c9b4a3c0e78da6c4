//! 8-bit floats on the CPU: operands of products are rounded to them, and multiplied in f32. The crate `float8` rounds one
//! value at a time, which takes 13 times as long.

use std::borrow::Cow;

use candle_core::DType;

use super::map_rows;
use super::matrix::Mat;
use super::simd::kernel;
use crate::kernels::{Float8Cast, Float8Format};

/// An operand that was rounded to 8-bit floats, in f32.
pub(in crate::nn) struct Rounded {
    /// The matrix or its transpose, row-major.
    values: Vec<f32>,
    rows: usize,
    cols: usize,
    is_transposed: bool,
    cast: Float8Cast,
}

/// The side of a product that an operand is on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::nn) enum Side {
    Left,
    Right,
}

impl Rounded {
    /// Rounds an operand.
    pub(in crate::nn) fn new(operand: Mat<'_>, cast: Float8Cast, side: Side) -> Self {
        let (values, is_transposed) = operand.dense();
        let count = operand.rows() * operand.cols();
        let mut values = match values {
            Cow::Borrowed(values) => values[..count].to_vec(),
            Cow::Owned(values) => values,
        };
        values.truncate(count);
        let (rows, cols) = match is_transposed {
            false => (operand.rows(), operand.cols()),
            true => (operand.cols(), operand.rows()),
        };
        let round: Round = match cast.format {
            Float8Format::E4M3 => (round_e4m3, round_columns_e4m3),
            Float8Format::E5M2 => (round_e5m2, round_columns_e5m2),
        };
        let by_row = (side == Side::Left) != is_transposed;
        match (cast.per_vector, by_row) {
            (false, _) => {
                let parts = map_rows(&mut values, 1, 1, |_, part| largest(part));
                let scale = scale_of(parts.into_iter().max().unwrap_or(0), cast);
                map_rows(&mut values, 1, 1, |_, part| round.0(part, scale));
            }
            (true, true) => {
                map_rows(&mut values, cols, cols, |_, rows| {
                    rows.chunks_exact_mut(cols).for_each(|row| round.0(row, scale_of(largest(row), cast)));
                });
            }
            (true, false) => {
                let mut most = vec![0; cols];
                values.chunks_exact(cols.max(1)).for_each(|row| largest_of_columns(&mut most, row));
                let scales: Vec<f32> = most.iter().map(|&most| scale_of(most, cast)).collect();
                map_rows(&mut values, cols, cols, |_, rows| {
                    rows.chunks_exact_mut(cols).for_each(|row| round.1(row, &scales));
                });
            }
        }
        Rounded { values, rows, cols, is_transposed, cast }
    }

    pub(in crate::nn) fn mat(&self) -> Mat<'_> {
        let mat = Mat::new(&self.values, self.rows, self.cols);
        // With a power of two as scale, the values are exact in bf16.
        let mat = if self.cast.power_of_two { mat.as_dtype(DType::BF16) } else { mat };
        if self.is_transposed { mat.t() } else { mat }
    }
}

type Round = (fn(&mut [f32], f32), fn(&mut [f32], &[f32]));

/// Returns the scale of values, given the bits of the largest magnitude.
fn scale_of(largest: u32, cast: Float8Cast) -> f32 {
    let largest = f64::from(f32::from_bits(largest));
    let divisor = if largest < Float8Cast::LEAST { Float8Cast::LEAST } else { largest };
    let scale = (f64::from(cast.format.most()) / divisor) as f32;
    // A float without its mantissa is the power of two below. NaN stays NaN.
    if cast.power_of_two && !scale.is_nan() { f32::from_bits(scale.to_bits() & 0xff80_0000) } else { scale }
}

/// Returns `x`, as the nearest float with this many bits of mantissa, ties to even, and at most `most`. Below
/// `2^exponent`, floats are as far apart as they are there.
#[inline(always)]
fn nearest<const MANTISSA: u32, const EXPONENT: i32>(x: f32, most: f32) -> f32 {
    let magnitude = x.abs();
    let magnitude = if magnitude > most { most } else { magnitude };
    let (bits, drop) = (magnitude.to_bits(), 23 - MANTISSA);
    let even = bits >> drop & 1;
    let normal = f32::from_bits(bits.wrapping_add((1 << (drop - 1)) - 1 + even) & !((1 << drop) - 1));
    // Adding 2^23 steps rounds to a step.
    let step = f32::from_bits(((EXPONENT - MANTISSA as i32 + 127 + 23) as u32) << 23);
    let subnormal = (magnitude + step) - step;
    let least = f32::from_bits(((EXPONENT + 127) as u32) << 23);
    let rounded = if magnitude < least { subnormal } else { normal };
    let rounded = if x.is_nan() { x } else { rounded };
    rounded.copysign(x)
}

#[inline(always)]
fn e4m3(x: f32) -> f32 {
    nearest::<3, -6>(x, Float8Format::E4M3.most())
}

#[inline(always)]
fn e5m2(x: f32) -> f32 {
    nearest::<2, -14>(x, Float8Format::E5M2.most())
}

kernel! {
    /// Returns the bits of the largest magnitude. Those of NaN are above all others.
    fn largest(values: &[f32]) -> u32 {
        values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff))
    }

    fn largest_of_columns(largest: &mut [u32], row: &[f32]) {
        for (largest, value) in largest.iter_mut().zip(row) {
            *largest = (*largest).max(value.to_bits() & 0x7fff_ffff);
        }
    }

    fn round_e4m3(values: &mut [f32], scale: f32) {
        values.iter_mut().for_each(|value| *value = e4m3(*value * scale) / scale);
    }

    fn round_columns_e4m3(values: &mut [f32], scales: &[f32]) {
        values.iter_mut().zip(scales).for_each(|(value, scale)| *value = e4m3(*value * scale) / scale);
    }

    fn round_e5m2(values: &mut [f32], scale: f32) {
        values.iter_mut().for_each(|value| *value = e5m2(*value * scale) / scale);
    }

    fn round_columns_e5m2(values: &mut [f32], scales: &[f32]) {
        values.iter_mut().zip(scales).for_each(|(value, scale)| *value = e5m2(*value * scale) / scale);
    }
}

#[cfg(test)]
mod tests {
    use float8::{F8E4M3, F8E5M2};

    use super::*;

    #[test]
    fn rounding_agrees_with_the_float8_crate() {
        let mut state = 1u32;
        let random = (0..200_000).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits((state & 0x87ff_ffff) | (100 + state % 45) << 23)
        });
        // All floats of 8 bits, and the middles between them.
        let codes = (0..=255u8).flat_map(|code| [F8E4M3::from_bits(code).to_f32(), F8E5M2::from_bits(code).to_f32()]);
        let codes: Vec<f32> = codes.filter(|value| value.is_finite()).collect();
        let middles = codes.iter().flat_map(|a| [a * 1.0625, a * 0.9375, a * 1.125, a * 0.875]).collect::<Vec<_>>();
        for x in random.chain(codes).chain(middles).chain([0., -0., 1e-12, 447.9, 463.9, 57_343.]) {
            let in_range = |most: f32| x.clamp(-most, most);
            assert_eq!(e4m3(x).to_bits(), F8E4M3::from_f32(in_range(448.)).to_f32().to_bits(), "{x:e} in E4M3");
            assert_eq!(e5m2(x).to_bits(), F8E5M2::from_f32(in_range(57_344.)).to_f32().to_bits(), "{x:e} in E5M2");
        }
        assert_eq!([e4m3(f32::INFINITY), e4m3(-1e30), e5m2(f32::NEG_INFINITY)], [448., -448., -57_344.]);
        assert!(e4m3(f32::NAN).is_nan() && e5m2(f32::NAN).is_nan());
    }

    #[test]
    fn scales_are_of_the_tensor_or_of_the_vectors_that_a_sum_runs_over() {
        let cast = |per_vector, power_of_two| Float8Cast { format: Float8Format::E4M3, per_vector, power_of_two };
        let scales = |cast: Float8Cast| move |most: f32| scale_of(most.to_bits(), cast);
        assert_eq!([1., 3., 448., 0.].map(scales(cast(false, false))), [448., 448. / 3., 1., 4.48e14]);
        assert_eq!([1., 3., 448., 449.].map(scales(cast(false, true))), [256., 128., 1., 0.5]);
        assert!(scales(cast(true, true))(f32::NAN).is_nan() && scales(cast(true, false))(f32::NAN).is_nan());
        // A small value survives beside a large one of another vector only.
        let values = [1e6, 0., 1., 1.];
        let of = |cast, side, transposed: bool| {
            let mat = Mat::new(&values, 2, 2);
            let rounded = Rounded::new(if transposed { mat.t() } else { mat }, cast, side);
            (rounded.is_transposed, rounded.values)
        };
        let close = |(was_transposed, found): (bool, Vec<f32>), transposed, expected: [f32; 4]| {
            assert_eq!(was_transposed, transposed);
            found.iter().zip(expected).for_each(|(f, e)| assert!((f - e).abs() <= 0.07 * e.abs(), "{found:?}"));
        };
        close(of(cast(false, false), Side::Left, false), false, [1e6, 0., 0., 0.]);
        close(of(cast(true, true), Side::Left, false), false, [1e6, 0., 1., 1.]);
        close(of(cast(true, true), Side::Right, false), false, [1e6, 0., 0., 1.]);
        close(of(cast(true, true), Side::Left, true), true, [1e6, 0., 0., 1.]);
        close(of(cast(true, true), Side::Right, true), true, [1e6, 0., 1., 1.]);
    }
}
