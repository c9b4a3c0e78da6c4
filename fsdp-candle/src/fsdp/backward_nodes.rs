//! The nodes of a loss's graph, in the order in which backward comes to them.

use std::ops::Range;

/// The positions in backward of a graph's nodes.
pub(crate) struct BackwardNodes {
    /// Pairs of a node's number and its position, sorted.
    by_number: Vec<(usize, usize)>,
}

impl BackwardNodes {
    /// Makes the positions of nodes with these numbers, which are in the order of backward.
    pub(crate) fn new(numbers: impl IntoIterator<Item = usize>) -> Self {
        let positions = numbers.into_iter().enumerate().map(|(at, number)| (number, at));
        let mut by_number: Vec<(usize, usize)> = positions.collect();
        by_number.sort_unstable();
        BackwardNodes { by_number }
    }

    /// Returns the position of a node, if it is in the graph.
    pub(crate) fn position(&self, number: usize) -> Option<usize> {
        let at = self.by_number.binary_search_by_key(&number, |&(number, _)| number).ok()?;
        Some(self.by_number[at].1)
    }

    /// Returns the first and the last position of the nodes with these numbers and of the nodes in `others`.
    pub(crate) fn span(&self, numbers: Range<usize>, others: impl Iterator<Item = usize>) -> Option<(usize, usize)> {
        let from = self.by_number.partition_point(|&(number, _)| number < numbers.start);
        let to = self.by_number.partition_point(|&(number, _)| number < numbers.end);
        let inside = self.by_number[from..to.max(from)].iter().map(|&(_, at)| at);
        let others = others.filter_map(|number| self.position(number));
        inside.chain(others).fold(None, |span, at| match span {
            Some((first, last)) => Some((at.min(first), at.max(last))),
            None => Some((at, at)),
        })
    }
}
