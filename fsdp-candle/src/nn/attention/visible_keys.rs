//! Which keys a query sees.

use std::ops::Range;

use super::documents::Documents;
use super::options::AttentionOptions;
use crate::context_parallel::Positions;

/// The visible keys of a document's queries, or of a whole row's. All of them are in the same document.
#[derive(Clone, Copy)]
pub(super) struct VisibleKeys {
    causal: bool,
    window: usize,
    /// First query.
    start: usize,
    queries: usize,
    first_key: usize,
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
        self.first_key + (position + 1).saturating_sub(self.window)..self.first_key + end
    }
}

impl AttentionOptions {
    /// Returns the keys that queries at these positions see in a row of the batch, for each run of queries without a gap
    /// and each document in it, or for the whole run without documents.
    pub(super) fn visible_keys(
        &self,
        queries: usize,
        keys: usize,
        positions: Positions,
        documents: Option<&Documents>,
        row: usize,
    ) -> impl Iterator<Item = VisibleKeys> {
        let &AttentionOptions { causal, window, .. } = self;
        let window = window.unwrap_or(usize::MAX);
        let lengths = documents.map(|documents| documents.row(row));
        positions.runs(queries).flat_map(move |(start, queries)| {
            let first = positions.of(start);
            let visible = move |start, queries, first_key, keys, before| VisibleKeys {
                causal,
                window,
                start,
                queries,
                first_key,
                keys,
                before,
            };
            let whole = lengths.is_none().then(|| visible(start, queries, 0, keys, first));
            let parts = lengths.unwrap_or_default().iter().scan(0, |next, &length| {
                let document = *next;
                *next += length;
                Some((document, length))
            });
            // The queries of the run in each document.
            let parts = parts.filter_map(move |(document, length)| {
                let (begin, end) = (document.max(first), (document + length).min(first + queries));
                let count = end.checked_sub(begin).filter(|count| *count > 0)?;
                Some(visible(start + begin - first, count, document, length, begin - document))
            });
            whole.into_iter().chain(parts)
        })
    }
}
