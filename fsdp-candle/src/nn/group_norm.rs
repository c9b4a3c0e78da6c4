//! Group normalization (Wu and He, 2018, arXiv:1803.08494): `candle_nn::group_norm`.

use candle_core::{DType, Module, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::batch_norm::scale_and_shift;
use super::empty::if_empty;
use super::weight::{Weight, register_cpu_layer};

/// Normalization of each group of channels, as [`candle_nn::GroupNorm`]: weight and bias `[channels]`, input and output
/// `[batch, channels, ..]`.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::GroupNorm;
///
/// let (ones, zeros) = (Tensor::new(&[1f32, 1.], &Device::Cpu)?, Tensor::new(&[0f32, 0.], &Device::Cpu)?);
/// let norm = GroupNorm::new(ones, zeros, 2, 1, 0.0)?;
/// let y = norm.forward(&Tensor::new(&[[[3f32], [5.]]], &Device::Cpu)?)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [-1., 1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
    num_channels: usize,
    num_groups: usize,
}

impl GroupNorm {
    /// Returns a layer with this weight and bias. `eps` is added to the variance. Fails if the groups do not divide the
    /// channels.
    pub fn new(weight: Tensor, bias: Tensor, num_channels: usize, num_groups: usize, eps: f64) -> Result<Self> {
        if num_groups == 0 || !num_channels.is_multiple_of(num_groups) {
            bail!("GroupNorm: {num_groups} groups must divide {num_channels} channels");
        }
        [&weight, &bias].into_iter().for_each(register_cpu_layer);
        Ok(Self { weight, bias, eps, num_channels, num_groups })
    }
}

impl Module for GroupNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if x.rank() < 3 || x.dim(1)? != self.num_channels {
            bail!("GroupNorm: the input {:?} must be [batch, {}, ..]", x.dims(), self.num_channels);
        }
        if x.elem_count() == 0 {
            let (weight, bias) = (Weight::in_graph(&self.weight)?, Weight::in_graph(&self.bias)?);
            if let Some(empty) = if_empty("GroupNorm", x, &[x, &weight, &bias], x.shape())? {
                return Ok(empty);
            }
        }
        let dtype = x.dtype();
        let wide = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
        let groups = x.to_dtype(wide)?.reshape((x.dim(0)?, self.num_groups, ()))?;
        let centered = groups.broadcast_sub(&groups.mean_keepdim(2)?)?;
        let deviation = (centered.sqr()?.mean_keepdim(2)? + self.eps)?.sqrt()?;
        let normed = centered.broadcast_div(&deviation)?.reshape(x.shape())?.to_dtype(dtype)?;
        scale_and_shift("GroupNorm", &normed, &self.weight, &self.bias)
    }
}

/// Returns a [`GroupNorm`] from the tensors `weight` and `bias` of `vb`, which start as one and zero.
pub fn group_norm(num_groups: usize, num_channels: usize, eps: f64, vb: VarBuilder) -> Result<GroupNorm> {
    let weight = vb.get_with_hints(num_channels, "weight", Init::Const(1.))?;
    let bias = vb.get_with_hints(num_channels, "bias", Init::Const(0.))?;
    GroupNorm::new(weight, bias, num_channels, num_groups, eps)
}
