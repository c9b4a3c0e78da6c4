//! Steps of optimizers: one pass over parameter, gradient and state.

use candle_core::{Result, bail};
use fsdp_core::DType;

use super::super::eight_bits::{SIGNED, STATE_BLOCK, UNSIGNED};
use super::super::slice::{Slice, SliceMut};
use super::super::update::{AdamUpdate, SgdUpdate};
use super::eight_bits::{encode_signed, encode_unsigned, signed};
use super::float::{Float, Real, floats};
use super::memory::{elements, elements_mut, same_length};

pub(super) fn adam(
    update: &AdamUpdate,
    param: SliceMut<'_>,
    grad: Slice<'_>,
    [means, squares]: [SliceMut<'_>; 2],
) -> Result<()> {
    for len in [grad.len(), means.len(), squares.len()] {
        same_length(param.len(), len)?;
    }
    floats!(param.dtype(), T => {
        let moments = (elements_mut::<T>(means)?, elements_mut::<T>(squares)?);
        let (params, grads) = (elements_mut::<T>(param)?, elements::<T>(grad)?);
        match update.l2 {
            0. => run_adam::<T, false>(update, params, grads, moments),
            _ => run_adam::<T, true>(update, params, grads, moments),
        }
    });
    Ok(())
}

fn run_adam<T: Float, const L2: bool>(
    update: &AdamUpdate,
    params: &mut [T],
    grads: &[T],
    (means, squares): (&mut [T], &mut [T]),
) {
    let adam = Adam::<T::Real>::of(update);
    for (((p, &g), m), v) in params.iter_mut().zip(grads).zip(means).zip(squares) {
        let (value, mean, square) = adam.step::<L2>(p.get(), g.get(), m.get(), v.get());
        *m = T::put(mean);
        *v = T::put(square);
        *p = T::put(value);
    }
}

/// Adam's numbers as they are computed with.
#[derive(Clone, Copy)]
pub(super) struct Adam<R> {
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
    pub(super) fn of(update: &AdamUpdate) -> Self {
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

    /// The parameter and the moments of one element after a step.
    #[inline(always)]
    pub(super) fn step<const L2: bool>(&self, p: R, g: R, mean: R, square: R) -> (R, R, R) {
        let g = if L2 { g + self.l2 * p } else { g };
        let mean = self.beta1 * mean + self.rest1 * g;
        let square = self.beta2 * square + self.rest2 * g * g;
        (p * self.decay - self.step_size * mean / (square.sqrt() / self.root_correction + self.eps), mean, square)
    }
}

pub(super) fn adam_8bit(
    update: &AdamUpdate,
    param: SliceMut<'_>,
    grad: Slice<'_>,
    [codes1, scales1, codes2, scales2]: [SliceMut<'_>; 4],
) -> Result<()> {
    for len in [grad.len(), codes1.len(), codes2.len()] {
        same_length(param.len(), len)?;
    }
    for len in [scales1.len(), scales2.len()] {
        same_length(param.len().div_ceil(STATE_BLOCK), len)?;
    }
    let means = (elements_mut::<u8>(codes1)?, elements_mut::<f32>(scales1)?);
    let roots = (elements_mut::<u8>(codes2)?, elements_mut::<f32>(scales2)?);
    match param.dtype() {
        DType::F32 => run_adam_8bit(update, elements_mut::<f32>(param)?, elements(grad)?, means, roots),
        DType::BF16 => run_adam_8bit(update, elements_mut::<half::bf16>(param)?, elements(grad)?, means, roots),
        DType::F16 => run_adam_8bit(update, elements_mut::<half::f16>(param)?, elements(grad)?, means, roots),
        other => bail!("moments in 8 bits are for parameters of F32, BF16 and F16; got {other}"),
    }
    Ok(())
}

/// A block at a time, whose moments are decoded into registers and the nearest cache.
fn run_adam_8bit<T: Float<Real = f32>>(
    update: &AdamUpdate,
    params: &mut [T],
    grads: &[T],
    (codes1, scales1): (&mut [u8], &mut [f32]),
    (codes2, scales2): (&mut [u8], &mut [f32]),
) {
    let adam = Adam::<f32>::of(update);
    let (mut means, mut roots) = ([0f32; STATE_BLOCK], [0f32; STATE_BLOCK]);
    let (magnitudes1, magnitudes2) = (&*SIGNED, &*UNSIGNED);
    let moments = codes1.chunks_mut(STATE_BLOCK).zip(scales1).zip(codes2.chunks_mut(STATE_BLOCK).zip(scales2));
    let blocks = params.chunks_mut(STATE_BLOCK).zip(grads.chunks(STATE_BLOCK)).zip(moments);
    for ((params, grads), ((codes1, scale1), (codes2, scale2))) in blocks {
        let (means, roots) = (&mut means[..params.len()], &mut roots[..params.len()]);
        let decoded = codes1.iter().zip(codes2.iter()).zip(means.iter_mut().zip(roots.iter_mut()));
        for ((&code1, &code2), (mean, root)) in decoded {
            *mean = signed(magnitudes1, code1) * *scale1;
            *root = magnitudes2.values[usize::from(code2)] * *scale2;
        }
        for (((p, g), mean), root) in params.iter_mut().zip(grads).zip(means.iter_mut()).zip(roots.iter_mut()) {
            let (value, m, v) = adam.step::<false>(p.get(), g.get(), *mean, *root * *root);
            (*mean, *root) = (m, v.sqrt());
            *p = T::put(value);
        }
        *scale1 = largest(means);
        encode_signed(means, *scale1, codes1);
        *scale2 = largest(roots);
        encode_unsigned(roots, *scale2, codes2);
    }
}

/// The largest magnitude, or NaN where one is not finite.
fn largest(values: &[f32]) -> f32 {
    let largest = values.iter().fold(0f32, |max, value| max.max(value.abs()));
    // What is no number is passed over by `max`, and makes this sum none.
    let sum: f32 = values.iter().map(|value| value * 0.).sum();
    if sum == 0. { largest } else { f32::NAN }
}

pub(super) fn sgd(
    update: &SgdUpdate,
    param: SliceMut<'_>,
    grad: Slice<'_>,
    buffer: Option<SliceMut<'_>>,
) -> Result<()> {
    for len in [Some(grad.len()), buffer.as_ref().map(SliceMut::len)].into_iter().flatten() {
        same_length(param.len(), len)?;
    }
    floats!(param.dtype(), T => {
        let (params, grads) = (elements_mut::<T>(param)?, elements::<T>(grad)?);
        let buffers = buffer.map(elements_mut::<T>).transpose()?;
        match update.l2 {
            0. => run_sgd::<T, false>(update, params, grads, buffers),
            _ => run_sgd::<T, true>(update, params, grads, buffers),
        }
    });
    Ok(())
}

fn run_sgd<T: Float, const L2: bool>(update: &SgdUpdate, params: &mut [T], grads: &[T], buffers: Option<&mut [T]>) {
    let real = T::Real::of;
    let (l2, kept, taken, lr) = (real(update.l2), real(update.kept), real(update.taken), real(update.lr));
    let decayed = |p: &T, g: &T| if L2 { g.get() + l2 * p.get() } else { g.get() };
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
