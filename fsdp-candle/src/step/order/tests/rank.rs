//! A made-up rank that does what the order says.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::log::{Log, Queue, Reducing};
use super::model::{Call, Iteration, Model, count, count_uses, reach};
use crate::step::order::{Action, Order};
use crate::step::reductions::Reductions;

mod forward;

/// An all-gather in flight: the parameters, and where it is queued.
type Flight = (BTreeSet<usize>, (Queue, usize));

/// A rank of a made-up world.
pub(super) struct Rank<'a> {
    model: &'a Model,
    order: Order,
    pub(super) log: Rc<RefCell<Log>>,
    reductions: Reductions<Reducing>,
    /// Of each unit, the parameters that are there, those on their way with their collective, those whose gradient is
    /// complete, and those with a gradient that waits for its reduction.
    there: Vec<BTreeSet<usize>>,
    flying: Vec<Option<Flight>>,
    complete: Vec<BTreeSet<usize>>,
    collected: Vec<BTreeSet<usize>>,
    /// Units whose forward runs or whose backward has begun, with a count.
    open: Vec<usize>,
    /// Units that a forward leaves gathered for backward.
    kept: BTreeSet<usize>,
    /// Units that were gathered ahead and come next, and those that did not.
    ahead: BTreeSet<usize>,
    strays: BTreeSet<usize>,
    /// The units of the last root forward in their order, those of this one, and whether the order of backward follows
    /// from this step's.
    last: Option<Vec<usize>>,
    begun: Vec<usize>,
    is_fresh: bool,
    /// Whether it does, each unit ran once, and the loss reaches all of them.
    is_plain: bool,
    /// The units whose calls backward goes through, the innermost last.
    path: Vec<usize>,
    left: Option<usize>,
}

/// The failure of a collective.
#[derive(Debug)]
pub(super) struct Failed;

impl<'a> Rank<'a> {
    pub(super) fn new(model: &'a Model) -> Self {
        let mut order = Order { settings: model.settings, ..Order::default() };
        model.units.iter().for_each(|unit| order.add(unit.rules.clone(), &[]));
        let count = model.units.len();
        Rank {
            model,
            order,
            log: Rc::default(),
            reductions: Reductions::new(),
            there: vec![BTreeSet::new(); count],
            flying: vec![None; count],
            complete: vec![BTreeSet::new(); count],
            collected: vec![BTreeSet::new(); count],
            open: vec![],
            kept: BTreeSet::new(),
            ahead: BTreeSet::new(),
            strays: BTreeSet::new(),
            last: None,
            begun: vec![],
            is_fresh: true,
            is_plain: false,
            path: vec![],
            left: None,
        }
    }

    fn is_by_name(&self, unit: usize) -> bool {
        self.model.units[unit].is_by_name()
    }

    fn gathered(&self) -> BTreeSet<usize> {
        (0..self.there.len()).filter(|&unit| !self.there[unit].is_empty() || self.flying[unit].is_some()).collect()
    }

    fn land(&mut self, unit: usize) -> BTreeSet<usize> {
        let Some((params, at)) = self.flying[unit].take() else { return BTreeSet::new() };
        self.log.borrow_mut().wait(at);
        params
    }

    fn carry_out(&mut self, actions: impl IntoIterator<Item = Action>) -> Result<(), Failed> {
        for action in actions {
            if let Some(left) = &mut self.left {
                *left = left.checked_sub(1).ok_or(Failed)?;
            }
            self.carry_out_one(action);
        }
        self.check_bound();
        Ok(())
    }

    fn carry_out_one(&mut self, action: Action) {
        match action {
            Action::Gather(unit) | Action::Await(unit) => {
                let done = |param: &usize| self.there[unit].contains(param) || self.complete[unit].contains(param);
                let missing: BTreeSet<usize> =
                    (0..self.model.units[unit].params.len()).filter(|param| !done(param)).collect();
                if self.flying[unit].is_none() && !missing.is_empty() {
                    let at = self.log.borrow_mut().issue(Queue::Gathers, ("gather", unit, missing.clone()));
                    self.flying[unit] = Some((missing, at));
                }
                if action == Action::Await(unit) {
                    let landed = self.land(unit);
                    self.there[unit].extend(landed);
                }
            }
            Action::Free(unit) => {
                self.land(unit);
                self.there[unit].clear();
            }
            Action::FreeBut { unit, .. } => self.there[unit].clear(),
            Action::FreeParameter { unit, position } => {
                self.there[unit].remove(&position);
            }
            Action::FreeFrozen(unit) => {
                let params = &self.model.units[unit].params;
                self.there[unit].retain(|&param| params[param]);
            }
            Action::Reduce { unit, apart } => self.reduce(unit, apart),
        }
    }

    fn reduce(&mut self, unit: usize, apart: bool) {
        self.reductions.make_room(self.model.settings.max_reductions).unwrap();
        let mut params = std::mem::take(&mut self.collected[unit]);
        if self.model.fixed {
            // Those without a gradient take part with zeros.
            let all = self.model.units[unit].params.iter().enumerate();
            params = all.filter(|(_, trainable)| **trainable).map(|(param, _)| param).collect();
        }
        assert_eq!(apart, self.model.fixed, "reductions of a fixed order queue apart");
        if !params.is_empty() {
            let queue = if apart { Queue::Apart } else { Queue::Gathers };
            let at = self.log.borrow_mut().issue(queue, ("reduce", unit, params.clone()));
            let log = self.log.clone();
            let Model { replicated, partial, .. } = *self.model;
            self.reductions.add(vec![Reducing { log, at, unit, params, replicated, partial }]);
            let reducing = self.log.borrow().reducing;
            assert!(reducing <= self.model.settings.max_reductions, "{reducing} reductions at once");
        }
    }

    /// Nothing is gathered but for a reason.
    fn check_bound(&self) {
        let open: BTreeSet<usize> = self.open.iter().copied().collect();
        let kept_after_backward =
            (0..self.there.len()).filter(|&unit| !self.model.units[unit].rules.reshard_after_backward);
        let mut rest = self.gathered();
        for unit in open.iter().chain(&self.kept).chain(&self.ahead).chain(&self.strays) {
            rest.remove(unit);
        }
        kept_after_backward.for_each(|unit| {
            rest.remove(&unit);
        });
        assert!(
            rest.is_empty(),
            "gathered for nothing: {rest:?}; open {:?}, kept {:?}, ahead {:?}, strays {:?}",
            self.open,
            self.kept,
            self.ahead,
            self.strays
        );
    }

    /// Notes what `actions` gather ahead of `unit`'s turn, given what was gathered before.
    fn look_ahead(&mut self, unit: usize, actions: &[Action], listed: usize) {
        self.ahead.remove(&unit);
        let missed = std::mem::take(&mut self.ahead);
        self.strays.extend(missed);
        self.strays.remove(&unit);
        let before = self.gathered();
        let awaited = |other: usize| actions.contains(&Action::Await(other));
        for action in actions {
            if let Action::Gather(other) = *action
                && !awaited(other)
                && !before.contains(&other)
                && !self.model.units[other].params.is_empty()
            {
                self.ahead.insert(other);
            }
        }
        if !self.model.fixed {
            assert!(self.ahead.len() <= listed.max(1), "{:?} are gathered ahead", self.ahead);
        }
    }

    fn has_lists(&self) -> bool {
        self.model
            .units
            .iter()
            .any(|unit| !(unit.rules.forward_prefetch.is_empty() && unit.rules.backward_prefetch.is_empty()))
    }

    /// Runs a backward over the calls that `reached` has, in reverse.
    fn backward(
        &mut self,
        forwards: &[(&Call, BTreeMap<Vec<usize>, bool>)],
        reached: &BTreeSet<(usize, Vec<usize>)>,
        is_last: bool,
    ) -> Result<(), Failed> {
        let parents: Vec<Option<usize>> = self.model.units.iter().map(|unit| unit.parent).collect();
        self.order.settings.is_last_backward = is_last;
        let first = self.order.backward_begins(self.model.fixed.then_some(parents.as_slice())).unwrap();
        self.complete.iter_mut().for_each(BTreeSet::clear);
        // How many calls that use a parameter backward will come to.
        let mut uses: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for (root, (call, _)) in forwards.iter().enumerate() {
            count_uses(call, root, &mut vec![], reached, &mut uses);
        }
        let calls: usize = forwards.iter().map(|(call, _)| count(call)).sum();
        let mut units = self.begun.clone();
        units.sort_unstable();
        units.dedup();
        let once = units.len() == self.begun.len() && units.len() == calls;
        self.is_plain = self.is_fresh && forwards.len() == 1 && once && reached.len() == calls;
        let before = self.strays.clone();
        let outcome = (|| -> Result<(), Failed> {
            if let Some(first) = first {
                self.before_unit(first)?;
            }
            let actions = self.order.before_the_graph();
            self.open.extend(actions.iter().filter_map(|action| match action {
                Action::Await(unit) => Some(*unit),
                _ => None,
            }));
            self.carry_out(actions)?;
            if self.model.fixed {
                let counts: Vec<usize> = (0..self.model.units.len())
                    .map(|unit| {
                        uses.keys().filter(|(of, param)| *of == unit && self.model.units[unit].params[*param]).count()
                    })
                    .collect();
                let actions = self.order.backward_reaches(&counts);
                self.note_fixed(&actions);
                self.carry_out(actions)?;
            }
            for (root, (call, hooks)) in forwards.iter().enumerate().rev() {
                self.backward_of(call, root, &mut vec![], hooks, reached, &mut uses)?;
            }
            let actions = self.order.backward_ends();
            self.note_fixed(&actions);
            self.carry_out(actions)
        })();
        self.order.backward_is_over();
        outcome?;
        // What is inside a unit by name may come before it.
        let is_flat = self.model.units.iter().all(|unit| unit.rules.around.is_empty());
        if self.is_plain && is_flat && !self.model.fixed && !self.has_lists() {
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
        if is_last {
            self.reductions.finish().unwrap();
        }
        Ok(())
    }

    /// A fixed order gathers units that this rank may not come to.
    fn note_fixed(&mut self, actions: &[Action]) {
        for action in actions {
            if let (Action::Gather(unit), true) = (*action, self.model.fixed) {
                self.ahead.insert(unit);
            }
        }
    }

    fn before_unit(&mut self, unit: usize) -> Result<(), Failed> {
        let actions = self.order.before_unit(unit).unwrap();
        self.begin_unit(unit, actions)
    }

    fn begin_unit(&mut self, unit: usize, actions: Vec<Action>) -> Result<(), Failed> {
        self.look_ahead(unit, &actions, self.model.units[unit].rules.backward_prefetch.len());
        self.open.push(unit);
        self.carry_out(actions)?;
        // Units that backward is done with do not hold gradients back for those of their parameters that were not used.
        // Backward may come to what is inside a unit by name before it comes to the unit.
        let inside = |other: usize| self.model.units[other].rules.around.contains(&unit);
        let done = (0..self.collected.len()).filter(|&other| !self.path.contains(&other) && !inside(other));
        let mut late = done.filter(|&other| !self.collected[other].is_empty());
        assert!(!self.is_plain || self.model.fixed || late.next().is_none(), "gradients wait for nothing");
        Ok(())
    }

    fn backward_of(
        &mut self,
        call: &Call,
        root: usize,
        place: &mut Vec<usize>,
        hooks: &BTreeMap<Vec<usize>, bool>,
        reached: &BTreeSet<(usize, Vec<usize>)>,
        uses: &mut BTreeMap<(usize, usize), usize>,
    ) -> Result<(), Failed> {
        if !reached.contains(&(root, place.clone())) {
            return Ok(());
        }
        if hooks[place] {
            self.before_unit(call.unit)?;
        }
        self.path.push(call.unit);
        // Some parameters are used after the calls inside, and some before.
        for late in [true, false] {
            for &param in call.uses.iter().filter(|param| (*param % 2 == 1) == late) {
                self.use_of(call.unit, param, uses)?;
            }
            if late {
                for (position, inner) in call.inner.iter().enumerate().rev() {
                    place.push(position);
                    self.backward_of(inner, root, place, hooks, reached, uses)?;
                    place.pop();
                }
            }
        }
        self.path.pop();
        Ok(())
    }

    /// Backward comes to a use of a parameter.
    fn use_of(&mut self, unit: usize, param: usize, uses: &mut BTreeMap<(usize, usize), usize>) -> Result<(), Failed> {
        if self.is_by_name(unit) {
            let actions = self.order.used(unit, true).unwrap();
            if !actions.is_empty() {
                self.begin_unit(unit, actions)?;
            }
        }
        assert!(self.there[unit].contains(&param), "backward of {unit} came to parameter {param}, which is not there");
        let left = uses.get_mut(&(unit, param)).unwrap();
        *left -= 1;
        if !self.model.units[unit].params[param] {
            return Ok(());
        }
        self.collected[unit].insert(param);
        if *left > 0 {
            return Ok(());
        }
        let actions = self.order.gradient_complete(unit, param).unwrap();
        self.complete[unit].insert(param);
        if self.model.units[unit].rules.reshard_after_backward {
            assert_eq!(actions[0], Action::FreeParameter { unit, position: param });
        }
        self.note_fixed(&actions);
        self.carry_out(actions)?;
        let trainable = self.model.units[unit].params.iter().enumerate().filter(|(_, trainable)| **trainable);
        if trainable.map(|(param, _)| param).all(|param| self.complete[unit].contains(&param)) && !self.model.fixed {
            assert!(self.collected[unit].is_empty(), "the gradients of {unit} are whole and wait");
        }
        Ok(())
    }

    /// What the schedule does after a failure.
    fn forget(&mut self) {
        self.order.forget_step();
        self.reductions.abandon();
        self.log.borrow_mut().reducing = 0;
        let count = self.model.units.len();
        self.there = vec![BTreeSet::new(); count];
        self.flying = vec![None; count];
        self.complete = vec![BTreeSet::new(); count];
        self.collected = vec![BTreeSet::new(); count];
        self.open.clear();
        self.kept.clear();
        self.ahead.clear();
        self.strays.clear();
        self.last = None;
        self.begun.clear();
        self.is_fresh = true;
        self.path.clear();
    }

    /// Runs a step with a loss that reaches what `reaches` says of each call, and a forward that skips of what is by
    /// name what it does not reach, where ranks may differ.
    pub(super) fn run(&mut self, iteration: &Iteration, mut reaches: impl FnMut() -> bool) {
        self.left = iteration.fails_after;
        let outcome = (|| -> Result<(), Failed> {
            let mut forwards = vec![];
            self.is_fresh &= iteration.forwards.len() == 1;
            for (call, graph) in &iteration.forwards {
                let hooks = self.forward(call, *graph, &mut || !reaches())?;
                if *graph {
                    forwards.push((call, hooks));
                }
            }
            if !iteration.backward || forwards.is_empty() {
                self.is_fresh = false;
                return Ok(());
            }
            let mut reached = BTreeSet::new();
            for (root, (call, _)) in forwards.iter().enumerate() {
                reach(call, root, &mut vec![], &mut reaches, &mut reached);
            }
            // What forward skipped.
            reached.retain(|(root, place)| forwards[*root].1.contains_key(place));
            self.backward(&forwards, &reached, iteration.is_last)
        })();
        self.left = None;
        if let Err(Failed) = outcome {
            self.forget();
        }
    }
}
