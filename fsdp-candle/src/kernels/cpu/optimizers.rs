//! Steps of optimizers in one pass over parameter, gradient and state, and 8-bit codes with a scale for each block.

use super::super::eight_bits::{Magnitudes, SIGNED, STATE_BLOCK, UNSIGNED};
use super::super::{AdamUpdate, SgdUpdate};
use super::float::{Float, Real};

pub(super) fn run_adam<T: Float, const L2: bool>(
    update: &AdamUpdate,
    params: &mut [T],
    grads: &[T],
    (means, squares): (&mut [T], &mut [T]),
) {
    let (adam, factor) = (Adam::<T::Real>::of(update), T::Real::of(update.factor));
    for (((p, &g), m), v) in params.iter_mut().zip(grads).zip(means).zip(squares) {
        let (value, mean, square) = adam.step::<L2>(p.get(), scaled(g, factor), m.get(), v.get());
        *m = T::put(mean);
        *v = T::put(square);
        *p = T::put(value);
    }
}

/// Returns a gradient times a factor, with the rounding of `Kernels::scale`.
#[inline(always)]
fn scaled<T: Float>(grad: T, factor: T::Real) -> T::Real {
    T::put(grad.get() * factor).get()
}

/// Adam's numbers in the type of the arithmetic, without the factor.
#[derive(Clone, Copy)]
struct Adam<R> {
    l2: R,
    decay: R,
    beta1: R,
    rest1: R,
    beta2: R,
    rest2: R,
    step_size: R,
    root_correction: R,
    eps: R,
}

impl<R: Real> Adam<R> {
    fn of(update: &AdamUpdate) -> Self {
        Adam {
            l2: R::of(update.l2),
            decay: R::of(update.decay),
            beta1: R::of(update.beta1),
            rest1: R::of(1. - update.beta1),
            beta2: R::of(update.beta2),
            rest2: R::of(1. - update.beta2),
            step_size: R::of(update.step_size),
            root_correction: R::of(update.root_bias_correction2),
            eps: R::of(update.eps),
        }
    }

    /// Returns the parameter and the moments of one element after a step.
    #[inline(always)]
    fn step<const L2: bool>(&self, p: R, g: R, mean: R, square: R) -> (R, R, R) {
        let g = if L2 { g + self.l2 * p } else { g };
        let mean = self.beta1 * mean + self.rest1 * g;
        let square = self.beta2 * square + self.rest2 * g * g;
        (p * self.decay - self.step_size * mean / (square.sqrt() / self.root_correction + self.eps), mean, square)
    }
}

/// Processes a block at a time. The block's decoded moments stay in registers and the nearest cache.
pub(super) fn run_adam_8bit<T: Float<Real = f32>>(
    update: &AdamUpdate,
    params: &mut [T],
    grads: &[T],
    (codes1, scales1): (&mut [u8], &mut [f32]),
    (codes2, scales2): (&mut [u8], &mut [f32]),
) {
    let (adam, factor) = (Adam::<f32>::of(update), update.factor as f32);
    let (mut means, mut roots) = ([0f32; STATE_BLOCK], [0f32; STATE_BLOCK]);
    let (magnitudes1, magnitudes2) = (&*SIGNED, &*UNSIGNED);
    let moments = codes1.chunks_mut(STATE_BLOCK).zip(scales1).zip(codes2.chunks_mut(STATE_BLOCK).zip(scales2));
    let blocks = params.chunks_mut(STATE_BLOCK).zip(grads.chunks(STATE_BLOCK)).zip(moments);
    for ((params, grads), ((codes1, scale1), (codes2, scale2))) in blocks {
        let (means, roots) = (&mut means[..params.len()], &mut roots[..params.len()]);
        let decoded = codes1.iter().zip(codes2.iter()).zip(means.iter_mut().zip(roots.iter_mut()));
        for ((&code1, &code2), (mean, root)) in decoded {
            *mean = decode_signed(magnitudes1, code1) * *scale1;
            *root = magnitudes2.values[usize::from(code2)] * *scale2;
        }
        for (((p, &g), mean), root) in params.iter_mut().zip(grads).zip(means.iter_mut()).zip(roots.iter_mut()) {
            let (value, m, v) = adam.step::<false>(p.get(), scaled(g, factor), *mean, *root * *root);
            (*mean, *root) = (m, v.sqrt());
            *p = T::put(value);
        }
        *scale1 = largest(means);
        encode_signed(means, *scale1, codes1);
        *scale2 = largest(roots);
        encode_unsigned(roots, *scale2, codes2);
    }
}

/// Returns the largest magnitude, or NaN if one value is not finite.
fn largest(values: &[f32]) -> f32 {
    let largest = values.iter().fold(0f32, |max, value| max.max(value.abs()));
    // `max` ignores NaN, but this sum does not.
    let sum: f32 = values.iter().map(|value| value * 0.).sum();
    if sum == 0. { largest } else { f32::NAN }
}

pub(super) fn run_sgd<T: Float, const L2: bool>(
    update: &SgdUpdate,
    params: &mut [T],
    grads: &[T],
    buffers: Option<&mut [T]>,
) {
    let real = T::Real::of;
    let (factor, l2, kept, taken, lr) =
        (real(update.factor), real(update.l2), real(update.kept), real(update.taken), real(update.lr));
    let decayed = |p: &T, &g: &T| if L2 { scaled(g, factor) + l2 * p.get() } else { scaled(g, factor) };
    let Some(buffers) = buffers else {
        params.iter_mut().zip(grads).for_each(|(p, g)| *p = T::put(p.get() - lr * decayed(p, g)));
        return;
    };
    let elements = params.iter_mut().zip(grads).zip(buffers);
    match update.nesterov.map(real) {
        None => elements.for_each(|((p, g), b)| {
            let buffer = kept * b.get() + taken * decayed(p, g);
            *b = T::put(buffer);
            *p = T::put(p.get() - lr * buffer);
        }),
        Some(nesterov) => elements.for_each(|((p, g), b)| {
            let g = decayed(p, g);
            let buffer = kept * b.get() + taken * g;
            *b = T::put(buffer);
            *p = T::put(p.get() - lr * (g + nesterov * buffer));
        }),
    }
}

/// Returns the factor that scales values to at most 1.
pub(super) fn inverse(scale: f32) -> f32 {
    if scale > 0. { 1. / scale } else { 0. }
}

/// Encodes values as `EightBits::Signed`.
pub(super) fn encode_signed(values: &[f32], scale: f32, codes: &mut [u8]) {
    let (magnitudes, inverse) = (&*SIGNED, inverse(scale));
    let code = |v: f32| magnitudes.code((v * inverse).abs()) | u8::from(v < 0.) << 7;
    codes.iter_mut().zip(values).for_each(|(to, v)| *to = code(*v));
}

/// Encodes values as `EightBits::Unsigned`.
pub(super) fn encode_unsigned(values: &[f32], scale: f32, codes: &mut [u8]) {
    let (magnitudes, inverse) = (&*UNSIGNED, inverse(scale));
    codes.iter_mut().zip(values).for_each(|(to, v)| *to = magnitudes.code(v * inverse));
}

/// Returns the magnitude, with its sign, of a code of `EightBits::Signed`.
#[inline(always)]
pub(super) fn decode_signed(magnitudes: &Magnitudes, code: u8) -> f32 {
    let magnitude = magnitudes.values[usize::from(code & 127)];
    if code > 127 { -magnitude } else { magnitude }
}
