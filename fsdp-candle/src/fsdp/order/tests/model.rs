//! Random models and training steps.

use std::collections::{BTreeSet, VecDeque};

use crate::fsdp::order::{ParamCounts, UnitInfo};
use crate::fsdp::policy::ReshardAfterForward::{Always, Default, Never, To};
use crate::fsdp::settings::{ModelSettings, UnshardSettings};

/// A unit of one `fully_shard` call, or a unit by name.
#[derive(Clone)]
pub(super) struct Unit {
    pub(super) parent: Option<usize>,
    /// For each parameter, whether it gets a gradient.
    pub(super) params: Vec<bool>,
    pub(super) info: UnitInfo,
}

impl Unit {
    pub(super) fn counts(&self) -> ParamCounts {
        let trainable = self.params.iter().filter(|trainable| **trainable).count();
        ParamCounts { trainable, frozen: self.params.len() - trainable }
    }

    /// Returns whether the unit was made by name.
    pub(super) fn is_by_name(&self) -> bool {
        self.info.by_name_in.is_some()
    }
}

/// A call of a unit, or a use of a unit by name, with the calls and uses inside it.
#[derive(Clone)]
pub(super) struct Call {
    pub(super) unit: usize,
    /// The unit's own parameters that the call uses.
    pub(super) uses: BTreeSet<usize>,
    pub(super) inner: Vec<Call>,
}

/// One step: forwards, and any number of backwards.
#[derive(Clone)]
pub(super) struct Iteration {
    /// Forwards, each with whether it keeps a graph.
    pub(super) forwards: Vec<(Call, bool)>,
    /// Number of backwards, each of another loss.
    pub(super) backwards: usize,
    pub(super) is_last: bool,
    /// Number of actions after which the step fails.
    pub(super) fails_after: Option<usize>,
}

#[derive(Clone)]
pub(super) struct Model {
    pub(super) units: Vec<Unit>,
    pub(super) settings: ModelSettings,
    pub(super) replicated: bool,
    /// Whether gradients are terms over tensor-parallel ranks.
    pub(super) partial: bool,
    /// Whether ranks may use different units.
    pub(super) fixed: bool,
    /// Whether replicas divide shards among them.
    pub(super) replica_sharded: bool,
    pub(super) iterations: Vec<Iteration>,
}

/// Random decisions, drawn one after the other.
pub(super) struct Tape(pub(super) VecDeque<u8>);

impl Tape {
    fn below(&mut self, n: usize) -> usize {
        usize::from(self.0.pop_front().unwrap_or(0)) % n
    }

    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    pub(super) fn model(&mut self, fixed: bool) -> Model {
        let mut units: Vec<Unit> = vec![];
        let calls = 1 + self.below(5);
        for call in 0..calls {
            // Units by name come before the called unit that they are inside, in the order in which they were built.
            // Each comes before the units inside it.
            let by_name = [0, 0, 0, 1, 2, 3][self.below(6)];
            let called = units.len() + by_name;
            for _ in 0..by_name {
                let mut unit = self.unit();
                let mut chain = vec![called];
                chain.extend(units.last().filter(|last| last.info.by_name_in == Some(called)).map(|_| units.len() - 1));
                while let Some(around) = chain.last().and_then(|&at| units.get(at)?.parent).filter(|at| *at != called) {
                    chain.push(around);
                }
                unit.parent = Some(chain[self.below(chain.len())]);
                unit.info.by_name_in = Some(called);
                units.push(unit);
            }
            let mut unit = self.unit();
            // Models are built bottom-up: the enclosing unit comes later, and is set below.
            unit.parent = (call + 1 < calls).then_some(called);
            units.push(unit);
        }
        let count = units.len();
        for at in 0..count {
            if units[at].parent == Some(at) {
                // In a fixed order, units by name may be skipped, so no unit is inside them.
                let later = (at + 1..count).filter(|&other| !fixed || !units[other].is_by_name());
                let later: Vec<usize> = later.collect();
                units[at].parent = Some(later[self.below(later.len())]);
            }
            if self.once_in(8) {
                units[at].info.settings.forward_prefetch = (0..self.below(3)).map(|_| self.below(count)).collect();
                units[at].info.settings.backward_prefetch = (0..self.below(3)).map(|_| self.below(count)).collect();
            }
        }
        for at in 0..count {
            let mut outer = units[at].parent;
            while let Some(unit) = outer {
                if units[unit].is_by_name() {
                    units[at].info.enclosing.push(unit);
                }
                outer = units[unit].parent;
            }
        }
        let settings = ModelSettings {
            implicit_prefetch: !self.once_in(5),
            max_reductions: 1 + self.below(3),
            fixed_order: fixed,
            ..ModelSettings::default()
        };
        let (replicated, partial, replica_sharded) = (self.once_in(2), self.once_in(2), self.once_in(3));
        let mut model = Model { units, settings, replicated, partial, fixed, replica_sharded, iterations: vec![] };
        let mut last: Option<Vec<(Call, bool)>> = None;
        for _ in 0..1 + self.below(4) {
            let forwards = match last.clone().filter(|_| self.once_in(2)) {
                Some(same) => same,
                None => (0..[1, 1, 2, 3][self.below(4)])
                    .map(|_| {
                        // Nearly always the whole model, rarely one unit.
                        let called: Vec<usize> = (0..count).filter(|&unit| !model.units[unit].is_by_name()).collect();
                        let unit = if self.once_in(8) { called[self.below(called.len())] } else { count - 1 };
                        (self.call(&model, unit), !self.once_in(7))
                    })
                    .collect(),
            };
            last = Some(forwards.clone());
            model.iterations.push(Iteration {
                forwards,
                backwards: [1, 1, 1, 1, 2, 0][self.below(6)],
                is_last: !self.once_in(4),
                fails_after: (!fixed && self.once_in(4)).then(|| self.below(40)),
            });
        }
        model
    }

    fn unit(&mut self) -> Unit {
        let params: Vec<bool> = (0..self.below(4)).map(|_| !self.once_in(6)).collect();
        let policy = [Default, Always, Never, To(2)][self.below(4)];
        let mut info = UnitInfo { settings: UnshardSettings::new(policy), ..UnitInfo::default() };
        info.settings.reshard_after_backward = !self.once_in(10);
        Unit { parent: None, params, info }
    }

    fn call(&mut self, model: &Model, unit: usize) -> Call {
        let all = 0..model.units[unit].params.len();
        let uses = all.filter(|_| !self.once_in(8)).collect();
        let mut inside: Vec<usize> =
            (0..model.units.len()).filter(|&inner| model.units[inner].parent == Some(unit)).collect();
        let mut inner = vec![];
        while !inside.is_empty() {
            let next = if self.once_in(4) { self.below(inside.len()) } else { 0 };
            // In a fixed order, units by name are used in the order in which they were built.
            let next = if model.fixed && model.units[inside[next]].is_by_name() { 0 } else { next };
            let next = inside.remove(next);
            // Nearly always one use.
            let times = [1, 1, 1, 1, 0, 2][self.below(6)];
            let times = if model.fixed && model.units[next].is_by_name() { times.min(1) } else { times };
            inner.extend((0..times).map(|_| self.call(model, next)));
        }
        Call { unit, uses, inner }
    }
}

/// Returns whether ranks may use different units by name beside this one: only where no unit is called beside them.
pub(super) fn may_skip(model: &Model, unit: usize) -> bool {
    let called = model.units[unit].info.by_name_in;
    let is_called = |other: &Unit| !other.is_by_name() && other.parent == called;
    model.fixed && called.is_some() && !model.units.iter().any(is_called)
}

/// Returns the number of calls and uses in a call.
pub(super) fn count(call: &Call) -> usize {
    1 + call.inner.iter().map(count).sum::<usize>()
}

/// Adds the calls that a loss reaches. It reaches no calls inside an unreached call.
pub(super) fn reach(
    call: &Call,
    root: usize,
    place: &mut Vec<usize>,
    reaches: &mut impl FnMut() -> bool,
    reached: &mut BTreeSet<(usize, Vec<usize>)>,
) {
    if !reaches() {
        return;
    }
    reached.insert((root, place.clone()));
    for (position, inner) in call.inner.iter().enumerate() {
        place.push(position);
        reach(inner, root, place, reaches, reached);
        place.pop();
    }
}
