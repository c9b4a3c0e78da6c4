//! What the models' layers have in common: running again in backward.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use fsdp_candle::Tensors;
use fsdp_candle::activation_checkpoint::checkpoint;

/// A block, which may keep its input alone for backward and run again there.
pub struct Layer<B> {
    block: Arc<B>,
    again: bool,
}

impl<B> Layer<B> {
    /// A layer of `block`; `activation_checkpoint` trades a second forward for its activations' memory.
    pub fn new(block: B, activation_checkpoint: bool) -> Self {
        Layer { block: Arc::new(block), again: activation_checkpoint }
    }
}

impl<B: Send + Sync + 'static> Layer<B> {
    /// `forward` of the block.
    ///
    /// # Errors
    /// Those of `forward`.
    pub fn run<O: Tensors + 'static>(&self, x: &Tensor, forward: fn(&B, &Tensor) -> Result<O>) -> Result<O> {
        if self.again {
            let block = self.block.clone();
            checkpoint(move |x: Tensor| forward(&block, &x), x.clone())
        } else {
            forward(&self.block, x)
        }
    }
}

impl<B: Module + Send + Sync + 'static> Module for Layer<B> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.run(x, B::forward)
    }
}
