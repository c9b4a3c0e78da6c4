//! A made-up rank that does what the order says.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::log::{Log, Queue, Reducing};
use super::model::{Call, Iteration, Model, count, reach};
use crate::fsdp::step::order::planned::Reach;
use crate::fsdp::step::order::{Action, Order};
use crate::fsdp::step::reductions::Reductions;

mod backward;
mod forward;

/// Nodes that a call left in the graph.
#[derive(Default)]
pub(super) struct Made {
    /// The number and the pass of the hook of its outputs.
    hook: Option<(usize, usize)>,
    /// Number of each use of a parameter, and the pass whose anchor was used.
    uses: BTreeMap<usize, (usize, Option<usize>)>,
}

/// The forwards of a step that keep graphs, with the nodes of each call.
pub(super) type Forwards<'a> = Vec<(&'a Call, BTreeMap<Vec<usize>, Made>)>;

/// The calls that a loss reaches: the forward and the place in it.
pub(super) type Reached = BTreeSet<(usize, Vec<usize>)>;

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
    /// Each unit's pass whose anchors its parameters have, and whether its shards are gathered.
    anchors: Vec<Option<usize>>,
    shards: Vec<bool>,
    shards_are_fresh: bool,
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
            anchors: vec![None; count],
            shards: vec![false; count],
            shards_are_fresh: false,
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

    pub(super) fn order(&mut self) -> &mut Order {
        &mut self.order
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
                    self.gather_shards(unit);
                    let at = self.log.borrow_mut().issue(Queue::Shards, ("gather", unit, missing.clone()));
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
            Action::Reduce(unit) => self.reduce(unit),
            Action::NextPass { unit, pass } => self.anchors[unit] = pass,
        }
    }

    /// Gathers the unit's shards over replicas that hold parts of them.
    pub(super) fn gather_shards(&mut self, unit: usize) {
        if self.model.divided && !std::mem::replace(&mut self.shards[unit], true) {
            let at = self.log.borrow_mut().issue(Queue::Replicas, ("shards", unit, BTreeSet::new()));
            self.log.borrow_mut().wait(at);
        }
    }

    fn drop_shards(&mut self) {
        self.shards.fill(false);
    }

    fn reduce(&mut self, unit: usize) {
        self.reductions.make_room(self.model.settings.max_reductions).unwrap();
        let mut params = std::mem::take(&mut self.collected[unit]);
        if self.model.fixed {
            // Those without a gradient take part with zeros.
            let all = self.model.units[unit].params.iter().enumerate();
            params = all.filter(|(_, trainable)| **trainable).map(|(param, _)| param).collect();
        }
        if !params.is_empty() {
            let at = self.log.borrow_mut().issue(Queue::Shards, ("reduce", unit, params.clone()));
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
        self.anchors = vec![None; count];
        self.drop_shards();
        self.shards_are_fresh = false;
        self.open.clear();
        self.kept.clear();
        self.ahead.clear();
        self.strays.clear();
        self.last = None;
        self.begun.clear();
        self.is_fresh = true;
        self.path.clear();
    }

    /// Runs the forwards of a step, of which each skips what is by name and the loss does not reach, where ranks may
    /// differ. `None` after a failure.
    pub(super) fn forwards<'i>(
        &mut self,
        iteration: &'i Iteration,
        reaches: &mut impl FnMut() -> bool,
    ) -> Option<Forwards<'i>> {
        self.left = iteration.fails_after;
        let mut forwards = vec![];
        self.is_fresh &= iteration.forwards.len() == 1;
        for (call, graph) in &iteration.forwards {
            match self.forward(call, *graph, &mut || !reaches()) {
                Ok(made) if *graph => forwards.push((call, made)),
                Ok(_) => {}
                Err(Failed) => {
                    self.forget();
                    return None;
                }
            }
        }
        self.is_fresh &= iteration.backwards > 0 && !forwards.is_empty();
        Some(forwards)
    }

    /// The calls that a loss reaches.
    pub(super) fn reached(&self, forwards: &Forwards<'_>, reaches: &mut impl FnMut() -> bool) -> Reached {
        let mut reached = BTreeSet::new();
        for (root, (call, _)) in forwards.iter().enumerate() {
            reach(call, root, &mut vec![], reaches, &mut reached);
        }
        // Backward does not reach skipped calls.
        reached.retain(|(root, place)| forwards[*root].1.contains_key(place));
        reached
    }
}
