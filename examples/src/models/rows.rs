//! The rows of a batch: packed documents, padding, and the ranks that share them.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use fsdp_candle::nn::Documents;
use fsdp_candle::{ContextParallel, Tensors};

/// Contents of the rows of a batch.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// Positions of packed documents, if the rows hold any.
    pub documents: Option<Documents>,
    /// Number of data tokens in each row, if padding follows them in any row.
    pub filled: Option<Arc<[usize]>>,
    /// Index of each row's last token, for models that classify it.
    pub last: Option<Arc<[usize]>>,
    /// Segment type of each token, row after row, if any is not 0. Only BERT has them.
    pub types: Option<Arc<[u32]>>,
    /// Ranks that share the rows, if there are several. Then token ids and targets are this rank's part, and everything
    /// else here is of whole rows.
    pub context: Option<ContextParallel>,
}

impl Rows {
    /// Runs a forward on this rank's part of the rows.
    pub(super) fn run<T>(&self, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        match &self.context {
            Some(context) => context.run(forward),
            None => forward(),
        }
    }

    /// Returns the number of ranks that share the rows.
    pub(super) fn ranks(&self) -> usize {
        self.context.as_ref().map_or(1, |context| context.group().size())
    }

    /// Returns this rank's part along a dimension of tokens.
    pub(crate) fn own(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        match &self.context {
            Some(context) => context.split(x, dim),
            None => Ok(x.clone()),
        }
    }

    /// Returns the whole rows of which this rank has a part, `[B, T, ..]`.
    pub(super) fn whole(&self, x: Tensor) -> Result<Tensor> {
        match &self.context {
            Some(context) => context.gather(&x, 1),
            None => Ok(x),
        }
    }

    /// Returns the sum of the ranks' tensors.
    pub(super) fn sum(&self, x: Tensor) -> Result<Tensor> {
        match &self.context {
            Some(context) => context.sum(&x),
            None => Ok(x),
        }
    }

    /// Returns the position of each of this rank's tokens: `[B, T]` with documents, else `[T]`, u32. A rank has `steps`
    /// tokens of a row.
    pub(super) fn position_ids(&self, steps: usize, device: &Device) -> Result<Tensor> {
        match &self.documents {
            Some(documents) => self.own(&documents.position_ids(device)?, 1),
            None => self.own(&Tensor::arange(0u32, (steps * self.ranks()) as u32, device)?, 0),
        }
    }
}

/// `Rows` holds no tensors.
impl Tensors for Rows {
    fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}
