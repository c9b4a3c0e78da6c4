//! The activations of transformers' feed-forward layers.
//!
//! - SiLU `x s(x)` with the logistic function `s`; SwiGLU (Shazeer, 2020, arXiv:2002.05202) `silu(gate) * up`.
//! - GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415) `x Phi(x)`, and its approximation `x (1 + tanh(u)) / 2` with
//!   `u = sqrt(2/pi) (x + 0.044715 x^3)`. Since `(1 + tanh(u)) / 2 = s(2u)`, the approximation needs one exponential
//!   and keeps its relative accuracy for large negative `x`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::parallel::{map_rows, map_rows2};
use super::super::cpu::simd::{exp, kernel, sigmoid};
use super::super::cpu::values::{floats, read, same_kind, served, storage, tensor};
use super::super::limits::countable_input;

/// `x / (1 + e^-x)`, of any shape.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    if served(x) { x.apply_op1(Activation::Silu) } else { countable_input("silu", x)?.silu() }
}

/// GELU in the tanh approximation: `gelu_new` and `gelu_pytorch_tanh` of Hugging Face. Any shape.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if served(x) { x.apply_op1(Activation::Gelu) } else { countable_input("gelu", x)?.gelu() }
}

/// GELU as it is defined, with the normal distribution function. Any shape.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    if served(x) { x.apply_op1(Activation::GeluErf) } else { countable_input("gelu_erf", x)?.gelu_erf() }
}

/// SwiGLU on two tensors of one shape, `silu(gate) * up`. [`ops::swiglu`](crate::nn::ops::swiglu) takes one that holds
/// both halves.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() {
        bail!("silu_mul: gate {:?} and up {:?} must be of one shape", gate.dims(), up.dims());
    }
    same_kind("silu_mul", ("gate", gate), ("up", up))?;
    if served(gate) { gate.apply_op2(up, SwiGlu) } else { countable_input("silu_mul", gate)?.silu()? * up }
}

enum Activation {
    Silu,
    Gelu,
    GeluErf,
}

impl CustomOp1 for Activation {
    fn name(&self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluErf => "gelu_erf",
        }
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = x.dtype();
        let x = floats(x, layout)?;
        let mut y = vec![0f32; x.len()];
        map_rows(&mut y, 1, 1, |first, y| {
            let x = &x[first..][..y.len()];
            match self {
                Self::Silu => silu_values(y, x),
                Self::Gelu => gelu_values(y, x),
                Self::GeluErf => gelu_erf_values(y, x),
            }
        });
        Ok((storage(y, dtype)?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        read!(values, x);
        read!(grad, dy);
        let mut dx = vec![0f32; values.len()];
        map_rows(&mut dx, 1, 1, |first, dx| {
            let (x, dy) = (&values[first..][..dx.len()], &grad[first..][..dx.len()]);
            match self {
                Self::Silu => silu_back(dx, x, dy),
                Self::Gelu => gelu_back(dx, x, dy),
                Self::GeluErf => gelu_erf_back(dx, x, dy),
            }
        });
        Ok(Some(tensor(dx, x.shape(), x.dtype())?))
    }
}

struct SwiGlu;

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "silu_mul"
    }

    fn cpu_fwd(&self, gate: &CpuStorage, gl: &Layout, up: &CpuStorage, ul: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = gate.dtype();
        let (gate, up) = (floats(gate, gl)?, floats(up, ul)?);
        let mut y = vec![0f32; gate.len()];
        map_rows(&mut y, 1, 1, |first, y| swiglu_values(y, &gate[first..], &up[first..]));
        Ok((storage(y, dtype)?, gl.shape().clone()))
    }

    fn bwd(&self, gate: &Tensor, up: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        read!(gates, gate);
        read!(ups, up);
        read!(grad, dy);
        let (mut d_gate, mut d_up) = (vec![0f32; gates.len()], vec![0f32; gates.len()]);
        map_rows2(&mut d_gate, &mut d_up, |first, d_gate, d_up| {
            swiglu_back(d_gate, d_up, &gates[first..], &ups[first..], &grad[first..]);
        });
        Ok((Some(tensor(d_gate, gate.shape(), gate.dtype())?), Some(tensor(d_up, up.shape(), up.dtype())?)))
    }
}

/// sqrt(2 / pi).
const TANH_SCALE: f32 = 0.797_884_6;
/// The coefficient of the cubic term.
const CUBIC: f32 = 0.044_715;

/// The normal distribution function and density at `x`.
///
/// The function is Chebyshev's fit to erfc of Press et al., Numerical Recipes (1992), section 6.2, whose relative error
/// is below 1.2e-7 everywhere.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn normal(x: f32) -> (f32, f32) {
    const COEFFICIENTS: [f32; 10] = [
        0.170_872_77,
        -0.822_152_23,
        1.488_515_87,
        -1.135_203_98,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_68,
        -1.265_512_23,
    ];
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / z.mul_add(0.5, 1.0);
    let mut p = COEFFICIENTS[0];
    for c in &COEFFICIENTS[1..] {
        p = p.mul_add(t, *c);
    }
    let square = 0.5 * x * x;
    let bell = exp(-square);
    let tail = 0.5 * t * bell * exp(p);
    // 1 / sqrt(2 pi).
    (if x > 0.0 { 1.0 - tail } else { tail }, 0.398_942_28 * bell)
}

kernel! {
    fn silu_values(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * sigmoid(x);
        }
    }

    fn silu_back(dx: &mut [f32], x: &[f32], dy: &[f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            let s = sigmoid(x);
            *dx = dy * s * (1.0 + x * (1.0 - s));
        }
    }

    fn swiglu_values(y: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
            *y = gate * sigmoid(gate) * up;
        }
    }

    fn swiglu_back(d_gate: &mut [f32], d_up: &mut [f32], gate: &[f32], up: &[f32], dy: &[f32]) {
        for ((((d_gate, d_up), &gate), &up), &dy) in d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(dy) {
            let s = sigmoid(gate);
            *d_gate = dy * up * s * (1.0 + gate * (1.0 - s));
            *d_up = dy * gate * s;
        }
    }

    fn gelu_values(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * sigmoid(2.0 * TANH_SCALE * x * (CUBIC * x).mul_add(x, 1.0));
        }
    }

    fn gelu_back(dx: &mut [f32], x: &[f32], dy: &[f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            let s = sigmoid(2.0 * TANH_SCALE * x * (CUBIC * x).mul_add(x, 1.0));
            let slope = 2.0 * TANH_SCALE * (3.0 * CUBIC * x).mul_add(x, 1.0);
            *dx = dy * s * (1.0 + x * (1.0 - s) * slope);
        }
    }

    fn gelu_erf_values(y: &mut [f32], x: &[f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * normal(x).0;
        }
    }

    fn gelu_erf_back(dx: &mut [f32], x: &[f32], dy: &[f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            let (distribution, density) = normal(x);
            *dx = dy * x.mul_add(density, distribution);
        }
    }
}
