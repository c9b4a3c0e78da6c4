//! A bias behind a layer's output, in the output's memory.

use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, D, Layout, Result, Shape, Storage, Tensor, bail};

use super::super::cpu::values::{floats, read, served, small_weight_grad, storage};
use super::super::weight::Weight;
use super::affine::column_sums;
use crate::storage::take;

/// `y + bias[first..first + width]` for a bias `[outputs]` and an output `[.., width]` that nobody else reads: its
/// memory becomes the result's. The rest of the bias gets a gradient of zeros.
pub(super) fn add_bias(y: &Tensor, bias: &Tensor, first: usize) -> Result<Tensor> {
    let (width, outputs) = (y.dim(D::Minus1)?, bias.dim(0)?);
    if !(served(y) && y.is_contiguous() && y.layout().start_offset() == 0) {
        return y.broadcast_add(&Weight::in_graph(bias)?.narrow(0, first, width)?);
    }
    let bias = Weight::of(bias)?;
    let node = bias.node().clone();
    let Storage::Cpu(memory) = take(y)? else { bail!("Linear: the output is not on the CPU") };
    y.apply_op2(&node, AddBias { output: Mutex::new(Some((memory, y.shape().clone()))), bias, first, width, outputs })
}

struct AddBias {
    output: Mutex<Option<(CpuStorage, Shape)>>,
    bias: Weight,
    /// The first of the bias that is added, how many are, and how many there are.
    first: usize,
    width: usize,
    outputs: usize,
}

impl CustomOp2 for AddBias {
    fn name(&self) -> &'static str {
        "add_bias"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((output, shape)) = self.output.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            bail!("add_bias ran twice")
        };
        read!(bias, self.bias.value()?);
        let dtype = output.dtype();
        let mut sum = match output {
            CpuStorage::F32(values) => values,
            half => floats(&half, &Layout::contiguous(&shape))?.into_owned(),
        };
        let bias = &bias[self.first..self.first + self.width];
        for row in sum.chunks_exact_mut(self.width.max(1)) {
            row.iter_mut().zip(bias.iter()).for_each(|(y, b)| *y += b);
        }
        Ok((storage(sum, dtype)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d_bias = if self.bias.wants_grad() {
            read!(grad, dy);
            let mut d_bias = vec![0f32; self.outputs];
            d_bias[self.first..self.first + self.width].copy_from_slice(&column_sums(&grad, self.width));
            small_weight_grad(&self.bias, &d_bias)?
        } else {
            None
        };
        Ok((Some(dy.clone()), d_bias))
    }
}
