//! Convolutions over one and two dimensions.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::{Conv1dConfig, Conv2dConfig, Init, VarBuilder, init};

use super::super::norm::batch_norm::BatchNorm;
use super::super::weight::{Weight, claim_on_host};
use super::op::{Sizes, convolve, places};
use super::unfold::Window;

/// A convolution, as [`candle_nn::Conv1d`]: weight `[out, in / groups, kernel]`, bias `[out]`, input
/// `[batch, in, length]`. Candle's gradient of the weight is wrong.
#[derive(Clone, Debug)]
pub struct Conv1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv1dConfig,
}

impl Conv1d {
    /// A layer with this weight and bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv1dConfig) -> Self {
        claim_on_host(&weight);
        bias.iter().for_each(claim_on_host);
        Self { weight, bias, config }
    }

    /// Stride, padding and the like.
    pub fn config(&self) -> &Conv1dConfig {
        &self.config
    }

    /// The weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Conv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let function = "Conv1d";
        let Conv1dConfig { padding, stride, dilation, groups, .. } = self.config;
        let (batch, channels, length) = x.dims3()?;
        let (outputs, of_group, taps) = self.weight.dims3()?;
        if groups == 0 || channels != of_group * groups || !outputs.is_multiple_of(groups) {
            bail!(
                "{function}: the input {:?} does not fit the weight {:?} and {groups} groups",
                x.dims(),
                self.weight.dims()
            );
        }
        let other = places(function, length, taps, padding, stride, dilation)?;
        let window = Window {
            height: 1,
            width: length,
            kernel: [1, taps],
            padding: [0, padding],
            stride: [1, stride],
            dilation: [1, dilation],
            places: [1, other],
        };
        let sizes = Sizes {
            function,
            transposed: false,
            groups,
            batch,
            small: outputs,
            large: channels,
            window,
            shape: (batch, outputs, other).into(),
        };
        convolve(x, &self.weight, self.bias.as_ref(), sizes)
    }
}

/// A convolution, as [`candle_nn::Conv2d`]: weight `[out, in / groups, kernel, kernel]`, bias `[out]`, input
/// `[batch, in, height, width]`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
}

impl Conv2d {
    /// A layer with this weight and bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv2dConfig) -> Self {
        claim_on_host(&weight);
        bias.iter().for_each(claim_on_host);
        Self { weight, bias, config }
    }

    /// Stride, padding and the like.
    pub fn config(&self) -> &Conv2dConfig {
        &self.config
    }

    /// The weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The layer that is this one followed by a batch normalization in evaluation.
    ///
    /// # Errors
    /// When the normalization has no weight and bias, or the shapes disagree.
    pub fn absorb_bn(&self, bn: &BatchNorm) -> Result<Self> {
        let Some((scale, shift)) = bn.weight_and_bias() else { bail!("Conv2d: the batch norm has no weight and bias") };
        let scale = Weight::in_graph(scale)?.div(&(bn.running_var() + bn.eps())?.sqrt()?)?;
        let outputs = self.weight.dims4()?.0;
        let weight = Weight::in_graph(&self.weight)?.broadcast_mul(&scale.reshape((outputs, 1, 1, 1))?)?;
        let mean = match &self.bias {
            None => bn.running_mean().neg()?,
            Some(bias) => Weight::in_graph(bias)?.sub(bn.running_mean())?,
        };
        let bias = Weight::in_graph(shift)?.add(&scale.mul(&mean)?)?;
        Ok(Self { weight, bias: Some(bias), config: self.config })
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let function = "Conv2d";
        let Conv2dConfig { padding, stride, dilation, groups, .. } = self.config;
        let (batch, channels, height, width) = x.dims4()?;
        let (outputs, of_group, taps_y, taps_x) = self.weight.dims4()?;
        if groups == 0 || channels != of_group * groups || !outputs.is_multiple_of(groups) {
            bail!(
                "{function}: the input {:?} does not fit the weight {:?} and {groups} groups",
                x.dims(),
                self.weight.dims()
            );
        }
        let other_y = places(function, height, taps_y, padding, stride, dilation)?;
        let other_x = places(function, width, taps_x, padding, stride, dilation)?;
        let window = Window {
            height,
            width,
            kernel: [taps_y, taps_x],
            padding: [padding; 2],
            stride: [stride; 2],
            dilation: [dilation; 2],
            places: [other_y, other_x],
        };
        let sizes = Sizes {
            function,
            transposed: false,
            groups,
            batch,
            small: outputs,
            large: channels,
            window,
            shape: (batch, outputs, other_y, other_x).into(),
        };
        convolve(x, &self.weight, self.bias.as_ref(), sizes)
    }
}

/// Channels of a group.
pub(super) fn of_group(function: &str, channels: usize, groups: usize) -> Result<usize> {
    if groups == 0 || !channels.is_multiple_of(groups) {
        bail!("{function}: {groups} groups must divide {channels} channels");
    }
    Ok(channels / groups)
}

/// A [`Conv1d`] from the tensors `weight` and `bias` of `vb`.
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let of_group = of_group("Conv1d", in_channels, cfg.groups)?;
    let weight = vb.get_with_hints((out_channels, of_group, kernel_size), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    let bound = 1. / (in_channels as f64).sqrt();
    let bias = vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Conv1d::new(weight, Some(bias), cfg))
}

/// [`conv1d()`] without a bias.
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let of_group = of_group("Conv1d", in_channels, cfg.groups)?;
    let weight = vb.get_with_hints((out_channels, of_group, kernel_size), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Conv1d::new(weight, None, cfg))
}

/// A [`Conv2d`] with a square kernel from the tensors `weight` and `bias` of `vb`.
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let of_group = of_group("Conv2d", in_channels, cfg.groups)?;
    let weight =
        vb.get_with_hints((out_channels, of_group, kernel_size, kernel_size), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    let bound = 1. / (in_channels as f64).sqrt();
    let bias = vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Conv2d::new(weight, Some(bias), cfg))
}

/// [`conv2d()`] without a bias.
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let of_group = of_group("Conv2d", in_channels, cfg.groups)?;
    let weight =
        vb.get_with_hints((out_channels, of_group, kernel_size, kernel_size), "weight", init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Conv2d::new(weight, None, cfg))
}
