//! A made-up rank's backward.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, Call, Failed, Forwards, Made, Rank, Reach, Reached, count};

/// How many uses of each parameter backward has still to come to: of all passes, and of one with an anchor of its own.
#[derive(Default)]
struct Left {
    all: BTreeMap<(usize, usize), usize>,
    of_pass: BTreeMap<(usize, usize, usize), usize>,
}

/// The nodes that backward comes to, in its order, and where it comes to parameters.
#[derive(Default)]
struct Walk {
    numbers: Vec<usize>,
    uses: Vec<(usize, usize)>,
    left: Left,
}

impl Walk {
    fn of(forwards: &Forwards<'_>, reached: &Reached) -> Self {
        let mut walk = Walk::default();
        for (root, (call, made)) in forwards.iter().enumerate().rev() {
            walk.call(call, root, &mut vec![], made, reached);
        }
        walk
    }

    fn call(
        &mut self,
        call: &Call,
        root: usize,
        place: &mut Vec<usize>,
        all: &BTreeMap<Vec<usize>, Made>,
        reached: &Reached,
    ) {
        if !reached.contains(&(root, place.clone())) {
            return;
        }
        let made = &all[place];
        self.numbers.extend(made.hook.map(|(number, _)| number));
        for late in [true, false] {
            for &param in call.uses.iter().filter(|param| (*param % 2 == 1) == late) {
                let (number, pass) = made.uses[&param];
                self.uses.push((call.unit, self.numbers.len()));
                self.numbers.push(number);
                *self.left.all.entry((call.unit, param)).or_default() += 1;
                if let Some(pass) = pass {
                    *self.left.of_pass.entry((call.unit, param, pass)).or_default() += 1;
                }
            }
            if late {
                for (position, inner) in call.inner.iter().enumerate().rev() {
                    place.push(position);
                    self.call(inner, root, place, all, reached);
                    place.pop();
                }
            }
        }
    }
}

impl Rank<'_> {
    /// Begins a backward; returns where it comes to each unit, where ranks may differ.
    pub(in crate::fsdp::step::order::tests) fn backward_begins(
        &mut self,
        forwards: &Forwards<'_>,
        reached: &Reached,
    ) -> Vec<Option<Reach>> {
        self.order.backward_begins().unwrap();
        self.complete.iter_mut().for_each(BTreeSet::clear);
        let walk = Walk::of(forwards, reached);
        if self.model.fixed {
            (0..self.model.units.len()).for_each(|unit| self.gather_shards(unit));
            return self.order.reach(&walk.numbers, &walk.uses);
        }
        if self.order.ran_again() {
            self.order.plan_passes(&walk.numbers);
        }
        vec![]
    }

    /// Runs a backward over the calls that `reached` has, in reverse. `again` is true after the first.
    pub(in crate::fsdp::step::order::tests) fn backward(
        &mut self,
        forwards: &Forwards<'_>,
        reached: &Reached,
        is_last: bool,
        again: bool,
    ) {
        if let Err(Failed) = self.try_backward(forwards, reached, is_last, again) {
            self.forget();
        }
    }

    fn try_backward(
        &mut self,
        forwards: &Forwards<'_>,
        reached: &Reached,
        is_last: bool,
        again: bool,
    ) -> Result<(), Failed> {
        self.order.settings.is_last_backward = is_last;
        let calls: usize = forwards.iter().map(|(call, _)| count(call)).sum();
        let mut units = self.begun.clone();
        units.sort_unstable();
        units.dedup();
        let once = units.len() == self.begun.len() && units.len() == calls;
        self.is_plain = self.is_fresh && !again && forwards.len() == 1 && once && reached.len() == calls;
        self.is_plain &= !self.order.is_planned();
        let before = self.strays.clone();
        let outcome = (|| -> Result<(), Failed> {
            let (_, actions) = self.order.before_the_graph();
            self.open.extend(actions.iter().filter_map(|action| match action {
                Action::Await(unit) => Some(*unit),
                _ => None,
            }));
            self.note_planned(&actions);
            if let (Some(Action::Await(first)), false) =
                (actions.iter().find(|action| matches!(action, Action::Await(_))), self.order.is_planned())
            {
                self.look_ahead(*first, &actions, self.model.units[*first].rules.backward_prefetch.len());
            }
            self.carry_out(actions)?;
            let mut left = Walk::of(forwards, reached).left;
            for (root, (call, made)) in forwards.iter().enumerate().rev() {
                self.backward_of(call, root, &mut vec![], made, reached, &mut left)?;
            }
            let actions = self.order.backward_ends();
            self.note_planned(&actions);
            self.carry_out(actions)
        })();
        let planned = self.order.is_planned();
        self.order.backward_is_over();
        outcome?;
        // What is inside a unit by name may come before it.
        let is_flat = self.model.units.iter().all(|unit| unit.rules.around.is_empty());
        if self.is_plain && is_flat && !planned && !self.has_lists() {
            assert!(self.strays.is_subset(&before), "gathered ahead, and not next: {:?}", self.strays);
        }
        self.is_fresh = is_last;
        self.open.clear();
        self.kept.clear();
        self.ahead.clear();
        self.strays.clear();
        self.complete.iter_mut().for_each(BTreeSet::clear);
        assert!(self.collected.iter().all(BTreeSet::is_empty), "gradients that are not reduced: {:?}", self.collected);
        // All that was gathered is freed.
        self.check_bound();
        self.shards_are_fresh = !is_last;
        if is_last {
            self.reductions.finish().unwrap();
            self.drop_shards();
        }
        Ok(())
    }

    /// A plan gathers units that this rank may not come to.
    fn note_planned(&mut self, actions: &[Action]) {
        for action in actions {
            if let (Action::Gather(unit), true) = (*action, self.order.is_planned()) {
                self.ahead.insert(unit);
            }
        }
    }

    fn begin_unit(&mut self, unit: usize, actions: Vec<Action>) -> Result<(), Failed> {
        if self.order.is_planned() {
            self.note_planned(&actions);
        } else {
            self.look_ahead(unit, &actions, self.model.units[unit].rules.backward_prefetch.len());
        }
        self.open.push(unit);
        self.carry_out(actions)?;
        // Units that backward is done with do not hold gradients back for those of their parameters that were not used.
        // Backward may come to what is inside a unit by name before it comes to the unit.
        let inside = |other: usize| self.model.units[other].rules.around.contains(&unit);
        let done = (0..self.collected.len()).filter(|&other| !self.path.contains(&other) && !inside(other));
        let mut late = done.filter(|&other| !self.collected[other].is_empty());
        assert!(!self.is_plain || late.next().is_none(), "gradients wait for nothing");
        Ok(())
    }

    fn backward_of(
        &mut self,
        call: &Call,
        root: usize,
        place: &mut Vec<usize>,
        all: &BTreeMap<Vec<usize>, Made>,
        reached: &Reached,
        left: &mut Left,
    ) -> Result<(), Failed> {
        if !reached.contains(&(root, place.clone())) {
            return Ok(());
        }
        let made = &all[place];
        if let Some((_, pass)) = made.hook {
            let actions = self.order.before_unit(call.unit, Some(pass)).unwrap();
            self.begin_unit(call.unit, actions)?;
        }
        self.path.push(call.unit);
        // Some parameters are used after the calls inside, and some before.
        for late in [true, false] {
            for &param in call.uses.iter().filter(|param| (*param % 2 == 1) == late) {
                self.use_of(call.unit, param, made.uses[&param].1, left)?;
            }
            if late {
                for (position, inner) in call.inner.iter().enumerate().rev() {
                    place.push(position);
                    self.backward_of(inner, root, place, all, reached, left)?;
                    place.pop();
                }
            }
        }
        self.path.pop();
        Ok(())
    }

    /// Backward comes to a use of a parameter.
    fn use_of(&mut self, unit: usize, param: usize, pass: Option<usize>, left: &mut Left) -> Result<(), Failed> {
        if self.is_by_name(unit) {
            let actions = self.order.used(unit, true, !self.there[unit].contains(&param)).unwrap();
            if !actions.is_empty() {
                self.begin_unit(unit, actions)?;
            }
        }
        assert!(self.there[unit].contains(&param), "backward of {unit} came to parameter {param}, which is not there");
        if self.model.units[unit].params[param] {
            self.collected[unit].insert(param);
        }
        if let Some(pass) = pass {
            let of_pass = left.of_pass.get_mut(&(unit, param, pass)).unwrap();
            *of_pass -= 1;
            if *of_pass == 0 && self.model.units[unit].params[param] {
                let action = self.order.pass_complete(unit, param, pass);
                self.carry_out(action)?;
            }
        }
        let all = left.all.get_mut(&(unit, param)).unwrap();
        *all -= 1;
        if *all > 0 || !self.model.units[unit].params[param] {
            return Ok(());
        }
        let (is_done, actions) = self.order.gradient_complete(unit, param).unwrap();
        if is_done {
            self.complete[unit].insert(param);
        }
        if self.model.units[unit].rules.reshard_after_backward {
            assert_eq!(actions[0], Action::FreeParameter { unit, position: param });
        }
        self.carry_out(actions)?;
        let trainable = self.model.units[unit].params.iter().enumerate().filter(|(_, trainable)| **trainable);
        let whole = trainable.map(|(param, _)| param).all(|param| self.complete[unit].contains(&param));
        if whole && !self.order.is_planned() {
            assert!(self.collected[unit].is_empty(), "the gradients of {unit} are whole and wait");
        }
        Ok(())
    }
}
