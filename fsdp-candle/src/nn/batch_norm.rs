//! Batch normalization (Ioffe and Szegedy, 2015, arXiv:1502.03167): `candle_nn::batch_norm`.
//!
//! The running statistics are buffers: every rank has them whole, and no optimizer sees them
//! ([`ShardedVarMap::buffers`](crate::ShardedVarMap::buffers)).
//!
//! In training, each channel (dimension 1) of `n` elements has a mean `m` and `r = 1 / sqrt(mean((x - m)^2) + eps)`, and
//! `y = w h + b` with `h = (x - m) r`. With sums over the channel: `db = sum(dy)`, `dw = sum(dy h)`, and
//! `dx = w r (dy - db / n - h dw / n)`. In evaluation, m and r are constants.

use candle_core::{DType, ModuleT, Result, Storage, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder};

pub use candle_nn::BatchNormConfig;

use super::cpu::simd::{dot, kernel, sum, sum_squares};
use super::cpu::{map_rows, read, same_kind, small_weight_grad, storage, tensor_like, to_vec};
use super::weight::{Weight, has_cpu_kernels, register_cpu_layer};
use crate::graph::{Reads, graph_op};

/// Normalization of each channel over the batch, as [`candle_nn::BatchNorm`]: running statistics, weight and bias
/// `[channels]`, input and output `[batch, channels, ..]`.
///
/// ```
/// use candle_core::{DType, Device, ModuleT, Tensor};
/// use fsdp_candle::nn::BatchNorm;
///
/// let at = |value: f32| Tensor::full(value, 1, &Device::Cpu);
/// let norm = BatchNorm::new_no_bias(1, at(0.)?, at(1.)?, 0.0)?;
/// let x = Tensor::new(&[[2f32], [4.]], &Device::Cpu)?;
/// assert_eq!(norm.forward_t(&x, true)?.flatten_all()?.to_vec1::<f32>()?, [-1., 1.]);
/// assert!((norm.running_mean().to_vec1::<f32>()?[0] - 0.3).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BatchNorm {
    running_mean: Var,
    running_var: Var,
    weight_and_bias: Option<(Tensor, Tensor)>,
    remove_mean: bool,
    eps: f64,
    momentum: f64,
}

impl BatchNorm {
    /// Returns a layer with a momentum of 0.1. Fails if a shape is not `[num_features]`, or `eps` or `momentum` is out
    /// of range.
    pub fn new(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
    ) -> Result<Self> {
        Self::of(num_features, running_mean, running_var, Some((weight, bias)), eps, 0.1)
    }

    /// Returns a layer without weight and bias, with a momentum of 0.1. Errors: see [`BatchNorm::new`].
    pub fn new_no_bias(num_features: usize, running_mean: Tensor, running_var: Tensor, eps: f64) -> Result<Self> {
        Self::of(num_features, running_mean, running_var, None, eps, 0.1)
    }

    /// Returns a layer whose running statistics become `running (1 - momentum) + batch momentum`. Errors: see
    /// [`BatchNorm::new`].
    pub fn new_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        Self::of(num_features, running_mean, running_var, Some((weight, bias)), eps, momentum)
    }

    /// [`BatchNorm::new_with_momentum`] without weight and bias.
    pub fn new_no_bias_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        Self::of(num_features, running_mean, running_var, None, eps, momentum)
    }

    fn of(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight_and_bias: Option<(Tensor, Tensor)>,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        if eps < 0. || !(0.0..=1.0).contains(&momentum) {
            bail!("BatchNorm: eps is {eps} and may not be negative, momentum is {momentum} and must be 0 to 1");
        }
        let weights = weight_and_bias.iter().flat_map(|(weight, bias)| [("weight", weight), ("bias", bias)]);
        for (what, tensor) in
            [("running mean", &running_mean), ("running variance", &running_var)].into_iter().chain(weights)
        {
            if tensor.dims() != [num_features] {
                bail!("BatchNorm: the {what} {:?} must be [{num_features}]", tensor.dims());
            }
        }
        weight_and_bias.iter().flat_map(|(weight, bias)| [weight, bias]).for_each(register_cpu_layer);
        Ok(Self {
            running_mean: Var::from_tensor(&running_mean)?,
            running_var: Var::from_tensor(&running_var)?,
            weight_and_bias,
            remove_mean: true,
            eps,
            momentum,
        })
    }

    /// Returns the running mean of each channel.
    pub fn running_mean(&self) -> &Tensor {
        self.running_mean.as_tensor()
    }

    /// Returns the running variance of each channel.
    pub fn running_var(&self) -> &Tensor {
        self.running_var.as_tensor()
    }

    /// Returns the number that is added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Returns weight and bias, if the layer has them.
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// Returns the share of a batch in the running statistics.
    pub fn momentum(&self) -> f64 {
        self.momentum
    }

    /// Normalizes by the batch's statistics, and updates the running statistics. Fails if the input is not `[batch,
    /// channels, ..]`.
    pub fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        self.check(x)?;
        if has_cpu_kernels(x) { self.fused(x) } else { self.composite(x) }
    }

    /// The training forward as one operation on the CPU.
    fn fused(&self, x: &Tensor) -> Result<Tensor> {
        let affine = match &self.weight_and_bias {
            None => None,
            Some((weight, bias)) => {
                check_affine("BatchNorm", x, weight, bias)?;
                Some((Weight::of(weight)?, Weight::of(bias)?))
            }
        };
        let arguments = match &affine {
            Some((weight, bias)) => weight.arguments(x, Some(bias)),
            None => vec![x.clone()],
        };
        let (channels, run) = (x.dim(1)?, x.dims()[2..].iter().product());
        read!(values, x);
        let statistics = Statistics::of(&values, channels, run, self.eps, self.remove_mean);
        if self.remove_mean {
            let mean = Tensor::new(of_each_channel(&statistics.of_channels, 0), x.device())?;
            self.update(&self.running_mean, &mean, self.momentum)?;
        }
        let variance = Tensor::new(of_each_channel(&statistics.of_channels, 1), x.device())?;
        let count = (values.len() / channels.max(1)) as f64;
        self.update(&self.running_var, &variance, self.momentum * count / (count - 1.0))?;
        let norm = BatchNormalization { affine, statistics };
        let y = storage(norm.forward(&values)?, x.dtype())?;
        graph_op("BatchNorm", &arguments, y, x.shape(), Reads::Sources, move |x, _, dy| norm.backward(x[0], dy))
    }

    fn update(&self, running: &Var, batch: &Tensor, share: f64) -> Result<()> {
        let batch = batch.detach().flatten_all()?.to_dtype(running.dtype())?;
        running.set(&((running.as_detached_tensor() * (1.0 - self.momentum))? + (batch * share)?)?)
    }

    /// The training forward as a chain of Candle's operations.
    fn composite(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = x.dtype();
        let wide = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
        // One row for each channel.
        let by_channel = x.to_dtype(wide)?.transpose(0, 1)?;
        let shape = by_channel.dims().to_vec();
        let mut rows = by_channel.flatten_from(1)?.contiguous()?;
        if self.remove_mean {
            let mean = rows.mean_keepdim(1)?;
            self.update(&self.running_mean, &mean, self.momentum)?;
            rows = rows.broadcast_sub(&mean)?;
        }
        let variance = rows.sqr()?.mean_keepdim(1)?;
        let count = rows.dim(1)? as f64;
        self.update(&self.running_var, &variance, self.momentum * count / (count - 1.0))?;
        let normed = rows.broadcast_div(&(variance + self.eps)?.sqrt()?)?;
        self.affine(normed.reshape(shape)?.transpose(0, 1)?.to_dtype(dtype)?)
    }

    fn forward_eval(&self, x: &Tensor) -> Result<Tensor> {
        self.check(x)?;
        let mut shape = vec![1; x.rank()];
        shape[1] = x.dim(1)?;
        let mean = self.running_mean.as_detached_tensor().reshape(shape.clone())?;
        let deviation = (self.running_var.as_detached_tensor().reshape(shape)? + self.eps)?.sqrt()?;
        self.affine(x.broadcast_sub(&mean)?.broadcast_div(&deviation)?)
    }

    fn check(&self, x: &Tensor) -> Result<()> {
        let channels = self.running_mean.dim(0)?;
        if x.rank() < 2 || x.dim(1)? != channels {
            bail!("BatchNorm: the input {:?} must be [batch, {channels}, ..]", x.dims());
        }
        Ok(())
    }

    fn affine(&self, normed: Tensor) -> Result<Tensor> {
        match &self.weight_and_bias {
            None => Ok(normed),
            Some((weight, bias)) => scale_and_shift("BatchNorm", &normed, weight, bias),
        }
    }
}

impl ModuleT for BatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if train { self.forward_train(x) } else { self.forward_eval(x) }
    }
}

/// Returns a [`BatchNorm`] from the tensors `running_mean`, `running_var`, `weight` and `bias` of `vb`, which start as
/// 0, 1, 1 and 0. A number as config is the epsilon. Fails if `eps` or `momentum` is out of range, or a tensor cannot
/// be created.
pub fn batch_norm<C: Into<BatchNormConfig>>(num_features: usize, config: C, vb: VarBuilder) -> Result<BatchNorm> {
    let BatchNormConfig { eps, remove_mean, affine, momentum } = config.into();
    let get = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
    let (mean, variance) = (get("running_mean", 0.)?, get("running_var", 1.)?);
    let weight_and_bias =
        affine.then(|| Ok::<_, candle_core::Error>((get("weight", 1.)?, get("bias", 0.)?))).transpose()?;
    Ok(BatchNorm { remove_mean, ..BatchNorm::of(num_features, mean, variance, weight_and_bias, eps, momentum)? })
}

/// Scales and shifts the channels of `x` `[batch, channels, ..]` by `weight` and `bias`, `[channels]`.
pub(super) fn scale_and_shift(function: &'static str, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    check_affine(function, x, weight, bias)?;
    if !has_cpu_kernels(x) {
        return composite(x, &Weight::in_graph(weight)?, &Weight::in_graph(bias)?);
    }
    let (weight, bias) = (Weight::of(weight)?, Weight::of(bias)?);
    let arguments = weight.arguments(x, Some(&bias));
    let channels = Channels { weight, bias, run: x.dims()[2..].iter().product() };
    graph_op(function, &arguments, channels.forward(x)?, x.shape(), Reads::Sources, move |x, _, dy| {
        channels.backward(x[0], dy)
    })
}

/// Fails unless weight and bias are of the input's channels, dtype and device.
fn check_affine(function: &str, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<()> {
    let channels = x.dim(1)?;
    if weight.dims() != [channels] || bias.dims() != [channels] {
        bail!(
            "{function}: the input {:?} has {channels} channels, but the weight is {:?} and the bias {:?}",
            x.dims(),
            weight.dims(),
            bias.dims()
        );
    }
    same_kind(function, ("the input", x), ("the weight", weight))?;
    same_kind(function, ("the input", x), ("the bias", bias))
}

/// The scale and shift as a chain of Candle's operations.
fn composite(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; x.rank()];
    shape[1] = x.dim(1)?;
    x.broadcast_mul(&weight.reshape(shape.clone())?)?.broadcast_add(&bias.reshape(shape)?)
}

struct Channels {
    weight: Weight,
    bias: Weight,
    /// Number of successive elements of a channel.
    run: usize,
}

impl Channels {
    fn forward(&self, x: &Tensor) -> Result<Storage> {
        let mut y = to_vec(x)?;
        read!(weight, self.weight.value()?);
        read!(bias, self.bias.value()?);
        for (run, (w, b)) in y.chunks_mut(self.run.max(1)).zip(weight.iter().zip(bias.iter()).cycle()) {
            scale_and_shift_run(run, *w, *b);
        }
        storage(y, x.dtype())
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        read!(values, x);
        let mut dx = to_vec(dy)?;
        let run = self.run.max(1);
        let (dw, db) = {
            read!(weight, self.weight.value()?);
            let (mut dw, mut db) = (vec![0f32; weight.len()], vec![0f32; weight.len()]);
            for (i, (x, dx)) in values.chunks(run).zip(dx.chunks_mut(run)).enumerate() {
                let at = i % weight.len();
                for (x, dx) in x.iter().zip(dx) {
                    dw[at] += x * *dx;
                    db[at] += *dx;
                    *dx *= weight[at];
                }
            }
            (dw, db)
        };
        Ok([Some(tensor_like(dx, x)?), small_weight_grad(&self.weight, &dw)?, small_weight_grad(&self.bias, &db)?])
    }
}

/// Statistics of the channels of a batch.
struct Statistics {
    /// Mean and variance of each channel.
    of_channels: Vec<f32>,
    channels: usize,
    /// Number of successive elements of a channel.
    run: usize,
    eps: f64,
    centered: bool,
}

impl Statistics {
    fn of(x: &[f32], channels: usize, run: usize, eps: f64, centered: bool) -> Self {
        let mut of_channels = vec![0f32; 2 * channels];
        map_rows(&mut of_channels, 2, x.len() / channels.max(1), |first, rows| {
            measure(rows, first, x, channels, run, centered);
        });
        Statistics { of_channels, channels, run, eps, centered }
    }

    /// Returns the mean of a channel, and 1 / sqrt(variance + eps).
    fn of_channel(&self, channel: usize) -> (f32, f32) {
        let [mean, variance] = [self.of_channels[2 * channel], self.of_channels[2 * channel + 1]];
        (mean, (1.0 / (f64::from(variance) + self.eps).sqrt()) as f32)
    }

    /// Calls `f(channel, run of out, position of the run)` for each run.
    fn map_runs(&self, out: &mut [f32], f: impl Fn(usize, &mut [f32], usize) + Sync) {
        let run = self.run.max(1);
        map_rows(out, run, run, |first, runs| {
            for (i, out) in runs.chunks_mut(run).enumerate() {
                f((first + i) % self.channels, out, (first + i) * run);
            }
        });
    }
}

/// Normalization of the channels of a batch, with weight and bias if it has them.
struct BatchNormalization {
    affine: Option<(Weight, Weight)>,
    statistics: Statistics,
}

impl BatchNormalization {
    fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        let of_channels = |part: fn(&(Weight, Weight)) -> &Weight, otherwise: f32| match &self.affine {
            Some(affine) => to_vec(part(affine).value()?),
            None => Ok(vec![otherwise; self.statistics.channels]),
        };
        let (weight, bias) = (of_channels(|affine| &affine.0, 1.0)?, of_channels(|affine| &affine.1, 0.0)?);
        let mut y = vec![0f32; x.len()];
        self.statistics.map_runs(&mut y, |channel, y, at| {
            let (mean, scale) = self.statistics.of_channel(channel);
            normalize_run(y, &x[at..at + y.len()], mean, scale * weight[channel], bias[channel]);
        });
        Ok(y)
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let statistics = &self.statistics;
        let Statistics { channels, run, centered, .. } = *statistics;
        read!(values, x);
        read!(grad, dy);
        // The sums of dy and of dy h of each channel.
        let mut sums = vec![0f32; 2 * channels];
        map_rows(&mut sums, 2, values.len() / channels.max(1), |first, rows| {
            for (i, sums) in rows.chunks_mut(2).enumerate() {
                let (mean, scale) = statistics.of_channel(first + i);
                sums_back(sums, first + i, &values, &grad, channels, run, mean);
                sums[1] *= scale;
            }
        });
        let weight = self.affine.as_ref().map(|(weight, _)| to_vec(weight.value()?)).transpose()?;
        let count = (values.len() / channels.max(1)) as f32;
        let mut dx = vec![0f32; values.len()];
        statistics.map_runs(&mut dx, |channel, dx, at| {
            let (mean, scale) = statistics.of_channel(channel);
            let of_dy = if centered { sums[2 * channel] / count } else { 0.0 };
            let of_h = sums[2 * channel + 1] / count * scale;
            let weight = weight.as_ref().map_or(1.0, |weight| weight[channel]);
            let runs = at..at + dx.len();
            normalize_run_back(dx, &values[runs.clone()], &grad[runs], [mean, scale * weight, of_dy, of_h]);
        });
        let [dw, db] = match &self.affine {
            None => [None, None],
            Some((weight, bias)) => {
                let [db, dw] = [0, 1].map(|of| of_each_channel(&sums, of));
                [small_weight_grad(weight, &dw)?, small_weight_grad(bias, &db)?]
            }
        };
        Ok([Some(tensor_like(dx, x)?), dw, db])
    }
}

/// Returns the first (0) or the second (1) of each channel's two numbers.
fn of_each_channel(pairs: &[f32], which: usize) -> Vec<f32> {
    pairs.iter().skip(which).step_by(2).copied().collect()
}

/// Returns the runs of a channel.
#[inline(always)]
fn runs_of(x: &[f32], channel: usize, channels: usize, run: usize) -> impl Iterator<Item = &[f32]> {
    x.chunks_exact(run.max(1)).skip(channel).step_by(channels)
}

/// Runs below this length have their elements added one by one.
const SHORT: usize = 32;

kernel! {
    /// Writes mean (0 unless `centered`) and variance of the channels from `first` on.
    fn measure(of_channels: &mut [f32], first: usize, x: &[f32], channels: usize, run: usize, centered: bool) {
        let count = (x.len() / channels) as f64;
        for (i, statistics) in of_channels.chunks_exact_mut(2).enumerate() {
            let runs = || runs_of(x, first + i, channels, run);
            let total = |run: &[f32]| match run.len() < SHORT {
                true => run.iter().map(|&x| f64::from(x)).sum(),
                false => f64::from(sum(run)),
            };
            let mean = if centered { (runs().map(total).sum::<f64>() / count) as f32 } else { 0.0 };
            let squares = |run: &[f32]| match run.len() < SHORT {
                true => run.iter().map(|&x| f64::from((x - mean) * (x - mean))).sum(),
                false => f64::from(sum_squares(run, mean)),
            };
            statistics[0] = mean;
            statistics[1] = (runs().map(squares).sum::<f64>() / count) as f32;
        }
    }

    fn scale_and_shift_run(run: &mut [f32], scale: f32, shift: f32) {
        run.iter_mut().for_each(|x| *x = x.mul_add(scale, shift));
    }

    fn normalize_run(y: &mut [f32], x: &[f32], mean: f32, scale: f32, bias: f32) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = (x - mean).mul_add(scale, bias);
        }
    }

    /// Writes the sums of dy and of dy (x - mean) of a channel.
    fn sums_back(sums: &mut [f32], channel: usize, x: &[f32], dy: &[f32], channels: usize, run: usize, mean: f32) {
        let (mut of_dy, mut of_products) = (0f64, 0f64);
        for (x, dy) in runs_of(x, channel, channels, run).zip(runs_of(dy, channel, channels, run)) {
            if x.len() < SHORT {
                for (&x, &dy) in x.iter().zip(dy) {
                    of_dy += f64::from(dy);
                    of_products += f64::from(dy * (x - mean));
                }
            } else {
                of_dy += f64::from(sum(dy));
                of_products += f64::from(dot(dy, x, mean));
            }
        }
        (sums[0], sums[1]) = (of_dy as f32, of_products as f32);
    }

    fn normalize_run_back(dx: &mut [f32], x: &[f32], dy: &[f32], of_channel: [f32; 4]) {
        let [mean, scale, of_dy, of_h] = of_channel;
        for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = scale * (dy - of_dy - (x - mean) * of_h);
        }
    }
}
