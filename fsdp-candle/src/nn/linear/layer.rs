//! The fully connected layer.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder, init};

use super::super::weight::claim;
use super::adapter::Adapter;
use super::affine::affine;

/// A fully connected layer `y = x W^T + b`: weight `[out, in]`, optional bias `[out]`, input `[.., in]`, output
/// `[.., out]`.
///
/// As [`candle_nn::Linear`]; product and bias are one operation, and the weight's gradient is accumulated in place.
/// Candle's is wrong for an input that is not contiguous; this one takes any.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::Linear;
///
/// let weight = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?;
/// let layer = Linear::new(weight, None);
/// let y = layer.forward(&Tensor::new(&[[10f32, 100.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[210.0, 430.0, 650.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

impl Linear {
    /// A layer with this weight `[out, in]` and bias `[out]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        claim(&weight);
        bias.iter().for_each(claim);
        Self { weight, bias, adapter: None }
    }

    /// The layer with the adapter that [`crate::ShardedVarMap::adapt`] asks for, if it does. `vb` is the builder that
    /// the weight came from, as its `weight`. [`linear`] and its like do this by themselves.
    ///
    /// # Errors
    /// Those of [`lora`](super::super::lora()).
    pub fn with_adapter(mut self, vb: VarBuilder) -> Result<Self> {
        let (outputs, inputs) = self.weight.dims2()?;
        self.adapter = Adapter::wanted(&self.weight, inputs, outputs, vb)?;
        Ok(self)
    }

    /// The weight, `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Adapter::beside(self.adapter.as_ref(), affine("Linear", x, &self.weight, self.bias.as_ref(), false)?, x)
    }
}

/// A [`Linear`] layer with a bias, from the tensors `weight` and `bias` of `vb`.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    let bound = 1. / (in_dim as f64).sqrt();
    let bias = vb.get_with_hints(out_dim, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Linear::new(weight, Some(bias)).with_adapter(vb)
}

/// A [`Linear`] layer without a bias, from the tensor `weight` of `vb`.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    Linear::new(weight, None).with_adapter(vb)
}

/// [`linear`] or [`linear_no_bias`].
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    if bias { linear(in_dim, out_dim, vb) } else { linear_no_bias(in_dim, out_dim, vb) }
}
