//! A bias behind a layer's output, in the output's memory.

use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Storage, Tensor, bail};

use super::super::cpu::values::{floats, read, served, small_weight_grad, storage};
use super::super::weight::Weight;
use super::affine::column_sums;
use crate::storage::take;

/// `y + bias` for a bias `[width]` and an output `[.., width]` that nobody else reads: its memory becomes the result's.
pub(super) fn add_bias(y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    if !served(y) || !y.is_contiguous() || y.layout().start_offset() != 0 {
        return y.broadcast_add(&Weight::in_graph(bias)?);
    }
    if y.dims().last() != Some(&bias.elem_count()) {
        bail!("Linear: the bias {:?} does not fit to the output {:?}", bias.dims(), y.dims());
    }
    let bias = Weight::of(bias)?;
    let node = bias.node().clone();
    let Storage::Cpu(memory) = take(y)? else { bail!("Linear: the output is not on the CPU") };
    y.apply_op2(&node, AddBias { output: Mutex::new(Some((memory, y.shape().clone()))), bias })
}

struct AddBias {
    output: Mutex<Option<(CpuStorage, Shape)>>,
    bias: Weight,
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
        for row in sum.chunks_exact_mut(bias.len().max(1)) {
            row.iter_mut().zip(bias.iter()).for_each(|(y, b)| *y += b);
        }
        Ok((storage(sum, dtype)?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d_bias = if self.bias.wants_grad() {
            read!(grad, dy);
            let width = dy.dims().last().copied().unwrap_or(1);
            small_weight_grad(&self.bias, &column_sums(&grad, width))?
        } else {
            None
        };
        Ok((Some(dy.clone()), d_bias))
    }
}
