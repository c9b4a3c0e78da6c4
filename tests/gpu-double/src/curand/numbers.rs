//! Numbers by chance: number `i` of a generator depends on its seed and `i` only.

/// SplitMix64, asked for its `index`-th value.
pub(crate) fn bits(seed: u64, index: u64) -> u64 {
    let mut value = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// From 0, which it never is, to 1, as cuRAND has it. A float's 24 bits can tell it.
pub(crate) fn uniform_f32(seed: u64, index: u64) -> f32 {
    ((bits(seed, index) >> 40) + 1) as f32 / (1u32 << 24) as f32
}

/// The same with a double's 53 bits.
pub(crate) fn uniform_f64(seed: u64, index: u64) -> f64 {
    ((bits(seed, index) >> 11) + 1) as f64 / (1u64 << 53) as f64
}

/// Of mean 0 and standard deviation 1, by Box and Muller: each pair of numbers has one radius and one angle.
pub(crate) fn normal(seed: u64, index: u64) -> f64 {
    let pair = index & !1;
    let radius = (-2.0 * uniform_f64(seed, pair).ln()).sqrt();
    let angle = std::f64::consts::TAU * uniform_f64(seed, pair + 1);
    if index == pair { radius * angle.cos() } else { radius * angle.sin() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and variance of many.
    fn moments(values: impl Iterator<Item = f64>) -> (f64, f64) {
        let values: Vec<f64> = values.collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        (mean, values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64)
    }

    #[test]
    fn uniform_numbers_fill_their_interval() {
        let of = |seed| (0..100_000).map(move |index| uniform_f64(seed, index));
        let (mean, variance) = moments(of(7));
        assert!((mean - 0.5).abs() < 0.005 && (variance - 1.0 / 12.0).abs() < 0.001, "{mean} {variance}");
        assert!(of(7).all(|value| value > 0.0 && value <= 1.0));
        assert!((0..100_000).all(|index| (uniform_f32(7, index) - uniform_f64(7, index) as f32).abs() < 1e-6));
        assert_ne!(of(7).take(8).collect::<Vec<_>>(), of(8).take(8).collect::<Vec<_>>());
    }

    #[test]
    fn normal_numbers_have_their_moments() {
        let of = || (0..100_000).map(|index| normal(3, index));
        let (mean, variance) = moments(of());
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        let within = of().filter(|value| value.abs() < 1.0).count();
        assert!((within as f64 / 100_000.0 - 0.6827).abs() < 0.005, "{within}");
    }
}
