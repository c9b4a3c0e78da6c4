//! Activations of elements, sums, and SwiGLU.

use candle_core::Result;
use fsdp_core::Buffer;

use super::super::slice::{Slice, SliceMut, same_length};
use super::compiler::Module;
use super::device::{Arg, float_suffix, of_slice, same_dtype};

/// Elements of a thread, if they are aligned: `N` in the source.
const PACK: usize = 4;

/// Applies a function of each element: `silu`, `gelu` (tanh) or `gelu_erf`.
pub(crate) fn activate(function: &str, x: Slice<'_>) -> Result<Buffer> {
    let (cuda, dtype, len) = (of_slice(&x)?, x.dtype(), x.len());
    let kernel = format!("{function}_{}", float_suffix(dtype)?);
    let mut y = cuda.uninit(dtype, len)?;
    let args = [cuda.view(x)?.into(), cuda.view_mut(SliceMut::from(&mut y))?.into(), len.into()];
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.run_elementwise(Module::Activations.kernel(&kernel), len.div_ceil(PACK), &args)? };
    Ok(y)
}

/// Returns the gradient of [`activate`]'s input.
pub(crate) fn activate_back(function: &str, x: Slice<'_>, dy: Slice<'_>) -> Result<Buffer> {
    let (cuda, dtype, len) = (of_slice(&x)?, x.dtype(), x.len());
    same_dtype(dtype, dy.dtype())?;
    same_length(len, dy.len())?;
    let kernel = format!("{function}_back_{}", float_suffix(dtype)?);
    let mut dx = cuda.uninit(dtype, len)?;
    let to = cuda.view_mut(SliceMut::from(&mut dx))?;
    let args = [cuda.view(x)?.into(), cuda.view(dy)?.into(), to.into(), len.into()];
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.run_elementwise(Module::Activations.kernel(&kernel), len.div_ceil(PACK), &args)? };
    Ok(dx)
}

/// Computes `x + y`.
pub(super) fn sum(x: Slice<'_>, y: Slice<'_>) -> Result<Buffer> {
    of_two("sum", x, y)
}

/// Computes `silu(gate) * up`.
pub(crate) fn swiglu(gate: Slice<'_>, up: Slice<'_>) -> Result<Buffer> {
    of_two("swiglu", gate, up)
}

/// Applies a function of two elements.
fn of_two(function: &str, x: Slice<'_>, y: Slice<'_>) -> Result<Buffer> {
    let (cuda, dtype, len) = (of_slice(&x)?, x.dtype(), x.len());
    same_dtype(dtype, y.dtype())?;
    same_length(len, y.len())?;
    let kernel = format!("{function}_{}", float_suffix(dtype)?);
    let mut out = cuda.uninit(dtype, len)?;
    let to = cuda.view_mut(SliceMut::from(&mut out))?;
    let args = [cuda.view(x)?.into(), cuda.view(y)?.into(), to.into(), len.into()];
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.run_elementwise(Module::Activations.kernel(&kernel), len.div_ceil(PACK), &args)? };
    Ok(out)
}

/// Returns the gradients of [`swiglu`]'s inputs.
pub(crate) fn swiglu_back(gate: Slice<'_>, up: Slice<'_>, dy: Slice<'_>) -> Result<[Buffer; 2]> {
    let (cuda, dtype, len) = (of_slice(&gate)?, gate.dtype(), gate.len());
    for other in [&up, &dy] {
        same_dtype(dtype, other.dtype())?;
        same_length(len, other.len())?;
    }
    let kernel = format!("swiglu_back_{}", float_suffix(dtype)?);
    let (mut d_gate, mut d_up) = (cuda.uninit(dtype, len)?, cuda.uninit(dtype, len)?);
    let to = [cuda.view_mut(SliceMut::from(&mut d_gate))?, cuda.view_mut(SliceMut::from(&mut d_up))?];
    let views = [cuda.view(gate)?, cuda.view(up)?, cuda.view(dy)?, to[0], to[1]].map(Arg::from);
    let args = [&views[..], &[len.into()]].concat();
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.run_elementwise(Module::Activations.kernel(&kernel), len.div_ceil(PACK), &args)? };
    Ok([d_gate, d_up])
}

/// [`swiglu`] of rows of `2 * width` elements: the gates, then the others.
pub(crate) fn swiglu_halves(both: Slice<'_>, width: usize) -> Result<Buffer> {
    let (cuda, dtype) = (of_slice(&both)?, both.dtype());
    let kernel = format!("swiglu_halves_{}", float_suffix(dtype)?);
    let rows = rows_of_halves(&both, width)?;
    let mut y = cuda.uninit(dtype, rows * width)?;
    let to = cuda.view_mut(SliceMut::from(&mut y))?;
    let args = [cuda.view(both)?.into(), to.into(), rows.into(), width.into()];
    // SAFETY: the kernel's arguments: whole rows of one dtype.
    unsafe { cuda.run_elementwise(Module::Activations.kernel(&kernel), (rows * width).div_ceil(PACK), &args)? };
    Ok(y)
}

/// Returns the gradient of [`swiglu_halves`]' input.
pub(crate) fn swiglu_halves_back(both: Slice<'_>, dy: Slice<'_>, width: usize) -> Result<Buffer> {
    let (cuda, dtype) = (of_slice(&both)?, both.dtype());
    let kernel = format!("swiglu_halves_back_{}", float_suffix(dtype)?);
    let rows = rows_of_halves(&both, width)?;
    same_dtype(dtype, dy.dtype())?;
    same_length(rows * width, dy.len())?;
    let mut grads = cuda.uninit(dtype, both.len())?;
    let to = cuda.view_mut(SliceMut::from(&mut grads))?;
    let args = [cuda.view(both)?.into(), cuda.view(dy)?.into(), to.into(), rows.into(), width.into()];
    // SAFETY: the kernel's arguments: whole rows of one dtype.
    unsafe { cuda.run_elementwise(Module::Activations.kernel(&kernel), (rows * width).div_ceil(PACK), &args)? };
    Ok(grads)
}

/// Returns the number of rows of `2 * width` elements. Fails if they are not whole.
fn rows_of_halves(both: &Slice<'_>, width: usize) -> Result<usize> {
    let rows = both.len() / (2 * width).max(1);
    same_length(rows * 2 * width, both.len())?;
    Ok(rows)
}
