//! What the models' layers have in common: running again in backward, and activations.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use fsdp_candle::Tensors;
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::nn::{self, Documents};

use super::config::activation::Activation;

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
    /// `forward` of the block on the residual stream, in which documents may lie packed.
    ///
    /// # Errors
    /// Those of `forward`.
    pub fn run<O: Tensors + 'static>(
        &self,
        (x, documents): (Tensor, Option<Documents>),
        forward: fn(&B, &Tensor, Option<&Documents>) -> Result<O>,
    ) -> Result<O> {
        if self.again {
            let block = self.block.clone();
            checkpoint(move |x: Tensor| forward(&block, &x, documents.as_ref()), x)
        } else {
            forward(&self.block, &x, documents.as_ref())
        }
    }
}

/// An activation by itself.
pub(super) fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => nn::silu(x),
        Activation::Gelu => nn::gelu(x),
        Activation::GeluErf => nn::gelu_erf(x),
    }
}
