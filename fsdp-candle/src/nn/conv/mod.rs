//! Convolutions: `candle_nn::conv`, with the right gradients.
//!
//! A convolution is a matrix product. `Window` maps each output position to the inputs under the kernel. Unfolding
//! puts these inputs one below the other: a column for each output position, and in it, channel by channel, the inputs
//! under the kernel. Folding is the adjoint, and adds. With `U` for unfolding and the kernel `W` `[out, in * kernel]`, a
//! convolution is `y = W U(x)`, so `dx = U^T(W^T dy)` and `dW = dy U(x)^T`. A transposed convolution is the adjoint,
//! `y = U^T(W^T x)`, so `dx = W U(dy)` and `dW = x U(dy)^T`.

mod depthwise;
mod products;
mod window;

use candle_core::{Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder, init};

pub use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};

use super::batch_norm::BatchNorm;
use super::cpu::same_kind;
use super::weight::{Weight, has_cpu_kernels, register_cpu_layer};
use crate::context_parallel::current;
use crate::graph::{Reads, graph_op};
use products::Convolution;
pub(super) use window::Window;

/// A convolution's weight, bias and configuration. Each kind of convolution is an alias.
#[derive(Clone, Debug)]
pub struct Conv<C> {
    weight: Tensor,
    bias: Option<Tensor>,
    config: C,
}

impl<C> Conv<C> {
    /// Returns a layer with this weight and bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: C) -> Self {
        [Some(&weight), bias.as_ref()].into_iter().flatten().for_each(register_cpu_layer);
        Self { weight, bias, config }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &C {
        &self.config
    }

    /// Returns the weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

/// A convolution over one dimension, as [`candle_nn::Conv1d`]: weight `[out, in / groups, kernel]`, bias `[out]`, input
/// `[batch, in, length]`. Candle's gradient of the weight is wrong.
pub type Conv1d = Conv<Conv1dConfig>;

impl Module for Conv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv1dConfig { padding, stride, dilation, groups, .. } = self.config;
        x.dims3()?;
        if current().is_some() {
            bail!(
                "Conv1d: in a context-parallel forward, a rank has a part of the sequence, and not the tokens beside it"
            );
        }
        let settings =
            Settings { function: "Conv1d", transposed: false, groups, padding, output_padding: 0, stride, dilation };
        settings.convolve(x, &self.weight, self.bias.as_ref())
    }
}

/// A convolution over two dimensions, as [`candle_nn::Conv2d`]: weight `[out, in / groups, kernel, kernel]`, bias
/// `[out]`, input `[batch, in, height, width]`.
pub type Conv2d = Conv<Conv2dConfig>;

impl Conv2d {
    /// Returns one layer that equals this layer followed by a batch normalization in evaluation. Fails if the
    /// normalization has no weight and bias, or the shapes disagree.
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
        let Conv2dConfig { padding, stride, dilation, groups, .. } = self.config;
        x.dims4()?;
        let settings =
            Settings { function: "Conv2d", transposed: false, groups, padding, output_padding: 0, stride, dilation };
        settings.convolve(x, &self.weight, self.bias.as_ref())
    }
}

/// A transposed convolution over one dimension, as [`candle_nn::ConvTranspose1d`], which has no backward: weight
/// `[in, out / groups, kernel]`, bias `[out]`, input `[batch, in, length]`.
pub type ConvTranspose1d = Conv<ConvTranspose1dConfig>;

impl Module for ConvTranspose1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ConvTranspose1dConfig { padding, stride, dilation, output_padding, groups, .. } = self.config;
        x.dims3()?;
        let function = "ConvTranspose1d";
        let settings = Settings { function, transposed: true, groups, padding, output_padding, stride, dilation };
        settings.convolve(x, &self.weight, self.bias.as_ref())
    }
}

/// A transposed convolution over two dimensions, as [`candle_nn::ConvTranspose2d`]: weight `[in, out, kernel, kernel]`,
/// bias `[out]`, input `[batch, in, height, width]`.
pub type ConvTranspose2d = Conv<ConvTranspose2dConfig>;

impl Module for ConvTranspose2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ConvTranspose2dConfig { padding, stride, dilation, output_padding, .. } = self.config;
        x.dims4()?;
        let function = "ConvTranspose2d";
        let settings = Settings { function, transposed: true, groups: 1, padding, output_padding, stride, dilation };
        settings.convolve(x, &self.weight, self.bias.as_ref())
    }
}

fn channels_per_group(function: &str, channels: usize, groups: usize) -> Result<usize> {
    if groups == 0 || !channels.is_multiple_of(groups) {
        bail!("{function}: {groups} groups must divide {channels} channels");
    }
    Ok(channels / groups)
}

/// Returns the bias that PyTorch's convolutions start from.
fn initial_bias(in_channels: usize, out_channels: usize, vb: &VarBuilder) -> Result<Option<Tensor>> {
    let bound = 1. / (in_channels as f64).sqrt();
    vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound }).map(Some)
}

/// Returns a [`Conv1d`] from the tensors `weight` and `bias` of `vb`.
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let layer = conv1d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    Ok(Conv1d::new(layer.weight, initial_bias(in_channels, out_channels, &vb)?, cfg))
}

/// [`conv1d()`] without a bias.
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let shape = (out_channels, channels_per_group("Conv1d", in_channels, cfg.groups)?, kernel_size);
    Ok(Conv1d::new(vb.get_with_hints(shape, "weight", init::DEFAULT_KAIMING_NORMAL)?, None, cfg))
}

/// Returns a [`Conv2d`] with a square kernel from the tensors `weight` and `bias` of `vb`.
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let layer = conv2d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    Ok(Conv2d::new(layer.weight, initial_bias(in_channels, out_channels, &vb)?, cfg))
}

/// [`conv2d()`] without a bias.
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let shape = (out_channels, channels_per_group("Conv2d", in_channels, cfg.groups)?, kernel_size, kernel_size);
    Ok(Conv2d::new(vb.get_with_hints(shape, "weight", init::DEFAULT_KAIMING_NORMAL)?, None, cfg))
}

/// Returns a [`ConvTranspose1d`] from the tensors `weight` and `bias` of `vb`.
pub fn conv_transpose1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let layer = conv_transpose1d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    let bias = vb.get_with_hints(out_channels, "bias", transposed_init_1d(out_channels, kernel_size))?;
    Ok(ConvTranspose1d::new(layer.weight, Some(bias), cfg))
}

/// [`conv_transpose1d()`] without a bias.
pub fn conv_transpose1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let shape = (in_channels, channels_per_group("ConvTranspose1d", out_channels, cfg.groups)?, kernel_size);
    let weight = vb.get_with_hints(shape, "weight", transposed_init_1d(out_channels, kernel_size))?;
    Ok(ConvTranspose1d::new(weight, None, cfg))
}

fn transposed_init_1d(out_channels: usize, kernel_size: usize) -> Init {
    let bound = 1. / (out_channels as f64 * kernel_size as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// Returns a [`ConvTranspose2d`] with a square kernel from the tensors `weight` and `bias` of `vb`.
pub fn conv_transpose2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let layer = conv_transpose2d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    let bias = vb.get_with_hints(out_channels, "bias", transposed_init_2d(out_channels, kernel_size))?;
    Ok(ConvTranspose2d::new(layer.weight, Some(bias), cfg))
}

/// [`conv_transpose2d()`] without a bias.
pub fn conv_transpose2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let shape = (in_channels, out_channels, kernel_size, kernel_size);
    let weight = vb.get_with_hints(shape, "weight", transposed_init_2d(out_channels, kernel_size))?;
    Ok(ConvTranspose2d::new(weight, None, cfg))
}

fn transposed_init_2d(out_channels: usize, kernel_size: usize) -> Init {
    let bound = 1. / (out_channels as f64).sqrt() / kernel_size as f64;
    Init::Uniform { lo: -bound, up: bound }
}

/// A layer's settings, the same for both of its spatial dimensions.
struct Settings {
    function: &'static str,
    transposed: bool,
    groups: usize,
    padding: usize,
    output_padding: usize,
    stride: usize,
    dilation: usize,
}

impl Settings {
    /// Convolves `x` `[batch, channels, .., width]` with a weight of the same rank.
    fn convolve(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        convolve(x, weight, bias, self.sizes(x.dims(), weight.dims())?)
    }

    /// Returns the sizes for an input and a weight of these shapes. One dimension is a height of 1.
    fn sizes(&self, dims: &[usize], kernel_dims: &[usize]) -> Result<Sizes> {
        let &Settings { function, transposed, groups, padding, stride, dilation, .. } = self;
        let rank = dims.len();
        // A convolution's weight is [out, in / groups, ..], a transposed one's [in, out / groups, ..].
        let fits = kernel_dims.len() == rank
            && groups != 0
            && kernel_dims[0].is_multiple_of(groups)
            && dims[1] == if transposed { kernel_dims[0] } else { kernel_dims[1] * groups };
        if !fits {
            bail!("{function}: the input {dims:?} does not fit the weight {kernel_dims:?} and {groups} groups");
        }
        let (small, large) = (kernel_dims[0], kernel_dims[1] * groups);
        let mut window =
            Window { large: [1; 2], small: [1; 2], kernel: [1; 2], padding: [0; 2], stride: [1; 2], dilation: [1; 2] };
        for axis in 4 - rank..2 {
            let (size, kernel) = (dims[rank - 2 + axis], kernel_dims[rank - 2 + axis]);
            let other = self.output_size(size, kernel)?;
            (window.small[axis], window.large[axis]) = if transposed { (size, other) } else { (other, size) };
            (window.kernel[axis], window.padding[axis]) = (kernel, padding);
            (window.stride[axis], window.dilation[axis]) = (stride, dilation);
        }
        let (channels, output) = if transposed { (large, window.large) } else { (small, window.small) };
        let shape = [&[dims[0], channels], &output[4 - rank..]].concat().into();
        Ok(Sizes { function, transposed, groups, batch: dims[0], small, large, window, shape })
    }

    /// Returns the output's size along one dimension.
    fn output_size(&self, size: usize, kernel: usize) -> Result<usize> {
        let &Settings { function, transposed, padding, output_padding, stride, dilation, .. } = self;
        let extent = dilation * kernel.saturating_sub(1) + 1;
        let is_empty = stride == 0 || dilation == 0 || kernel == 0;
        if transposed {
            let padded = size.saturating_sub(1) * stride + extent + output_padding;
            if is_empty || size == 0 || padded <= 2 * padding {
                bail!(
                    "{function}: a kernel of {kernel} with dilation {dilation}, stride {stride} and padding {padding} \
                     leaves nothing of an input of {size}"
                );
            }
            return Ok(padded - 2 * padding);
        }
        let padded = size + 2 * padding;
        if is_empty || padded < extent {
            bail!(
                "{function}: a kernel of {kernel} with dilation {dilation} and stride {stride} does not fit an input \
                 of {size} with padding {padding}"
            );
        }
        Ok((padded - extent) / stride + 1)
    }
}

/// The sizes of a convolution. The kernel slides over the larger side, which has the channels `large`. A convolution
/// maps the larger side to the smaller one, and a transposed convolution the smaller side to the larger one.
#[derive(Clone, Debug)]
struct Sizes {
    function: &'static str,
    transposed: bool,
    groups: usize,
    batch: usize,
    /// Channels of the smaller side, of all groups together.
    small: usize,
    /// Channels of the larger side, of all groups together.
    large: usize,
    window: Window,
    /// Shape of the output.
    shape: Shape,
}

impl Sizes {
    /// Returns the channels of a group, on the smaller and on the larger side.
    fn group_channels(&self) -> (usize, usize) {
        (self.small / self.groups, self.large / self.groups)
    }

    fn out_channels(&self) -> usize {
        if self.transposed { self.large } else { self.small }
    }
}

/// Convolves `x` with the kernel `[small, large / groups, ..]`, and adds a bias for each output channel.
fn convolve(x: &Tensor, kernel: &Tensor, bias: Option<&Tensor>, sizes: Sizes) -> Result<Tensor> {
    let function = sizes.function;
    same_kind(function, ("the input", x), ("the weight", kernel))?;
    if let Some(bias) = bias {
        same_kind(function, ("the input", x), ("the bias", bias))?;
        if bias.dims() != [sizes.out_channels()] {
            bail!("{function}: the bias {:?} must be [{}]", bias.dims(), sizes.out_channels());
        }
    }
    if !has_cpu_kernels(x) {
        let bias = bias.map(Weight::in_graph).transpose()?;
        return composite(x, &Weight::in_graph(kernel)?, bias.as_ref(), &sizes);
    }
    let (weight, bias) = (Weight::of(kernel)?, bias.map(Weight::of).transpose()?);
    let (arguments, shape) = (weight.arguments(x, bias.as_ref()), sizes.shape.clone());
    let op = Convolution { sizes, weight, bias };
    graph_op(function, &arguments, op.forward(x)?, shape, Reads::Sources, move |x, _, dy| op.backward(x[0], dy))
}

/// The convolution as a chain of Candle's operations. Candle's own convolutions have wrong gradients, or none.
fn composite(x: &Tensor, kernel: &Tensor, bias: Option<&Tensor>, sizes: &Sizes) -> Result<Tensor> {
    let Sizes { batch, groups, window, .. } = *sizes;
    let (small, large) = sizes.group_channels();
    let (taps, positions, size) = (window.taps(), window.positions(), window.size());
    let indices = Tensor::from_vec(window.indices(), positions * taps, x.device())?;
    let kernel = kernel.reshape((groups, small, large * taps))?;
    let y = if sizes.transposed {
        let x = x.reshape((batch, groups, small, positions))?.transpose(2, 3)?.contiguous()?;
        let kernel = kernel.unsqueeze(0)?.broadcast_as((batch, groups, small, large * taps))?.contiguous()?;
        let rows = x.matmul(&kernel)?.reshape((batch * groups, positions, large, taps))?;
        let rows = rows.transpose(1, 2)?.reshape((batch * groups * large, positions * taps))?;
        // One element more, for the values that fall into the padding.
        let zeros = Tensor::zeros((batch * groups * large, size + 1), x.dtype(), x.device())?;
        zeros.index_add(&indices, &rows, 1)?.narrow(1, 0, size)?.contiguous()?
    } else {
        let x = x.reshape((batch * groups * large, size))?.contiguous()?;
        let padding = Tensor::zeros((batch * groups * large, 1), x.dtype(), x.device())?;
        let rows = Tensor::cat(&[&x, &padding], 1)?.contiguous()?.index_select(&indices, 1)?;
        let rows = rows.reshape((batch * groups, large, positions, taps))?.transpose(1, 2)?;
        let rows = rows.reshape((batch, groups, positions, large * taps))?;
        let kernel = kernel.transpose(1, 2)?.unsqueeze(0)?.broadcast_as((batch, groups, large * taps, small))?;
        rows.matmul(&kernel.contiguous()?)?.transpose(2, 3)?.contiguous()?
    };
    let y = y.reshape(&sizes.shape)?;
    match bias {
        None => Ok(y),
        Some(bias) => {
            let mut shape = vec![1; y.rank()];
            shape[1] = bias.elem_count();
            y.broadcast_add(&bias.reshape(shape)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    fn values(shape: &[usize], seed: usize) -> Var {
        let count: usize = shape.iter().product();
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.;
        let all = Tensor::from_vec((0..count).map(value).collect::<Vec<_>>(), shape, &Device::Cpu).unwrap();
        Var::from_tensor(&all).unwrap()
    }

    /// Returns the output, and the gradients of input, kernel and bias, of some function of the output.
    fn results(y: Tensor, variables: &[&Var; 3]) -> Vec<Tensor> {
        let weights = values(y.dims(), 4);
        let gradients = (&y * weights.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
        let gradients = variables.iter().map(|variable| gradients.get(variable).unwrap().clone());
        std::iter::once(y.detach()).chain(gradients).collect()
    }

    /// Compares with Candle's operations: each block of positions, images together or apart, each group.
    #[test]
    fn blocks_match_a_chain_of_operations() {
        for (batch, [inputs, outputs, groups], [height, width], [rows, columns], padding, stride, dilation) in [
            (3, [4, 6, 1], [9, 11], [3, 3], 1, 1, 1),
            (2, [4, 6, 2], [10, 7], [3, 3], 2, 2, 1),
            (5, [6, 4, 1], [2, 2], [3, 3], 1, 1, 1),
            (7, [6, 4, 2], [3, 3], [2, 2], 0, 1, 1),
            (2, [3, 5, 1], [8, 8], [4, 4], 0, 4, 1),
            (2, [3, 5, 1], [6, 9], [1, 1], 0, 1, 1),
            (2, [3, 5, 1], [6, 9], [1, 1], 0, 2, 1),
            (2, [3, 5, 1], [9, 9], [3, 3], 3, 2, 3),
            (1, [4, 4, 1], [1, 61], [1, 5], 0, 3, 1),
            (2, [5, 5, 5], [7, 19], [7, 7], 3, 1, 1),
            (2, [5, 5, 5], [9, 40], [3, 3], 1, 2, 1),
            (3, [4, 4, 4], [8, 33], [3, 3], 4, 1, 2),
            (2, [4, 8, 4], [6, 6], [3, 3], 1, 1, 1),
            (2, [3, 3, 3], [5, 5], [3, 3], 5, 3, 1),
            (2, [3, 5, 1], [0, 4], [2, 2], 1, 1, 1),
            (2, [3, 3, 3], [0, 4], [2, 2], 1, 1, 1),
        ] {
            // A transposed convolution of nothing is refused.
            for transposed in [false, true].into_iter().filter(|transposed| !transposed || height > 0) {
                let case = format!(
                    "{batch} x {inputs} x {height} x {width}, {rows} x {columns} to {outputs}, {groups} groups, padding \
                     {padding}, stride {stride}, dilation {dilation}, transposed: {transposed}"
                );
                let [from, to] = if transposed { [outputs, inputs] } else { [inputs, outputs] };
                let x = values(&[batch, from, height, width], 1);
                let weight = values(&[outputs, inputs / groups, rows, columns], 2);
                let bias = values(&[to], 3);
                let output_padding = if transposed { stride - 1 } else { 0 };
                let function = "Conv2d";
                let settings = Settings { function, transposed, groups, padding, output_padding, stride, dilation };
                let sizes = settings.sizes(x.dims(), weight.dims()).unwrap();
                let variables = [&x, &weight, &bias];
                let ours = convolve(&x, &weight, Some(&bias), sizes.clone()).unwrap();
                let chain = composite(&x, &weight, Some(bias.as_tensor()), &sizes).unwrap();
                for (what, (a, b)) in
                    ["y", "dx", "dw", "db"].iter().zip(results(ours, &variables).iter().zip(results(chain, &variables)))
                {
                    let [a, b] = [a, &b]
                        .map(|t| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap());
                    let most = b.iter().fold(1f64, |most, b| most.max(b.abs()));
                    for (at, (a, b)) in a.iter().zip(&b).enumerate() {
                        assert!((a - b).abs() < 1e-5 * most, "{case}: {what} {at} is {a}, not {b}");
                    }
                }
            }
        }
    }
}
