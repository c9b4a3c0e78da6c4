//! Functions compiled once for each level of the CPU's vector instructions, and their shared arithmetic.
//!
//! The crate is compiled for the oldest CPU of its target. On x86-64 that means vectors of four floats and no fused
//! multiply-add. [`kernel!`] compiles a function's body again with AVX2 and with AVX-512, and selects one at run time.
//! The loops inside are plain Rust that the compiler vectorizes.

/// Defines functions whose bodies are compiled for several instruction sets. Each call selects the best one that the
/// CPU has, so a call should process at least a row.
macro_rules! kernel {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[cfg(feature = "avx512")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    #[cfg(feature = "avx512")]
                    if is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512dq")
                        && is_x86_feature_detected!("avx512vl")
                    {
                        // SAFETY: the CPU has every instruction set that the function was compiled for.
                        return unsafe { avx512($($arg),*) };
                    }
                    // SAFETY: the CPU has every instruction set that the function was compiled for.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    )*};
}
pub(in crate::nn) use kernel;

/// Returns e^x, within 1.5 units in the last place for x in [-87.3, 88.37]. Arguments beyond are replaced by the bound.
/// NaN stays NaN.
///
/// Range reduction by Cody and Waite and the polynomial of Cephes' `expf`.
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub(in crate::nn) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23. Adding it leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -87.336_54 { -87.336_54 } else { x };
    let x = if x > 88.376_26 { 88.376_26 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_375, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_15e-4f32;
    let p = p.mul_add(r, 1.398_199_950_7e-3);
    let p = p.mul_add(r, 8.333_451_907_3e-3);
    let p = p.mul_add(r, 4.166_579_589_4e-2);
    let p = p.mul_add(r, 1.666_666_545_9e-1);
    let p = p.mul_add(r, 5.000_000_120_1e-1);
    let y = (p * r).mul_add(r, r) + 1.0;
    y * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

/// Returns a probability e^x, or 0 below 1e-30. Subnormal numbers would slow a matrix product down by a factor of ten
/// and more.
#[inline(always)]
pub(in crate::nn) fn probability(x: f32) -> f32 {
    if x < -69.0 { 0.0 } else { exp(x) }
}

/// Returns 1 / (1 + e^-x).
#[inline(always)]
pub(in crate::nn) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Computes tanh by a rational function, within 4 units in the last place: Eigen's `ptanh`.
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub(in crate::nn) fn tanh(x: f32) -> f32 {
    const BOUND: f32 = 7.905_311_1;
    let x = if x < -BOUND { -BOUND } else { x };
    let x = if x > BOUND { BOUND } else { x };
    let square = x * x;
    let p = square.mul_add(-2.760_768_477_42e-16, 2.000_187_904_82e-13);
    let p = square.mul_add(p, -8.604_671_522_14e-11);
    let p = square.mul_add(p, 5.122_297_090_37e-8);
    let p = square.mul_add(p, 1.485_722_357_18e-5);
    let p = square.mul_add(p, 6.372_619_288_75e-4);
    let p = square.mul_add(p, 4.893_524_558_92e-3);
    let q = square.mul_add(1.198_258_394_67e-6, 1.185_347_056_87e-4);
    let q = square.mul_add(q, 2.268_434_632_44e-3);
    let q = square.mul_add(q, 4.893_525_185_54e-3);
    x * p / q
}

/// Accumulators of a reduction: enough to fill the vector units while each accumulator waits for its previous result.
const LANES: usize = 64;

/// Folds a row with `LANES` independent accumulators, and joins them.
#[inline(always)]
fn fold(row: &[f32], start: f32, step: impl Fn(f32, f32) -> f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let (head, tail) = row.as_chunks::<LANES>();
    let mut lanes = [start; LANES];
    for chunk in head {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = step(*lane, x);
    }
    join_lanes(lanes, join)
}

/// Joins the lanes pairwise, which is both quick and accurate.
#[inline(always)]
fn join_lanes(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
pub(in crate::nn) fn sum(row: &[f32]) -> f32 {
    fold(row, 0.0, |a, x| a + x, |a, b| a + b)
}

/// Returns the sum of (x - center)^2.
#[inline(always)]
pub(in crate::nn) fn sum_squares(row: &[f32], center: f32) -> f32 {
    fold(row, 0.0, |a, x| (x - center).mul_add(x - center, a), |a, b| a + b)
}

/// Returns the largest value, ignoring NaN.
#[inline(always)]
pub(in crate::nn) fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    fold(row, f32::NEG_INFINITY, larger, larger)
}

/// Returns the sum of e^(scale * x - shift).
#[inline(always)]
pub(in crate::nn) fn sum_exp(row: &[f32], scale: f32, shift: f32) -> f32 {
    fold(row, 0.0, |a, x| a + exp(x.mul_add(scale, -shift)), |a, b| a + b)
}

/// Returns the sum of a * (b - center), over the length of the shorter row.
#[inline(always)]
pub(in crate::nn) fn dot(a: &[f32], b: &[f32], center: f32) -> f32 {
    let (a_head, a_tail) = a.as_chunks::<LANES>();
    let (b_head, b_tail) = b.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a_head.iter().zip(b_head) {
        for i in 0..LANES {
            lanes[i] = a[i].mul_add(b[i] - center, lanes[i]);
        }
    }
    for (lane, (&a, &b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *lane = a.mul_add(b - center, *lane);
    }
    join_lanes(lanes, |a, b| a + b)
}
