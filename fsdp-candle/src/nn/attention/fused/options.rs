//! Which keys a query sees, and what becomes of its scores.

use std::ops::Range;

use candle_core::{Result, bail};

use crate::nn::attention::documents::Documents;
use crate::nn::dropout;

/// What an attention is, besides its heads.
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
    /// What the products of queries and keys are multiplied by, usually `1 / sqrt(D)`.
    pub scale: f64,
    /// Whether a query sees no key after its own position.
    pub causal: bool,
    /// A query sees only keys that are fewer positions than this away; at least 1, which is its own position.
    pub window: Option<usize>,
    /// Scores `s` become `cap * tanh(s / cap)`, as in Gemma 2; above 0.
    pub softcap: Option<f64>,
    /// The probability in `[0, 1)` with which a query's weight of a key becomes 0, after the softmax: 0 but while
    /// training. What is dropped follows from this thread's [random state](crate::random), and is kept nowhere: a draw
    /// for weights `[batch, heads, T, S]`.
    pub dropout: f64,
}

impl AttentionOptions {
    /// Every query sees itself and all keys before it.
    pub fn causal(scale: f64) -> Self {
        AttentionOptions { scale, causal: true, window: None, softcap: None, dropout: 0. }
    }

    /// Every query sees all keys.
    pub fn bidirectional(scale: f64) -> Self {
        AttentionOptions { causal: false, ..Self::causal(scale) }
    }

    /// Whether it matters where a query stands among the keys.
    pub(super) fn has_places(&self) -> bool {
        self.causal || self.window.is_some()
    }

    pub(super) fn check(&self, function: &str) -> Result<()> {
        if self.window == Some(0) {
            bail!("{function}: a window of 0 shows a query nothing; it must be at least 1");
        }
        dropout::check(function, self.dropout)?;
        match self.softcap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                bail!("{function}: the cap of the scores must be above 0, found {cap}")
            }
            _ => Ok(()),
        }
    }

    /// What queries see in a row of the batch, stretch by stretch: each document by itself, or all of them.
    pub(super) fn sights(
        &self,
        queries: usize,
        keys: usize,
        documents: Option<&Documents>,
        row: usize,
    ) -> impl Iterator<Item = Sight> {
        let &AttentionOptions { causal, window, .. } = self;
        let window = window.unwrap_or(usize::MAX);
        let (lengths, whole) = match documents {
            Some(documents) => (documents.row(row), None),
            None => (&[][..], Some((queries, keys))),
        };
        let stretches = whole.into_iter().chain(lengths.iter().map(|&length| (length, length)));
        stretches.scan(0, move |next, (queries, keys)| {
            let start = *next;
            *next += queries;
            Some(Sight { causal, window, start, queries, keys, before: keys.saturating_sub(queries) })
        })
    }
}

/// What the queries of a stretch see, all of it in keys of that stretch.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    causal: bool,
    window: usize,
    /// Where the stretch begins, in queries and in keys.
    start: usize,
    queries: usize,
    keys: usize,
    /// Keys before the first query.
    before: usize,
}

impl Sight {
    /// The queries of the stretch.
    pub(super) fn queries(self) -> Range<usize> {
        self.start..self.start + self.queries
    }

    /// The keys that one of them sees.
    #[inline(always)]
    pub(super) fn of(self, query: usize) -> Range<usize> {
        let position = self.before + query - self.start;
        let end = if self.causal { position + 1 } else { position.saturating_add(self.window).min(self.keys) };
        self.start + (position + 1).saturating_sub(self.window)..self.start + end
    }
}
