//! The cross-entropy loss of a language model, `log(sum_j e^(l_j)) - l_target` of each row of the logits `l`.
//!
//! Backward is `softmax(l) - onehot(target)`, in one pass over the logits; each row's `log sum exp` is all that forward
//! keeps.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor, bail};
use fsdp_core::ProcessGroup;

use super::super::cpu::parallel::map_rows;
use super::super::cpu::simd::{kernel, probability};
use super::super::cpu::values::{floats, read, served, storage, tensor};
use super::super::limits::countable;
use super::options::{CrossEntropyOptions, Rows, Slopes};
use super::statistics::{Statistics, signature};
use crate::collectives::{all_reduce, largest};

/// The mean cross-entropy of `logits` `[.., V]` against `targets` (u8, u32 or i64) `[..]`: an f32 scalar, whatever the
/// logits' dtype (f64 for f64).
///
/// An error if the shapes disagree, there is no row, or a target is not below `V`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::cross_entropy;
///
/// let logits = Tensor::zeros((3, 8), DType::F32, &Device::Cpu)?;
/// let loss = cross_entropy(&logits, &Tensor::new(&[0u32, 7, 2], &Device::Cpu)?)?;
/// assert!((loss.to_scalar::<f32>()? - 8f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, &CrossEntropyOptions::plain())
}

/// As [`cross_entropy`](cross_entropy()), with targets that are ignored, smoothed labels, or the sum in place of the
/// mean.
///
/// With a smoothing of `e` a row's loss is `(1 - e)` times what it is without, and `e` times the mean of what it would
/// be for each of the `V` classes, as in PyTorch.
///
/// # Errors
/// When the shapes disagree, there is no row, a target is neither below `V` nor the one that is ignored, or the
/// smoothing is not from 0 to 1.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{CrossEntropyOptions, IGNORED, Reduction, cross_entropy_with};
///
/// // A rank's part of a mean over the tokens that count on all ranks.
/// let logits = Tensor::zeros((3, 8), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[0u32, IGNORED, 2], &Device::Cpu)?;
/// let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
/// let sum = cross_entropy_with(&logits, &targets, &options)?;
/// assert!((sum.to_scalar::<f32>()? - 2. * 8f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cross_entropy_with(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
    loss("cross_entropy", logits, targets, options, None)
}

/// The loss of logits of all classes, or of a part of them that this rank holds.
pub(super) fn loss(
    function: &'static str,
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions,
    ranks: Option<&ProcessGroup>,
) -> Result<Tensor> {
    let Some((&columns, rows)) = logits.dims().split_last() else {
        bail!("{function}: the logits must have at least one dimension");
    };
    if targets.dims() != rows || targets.elem_count() == 0 {
        bail!(
            "{function}: the targets {:?} must have the shape of the logits {:?} without its last dimension, and a row",
            targets.dims(),
            logits.dims()
        );
    }
    let rows = options.rows(function, targets, columns, ranks)?;
    countable(function, "the logits", logits.dims(), logits.device())?;
    if !served(logits) {
        return composite(logits, &rows);
    }
    logits.apply_op1(CrossEntropy { function, rows, log_sums: OnceLock::new() })
}

/// The same from Candle's operations.
pub(in crate::nn) fn composite(logits: &Tensor, rows: &Rows) -> Result<Tensor> {
    let wide = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mut logits = logits.reshape(((), rows.columns))?.to_dtype(wide)?;
    let device = logits.device().clone();
    let targets: Vec<u32> = rows.targets.iter().flatten().copied().collect();
    if targets.is_empty() {
        // 0 / 0 is what the mean of nothing is. (A factor of 0 that is no tensor would cut the graph.)
        let sum = logits.sum_all()?;
        return (&sum * sum.zeros_like()?)? + 0. / rows.divisor;
    }
    if let Some(counted) = rows.counted() {
        let counted: Vec<u32> = counted.into_iter().map(|row| row as u32).collect();
        logits = logits.index_select(&Tensor::new(counted, &device)?, 0)?;
    }
    let columns: Vec<Option<usize>> = targets.iter().map(|target| rows.column(*target)).collect();
    let places: Vec<u32> = columns.iter().map(|column| column.unwrap_or(0) as u32).collect();
    let places = Tensor::new(places, &device)?.unsqueeze(1)?;
    let highest = logits.max_keepdim(D::Minus1)?.detach();
    let losses = match &rows.ranks {
        None => {
            let shifted = logits.broadcast_sub(&highest)?;
            let log_sums = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
            let mean = (rows.smoothing > 0.).then(|| shifted.mean_keepdim(D::Minus1)).transpose()?;
            smoothed(log_sums, &shifted.gather(&places, 1)?, mean.as_ref(), rows)?
        }
        Some(ranks) => {
            let ranks = ranks.signed(signature(rows));
            let shifted = logits.broadcast_sub(&largest(&highest, &ranks)?)?;
            let here: Vec<u8> = columns.iter().map(|column| u8::from(column.is_some())).collect();
            let here = Tensor::new(here, &device)?.unsqueeze(1)?;
            let log_sums = all_reduce(&shifted.exp()?.sum_keepdim(D::Minus1)?, &ranks)?.log()?;
            let picked = shifted.gather(&places, 1)?;
            let picked = all_reduce(&here.where_cond(&picked, &picked.zeros_like()?)?, &ranks)?;
            let mean = (rows.smoothing > 0.)
                .then(|| all_reduce(&shifted.sum_keepdim(D::Minus1)?, &ranks)? / rows.classes as f64)
                .transpose()?;
            smoothed(log_sums, &picked, mean.as_ref(), rows)?
        }
    };
    losses.sum_all()? / rows.divisor
}

/// The rows' losses.
fn smoothed(log_sums: Tensor, picked: &Tensor, mean: Option<&Tensor>, rows: &Rows) -> Result<Tensor> {
    let losses = (&log_sums - picked)?;
    match mean {
        Some(mean) => (losses * (1. - rows.smoothing))? + ((log_sums - mean)? * rows.smoothing)?,
        None => Ok(losses),
    }
}

struct CrossEntropy {
    function: &'static str,
    rows: Rows,
    log_sums: OnceLock<Vec<f32>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        self.function
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = floats(logits, layout)?;
        let mut statistics = Statistics::new(self.rows.targets.len());
        statistics.look(0, &logits, &self.rows.targets, &self.rows);
        let (total, log_sums) = statistics.losses(&self.rows)?;
        let _ = self.log_sums.set(log_sums);
        Ok((storage(vec![(total / self.rows.divisor) as f32], DType::F32)?, Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, d_loss: &Tensor) -> Result<Option<Tensor>> {
        read!(values, logits);
        let Some(log_sums) = self.log_sums.get() else { bail!("{}: backward before forward", self.function) };
        let (columns, slopes) = (self.rows.columns, self.rows.slopes(d_loss.to_scalar::<f32>()?));
        let mut grad = vec![0f32; values.len()];
        map_rows(&mut grad, columns, columns, |first, grad| {
            let rows = first..first + grad.len() / columns;
            let values = &values[first * columns..];
            gradient(grad, values, &self.rows.targets[rows.clone()], &log_sums[rows], self.rows.first, slopes);
        });
        Ok(Some(tensor(grad, logits.shape(), logits.dtype())?))
    }
}

#[inline(always)]
fn slope(x: f32, log_sum: f32, slopes: Slopes) -> f32 {
    probability(x - log_sum).mul_add(slopes.scale, -slopes.uniform)
}

kernel! {
    /// The gradient of the logits, for as many rows as there are targets, of classes from `first` on; that of ignored
    /// rows stays 0.
    fn gradient(
        grad: &mut [f32],
        logits: &[f32],
        targets: &[Option<u32>],
        log_sums: &[f32],
        first: usize,
        slopes: Slopes,
    ) {
        if targets.is_empty() {
            return;
        }
        let classes = grad.len() / targets.len();
        let rows = grad.chunks_exact_mut(classes).zip(logits.chunks_exact(classes));
        for (((grad, row), target), &log_sum) in rows.zip(targets).zip(log_sums) {
            if let Some(target) = target {
                for (grad, &x) in grad.iter_mut().zip(row) {
                    *grad = slope(x, log_sum, slopes);
                }
                if let Some(grad) = grad.get_mut((*target as usize).wrapping_sub(first)) {
                    *grad -= slopes.hit;
                }
            }
        }
    }

    /// As [`gradient`], over the logits themselves.
    pub(super) fn gradient_in_place(
        logits: &mut [f32],
        targets: &[Option<u32>],
        log_sums: &[f32],
        first: usize,
        slopes: Slopes,
    ) {
        if targets.is_empty() {
            return;
        }
        let classes = logits.len() / targets.len();
        for ((row, target), &log_sum) in logits.chunks_exact_mut(classes).zip(targets).zip(log_sums) {
            match target {
                Some(target) => {
                    for x in row.iter_mut() {
                        *x = slope(*x, log_sum, slopes);
                    }
                    if let Some(x) = row.get_mut((*target as usize).wrapping_sub(first)) {
                        *x -= slopes.hit;
                    }
                }
                None => row.fill(0.),
            }
        }
    }
}
