//! The order of a step's collectives, decided in one place: events in, actions out, and no tensor, process, lock or
//! clock.
//!
//! What must hold is that all ranks issue the same collectives in the same order, whatever their speed and, where units
//! may be unused, whatever their losses reach; that no more parameters are gathered than those of the units at work and
//! of the next one; and that all that was gathered is freed. So nothing in here depends on anything but the events,
//! which are those of the model's code, and on settings, which are alike on all ranks.

use std::collections::BTreeSet;

use super::fixed_order::{FixedOrder, Ran};
use super::frames::Frames;
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
    /// Reduce the gradients that are there: by a reduce-scatter over the ranks that gather too or, with `apart`, over a
    /// group of their own; and by the all-reduce that follows from it.
    Reduce { unit: usize, apart: bool },
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
    /// Units in the order in which their forwards ended. Backward runs in reverse.
    ran: Vec<Ran>,
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
}

/// What belongs to one backward: it begins and ends with it.
struct Backward {
    units: Vec<Progress>,
    /// The order of its collectives, if it must not depend on what is used.
    fixed: Option<FixedOrder>,
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
    /// The number of forwards that had begun with this one.
    began: usize,
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

    /// A backward begins. Where ranks may use different units, `parents` has for each unit the one around it, and fixes
    /// the order of its collectives. Returns the unit that ran last, whose backward comes first.
    pub(super) fn backward_begins(&mut self, parents: Option<&[Option<usize>]>) -> Result<Option<usize>, Refused> {
        let step = &mut self.step;
        if step.backward.is_some() {
            return Err(Refused::InBackward);
        }
        if !step.frames.is_empty() {
            return Err(Refused::InForward);
        }
        let rules = &self.rules;
        let fixed = parents.map(|parents| {
            let gathers = |unit: usize| rules[unit].unshard_in_backward;
            FixedOrder::new(parents, &step.ran, |unit| rules[unit].trainable > 0, gathers)
        });
        let begun = |rules: &UnitRules| Progress { expected: rules.trainable, ..Progress::default() };
        step.backward = Some(Backward { units: rules.iter().map(begun).collect(), fixed });
        Ok(step.ran.last().map(|ran| ran.unit))
    }

    /// What must be there before the graph is walked: units whose outputs have no hook.
    pub(super) fn before_the_graph(&self) -> Vec<Action> {
        self.step.unhooked.iter().flat_map(|&unit| [Action::Gather(unit), Action::Await(unit)]).collect()
    }

    /// In a fixed order: how many gradients of each unit the backward will come to.
    pub(super) fn backward_reaches(&mut self, reached: &[usize]) -> Vec<Action> {
        let Some(backward) = &mut self.step.backward else { return vec![] };
        // Told before any reduces.
        for (progress, &reached) in backward.units.iter_mut().zip(reached) {
            progress.expected = reached;
        }
        let mut actions = vec![];
        for unit in (0..backward.units.len()).filter(|&unit| reached.get(unit) == Some(&0)) {
            backward.units[unit].reduced = true;
            backward.reduce(unit, &mut actions);
        }
        actions
    }

    /// Backward is about to come to what is inside a unit.
    pub(super) fn before_unit(&mut self, unit: usize) -> Result<Vec<Action>, Refused> {
        let Some(backward) = &mut self.step.backward else { return Err(Refused::NoBackward) };
        let mut actions = vec![];
        let ran = &self.step.ran;
        let position = ran.iter().position(|ran| ran.unit == unit);
        // Units that ran after this one are done; with a fixed order each knows by itself. One that still waits has
        // parameters that got no gradient: it need not wait for the end.
        if let (Some(position), None) = (position, &backward.fixed) {
            let later = ran.iter().rev().filter(|later| later.began > ran[position].ended).map(|later| later.unit);
            for later in later {
                let progress = &mut backward.units[later];
                if progress.complete > 0 && !progress.reduced {
                    progress.reduced = true;
                    backward.reduce(later, &mut actions);
                }
            }
        }
        if let Some(position) = position {
            // Frozen parameters of units made by name tell nothing: they go when backward comes to what ran before.
            for later in ran.iter().filter(|later| later.began > ran[position].ended) {
                let rules = &self.rules[later.unit];
                let frees = rules.by_name_in.is_some() && rules.has_frozen && rules.reshard_after_backward;
                // One that ran before may be used again, and a fixed order gathers it once.
                let frees = frees && (backward.fixed.is_none() || later.first == later.began);
                if frees && std::mem::take(&mut backward.units[later.unit].entered) {
                    actions.push(Action::FreeFrozen(later.unit));
                }
            }
        }
        backward.units[unit].entered = true;
        backward.units[unit].seen = true;
        if self.rules[unit].unshard_in_backward {
            backward.gather(unit, &mut actions);
            actions.push(Action::Await(unit));
        }
        let preceded = position.and_then(|position| position.checked_sub(1)).map(|before| ran[before].unit);
        let next = next(&self.rules[unit].backward_prefetch, &preceded, self.settings);
        for &unit in next.iter().filter(|&&unit| self.rules[unit].unshard_in_backward) {
            // A unit by name may come before the one around it: what was freed of it is not wanted again.
            if self.rules[unit].by_name_in.is_none() || !backward.units[unit].seen {
                backward.gather(unit, &mut actions);
            }
        }
        Ok(actions)
    }

    /// Backward has been through all that is between a unit's inputs and outputs.
    pub(super) fn after_unit(&self, unit: usize) -> Option<Action> {
        // They report nothing, and are needed no more.
        self.rules[unit].reshard_after_backward.then_some(Action::FreeFrozen(unit))
    }

    /// The gradient of a unit's parameter is complete.
    pub(super) fn gradient_complete(&mut self, unit: usize, position: usize) -> Result<Vec<Action>, Refused> {
        let Some(backward) = &mut self.step.backward else { return Err(Refused::NoBackward) };
        let mut actions = vec![];
        if self.rules[unit].reshard_after_backward {
            actions.push(Action::FreeParameter { unit, position });
        }
        let progress = &mut backward.units[unit];
        progress.complete += 1;
        progress.reduced = progress.complete == progress.expected;
        if progress.reduced {
            backward.reduce(unit, &mut actions);
        }
        Ok(actions)
    }

    /// Candle's backward has ended.
    pub(super) fn backward_ends(&mut self) -> Vec<Action> {
        let mut actions = vec![];
        let Some(backward) = &mut self.step.backward else { return actions };
        if let Some(fixed) = &mut backward.fixed {
            actions.extend(fixed.gathers_left().map(Action::Gather));
        }
        for unit in 0..backward.units.len() {
            // What has not reported by now never will: unused parameters, and those behind a cut.
            if !backward.units[unit].reduced {
                backward.reduce(unit, &mut actions);
            }
            let state = &mut self.step.units[unit];
            state.left_by_forward = false;
            state.parts_run = 0;
            if self.rules[unit].reshard_after_backward {
                actions.push(Action::Free(unit));
            }
        }
        if self.settings.is_last_backward {
            self.step.ran.clear();
        } else {
            self.step.ran.iter_mut().for_each(|ran| ran.first = ran.began);
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

impl Backward {
    /// Issues a unit's all-gather, after those of the units that come before it in a fixed order.
    fn gather(&mut self, unit: usize, actions: &mut Vec<Action>) {
        if let Some(fixed) = &mut self.fixed {
            actions.extend(fixed.gathers_up_to(unit).map(Action::Gather));
        }
        actions.push(Action::Gather(unit));
    }

    /// Issues the reduction of a unit's gradients, when its turn has come.
    fn reduce(&mut self, unit: usize, actions: &mut Vec<Action>) {
        let Some(fixed) = &mut self.fixed else {
            actions.push(Action::Reduce { unit, apart: false });
            return;
        };
        for unit in fixed.ready(unit) {
            actions.extend(fixed.gathers_before_reducing(unit).map(Action::Gather));
            actions.push(Action::Reduce { unit, apart: true });
        }
    }
}

/// The units to gather ahead: those of a unit's own list, or else the one that the order implies.
fn next<'a>(listed: &'a [usize], implied: &'a Option<usize>, settings: StepSettings) -> &'a [usize] {
    if listed.is_empty() && settings.implicit_prefetch { implied.as_slice() } else { listed }
}

mod forward;
#[cfg(test)]
mod tests;
