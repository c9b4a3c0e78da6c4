//! The fully connected layer.

use std::sync::Arc;

use candle_core::{D, Module, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder, init};
use fsdp_core::ProcessGroup;

use super::super::input::Input;
use super::super::parallel::{
    LinearCut, ParallelLayer, Part, output_of_columns, output_of_terms, part_of_input, serve, whole_input,
};
use super::super::weight::claim;
use super::adapter::Adapter;
use super::add_bias::add_bias;
use super::affine::affine;
use crate::tensor_parallel::{ColwiseParallel, RowwiseParallel};

/// A fully connected layer `y = x W^T + b`: weight `[out, in]`, optional bias `[out]`, input `[.., in]`, output
/// `[.., out]`.
///
/// As [`candle_nn::Linear`]; product and bias are one operation, and the weight's gradient is accumulated in place.
/// Candle's is wrong for an input that is not contiguous; this one takes any.
///
/// Under a plan ([`crate::parallelize`]) the weight is this rank's part, and input and output have the layouts of the
/// plan's [`crate::ColwiseParallel`] or [`crate::RowwiseParallel`]. Layers that take the same tensor one after the
/// other, such as queries, keys and values, share its gather and the all-reduce of its gradient.
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
    parallel: Option<Arc<ParallelLayer<LinearCut>>>,
}

impl Linear {
    /// A layer with this weight `[out, in]` and bias `[out]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        claim(&weight);
        bias.iter().for_each(claim);
        let parallel = ParallelLayer::of_linear(&weight).map(Arc::new);
        if parallel.is_some() {
            bias.iter().for_each(serve);
        }
        Self { weight, bias, adapter: None, parallel }
    }

    /// The layer with the adapter that [`crate::ShardedVarMap::adapt`] asks for, if it does. `vb` is the builder that
    /// the weight came from, as its `weight`. [`linear`] and its like do this by themselves.
    ///
    /// # Errors
    /// Those of [`lora`](super::super::lora()).
    pub fn with_adapter(mut self, vb: VarBuilder) -> Result<Self> {
        self.adapter = Adapter::wanted(&self.weight, false, vb)?;
        if self.parallel.is_some() {
            self.adapter.iter().for_each(Adapter::serve);
        }
        Ok(self)
    }

    /// The weight, `[out, in]`; under a plan this rank's part.
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
        let Some(parallel) = &self.parallel else { return self.output(x, self.bias.as_ref()) };
        match &parallel.style {
            LinearCut::Outputs(style) => self.cut_along_outputs(x, style, parallel.group()),
            LinearCut::Inputs(style) => self.cut_along_inputs(x, style, parallel.group()),
        }
    }
}

impl Linear {
    /// What this rank's weight and adapter make of an input.
    fn output<'a>(&self, x: impl Into<Input<'a>>, bias: Option<&Tensor>) -> Result<Tensor> {
        let x = x.into();
        Adapter::beside(self.adapter.as_ref(), affine("Linear", x, &self.weight, bias, false)?, x)
    }

    fn cut_along_outputs(&self, x: &Tensor, style: &ColwiseParallel, group: &ProcessGroup) -> Result<Tensor> {
        let x = whole_input("Linear", x, self.weight.dim(1)?, style.input_layout, group)?;
        let y = self.output(&x, self.bias.as_ref())?;
        output_of_columns("Linear", y, style.output_layout, group)
    }

    fn cut_along_inputs(&self, x: &Tensor, style: &RowwiseParallel, group: &ProcessGroup) -> Result<Tensor> {
        let outputs = self.weight.dim(0)?;
        if let Some(bias) = &self.bias
            && bias.dims() != [outputs]
        {
            bail!("Linear: the bias {:?} must be [{outputs}], for the weight is {:?}", bias.dims(), self.weight.dims());
        }
        let y = match part_of_input("Linear", x, self.weight.dim(1)?, style.input_layout, group)? {
            Part::Plain(x) => self.output(&x, None)?,
            Part::Shared(x) => self.output(&x, None)?,
        };
        let y = output_of_terms("Linear", &y, style.output_layout, group)?;
        let Some(bias) = &self.bias else { return Ok(y) };
        // The bias is whole: a rank that has a part of the outputs adds that part of it.
        let width = y.dim(D::Minus1)?;
        let first = if width == outputs { 0 } else { group.rank() * width };
        add_bias(&y, bias, first)
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
