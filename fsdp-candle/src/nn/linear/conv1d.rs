//! GPT-2's `Conv1D`: a fully connected layer whose weight is stored transposed.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use super::super::weight::claim;
use super::adapter::Adapter;
use super::affine::affine;

/// GPT-2's fully connected layer `y = x W + b`: weight `[in, out]`, bias `[out]`, input `[.., in]`, output `[.., out]`.
#[derive(Clone, Debug)]
pub struct Conv1D {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

impl Conv1D {
    /// A layer with this weight `[in, out]` and bias `[out]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        claim(&weight);
        bias.iter().for_each(claim);
        Self { weight, bias, adapter: None }
    }

    /// As [`Linear::with_adapter`](super::Linear::with_adapter).
    ///
    /// # Errors
    /// Those of [`lora`](super::super::lora()).
    pub fn with_adapter(mut self, vb: VarBuilder) -> Result<Self> {
        self.adapter = Adapter::wanted(&self.weight, true, vb)?;
        Ok(self)
    }

    /// The weight, `[in, out]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Conv1D {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Adapter::beside(self.adapter.as_ref(), affine("Conv1D", x, &self.weight, self.bias.as_ref(), true)?, x)
    }
}

/// A [`Conv1D`] layer, GPT-2's, from the tensors `weight` and `bias` of `vb`, which start as GPT-2's do: normal with
/// standard deviation 0.02, and zero.
pub fn gpt2_linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Conv1D> {
    let weight = vb.get_with_hints((in_dim, out_dim), "weight", Init::Randn { mean: 0., stdev: 0.02 })?;
    let bias = vb.get_with_hints(out_dim, "bias", Init::Const(0.))?;
    Conv1D::new(weight, Some(bias)).with_adapter(vb)
}
