//! Cross-entropy of rows of logits.

use candle_core::Result;
use cudarc::driver::LaunchConfig;
use fsdp_core::{Buffer, DType};

use super::super::slice::{Slice, SliceMut, same_length};
use super::compiler::Module;
use super::device::{Arg, THREADS, elementwise, float_suffix, of_slice, same_dtype, wide};

/// How the losses of rows are computed and combined.
#[derive(Clone, Copy)]
pub(crate) struct LossOptions {
    /// Columns of the logits: a rank's part of the vocabulary.
    pub(crate) columns: usize,
    /// Class of the first column.
    pub(crate) first_class: usize,
    /// Number of classes on all ranks.
    pub(crate) classes: usize,
    pub(crate) smoothing: f64,
    pub(crate) softcap: Option<f64>,
    /// Divisor of the sum of the rows' losses.
    pub(crate) divisor: f64,
    /// Whether the rows' losses are summed.
    pub(crate) combined: bool,
}

impl LossOptions {
    /// Returns the number of terms of a row: the sum of powers, the target's logit, and the sum of the logits if labels
    /// are smoothed.
    pub(crate) fn terms(&self) -> usize {
        if self.smoothing > 0. { 3 } else { 2 }
    }
}

fn block_for_each(rows: usize) -> LaunchConfig {
    LaunchConfig { grid_dim: (rows.min(1 << 16) as u32, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

/// Computes the largest logit and the terms of each row, in the dtype of the logits' arithmetic. `targets` (U32) has
/// `u32::MAX` for ignored rows, whose numbers are 0.
pub(crate) fn row_statistics(
    logits: Slice<'_>,
    targets: Slice<'_>,
    largest: SliceMut<'_>,
    terms: SliceMut<'_>,
    options: &LossOptions,
) -> Result<()> {
    let (cuda, dtype, rows) = (of_slice(&logits)?, logits.dtype(), targets.len());
    let kernel = format!("row_statistics_{}", float_suffix(dtype)?);
    same_dtype(DType::U32, targets.dtype())?;
    for (to, len) in [(&largest, rows), (&terms, rows * options.terms())] {
        same_dtype(wide(dtype), to.dtype())?;
        same_length(len, to.len())?;
    }
    same_length(rows * options.columns, logits.len())?;
    if rows == 0 {
        return Ok(());
    }
    let from = [cuda.view(logits)?, cuda.view(targets)?];
    let views = [from[0], from[1], cuda.view_mut(largest)?, cuda.view_mut(terms)?].map(Arg::from);
    let sizes = [rows, options.columns, options.first_class].map(Arg::from);
    let softcap = options.softcap.unwrap_or(0.).into();
    let args = [&views[..], &sizes, &[Arg::Word(options.terms() as u32), softcap]].concat();
    // SAFETY: the kernel's arguments, of the dtype in its name: a row of logits, a target and the numbers for each row.
    unsafe { cuda.launch(Module::Losses.kernel(&kernel), block_for_each(rows), &args) }
}

/// Rescales sums of powers. They are relative to the largest logits of a part of the vocabulary, and become relative
/// to the largest logits of the whole vocabulary.
pub(crate) fn rescale_powers(
    own: Slice<'_>,
    largest: Slice<'_>,
    terms: SliceMut<'_>,
    options: &LossOptions,
) -> Result<()> {
    let (cuda, dtype, rows) = (of_slice(&own)?, own.dtype(), own.len());
    let kernel = format!("rescale_powers_{}", float_suffix(wide(dtype))?);
    same_dtype(dtype, largest.dtype())?;
    same_dtype(dtype, terms.dtype())?;
    same_length(rows, largest.len())?;
    same_length(rows * options.terms(), terms.len())?;
    let views = [cuda.view(own)?, cuda.view(largest)?, cuda.view_mut(terms)?].map(Arg::from);
    let args = [&views[..], &[rows.into(), Arg::Word(options.terms() as u32)]].concat();
    // SAFETY: the kernel's arguments: numbers of one dtype for each row.
    unsafe { cuda.run_elementwise(Module::Losses.kernel(&kernel), rows, &args) }
}

/// Returns the losses of rows or their sum over the divisor, and the logarithm of each row's sum.
pub(crate) fn losses(
    largest: Slice<'_>,
    terms: Slice<'_>,
    targets: Slice<'_>,
    options: &LossOptions,
) -> Result<[Buffer; 2]> {
    let (cuda, dtype, rows) = (of_slice(&largest)?, largest.dtype(), largest.len());
    let kernel = format!("losses_{}", float_suffix(wide(dtype))?);
    same_dtype(dtype, terms.dtype())?;
    same_dtype(DType::U32, targets.dtype())?;
    same_length(rows, targets.len())?;
    same_length(rows * options.terms(), terms.len())?;
    let LossOptions { classes, smoothing, divisor, combined, .. } = *options;
    let mut losses = cuda.uninit(dtype, if combined { 1 } else { rows })?;
    let mut log_sums = cuda.uninit(dtype, rows)?;
    let to = [cuda.view_mut(SliceMut::from(&mut losses))?, cuda.view_mut(SliceMut::from(&mut log_sums))?];
    let views = [cuda.view(largest)?, cuda.view(terms)?, cuda.view(targets)?, to[0], to[1]].map(Arg::from);
    let sizes = [rows.into(), Arg::Word(options.terms() as u32)];
    let numbers = [classes as f64, smoothing, divisor].map(Arg::from);
    let args = [&views[..], &sizes, &numbers, &[Arg::Word(combined.into())]].concat();
    // One block sums all rows.
    let config = elementwise(if combined { 1 } else { rows });
    // SAFETY: the kernel's arguments: numbers of one dtype and a target for each row, and room for the results.
    unsafe { cuda.launch(Module::Losses.kernel(&kernel), config, &args)? };
    Ok([losses, log_sums])
}

/// Returns the gradient of logits in a dtype, which is the logits', or a half float's if the logits are F32. `d_loss`
/// is the gradient of each row's loss, or of their sum.
pub(crate) fn logits_back(
    logits: Slice<'_>,
    dtype: DType,
    targets: Slice<'_>,
    log_sums: Slice<'_>,
    d_loss: Slice<'_>,
    options: &LossOptions,
) -> Result<Buffer> {
    let (cuda, rows) = (of_slice(&logits)?, targets.len());
    let kernel = format!("logits_back_{}_{}", float_suffix(logits.dtype())?, float_suffix(dtype)?);
    let LossOptions { columns, first_class, classes, smoothing, softcap, divisor, combined } = *options;
    same_dtype(DType::U32, targets.dtype())?;
    same_dtype(wide(dtype), log_sums.dtype())?;
    same_dtype(wide(dtype), d_loss.dtype())?;
    same_length(rows * columns, logits.len())?;
    same_length(rows, log_sums.len())?;
    same_length(if combined { 1 } else { rows }, d_loss.len())?;
    let mut grads = cuda.uninit(dtype, logits.len())?;
    if rows == 0 {
        return Ok(grads);
    }
    let to = cuda.view_mut(SliceMut::from(&mut grads))?;
    let views = [cuda.view(logits)?, to, cuda.view(targets)?, cuda.view(log_sums)?, cuda.view(d_loss)?].map(Arg::from);
    let sizes = [rows, columns, first_class].map(Arg::from);
    let numbers = [classes as f64, smoothing, divisor].map(Arg::from);
    let args = [&views[..], &sizes, &numbers, &[Arg::Word(combined.into()), softcap.unwrap_or(0.).into()]].concat();
    // SAFETY: the kernel's arguments, of the dtypes in its name: a row of logits and of gradients, a target and the
    // numbers for each row.
    unsafe { cuda.launch(Module::Losses.kernel(&kernel), block_for_each(rows), &args)? };
    Ok(grads)
}
