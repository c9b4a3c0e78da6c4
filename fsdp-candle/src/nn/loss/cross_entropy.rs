//! The cross-entropy loss of a language model, `mean(log(sum_j e^(l_j)) - l_target)` over the rows of the logits `l`.
//!
//! Backward is `(softmax(l) - onehot(target)) / rows`, in one pass over the logits; each row's `log sum exp` is all
//! that forward keeps.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::parallel::map_rows;
use super::super::cpu::simd::{kernel, max, probability, sum_exp};
use super::super::cpu::values::{floats, indices, read, served, storage, tensor};

/// The mean cross-entropy of `logits` `[.., V]` against `targets` (u32) `[..]`: an f32 scalar, whatever the logits'
/// dtype (f64 for f64).
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
    let Some((&vocabulary, rows)) = logits.dims().split_last() else {
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
    if !served(logits) {
        return composite(logits, targets);
    }
    let targets = indices("cross_entropy", "target", targets, vocabulary, "number of classes")?;
    logits.apply_op1(CrossEntropy { targets, vocabulary, log_sums: OnceLock::new() })
}

/// The same from Candle's operations.
pub(in crate::nn) fn composite(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let wide = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let logits = logits.flatten_to(D::Minus2)?.to_dtype(wide)?;
    let highest = logits.max_keepdim(D::Minus1)?.detach();
    let shifted = logits.broadcast_sub(&highest)?;
    let log_sums = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let picked = shifted.gather(&targets.flatten_all()?.unsqueeze(1)?, 1)?;
    (log_sums - picked)?.mean_all()
}

struct CrossEntropy {
    targets: Vec<u32>,
    vocabulary: usize,
    log_sums: OnceLock<Vec<f32>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = floats(logits, layout)?;
        let mut log_sums = vec![0f32; self.targets.len()];
        let loss = losses(&logits, &self.targets, self.vocabulary, &mut log_sums) / self.targets.len() as f64;
        let _ = self.log_sums.set(log_sums);
        Ok((storage(vec![loss as f32], DType::F32)?, Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, d_loss: &Tensor) -> Result<Option<Tensor>> {
        read!(values, logits);
        let Some(log_sums) = self.log_sums.get() else { bail!("cross_entropy: backward before forward") };
        let scale = d_loss.to_scalar::<f32>()? / self.targets.len() as f32;
        let mut grad = vec![0f32; values.len()];
        map_rows(&mut grad, self.vocabulary, self.vocabulary, |first, grad| {
            let rows = first..first + grad.len() / self.vocabulary;
            let values = &values[first * self.vocabulary..];
            softmax_minus_onehot(grad, values, &self.targets[rows.clone()], &log_sums[rows], scale);
        });
        Ok(Some(tensor(grad, logits.shape(), logits.dtype())?))
    }
}

/// The sum of the rows' losses; each row's `log sum exp` goes to `log_sums`.
pub(super) fn losses(logits: &[f32], targets: &[u32], vocabulary: usize, log_sums: &mut [f32]) -> f64 {
    map_rows(log_sums, 1, vocabulary, |first, log_sums| {
        log_sum_exp(log_sums, &logits[first * vocabulary..], vocabulary);
    });
    let rows = logits.chunks_exact(vocabulary).zip(targets).zip(log_sums.iter());
    rows.map(|((row, &target), &log_sum)| f64::from(log_sum - row[target as usize])).sum()
}

kernel! {
    fn log_sum_exp(log_sums: &mut [f32], logits: &[f32], vocabulary: usize) {
        for (log_sum, row) in log_sums.iter_mut().zip(logits.chunks_exact(vocabulary)) {
            let highest = max(row);
            *log_sum = highest + sum_exp(row, 1.0, highest).ln();
        }
    }

    /// The gradient of the logits, `scale (softmax - onehot)`, for as many rows as there are targets.
    pub(super) fn softmax_minus_onehot(
        grad: &mut [f32],
        logits: &[f32],
        targets: &[u32],
        log_sums: &[f32],
        scale: f32,
    ) {
        if targets.is_empty() {
            return;
        }
        let vocabulary = grad.len() / targets.len();
        let rows = grad.chunks_exact_mut(vocabulary).zip(logits.chunks_exact(vocabulary));
        for (((grad, row), &target), &log_sum) in rows.zip(targets).zip(log_sums) {
            for (grad, &x) in grad.iter_mut().zip(row) {
                *grad = probability(x - log_sum) * scale;
            }
            grad[target as usize] -= scale;
        }
    }

    /// As [`softmax_minus_onehot`], over the logits themselves.
    pub(super) fn softmax_minus_onehot_in_place(logits: &mut [f32], targets: &[u32], log_sums: &[f32], scale: f32) {
        if targets.is_empty() {
            return;
        }
        let vocabulary = logits.len() / targets.len();
        for ((row, &target), &log_sum) in logits.chunks_exact_mut(vocabulary).zip(targets).zip(log_sums) {
            for x in row.iter_mut() {
                *x = probability(*x - log_sum) * scale;
            }
            row[target as usize] -= scale;
        }
    }
}
