//! Convolutions: `candle_nn::conv`, with the right gradients.
//!
//! A convolution is a matrix product. `Window` maps each output position to the inputs under the kernel. Unfolding
//! puts these inputs side by side: a row for each output position, and in it, channel by channel, the inputs under the
//! kernel. Folding is the adjoint, and adds. With `U` for unfolding and the kernel `W` `[out, in * kernel]`, a
//! convolution is `y = U(x) W^T`, so `dx = U^T(dy W)` and `dW = dy^T U(x)`. A transposed convolution is the adjoint,
//! `y = U^T(x W)`, so `dx = U(dy) W^T` and `dW = x^T U(dy)`.

use std::ops::Range;

use candle_core::{Module, Result, Shape, Storage, Tensor, bail};
use candle_nn::{Init, VarBuilder, init};

pub use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};

use super::batch_norm::BatchNorm;
use super::cpu::matrix::{Mat, MatMut, product};
use super::cpu::{read, same_kind, small_weight_grad, storage, tensor_like, weight_grad};
use super::weight::{Weight, has_cpu_kernels, register_cpu_layer};
use crate::kernels::graph_op;

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
    /// Convolves `x` `[batch, channels, .., width]` with a weight of the same rank. One dimension is a height of 1.
    fn convolve(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let &Settings { function, transposed, groups, padding, stride, dilation, .. } = self;
        let rank = x.rank();
        let (dims, kernel_dims) = (x.dims(), weight.dims());
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
        convolve(x, weight, bias, Sizes { function, transposed, groups, batch: dims[0], small, large, window, shape })
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
    graph_op(function, &arguments, op.forward(x)?, shape, move |x, _, dy| op.backward(x[0], dy))
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

struct Convolution {
    sizes: Sizes,
    weight: Weight,
    bias: Option<Weight>,
}

impl Convolution {
    /// Calls `f(group, small side, large side)` for each element of the batch and each group. The sides are ranges of
    /// elements.
    fn for_each_group(&self, mut f: impl FnMut(usize, Range<usize>, Range<usize>)) {
        let Sizes { batch, groups, window, .. } = self.sizes;
        let (small, large) = self.sizes.group_channels();
        let (small, large) = (small * window.positions(), large * window.size());
        for at in 0..batch * groups {
            f(at % groups, at * small..(at + 1) * small, at * large..(at + 1) * large);
        }
    }

    fn kernel_range(&self, group: usize) -> Range<usize> {
        let (small, large) = self.sizes.group_channels();
        let size = small * large * self.sizes.window.taps();
        group * size..(group + 1) * size
    }

    /// Maps the larger side to the smaller one.
    fn to_small(&self, from: &[f32], kernel: &[f32], to: &mut [f32]) {
        let (small, large) = self.sizes.group_channels();
        let window = self.sizes.window;
        let (positions, width) = (window.positions(), large * window.taps());
        let mut rows = vec![0f32; positions * width];
        self.for_each_group(|group, of_small, of_large| {
            window.unfold(&from[of_large], large, &mut rows);
            let kernel = Mat::new(&kernel[self.kernel_range(group)], small, width);
            let rows = Mat::new(&rows, positions, width).t();
            product(MatMut::new(&mut to[of_small], small, positions), false, kernel, rows);
        });
    }

    /// Maps the smaller side to the larger one, which must be zero.
    fn to_large(&self, from: &[f32], kernel: &[f32], to: &mut [f32]) {
        let (small, large) = self.sizes.group_channels();
        let window = self.sizes.window;
        let (positions, width) = (window.positions(), large * window.taps());
        let mut rows = vec![0f32; positions * width];
        self.for_each_group(|group, of_small, of_large| {
            let from = Mat::new(&from[of_small], small, positions).t();
            let kernel = Mat::new(&kernel[self.kernel_range(group)], small, width);
            product(MatMut::new(&mut rows, positions, width), false, from, kernel);
            window.fold(&rows, large, &mut to[of_large]);
        });
    }

    fn forward(&self, x: &Tensor) -> Result<Storage> {
        read!(values, x);
        let shape = &self.sizes.shape;
        let mut y = vec![0f32; shape.elem_count()];
        {
            read!(kernel, self.weight.value()?);
            match self.sizes.transposed {
                true => self.to_large(&values, &kernel, &mut y),
                false => self.to_small(&values, &kernel, &mut y),
            }
        }
        if let Some(bias) = &self.bias {
            read!(bias, bias.value()?);
            let run: usize = shape.dims()[2..].iter().product();
            for (run, bias) in y.chunks_mut(run.max(1)).zip(bias.iter().cycle()) {
                run.iter_mut().for_each(|y| *y += bias);
            }
        }
        storage(y, x.dtype())
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        read!(values, x);
        read!(grad, dy);
        let dx = if x.track_op() {
            let mut dx = vec![0f32; values.len()];
            read!(kernel, self.weight.value()?);
            match self.sizes.transposed {
                true => self.to_small(&grad, &kernel, &mut dx),
                false => self.to_large(&grad, &kernel, &mut dx),
            }
            Some(tensor_like(dx, x)?)
        } else {
            None
        };
        let (of_small, of_large) = if self.sizes.transposed { (&values, &grad) } else { (&grad, &values) };
        let dw = weight_grad(&self.weight, |buffer, accumulate| {
            if !accumulate {
                buffer.fill(0.0);
            }
            self.add_weight_grad(of_small, of_large, buffer);
            Ok(())
        })?;
        let db = match &self.bias {
            Some(bias) if bias.wants_grad() => {
                let mut sums = vec![0f32; self.sizes.out_channels()];
                let run: usize = self.sizes.shape.dims()[2..].iter().product();
                for (i, run) in grad.chunks(run.max(1)).enumerate() {
                    sums[i % self.sizes.out_channels()] += run.iter().sum::<f32>();
                }
                small_weight_grad(bias, &sums)?
            }
            _ => None,
        };
        Ok([dx, dw, db])
    }

    /// Adds the kernel's gradient to `to`.
    fn add_weight_grad(&self, of_small: &[f32], of_large: &[f32], to: &mut [f32]) {
        let (small, large) = self.sizes.group_channels();
        let window = self.sizes.window;
        let (positions, width) = (window.positions(), large * window.taps());
        let mut rows = vec![0f32; positions * width];
        self.for_each_group(|group, at_small, at_large| {
            window.unfold(&of_large[at_large], large, &mut rows);
            let of_small = Mat::new(&of_small[at_small], small, positions);
            let to = MatMut::new(&mut to[self.kernel_range(group)], small, width);
            product(to, true, of_small, Mat::new(&rows, positions, width));
        });
    }
}

/// Sizes of a convolution over height and width, for one channel. A convolution over one dimension has the height 1.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// Height and width of the larger side, which is padded.
    large: [usize; 2],
    /// Height and width of the smaller side: the kernel's positions.
    small: [usize; 2],
    kernel: [usize; 2],
    padding: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
}

impl Window {
    /// Returns the elements of one channel of the larger side.
    fn size(&self) -> usize {
        self.large[0] * self.large[1]
    }

    /// Returns the positions of the smaller side.
    fn positions(&self) -> usize {
        self.small[0] * self.small[1]
    }

    /// Returns the elements under the kernel in one channel.
    fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Calls `f(position, tap, index)` for each element of the larger side under the kernel, without the padding.
    fn for_each_tap(&self, mut f: impl FnMut(usize, usize, usize)) {
        let at = |axis: usize, position: usize, tap: usize, size: usize| {
            let padded = position * self.stride[axis] + tap * self.dilation[axis];
            padded.checked_sub(self.padding[axis]).filter(|index| *index < size)
        };
        for y in 0..self.small[0] {
            for tap_y in 0..self.kernel[0] {
                let Some(row) = at(0, y, tap_y, self.large[0]) else { continue };
                for x in 0..self.small[1] {
                    for tap_x in 0..self.kernel[1] {
                        if let Some(col) = at(1, x, tap_x, self.large[1]) {
                            f(y * self.small[1] + x, tap_y * self.kernel[1] + tap_x, row * self.large[1] + col);
                        }
                    }
                }
            }
        }
    }

    /// Unfolds the `channels` of `x` to `rows`, `[positions, channels * taps]`. The padding's elements of `rows` must
    /// be zero.
    fn unfold(&self, x: &[f32], channels: usize, rows: &mut [f32]) {
        let (taps, size) = (self.taps(), self.size());
        self.for_each_tap(|position, tap, index| {
            for channel in 0..channels {
                rows[(position * channels + channel) * taps + tap] = x[channel * size + index];
            }
        });
    }

    /// Adds unfolded rows to their elements of `x`.
    fn fold(&self, rows: &[f32], channels: usize, x: &mut [f32]) {
        let (taps, size) = (self.taps(), self.size());
        self.for_each_tap(|position, tap, index| {
            for channel in 0..channels {
                x[channel * size + index] += rows[(position * channels + channel) * taps + tap];
            }
        });
    }

    /// Returns indices for Candle's `index_select`: for each position and tap the element in one channel, or `size` for
    /// padding.
    fn indices(&self) -> Vec<u32> {
        let mut indices = vec![self.size() as u32; self.positions() * self.taps()];
        self.for_each_tap(|position, tap, index| indices[position * self.taps() + tap] = index as u32);
        indices
    }
}
