//! A table of vectors: backward adds rows to the parameter's own buffer.

use candle_core::{DType, Result, Tensor};

use super::super::weight::Weight;
use super::node::{Backward, Gradients, node};
use crate::kernels::add_rows;
use crate::storage::with_slice;

/// `found`, the table's rows for these ids, in the graph.
pub(in crate::nn) fn lookup(found: Tensor, weight: Weight, ids: &Tensor) -> Result<Tensor> {
    let place = weight.node().clone();
    node(&[&place], found, Lookup { weight, ids: words(ids)? })
}

/// As U32, whose largest number is no id.
fn words(ids: &Tensor) -> Result<Tensor> {
    let ids = ids.detach().flatten_all()?.contiguous()?;
    let words = ids.to_dtype(DType::U32)?;
    match ids.dtype() {
        DType::U8 => ids.eq(u8::MAX)?.where_cond(&words.ones_like()?.affine(f64::from(u32::MAX), 0.)?, &words),
        _ => Ok(words),
    }
}

struct Lookup {
    weight: Weight,
    ids: Tensor,
}

impl Backward for Lookup {
    fn name(&self) -> &'static str {
        "Embedding"
    }

    fn backward(&self, _: &Tensor, gradient: &Tensor) -> Result<Gradients> {
        if !self.weight.wants_grad() {
            return Ok([None, None, None]);
        }
        let width = gradient.dims().last().copied().unwrap_or(1);
        let gradient = gradient.detach().contiguous()?;
        let grad = self.weight.grad_in(|buffer, accumulate| {
            with_slice(&self.ids, |_, ids| {
                with_slice(&gradient, |_, rows| add_rows(ids, rows, buffer, accumulate, width))
            })
        })?;
        Ok([grad, None, None])
    }
}
