//! Which keys a query sees.

use std::ops::Range;

use super::documents::Documents;
use super::options::AttentionOptions;

/// The visible keys of a document's queries, or of a whole row's. All of them are in the same document.
#[derive(Clone, Copy)]
pub(super) struct VisibleKeys {
    causal: bool,
    window: usize,
    /// First query, which is also the first key.
    start: usize,
    queries: usize,
    keys: usize,
    /// Keys before the first query's own.
    before: usize,
}

impl VisibleKeys {
    /// Returns the queries.
    pub(super) fn queries(self) -> Range<usize> {
        self.start..self.start + self.queries
    }

    /// Returns the keys that a query sees.
    #[inline(always)]
    pub(super) fn of(self, query: usize) -> Range<usize> {
        let position = self.before + query - self.start;
        let end = if self.causal { position + 1 } else { position.saturating_add(self.window).min(self.keys) };
        self.start + (position + 1).saturating_sub(self.window)..self.start + end
    }
}

impl AttentionOptions {
    /// Returns the keys that queries see in a row of the batch, for each document, or for the whole row without
    /// documents.
    pub(super) fn visible_keys(
        &self,
        queries: usize,
        keys: usize,
        documents: Option<&Documents>,
        row: usize,
    ) -> impl Iterator<Item = VisibleKeys> {
        let &AttentionOptions { causal, window, .. } = self;
        let window = window.unwrap_or(usize::MAX);
        let (lengths, whole) = match documents {
            Some(documents) => (documents.row(row), None),
            None => (&[][..], Some((queries, keys))),
        };
        let parts = whole.into_iter().chain(lengths.iter().map(|&length| (length, length)));
        parts.scan(0, move |next, (queries, keys)| {
            let start = *next;
            *next += queries;
            Some(VisibleKeys { causal, window, start, queries, keys, before: keys.saturating_sub(queries) })
        })
    }
}
