//! Building blocks that all model families share: recomputation, activations, dropout and linear layers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::nn::ops::dropout;
use fsdp_candle::nn::{AttentionOptions, Documents, Linear};
use fsdp_candle::random::{Part, in_part};
use fsdp_candle::{Tensors, nn};

use crate::models::config::{Activation, Dropout};
use crate::models::parallel::TensorParallel;
use crate::models::rows::Rows;

/// A block that may recompute its activations in backward.
pub struct Layer<B> {
    block: Arc<B>,
    number: usize,
    name: String,
    checkpoints: CheckpointPolicy,
}

impl<B> Layer<B> {
    /// Wraps the block `number` with the name `name`. It recomputes its activations if `checkpoints` selects it.
    pub fn new(block: B, number: usize, name: String, checkpoints: &CheckpointPolicy) -> Self {
        Layer { block: Arc::new(block), number, name, checkpoints: checkpoints.clone() }
    }
}

impl<B: Send + Sync + 'static> Layer<B> {
    /// Runs `forward` of the block on the residual stream.
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

/// Applies an activation.
pub(super) fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => nn::silu(x),
        Activation::Gelu => nn::gelu(x),
        Activation::GeluErf => nn::gelu_erf(x),
    }
}

/// Dropout state that all layers of a model share.
#[derive(Clone, Default)]
pub struct ModelDropout {
    dropout: Dropout,
    training: Arc<AtomicBool>,
    parallel: Option<TensorParallel>,
}

impl ModelDropout {
    /// Creates dropout that is off until the model trains.
    pub fn new(dropout: Dropout, parallel: Option<&TensorParallel>) -> Self {
        ModelDropout { dropout, training: Arc::default(), parallel: parallel.cloned() }
    }

    pub(super) fn set_training(&self, training: bool) {
        self.training.store(training, Ordering::Relaxed);
    }

    pub(super) fn is_training(&self) -> bool {
        self.training.load(Ordering::Relaxed)
    }

    fn now(&self, probability: f64) -> f64 {
        if self.is_training() { probability } else { 0. }
    }

    pub(super) fn embedding(&self, x: &Tensor) -> Result<Tensor> {
        self.between_layers(|| dropout(x, self.now(self.dropout.embedding) as f32))
    }

    pub(super) fn hidden(&self, x: &Tensor) -> Result<Tensor> {
        self.between_layers(|| dropout(x, self.now(self.dropout.hidden) as f32))
    }

    /// Calls `f` with attention options that contain the dropout of this rank's heads.
    pub(super) fn attention<T>(&self, options: &AttentionOptions, f: impl FnOnce(&AttentionOptions) -> T) -> T {
        let options = AttentionOptions { dropout: self.now(self.dropout.attention), ..*options };
        match &self.parallel {
            Some(parallel) => in_part(part(parallel), || f(&options)),
            None => f(&options),
        }
    }

    /// Returns the attention of separate queries, keys and values, with dropout. `heads` are those of the queries and of the
    /// keys.
    pub(super) fn attend(
        &self,
        options: &AttentionOptions,
        [q, k, v]: [&Tensor; 3],
        (heads, kv_heads): (usize, usize),
        documents: Option<&Documents>,
        sinks: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.attention(options, |options| match (sinks, documents) {
            (Some(sinks), _) => nn::attention_with_sinks(q, k, v, heads, kv_heads, options, documents, sinks),
            (None, Some(documents)) => nn::attention_in_documents(q, k, v, heads, kv_heads, options, documents),
            (None, None) => nn::attention(q, k, v, heads, kv_heads, options),
        })
    }

    /// Runs `f`. The residual stream is the same on all tensor-parallel ranks, unless they split sequences.
    fn between_layers<T>(&self, f: impl FnOnce() -> T) -> T {
        match &self.parallel {
            Some(parallel) if parallel.shares_sequences() => in_part(part(parallel), f),
            _ => f(),
        }
    }
}

/// Returns this rank's part of attention weights `[B, H, T, T]`, or of split sequences `[B, T, C]`.
fn part(parallel: &TensorParallel) -> Part {
    let group = parallel.group();
    Part { dim: 1, index: group.rank(), count: group.size() }
}

/// Creates a linear layer with a normally distributed weight, and a zero bias if `bias`, as transformers does.
pub(super) fn linear(inputs: usize, outputs: usize, bias: bool, stdev: f64, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((outputs, inputs), "weight", Init::Randn { mean: 0., stdev })?;
    let bias = bias.then(|| vb.get_with_hints(outputs, "bias", Init::Const(0.))).transpose()?;
    Linear::new(weight, bias).with_adapter(vb)
}
