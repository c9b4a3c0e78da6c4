//! Rotary embeddings of decoders.

use candle_core::{Device, Result, Tensor};
use fsdp_candle::nn::{Documents, Rotary, RotaryOptions};

use crate::models::config::rope::Rope;

/// A rotary embedding.
#[derive(Clone)]
pub(super) struct RotaryEmbedding(Rotary);

impl RotaryEmbedding {
    pub(super) fn new(rope: &Rope, head_dim: usize, positions: usize, device: &Device) -> Result<Self> {
        let (frequencies, factor, long) = rope.frequencies();
        let options = RotaryOptions { head_dim: Some(head_dim), factor };
        let tables = |frequencies: &[f32]| Rotary::with_options(frequencies, options, positions, device);
        let usual = tables(&frequencies)?;
        Ok(RotaryEmbedding(match long {
            Some((above, frequencies)) => usual.with_long(above, &tables(&frequencies)?)?,
            None => usual,
        }))
    }

    /// Rotates the heads of `x`, `[B, T, H * D]` or `[B, T, H, D]`. Positions restart in each document.
    pub(super) fn apply(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        match documents {
            Some(documents) => self.0.apply_in_documents(x, documents),
            None => self.0.apply(x, 0),
        }
    }
}

/// Rotary embeddings of all layers.
pub struct RotaryTables {
    full: RotaryEmbedding,
    local: Option<RotaryEmbedding>,
}

impl RotaryTables {
    /// Creates tables for heads of `head_dim` elements and `positions` positions. `local` is for sliding-window layers.
    pub fn new(full: &Rope, local: Option<&Rope>, head_dim: usize, positions: usize, device: &Device) -> Result<Self> {
        let of = |rope| RotaryEmbedding::new(rope, head_dim, positions, device);
        Ok(RotaryTables { full: of(full)?, local: local.map(of).transpose()? })
    }

    pub(super) fn of(&self, local: bool) -> &RotaryEmbedding {
        self.local.as_ref().filter(|_| local).unwrap_or(&self.full)
    }
}
