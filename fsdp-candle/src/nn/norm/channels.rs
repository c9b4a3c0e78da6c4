//! A scale and a shift for each channel: `y = w x + b`, channels being dimension 1.
//!
//! `dx = w dy`; `dw` is the sum of `dy x` over the channel's elements, `db` that of `dy`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

use super::super::cpu::values::{floats, read, same_kind, served, small_weight_grad, storage, tensor};
use super::super::cpu::weighted_op::weighted_op;
use super::super::weight::Weight;

/// `x` `[batch, channels, ..]` scaled and shifted by `weight` and `bias`, `[channels]`.
pub(super) fn scale_and_shift(function: &'static str, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
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
    same_kind(function, ("the input", x), ("the bias", bias))?;
    if !served(x) {
        return composite(x, &Weight::in_graph(weight)?, &Weight::in_graph(bias)?);
    }
    let (weight, bias) = (Weight::of(weight)?, Weight::of(bias)?);
    let (weight_node, bias_node) = (weight.node().clone(), bias.node().clone());
    let run = x.dims()[2..].iter().product();
    x.apply_op3(&weight_node, &bias_node, Channels { function, weight, bias, run })
}

/// The same from Candle's operations.
pub(in crate::nn) fn composite(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; x.rank()];
    shape[1] = x.dim(1)?;
    x.broadcast_mul(&weight.reshape(shape.clone())?)?.broadcast_add(&bias.reshape(shape)?)
}

struct Channels {
    function: &'static str,
    weight: Weight,
    bias: Weight,
    /// Elements of a channel that follow each other.
    run: usize,
}

impl Channels {
    fn forward(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = x.dtype();
        let mut y = floats(x, layout)?.into_owned();
        read!(weight, self.weight.value()?);
        read!(bias, self.bias.value()?);
        for (run, (w, b)) in y.chunks_mut(self.run.max(1)).zip(weight.iter().zip(bias.iter()).cycle()) {
            run.iter_mut().for_each(|x| *x = x.mul_add(*w, *b));
        }
        Ok((storage(y, dtype)?, layout.shape().clone()))
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        read!(values, x);
        read!(grad, dy);
        let mut dx = grad.to_vec();
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
        let dx = tensor(dx, x.shape(), x.dtype())?;
        Ok([Some(dx), small_weight_grad(&self.weight, &dw)?, small_weight_grad(&self.bias, &db)?])
    }
}

weighted_op!(Channels);
