//! What the models' layers have in common: running again in backward, low-rank adapters, and activations.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::Tensors;
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::nn::{self, Lora, LoraConfig};

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

/// A projection, with an adapter beside it where the run trains adapters.
pub enum Projection<M> {
    /// As it is.
    Plain(M),
    /// With an adapter.
    Adapted(Lora<M>),
}

impl<M> Projection<M> {
    /// Puts an adapter beside `base`, which was built from `vb`, if there is to be one.
    ///
    /// # Errors
    /// When a parameter can't be initialised.
    pub fn new(base: M, inputs: usize, outputs: usize, lora: Option<LoraConfig>, vb: VarBuilder) -> Result<Self> {
        Ok(match lora {
            Some(config) => Projection::Adapted(nn::lora(base, inputs, outputs, config, vb)?),
            None => Projection::Plain(base),
        })
    }
}

impl<M: Module> Module for Projection<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Projection::Plain(base) => base.forward(x),
            Projection::Adapted(lora) => lora.forward(x),
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
