//! The cross-entropy loss of a language model, `log(sum_j e^(l_j)) - l_target` of each row of the logits `l`.
//!
//! Backward is `softmax(l) - onehot(target)`, in one pass over the logits; each row's `log sum exp` is all that forward
//! keeps.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::parallel::map_rows;
use super::super::cpu::simd::{kernel, max, probability, sum, sum_exp};
use super::super::cpu::values::{floats, read, served, storage, tensor};
use super::options::{CrossEntropyOptions, Rows, Slopes};

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
    let Some((&classes, rows)) = logits.dims().split_last() else {
        bail!("cross_entropy: the logits must have at least one dimension");
    };
    if targets.dims() != rows || targets.elem_count() == 0 {
        bail!(
            "cross_entropy: the targets {:?} must have the shape of the logits {:?} without its last dimension, and a \
             row",
            targets.dims(),
            logits.dims()
        );
    }
    let rows = options.rows("cross_entropy", targets, classes)?;
    if !served(logits) {
        return composite(logits, &rows);
    }
    logits.apply_op1(CrossEntropy { rows, log_sums: OnceLock::new() })
}

/// The same from Candle's operations.
pub(in crate::nn) fn composite(logits: &Tensor, rows: &Rows) -> Result<Tensor> {
    let wide = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mut logits = logits.reshape(((), rows.classes))?.to_dtype(wide)?;
    let device = logits.device().clone();
    let classes: Vec<u32> = rows.targets.iter().flatten().copied().collect();
    if classes.is_empty() {
        // 0 / 0 is what the mean of nothing is. (A factor of 0 that is no tensor would cut the graph.)
        let sum = logits.sum_all()?;
        return (&sum * sum.zeros_like()?)? + 0. / rows.divisor;
    }
    if let Some(counted) = rows.counted() {
        let counted: Vec<u32> = counted.into_iter().map(|row| row as u32).collect();
        logits = logits.index_select(&Tensor::new(counted, &device)?, 0)?;
    }
    let highest = logits.max_keepdim(D::Minus1)?.detach();
    let shifted = logits.broadcast_sub(&highest)?;
    let log_sums = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let picked = shifted.gather(&Tensor::new(classes, &device)?.unsqueeze(1)?, 1)?;
    let mut losses = (&log_sums - picked)?;
    if rows.smoothing > 0. {
        let uniform = (log_sums - shifted.mean_keepdim(D::Minus1)?)?;
        losses = ((losses * (1. - rows.smoothing))? + (uniform * rows.smoothing)?)?;
    }
    losses.sum_all()? / rows.divisor
}

struct CrossEntropy {
    rows: Rows,
    log_sums: OnceLock<Vec<f32>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = floats(logits, layout)?;
        let mut log_sums = vec![0f32; self.rows.targets.len()];
        let loss = losses(&logits, &self.rows.targets, &self.rows, &mut log_sums) / self.rows.divisor;
        let _ = self.log_sums.set(log_sums);
        Ok((storage(vec![loss as f32], DType::F32)?, Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, d_loss: &Tensor) -> Result<Option<Tensor>> {
        read!(values, logits);
        let Some(log_sums) = self.log_sums.get() else { bail!("cross_entropy: backward before forward") };
        let (classes, slopes) = (self.rows.classes, self.rows.slopes(d_loss.to_scalar::<f32>()?));
        let mut grad = vec![0f32; values.len()];
        map_rows(&mut grad, classes, classes, |first, grad| {
            let rows = first..first + grad.len() / classes;
            let values = &values[first * classes..];
            gradient(grad, values, &self.rows.targets[rows.clone()], &log_sums[rows], slopes);
        });
        Ok(Some(tensor(grad, logits.shape(), logits.dtype())?))
    }
}

/// The sum of the losses of some of `rows`, whose targets these are; each row's `log sum exp` goes to `log_sums`, and 0
/// where it is ignored.
pub(super) fn losses(logits: &[f32], targets: &[Option<u32>], rows: &Rows, log_sums: &mut [f32]) -> f64 {
    let classes = rows.classes;
    map_rows(log_sums, 1, classes, |first, log_sums| {
        log_sum_exp(log_sums, &logits[first * classes..], &targets[first..], classes);
    });
    let each = logits.chunks_exact(classes).zip(targets).zip(log_sums.iter());
    let hits: f64 = each
        .filter_map(|((row, target), log_sum)| target.map(|target| f64::from(log_sum - row[target as usize])))
        .sum();
    if rows.smoothing == 0. {
        return hits;
    }
    let mut means = vec![0f32; log_sums.len()];
    map_rows(&mut means, 1, classes, |first, means| {
        row_means(means, &logits[first * classes..], &targets[first..], classes);
    });
    let spread: f64 = log_sums.iter().zip(&means).map(|(log_sum, mean)| f64::from(log_sum - mean)).sum();
    (1. - rows.smoothing) * hits + rows.smoothing * spread
}

#[inline(always)]
fn slope(x: f32, log_sum: f32, slopes: Slopes) -> f32 {
    probability(x - log_sum).mul_add(slopes.scale, -slopes.uniform)
}

kernel! {
    fn log_sum_exp(log_sums: &mut [f32], logits: &[f32], targets: &[Option<u32>], classes: usize) {
        for ((log_sum, row), target) in log_sums.iter_mut().zip(logits.chunks_exact(classes)).zip(targets) {
            if target.is_some() {
                let highest = max(row);
                *log_sum = highest + sum_exp(row, 1.0, highest).ln();
            }
        }
    }

    fn row_means(means: &mut [f32], logits: &[f32], targets: &[Option<u32>], classes: usize) {
        for ((mean, row), target) in means.iter_mut().zip(logits.chunks_exact(classes)).zip(targets) {
            if target.is_some() {
                *mean = sum(row) / classes as f32;
            }
        }
    }

    /// The gradient of the logits, for as many rows as there are targets; that of ignored rows stays 0.
    fn gradient(grad: &mut [f32], logits: &[f32], targets: &[Option<u32>], log_sums: &[f32], slopes: Slopes) {
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
                grad[*target as usize] -= slopes.hit;
            }
        }
    }

    /// As [`gradient`], over the logits themselves.
    pub(super) fn gradient_in_place(
        logits: &mut [f32],
        targets: &[Option<u32>],
        log_sums: &[f32],
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
                    row[*target as usize] -= slopes.hit;
                }
                None => row.fill(0.),
            }
        }
    }
}
