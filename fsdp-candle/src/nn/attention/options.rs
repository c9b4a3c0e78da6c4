//! Settings of an attention.

use candle_core::{Result, bail};

use crate::nn::dropout::check_probability;

/// Settings of an attention besides its heads.
///
/// ```
/// use fsdp_candle::nn::AttentionOptions;
///
/// let full = AttentionOptions::causal(0.125);
/// let local = AttentionOptions { window: Some(4096), ..full };
/// assert!(local.causal && full.window.is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the products of queries and keys, usually `1 / sqrt(D)`.
    pub scale: f64,
    /// Whether a query sees no key after its own position.
    pub causal: bool,
    /// A query sees only keys that are fewer positions than this away. At least 1, which is its own position.
    pub window: Option<usize>,
    /// Scores `s` become `cap * tanh(s / cap)`, as in Gemma 2. Above 0.
    pub softcap: Option<f64>,
    /// Probability in `[0, 1)` with which a query's weight of a key becomes 0 after the softmax. Set it to 0 in
    /// evaluation. The dropped weights follow from this thread's [random state](crate::random), with one draw for the
    /// weights `[batch, heads, T, S]`. No mask is kept.
    pub dropout: f64,
}

impl AttentionOptions {
    /// Returns options with which every query sees itself and all keys before it.
    pub fn causal(scale: f64) -> Self {
        AttentionOptions { scale, causal: true, window: None, softcap: None, dropout: 0. }
    }

    /// Returns options with which every query sees all keys.
    pub fn bidirectional(scale: f64) -> Self {
        AttentionOptions { causal: false, ..Self::causal(scale) }
    }

    /// Returns whether the visible keys depend on a query's position.
    pub(super) fn depends_on_position(&self) -> bool {
        self.causal || self.window.is_some()
    }

    pub(super) fn check(&self, function: &str) -> Result<()> {
        if self.window == Some(0) {
            bail!("{function}: a window of 0 hides all keys. It must be at least 1");
        }
        check_probability(function, self.dropout)?;
        match self.softcap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                bail!("{function}: the cap of the scores must be above 0, found {cap}")
            }
            _ => Ok(()),
        }
    }
}
