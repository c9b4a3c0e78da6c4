//! Sums, scales, mixtures and casts.

use candle_core::Result;

use super::super::slice::{Slice, SliceMut};
use super::float::{Float, Real, floats};
use super::memory::{elements, elements_mut, same_length};

pub(super) fn add(sum: SliceMut<'_>, more: Slice<'_>) -> Result<()> {
    floats!(sum.dtype(), T => {
        let (sum, more) = (elements_mut::<T>(sum)?, elements::<T>(more)?);
        same_length(sum.len(), more.len())?;
        sum.iter_mut().zip(more).for_each(|(a, b)| *a += *b);
    });
    Ok(())
}

pub(super) fn scale(values: SliceMut<'_>, factor: f64) -> Result<()> {
    fn scale<T: Float>(values: &mut [T], factor: f64) {
        let factor = T::Real::of(factor);
        values.iter_mut().for_each(|v| *v = T::put(v.get() * factor));
    }
    floats!(values.dtype(), T => scale(elements_mut::<T>(values)?, factor));
    Ok(())
}

pub(super) fn mix(values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> Result<()> {
    fn mix<A: Float, B: Float>(values: &mut [A], kept: f64, more: &[B], taken: f64) {
        let (kept, taken) = (A::Real::of(kept), A::Real::of(taken));
        values.iter_mut().zip(more).for_each(|(v, m)| *v = A::put(kept * v.get() + taken * m.get().widened()));
    }
    same_length(values.len(), more.len())?;
    floats!(values.dtype(), A => floats!(more.dtype(), B => {
        mix(elements_mut::<A>(values)?, kept, elements::<B>(more)?, taken)
    }));
    Ok(())
}

pub(super) fn cast(from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
    fn cast<A: Float, B: Float>(from: &[A], to: &mut [B]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.get().rounded());
    }
    same_length(from.len(), to.len())?;
    floats!(from.dtype(), A => floats!(to.dtype(), B => cast(elements::<A>(from)?, elements_mut::<B>(to)?)));
    Ok(())
}
