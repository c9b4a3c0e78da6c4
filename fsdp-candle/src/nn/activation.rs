//! Activations: `candle_nn::activation`, and the fused functions of transformers' feed-forward layers.
//!
//! - SiLU is `x s(x)` with the logistic function `s`. SwiGLU (Shazeer, 2020, arXiv:2002.05202) is `silu(gate) * up`.
//! - GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415) is `x Phi(x)`. Its approximation is `x (1 + tanh(u)) / 2` with
//!   `u = sqrt(2/pi) (x + 0.044715 x^3)`. Since `(1 + tanh(u)) / 2 = s(2u)`, the approximation needs one exponential
//!   and keeps its relative accuracy for large negative `x`.
//! - PReLU (He et al., 2015, arXiv:1502.01852) is `x` where `x > 0`, else `w x` with the weight `w` of the element's
//!   channel. `dw` is the sum of `dy x` over the channel's elements that are not positive.

use candle_core::{D, DType, Module, Result, Storage, Tensor, bail};
use candle_nn::{Init, VarBuilder, ops};
use serde::{Deserialize, Serialize};

use super::cpu::simd::{exp, kernel, sigmoid};
use super::cpu::{map_rows, map_rows2, read, same_kind, small_weight_grad, storage, tensor_like, to_vec};
use super::cuda::Cuda;
use super::limits::check_input_size;
use super::weight::{Weight, has_cpu_kernels, register_cpu_layer};
use crate::graph::{Reads, graph_op, recomputed_op};

/// An activation, as [`candle_nn::Activation`]: the same variants, and the same names in a configuration.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::Activation;
///
/// let act: Activation = serde_json::from_str("\"gelu_pytorch_tanh\"").unwrap();
/// assert_eq!(act, Activation::GeluPytorchTanh);
/// let y = Activation::Relu2.forward(&Tensor::new(&[-1f32, 3.], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0., 9.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// GELU as it is defined, with the normal distribution function.
    #[default]
    #[serde(alias = "gelu")]
    Gelu,
    /// GELU in the tanh approximation.
    #[serde(alias = "gelu_new")]
    NewGelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    Relu2,
    /// `min(max(x, 0), 6)`.
    Relu6,
    /// `x s(x)` with the logistic function `s`.
    Silu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `min(max((x + 3) / 6, 0), 1)`.
    HardSigmoid,
    /// `silu` of the last dimension's first half, times its second half.
    Swiglu,
    /// Another name of [`Activation::Silu`].
    Swish,
    /// `x tanh(ln(1 + e^x))`.
    Mish,
    /// `x` times [`Activation::HardSigmoid`] of it.
    HardSwish,
    /// `x` where it is positive, else `alpha (e^x - 1)`.
    Elu(f64),
    /// `x` where it is positive, else `slope x`.
    LeakyRelu(f64),
    /// GELU in the tanh approximation.
    #[serde(alias = "gelu_pytorch_tanh")]
    GeluPytorchTanh,
}

impl Module for Activation {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match *self {
            Self::Gelu => gelu_erf(xs),
            Self::NewGelu | Self::GeluPytorchTanh => gelu(xs),
            Self::Relu => xs.relu(),
            Self::Relu2 => xs.relu()?.sqr(),
            Self::Relu6 => xs.clamp(0f32, 6f32),
            Self::Silu | Self::Swish => silu(xs),
            Self::Sigmoid => ops::sigmoid(xs),
            Self::HardSigmoid => ops::hard_sigmoid(xs),
            Self::Swiglu => swiglu(xs),
            Self::HardSwish => xs * ops::hard_sigmoid(xs)?,
            Self::Mish => mish(xs),
            Self::Elu(alpha) => xs.elu(alpha),
            Self::LeakyRelu(negative_slope) => ops::leaky_relu(xs, negative_slope),
        }
    }
}

/// Implements the conversions between this enum and Candle's, whose variants have the same names.
macro_rules! conversions {
    ($($plain:ident),*; $($with_number:ident),*) => {
        impl From<candle_nn::Activation> for Activation {
            fn from(theirs: candle_nn::Activation) -> Self {
                match theirs {
                    $(candle_nn::Activation::$plain => Self::$plain,)*
                    $(candle_nn::Activation::$with_number(number) => Self::$with_number(number),)*
                }
            }
        }

        impl From<Activation> for candle_nn::Activation {
            fn from(ours: Activation) -> Self {
                match ours {
                    $(Activation::$plain => Self::$plain,)*
                    $(Activation::$with_number(number) => Self::$with_number(number),)*
                }
            }
        }
    };
}

conversions!(
    Gelu, NewGelu, Relu, Relu2, Relu6, Silu, Sigmoid, HardSigmoid, Swiglu, Swish, Mish, HardSwish, GeluPytorchTanh;
    Elu, LeakyRelu
);

/// Applies SwiGLU to one tensor: `silu` of the last dimension's first half, times its second half. Fails if there is no
/// second half.
pub fn swiglu(xs: &Tensor) -> Result<Tensor> {
    if let Some(cuda) = Cuda::of(xs)
        && let Some(width) = xs.dims().last().filter(|width| width.is_multiple_of(2))
    {
        return cuda.silu_mul_halves(xs, width / 2);
    }
    match &xs.chunk(2, D::Minus1)?[..] {
        [gate, up] => silu_mul(gate, up),
        _ => bail!("swiglu: the last dimension of {:?} must have two halves", xs.dims()),
    }
}

/// Returns `ln(e^a + e^b)`. The gradient is smooth, also where that of Candle's `abs` and `maximum` is not.
pub(super) fn log_add_exp(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let highest = a.maximum(b)?.detach();
    ((a - &highest)?.exp()? + (b - &highest)?.exp()?)?.log()? + highest
}

/// Returns `x tanh(ln(1 + e^x))`. Candle's gradient is NaN where `e^x` is infinite. This one is finite.
pub fn mish(xs: &Tensor) -> Result<Tensor> {
    let dtype = xs.dtype();
    let xs = widened(xs)?;
    (&xs * log_add_exp(&xs, &xs.zeros_like()?)?.tanh()?)?.to_dtype(dtype)
}

/// Returns `gamma` times `x` where `x` is positive, and `gamma alpha (e^x - 1)` elsewhere. Candle's takes f32 only, and
/// its gradient is NaN where `e^x` is infinite.
pub fn selu(xs: &Tensor, alpha: f32, gamma: f32) -> Result<Tensor> {
    let is_pos = xs.gt(&xs.zeros_like()?)?;
    let negative = is_pos.where_cond(&xs.zeros_like()?, xs)?;
    let bent = ((negative.exp()? - 1.0)? * f64::from(alpha))?;
    is_pos.where_cond(xs, &bent)? * f64::from(gamma)
}

/// Widens half floats to f32.
fn widened(xs: &Tensor) -> Result<Tensor> {
    if matches!(xs.dtype(), DType::F16 | DType::BF16) { xs.to_dtype(DType::F32) } else { Ok(xs.clone()) }
}

/// Returns `x / (1 + e^-x)`, for any shape.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    activate("silu", x, silu_values, silu_back, Tensor::silu)
}

/// Returns GELU in the tanh approximation, for any shape: Hugging Face's `gelu_new` and `gelu_pytorch_tanh`.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    activate("gelu", x, gelu_values, gelu_back, Tensor::gelu)
}

/// Returns the exact GELU, with the normal distribution function, for any shape.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    activate("gelu_erf", x, gelu_erf_values, gelu_erf_back, Tensor::gelu_erf)
}

/// Applies SwiGLU to two tensors of one shape: `silu(gate) * up`. [`ops::swiglu`](crate::nn::ops::swiglu) takes one
/// tensor that holds both halves.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() {
        bail!("silu_mul: gate {:?} and up {:?} must have one shape", gate.dims(), up.dims());
    }
    same_kind("silu_mul", ("gate", gate), ("up", up))?;
    if let Some(cuda) = Cuda::of(gate) {
        return cuda.silu_mul(gate, up);
    }
    if !has_cpu_kernels(gate) {
        return check_input_size("silu_mul", gate)?.silu()? * up;
    }
    let values = |both: &[&Tensor]| {
        read!(gate, both[0]);
        read!(up, both[1]);
        let mut y = vec![0f32; gate.len()];
        map_rows(&mut y, 1, 1, |first, y| swiglu_values(y, &gate[first..], &up[first..]));
        storage(y, both[0].dtype())
    };
    recomputed_op("silu_mul", &[gate, up], values, |both, dy| {
        let (gate, up) = (both[0], both[1]);
        read!(gates, gate);
        read!(ups, up);
        read!(grad, dy);
        let (mut d_gate, mut d_up) = (vec![0f32; gates.len()], vec![0f32; gates.len()]);
        map_rows2(&mut d_gate, &mut d_up, |first, d_gate, d_up| {
            swiglu_back(d_gate, d_up, &gates[first..], &ups[first..], &grad[first..]);
        });
        Ok([Some(tensor_like(d_gate, gate)?), Some(tensor_like(d_up, up)?)])
    })
}

/// Applies a function of each element. `values(y, x)` computes it on the CPU, `back(dx, x, dy)` its backward, and
/// `composite` both by Candle's operations. On the CPU, backward computes the output again where a layer reads it.
fn activate(
    name: &'static str,
    x: &Tensor,
    values: fn(&mut [f32], &[f32]),
    back: fn(&mut [f32], &[f32], &[f32]),
    composite: fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if let Some(cuda) = Cuda::of(x) {
        return cuda.activate(name, x);
    }
    if !has_cpu_kernels(x) {
        return composite(check_input_size(name, x)?);
    }
    let compute = move |x: &[&Tensor]| {
        let mut y = vec![0f32; x[0].elem_count()];
        read!(inputs, x[0]);
        map_rows(&mut y, 1, 1, |first, y| values(y, &inputs[first..][..y.len()]));
        storage(y, x[0].dtype())
    };
    recomputed_op(name, &[x], compute, move |x, dy| {
        let mut dx = vec![0f32; dy.elem_count()];
        read!(values, x[0]);
        read!(grad, dy);
        map_rows(&mut dx, 1, 1, |first, dx| back(dx, &values[first..][..dx.len()], &grad[first..][..dx.len()]));
        Ok([Some(tensor_like(dx, x[0])?)])
    })
}

/// sqrt(2 / pi).
const TANH_SCALE: f32 = 0.797_884_6;
/// Coefficient of the cubic term.
const CUBIC: f32 = 0.044_715;

/// Returns the normal distribution function and density at `x`.
///
/// The function is the Chebyshev fit to erfc of Press et al., Numerical Recipes (1992), section 6.2. Its relative error
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

    pub(super) fn swiglu_values(y: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
            *y = gate * sigmoid(gate) * up;
        }
    }

    pub(super) fn swiglu_back(d_gate: &mut [f32], d_up: &mut [f32], gate: &[f32], up: &[f32], dy: &[f32]) {
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
            // Beyond, the slope is 0 or 1, and the square of x may be infinite.
            let x = x.clamp(-100.0, 100.0);
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

    fn prelu_run(run: &mut [f32], weight: f32) {
        run.iter_mut().for_each(|x| *x = if *x <= 0.0 { *x * weight } else { *x });
    }

    fn gelu_erf_back(dx: &mut [f32], x: &[f32], dy: &[f32]) {
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            let (distribution, density) = normal(x);
            *dx = dy * x.mul_add(density, distribution);
        }
    }
}

/// A PReLU layer, as [`candle_nn::PReLU`]: one weight, or one for each channel (dimension 1 of the input).
#[derive(Clone, Debug)]
pub struct PReLU {
    weight: Tensor,
    is_scalar: bool,
}

impl PReLU {
    /// Returns a layer with this weight, of one element if `is_scalar`.
    pub fn new(weight: Tensor, is_scalar: bool) -> Self {
        register_cpu_layer(&weight);
        Self { weight, is_scalar }
    }

    /// Returns the weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns whether all channels share one weight.
    pub fn is_scalar(&self) -> bool {
        self.is_scalar
    }

    /// Returns the weight's shape with a dimension for each of the input's, so that it is broadcast over the input.
    fn weight_shape(&self, x: &Tensor) -> Result<Vec<usize>> {
        let weights = self.weight.elem_count();
        let mut shape = vec![1; x.rank()];
        if self.is_scalar {
            if weights != 1 {
                bail!("PReLU: the weight {:?} must have one element", self.weight.dims());
            }
        } else if x.shape() == self.weight.shape() {
            shape = x.dims().to_vec();
        } else if x.rank() >= 2 {
            if x.dim(1)? != weights {
                bail!("PReLU: the input {:?} has {} channels, but {weights} weights", x.dims(), x.dim(1)?);
            }
            shape[1] = weights;
        } else if weights != 1 {
            bail!("PReLU: the input {:?} must have the weight's shape {:?}", x.dims(), self.weight.dims());
        }
        Ok(shape)
    }
}

impl Module for PReLU {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let shape = self.weight_shape(x)?;
        same_kind("PReLU", ("the input", x), ("the weight", &self.weight))?;
        if !has_cpu_kernels(x) {
            return prelu_composite(x, &Weight::in_graph(&self.weight)?.reshape(shape)?);
        }
        // Elements that share a weight form runs, and the runs of all weights follow each other.
        let run = x.dims().iter().zip(&shape).rev().take_while(|(_, kept)| **kept == 1).map(|(size, _)| size).product();
        let op = PReluOp { weight: Weight::of(&self.weight)?, run };
        let arguments = op.weight.arguments(x, None);
        graph_op("PReLU", &arguments, op.forward(x)?, x.shape(), Reads::Sources, move |x, _, dy| op.backward(x[0], dy))
    }
}

/// The layer as a chain of Candle's operations. The weight has the input's rank.
fn prelu_composite(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let positive = x.gt(&x.zeros_like()?)?;
    positive.where_cond(x, &x.broadcast_mul(weight)?)
}

/// Returns a [`PReLU`] from the tensor `weight` of `vs`, which starts as 0.25, with one weight for each channel or one
/// for all.
pub fn prelu(num_channels: Option<usize>, vs: VarBuilder) -> Result<PReLU> {
    // A single weight is a vector of length 1, as in PyTorch.
    let weight = vs.get_with_hints(num_channels.unwrap_or(1), "weight", Init::Const(0.25))?;
    Ok(PReLU::new(weight, num_channels.is_none()))
}

struct PReluOp {
    weight: Weight,
    /// Number of successive elements that share a weight.
    run: usize,
}

impl PReluOp {
    fn forward(&self, x: &Tensor) -> Result<Storage> {
        let mut y = to_vec(x)?;
        read!(weight, self.weight.value()?);
        for (run, w) in y.chunks_mut(self.run.max(1)).zip(weight.iter().cycle()) {
            prelu_run(run, *w);
        }
        storage(y, x.dtype())
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        read!(values, x);
        let mut dx = to_vec(dy)?;
        let dw = {
            read!(weight, self.weight.value()?);
            let mut dw = vec![0f32; weight.len()];
            let run = self.run.max(1);
            for (i, (x, dx)) in values.chunks(run).zip(dx.chunks_mut(run)).enumerate() {
                let at = i % weight.len();
                for (x, dx) in x.iter().zip(dx).filter(|(x, _)| **x <= 0.0) {
                    dw[at] += x * *dx;
                    *dx *= weight[at];
                }
            }
            dw
        };
        Ok([Some(tensor_like(dx, x)?), small_weight_grad(&self.weight, &dw)?])
    }
}
