//! Backward by a plan: where units run several times before it, or ranks use different ones.

use super::{Action, Order, Ran, Refused};
use crate::fsdp::step::plan::{Plan, Span, Step, Visit};

/// Where this rank's backward comes to a unit, as positions in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fsdp::step) struct Reach {
    pub(in crate::fsdp::step) first: usize,
    pub(in crate::fsdp::step) last: usize,
}

impl Order {
    /// Whether a plan decides about the collectives of the backward that runs.
    pub(in crate::fsdp::step) fn is_planned(&self) -> bool {
        self.step.backward.as_ref().is_some_and(|backward| backward.plan.is_some())
    }

    pub(super) fn has_visit(&self, unit: usize) -> bool {
        let plan = self.step.backward.as_ref().and_then(|backward| backward.plan.as_ref());
        plan.is_some_and(|plan| plan.visit(unit, None).is_some())
    }

    /// Whether units ran several times since the last backward.
    pub(in crate::fsdp::step) fn ran_again(&self) -> bool {
        let mut seen = vec![false; self.rules.len()];
        self.step.ran.iter().any(|ran| std::mem::replace(&mut seen[ran.unit], true))
    }

    fn ahead(&self) -> usize {
        usize::from(self.settings.implicit_prefetch)
    }

    fn plan_with(&mut self, plan: Plan) {
        if let Some(backward) = &mut self.step.backward {
            backward.plan = Some(plan);
        }
    }

    /// Plans a backward that goes through nodes with these `numbers`, which all ranks do alike.
    pub(in crate::fsdp::step) fn plan_passes(&mut self, numbers: &[usize]) {
        let mut spans = self.spans(numbers);
        // Without a hook nothing tells when backward comes to a unit: it is there from the beginning.
        let unhooked = &self.step.unhooked;
        for span in spans.iter_mut().filter(|span| unhooked.contains(&span.unit)) {
            span.first = 0;
        }
        let plan = Plan::of_spans(spans, self.ahead(), |unit| unhooked.contains(&unit));
        self.plan_with(plan);
    }

    /// Where backward meets each pass that it comes to.
    fn spans(&self, numbers: &[usize]) -> Vec<Span> {
        let mut sorted: Vec<(usize, usize)> = numbers.iter().enumerate().map(|(at, &number)| (number, at)).collect();
        sorted.sort_unstable();
        let span = |ran: &Ran| {
            let from = sorted.partition_point(|&(number, _)| number < ran.nodes.start);
            let to = sorted.partition_point(|&(number, _)| number < ran.nodes.end);
            let inside = sorted[from..to.max(from)].iter().map(|&(_, at)| at);
            // Backward runs a closure's operations when it runs the closure again.
            let meets = |made: &std::ops::Range<usize>| made.start < ran.nodes.end && ran.nodes.start < made.end;
            let again = self.step.replays.iter().filter(|replay| meets(&replay.made));
            let again = again.filter_map(|replay| {
                let at = sorted.binary_search_by_key(&replay.node, |&(number, _)| number).ok()?;
                Some(sorted[at].1)
            });
            let (mut first, mut last) = (usize::MAX, 0);
            for at in inside.chain(again) {
                (first, last) = (first.min(at), last.max(at));
            }
            (first <= last).then_some(Span { unit: ran.unit, pass: ran.pass, first, last })
        };
        self.step.ran.iter().filter_map(span).collect()
    }

    /// Where this rank's backward comes to each unit. `uses` has the units of the parameters that stand in the graph,
    /// with their positions.
    pub(in crate::fsdp::step) fn reach(&self, numbers: &[usize], uses: &[(usize, usize)]) -> Vec<Option<Reach>> {
        let mut reached: Vec<Option<Reach>> = vec![None; self.rules.len()];
        let mut note = |unit: usize, first: usize, last: usize| {
            let reach = reached[unit].get_or_insert(Reach { first, last });
            *reach = Reach { first: reach.first.min(first), last: reach.last.max(last) };
        };
        for &unit in &self.step.unhooked {
            note(unit, 0, 0);
        }
        for span in self.spans(numbers) {
            note(span.unit, span.first, span.last);
        }
        for &(unit, at) in uses {
            note(unit, at, at);
        }
        reached
    }

    /// A key for each unit that this rank comes to, and 0 for others. Ranks gather the units in the order of the
    /// largest keys of all ranks.
    pub(in crate::fsdp::step) fn keys(&self, reached: &[Option<Reach>]) -> Vec<usize> {
        let ran = &self.step.ran;
        let key = |(unit, reach): (usize, &Option<Reach>)| {
            let after = ran.iter().rev().position(|ran| ran.unit == unit);
            reach.map_or(0, |_| 1 + after.unwrap_or(ran.len()))
        };
        reached.iter().enumerate().map(key).collect()
    }

    /// The units that some rank comes to, in the order in which all gather them.
    pub(in crate::fsdp::step) fn in_order(keys: &[usize]) -> Vec<usize> {
        let mut units: Vec<usize> = (0..keys.len()).filter(|&unit| keys[unit] > 0).collect();
        units.sort_by_key(|&unit| (keys[unit], std::cmp::Reverse(unit)));
        units
    }

    /// For each entry of `order`, the last entry that this rank comes to before it is done with that unit.
    pub(in crate::fsdp::step) fn lasts(order: &[usize], reached: &[Option<Reach>]) -> Vec<usize> {
        let last = |unit: &usize| {
            let last = reached[*unit].map(|reach| {
                let begun = |other: &usize| reached[*other].is_some_and(|other| other.first <= reach.last);
                order.iter().rposition(begun).unwrap_or(0)
            });
            last.unwrap_or(0)
        };
        order.iter().map(last).collect()
    }

    /// Plans a backward whose units all ranks gather in this `order`, with the largest of all ranks' `lasts`.
    pub(in crate::fsdp::step) fn plan_units(&mut self, order: &[usize], lasts: &[usize]) {
        let visit = |(at, (&unit, &last)): (usize, (&usize, &usize))| Visit { unit, last: last.max(at) };
        let visits = order.iter().zip(lasts).enumerate().map(visit).collect();
        self.plan_with(Plan::new(visits, self.ahead()));
    }

    /// Backward comes to a unit, and so to a visit of its.
    pub(super) fn before_visit(&mut self, unit: usize, pass: Option<usize>) -> Result<Vec<Action>, Refused> {
        self.visit(unit, |plan| plan.visit(unit, pass))
    }

    /// Backward needs values of a unit that were freed in the visit that it knows of: it has come to the next.
    pub(super) fn before_next_visit(&mut self, unit: usize) -> Result<Vec<Action>, Refused> {
        self.visit(unit, |plan| plan.next(unit))
    }

    fn visit(&mut self, unit: usize, which: impl Fn(&Plan) -> Option<usize>) -> Result<Vec<Action>, Refused> {
        let Some(plan) = self.step.backward.as_mut().and_then(|backward| backward.plan.as_mut()) else {
            return Err(Refused::NoBackward);
        };
        let (is_first, steps) = match which(plan) {
            Some(visit) => plan.enter(visit),
            None if self.settings.fixed_order => return Err(Refused::NotPlanned),
            None => (true, vec![]),
        };
        let mut actions = self.actions(steps);
        if let Some(backward) = &mut self.step.backward {
            backward.units[unit].entered = true;
        }
        // Later, what is missing was freed for good.
        if is_first && self.rules[unit].unshard_in_backward {
            actions.push(Action::Await(unit));
        }
        Ok(actions)
    }

    /// Backward is done with a parameter in one pass of its unit. Returns what can be freed.
    pub(in crate::fsdp::step) fn pass_complete(&self, unit: usize, position: usize, pass: usize) -> Option<Action> {
        let plan = self.step.backward.as_ref()?.plan.as_ref()?;
        let visit = plan.visit(unit, Some(pass))?;
        let frees = self.rules[unit].reshard_after_backward && plan.is_of_one_pass(visit);
        frees.then_some(Action::FreeParameter { unit, position })
    }

    pub(super) fn finish_plan(&mut self) -> Vec<Action> {
        let plan = self.step.backward.as_mut().and_then(|backward| backward.plan.as_mut());
        let steps = plan.map_or(vec![], Plan::finish);
        self.actions(steps)
    }

    fn actions(&mut self, steps: Vec<Step>) -> Vec<Action> {
        let mut actions = vec![];
        let Some(backward) = &mut self.step.backward else { return actions };
        let Some(plan) = &backward.plan else { return actions };
        for step in steps {
            match step {
                Step::Begin(visit) if self.rules[plan.unit(visit)].unshard_in_backward => {
                    actions.push(Action::Gather(plan.unit(visit)));
                }
                Step::Begin(_) => {}
                Step::End(visit) => {
                    let unit = plan.unit(visit);
                    backward.units[unit].entered = false;
                    if self.rules[unit].trainable > 0 {
                        actions.push(Action::Reduce(unit));
                    }
                    if self.rules[unit].reshard_after_backward {
                        actions.push(Action::Free(unit));
                    }
                }
            }
        }
        actions
    }
}
