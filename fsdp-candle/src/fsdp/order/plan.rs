//! The plan of a backward that comes to a unit more than once, or to different units on different ranks.
//!
//! [Note: Visits]
//!
//! A *visit* is a stretch of backward in which a unit is unsharded. A rank executes one sequence of all-gathers and
//! reductions, in which each visit begins once and ends once. Visit `i + 1` is unsharded when backward comes to visit
//! `i`. A visit is reduced and resharded when backward comes to the first visit that begins after its end. The sequence
//! follows from the visits alone, so ranks that agree on the visits issue the same collectives in the same order.
//!
//! Two cases need a plan:
//!
//! - Units ran several times. All ranks have the same graph, so each rank derives the visits from its own nodes.
//! - Ranks may use different units. Each unit then has one visit. Ranks agree on the visits when backward begins, by
//!   the largest of all ranks' numbers: first on where each rank comes to a unit, then on which visits it needs before
//!   it is done with one. Units that no rank comes to are reduced at the end, with zeros.

use std::ops::Range;

use super::{Action, Order, OrderError, Pass};
use crate::fsdp::backward_nodes::BackwardNodes;

/// A stretch of backward in which a unit is unsharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visit {
    unit: usize,
    /// Index of the last visit that some rank begins before it is done with this one.
    last: usize,
}

/// An entry of the sequence: the visit with this index begins or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlanEntry {
    Begin(usize),
    End(usize),
}

/// The visits of a backward, in the order in which they begin, and the progress of the backward.
#[derive(Debug)]
pub(super) struct Plan {
    visits: Vec<Visit>,
    /// Number of visits that begin ahead of the current one: 1 with prefetch, else 0.
    ahead: usize,
    /// The next block of the sequence. Block `j` ends the visits that are over when visit `j - ahead` begins, and then
    /// begins visit `j`.
    block: usize,
    entered: Vec<bool>,
    ended: Vec<bool>,
    /// Pairs of a pass and its visit, sorted.
    passes: Vec<(usize, usize)>,
}

/// Positions in backward of the nodes of one pass of a unit.
#[derive(Clone, Copy, Debug)]
struct Span {
    unit: usize,
    pass: usize,
    first: usize,
    last: usize,
}

impl Plan {
    /// Makes a plan of visits that all ranks agree on.
    fn new(visits: Vec<Visit>, ahead: usize) -> Self {
        let none = vec![false; visits.len()];
        Plan { visits, ahead, block: 0, entered: none.clone(), ended: none, passes: vec![] }
    }

    /// Makes a plan of passes whose `spans` are the same on all ranks. Passes of one unit share a visit where they
    /// overlap, where no other visit is between them, and where `stays` returns that the unit stays unsharded.
    fn of_spans(mut spans: Vec<Span>, ahead: usize, stays: impl Fn(usize) -> bool) -> Self {
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

    /// Returns the unit of the first visit.
    pub(super) fn first(&self) -> Option<usize> {
        self.visits.first().map(|visit| visit.unit)
    }

    /// Returns whether the unit has a visit.
    pub(super) fn has(&self, unit: usize) -> bool {
        self.visits.iter().any(|visit| visit.unit == unit)
    }

    /// Returns the visit of a pass, or else the unit's first visit that has not ended.
    fn visit(&self, unit: usize, pass: Option<usize>) -> Option<usize> {
        let of_pass = pass.and_then(|pass| {
            let at = self.passes.binary_search_by_key(&pass, |&(pass, _)| pass).ok()?;
            Some(self.passes[at].1)
        });
        of_pass.or_else(|| (0..self.visits.len()).find(|&at| self.visits[at].unit == unit && !self.ended[at]))
    }

    /// Returns the unit's first visit that backward has not come to.
    fn next(&self, unit: usize) -> Option<usize> {
        (0..self.visits.len()).find(|&at| self.visits[at].unit == unit && !self.entered[at] && !self.ended[at])
    }

    /// Returns whether a visit belongs to a single pass.
    fn is_of_one_pass(&self, visit: usize) -> bool {
        self.passes.iter().filter(|&&(_, of)| of == visit).count() == 1
    }

    /// Enters a visit. Returns whether it is the first time, and the missing entries of the sequence up to this visit.
    fn enter(&mut self, visit: usize) -> (bool, Vec<PlanEntry>) {
        let is_first = !std::mem::replace(&mut self.entered[visit], true);
        (is_first, self.advance_to(visit + self.ahead + 1))
    }

    /// Ends the plan. Returns the rest of the sequence.
    fn finish(&mut self) -> Vec<PlanEntry> {
        self.advance_to(self.visits.len() + self.ahead + 1)
    }

    /// Returns the missing blocks before `end`.
    fn advance_to(&mut self, end: usize) -> Vec<PlanEntry> {
        let mut entries = vec![];
        for block in self.block..end {
            for (at, visit) in self.visits.iter().enumerate() {
                if visit.last + self.ahead + 1 == block {
                    self.ended[at] = true;
                    entries.push(PlanEntry::End(at));
                }
            }
            if block < self.visits.len() {
                entries.push(PlanEntry::Begin(block));
            }
        }
        self.block = self.block.max(end);
        entries
    }
}

/// First and last position in this rank's backward at which it comes to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    first: usize,
    last: usize,
}

/// Making a plan.
impl Order {
    /// Returns whether units ran several times since the last backward.
    pub(crate) fn ran_again(&self) -> bool {
        let mut seen = vec![false; self.units.len()];
        self.step.passes.iter().any(|pass| std::mem::replace(&mut seen[pass.unit], true))
    }

    fn ahead(&self) -> usize {
        usize::from(self.settings.implicit_prefetch)
    }

    fn set_plan(&mut self, plan: Plan) {
        if let Some(backward) = &mut self.step.backward {
            backward.plan = Some(plan);
        }
    }

    /// Plans a backward over `nodes`, which are the same on all ranks.
    pub(crate) fn plan_passes(&mut self, nodes: &BackwardNodes) {
        let mut spans = self.spans(nodes);
        // Without a hook, nothing reports that backward comes to a unit: it is unsharded from the beginning.
        let unhooked = &self.step.unhooked;
        for span in spans.iter_mut().filter(|span| unhooked.contains(&span.unit)) {
            span.first = 0;
        }
        let plan = Plan::of_spans(spans, self.ahead(), |unit| unhooked.contains(&unit));
        self.set_plan(plan);
    }

    /// Returns the positions at which backward comes to each pass.
    fn spans(&self, nodes: &BackwardNodes) -> Vec<Span> {
        let span = |pass: &Pass| {
            // Backward runs the operations of a checkpointed closure when it runs the closure again.
            let meets = |made: &Range<usize>| made.start < pass.nodes.end && pass.nodes.start < made.end;
            let again = self.step.recomputations.iter().filter(|again| meets(&again.made));
            let (first, last) = nodes.span(pass.nodes.clone(), again.map(|again| again.node))?;
            Some(Span { unit: pass.unit, pass: pass.pass, first, last })
        };
        self.step.passes.iter().filter_map(span).collect()
    }

    /// Returns where this rank's backward comes to each unit. `uses` lists the units of the parameters in the graph,
    /// with their positions.
    pub(crate) fn reach(&self, nodes: &BackwardNodes, uses: &[(usize, usize)]) -> Vec<Option<Reach>> {
        let mut reached: Vec<Option<Reach>> = vec![None; self.units.len()];
        let mut note = |unit: usize, first: usize, last: usize| {
            let reach = reached[unit].get_or_insert(Reach { first, last });
            *reach = Reach { first: reach.first.min(first), last: reach.last.max(last) };
        };
        for &unit in &self.step.unhooked {
            note(unit, 0, 0);
        }
        for span in self.spans(nodes) {
            note(span.unit, span.first, span.last);
        }
        for &(unit, at) in uses {
            note(unit, at, at);
        }
        reached
    }

    /// Returns a key for each unit that this rank comes to, and 0 for the others. Ranks unshard the units in the order
    /// of the largest key of all ranks.
    pub(crate) fn keys(&self, reached: &[Option<Reach>]) -> Vec<usize> {
        let passes = &self.step.passes;
        let key = |(unit, reach): (usize, &Option<Reach>)| {
            let after = passes.iter().rev().position(|pass| pass.unit == unit);
            reach.map_or(0, |_| 1 + after.unwrap_or(passes.len()))
        };
        reached.iter().enumerate().map(key).collect()
    }

    /// Returns the units that some rank comes to, in the order in which all ranks unshard them.
    pub(crate) fn in_order(keys: &[usize]) -> Vec<usize> {
        let mut units: Vec<usize> = (0..keys.len()).filter(|&unit| keys[unit] > 0).collect();
        units.sort_by_key(|&unit| (keys[unit], std::cmp::Reverse(unit)));
        units
    }

    /// Returns for each entry of `order` the last entry that this rank comes to before it is done with that unit.
    pub(crate) fn lasts(order: &[usize], reached: &[Option<Reach>]) -> Vec<usize> {
        let last = |unit: &usize| {
            let last = reached[*unit].map(|reach| {
                let begun = |other: &usize| reached[*other].is_some_and(|other| other.first <= reach.last);
                order.iter().rposition(begun).unwrap_or(0)
            });
            last.unwrap_or(0)
        };
        order.iter().map(last).collect()
    }

    /// Plans a backward whose units all ranks unshard in this `order`, with the largest of all ranks' `lasts`.
    pub(crate) fn plan_units(&mut self, order: &[usize], lasts: &[usize]) {
        let visit = |(at, (&unit, &last)): (usize, (&usize, &usize))| Visit { unit, last: last.max(at) };
        let visits = order.iter().zip(lasts).enumerate().map(visit).collect();
        self.set_plan(Plan::new(visits, self.ahead()));
    }
}

/// Following a plan.
impl Order {
    /// Returns whether the running backward has a plan.
    pub(crate) fn is_planned(&self) -> bool {
        self.step.backward.as_ref().is_some_and(|backward| backward.plan.is_some())
    }

    pub(super) fn has_visit(&self, unit: usize) -> bool {
        let plan = self.step.backward.as_ref().and_then(|backward| backward.plan.as_ref());
        plan.is_some_and(|plan| plan.visit(unit, None).is_some())
    }

    /// Enters the visit of a unit that backward comes to.
    pub(super) fn enter_visit(&mut self, unit: usize, pass: Option<usize>) -> Result<Vec<Action>, OrderError> {
        self.enter(unit, |plan| plan.visit(unit, pass))
    }

    /// Enters the next visit of a unit: backward needs values that were freed in the current one.
    pub(super) fn enter_next_visit(&mut self, unit: usize) -> Result<Vec<Action>, OrderError> {
        self.enter(unit, |plan| plan.next(unit))
    }

    fn enter(&mut self, unit: usize, which: impl Fn(&Plan) -> Option<usize>) -> Result<Vec<Action>, OrderError> {
        let Some(plan) = self.step.backward.as_mut().and_then(|backward| backward.plan.as_mut()) else {
            return Err(OrderError::NoBackward);
        };
        let (is_first, entries) = match which(plan) {
            Some(visit) => plan.enter(visit),
            None if self.settings.fixed_order => return Err(OrderError::NotPlanned),
            None => (true, vec![]),
        };
        let mut actions = self.actions(entries);
        if let Some(backward) = &mut self.step.backward {
            backward.units[unit].entered = true;
        }
        // After the first time, missing values were freed for good.
        if is_first && self.units[unit].settings.unshard_in_backward {
            actions.push(Action::WaitForUnshard(unit));
        }
        Ok(actions)
    }

    /// Records that backward is done with a parameter in one pass of its unit. Returns the action that frees it, if no
    /// other pass needs it.
    pub(crate) fn post_pass(&self, unit: usize, position: usize, pass: usize) -> Option<Action> {
        let plan = self.step.backward.as_ref()?.plan.as_ref()?;
        let visit = plan.visit(unit, Some(pass))?;
        let frees = self.units[unit].settings.reshard_after_backward && plan.is_of_one_pass(visit);
        frees.then_some(Action::ReshardParam { unit, position })
    }

    pub(super) fn finish_plan(&mut self) -> Vec<Action> {
        let plan = self.step.backward.as_mut().and_then(|backward| backward.plan.as_mut());
        let entries = plan.map_or(vec![], Plan::finish);
        self.actions(entries)
    }

    fn actions(&mut self, entries: Vec<PlanEntry>) -> Vec<Action> {
        let mut actions = vec![];
        let Some(backward) = &mut self.step.backward else { return actions };
        let Some(plan) = &backward.plan else { return actions };
        for entry in entries {
            let (PlanEntry::Begin(visit) | PlanEntry::End(visit)) = entry;
            let unit = plan.visits[visit].unit;
            let settings = &self.units[unit].settings;
            match entry {
                PlanEntry::Begin(_) => actions.extend(settings.unshard_in_backward.then_some(Action::Unshard(unit))),
                PlanEntry::End(_) => {
                    backward.units[unit].entered = false;
                    actions.extend((backward.units[unit].params.trainable > 0).then_some(Action::Reduce(unit)));
                    actions.extend(settings.reshard_after_backward.then_some(Action::Reshard(unit)));
                }
            }
        }
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::PlanEntry::{Begin, End};
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
