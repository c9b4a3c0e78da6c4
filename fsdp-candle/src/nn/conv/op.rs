//! A convolution and its adjoint, in both directions.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::matrix::{Mat, MatMut, product};
use super::super::cpu::values::{floats, read, same_kind, served, small_weight_grad, storage, tensor, weight_grad};
use super::super::cpu::weighted_op::weighted_op;
use super::super::weight::Weight;
use super::unfold::Window;

/// What a convolution is over. The larger side has the channels `large`, and is where the kernel slides; a convolution
/// goes from it to the smaller side, a transposed one comes from there.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub(super) function: &'static str,
    pub(super) transposed: bool,
    pub(super) groups: usize,
    pub(super) batch: usize,
    /// Channels of the smaller side, of all groups.
    pub(super) small: usize,
    /// Channels of the larger side, of all groups.
    pub(super) large: usize,
    pub(super) window: Window,
    /// The output's shape.
    pub(super) shape: Shape,
}

impl Sizes {
    /// Channels of a group, of the smaller and of the larger side.
    fn of_group(&self) -> (usize, usize) {
        (self.small / self.groups, self.large / self.groups)
    }

    fn out_channels(&self) -> usize {
        if self.transposed { self.large } else { self.small }
    }
}

/// The convolution of `x` with the kernel `[small, large / groups, ..]`, and a bias for each output channel.
pub(super) fn convolve(x: &Tensor, kernel: &Tensor, bias: Option<&Tensor>, sizes: Sizes) -> Result<Tensor> {
    let function = sizes.function;
    same_kind(function, ("the input", x), ("the weight", kernel))?;
    if let Some(bias) = bias {
        same_kind(function, ("the input", x), ("the bias", bias))?;
        if bias.dims() != [sizes.out_channels()] {
            bail!("{function}: the bias {:?} must be [{}]", bias.dims(), sizes.out_channels());
        }
    }
    if !served(x) {
        let bias = bias.map(Weight::in_graph).transpose()?;
        return composite(x, &Weight::in_graph(kernel)?, bias.as_ref(), &sizes);
    }
    let weight = Weight::of(kernel)?;
    let node = weight.node().clone();
    match bias {
        None => x.apply_op2(&node, Convolution { function, sizes, weight, bias: None }),
        Some(bias) => {
            let bias = Weight::of(bias)?;
            let bias_node = bias.node().clone();
            x.apply_op3(&node, &bias_node, Convolution { function, sizes, weight, bias: Some(bias) })
        }
    }
}

/// The same from Candle's operations: its own convolutions have gradients that are wrong, or none.
fn composite(x: &Tensor, kernel: &Tensor, bias: Option<&Tensor>, sizes: &Sizes) -> Result<Tensor> {
    let Sizes { batch, groups, window, .. } = *sizes;
    let (small, large) = sizes.of_group();
    let (taps, positions, size) = (window.taps(), window.positions(), window.size());
    let indices = Tensor::from_vec(window.indices(), positions * taps, x.device())?;
    let kernel = kernel.reshape((groups, small, large * taps))?;
    let y = if sizes.transposed {
        let x = x.reshape((batch, groups, small, positions))?.transpose(2, 3)?.contiguous()?;
        let kernel = kernel.unsqueeze(0)?.broadcast_as((batch, groups, small, large * taps))?.contiguous()?;
        let rows = x.matmul(&kernel)?.reshape((batch * groups, positions, large, taps))?;
        let rows = rows.transpose(1, 2)?.reshape((batch * groups * large, positions * taps))?;
        // One place more, for what falls into the padding.
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
    function: &'static str,
    sizes: Sizes,
    weight: Weight,
    bias: Option<Weight>,
}

impl Convolution {
    /// Calls `f(group, small side, large side)` for each element of the batch and each group, with where they lie.
    fn each(&self, mut f: impl FnMut(usize, std::ops::Range<usize>, std::ops::Range<usize>)) {
        let Sizes { batch, groups, window, .. } = self.sizes;
        let (small, large) = self.sizes.of_group();
        let (small, large) = (small * window.positions(), large * window.size());
        for at in 0..batch * groups {
            f(at % groups, at * small..(at + 1) * small, at * large..(at + 1) * large);
        }
    }

    fn of_kernel(&self, group: usize) -> std::ops::Range<usize> {
        let (small, large) = self.sizes.of_group();
        let size = small * large * self.sizes.window.taps();
        group * size..(group + 1) * size
    }

    /// From the larger side to the smaller one.
    fn down(&self, from: &[f32], kernel: &[f32], to: &mut [f32]) {
        let (small, large) = self.sizes.of_group();
        let window = self.sizes.window;
        let (positions, width) = (window.positions(), large * window.taps());
        let mut rows = vec![0f32; positions * width];
        self.each(|group, of_small, of_large| {
            window.unfold(&from[of_large], large, &mut rows);
            let kernel = Mat::new(&kernel[self.of_kernel(group)], small, width);
            let rows = Mat::new(&rows, positions, width).t();
            product(MatMut::new(&mut to[of_small], small, positions), false, kernel, rows);
        });
    }

    /// From the smaller side to the larger one, which must be zero.
    fn up(&self, from: &[f32], kernel: &[f32], to: &mut [f32]) {
        let (small, large) = self.sizes.of_group();
        let window = self.sizes.window;
        let (positions, width) = (window.positions(), large * window.taps());
        let mut rows = vec![0f32; positions * width];
        self.each(|group, of_small, of_large| {
            let from = Mat::new(&from[of_small], small, positions).t();
            let kernel = Mat::new(&kernel[self.of_kernel(group)], small, width);
            product(MatMut::new(&mut rows, positions, width), false, from, kernel);
            window.fold(&rows, large, &mut to[of_large]);
        });
    }

    fn forward(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = x.dtype();
        let x = floats(x, layout)?;
        let shape = &self.sizes.shape;
        let mut y = vec![0f32; shape.elem_count()];
        {
            read!(kernel, self.weight.value()?);
            match self.sizes.transposed {
                true => self.up(&x, &kernel, &mut y),
                false => self.down(&x, &kernel, &mut y),
            }
        }
        if let Some(bias) = &self.bias {
            read!(bias, bias.value()?);
            let run: usize = shape.dims()[2..].iter().product();
            for (run, bias) in y.chunks_mut(run.max(1)).zip(bias.iter().cycle()) {
                run.iter_mut().for_each(|y| *y += bias);
            }
        }
        Ok((storage(y, dtype)?, shape.clone()))
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        read!(values, x);
        read!(grad, dy);
        let dx = if x.track_op() {
            let mut dx = vec![0f32; values.len()];
            read!(kernel, self.weight.value()?);
            match self.sizes.transposed {
                true => self.down(&grad, &kernel, &mut dx),
                false => self.up(&grad, &kernel, &mut dx),
            }
            Some(tensor(dx, x.shape(), x.dtype())?)
        } else {
            None
        };
        let (of_small, of_large) = if self.sizes.transposed { (&values, &grad) } else { (&grad, &values) };
        let dw = weight_grad(&self.weight, |buffer, accumulate| {
            if !accumulate {
                buffer.fill(0.0);
            }
            self.of_weight(of_small, of_large, buffer);
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

    /// Adds the kernel's gradient.
    fn of_weight(&self, of_small: &[f32], of_large: &[f32], to: &mut [f32]) {
        let (small, large) = self.sizes.of_group();
        let window = self.sizes.window;
        let (positions, width) = (window.positions(), large * window.taps());
        let mut rows = vec![0f32; positions * width];
        self.each(|group, at_small, at_large| {
            window.unfold(&of_large[at_large], large, &mut rows);
            let of_small = Mat::new(&of_small[at_small], small, positions);
            let to = MatMut::new(&mut to[self.of_kernel(group)], small, width);
            product(to, true, of_small, Mat::new(&rows, positions, width));
        });
    }
}

weighted_op!(Convolution);

/// A size of the smaller side: how often a kernel fits.
pub(super) fn places(
    function: &str,
    size: usize,
    kernel: usize,
    padding: usize,
    stride: usize,
    dilation: usize,
) -> Result<usize> {
    let padded = size + 2 * padding;
    let reach = dilation * kernel.saturating_sub(1) + 1;
    if stride == 0 || dilation == 0 || kernel == 0 || padded < reach {
        bail!(
            "{function}: a kernel of {kernel} with dilation {dilation} and stride {stride} does not fit an input of \
             {size} with padding {padding}"
        );
    }
    Ok((padded - reach) / stride + 1)
}

/// A size of a transposed convolution's output.
pub(super) fn unplaced(
    function: &str,
    places: usize,
    kernel: usize,
    [padding, output_padding]: [usize; 2],
    stride: usize,
    dilation: usize,
) -> Result<usize> {
    let whole = places.saturating_sub(1) * stride + dilation * kernel.saturating_sub(1) + output_padding + 1;
    if stride == 0 || dilation == 0 || kernel == 0 || places == 0 || whole <= 2 * padding {
        bail!(
            "{function}: a kernel of {kernel} with dilation {dilation}, stride {stride} and padding {padding} leaves \
             nothing of an input of {places}"
        );
    }
    Ok(whole - 2 * padding)
}
