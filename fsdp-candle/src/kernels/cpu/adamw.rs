//! AdamW: one pass over parameter, gradient and moments.

use candle_core::Result;

use super::super::slice::{Slice, SliceMut};
use super::super::update::AdamWUpdate;
use super::float::{Float, Real, floats};
use super::memory::{elements, elements_mut, same_length};

pub(super) fn step(
    update: &AdamWUpdate,
    param: SliceMut<'_>,
    grad: Slice<'_>,
    [means, squares]: [SliceMut<'_>; 2],
) -> Result<()> {
    for len in [grad.len(), means.len(), squares.len()] {
        same_length(param.len(), len)?;
    }
    floats!(param.dtype(), T => {
        let moments = (elements_mut::<T>(means)?, elements_mut::<T>(squares)?);
        run(update, elements_mut::<T>(param)?, elements::<T>(grad)?, moments);
    });
    Ok(())
}

fn run<T: Float>(update: &AdamWUpdate, params: &mut [T], grads: &[T], (means, squares): (&mut [T], &mut [T])) {
    let real = T::Real::of;
    let (decay, beta1, beta2) = (real(update.decay), real(update.beta1), real(update.beta2));
    let (one_minus_beta1, one_minus_beta2) = (real(1. - update.beta1), real(1. - update.beta2));
    let (step_size, eps) = (real(update.step_size), real(update.eps));
    let root_correction = real(update.root_bias_correction2);
    for (((p, &g), m), v) in params.iter_mut().zip(grads).zip(means).zip(squares) {
        let g = g.get();
        let mean = beta1 * m.get() + one_minus_beta1 * g;
        let square = beta2 * v.get() + one_minus_beta2 * g * g;
        *m = T::put(mean);
        *v = T::put(square);
        *p = T::put(p.get() * decay - step_size * mean / (square.sqrt() / root_correction + eps));
    }
}
