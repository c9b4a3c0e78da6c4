//! Dropout of a model's layers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use fsdp_candle::nn::AttentionOptions;
use fsdp_candle::nn::ops::dropout;
use fsdp_candle::random::{Part, in_part};

use super::config::Dropout;
use super::parallel::TensorParallel;

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
