//! Made-up models and what they do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::policy::ReshardAfterForward::{Always, Default, Never, To};
use crate::step::order::{StepSettings, UnitRules};

/// One `fully_shard` call.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) parent: Option<usize>,
    /// Of each parameter, whether it gets a gradient.
    pub(super) params: Vec<bool>,
    pub(super) rules: UnitRules,
}

/// A call of a unit's forward, with the calls inside it.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) unit: usize,
    /// Its own parameters that it uses.
    pub(super) uses: BTreeSet<usize>,
    pub(super) inner: Vec<Call>,
}

/// One step: forwards, and maybe their backward.
#[derive(Clone, Debug)]
pub(super) struct Iteration {
    pub(super) forwards: Vec<Call>,
    pub(super) backward: bool,
    pub(super) is_last: bool,
    /// The number of actions after which the step fails.
    pub(super) fails_after: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) units: Vec<Unit>,
    pub(super) settings: StepSettings,
    pub(super) replicated: bool,
    /// Whether ranks may use different units.
    pub(super) fixed: bool,
    pub(super) iterations: Vec<Iteration>,
}

/// Decisions, drawn one after the other.
pub(super) struct Tape(pub(super) VecDeque<u8>);

impl Tape {
    fn below(&mut self, n: usize) -> usize {
        usize::from(self.0.pop_front().unwrap_or(0)) % n
    }

    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    pub(super) fn model(&mut self, fixed: bool) -> Model {
        let count = 1 + self.below(7);
        let units = (0..count)
            .map(|unit| {
                let params: Vec<bool> = (0..self.below(4)).map(|_| !self.once_in(6)).collect();
                let trainable = params.iter().filter(|trainable| **trainable).count();
                let policy = [Default, Always, Never, To(2)][self.below(4)];
                let mut rules = UnitRules::new(trainable, policy);
                rules.reshard_after_backward = !self.once_in(10);
                if self.once_in(8) {
                    rules.forward_prefetch = (0..self.below(3)).map(|_| self.below(count)).collect();
                    rules.backward_prefetch = (0..self.below(3)).map(|_| self.below(count)).collect();
                }
                // Built bottom-up: what is around a unit is built after it.
                let parent = (unit + 1 < count).then(|| unit + 1 + self.below(count - unit - 1));
                Unit { parent, params, rules }
            })
            .collect();
        let settings = StepSettings {
            implicit_prefetch: !self.once_in(5),
            max_reductions: 1 + self.below(3),
            ..StepSettings::default()
        };
        let mut model = Model { units, settings, replicated: self.once_in(2), fixed, iterations: vec![] };
        let mut last: Option<Vec<Call>> = None;
        for _ in 0..1 + self.below(4) {
            let forwards = match last.clone().filter(|_| self.once_in(2)) {
                Some(same) => same,
                None => (0..1 + self.below(3) / 2)
                    .map(|_| {
                        // Nearly always the whole model, seldom a unit by itself.
                        let unit = if self.once_in(8) { self.below(count) } else { count - 1 };
                        self.call(&model, unit)
                    })
                    .collect(),
            };
            last = Some(forwards.clone());
            model.iterations.push(Iteration {
                forwards,
                backward: !self.once_in(5),
                is_last: !self.once_in(4),
                fails_after: (!fixed && self.once_in(4)).then(|| self.below(40)),
            });
        }
        model
    }

    fn call(&mut self, model: &Model, unit: usize) -> Call {
        let all = 0..model.units[unit].params.len();
        let uses = all.filter(|_| !self.once_in(8)).collect();
        let mut inside: Vec<usize> =
            (0..model.units.len()).filter(|&inner| model.units[inner].parent == Some(unit)).collect();
        let mut inner = vec![];
        while !inside.is_empty() {
            let next = if self.once_in(4) { self.below(inside.len()) } else { 0 };
            let next = inside.remove(next);
            // Nearly always used once.
            let times = [1, 1, 1, 1, 0, 2][self.below(6)];
            inner.extend((0..times).map(|_| self.call(model, next)));
        }
        Call { unit, uses, inner }
    }
}

/// The units of a call, in the order in which their forwards begin.
pub(super) fn units_of(call: &Call) -> Vec<usize> {
    std::iter::once(call.unit).chain(call.inner.iter().flat_map(units_of)).collect()
}

/// The calls that a loss reaches: those inside one that it does not reach are none.
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

/// How often a loss's backward comes to each parameter.
pub(super) fn count_uses(
    call: &Call,
    root: usize,
    place: &mut Vec<usize>,
    reached: &BTreeSet<(usize, Vec<usize>)>,
    uses: &mut BTreeMap<(usize, usize), usize>,
) {
    if !reached.contains(&(root, place.clone())) {
        return;
    }
    for &param in &call.uses {
        *uses.entry((call.unit, param)).or_default() += 1;
    }
    for (position, inner) in call.inner.iter().enumerate() {
        place.push(position);
        count_uses(inner, root, place, reached, uses);
        place.pop();
    }
}
