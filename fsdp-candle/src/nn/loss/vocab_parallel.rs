//! The cross-entropy of logits whose vocabulary is cut over ranks: PyTorch's `loss_parallel`.

use candle_core::{Result, Tensor};
use fsdp_core::ProcessGroup;

use super::cross_entropy::loss;
use super::options::CrossEntropyOptions;
use crate::collectives::check;

/// As [`cross_entropy_with`](crate::nn::cross_entropy_with), for logits of which each rank holds some of the classes:
/// `[.., V / N]` on each of `N` ranks, in rank order, and targets (u8, u32 or i64) `[..]` below `V`, the same on every
/// rank. The result is an f32 scalar (f64 for f64), the same bits on every rank, and each rank gets the gradient of its
/// own logits.
///
/// A head under [`crate::ColwiseParallel`] gives such logits. Nothing of `[.., V]` travels: a row's largest logit, and
/// then two sums (three with smoothing).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::nn::{CrossEntropyOptions, vocab_parallel_cross_entropy};
/// use fsdp_core::process_group::local;
///
/// // Eight classes, four on each rank.
/// local::run(2, |group| {
///     let logits = Tensor::zeros((3, 4), DType::F32, &Device::Cpu)?;
///     let targets = Tensor::new(&[0u32, 7, 2], &Device::Cpu)?;
///     let loss = vocab_parallel_cross_entropy(&logits, &targets, &group, &CrossEntropyOptions::default())?;
///     assert!((loss.to_scalar::<f32>()? - 8f32.ln()).abs() < 1e-6);
///     candle_core::Result::Ok(())
/// })
/// .into_iter()
/// .collect::<candle_core::Result<Vec<_>>>()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of [`cross_entropy_with`](crate::nn::cross_entropy_with), when ranks have other targets or another number of
/// classes, when the group does not move the logits' memory, and those of an all-reduce.
pub fn vocab_parallel_cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    group: &ProcessGroup,
    options: &CrossEntropyOptions,
) -> Result<Tensor> {
    check("vocab_parallel_cross_entropy", logits, None, group)?;
    loss("vocab_parallel_cross_entropy", logits, targets, options, Some(group))
}
