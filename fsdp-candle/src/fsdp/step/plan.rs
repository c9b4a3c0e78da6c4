//! The plan of a backward that comes to a unit more than once, or to different units on different ranks.
//!
//! A *visit* is a stretch of backward in which a unit is gathered. A rank carries out one sequence of all-gathers and
//! reductions, in which each visit begins and ends once. The sequence follows from the visits alone, so that ranks that
//! agree on the visits issue the same collectives in the same order, on one communicator or several.

/// One stretch of backward in which a unit is gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visit {
    pub(super) unit: usize,
    /// Index of the last visit that some rank begins before its own part in this one is over.
    pub(super) last: usize,
}

/// An entry of the sequence: the visit with this index begins or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Begin(usize),
    End(usize),
}

/// The visits of a backward, in the order in which they begin, and how far the backward has come.
#[derive(Debug)]
pub(super) struct Plan {
    visits: Vec<Visit>,
    /// How many visits begin ahead of the one that backward comes to: 1 with prefetch, else 0.
    ahead: usize,
    /// The next block of the sequence. Block `j` ends the visits that are over when visit `j - ahead` begins, and then
    /// begins visit `j`.
    block: usize,
    entered: Vec<bool>,
    ended: Vec<bool>,
    /// Pairs of a pass and its visit, sorted.
    passes: Vec<(usize, usize)>,
}

/// Where backward meets the nodes of one pass of a unit, as positions in the order of backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) unit: usize,
    pub(super) pass: usize,
    pub(super) first: usize,
    pub(super) last: usize,
}

impl Plan {
    /// A plan of visits that all ranks agree on.
    pub(super) fn new(visits: Vec<Visit>, ahead: usize) -> Self {
        let none = vec![false; visits.len()];
        Plan { visits, ahead, block: 0, entered: none.clone(), ended: none, passes: vec![] }
    }

    /// A plan of the passes whose `spans` all ranks have alike. Passes of one unit share a visit where they overlap,
    /// where nothing comes between them, and where `stays` says that the unit is gathered throughout.
    pub(super) fn of_spans(mut spans: Vec<Span>, ahead: usize, stays: impl Fn(usize) -> bool) -> Self {
        spans.sort_by_key(|span| (span.first, span.pass));
        let mut stretches: Vec<Span> = vec![];
        let mut passes = vec![];
        for span in spans {
            let before = stretches.iter().rposition(|stretch| stretch.unit == span.unit);
            let joined = before.filter(|&before| {
                let over = stretches[before].last;
                let last = stretches.partition_point(|stretch| stretch.first <= over) - 1;
                stays(span.unit) || span.first <= over || stretches.len() == last + 1
            });
            let visit = joined.unwrap_or(stretches.len());
            match stretches.get_mut(visit) {
                Some(stretch) => stretch.last = stretch.last.max(span.last),
                None => stretches.push(span),
            }
            passes.push((span.pass, visit));
        }
        let last = |stretch: &Span| stretches.partition_point(|other| other.first <= stretch.last) - 1;
        let visits = stretches.iter().map(|stretch| Visit { unit: stretch.unit, last: last(stretch) }).collect();
        passes.sort_unstable();
        Plan { passes, ..Plan::new(visits, ahead) }
    }

    pub(super) fn unit(&self, visit: usize) -> usize {
        self.visits[visit].unit
    }

    /// The unit of the first visit.
    pub(super) fn first(&self) -> Option<usize> {
        self.visits.first().map(|visit| visit.unit)
    }

    /// Returns whether a unit has a visit.
    pub(super) fn has(&self, unit: usize) -> bool {
        self.visits.iter().any(|visit| visit.unit == unit)
    }

    /// The visit of a pass, or else the unit's first that is not over.
    pub(super) fn visit(&self, unit: usize, pass: Option<usize>) -> Option<usize> {
        let of_pass = pass.and_then(|pass| {
            let at = self.passes.binary_search_by_key(&pass, |&(pass, _)| pass).ok()?;
            Some(self.passes[at].1)
        });
        of_pass.or_else(|| (0..self.visits.len()).find(|&at| self.visits[at].unit == unit && !self.ended[at]))
    }

    /// The unit's first visit that backward has not come to.
    pub(super) fn next(&self, unit: usize) -> Option<usize> {
        (0..self.visits.len()).find(|&at| self.visits[at].unit == unit && !self.entered[at] && !self.ended[at])
    }

    /// Whether a visit is of one pass.
    pub(super) fn is_of_one_pass(&self, visit: usize) -> bool {
        self.passes.iter().filter(|&&(_, of)| of == visit).count() == 1
    }

    /// Backward comes to a visit. Returns whether it is for the first time, and what is left of the sequence up to
    /// there.
    pub(super) fn enter(&mut self, visit: usize) -> (bool, Vec<Step>) {
        let is_first = !std::mem::replace(&mut self.entered[visit], true);
        (is_first, self.carry_on(visit + self.ahead + 1))
    }

    /// Backward has ended. Returns the rest of the sequence.
    pub(super) fn finish(&mut self) -> Vec<Step> {
        self.carry_on(self.visits.len() + self.ahead + 1)
    }

    /// Returns the blocks before `end` that are left.
    fn carry_on(&mut self, end: usize) -> Vec<Step> {
        let mut steps = vec![];
        for block in self.block..end {
            for (at, visit) in self.visits.iter().enumerate() {
                if visit.last + self.ahead + 1 == block {
                    self.ended[at] = true;
                    steps.push(Step::End(at));
                }
            }
            if block < self.visits.len() {
                steps.push(Step::Begin(block));
            }
        }
        self.block = self.block.max(end);
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::Step::{Begin, End};
    use super::*;

    fn span(unit: usize, pass: usize, first: usize, last: usize) -> Span {
        Span { unit, pass, first, last }
    }

    #[test]
    fn a_visit_ends_before_the_next_but_one_begins() {
        // Two passes over two units.
        let spans = vec![span(1, 4, 0, 3), span(0, 3, 4, 6), span(1, 2, 7, 9), span(0, 1, 10, 12)];
        let mut plan = Plan::of_spans(spans, 1, |_| false);
        assert_eq!(plan.visit(1, Some(2)), Some(2));
        assert_eq!(plan.enter(0), (true, vec![Begin(0), Begin(1)]));
        assert_eq!(plan.enter(0), (false, vec![]));
        assert_eq!(plan.enter(1).1, [End(0), Begin(2)]);
        assert_eq!(plan.visit(1, None), Some(2), "the first of unit 1 is over");
        assert_eq!(plan.enter(2).1, [End(1), Begin(3)]);
        assert_eq!(plan.finish(), [End(2), End(3)]);
    }

    #[test]
    fn passes_share_a_visit_where_nothing_comes_between_them() {
        let overlap = vec![span(0, 2, 0, 5), span(1, 3, 1, 2), span(0, 1, 4, 9)];
        let plan = Plan::of_spans(overlap, 1, |_| false);
        assert_eq!(plan.visits, [Visit { unit: 0, last: 1 }, Visit { unit: 1, last: 1 }]);
        let visits = |spans: &[Span], stays| Plan::of_spans(spans.to_vec(), 1, |unit| unit == stays).visits.len();
        let in_a_row = [span(0, 2, 0, 5), span(0, 1, 6, 9)];
        assert_eq!(visits(&in_a_row, 9), 1);
        let apart = [span(0, 3, 0, 1), span(1, 2, 2, 3), span(2, 1, 4, 5), span(0, 0, 6, 7)];
        assert_eq!(visits(&apart, 9), 4);
        assert_eq!(visits(&apart, 0), 3);
    }
}
