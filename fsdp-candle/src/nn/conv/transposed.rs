//! Transposed convolutions over one and two dimensions.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::{ConvTranspose1dConfig, ConvTranspose2dConfig, Init, VarBuilder};

use super::super::weight::claim_on_host;
use super::op::{Sizes, convolve, unplaced};
use super::straight::of_group;
use super::unfold::Window;

/// A transposed convolution, as [`candle_nn::ConvTranspose1d`], which has no backward: weight
/// `[in, out / groups, kernel]`, bias `[out]`, input `[batch, in, length]`.
#[derive(Clone, Debug)]
pub struct ConvTranspose1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvTranspose1dConfig,
}

impl ConvTranspose1d {
    /// A layer with this weight and bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: ConvTranspose1dConfig) -> Self {
        claim_on_host(&weight);
        bias.iter().for_each(claim_on_host);
        Self { weight, bias, config }
    }

    /// Stride, padding and the like.
    pub fn config(&self) -> &ConvTranspose1dConfig {
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

impl Module for ConvTranspose1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let function = "ConvTranspose1d";
        let ConvTranspose1dConfig { padding, stride, dilation, output_padding, groups, .. } = self.config;
        let (batch, channels, length) = x.dims3()?;
        let (inputs, of_group, taps) = self.weight.dims3()?;
        if channels != inputs || groups == 0 || !inputs.is_multiple_of(groups) {
            bail!(
                "{function}: the input {:?} does not fit the weight {:?} and {groups} groups",
                x.dims(),
                self.weight.dims()
            );
        }
        let other = unplaced(function, length, taps, [padding, output_padding], stride, dilation)?;
        let window = Window {
            height: 1,
            width: other,
            kernel: [1, taps],
            padding: [0, padding],
            stride: [1, stride],
            dilation: [1, dilation],
            places: [1, length],
        };
        let sizes = Sizes {
            function,
            transposed: true,
            groups,
            batch,
            small: inputs,
            large: of_group * groups,
            window,
            shape: (batch, of_group * groups, other).into(),
        };
        convolve(x, &self.weight, self.bias.as_ref(), sizes)
    }
}

/// A transposed convolution, as [`candle_nn::ConvTranspose2d`]: weight `[in, out, kernel, kernel]`, bias `[out]`, input
/// `[batch, in, height, width]`.
#[derive(Clone, Debug)]
pub struct ConvTranspose2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvTranspose2dConfig,
}

impl ConvTranspose2d {
    /// A layer with this weight and bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: ConvTranspose2dConfig) -> Self {
        claim_on_host(&weight);
        bias.iter().for_each(claim_on_host);
        Self { weight, bias, config }
    }

    /// Stride, padding and the like.
    pub fn config(&self) -> &ConvTranspose2dConfig {
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

impl Module for ConvTranspose2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let function = "ConvTranspose2d";
        let ConvTranspose2dConfig { padding, stride, dilation, output_padding, .. } = self.config;
        let (batch, channels, height, width) = x.dims4()?;
        let (inputs, of_group, taps_y, taps_x) = self.weight.dims4()?;
        if channels != inputs {
            bail!("{function}: the input {:?} does not fit the weight {:?}", x.dims(), self.weight.dims());
        }
        let other_y = unplaced(function, height, taps_y, [padding, output_padding], stride, dilation)?;
        let other_x = unplaced(function, width, taps_x, [padding, output_padding], stride, dilation)?;
        let window = Window {
            height: other_y,
            width: other_x,
            kernel: [taps_y, taps_x],
            padding: [padding; 2],
            stride: [stride; 2],
            dilation: [dilation; 2],
            places: [height, width],
        };
        let sizes = Sizes {
            function,
            transposed: true,
            groups: 1,
            batch,
            small: inputs,
            large: of_group,
            window,
            shape: (batch, of_group, other_y, other_x).into(),
        };
        convolve(x, &self.weight, self.bias.as_ref(), sizes)
    }
}

/// A [`ConvTranspose1d`] from the tensors `weight` and `bias` of `vb`.
pub fn conv_transpose1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let of_group = of_group("ConvTranspose1d", out_channels, cfg.groups)?;
    let bound = 1. / (out_channels as f64 * kernel_size as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let weight = vb.get_with_hints((in_channels, of_group, kernel_size), "weight", init)?;
    let bias = vb.get_with_hints(out_channels, "bias", init)?;
    Ok(ConvTranspose1d::new(weight, Some(bias), cfg))
}

/// [`conv_transpose1d()`] without a bias.
pub fn conv_transpose1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let of_group = of_group("ConvTranspose1d", out_channels, cfg.groups)?;
    let bound = 1. / (out_channels as f64 * kernel_size as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let weight = vb.get_with_hints((in_channels, of_group, kernel_size), "weight", init)?;
    Ok(ConvTranspose1d::new(weight, None, cfg))
}

/// A [`ConvTranspose2d`] with a square kernel from the tensors `weight` and `bias` of `vb`.
pub fn conv_transpose2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let bound = 1. / (out_channels as f64).sqrt() / kernel_size as f64;
    let init = Init::Uniform { lo: -bound, up: bound };
    let weight = vb.get_with_hints((in_channels, out_channels, kernel_size, kernel_size), "weight", init)?;
    let bias = vb.get_with_hints(out_channels, "bias", init)?;
    Ok(ConvTranspose2d::new(weight, Some(bias), cfg))
}

/// [`conv_transpose2d()`] without a bias.
pub fn conv_transpose2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let bound = 1. / (out_channels as f64).sqrt() / kernel_size as f64;
    let init = Init::Uniform { lo: -bound, up: bound };
    let weight = vb.get_with_hints((in_channels, out_channels, kernel_size, kernel_size), "weight", init)?;
    Ok(ConvTranspose2d::new(weight, None, cfg))
}
