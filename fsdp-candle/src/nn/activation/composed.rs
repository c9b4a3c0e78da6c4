//! Activations from Candle's differentiable operations.

use candle_core::{D, DType, Result, Tensor, bail};

use super::fused::silu_mul;

/// SwiGLU on one tensor: `silu` of the last dimension's first half, times its second half. An error if there is no
/// second half.
pub fn swiglu(xs: &Tensor) -> Result<Tensor> {
    match &xs.chunk(2, D::Minus1)?[..] {
        [gate, up] => silu_mul(gate, up),
        _ => bail!("swiglu: the last dimension of {:?} must hold two halves", xs.dims()),
    }
}

/// `ln(e^a + e^b)` with the gradient of a function that is smooth where Candle's `abs` and `maximum` are not.
pub(in crate::nn) fn log_add_exp(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let highest = a.maximum(b)?.detach();
    ((a - &highest)?.exp()? + (b - &highest)?.exp()?)?.log()? + highest
}

/// `x tanh(ln(1 + e^x))`. Candle's gradient is not a number where `e^x` is infinite; this one is.
pub fn mish(xs: &Tensor) -> Result<Tensor> {
    let dtype = xs.dtype();
    let xs = widened(xs)?;
    (&xs * log_add_exp(&xs, &xs.zeros_like()?)?.tanh()?)?.to_dtype(dtype)
}

/// `gamma` times: `x` where it is positive, else `alpha (e^x - 1)`. Candle's takes f32 alone, and its gradient is not a
/// number where `e^x` is infinite.
pub fn selu(xs: &Tensor, alpha: f32, gamma: f32) -> Result<Tensor> {
    let is_pos = xs.gt(&xs.zeros_like()?)?;
    let negative = is_pos.where_cond(&xs.zeros_like()?, xs)?;
    let bent = ((negative.exp()? - 1.0)? * f64::from(alpha))?;
    is_pos.where_cond(xs, &bent)? * f64::from(gamma)
}

/// Half floats as f32; the others as they are.
fn widened(xs: &Tensor) -> Result<Tensor> {
    if matches!(xs.dtype(), DType::F16 | DType::BF16) { xs.to_dtype(DType::F32) } else { Ok(xs.clone()) }
}
