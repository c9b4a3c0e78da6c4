//! What the models' layers have in common: running again in backward, and activations.
//! Dropout of a model's layers.
//! Fully connected layers that start as transformers' do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::nn::ops::dropout;
use fsdp_candle::nn::{AttentionOptions, Linear};
use fsdp_candle::random::{Part, in_part};
use fsdp_candle::{Tensors, nn};

use crate::models::config::{Activation, Dropout};
use crate::models::language_model::Rows;
use crate::models::parallel::TensorParallel;

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

/// What a model's layers share of it.
#[derive(Clone, Default)]
pub struct Drops {
    dropout: Dropout,
    training: Arc<AtomicBool>,
    parallel: Option<TensorParallel>,
}

impl Drops {
    /// Nothing is dropped before the model is told that it trains.
    pub fn new(dropout: Dropout, parallel: Option<&TensorParallel>) -> Self {
        Drops { dropout, training: Arc::default(), parallel: parallel.cloned() }
    }

    pub(super) fn set_training(&self, training: bool) {
        self.training.store(training, Ordering::Relaxed);
    }

    fn now(&self, probability: f64) -> f64 {
        if self.training.load(Ordering::Relaxed) { probability } else { 0. }
    }

    pub(super) fn embedding(&self, x: &Tensor) -> Result<Tensor> {
        self.between_layers(|| dropout(x, self.now(self.dropout.embedding) as f32))
    }

    pub(super) fn hidden(&self, x: &Tensor) -> Result<Tensor> {
        self.between_layers(|| dropout(x, self.now(self.dropout.hidden) as f32))
    }

    /// Has `f` drop what attention drops, of the heads that this rank has.
    pub(super) fn attention<T>(&self, options: &AttentionOptions, f: impl FnOnce(&AttentionOptions) -> T) -> T {
        let options = AttentionOptions { dropout: self.now(self.dropout.attention), ..*options };
        match &self.parallel {
            Some(parallel) => in_part(part(parallel), || f(&options)),
            None => f(&options),
        }
    }

    /// What is between layers is the same on the ranks that compute them together, unless they share out sequences.
    fn between_layers<T>(&self, f: impl FnOnce() -> T) -> T {
        match &self.parallel {
            Some(parallel) if parallel.shares_sequences() => in_part(part(parallel), f),
            _ => f(),
        }
    }
}

/// The part that a rank has of attention weights `[B, H, T, T]`, and where sequences are shared out of `[B, T, C]`.
fn part(parallel: &TensorParallel) -> Part {
    let group = parallel.group();
    Part { dim: 1, index: group.rank(), count: group.size() }
}

/// Asks `vb` for a weight, which starts from a normal distribution, and maybe a bias, which starts as zero.
pub(super) fn linear(inputs: usize, outputs: usize, bias: bool, stdev: f64, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((outputs, inputs), "weight", Init::Randn { mean: 0., stdev })?;
    let bias = bias.then(|| vb.get_with_hints(outputs, "bias", Init::Const(0.))).transpose()?;
    Linear::new(weight, bias).with_adapter(vb)
}
