//! A rectifier with a slope that is learned (He et al., 2015, arXiv:1502.01852).
//!
//! `y = x` where `x > 0`, else `y = w x` with the weight of the element's channel; `dw` is the sum of `dy x` over the
//! channel's elements that are not positive.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::super::cpu::values::{floats, read, same_kind, served, small_weight_grad, storage, tensor};
use super::super::weight::{Weight, claim_on_host};

/// A PReLU layer, as [`candle_nn::PReLU`]: one weight, or one for each channel (dimension 1 of the input).
#[derive(Clone, Debug)]
pub struct PReLU {
    weight: Tensor,
    is_scalar: bool,
}

impl PReLU {
    /// A layer with this weight, of one element if `is_scalar`.
    pub fn new(weight: Tensor, is_scalar: bool) -> Self {
        claim_on_host(&weight);
        Self { weight, is_scalar }
    }

    /// The weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Whether all channels share one weight.
    pub fn is_scalar(&self) -> bool {
        self.is_scalar
    }

    /// The shape that the weight has to have to be broadcast over the input: with a place for each dimension.
    fn weight_shape(&self, x: &Tensor) -> Result<Vec<usize>> {
        let weights = self.weight.elem_count();
        let mut shape = vec![1; x.rank()];
        if self.is_scalar {
            if weights != 1 {
                bail!("PReLU: the weight {:?} must have one element", self.weight.dims());
            }
        } else if x.shape() == self.weight.shape() {
            shape = x.dims().to_vec();
        } else if x.rank() >= 2 {
            if x.dim(1)? != weights {
                bail!("PReLU: the input {:?} has {} channels, but {weights} weights", x.dims(), x.dim(1)?);
            }
            shape[1] = weights;
        } else if weights != 1 {
            bail!("PReLU: the input {:?} must have the weight's shape {:?}", x.dims(), self.weight.dims());
        }
        Ok(shape)
    }
}

impl Module for PReLU {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let shape = self.weight_shape(x)?;
        same_kind("PReLU", ("the input", x), ("the weight", &self.weight))?;
        if !served(x) {
            return composite(x, &Weight::in_graph(&self.weight)?.reshape(shape)?);
        }
        // Elements that share a weight lie in runs, and the runs of all weights follow each other.
        let run = x.dims().iter().zip(&shape).rev().take_while(|(_, kept)| **kept == 1).map(|(size, _)| size).product();
        let weight = Weight::of(&self.weight)?;
        let node = weight.node().clone();
        x.apply_op2(&node, Op { weight, run })
    }
}

/// The same from Candle's operations; the weight is of the input's rank.
pub(in crate::nn) fn composite(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let positive = x.gt(&x.zeros_like()?)?;
    positive.where_cond(x, &x.broadcast_mul(weight)?)
}

/// A [`PReLU`] from the tensor `weight` of `vs`, which starts as 0.25: for each of so many channels, or one for all.
pub fn prelu(num_channels: Option<usize>, vs: VarBuilder) -> Result<PReLU> {
    // One weight for all is a vector of length 1, as in PyTorch.
    let weight = vs.get_with_hints(num_channels.unwrap_or(1), "weight", Init::Const(0.25))?;
    Ok(PReLU::new(weight, num_channels.is_none()))
}

struct Op {
    weight: Weight,
    /// Elements that follow each other and share a weight.
    run: usize,
}

impl CustomOp2 for Op {
    fn name(&self) -> &'static str {
        "PReLU"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = x.dtype();
        let mut y = floats(x, layout)?.into_owned();
        read!(weight, self.weight.value()?);
        for (run, w) in y.chunks_mut(self.run.max(1)).zip(weight.iter().cycle()) {
            run.iter_mut().filter(|x| **x <= 0.0).for_each(|x| *x *= w);
        }
        Ok((storage(y, dtype)?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        read!(values, x);
        read!(grad, dy);
        let mut dx = grad.to_vec();
        let dw = {
            read!(weight, self.weight.value()?);
            let mut dw = vec![0f32; weight.len()];
            let run = self.run.max(1);
            for (i, (x, dx)) in values.chunks(run).zip(dx.chunks_mut(run)).enumerate() {
                let at = i % weight.len();
                for (x, dx) in x.iter().zip(dx).filter(|(x, _)| **x <= 0.0) {
                    dw[at] += x * *dx;
                    *dx *= weight[at];
                }
            }
            dw
        };
        Ok((Some(tensor(dx, x.shape(), x.dtype())?), small_weight_grad(&self.weight, &dw)?))
    }
}
