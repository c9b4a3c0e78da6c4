//! Norms, and what is no number.

use candle_core::Result;
use fsdp_core::DType;

use super::super::norm::NormType;
use super::super::slice::Slice;
use super::float::Float;
use super::memory::{bytes, elements};

pub(super) fn powers(values: Slice<'_>, norm: NormType) -> Result<f64> {
    Ok(match values.dtype() {
        DType::F64 => {
            let values = elements::<f64>(values)?;
            values.iter().fold(0., |sum, &value| norm.combine(sum, norm.power(value.abs())))
        }
        DType::F32 => reduce(elements::<f32>(values)?, norm),
        DType::BF16 => reduce(elements::<half::bf16>(values)?, norm),
        DType::F16 => reduce(elements::<half::f16>(values)?, norm),
        other => candle_core::bail!("parameters and gradients are floating point; got {other}"),
    })
}

fn reduce<T: Float<Real = f32>>(values: &[T], norm: NormType) -> f64 {
    if norm != NormType::Two {
        return values.iter().fold(0., |sum, value| norm.combine(sum, norm.power(f64::from(value.get()).abs())));
    }
    // Short runs in f32 lanes and the runs in f64: fast and exact enough.
    values
        .chunks(256)
        .map(|chunk| {
            let mut lanes = [0f32; 16];
            for run in chunk.chunks(16) {
                for (lane, value) in lanes.iter_mut().zip(run) {
                    let value = value.get();
                    *lane += value * value;
                }
            }
            let sum: f64 = lanes.iter().map(|&lane| f64::from(lane)).sum();
            // Squares of numbers that f32 has room for may need f64.
            if sum.is_finite() { sum } else { chunk.iter().map(|value| f64::from(value.get()).powi(2)).sum() }
        })
        .sum()
}

pub(super) fn count_non_finite(values: Slice<'_>) -> Result<u64> {
    let counts = fsdp_ckpt::count_non_finite(values.dtype(), bytes(values)?);
    Ok(counts.map_or(0, |(_, [nan, infinite])| nan + infinite))
}
