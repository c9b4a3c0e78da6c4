//! Decoders of the families that [`super::config::fields`] names, with the parameter names of Hugging Face's
//! `LlamaForCausalLM` and its like.
//!
//! In shapes, B is the batch, T the time, C the width of the residual stream.

mod attention;
mod block;
mod experts;
mod mlp;
mod norm;
mod rope;

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::{Embedding, Linear};
use fsdp_core::ProcessGroup;

pub use block::Block;
use norm::Norm;
pub use rope::Turns;

use super::batch::Rows;
use super::config::DecoderConfig;
use super::dropout::Drops;
use super::layer::Layer;
use super::linear::linear;
use super::parallel::TensorParallel;

/// How the model calls its blocks.
pub trait CallBlock {
    /// The residual stream behind the block, and what its experts say for the loss that keeps them equally busy.
    ///
    /// # Errors
    /// Those of the layers.
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)>;
}

/// As it is: a unit by its name, or none.
impl CallBlock for Layer<Block> {
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)> {
        self.run(input, Block::forward)
    }
}

/// As a unit.
impl CallBlock for FsdpModule<Layer<Block>> {
    fn call_block(&self, input: (Tensor, Rows)) -> Result<(Tensor, Option<Tensor>)> {
        self.call_with(input, Layer::call_block)
    }
}

/// The whole model around its blocks.
pub struct Decoder<B = FsdpModule<Layer<Block>>> {
    embedding: Embedding,
    embedding_scale: Option<f64>,
    blocks: Vec<B>,
    norm: Norm,
    head: Linear,
    logit_softcap: Option<f64>,
    /// The coefficient of the experts' loss.
    auxiliary: f64,
    drops: Drops,
    parallel: Option<TensorParallel>,
}

impl<B: CallBlock> Decoder<B> {
    /// Asks `vb` for the parameters outside the blocks, whose layers several ranks may compute together.
    ///
    /// # Errors
    /// When a parameter can't be initialised.
    pub fn new(
        config: &DecoderConfig,
        blocks: Vec<B>,
        drops: Drops,
        parallel: Option<&TensorParallel>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let (width, stdev) = (config.width, config.initializer_range);
        let normal = Init::Randn { mean: 0., stdev };
        let embedding = vb.pp("model.embed_tokens").get_with_hints((config.vocabulary, width), "weight", normal)?;
        let head = match config.tied {
            true => Linear::new(embedding.clone(), None),
            false => linear(width, config.vocabulary, false, stdev, vb.pp("lm_head"))?,
        };
        Ok(Decoder {
            embedding: Embedding::new(embedding, width).with_padding_idx(config.padding)?,
            embedding_scale: config.embedding_scale,
            blocks,
            norm: Norm::new(width, config.norms, vb.pp("model.norm"))?,
            head,
            logit_softcap: config.logit_softcap,
            auxiliary: config.experts.as_ref().and_then(|experts| experts.auxiliary).unwrap_or(0.),
            drops,
            parallel: parallel.cloned(),
        })
    }

    pub(super) fn drops(&self) -> &Drops {
        &self.drops
    }

    /// The blocks, in forward order.
    pub fn blocks(&self) -> &[B] {
        &self.blocks
    }

    /// The ranks of which each has the logits of a part of the vocabulary, where there are such.
    pub fn vocabulary_group(&self) -> Option<&ProcessGroup> {
        self.parallel.as_ref().map(TensorParallel::group)
    }

    /// Logits `[B, T, V]` for ids `[B, T]`, on every rank, for any T.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn logits(&self, ids_bt: &Tensor) -> Result<Tensor> {
        let Some(parallel) = &self.parallel else { return Ok(self.forward(ids_bt, &Rows::default())?.0) };
        let steps = ids_bt.dim(1)?;
        // What comes later is not seen.
        let ids_bt = ids_bt.pad_with_zeros(1, 0, parallel.padded(steps) - steps)?;
        let logits = self.forward(&ids_bt, &Rows::default())?.0.narrow(1, 0, steps)?;
        parallel.whole_vocabulary(&logits)
    }

    /// Logits `[B, T, V]` for ids `[B, T]` in these rows, and what is to be added to their loss, where experts have
    /// one. Of ranks that compute layers together each has the logits of its part of the vocabulary, `[B, T, V / N]`.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn forward(&self, ids_bt: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        let mut x_btc = self.embedding.forward(ids_bt)?;
        if let Some(scale) = self.embedding_scale {
            x_btc = (x_btc * scale)?;
        }
        let mut all_busy = vec![];
        for block in &self.blocks {
            let busy;
            (x_btc, busy) = block.call_block((x_btc, rows.clone()))?;
            all_busy.extend(busy);
        }
        let mut logits = self.head.forward(&self.norm.forward(&x_btc)?)?;
        if let Some(cap) = self.logit_softcap {
            logits = ((logits / cap)?.tanh()? * cap)?;
        }
        // Padding chooses experts, too, and is not counted.
        let tokens = rows.filled.as_ref().map_or(ids_bt.elem_count(), |filled| filled.iter().sum());
        let auxiliary = match experts::balance(&all_busy, tokens)? {
            Some(loss) => Some((loss * self.auxiliary)?),
            None => None,
        };
        Ok((logits, auxiliary))
    }
}
