//! Losses: `candle_nn::loss`, and this crate's fused cross-entropies.
//!
//! The cross-entropy of a row of logits `l` is `log(sum_j e^(l_j)) - l_target`. Forward keeps only each row's
//! `log sum exp`. Backward is `softmax(l) - onehot(target)`, in one pass over the logits.
//!
//! Where tensor-parallel ranks hold parts of the vocabulary (PyTorch's `loss_parallel`), two small collectives combine
//! the statistics of the parts: the largest logit of each row, then its sums.
//!
//! The host reads the targets, to check and count them. When you compute on a device, keep the targets in host memory,
//! so that the host does not wait for the device.

pub(in crate::nn) mod cross_entropy;
pub(in crate::nn) mod linear_cross_entropy;

use candle_core::{DType, Result, Tensor, bail};

pub use candle_nn::loss::{huber, mse, nll};

use super::activation::log_add_exp;

/// Returns the mean cross-entropy of logits `[rows, classes]` against targets (u8, u32 or i64) `[rows]`: a scalar of
/// the logits' dtype. [`nn::cross_entropy`](crate::nn::cross_entropy()) takes more dimensions, and its result is f32
/// for half floats. Fails if shapes disagree, the input has no rows, or a target is out of range.
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    if inp.rank() != 2 {
        bail!("cross_entropy: the logits {:?} must be [rows, classes]", inp.dims());
    }
    cross_entropy::cross_entropy(inp, target)?.to_dtype(inp.dtype())
}

/// Returns the mean over all elements of `-t ln s(x) - (1 - t) ln(1 - s(x))` for logits `x` and targets `t` of one
/// shape, with the logistic function `s`. The result is a scalar of their dtype. Candle's is NaN where `s(x)` rounds to
/// 0 or 1. Fails if shapes or dtypes disagree.
pub fn binary_cross_entropy_with_logit(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let dtype = inp.dtype();
    let wide = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
    let (x, t) = (inp.to_dtype(wide)?, target.to_dtype(wide)?);
    // -ln s(x) = ln(1 + e^-x), and -ln(1 - s(x)) is greater by x.
    let losses = (log_add_exp(&x.neg()?, &x.zeros_like()?)? + (t.affine(-1., 1.)? * x)?)?;
    losses.mean_all()?.to_dtype(dtype)
}
