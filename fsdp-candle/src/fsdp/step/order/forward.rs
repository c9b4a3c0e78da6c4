//! Forward: units that are called, and units made by name, which nobody calls: one is gathered when one of its
//! parameters is first used, and its forward ends when one beside it is used or called, or when the call around it
//! ends.

use super::{Action, Forward, MOST_PASSES, Order, Ran, Refused, next};
use crate::autograd::next_number;
use crate::fsdp::policy::ReshardAfterForward;
use crate::fsdp::step::frames::Frame;

impl Order {
    /// A unit's forward begins, after which a backward may follow if it keeps its graph; it is the root's where no
    /// other runs.
    pub(in crate::fsdp::step) fn forward_begins(
        &mut self,
        unit: usize,
        graph: bool,
    ) -> Result<(Forward, Vec<Action>), Refused> {
        let step = &mut self.step;
        if step.backward.is_some() {
            return Err(Refused::InBackward);
        }
        let is_root = step.frames.is_empty();
        let mut actions = vec![];
        if is_root {
            if std::mem::take(&mut step.is_over) {
                step.ran.clear();
                step.replays.clear();
            }
            if !step.forward_order.is_empty() {
                step.last_forward_order = std::mem::take(&mut step.forward_order);
            }
            // An optimizer may have changed the shards since.
            for (unit, state) in step.units.iter_mut().enumerate() {
                state.parts_run = 0;
                if std::mem::take(&mut state.left_by_forward) {
                    actions.push(Action::Free(unit));
                }
            }
        }
        self.close_beside(Some(unit), &mut actions);
        let pass = self.enter(unit, graph, &mut actions);
        self.step.frames.call(unit, pass, graph);
        Ok((Forward { is_root, pass, graph }, actions))
    }

    /// A unit's forward has ended, of which `parts` modules make one. Tells as well whether its outputs need a hook
    /// that unshards it before their backward.
    pub(in crate::fsdp::step) fn forward_ends(
        &mut self,
        unit: usize,
        forward: Forward,
        parts: usize,
    ) -> (bool, Vec<Action>) {
        let mut actions = vec![];
        self.open_up_to(unit, None, forward.graph, &mut actions);
        self.close_beside(None, &mut actions);
        self.note_run(unit, forward.pass, forward.graph);
        let state = &mut self.step.units[unit];
        state.parts_run += 1;
        if state.parts_run < parts {
            return (forward.graph, actions);
        }
        state.parts_run = 0;
        let free = self.free_after_forward(unit, forward.is_root, forward.graph);
        // A root that keeps its parameters has nothing to do before backward that `backward` does not do itself.
        let hook = forward.graph && (free.is_some() || !forward.is_root);
        if forward.graph && !hook {
            self.step.unhooked.insert(unit);
        }
        actions.extend(free);
        (hook, actions)
    }

    /// Control leaves a unit's forward, which has ended or failed. The hooks of its outputs are there.
    pub(in crate::fsdp::step) fn forward_is_over(&mut self, forward: Forward) {
        self.step.frames.end_call();
        if let Some(ran) = self.step.ran.iter_mut().rev().find(|ran| ran.pass == forward.pass) {
            ran.nodes.end = next_number();
        }
    }

    /// Backward will run a closure again that made nodes with the numbers `made`, when it comes to `node`.
    pub(in crate::fsdp::step) fn replays(&mut self, made: std::ops::Range<usize>, node: usize) {
        if self.step.replays.len() == MOST_PASSES {
            self.step.replays.drain(..MOST_PASSES / 2);
        }
        self.step.replays.push(super::Replay { made, node });
    }

    /// A layer is about to use a parameter of a unit made by name, whose values it `misses` or not.
    pub(in crate::fsdp::step) fn used(
        &mut self,
        unit: usize,
        graph: bool,
        misses: bool,
    ) -> Result<Vec<Action>, Refused> {
        if let Some(backward) = &self.step.backward {
            return match (backward.units[unit].entered, misses && self.is_planned()) {
                (false, _) => self.before_unit(unit, None),
                (true, true) => self.before_next_visit(unit),
                (true, false) => Ok(vec![]),
            };
        }
        let frames = &mut self.step.frames;
        let mut actions = vec![];
        // Outside any forward nothing is gathered.
        if frames.is_empty() || frames.has(unit, graph) {
            return Ok(actions);
        }
        match self.rules[unit].by_name_in.filter(|_| self.settings.fixed_order) {
            Some(called) => self.open_up_to(called, Some(unit), graph, &mut actions),
            None => self.open(unit, graph, &mut actions),
        }
        Ok(actions)
    }

    /// In a fixed order: opens those of the units made by name inside `called` whose turn it is, up to `last` or all,
    /// whether this rank uses them or not.
    fn open_up_to(&mut self, called: usize, last: Option<usize>, graph: bool, actions: &mut Vec<Action>) {
        let end = last.map_or(self.rules.len(), |last| last + 1);
        let first = match self.step.frames.next_of(called) {
            Some(next) if self.settings.fixed_order => {
                let first = *next;
                *next = end.max(first);
                first
            }
            _ => end,
        };
        let turn: Vec<usize> = (first..end).filter(|&unit| self.rules[unit].by_name_in == Some(called)).collect();
        for &unit in &turn {
            self.open(unit, graph, actions);
        }
        if let (Some(again), true) = (last, turn.is_empty()) {
            self.open(again, graph, actions);
        }
    }

    /// The forward of a unit made by name begins.
    fn open(&mut self, unit: usize, graph: bool, actions: &mut Vec<Action>) {
        self.close_beside(Some(unit), actions);
        let pass = self.enter(unit, graph, actions);
        self.step.frames.open(unit, pass, graph);
    }

    /// Ends the forwards of units made by name that are not around `unit`.
    fn close_beside(&mut self, unit: Option<usize>, actions: &mut Vec<Action>) {
        let around = unit.map_or(&[][..], |unit| self.rules[unit].around.as_slice());
        let mut closed = vec![];
        while let Some(frame) = self.step.frames.close(|open| around.contains(&open)) {
            closed.push(frame);
        }
        for Frame { unit, pass, graph, .. } in closed {
            self.note_run(unit, pass, graph);
            actions.extend(self.free_after_forward(unit, false, graph));
        }
    }

    /// Begins any unit's forward. Returns the pass that the forward belongs to.
    fn enter(&mut self, unit: usize, graph: bool, actions: &mut Vec<Action>) -> usize {
        let step = &mut self.step;
        step.forwards_begun += 1;
        let position = step.forward_order.len();
        step.forward_order.push(unit);
        let last = &step.last_forward_order;
        let as_last_time = last.get(position) == Some(&unit);
        let followed = last.get(position + 1).copied().filter(|_| as_last_time);
        let state = &mut step.units[unit];
        state.ran_forward |= graph;
        if state.parts_run == 0 {
            (state.pass, state.from) = (step.forwards_begun, next_number());
            // Anchors of its own tell when backward is done with the pass.
            let again = step.ran.iter().any(|ran| ran.unit == unit).then_some(state.pass);
            if graph && again != std::mem::replace(&mut state.anchors_of, again) {
                actions.push(Action::NextPass { unit, pass: again });
            }
        }
        let pass = state.pass;
        actions.extend([Action::Gather(unit), Action::Await(unit)]);
        let next = next(&self.rules[unit].forward_prefetch, &followed, self.settings);
        step.units[unit].left_by_forward = true;
        for &unit in next {
            step.units[unit].left_by_forward = true;
            actions.push(Action::Gather(unit));
        }
        pass
    }

    /// Notes a forward that has ended.
    fn note_run(&mut self, unit: usize, pass: usize, graph: bool) {
        let step = &mut self.step;
        step.units[unit].left_by_forward = true;
        if !graph {
            return; // backward does not come to it
        }
        // The last of several parts counts.
        step.ran.retain(|ran| ran.pass != pass);
        if step.ran.len() == MOST_PASSES {
            step.ran.drain(..MOST_PASSES / 2);
        }
        let nodes = step.units[unit].from..next_number();
        step.ran.push(Ran { unit, pass, ended: step.forwards_begun, nodes });
    }

    /// What becomes of a unit's parameters after forward.
    fn free_after_forward(&self, unit: usize, is_root: bool, graph: bool) -> Option<Action> {
        match self.rules[unit].reshard_after_forward {
            _ if !graph => Some(Action::Free(unit)),
            ReshardAfterForward::Never => None,
            ReshardAfterForward::Default if is_root => None,
            ReshardAfterForward::Default | ReshardAfterForward::Always => Some(Action::Free(unit)),
            ReshardAfterForward::To(ranks) => Some(Action::FreeBut { unit, ranks }),
        }
    }
}
