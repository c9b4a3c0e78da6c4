//! The trait of an engine, which computes attention on one kind of device, and the layout of its operands.

use std::ops::Range;

use candle_core::{DType, Result, Storage, Tensor};

use super::documents::Documents;
use super::options::AttentionOptions;
use crate::context_parallel::Positions;
use crate::random::Mask;

/// The computation of attention on one kind of device.
pub(super) trait Engine: Send + Sync + 'static {
    /// Returns the output `[batch, T, n_heads * D]` in the operands' dtype, and the logarithms of the sums `[batch, n_heads,
    /// T]`, F64 for F64 and else F32. The operands are q, k and v, or one tensor that holds all three.
    fn forward(&self, dims: &AttentionDims, operands: &[&Tensor]) -> Result<(Storage, Tensor)>;

    /// Returns the gradients of the operands, given the output and its gradient, and the logarithms of the sums.
    fn backward(
        &self,
        dims: &AttentionDims,
        operands: &[&Tensor],
        outputs: [&Tensor; 2],
        log_sums: &Tensor,
    ) -> Result<Vec<Option<Tensor>>>;
}

/// The dimensions of an attention. `queries` and `keys` count positions.
#[derive(Clone)]
pub(super) struct AttentionDims {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) dim: usize,
    /// Dtype of the operands.
    pub(super) dtype: DType,
    pub(super) options: AttentionOptions,
    /// Where the queries are among the keys.
    pub(super) positions: Positions,
    pub(super) documents: Option<Documents>,
    /// Dropout mask of the probabilities `[batch, n_heads, T, S]`.
    pub(super) mask: Option<Mask>,
}

/// The layout of one operand's heads in its buffer: batch by batch, with a row for each position.
#[derive(Clone, Copy)]
pub(super) struct HeadLayout {
    pub(super) offset: usize,
    pub(super) batch_stride: usize,
    pub(super) row_stride: usize,
}

impl HeadLayout {
    /// Returns the index of the first element of a head at a position.
    pub(super) fn index(&self, batch: usize, position: usize, head: usize, dim: usize) -> usize {
        self.offset + batch * self.batch_stride + position * self.row_stride + head * dim
    }
}

impl AttentionDims {
    /// Returns the dimensions of the attention of some heads, which look at key heads `kv_heads`.
    pub(super) fn of_heads(&self, heads: &Range<usize>, kv_heads: &Range<usize>) -> Self {
        let mask = self.mask.map(|mask| mask.of_planes(heads));
        AttentionDims { n_heads: heads.len(), n_kv_heads: kv_heads.len(), mask, ..self.clone() }
    }

    /// Returns the layouts of q, k and v in separate tensors, or in one.
    pub(super) fn layouts(&self, operands: &[&Tensor]) -> [HeadLayout; 3] {
        if operands.len() == 1 { self.packed_layouts() } else { self.separate_layouts() }
    }

    /// Returns the layouts of q, k and v as separate tensors.
    pub(super) fn separate_layouts(&self) -> [HeadLayout; 3] {
        let layout = |steps: usize, heads: usize| HeadLayout {
            offset: 0,
            batch_stride: steps * heads * self.dim,
            row_stride: heads * self.dim,
        };
        let kv = layout(self.keys, self.n_kv_heads);
        [layout(self.queries, self.n_heads), kv, kv]
    }

    /// Returns the layouts of q, k and v in one tensor.
    fn packed_layouts(&self) -> [HeadLayout; 3] {
        let row_stride = (self.n_heads + 2 * self.n_kv_heads) * self.dim;
        let layout =
            |head: usize| HeadLayout { offset: head * self.dim, batch_stride: self.queries * row_stride, row_stride };
        [layout(0), layout(self.n_heads), layout(self.n_heads + self.n_kv_heads)]
    }
}
