//! A simulated rank that executes the order's actions.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::log::{Log, Reducing};
use super::model::{Call, Iteration, Model, Unit, count, may_skip, reach};
use crate::autograd::next_number;
use crate::fsdp::backward_nodes::BackwardNodes;
use crate::fsdp::order::plan::Reach;
use crate::fsdp::order::{Action, Order};
use crate::fsdp::policy::ReshardAfterForward::Never;
use crate::fsdp::reduction::{Hop, ReductionQueue};

/// Nodes that a call made in the graph.
#[derive(Default)]
pub(super) struct Made {
    /// Number and pass of the hook on the outputs.
    hook: Option<(usize, usize)>,
    /// Number of each use of a parameter, and the pass of the anchor.
    uses: BTreeMap<usize, (usize, Option<usize>)>,
}

/// The forwards of a step that keep a graph, with the nodes of each call.
pub(super) type Forwards<'a> = Vec<(&'a Call, BTreeMap<Vec<usize>, Made>)>;

/// The calls that a loss reaches: index of the forward, and place of the call in it.
pub(super) type Reached = BTreeSet<(usize, Vec<usize>)>;

/// A pending all-gather: its parameters, and its position in the log.
type Pending = (BTreeSet<usize>, (Hop, usize));

/// A simulated rank.
pub(super) struct Rank<'a> {
    model: &'a Model,
    order: Order,
    pub(super) log: Rc<RefCell<Log>>,
    reductions: ReductionQueue<Reducing>,
    /// For each unit: unsharded parameters, the pending all-gather, parameters with a complete gradient, and parameters
    /// with a gradient that waits for its reduction.
    unsharded: Vec<BTreeSet<usize>>,
    pending: Vec<Option<Pending>>,
    complete: Vec<BTreeSet<usize>>,
    accumulated: Vec<BTreeSet<usize>>,
    /// For each unit: the pass of its anchors, and whether its shards are gathered over replicas.
    anchors: Vec<Option<usize>>,
    shards: Vec<bool>,
    shards_are_fresh: bool,
    /// Units whose forward runs or whose backward has begun, once for each time.
    running: Vec<usize>,
    /// Units that a forward leaves unsharded for backward.
    kept: BTreeSet<usize>,
    /// Prefetched units, and prefetched units that did not come next.
    prefetched: BTreeSet<usize>,
    mispredicted: BTreeSet<usize>,
    /// Units of the last root forward in their order, units of this forward, and whether the order of backward follows
    /// from this step's forwards.
    last: Option<Vec<usize>>,
    begun: Vec<usize>,
    is_fresh: bool,
    /// Whether it does, each unit ran once, and the loss reaches all units.
    is_plain: bool,
    /// Units whose calls backward is in, the innermost last.
    path: Vec<usize>,
    left: Option<usize>,
}

/// Units that a root's forward gathers again.
pub(super) fn may_be_stale(unit: usize) -> bool {
    unit % 2 == 1
}

/// The failure of a collective.
#[derive(Debug)]
pub(super) struct Failed;

impl<'a> Rank<'a> {
    pub(super) fn new(model: &'a Model) -> Self {
        let mut order = Order { settings: model.settings, ..Order::default() };
        model.units.iter().for_each(|unit| order.add(unit.info.clone(), &[]));
        let count = model.units.len();
        Rank {
            model,
            order,
            log: Rc::default(),
            reductions: ReductionQueue::default(),
            unsharded: vec![BTreeSet::new(); count],
            pending: vec![None; count],
            complete: vec![BTreeSet::new(); count],
            accumulated: vec![BTreeSet::new(); count],
            anchors: vec![None; count],
            shards: vec![false; count],
            shards_are_fresh: false,
            running: vec![],
            kept: BTreeSet::new(),
            prefetched: BTreeSet::new(),
            mispredicted: BTreeSet::new(),
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
        (0..self.unsharded.len())
            .filter(|&unit| !self.unsharded[unit].is_empty() || self.pending[unit].is_some())
            .collect()
    }

    fn wait_for_unshard(&mut self, unit: usize) -> BTreeSet<usize> {
        let Some((params, at)) = self.pending[unit].take() else { return BTreeSet::new() };
        self.log.borrow_mut().wait(at);
        params
    }

    fn execute(&mut self, actions: impl IntoIterator<Item = Action>) -> Result<(), Failed> {
        for action in actions {
            if let Some(left) = &mut self.left {
                *left = left.checked_sub(1).ok_or(Failed)?;
            }
            self.execute_one(action);
        }
        self.check_bound();
        Ok(())
    }

    fn execute_one(&mut self, action: Action) {
        match action {
            Action::Unshard(unit) | Action::WaitForUnshard(unit) => {
                let done = |param: &usize| self.unsharded[unit].contains(param) || self.complete[unit].contains(param);
                let missing: BTreeSet<usize> =
                    (0..self.model.units[unit].params.len()).filter(|param| !done(param)).collect();
                if self.pending[unit].is_none() && !missing.is_empty() {
                    self.gather_shards(unit);
                    let at = self.log.borrow_mut().issue(Hop::Shards, ("gather", unit, missing.clone()));
                    self.pending[unit] = Some((missing, at));
                }
                if action == Action::WaitForUnshard(unit) {
                    let unsharded = self.wait_for_unshard(unit);
                    self.unsharded[unit].extend(unsharded);
                }
            }
            Action::Reshard(unit) => {
                self.wait_for_unshard(unit);
                self.unsharded[unit].clear();
            }
            Action::ReshardTo { unit, .. } => self.unsharded[unit].clear(),
            Action::ReshardParam { unit, position } => {
                self.unsharded[unit].remove(&position);
            }
            Action::ReshardFrozen(unit) => {
                let params = &self.model.units[unit].params;
                self.unsharded[unit].retain(|&param| params[param]);
            }
            Action::Reduce(unit) => self.reduce(unit),
            Action::BeginPass { unit, pass } => self.anchors[unit] = pass,
        }
    }

    /// Gathers the unit's shards over the replicas that divide them.
    pub(super) fn gather_shards(&mut self, unit: usize) {
        if self.model.replica_sharded && !std::mem::replace(&mut self.shards[unit], true) {
            let at = self.log.borrow_mut().issue(Hop::Replicas, ("shards", unit, BTreeSet::new()));
            self.log.borrow_mut().wait(at);
        }
    }

    fn drop_shards(&mut self) {
        self.shards.fill(false);
    }

    fn reduce(&mut self, unit: usize) {
        self.reductions.limit(self.model.settings.max_reductions).unwrap();
        let mut params = std::mem::take(&mut self.accumulated[unit]);
        if self.model.fixed {
            // Parameters without a gradient take part with zeros.
            let all = self.model.units[unit].params.iter().enumerate();
            params = all.filter(|(_, trainable)| **trainable).map(|(param, _)| param).collect();
        }
        if !params.is_empty() {
            let at = self.log.borrow_mut().issue(Hop::Shards, ("reduce", unit, params.clone()));
            let log = self.log.clone();
            let Model { replicated, partial, .. } = *self.model;
            self.reductions.add(vec![Reducing { log, at, unit, params, replicated, partial }]);
            let reducing = self.log.borrow().reducing;
            assert!(reducing <= self.model.settings.max_reductions, "{reducing} reductions at once");
        }
    }

    /// Checks that each unsharded unit has a reason to be.
    fn check_bound(&self) {
        let open: BTreeSet<usize> = self.running.iter().copied().collect();
        let kept_after_backward =
            (0..self.unsharded.len()).filter(|&unit| !self.model.units[unit].info.settings.reshard_after_backward);
        let mut rest = self.gathered();
        for unit in open.iter().chain(&self.kept).chain(&self.prefetched).chain(&self.mispredicted) {
            rest.remove(unit);
        }
        kept_after_backward.for_each(|unit| {
            rest.remove(&unit);
        });
        assert!(
            rest.is_empty(),
            "unsharded without a reason: {rest:?}; running {:?}, kept {:?}, prefetched {:?}, mispredicted {:?}",
            self.running,
            self.kept,
            self.prefetched,
            self.mispredicted
        );
    }

    /// Records the units that `actions` prefetch when `unit` begins.
    fn note_prefetch(&mut self, unit: usize, actions: &[Action], listed: usize) {
        self.prefetched.remove(&unit);
        let missed = std::mem::take(&mut self.prefetched);
        self.mispredicted.extend(missed);
        self.mispredicted.remove(&unit);
        let before = self.gathered();
        let awaited = |other: usize| actions.contains(&Action::WaitForUnshard(other));
        for action in actions {
            if let Action::Unshard(other) = *action
                && !awaited(other)
                && !before.contains(&other)
                && !self.model.units[other].params.is_empty()
            {
                self.prefetched.insert(other);
            }
        }
        if !self.model.fixed {
            assert!(self.prefetched.len() <= listed.max(1), "{:?} are prefetched", self.prefetched);
        }
    }

    fn has_lists(&self) -> bool {
        self.model.units.iter().any(|unit| {
            !(unit.info.settings.forward_prefetch.is_empty() && unit.info.settings.backward_prefetch.is_empty())
        })
    }

    /// Resets the rank after a failure, as the schedule does.
    fn reset(&mut self) {
        self.order.reset();
        self.reductions.discard();
        self.log.borrow_mut().reducing = 0;
        let (order, log, left) = (std::mem::take(&mut self.order), self.log.clone(), self.left);
        *self = Rank { order, log, left, ..Rank::new(self.model) };
    }

    /// Runs the forwards of a step. Where ranks may differ, each skips units by name that the loss does not reach.
    /// Returns `None` after a failure.
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
                    self.reset();
                    return None;
                }
            }
        }
        self.is_fresh &= iteration.backwards > 0 && !forwards.is_empty();
        Some(forwards)
    }

    /// Returns the calls that a loss reaches.
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

/// Forward.
impl Rank<'_> {
    /// Runs a forward. Returns the graph nodes of each call, by its place.
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
        let missed = std::mem::take(&mut self.prefetched);
        self.mispredicted.extend(missed);
        let in_turn = self.model.fixed && self.model.units.iter().any(Unit::is_by_name);
        if self.last.as_ref() == Some(&self.begun) && !self.has_lists() && !in_turn {
            assert!(self.mispredicted.is_empty(), "prefetched, and not next: {:?}", self.mispredicted);
        }
        self.last = Some(self.begun.clone());
        if !graph {
            self.drop_shards();
            assert!(all.values().all(|made| made.hook.is_none()), "a hook without a graph");
            let left = self.gathered().into_iter().filter(|unit| self.begun.contains(unit));
            let left: Vec<usize> = left.filter(|unit| !self.mispredicted.contains(unit)).collect();
            assert!(left.is_empty(), "{left:?} are unsharded after a forward without a graph");
        }
        Ok(all)
    }

    /// Records the forwards of units by name that the actions begin and end.
    fn note_by_name(&mut self, actions: &[Action]) {
        for action in actions {
            match *action {
                Action::WaitForUnshard(unit) if self.is_by_name(unit) => {
                    self.begun.push(unit);
                    self.running.push(unit);
                    if self.model.units[unit].info.settings.reshard_after_forward == Never {
                        self.kept.insert(unit);
                    }
                }
                Action::Reshard(unit) | Action::ReshardTo { unit, .. } if self.is_by_name(unit) => {
                    self.running.retain(|&open| open != unit);
                    self.kept.remove(&unit);
                }
                _ => {}
            }
        }
    }

    /// Records units that a fixed order or a plan unshards, whether this rank comes to them or not.
    fn note_unshards(&mut self, actions: &[Action]) {
        if self.model.fixed || self.order.is_planned() {
            self.prefetched.extend(actions.iter().filter_map(|action| match action {
                Action::Unshard(unit) => Some(*unit),
                _ => None,
            }));
        }
    }

    /// Executes the actions of several units by name, one unit after the other.
    fn execute_noted(&mut self, mut actions: &[Action]) -> Result<(), Failed> {
        while let Some(first) = actions.first() {
            if matches!(first, Action::BeginPass { .. }) {
                self.execute_one(*first);
                actions = &actions[1..];
                continue;
            }
            let begins =
                matches!((first, actions.get(1)), (Action::Unshard(a), Some(Action::WaitForUnshard(b))) if a == b);
            let (now, rest) = actions.split_at(1 + usize::from(begins));
            self.note_by_name(now);
            match (begins, first) {
                (true, Action::Unshard(unit)) => drop(self.prefetched.remove(unit)),
                _ => self.note_unshards(now),
            }
            self.execute(now.to_vec())?;
            actions = rest;
        }
        Ok(())
    }

    /// Uses a parameter of a unit by name.
    fn use_by_name(&mut self, unit: usize, graph: bool) -> Result<(), Failed> {
        let actions = self.order.pre_use(unit, graph, false).unwrap();
        if actions.is_empty() {
            return Ok(());
        }
        let opened = actions.iter().filter(|action| matches!(action, Action::WaitForUnshard(_))).count();
        assert!(opened == 1 || self.model.fixed, "one use begins {opened} units");
        let ends = |action: &&Action| matches!(action, Action::Reshard(_) | Action::ReshardTo { .. });
        let (ended, begun): (Vec<Action>, Vec<Action>) = match self.model.fixed {
            true => (vec![], actions),
            false => actions.iter().copied().partition(|action| ends(&action)),
        };
        self.note_by_name(&ended);
        self.execute(ended)?;
        if !self.model.fixed {
            self.note_prefetch(unit, &begun, self.model.units[unit].info.settings.forward_prefetch.len());
        }
        self.execute_noted(&begun)
    }

    /// Uses the call's own parameters: those before the calls inside it, or those after.
    fn use_all(&mut self, call: &Call, late: bool, graph: bool, made: &mut Made) -> Result<(), Failed> {
        for &param in call.uses.iter().filter(|param| (*param % 2 == 1) == late) {
            if self.is_by_name(call.unit) {
                self.use_by_name(call.unit, graph)?;
            }
            assert!(self.unsharded[call.unit].contains(&param), "forward used parameter {param} of {}", call.unit);
            made.uses.insert(param, (next_number(), self.anchors[call.unit]));
        }
        Ok(())
    }

    /// Runs a forward. `all` gets the graph nodes of each call, by its place.
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
        let (forward, actions) = self.order.pre_forward(unit, graph, may_be_stale).unwrap();
        assert_eq!(forward.is_root, place.is_empty());
        let outcome = (|| -> Result<(), Failed> {
            let ends = |action: &&Action| matches!(action, Action::Reshard(_) | Action::ReshardTo { .. });
            let frees = actions.iter().take_while(ends).count();
            self.note_by_name(&actions[..frees]);
            if forward.is_root {
                self.execute(actions[..frees].to_vec())?;
                let gathered = self.gathered();
                self.kept.retain(|unit| gathered.contains(unit) && !may_be_stale(*unit));
                self.mispredicted.clear();
                self.prefetched.clear();
                self.check_bound();
            } else {
                let by_name = |action: &Action| match action {
                    Action::Reshard(unit) | Action::ReshardTo { unit, .. } => self.is_by_name(*unit),
                    _ => false,
                };
                assert!(actions[..frees].iter().all(by_name), "a forward inside another frees only units by name");
                self.execute(actions[..frees].to_vec())?;
            }
            let actions = &actions[frees..];
            self.note_prefetch(unit, actions, self.model.units[unit].info.settings.forward_prefetch.len());
            self.running.push(unit);
            self.begun.push(unit);
            self.execute(actions.to_vec())?;
            assert_eq!(self.unsharded[unit].len(), self.model.units[unit].params.len(), "forward of {unit}");
            let mut made = Made::default();
            self.use_all(call, false, graph, &mut made)?;
            for (position, inner) in call.inner.iter().enumerate() {
                place.push(position);
                self.forward_of(inner, graph, skips, place, all)?;
                place.pop();
            }
            self.use_all(call, true, graph, &mut made)?;
            let (hook, actions) = self.order.post_forward(unit, forward, 1);
            made.hook = hook.then(|| (next_number(), forward.pass));
            all.insert(place.clone(), made);
            let frees = |action: &Action| match action {
                Action::Reshard(freed) | Action::ReshardTo { unit: freed, .. } => *freed == unit,
                _ => false,
            };
            let freed = actions.iter().any(frees);
            let own: Vec<Action> = actions.iter().copied().filter(frees).collect();
            let by_name: Vec<Action> = actions.into_iter().filter(|action| !frees(action)).collect();
            self.execute_noted(&by_name)?;
            // Units by name that stay unsharded have ended as well.
            while self.running.pop().is_some_and(|open| open != unit) {}
            match freed {
                true => self.kept.remove(&unit),
                false => self.kept.insert(unit),
            };
            self.execute(own)
        })();
        self.order.end_forward(forward, None);
        outcome
    }
}

/// Number of uses of each parameter that backward has still to process: of all passes, and of each further pass.
#[derive(Default)]
struct Left {
    all: BTreeMap<(usize, usize), usize>,
    of_pass: BTreeMap<(usize, usize, usize), usize>,
}

/// The nodes that backward processes, in its order, and the positions of parameters.
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
    /// Begins a backward. Returns where it comes to each unit, if ranks may differ.
    pub(super) fn backward_begins(&mut self, forwards: &Forwards<'_>, reached: &Reached) -> Vec<Option<Reach>> {
        self.order.begin_backward(|unit| self.model.units[unit].counts()).unwrap();
        self.complete.iter_mut().for_each(BTreeSet::clear);
        let walk = Walk::of(forwards, reached);
        let nodes = BackwardNodes::new(walk.numbers);
        if self.model.fixed {
            (0..self.model.units.len()).for_each(|unit| self.gather_shards(unit));
            return self.order.reach(&nodes, &walk.uses);
        }
        if self.order.ran_again() {
            self.order.plan_passes(&nodes);
        }
        vec![]
    }

    /// Runs a backward over the calls in `reached`, in reverse. `again` is true after the first backward.
    pub(super) fn backward(&mut self, forwards: &Forwards<'_>, reached: &Reached, is_last: bool, again: bool) {
        if let Err(Failed) = self.try_backward(forwards, reached, is_last, again) {
            self.reset();
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
        let before = self.mispredicted.clone();
        let outcome = (|| -> Result<(), Failed> {
            let (_, actions) = self.order.root_pre_backward();
            self.running.extend(actions.iter().filter_map(|action| match action {
                Action::WaitForUnshard(unit) => Some(*unit),
                _ => None,
            }));
            self.note_unshards(&actions);
            if let (Some(Action::WaitForUnshard(first)), false) =
                (actions.iter().find(|action| matches!(action, Action::WaitForUnshard(_))), self.order.is_planned())
            {
                self.note_prefetch(*first, &actions, self.model.units[*first].info.settings.backward_prefetch.len());
            }
            self.execute(actions)?;
            let mut left = Walk::of(forwards, reached).left;
            for (root, (call, made)) in forwards.iter().enumerate().rev() {
                self.backward_of(call, root, &mut vec![], made, reached, &mut left)?;
            }
            let actions = self.order.root_post_backward();
            self.note_unshards(&actions);
            self.execute(actions)
        })();
        let planned = self.order.is_planned();
        self.order.end_backward();
        outcome?;
        // Backward may enter the units inside a unit by name before the unit.
        let is_flat = self.model.units.iter().all(|unit| unit.info.enclosing.is_empty());
        if self.is_plain && is_flat && !planned && !self.has_lists() {
            assert!(self.mispredicted.is_subset(&before), "prefetched, and not next: {:?}", self.mispredicted);
        }
        self.is_fresh = is_last;
        self.running.clear();
        self.kept.clear();
        self.prefetched.clear();
        self.mispredicted.clear();
        self.complete.iter_mut().for_each(BTreeSet::clear);
        assert!(self.accumulated.iter().all(BTreeSet::is_empty), "gradients were not reduced: {:?}", self.accumulated);
        // Everything that was unsharded is resharded.
        self.check_bound();
        self.shards_are_fresh = !is_last;
        if is_last {
            self.reductions.finish().unwrap();
            self.drop_shards();
        }
        Ok(())
    }

    fn begin_unit(&mut self, unit: usize, actions: Vec<Action>) -> Result<(), Failed> {
        if self.order.is_planned() {
            self.note_unshards(&actions);
        } else {
            self.note_prefetch(unit, &actions, self.model.units[unit].info.settings.backward_prefetch.len());
        }
        self.running.push(unit);
        self.execute(actions)?;
        // Unused parameters of a unit do not delay its reduction once backward is done with the unit. Backward may
        // enter to the units inside a unit by name before the unit.
        let inside = |other: usize| self.model.units[other].info.enclosing.contains(&unit);
        let done = (0..self.accumulated.len()).filter(|&other| !self.path.contains(&other) && !inside(other));
        let mut late = done.filter(|&other| !self.accumulated[other].is_empty());
        assert!(!self.is_plain || late.next().is_none(), "gradients wait without a reason");
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
            let actions = self.order.pre_backward(call.unit, Some(pass)).unwrap();
            self.begin_unit(call.unit, actions)?;
        }
        self.path.push(call.unit);
        // Some parameters are used after the calls inside, some before.
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

    /// Processes a use of a parameter in backward.
    fn use_of(&mut self, unit: usize, param: usize, pass: Option<usize>, left: &mut Left) -> Result<(), Failed> {
        if self.is_by_name(unit) {
            let actions = self.order.pre_use(unit, true, !self.unsharded[unit].contains(&param)).unwrap();
            if !actions.is_empty() {
                self.begin_unit(unit, actions)?;
            }
        }
        assert!(
            self.unsharded[unit].contains(&param),
            "backward of {unit} came to parameter {param}, which is sharded"
        );
        if self.model.units[unit].params[param] {
            self.accumulated[unit].insert(param);
        }
        if let Some(pass) = pass {
            let of_pass = left.of_pass.get_mut(&(unit, param, pass)).unwrap();
            *of_pass -= 1;
            if *of_pass == 0 && self.model.units[unit].params[param] {
                let action = self.order.post_pass(unit, param, pass);
                self.execute(action)?;
            }
        }
        let all = left.all.get_mut(&(unit, param)).unwrap();
        *all -= 1;
        if *all > 0 || !self.model.units[unit].params[param] {
            return Ok(());
        }
        let (is_done, actions) = self.order.post_accumulate_grad(unit, param).unwrap();
        if is_done {
            self.complete[unit].insert(param);
        }
        if self.model.units[unit].info.settings.reshard_after_backward {
            assert_eq!(actions[0], Action::ReshardParam { unit, position: param });
        }
        self.execute(actions)?;
        let trainable = self.model.units[unit].params.iter().enumerate().filter(|(_, trainable)| **trainable);
        let whole = trainable.map(|(param, _)| param).all(|param| self.complete[unit].contains(&param));
        if whole && !self.order.is_planned() {
            assert!(self.accumulated[unit].is_empty(), "the gradients of {unit} are complete and wait");
        }
        Ok(())
    }
}
