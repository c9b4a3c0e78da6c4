//! What the models' layers have in common: running again in backward, and activations.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use fsdp_candle::Tensors;
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::nn;

use super::batch::Rows;
use super::config::activation::Activation;

/// A block, which may keep its input alone for backward, or little more, and run again there.
pub struct Layer<B> {
    block: Arc<B>,
    number: usize,
    name: String,
    checkpoints: CheckpointPolicy,
}

impl<B> Layer<B> {
    /// The layer `number` of a model, of this FQN; where `checkpoints` says so, it trades a second forward for its
    /// activations' memory.
    pub fn new(block: B, number: usize, name: String, checkpoints: &CheckpointPolicy) -> Self {
        Layer { block: Arc::new(block), number, name, checkpoints: checkpoints.clone() }
    }
}

impl<B: Send + Sync + 'static> Layer<B> {
    /// `forward` of the block on the residual stream of these rows.
    ///
    /// # Errors
    /// Those of `forward`.
    pub fn run<O: Tensors + 'static>(
        &self,
        (x, rows): (Tensor, Rows),
        forward: fn(&B, &Tensor, &Rows) -> Result<O>,
    ) -> Result<O> {
        let block = self.block.clone();
        let forward = move |x: Tensor| forward(&block, &x, &rows);
        self.checkpoints.run(self.number, &self.name, forward, x)
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
