//! What a model learns from at once.

use candle_core::{Device, Result, Tensor};
use fsdp_candle::nn::Documents;

use crate::data::MicroBatch;

/// Sequences with what is to be predicted, as tensors.
#[derive(Clone)]
pub struct Batch {
    /// Token ids `[batch, time]`, u32.
    pub ids: Tensor,
    /// The id that follows each, or [`IGNORED`](fsdp_candle::nn::IGNORED), `[batch, time]`, u32.
    pub targets: Tensor,
    /// How many targets are not ignored.
    pub counted: u64,
    /// Where documents lie packed in the rows, if they do.
    pub documents: Option<Documents>,
}

impl Batch {
    /// The tensors of what was read, in rows of `seq_len` tokens.
    ///
    /// # Errors
    /// When there is no memory on the device, or documents and rows differ.
    pub fn new(read: MicroBatch, seq_len: usize, device: &Device) -> Result<Self> {
        let MicroBatch { inputs, targets, counted, documents } = read;
        let shape = (inputs.len() / seq_len, seq_len);
        Ok(Batch {
            ids: Tensor::from_vec(inputs, shape, device)?,
            // The host reads them, wherever the model is.
            targets: Tensor::from_vec(targets, shape, &Device::Cpu)?,
            counted,
            documents: documents.map(Documents::new).transpose()?,
        })
    }
}
