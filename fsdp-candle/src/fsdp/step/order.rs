//! The order of a step's collectives, decided in one place: events in, actions out, and no tensor, process, lock or
//! clock.
//!
//! What must hold is that all ranks issue the same collectives in the same order, whatever their speed and, where units
//! may be unused, whatever their losses reach; that no more parameters are gathered than those of the units at work and
//! of the next one; and that all that was gathered is freed. So nothing in here depends on anything but the events,
//! which are those of the model's code, and on settings, which are alike on all ranks.

use std::collections::BTreeSet;
use std::ops::Range;

use super::frames::Frames;
use super::plan::Plan;
use super::rules::{StepSettings, UnitRules};

/// What is to be done, in this order. Units are named by their positions in the order of `fully_shard` calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Issue the unit's all-gather, unless its parameters are there or on their way.
    Gather(usize),
    /// Wait until they are there.
    Await(usize),
    /// Free the unit's full parameters.
    Free(usize),
    /// Free all but what so many neighbouring ranks need to gather the unit again.
    FreeBut { unit: usize, ranks: usize },
    /// Free one full parameter.
    FreeParameter { unit: usize, position: usize },
    /// Free the frozen parameters.
    FreeFrozen(usize),
    /// Reduce the gradients that are there: by a reduce-scatter, and by the all-reduce that follows from it.
    Reduce(usize),
    /// Give the unit's parameters anchors of their own for a pass, or those that they have for the first.
    NextPass { unit: usize, pass: Option<usize> },
}

/// The state machine.
#[derive(Default)]
pub(super) struct Order {
    pub(super) settings: StepSettings,
    rules: Vec<UnitRules>,
    step: Step,
}

/// An event that may not happen now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// While backward runs.
    InBackward,
    /// While a forward runs.
    InForward,
    /// While no backward runs.
    NoBackward,
    /// In a backward whose graph did not show that it comes to the unit.
    NotPlanned,
}

/// Everything that a step which failed leaves behind: a new one takes its place.
#[derive(Default)]
struct Step {
    /// The units' forwards that enclose the code that runs now.
    frames: Frames,
    forwards_begun: usize,
    /// Units in the order in which their forwards began, in this iteration and in the last whole one.
    forward_order: Vec<usize>,
    last_forward_order: Vec<usize>,
    /// Passes in the order in which they ended, since the last root forward that followed a backward. Backward runs in
    /// reverse.
    ran: Vec<Ran>,
    /// Closures that backward runs again.
    replays: Vec<Replay>,
    /// Whether a backward has run since the last root forward began.
    is_over: bool,
    /// Units whose outputs went out without a hook at some time: their parameters must be there from the beginning of
    /// backward.
    unhooked: BTreeSet<usize>,
    units: Vec<UnitStep>,
    backward: Option<Backward>,
}

/// Of one unit.
#[derive(Clone, Copy, Default)]
struct UnitStep {
    /// Whether it ran in forward since gradients were handed out.
    ran_forward: bool,
    /// Whether a forward gathered what is there and no backward has followed: stale, once an optimizer has stepped.
    left_by_forward: bool,
    /// Modules of it that ran since it was last resharded after forward.
    parts_run: usize,
    /// The pass that runs or ran last, and the number of its first node.
    pass: usize,
    from: usize,
    /// The pass that its parameters' anchors are of, unless they are those of a first pass.
    anchors_of: Option<usize>,
}

/// A pass of a unit: one forward that keeps a graph, or those of its parts.
#[derive(Clone, Debug)]
struct Ran {
    unit: usize,
    /// The number of forwards that had begun with it, which names the pass.
    pass: usize,
    /// How many had begun when it ended.
    ended: usize,
    /// The numbers of the nodes that it made.
    nodes: Range<usize>,
}

/// A closure that backward runs again when it comes to a node.
#[derive(Clone, Debug)]
struct Replay {
    /// The numbers of the nodes that the closure made in forward.
    made: Range<usize>,
    node: usize,
}

/// The most passes that are remembered while no backward comes: forwards whose graphs were dropped.
const MOST_PASSES: usize = 1 << 16;

/// What belongs to one backward: it begins and ends with it.
struct Backward {
    units: Vec<Progress>,
    /// The order of its collectives, where units run several times or ranks use different ones.
    plan: Option<Plan>,
}

/// How far one unit is in the backward that runs.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// How many gradients will be complete, unless some are unused.
    expected: usize,
    complete: usize,
    /// Whether its reduction is on its way.
    reduced: bool,
    /// Whether backward has come to it. Of a unit made by name, whether it is there still.
    entered: bool,
    /// Whether backward has come to it at some time.
    seen: bool,
}

/// A call of a unit that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forward {
    pub(super) is_root: bool,
    /// The pass of the unit that it belongs to.
    pub(super) pass: usize,
    /// Whether a backward may follow.
    graph: bool,
}

impl Order {
    /// Adds a unit; they are numbered in this order. `inside` are those inside it, where it is made by name.
    pub(super) fn add(&mut self, rules: UnitRules, inside: &[usize]) {
        let index = self.rules.len();
        for &inner in inside {
            self.rules[inner].around.push(index);
        }
        self.rules.push(rules);
        self.step.units.push(UnitStep::default());
    }

    /// Forgets the units from the `count`-th on: those inside one that failed to build.
    pub(super) fn truncate(&mut self, count: usize) {
        self.rules.truncate(count);
        for rules in &mut self.rules {
            rules.forward_prefetch.retain(|&unit| unit < count);
            rules.backward_prefetch.retain(|&unit| unit < count);
            rules.around.retain(|&unit| unit < count);
        }
        let step = &mut self.step;
        step.units.truncate(count);
        step.forward_order.retain(|&unit| unit < count);
        step.last_forward_order.retain(|&unit| unit < count);
        step.ran.retain(|ran| ran.unit < count);
        step.unhooked.retain(|&unit| unit < count);
    }

    pub(super) fn rules(&mut self, unit: usize) -> Option<&mut UnitRules> {
        self.rules.get_mut(unit)
    }

    /// A backward begins.
    pub(super) fn backward_begins(&mut self) -> Result<(), Refused> {
        let step = &mut self.step;
        if step.backward.is_some() {
            return Err(Refused::InBackward);
        }
        if !step.frames.is_empty() {
            return Err(Refused::InForward);
        }
        step.is_over = true;
        let begun = |rules: &UnitRules| Progress { expected: rules.trainable, ..Progress::default() };
        step.backward = Some(Backward { units: self.rules.iter().map(begun).collect(), plan: None });
        Ok(())
    }

    /// Returns the unit whose backward comes first, and what gathers it and the units whose outputs have no hook.
    pub(super) fn before_the_graph(&mut self) -> (Option<usize>, Vec<Action>) {
        let Some(backward) = &self.step.backward else { return (None, vec![]) };
        let first = match &backward.plan {
            Some(plan) => plan.first(),
            None => self.step.ran.last().map(|ran| ran.unit),
        };
        // Each is known: none is refused.
        let mut actions = first.map_or(vec![], |unit| self.before_unit(unit, None).unwrap_or_default());
        for unit in self.step.unhooked.clone() {
            match self.is_planned() {
                true if !self.has_visit(unit) => {}
                true => actions.extend(self.before_unit(unit, None).unwrap_or_default()),
                false => actions.extend([Action::Gather(unit), Action::Await(unit)]),
            }
        }
        (first, actions)
    }

    /// Backward is about to enter a unit. `pass` is known where the unit is called.
    pub(super) fn before_unit(&mut self, unit: usize, pass: Option<usize>) -> Result<Vec<Action>, Refused> {
        if self.is_planned() {
            return self.before_visit(unit, pass);
        }
        let Some(backward) = &mut self.step.backward else { return Err(Refused::NoBackward) };
        let mut actions = vec![];
        let ran = &self.step.ran;
        let position = ran.iter().position(|ran| ran.unit == unit);
        if let Some(position) = position {
            // Units that ran after this one are done. One that still waits has parameters that got no gradient: it need
            // not wait for the end.
            for later in ran.iter().rev().filter(|later| later.pass > ran[position].ended) {
                let progress = &mut backward.units[later.unit];
                if progress.complete > 0 && !progress.reduced {
                    progress.reduced = true;
                    actions.push(Action::Reduce(later.unit));
                }
            }
            // Frozen parameters of units made by name tell nothing: they go when backward comes to what ran before.
            for later in ran.iter().filter(|later| later.pass > ran[position].ended) {
                let rules = &self.rules[later.unit];
                let frees = rules.by_name_in.is_some() && rules.has_frozen && rules.reshard_after_backward;
                if frees && std::mem::take(&mut backward.units[later.unit].entered) {
                    actions.push(Action::FreeFrozen(later.unit));
                }
            }
        }
        backward.units[unit].entered = true;
        backward.units[unit].seen = true;
        if self.rules[unit].unshard_in_backward {
            actions.extend([Action::Gather(unit), Action::Await(unit)]);
        }
        let preceded = position.and_then(|position| position.checked_sub(1)).map(|before| ran[before].unit);
        let next = next(&self.rules[unit].backward_prefetch, &preceded, self.settings);
        for &unit in next.iter().filter(|&&unit| self.rules[unit].unshard_in_backward) {
            // A unit by name may come before the one around it: what was freed of it is not wanted again.
            if self.rules[unit].by_name_in.is_none() || !backward.units[unit].seen {
                actions.push(Action::Gather(unit));
            }
        }
        Ok(actions)
    }

    /// Backward has been through all that is between a unit's inputs and outputs.
    pub(super) fn after_unit(&self, unit: usize) -> Option<Action> {
        // They report nothing, and are needed no more. A plan knows when a visit is over.
        (self.rules[unit].reshard_after_backward && !self.is_planned()).then_some(Action::FreeFrozen(unit))
    }

    /// The gradient of a unit's parameter is complete. Returns as well whether the values are not needed again.
    pub(super) fn gradient_complete(&mut self, unit: usize, position: usize) -> Result<(bool, Vec<Action>), Refused> {
        let Some(backward) = &mut self.step.backward else { return Err(Refused::NoBackward) };
        let mut actions = vec![];
        if self.rules[unit].reshard_after_backward {
            actions.push(Action::FreeParameter { unit, position });
        }
        if backward.plan.is_some() {
            return Ok((false, actions));
        }
        let progress = &mut backward.units[unit];
        progress.complete += 1;
        progress.reduced = progress.complete == progress.expected;
        if progress.reduced {
            actions.push(Action::Reduce(unit));
        }
        Ok((true, actions))
    }

    /// Candle's backward has ended.
    pub(super) fn backward_ends(&mut self) -> Vec<Action> {
        let mut actions = self.finish_plan();
        let Some(backward) = &mut self.step.backward else { return actions };
        let planned = backward.plan.as_ref().filter(|_| self.settings.fixed_order);
        for unit in 0..backward.units.len() {
            // What has not reported by now never will: unused parameters, and those behind a cut.
            let is_left = match planned {
                Some(plan) => self.rules[unit].trainable > 0 && !plan.has(unit),
                None => !backward.units[unit].reduced,
            };
            if is_left {
                actions.push(Action::Reduce(unit));
            }
            let state = &mut self.step.units[unit];
            state.left_by_forward = false;
            state.parts_run = 0;
            if self.rules[unit].reshard_after_backward {
                actions.push(Action::Free(unit));
            }
        }
        actions
    }

    /// Control leaves a backward.
    pub(super) fn backward_is_over(&mut self) {
        self.step.backward = None;
    }

    /// The units in the order in which their forwards began.
    pub(super) fn forward_order(&self) -> Vec<usize> {
        self.step.forward_order.clone()
    }

    /// Whether a unit is made by name.
    pub(super) fn is_by_name(&self, unit: usize) -> bool {
        self.rules.get(unit).is_some_and(|rules| rules.by_name_in.is_some())
    }

    /// Whether a forward or backward runs.
    pub(super) fn is_at_work(&self) -> bool {
        !self.step.frames.is_empty() || self.step.backward.is_some()
    }

    pub(super) fn is_in_backward(&self) -> bool {
        self.step.backward.is_some()
    }

    /// Whether a unit ran in forward since the last call.
    pub(super) fn take_ran_forward(&mut self, unit: usize) -> bool {
        self.step.units.get_mut(unit).is_some_and(|state| std::mem::take(&mut state.ran_forward))
    }

    /// Forgets the step, which has failed.
    pub(super) fn forget_step(&mut self) {
        self.step = Step { units: vec![UnitStep::default(); self.rules.len()], ..Step::default() };
    }
}

/// The units to gather ahead: those of a unit's own list, or else the one that the order implies.
fn next<'a>(listed: &'a [usize], implied: &'a Option<usize>, settings: StepSettings) -> &'a [usize] {
    if listed.is_empty() && settings.implicit_prefetch { implied.as_slice() } else { listed }
}

mod forward;
mod planned;
#[cfg(test)]
mod tests;
