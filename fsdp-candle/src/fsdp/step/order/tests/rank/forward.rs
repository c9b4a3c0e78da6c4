//! A made-up rank's forward.

use std::collections::BTreeMap;

use super::{Failed, Made, Rank};
use crate::autograd::next_number;
use crate::fsdp::policy::ReshardAfterForward::Never;
use crate::fsdp::step::order::Action;
use crate::fsdp::step::order::tests::model::{Call, Unit, may_skip};

impl Rank<'_> {
    /// Runs a forward; returns by the place of each call or use what it left in the graph.
    pub(super) fn forward(
        &mut self,
        call: &Call,
        graph: bool,
        skips: &mut dyn FnMut() -> bool,
    ) -> Result<BTreeMap<Vec<usize>, Made>, Failed> {
        let mut all = BTreeMap::new();
        self.begun.clear();
        if !self.shards_are_fresh {
            self.drop_shards();
        }
        (0..self.model.units.len()).for_each(|unit| self.gather_shards(unit));
        self.forward_of(call, graph, skips, &mut vec![], &mut all)?;
        let missed = std::mem::take(&mut self.ahead);
        self.strays.extend(missed);
        let in_turn = self.model.fixed && self.model.units.iter().any(Unit::is_by_name);
        if self.last.as_ref() == Some(&self.begun) && !self.has_lists() && !in_turn {
            assert!(self.strays.is_empty(), "gathered ahead, and not next: {:?}", self.strays);
        }
        self.last = Some(self.begun.clone());
        if !graph {
            self.drop_shards();
            assert!(all.values().all(|made| made.hook.is_none()), "a hook without a graph");
            let left = self.gathered().into_iter().filter(|unit| self.begun.contains(unit));
            let left: Vec<usize> = left.filter(|unit| !self.strays.contains(unit)).collect();
            assert!(left.is_empty(), "{left:?} are gathered after a forward without a graph");
        }
        Ok(all)
    }

    /// Notes which forwards of units by name the actions begin and end.
    fn note_by_name(&mut self, actions: &[Action]) {
        for action in actions {
            match *action {
                Action::Await(unit) if self.is_by_name(unit) => {
                    self.begun.push(unit);
                    self.open.push(unit);
                    if self.model.units[unit].rules.reshard_after_forward == Never {
                        self.kept.insert(unit);
                    }
                }
                Action::Free(unit) | Action::FreeBut { unit, .. } if self.is_by_name(unit) => {
                    self.open.retain(|&open| open != unit);
                    self.kept.remove(&unit);
                }
                _ => {}
            }
        }
    }

    /// Units whose turn it is are gathered whether this rank uses them or not.
    fn note_fixed(&mut self, actions: &[Action]) {
        for action in actions {
            if let (Action::Gather(unit), true) = (*action, self.model.fixed) {
                self.ahead.insert(unit);
            }
        }
    }

    /// Carries out what happens to several units by name, one after the other.
    fn carry_out_noted(&mut self, mut actions: &[Action]) -> Result<(), Failed> {
        while let Some(first) = actions.first() {
            if matches!(first, Action::NextPass { .. }) {
                self.carry_out_one(*first);
                actions = &actions[1..];
                continue;
            }
            let begins = matches!((first, actions.get(1)), (Action::Gather(a), Some(Action::Await(b))) if a == b);
            let (now, rest) = actions.split_at(1 + usize::from(begins));
            self.note_by_name(now);
            match (begins, first) {
                (true, Action::Gather(unit)) => drop(self.ahead.remove(unit)),
                _ => self.note_fixed(now),
            }
            self.carry_out(now.to_vec())?;
            actions = rest;
        }
        Ok(())
    }

    /// A layer uses a parameter of a unit by name.
    fn touch(&mut self, unit: usize, graph: bool) -> Result<(), Failed> {
        let actions = self.order.used(unit, graph, false).unwrap();
        if actions.is_empty() {
            return Ok(());
        }
        let opened = actions.iter().filter(|action| matches!(action, Action::Await(_))).count();
        assert!(opened == 1 || self.model.fixed, "one use opens {opened} units");
        let ends = |action: &&Action| matches!(action, Action::Free(_) | Action::FreeBut { .. });
        let (ended, begun): (Vec<Action>, Vec<Action>) = match self.model.fixed {
            true => (vec![], actions),
            false => actions.iter().copied().partition(|action| ends(&action)),
        };
        self.note_by_name(&ended);
        self.carry_out(ended)?;
        if !self.model.fixed {
            self.look_ahead(unit, &begun, self.model.units[unit].rules.forward_prefetch.len());
        }
        self.carry_out_noted(&begun)
    }

    /// Uses the parameters that come before the calls inside, or after them.
    fn use_all(&mut self, call: &Call, late: bool, graph: bool, made: &mut Made) -> Result<(), Failed> {
        for &param in call.uses.iter().filter(|param| (*param % 2 == 1) == late) {
            if self.is_by_name(call.unit) {
                self.touch(call.unit, graph)?;
            }
            assert!(self.there[call.unit].contains(&param), "forward used parameter {param} of {}", call.unit);
            made.uses.insert(param, (next_number(), self.anchors[call.unit]));
        }
        Ok(())
    }

    /// Runs a forward; `all` gets, by the place of each call, what it left in the graph.
    fn forward_of(
        &mut self,
        call: &Call,
        graph: bool,
        skips: &mut dyn FnMut() -> bool,
        place: &mut Vec<usize>,
        all: &mut BTreeMap<Vec<usize>, Made>,
    ) -> Result<(), Failed> {
        let unit = call.unit;
        if self.is_by_name(unit) {
            if may_skip(self.model, unit) && skips() {
                return Ok(());
            }
            let mut made = Made::default();
            self.use_all(call, false, graph, &mut made)?;
            for (position, inner) in call.inner.iter().enumerate() {
                place.push(position);
                self.forward_of(inner, graph, skips, place, all)?;
                place.pop();
            }
            self.use_all(call, true, graph, &mut made)?;
            all.insert(place.clone(), made);
            return Ok(());
        }
        let (forward, actions) = self.order.forward_begins(unit, graph).unwrap();
        assert_eq!(forward.is_root, place.is_empty());
        let outcome = (|| -> Result<(), Failed> {
            let ends = |action: &&Action| matches!(action, Action::Free(_) | Action::FreeBut { .. });
            let frees = actions.iter().take_while(ends).count();
            self.note_by_name(&actions[..frees]);
            if forward.is_root {
                self.carry_out(actions[..frees].to_vec())?;
                self.kept.clear();
                self.strays.clear();
                self.ahead.clear();
                self.check_bound();
            } else {
                let by_name = |action: &Action| match action {
                    Action::Free(unit) | Action::FreeBut { unit, .. } => self.is_by_name(*unit),
                    _ => false,
                };
                assert!(actions[..frees].iter().all(by_name), "a forward inside another frees what is by name alone");
                self.carry_out(actions[..frees].to_vec())?;
            }
            let actions = &actions[frees..];
            self.look_ahead(unit, actions, self.model.units[unit].rules.forward_prefetch.len());
            self.open.push(unit);
            self.begun.push(unit);
            self.carry_out(actions.to_vec())?;
            assert_eq!(self.there[unit].len(), self.model.units[unit].params.len(), "forward of {unit}");
            let mut made = Made::default();
            self.use_all(call, false, graph, &mut made)?;
            for (position, inner) in call.inner.iter().enumerate() {
                place.push(position);
                self.forward_of(inner, graph, skips, place, all)?;
                place.pop();
            }
            self.use_all(call, true, graph, &mut made)?;
            let (hook, actions) = self.order.forward_ends(unit, forward, 1);
            made.hook = hook.then(|| (next_number(), forward.pass));
            all.insert(place.clone(), made);
            let frees = |action: &Action| match action {
                Action::Free(freed) | Action::FreeBut { unit: freed, .. } => *freed == unit,
                _ => false,
            };
            let freed = actions.iter().any(frees);
            let own: Vec<Action> = actions.iter().copied().filter(frees).collect();
            let by_name: Vec<Action> = actions.into_iter().filter(|action| !frees(action)).collect();
            self.carry_out_noted(&by_name)?;
            // Those by name that are kept have ended as well.
            while self.open.pop().is_some_and(|open| open != unit) {}
            match freed {
                true => self.kept.remove(&unit),
                false => self.kept.insert(unit),
            };
            self.carry_out(own)
        })();
        self.order.forward_is_over(forward);
        outcome
    }
}
