//! Rotary embeddings of a model: tables that its blocks share.

use candle_core::{Device, Result, Tensor};
use fsdp_candle::nn::{Documents, Rotary, RotaryOptions};

use crate::models::config::rope::Rope;

/// A rotary embedding, which may be another one for long sequences.
#[derive(Clone)]
pub(super) struct Turn {
    usual: Rotary,
    /// For sequences of more than so many positions.
    long: Option<(usize, Rotary)>,
}

impl Turn {
    pub(super) fn new(rope: &Rope, head_dim: usize, positions: usize, device: &Device) -> Result<Self> {
        let (frequencies, factor, long) = rope.frequencies();
        let options = RotaryOptions { head_dim: Some(head_dim), factor };
        let tables = |frequencies: &[f32]| Rotary::with_options(frequencies, options, positions, device);
        let long = match long {
            Some((above, frequencies)) => Some((above, tables(&frequencies)?)),
            None => None,
        };
        Ok(Turn { usual: tables(&frequencies)?, long })
    }

    /// Turns the heads of `x`, `[B, T, H * D]` or `[B, T, H, D]`, in which documents may lie packed.
    pub(super) fn apply(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let longest = documents.map_or(x.dim(1)?, Documents::longest);
        let rotary = match &self.long {
            Some((above, rotary)) if longest > *above => rotary,
            _ => &self.usual,
        };
        match documents {
            Some(documents) => rotary.apply_in_documents(x, documents),
            None => rotary.apply(x, 0),
        }
    }
}

/// The rotary embeddings of all layers.
pub struct Turns {
    full: Turn,
    local: Option<Turn>,
}

impl Turns {
    /// Tables for heads of `head_dim` elements at `positions` positions; `local` is of layers with a window.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(full: &Rope, local: Option<&Rope>, head_dim: usize, positions: usize, device: &Device) -> Result<Self> {
        let of = |rope| Turn::new(rope, head_dim, positions, device);
        Ok(Turns { full: of(full)?, local: local.map(of).transpose()? })
    }

    pub(super) fn of(&self, local: bool) -> &Turn {
        self.local.as_ref().filter(|_| local).unwrap_or(&self.full)
    }
}
