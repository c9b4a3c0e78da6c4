//! `candle_nn::layer_norm`: layers that normalize over the last dimension.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

pub use candle_nn::LayerNormConfig;

use super::super::weight::claim;
use super::rows::normalize;

/// Layer normalization over the last dimension: weight `[hidden]`, optional bias `[hidden]`, input and output
/// `[.., hidden]`.
///
/// It is built as [`candle_nn::LayerNorm`] is.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::LayerNorm;
///
/// let ones = Tensor::new(&[1f32, 1.], &Device::Cpu)?;
/// let norm = LayerNorm::new_no_bias(ones, 0.0);
/// let y = norm.forward(&Tensor::new(&[[3f32, 5.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1., 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
}

impl LayerNorm {
    /// A layer with this weight and bias, each `[hidden]`; `eps` is added to the variance.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self::of(weight, Some(bias), true, eps)
    }

    /// A layer without a bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self::of(weight, None, true, eps)
    }

    /// A layer that does not subtract the mean: what [`RmsNorm`] is.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self::of(weight, None, false, eps)
    }

    fn of(weight: Tensor, bias: Option<Tensor>, remove_mean: bool, eps: f64) -> Self {
        claim(&weight);
        bias.iter().for_each(claim);
        Self { weight, bias, remove_mean, eps }
    }

    /// The weight, `[hidden]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `[hidden]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// What is added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Whether the mean is subtracted.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalize("LayerNorm", x, &self.weight, self.bias.as_ref(), self.eps, self.remove_mean)
    }
}

/// A [`LayerNorm`] from the tensors `weight` and `bias` of `vb`, which start as one and zero. They are called `gamma`
/// and `beta` where `vb` has those. A number as config is the epsilon.
pub fn layer_norm<C: Into<LayerNormConfig>>(hidden: usize, config: C, vb: VarBuilder) -> Result<LayerNorm> {
    let LayerNormConfig { eps, remove_mean, affine } = config.into();
    let old = |name, old| !vb.contains_tensor(name) && vb.contains_tensor(old);
    let named = |name: &'static str, older: &'static str| if old(name, older) { older } else { name };
    let weight = vb.get_with_hints(hidden, named("weight", "gamma"), Init::Const(1.))?;
    let bias = affine.then(|| vb.get_with_hints(hidden, named("bias", "beta"), Init::Const(0.))).transpose()?;
    Ok(LayerNorm::of(weight, bias, remove_mean, eps))
}

/// A [`LayerNorm`] without a bias, from the tensor `weight` of `vb`, which starts as one.
pub fn layer_norm_no_bias(hidden: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(hidden, LayerNormConfig { eps, remove_mean: true, affine: false }, vb)
}

/// Root-mean-square normalization over the last dimension: weight `[hidden]`, input and output `[.., hidden]`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// A layer with this weight, `[hidden]`; `eps` is added to the mean square.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        claim(&weight);
        Self { weight, eps }
    }

    /// The weight, `[hidden]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// What is added to the mean square.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// The same as a [`LayerNorm`] that does not subtract the mean.
    pub fn into_inner(self) -> LayerNorm {
        LayerNorm::rms_norm(self.weight, self.eps)
    }

    /// [`Module::forward`], which is differentiable here.
    pub fn forward_diff(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(x)
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalize("RmsNorm", x, &self.weight, None, self.eps, false)
    }
}

/// An [`RmsNorm`] from the tensor `weight` of `vb`, which starts as one, or `gamma` where `vb` has that.
pub fn rms_norm(hidden: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let norm = layer_norm(hidden, LayerNormConfig { eps, remove_mean: false, affine: false }, vb)?;
    Ok(RmsNorm::new(norm.weight, eps))
}
