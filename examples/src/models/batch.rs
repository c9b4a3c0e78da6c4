//! What a model learns from at once.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use fsdp_candle::Tensors;
use fsdp_candle::nn::Documents;

use crate::data::MicroBatch;

/// Contents of a batch's rows of tokens.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// Where documents lie packed in the rows, if they do.
    pub documents: Option<Documents>,
    /// The number of each row's tokens that are data, if padding follows them in any row.
    pub filled: Option<Arc<[usize]>>,
}

/// `Rows` holds no tensor.
impl Tensors for Rows {
    fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}

/// Sequences with what is to be predicted, as tensors.
#[derive(Clone)]
pub struct Batch {
    /// Token ids `[batch, time]`, u32.
    pub ids: Tensor,
    /// The id that follows each, or [`IGNORED`](fsdp_candle::nn::IGNORED), `[batch, time]`, u32.
    pub targets: Tensor,
    /// How many targets are not ignored.
    pub counted: u64,
    /// Contents of the rows.
    pub rows: Rows,
}

impl Batch {
    /// The tensors of what was read, in rows of `seq_len` tokens.
    ///
    /// # Errors
    /// When there is no memory on the device, or documents and rows differ.
    pub fn new(read: MicroBatch, seq_len: usize, device: &Device) -> Result<Self> {
        let MicroBatch { inputs, targets, counted, documents, filled } = read;
        let shape = (inputs.len() / seq_len, seq_len);
        Ok(Batch {
            ids: Tensor::from_vec(inputs, shape, device)?,
            // The host reads them, wherever the model is.
            targets: Tensor::from_vec(targets, shape, &Device::Cpu)?,
            counted,
            rows: Rows {
                documents: documents.map(Documents::new).transpose()?,
                filled: filled.iter().any(|&tokens| tokens < seq_len).then(|| filled.into()),
            },
        })
    }
}
