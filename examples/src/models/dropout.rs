//! Dropout of a model's layers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use fsdp_candle::nn::AttentionOptions;
use fsdp_candle::nn::ops::dropout;

use super::config::Dropout;

/// What a model's layers share of it.
#[derive(Clone, Default)]
pub struct Drops {
    dropout: Dropout,
    training: Arc<AtomicBool>,
}

impl Drops {
    /// Nothing is dropped before the model is told that it trains.
    pub fn new(dropout: Dropout) -> Self {
        Drops { dropout, training: Arc::default() }
    }

    pub(super) fn set_training(&self, training: bool) {
        self.training.store(training, Ordering::Relaxed);
    }

    fn now(&self, probability: f64) -> f64 {
        if self.training.load(Ordering::Relaxed) { probability } else { 0. }
    }

    pub(super) fn embedding(&self, x: &Tensor) -> Result<Tensor> {
        dropout(x, self.now(self.dropout.embedding) as f32)
    }

    pub(super) fn hidden(&self, x: &Tensor) -> Result<Tensor> {
        dropout(x, self.now(self.dropout.hidden) as f32)
    }

    pub(super) fn attention(&self, options: &AttentionOptions) -> AttentionOptions {
        AttentionOptions { dropout: self.now(self.dropout.attention), ..*options }
    }
}
